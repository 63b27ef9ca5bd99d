"""Recall of a step: of an agent's plan, whether it is in the state or the archive; of a function, from its record."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from pydantic_core import from_json

from ...queues.derived_tasks import MAX_HAND_OFFS
from ...queues.event_log import read_last_events
from ...queues.inspection.views import find_task
from ...queues.keys import Namespace, Partition
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ..durable.journal.failure_record import FailureRecord, is_failure
from ..durable.journal.function_plan import FunctionPlan
from ..durable.journal.parsing import Unreadable, parse_event
from ..durable.journal.step_record import PLANNED, StepRecord
from ..durable.run import Run
from ..durable.steps.codec import read_step_result
from ..log import log_wait
from .journal.archive import read_archived_step, retired_keys
from .journal.history import read_snapshot
from .journal.reducer import empty_state, reduce
from .journal.state import AgentState, StepStatus

_LATEST: Final = 200
"""Events of a predecessor that are read for what came after its last snapshot."""


@runtime_checkable
class HasState(Protocol):
    """Observer that has the state of an agent."""

    @property
    def state(self) -> AgentState: ...


@dataclass(frozen=True, slots=True)
class RecalledStep:
    """Step as it is, or as it was when it left the state of an agent.

    Attributes:
        result: JSON data; None if the step has no result.
        error: Error of its last failed try, if that was the last one.
        archived: Whether it has left the state.
        retired: Whether its record was dropped: its title, result and error are not known any more.
    """

    key: str
    title: str
    status: StepStatus
    result: Any
    error: str | None
    archived: bool
    retired: bool = False


async def recall_step(run: Run, key: str) -> RecalledStep | None:
    """Return a step of the agent's plan, or of the tasks that it continues; of a function, a step that it has called.

    None if there is no such step. Raises `DecryptionError`, `LargeValueLost`, and `BadSnapshot` if the state of a
    predecessor cannot be read.
    """
    agent = run.observer(HasState)  # type: ignore[type-abstract]  # a protocol is asked for
    if agent is None:
        return await _recall_of_function(run, key)
    for step in agent.state.plan:
        if step.key == key:
            return RecalledStep(key, step.title, step.status, agent.state.results.get(key), step.error, False)
    await run.flush()
    found = await retry_while_unavailable(
        partial(read_archived_step, run.gateway, run.delivery.partition, run.id, key),
        on_wait=log_wait(f"step {key!r} of task {run.id}", run.touch),
    )
    if found is None and agent.state.archive.retired:
        statuses = await retry_while_unavailable(
            partial(retired_keys, run.gateway, run.delivery.partition, run.id, [key]),
            on_wait=log_wait(f"step {key!r} of task {run.id}", run.touch),
        )
        if statuses:
            return RecalledStep(key, "", StepStatus(statuses[key]), None, None, True, True)
    if found is None and run.history.handed_from is not None:
        found = await retry_while_unavailable(
            partial(_recall_of_former, run, run.history.handed_from, key),
            on_wait=log_wait(f"step {key!r} of the tasks before {run.id}", run.touch),
        )
    if found is None:
        return None
    former = found["step"]
    return RecalledStep(key, former["title"], StepStatus(former["status"]), found.get("result"), former["error"], True)


async def _recall_of_function(run: Run, key: str) -> RecalledStep | None:
    """Return a step of a function as it is recorded; one that is not, if the plan has it or it runs."""
    plan = FunctionPlan.decode(run.history.saved.get(PLANNED))
    planned = () if plan is None else (*plan.former, *plan.steps)
    title = next((step.title for step in planned if step.key == key), None)
    field = f"d:{key}"
    record = None
    if not key.rpartition("/")[2].startswith("#"):  # the record of another call
        await run.flush()
        record = await retry_while_unavailable(
            partial(run.gateway.command, "HGET", run.delivery.partition.steps(run.id), field),
            on_wait=log_wait(f"step {key!r} of task {run.id}", run.touch),
        )
    running = key in run.steps_in_flight
    if record is None:
        status = StepStatus.RUNNING if running else StepStatus.PENDING
        return None if title is None and not running else RecalledStep(key, title or key, status, None, None, False)
    record = run.gateway.encryptor.of(run.delivery.partition, run.id).decrypt(field, record)
    if is_failure(record):
        status = StepStatus.RUNNING if running else StepStatus.FAILED
        return RecalledStep(key, title or key, status, None, FailureRecord.decode(record).text or None, False)
    result = from_json(await read_step_result(run, key, StepRecord.decode(record).result))
    return RecalledStep(key, title or key, StepStatus.DONE, result, None, False)


async def _recall_of_former(run: Run, source: str, key: str) -> dict[str, Any] | None:
    """Return a step of the nearest predecessor that had it, as an archived step, while the records of these tasks live.

    Its own agent may have been another one, so its state is read as JSON: the snapshot, and the events after it.
    """
    gateway, namespace = run.gateway, Namespace(run.delivery.partition.namespace)
    for _ in range(MAX_HAND_OFFS):
        task_id = source.partition(" ")[0]
        partition = await find_task(gateway, namespace, task_id)
        if partition is None:
            return None
        place = (gateway, partition, task_id)
        found = await read_archived_step(*place, key) or await _recall_of_state(*place, key)
        if found is not None:
            return found
        following = await gateway.command("HGET", partition.record(task_id), "handed_from")
        if following is None:
            return None
        source = following.decode()
    return None


async def _recall_of_state(gateway: Gateway, partition: Partition, task_id: str, key: str) -> dict[str, Any] | None:
    """Return a step of the state that a task left, or None."""
    stored = await read_snapshot(gateway, partition, task_id)
    if stored is not None:
        state, number = stored.state, stored.number
    else:
        state, number = empty_state(), 0
    events = await read_last_events(gateway, partition, task_id, _LATEST)
    for event in reversed(events):
        typed = parse_event(event)
        if (event.number or 0) == number + 1 and not isinstance(typed, Unreadable):
            number += 1
            state = reduce(state, typed, number)
    steps = [step for step in state["plan"] if step["key"] == key]
    results = {"result": state["results"][key]} if key in state["results"] else {}
    return {"step": steps[0], **results} if steps else None

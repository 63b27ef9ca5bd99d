"""Clean-up tasks: the message of one, made when its task ends, and what it reads of that task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from ...queues.delivery.settlement import cleanup_id
from ...queues.derived_tasks import read_task_input
from ...queues.envelope import Envelope, TaskMessage
from ...queues.errors import TaskNotFound
from ...queues.inspection.views import find_task
from ...queues.keys import Namespace, with_tenant
from ...queues.records import State, read_record
from ...queues.security.secret_arguments import mask
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.large_results import recorded_results
from ..log import log_wait
from .journal.step_record import StepRecord
from .run import Run
from .steps.current import StepOptions
from .steps.execution import run_step

ON_END: Final = "#on_end"
"""Checkpoint key that says that the task has a clean-up task: a worker must cancel it. See cancel.lua."""


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A task that has ended, as its clean-up task sees it.

    Attributes:
        id, task: Its id and its name.
        state: `succeeded`, `dead` or `cancelled`; another one if an operator has replayed the dead letter since.
        reason: Why it became a dead letter.
        arguments: By name, with masked secrets.
        steps: Recorded results by the keys of the steps, as JSON data.
    """

    id: str
    task: str
    state: State
    reason: str | None
    arguments: dict[str, Any]
    steps: dict[str, Any]


async def read_ended_task(run: Run, task_id: str, options: StepOptions) -> EndedTask:
    """Read a task that has ended. Recorded once, like a step. See `Context.ended_task`."""

    async def read(task_id: str) -> EndedTask:
        act = partial(_read, run, task_id)
        return await retry_while_unavailable(act, on_wait=log_wait(f"task {task_id}", run.touch))

    found: EndedTask = await run_step(run, "ended_task", read, (task_id,), {}, options)
    return found


async def _read(run: Run, task_id: str) -> EndedTask:
    namespace = Namespace(run.delivery.partition.namespace, run.envelope.tenant)
    partition = await find_task(run.gateway, namespace, task_id)
    record = None
    if partition is not None:
        task_id = with_tenant(namespace.tenant, task_id)
        record = await read_record(run.gateway, partition, task_id)
    if partition is None or record is None:
        raise TaskNotFound(task_id, f"any queue of namespace {namespace.name!r} on {run.gateway.address.shown}")
    given = await read_task_input(run.gateway, partition, task_id)
    results = await recorded_results(run.gateway, partition, task_id)
    return EndedTask(
        id=task_id,
        task=given.envelope.task,
        state=record.state,
        reason=record.reason,
        arguments=orjson.loads(mask(given.arguments, given.envelope.secrets)),
        steps={
            key: orjson.loads(StepRecord.decode(found).result)
            for key, found in results.items()
            if not key.rpartition("/")[2].startswith("#")
        },
    )


def cleanup_message(run: Run, task: Any) -> TaskMessage:
    """Return the message of the clean-up task of a run that ends. task: the `Task` that cleans up."""
    own, delivery = run.envelope, run.delivery
    arguments, secrets = task.arguments.encode_call((run.id,), {})
    envelope = Envelope(
        id=cleanup_id(run.id, delivery),
        task=task.name,
        app=task.app.name,
        headers=own.headers,
        tags=own.tags,
        secrets=secrets,
        on_end=task.on_end is not None,
    )
    plain = TaskMessage(envelope.id, envelope.encode(), arguments, None, own_id=True)
    cipher = run.gateway.encryptor.of(delivery.partition, envelope.id)
    return plain.encrypted(cipher, store=run.gateway.value_store)

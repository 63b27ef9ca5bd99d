"""Continuation of a task as another task: another handler or agent, or another queue.

The decision is one write into the checkpoint: the event, the handoff document and the plan of the successor
(`#handing`). Everything after it can be repeated by any worker without the handler: the successor is stored under the
id in the plan, then this task is settled with that id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import orjson
from pydantic_core import from_json

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.derived_tasks import MAX_HAND_OFFS, Successor
from ...queues.envelope import BudgetUse, Envelope, check_size, check_task_id, encode_arguments, new_task_id
from ...queues.errors import HandOffRefused
from ...queues.event_log import read_log_tail
from ...queues.inspection.views import find_task
from ...queues.keys import Namespace, check_name
from ...queues.lanes import NORMAL, Lane
from ...queues.security.secret_arguments import SecretPaths
from ...queues.transport.large_values import read_arguments
from .journal.handoff.document import HANDOFF, RECEIVED, Handoff, OpenPromise
from .journal.run_events import HandedOff
from .promises import open_promises
from .run import Run, goal_of
from .steps.codec import read_step_result, store_step_result
from .steps.current import check_call

if TYPE_CHECKING:
    from ...queues.limits.task_limits import TaskLimits

HANDING: Final = "#handing"
"""Checkpoint key of the plan."""

_NUMBER: Final = re.compile(r"[1-9][0-9]*")


class _Arguments(Protocol):
    def encode_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> tuple[bytes, SecretPaths]: ...

    def decode(self, data: bytes, /) -> dict[str, Any]: ...


class Receiver(Protocol):
    """Registered task that can be the successor."""

    @property
    def name(self) -> str: ...

    @property
    def queue(self) -> str: ...

    @property
    def arguments(self) -> Any: ...


async def continue_as(
    run: Run,
    to: Receiver | str | None,
    *,
    why: str,
    queue: str | None,
    message: str,
    arguments: Mapping[str, Any] | None,
    draft: Callable[..., Handoff],
) -> NoReturn:
    """Store the decision that another task continues the work, and end the run. See `Context.continue_as`.

    draft: returns the handoff document of a task from the tail of its log, see `handoff_of`.
    """
    await _continue(run, to, why=why, queue=queue, message=message, arguments=arguments, draft=draft)


async def hand_off(run: Run, use: BudgetUse, why: str, draft: Callable[..., Handoff]) -> NoReturn:
    """Let the task that a used-up budget names continue the work. See `continue_as`."""
    to = run.host.tasks.get(use.to, use.to) if isinstance(run.host.tasks, Mapping) else use.to
    await _continue(run, to, why=why, queue=None, message="", arguments=None, draft=draft, used_up=use)


async def _continue(
    run: Run,
    to: Receiver | str | None,
    *,
    why: str,
    queue: str | None,
    message: str,
    arguments: Mapping[str, Any] | None,
    draft: Callable[..., Handoff],
    used_up: BudgetUse | None = None,
) -> NoReturn:
    """Store the decision. used_up: the budget for which the successor starts with a new one."""
    await check_call(run, "#continue_as", own=True)
    if to is None and queue is None:
        raise ValueError("continue_as needs to= (the successor's task or agent), queue= or both")
    if not (to is None or isinstance(to, str) or isinstance(getattr(to, "name", None), str)):
        raise TypeError(f"continue_as needs a task, an agent, or the name of one, got {to!r}")
    own = run.envelope
    name = own.task if to is None else to if isinstance(to, str) else to.name
    target_queue = queue or (run.delivery.partition.queue if to is None or isinstance(to, str) else to.queue)
    check_name("queue", target_queue)
    data, marks = await _arguments(run, None if isinstance(to, str) else to, arguments)
    limit = max(run.settings.max_value_size, run.payload_limit)
    check_size("the arguments of the successor", len(data), limit, "large_limit")
    task_id = await _free_id(run)
    await run.flush()
    stored = data
    if len(data) > run.payload_limit:
        stored = await store_step_result(run, HANDING, data, None, len(data))
    event = HandedOff(why=why, to=task_id, steps=run.history.records + run.steps_recorded)
    tail = await read_log_tail(run.gateway, run.delivery.partition, run.id)
    event_entry = run.next_entry(event)
    handoff = draft(
        tail, task=own.task, session=run.id, why="hand_off", detail=_shown(run, why), to=task_id,
        message=_shown(run, message), number=run.events, goal=goal_of(run),
    )  # fmt: skip
    options = own.options if name == own.task else type(own.options)()
    kept: dict[str, Any] = {
        "app": _app(run, to),
        "headers": own.headers,
        "requires": own.requires,
        "tags": own.tags,
        "on_end": own.on_end if name == own.task else getattr(to, "on_end", None) is not None,
    }
    kept["lane"] = own.lane if name == own.task else _lane(run, to, name)
    if (limits := _limits(run, to, name)) is not None:
        secrets = {path[0] for path in marks if path}
        kept["limits"] = tuple(use for use, _ in limits.uses(from_json(data) if limits.keyed else {}, secrets))
    if budgets := _budgets(run, task_id, used_up):
        kept["budgets"] = budgets
    envelope = Envelope(id=task_id, task=name, options=options, secrets=marks, **kept)
    plan: dict[str, Any] = {
        "v": 1,
        "envelope": envelope.encode().decode(),
        "queue": target_queue,
        "arguments": stored.decode(),
        "source": f"{run.id} {new_task_id()}",
    }
    # all of them, as they are: the successor keeps them by their texts
    left_out = {kind: count for kind, count in handoff.left_out.items() if kind != "promises"}
    handoff = handoff.model_copy(update={"promises": tuple(_handed(run)), "left_out": left_out})
    plan["handoff"] = handoff.to_json().decode()
    entries = [
        event_entry,
        Entry(Kind.SAVED, HANDOFF, handoff.to_json()),
        Entry(Kind.SAVED, HANDING, orjson.dumps(plan)),
    ]
    await run.recorder.put(*entries, wait=True)
    run.history.saved[HANDING] = orjson.dumps(plan)
    await run.continue_elsewhere()


def _handed(run: Run) -> list[OpenPromise]:
    """Return the open promises that the successor takes over, the one that is due first in front.

    Its own waits have other ids than those by which answers are owed here.
    """
    promises = [promise.model_copy(update={"wait": ""}) for promise in open_promises(run)]
    return sorted(promises, key=lambda one: math.inf if one.due is None else one.due.timestamp())


def successor_of(run: Run) -> Successor | None:
    """Return the successor if this run, or an earlier one that was interrupted, decided on one."""
    data = run.history.saved.get(HANDING)
    if data is None:
        return None
    plan = orjson.loads(data)
    return Successor(
        envelope=Envelope.decode(plan["envelope"].encode()),
        queue=plan["queue"],
        arguments=plan["arguments"].encode(),
        handoff=(RECEIVED, plan["handoff"].encode()),
        source=plan["source"],
    )


async def complete_successor(run: Run, successor: Successor) -> Successor:
    """Return the successor with its arguments, which are in chunks if they are large.

    Raises `LargeValueLost`, `DecryptionError`.
    """
    return replace(successor, arguments=await read_step_result(run, HANDING, successor.arguments))


def _app(run: Run, to: Receiver | str | None) -> str | None:
    """Return the app of the successor: that of a registered task; None for a name that this app does not have."""
    if to is None or isinstance(to, str):
        return run.envelope.app if to is None or to == run.envelope.task or to in run.host.tasks else None
    owner = getattr(getattr(to, "task", to), "app", None)  # an agent has its app through its task
    return run.envelope.app if owner is None else str(owner.name)


def _task(run: Run, to: Receiver | str | None, name: str) -> object:
    """Return the successor's task, None if it is not known here."""
    if to is None or isinstance(to, str):
        return run.host.tasks.get(name) if isinstance(run.host.tasks, Mapping) else None
    return getattr(to, "task", to)


def _limits(run: Run, to: Receiver | str | None, name: str) -> TaskLimits | None:
    """Return the limits of the successor's task, None without any or if they are not known here."""
    found: TaskLimits | None = getattr(_task(run, to, name), "limits", None)
    return found


def _lane(run: Run, to: Receiver | str | None, name: str) -> Lane | None:
    """Return the lane of the successor's task, None for the normal one or if it is not known here."""
    found: Lane = getattr(_task(run, to, name), "lane", NORMAL)
    return None if found == NORMAL else found


def _budgets(run: Run, task_id: str, used_up: BudgetUse | None) -> tuple[BudgetUse, ...]:
    """Return the budgets that the successor has from this task; those of its own definition come to them.

    used_up: it is left out. One of the task itself starts again with the same amounts, in place of which a successor
    has its own if its definition has one.
    """
    own = run.envelope.budgets if run.spending is None else run.spending.uses
    kept = [use for use in own if used_up is None or use.ledger != used_up.ledger]
    if used_up is not None and not used_up.name:
        kept.append(used_up._replace(ledger=task_id))
    return tuple(kept)


async def _arguments(run: Run, to: Receiver | None, given: Mapping[str, Any] | None) -> tuple[bytes, SecretPaths]:
    """Return the given arguments, or this task's, as JSON with the paths of their secrets; validated if possible."""
    schema: _Arguments | None = getattr(to, "arguments", None)
    if given is not None:
        return encode_arguments(given) if schema is None else schema.encode_call((), given)
    stored = run.delivery.fields.get(b"args", b"{}")
    task, secrets = run.envelope.task, run.envelope.secrets
    data = await read_arguments(run.gateway, run.delivery.partition, run.id, task, secrets, stored)
    if schema is not None:
        schema.decode(data)
    return data, secrets


async def _free_id(run: Run) -> str:
    """Return the id of the successor: `ID.h1` after `ID`, `ID.h2` after that; the next one that is free."""
    former, _, suffix = run.id.rpartition(".h")
    base, number = (former, int(suffix)) if former and _NUMBER.fullmatch(suffix) else (run.id, 0)
    namespace = Namespace(run.delivery.partition.namespace)
    while number < MAX_HAND_OFFS:
        number += 1
        task_id = check_task_id(f"{base}.h{number}")
        if await find_task(run.gateway, namespace, task_id) is None:
            return task_id
    raise HandOffRefused(
        f"task {run.id} cannot continue as another task: {base} already has {MAX_HAND_OFFS} successors; "
        "check whether its tasks continue as each other"
    )


def _shown(run: Run, text: str) -> str:
    return text if run.redact is None else run.redact(text)

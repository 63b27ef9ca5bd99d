"""Handing a task on: to another task or agent, or to another queue.

The one act that decides is a write into the checkpoint: the event, the handoff, and the whole plan of what is to follow
(`#handing`). All that comes after it can be done again, by any worker, without the handler: the task that goes on is
stored under an id that stands in the plan, then this one is settled, with the id of the other as what it was handed to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn, Protocol

import orjson

from ...queues import (
    MOST_HAND_OFFS,
    Entry,
    Envelope,
    HandOffRefused,
    Kind,
    Namespace,
    SecretPaths,
    Successor,
    arguments_field,
    check_name,
    check_size,
    check_task_id,
    encode_arguments,
    find_task,
    new_task_id,
    read_log_tail,
)
from ..journal import HANDOFF, handoff_of
from ..journal.handoff import RECEIVED
from ..journal.run_events import HandedOff
from .run import Run
from .step import check_place

__all__ = ["HANDING", "Receiver", "continue_as", "successor_of"]

HANDING: Final = "#handing"
"""The key of the plan in the checkpoint."""

_HANDED: Final = re.compile(r"(.+)\.h([1-9][0-9]*)")


class _Arguments(Protocol):
    def encode_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> tuple[bytes, SecretPaths]: ...

    def decode(self, data: bytes, /) -> dict[str, Any]: ...


class Receiver(Protocol):
    """What can go on with a task: a registered task."""

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
) -> NoReturn:
    """Decide that another task goes on, durably, and end the run. See `Context.hand_off`."""
    check_place(run, "#hand_off", own=True)
    if to is None and queue is None:
        raise ValueError("hand_off needs to=, the task or agent that goes on, or queue=, where this one does, or both")
    own = run.envelope
    name = own.task if to is None else to if isinstance(to, str) else to.name
    place = queue or (run.delivery.partition.queue if to is None or isinstance(to, str) else to.queue)
    check_name("queue", place)
    data, marks = _arguments(run, None if isinstance(to, str) else to, arguments)
    check_size("the arguments of the task that goes on", len(data), run.payload_limit)
    task_id = await _free_id(run)
    await run.flush()
    event = HandedOff(why=why, to=task_id, steps=len(run.history.done) + run.steps_recorded)
    trail = await read_log_tail(run.gateway, run.delivery.partition, run.id)
    told = run.next_entry(event)
    handoff = handoff_of(
        trail, task=own.task, session=run.id, why="hand_off", detail=_shown(run, why), to=task_id,
        message=_shown(run, message), number=run.events,
    )  # fmt: skip
    options = own.options if name == own.task else type(own.options)()
    envelope = Envelope(id=task_id, task=name, headers=own.headers, options=options, secrets=marks)
    plan = {
        "v": 1,
        "envelope": envelope.encode().decode(),
        "queue": place,
        "arguments": data.decode(),
        "handoff": handoff.to_json().decode(),
        "source": f"{run.id} {new_task_id()}",
    }
    entries = [told, Entry(Kind.SAVED, HANDOFF, handoff.to_json()), Entry(Kind.SAVED, HANDING, orjson.dumps(plan))]
    await run.recorder.put(*entries, wait=True)
    run.history.saved[HANDING] = orjson.dumps(plan)
    await run.continue_elsewhere()


def successor_of(run: Run) -> Successor | None:
    """The task that goes on, where this one was handed on; by this run, or by one that was cut off then."""
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


def _arguments(run: Run, to: Receiver | None, given: Mapping[str, Any] | None) -> tuple[bytes, SecretPaths]:
    """As JSON, and where secrets are among them: those that are given, else this task's own; checked, if `to` can."""
    checks: _Arguments | None = getattr(to, "arguments", None)
    if given is not None:
        return encode_arguments(given) if checks is None else checks.encode_call((), given)
    seal = run.gateway.encryptor.of(run.delivery.partition, run.id)
    data = seal.decrypt(arguments_field(run.envelope.task), run.delivery.fields.get(b"args", b"{}"), plain=True)
    if checks is not None:
        checks.decode(data)
    return data, run.envelope.secrets


async def _free_id(run: Run) -> str:
    """The id of the task that goes on: `ID.h1` after `ID`, `ID.h2` after that; the next that no task has."""
    found = _HANDED.fullmatch(run.id)
    base, number = (found[1], int(found[2])) if found else (run.id, 0)
    namespace = Namespace(run.delivery.partition.namespace)
    while number < MOST_HAND_OFFS:
        number += 1
        task_id = check_task_id(f"{base}.h{number}")
        if await find_task(run.gateway, namespace, task_id) is None:
            return task_id
    raise HandOffRefused(
        f"task {run.id} cannot be handed on: {base} was {MOST_HAND_OFFS} times; do its tasks hand on to one another?"
    )


def _shown(run: Run, text: str) -> str:
    return text if run.redact is None else run.redact(text)

"""Starting anew from a point of a task's past: another task, with what the first one had done and knew by then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from pydantic_core import from_json, to_json

from ...queues import (
    Partition,
    Producer,
    TaskEvent,
    TaskHandle,
    TaskNotFound,
    check_size,
    check_task_id,
    new_task_id,
    read_last_events,
    read_origin,
    recorded_results,
    saved_fields,
    store_fork,
    walk_events,
)
from ...queues.marks import ANY
from ..errors import BadHistory
from .delta import diff
from .editing import edited
from .events import Forked
from .history import Past
from .recorded import RECORDED, Records
from .reducer import State, empty_state
from .snapshot import SNAPSHOT, encode_snapshot

__all__ = ["Fork", "Point", "fork"]

Point = int | str | None
"""An event's number, the id of an entry of the log, or the key of a step; None for the end of the log."""

_ARTIFACTS: Final = "#artifact:"
"""What the keys of links to artifacts begin with, in the checkpoint."""

_FINISH: Final = "#finish"
_REPLAN: Final = "#replan"
"""Keys of an agent's result, and of the note that it is to be asked for another plan."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A task that was started from another one. event: the number of the last event of that which it knows.

    agent: which agent it is; None for a function. steps: how many recorded steps it has. within: the step that was
    under way then, which is begun anew.
    """

    handle: TaskHandle[Any]
    event: int
    agent: str | None
    steps: int
    within: str | None


async def fork(
    producer: Producer,
    task_id: str,
    *,
    at: Point = None,
    edit: Mapping[str, Any] | None = None,
    new_id: str | None = None,
    lenient: bool = False,
) -> Fork:
    """Enqueue a new task that goes on from a point of another one's past, which stays as it is.

    It has the same task name, arguments and headers. An agent has the state as of that point; a function has the steps
    that had been recorded by then, and runs the others. edit: new values, by name or path (`context.mood`): in the
    state of an agent, and in its arguments where they have the name; in the arguments of a function. new_id: else one
    is made; asked again under the same one, there is one task. lenient: leave out events that cannot be read.

    Raises `TaskNotFound`, `TaskExists`, `BadHistory`, `BadEdit`, `CannotOpen`, `PayloadTooLarge`.
    """
    new_id = new_task_id() if new_id is None else check_task_id(new_id)
    handle = await producer.find(task_id)
    if handle is None:
        raise TaskNotFound(task_id, f"any queue of namespace {producer.namespace.name!r}")
    gateway, partition = producer.gateway, handle.partition
    origin = await read_origin(gateway, partition, task_id)
    known = await _as_of(producer, partition, task_id, at, lenient=lenient)
    secret = {mark[0] if mark else ANY for mark in origin.envelope.secrets}
    state, arguments = edited(
        known.state, from_json(origin.arguments), edit or {}, agent=known.agent is not None, secret=secret
    )
    data = to_json(arguments) if edit else origin.arguments
    check_size("the task's arguments", len(data), producer.payload_limit)
    recorded = await recorded_results(gateway, partition, task_id)
    last = await read_last_events(gateway, partition, task_id, 1)
    if last and last[0].id != known.entry:  # it runs: what it has recorded since is not of the state that was read
        known = replace(known, whole=False)
    done = {key: value for key, value in recorded.items() if known.has(key, value)}
    saved = _links(known, await saved_fields(gateway, partition, task_id, _ARTIFACTS))
    if known.agent is not None:
        blobs: dict[str, bytes] = {}
        if known.whole:
            saved |= await saved_fields(gateway, partition, task_id, _REPLAN)
        saved[SNAPSHOT] = encode_snapshot(state, 1, known.agent, blobs)
        saved |= blobs
    forked = Forked(source=task_id, at=known.number, changes=diff(empty_state(), state))
    place = await store_fork(
        gateway,
        producer.namespace,
        origin,
        new_id,
        at=f"{task_id} {known.entry}",
        arguments=data,
        told=forked.told(),
        done=done,
        saved=saved,
    )
    started = TaskHandle[Any](new_id, place, gateway, producer.news)
    steps = sum("#" not in key for key in done)
    return Fork(started, known.number, known.agent, steps, state.get("current"))


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known at a point of the log: the state, and which step records there were.

    whole: the point is the end of the log. before: keys of records that were written before the point, and not again
    after it. after: of those that were. read: the messages of the inbox that had been read. forked: the task is a fork
    itself, and began with records of which its log does not tell.
    """

    state: State
    number: int
    entry: str
    agent: str | None
    whole: bool
    before: frozenset[str]
    after: frozenset[str]
    read: frozenset[int]
    forked: bool

    def has(self, key: str, value: bytes) -> bool:
        """Whether a step record belongs to what was known. An agent's result does not: it is to go on."""
        if self.agent is not None and key == _FINISH:
            return False
        if self.whole or key in self.before:
            return True
        if self.forked and key not in self.after and self.number:
            return True
        if key.rpartition("/")[2].startswith("#inbox"):
            messages = orjson.loads(value.partition(b"\n")[2])
            return bool(messages) and all(one.get("number") in self.read for one in messages)
        return False


async def _as_of(producer: Producer, partition: Partition, task_id: str, at: Point, *, lenient: bool) -> _Known:
    past, records = Past(task_id, lenient), Records()
    cut = 0 if at == 0 else None
    position = 0
    async for event in walk_events(producer.gateway, partition, task_id):
        position += 1
        records.take(event, position)
        if cut is None:
            past.take(event)
            if _is_at(event, past, at):
                cut = position
    if cut is None and at is not None:
        raise BadHistory(task_id, f"there is no event, entry or step {at!r} in the log of task {task_id}")
    point = position if cut is None else cut
    return _Known(
        past.state,
        past.number,
        past.entry,
        past.agent,
        point == position,
        frozenset(key for key, last in records.written.items() if last <= point),
        frozenset(key for key, last in records.written.items() if last > point),
        frozenset(number for number, when in records.messages.items() if when <= point),
        records.forked,
    )


def _is_at(event: TaskEvent, past: Past, at: Point) -> bool:
    if isinstance(at, int):
        return past.number == at
    return at is not None and (event.id == at or (event.step == at and event.type in RECORDED))


def _links(known: _Known, saved: Mapping[str, bytes]) -> dict[str, bytes]:
    """The links to the artifacts that there were, as they were."""
    artifacts = {one["name"]: one for one in known.state["artifacts"]}
    return {
        key: orjson.dumps(orjson.loads(data) | artifacts[name])
        for key, data in saved.items()
        if (name := key.removeprefix(_ARTIFACTS)) in artifacts
    }

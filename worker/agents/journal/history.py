"""States of a task in the past: the reduction of its log up to any event, and the check of a snapshot against the log.

The log is read in pages, so a long log costs time but no memory.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ....queues.event_log import TaskEvent, read_events, walk_events
from ....queues.handle import TaskHandle
from ....queues.inspection.views import checkpoint_fields
from ....queues.keys import SNAPSHOT, Partition
from ....queues.records import State as Condition
from ....queues.transport.gateway import Gateway
from ....queues.wording import listed
from ...durable.journal.event import LOG_BASE, Event
from ...durable.journal.parsing import Unreadable, parse_event
from ...durable.journal.run_events import Started
from ...errors import BadHistory, StateError
from .agent_events import Rewound
from .json_patch import BadPatch, Patch, diff
from .reducer import State, empty_state, reduce
from .snapshot import BLOB, StoredState, decode_snapshot


@dataclass(slots=True)
class Gap:
    """Missing events of a log. first: number of the first one. before: the state before it.

    since: The last start of the agent after them, and its number.
    """

    first: int
    before: State
    problem: str
    since: tuple[Event, int] | None = None

    def closed_by(self, event: Rewound) -> State:
        """Return the state with which an agent has continued from before the gap."""
        if self.since is not None and self.since[1] > event.last:
            return reduce(self.before, *self.since)  # nothing was before the gap: it has started again
        return self.before


@dataclass(slots=True)
class PastState:
    """Reduction of a task's log up to the last entry that was read.

    An agent that finds a gap in its log continues from before it, and logs that (`rewound`): from there on the state is
    known again.

    Attributes:
        number: Number of the last event in the state.
        entry: Id of the last log entry that was read.
        agent: Name of the agent; None for a function, whose state has only what it logged.
        skipped: Problems of the events that could not be read and are missing from the state.
        gap: Missing events on which the state depends, so that it is not known.
        start: Number of the event with which the log starts: those of a long-lived agent lose their oldest events.
        base: Number of the last event with the whole state.
    """

    task_id: str
    lenient: bool = False
    state: State = field(default_factory=empty_state)
    number: int = 0
    entry: str = "0-0"
    agent: str | None = None
    skipped: list[str] = field(default_factory=list)
    gap: Gap | None = None
    start: int = 1
    base: int = 0

    def apply(self, found: TaskEvent) -> None:
        """Apply the next entry. Raises `BadHistory` if it cannot be read, unless lenient."""
        self.entry = found.id
        if found.number is None:
            if found.type == "replayed" and isinstance(found.data, dict) and found.data.get("fresh"):
                self.state, self.agent, self.gap = empty_state(), None, None
            return
        if found.number <= self.number:
            self._refuse(f"event {found.number} of task {self.task_id} follows event {self.number} (entry {found.id})")
            return
        if found.type == LOG_BASE:
            self.gap, self.agent = None, self._agent_of(found)
            self.base, self.start = found.number, self.start if self.number else found.number
        elif found.number != self.number + 1 and self.gap is None:
            self.gap = Gap(self.number + 1, self.state, self._missing(self.number + 1, found))
            if self.lenient:
                self.skipped.append(self.gap.problem)
        self.number = found.number
        event = parse_event(found)
        if isinstance(event, Unreadable):
            self._refuse(str(event))
            return
        if isinstance(event, Rewound) and not self._rewind(event):
            return
        try:
            self.state = reduce(self.state, event, found.number)
        except BadPatch as error:
            self._refuse(f"task {self.task_id}: {error}")
        if isinstance(event, Started) and event.agent is not None:
            self.agent = event.agent
            if self.gap is not None:
                self.gap.since = event, found.number

    def _agent_of(self, found: TaskEvent) -> str | None:
        agent = found.data.get("agent") if isinstance(found.data, dict) else None
        return agent if isinstance(agent, str) else self.agent

    def check(self) -> None:
        """Raise `BadHistory` if the state depends on events that are missing, unless lenient."""
        if self.gap is not None and not self.lenient:
            raise BadHistory(self.task_id, self.gap.problem)

    def _missing(self, first: int, following: TaskEvent) -> str:
        last = (following.number or 0) - 1
        which = f"event {first} is" if first == last else f"events {first} to {last} are"
        return (
            f"{which} missing from the log of task {self.task_id}: lost by Redis or deleted before entry "
            f"{following.id}; the task can resume, but its state after event {first - 1} is unknown: ask for an "
            "earlier one with --at, or leave out what is missing with --skip-unreadable"
        )

    def _rewind(self, event: Rewound) -> bool:
        """Continue with the state before a gap. Return whether that is known."""
        if self.gap is not None and event.first == self.gap.first:
            self.state, self.gap = self.gap.closed_by(event), None
        elif self.gap is None and event.first <= self.base:
            problem = (
                f"task {self.task_id} has continued from before event {event.first}, which was retired from its log; "
                f"its state is known again from its next event {LOG_BASE!r} on"
            )
            self.gap = Gap(event.first, self.state, problem)
            return False
        return True

    def _refuse(self, problem: str) -> None:
        if self.lenient:
            self.skipped.append(problem)
        elif self.gap is None:
            raise BadHistory(self.task_id, problem)


async def walk_states(
    gateway: Gateway, partition: Partition, task_id: str, *, lenient: bool = False
) -> AsyncIterator[tuple[TaskEvent, PastState]]:
    """Yield every entry of a task's log with the reduction up to it, which is one object that changes.

    Args:
        lenient: Skip entries that are missing or cannot be read.

    Raises `BadHistory` for an entry that cannot be read; `PastState.check` does for a missing one.
    """
    past = PastState(task_id, lenient)
    async for found in walk_events(gateway, partition, task_id):
        past.apply(found)
        yield found, past


async def state_at(
    gateway: Gateway, partition: Partition, task_id: str, at: int | None = None, *, lenient: bool = False
) -> PastState:
    """Return the reduction up to an event. at: its number, 0 for the state before all of them, None for the latest.

    Raises `BadHistory`, also if there is no such event.
    """
    past = PastState(task_id, lenient)
    if at == 0:
        return past
    async for _, past in walk_states(gateway, partition, task_id, lenient=lenient):
        if past.number == at:
            break
    if at is not None and past.number < at:
        raise BadHistory(task_id, f"task {task_id} has no event {at}: the last one is {past.number}")
    past.check()
    if at is not None and at < past.start:
        raise BadHistory(task_id, f"event {at} of task {task_id} was retired: its log starts with event {past.start}")
    if at is not None and past.number > at:
        raise BadHistory(task_id, f"event {at} is missing from the log of task {task_id}: lost by Redis or deleted")
    return past


async def agent_name(gateway: Gateway, partition: Partition, task_id: str) -> str | None:
    """Return the name of the agent of a task; None for a function, and for a task that has not started.

    The event with which the log starts has it.
    """
    for event in await read_events(gateway, partition, task_id, limit=_FIRST):
        if event.type in ("started", LOG_BASE):
            name = event.data.get("agent") if isinstance(event.data, dict) else None
            return name if isinstance(name, str) else None
    return None


_FIRST: Final = 5
"""Entries that are searched for the first event of a run: scripts may write others before it."""


async def read_snapshot(gateway: Gateway, partition: Partition, task_id: str) -> StoredState | None:
    """Return the snapshot of a task's state, if there is one. Raises `BadSnapshot`, `DecryptionError`."""
    data = (await checkpoint_fields(gateway, partition, task_id, SNAPSHOT)).get(SNAPSHOT)
    if data is None:
        return None
    return decode_snapshot(task_id, data, await checkpoint_fields(gateway, partition, task_id, BLOB))


async def check_state(gateway: Gateway, partition: Partition, task_id: str) -> StoredState | None:
    """Compare a task's snapshot with the reduction of its log. Return the snapshot, if there is one.

    Raises:
        StateError: They differ; the error names the first event that the snapshot disagrees with.
        BadHistory, BadSnapshot
    """
    stored = await read_snapshot(gateway, partition, task_id)
    if stored is None:
        return None
    past = await state_at(gateway, partition, task_id, stored.number)
    differences = diff(past.state, stored.state)
    if not differences:
        return stored
    fields = {str(one["path"]).split("/")[1].replace("~1", "/").replace("~0", "~") for one in differences}
    number = await _first_difference(gateway, partition, task_id, stored, fields)
    raise drift(task_id, number, [str(change["path"]) for change in differences])


def drift(task_id: str, number: int, places: Sequence[str]) -> StateError:
    """Return the error for a state that differs from its log at some places since event `number`."""
    return StateError(
        f"the state of task {task_id} differs from its event log since event {number}: {', '.join(places[:10])}"
    )


async def _first_difference(
    gateway: Gateway, partition: Partition, task_id: str, stored: StoredState, fields: set[str]
) -> int:
    """Return the first event after which one of these fields never again equals its stored value.

    A field that never equalled it was set by the snapshot, so its last event is returned.
    """
    former: State = {}
    agree: dict[str, bool] = {}
    last: dict[str, int] = {}

    def compare(state: State, number: int) -> None:
        for name in fields:
            if name not in agree or state.get(name) is not former.get(name):
                agree[name] = not diff(state.get(name), stored.state.get(name))
            if agree[name]:
                last[name] = number

    compare(empty_state(), 0)
    async for _, past in walk_states(gateway, partition, task_id):
        if past.number > stored.number:
            break
        if past.gap is not None:
            continue
        compare(past.state, past.number)
        former = past.state
    return min(last[name] + 1 if name in last else stored.number for name in fields)


_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")

_KEPT: Final = frozenset({"archive", "artifacts", "current", "files", "messages", "waiting_for"})
"""Fields that account for what happened."""

_OF_STEP: Final = ("key", "status", "attempts", "error")
"""Fields of an open step that only the run changes."""

_MAX_NAMES: Final = 20
"""Names that an error lists."""


class CannotCorrect(ValueError):
    """A correction that does not fit the state."""


class NoStateToCorrect(CannotCorrect):
    """A correction of a task that is no agent."""


async def preview_correction(
    gateway: Gateway, handle: TaskHandle[Any], wanted: Mapping[str, Any]
) -> tuple[int, Patch] | None:
    """Return the number of the last event, and what a correction would change in the state after it.

    None for a task whose state is not known: it has not started, or its log cannot be read; its agent checks then.

    Raises `CannotCorrect`.
    """
    try:
        past = await state_at(gateway, handle.partition, handle.id)
    except BadHistory:
        return None
    if past.agent is None:
        record = await handle.record()
        if record.attempts or record.state is Condition.DEAD:
            raise NoStateToCorrect(f"task {handle.id} has no state to correct: it is not an agent")
        return None
    return past.number, diff(past.state, corrected(past.state, wanted))


def corrected(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with other values. The given one is not changed, and the result shares its unchanged parts.

    Args:
        wanted: Values by path: names and indexes with dots between them, or a JSON pointer, for names with dots.

    Raises:
        CannotCorrect: A path does not exist or is read-only. A new key of an object within a field is accepted.
    """
    after = dict(state)
    for path, value in wanted.items():
        names = _names(path)
        if names[0] not in after:
            raise CannotCorrect(f"{path}: the state has no field {names[0]!r}; it has {_listed(after, _KEPT)}")
        if names[0] in _KEPT:
            raise CannotCorrect(f"{path}: {names[0]} is read-only")
        after[names[0]] = _replaced(after[names[0]], names[1:], value, path)
    _check_plan(state.get("plan"), after.get("plan"))
    return after


def _names(path: str) -> list[str]:
    if path.startswith("/"):
        return [name.replace("~1", "/").replace("~0", "~") for name in path[1:].split("/")]
    return path.split(".")


def _replaced(held: Any, names: list[str], value: Any, path: str) -> Any:
    """Return a copy of a value in which the part at this place is another one."""
    if not names:
        return value
    name, *rest = names
    if isinstance(held, dict):
        if name not in held and rest:
            raise CannotCorrect(f"{path}: there is no {name!r}; there is {_listed(held)}")
        return {**held, name: _replaced(held.get(name), rest, value, path)}
    if isinstance(held, list):
        if not _INDEX.fullmatch(name) or int(name) >= len(held):
            raise CannotCorrect(f"{path}: {name!r} is no index of a list of {len(held)} items")
        index = int(name)
        return [*held[:index], _replaced(held[index], rest, value, path), *held[index + 1 :]]
    raise CannotCorrect(f"{path}: there is no {name!r}, because what should have it is neither an object nor a list")


def _listed(names: Mapping[str, Any], without: frozenset[str] = frozenset()) -> str:
    return listed((repr(name) for name in names if name not in without), _MAX_NAMES) or "nothing"


def _check_plan(before: Any, after: Any) -> None:
    """Refuse changes to closed steps, and to the account of the open ones."""
    if before is after:
        return
    if not isinstance(after, list) or len(after) != len(before):
        raise CannotCorrect(f"plan: it must keep its {len(before)} steps")
    for old, new in zip(before, after, strict=True):
        if old is new:
            continue
        if old["status"] not in ("pending", "running"):
            raise CannotCorrect(f"plan: step {old['key']!r} is {old['status']} and read-only")
        if not isinstance(new, dict) or any(old.get(name) != new.get(name) for name in _OF_STEP):
            raise CannotCorrect(f"plan: {', '.join(_OF_STEP)} of step {old['key']!r} are read-only")

"""States of a task in the past: the reduction of its log up to any event, and the check of a snapshot against the log.

The log is read in pages, so a long log costs time but no memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ...queues import Gateway, Partition, TaskEvent, checkpoint_fields, walk_events
from ..errors import BadHistory, StateDrift
from .json_patch import BadPatch, diff
from .parsing import Unreadable, parse_event
from .reducer import State, empty_state, reduce
from .run_events import Started
from .snapshot import BLOB, SNAPSHOT, StoredState, decode_snapshot

__all__ = ["PastState", "check_state", "read_snapshot", "state_at", "walk_states"]


@dataclass(slots=True)
class PastState:
    """Reduction of a task's log up to the last entry that was read.

    Attributes:
        number: Number of the last event in the state.
        entry: Id of the last log entry that was read.
        agent: Name of the agent; None for a function, whose state has only what it logged.
        skipped: Problems of the events that could not be read and are missing from the state.
    """

    task_id: str
    lenient: bool = False
    state: State = field(default_factory=empty_state)
    number: int = 0
    entry: str = "0-0"
    agent: str | None = None
    skipped: list[str] = field(default_factory=list)

    def apply(self, found: TaskEvent) -> None:
        """Apply the next entry. Raises `BadHistory` if it cannot be read or leaves a gap, unless lenient."""
        self.entry = found.id
        if found.number is None:
            if found.type == "replayed" and isinstance(found.data, dict) and found.data.get("fresh"):
                self.state, self.agent = empty_state(), None
            return
        if found.number != self.number + 1:
            missing = f"event {self.number + 1} of task {self.task_id} was lost by Redis or deleted: the next one is"
            self._refuse(f"{missing} event {found.number} (entry {found.id})")
            if found.number <= self.number:
                return
        self.number = found.number
        event = parse_event(found)
        if isinstance(event, Unreadable):
            self._refuse(str(event))
            return
        try:
            self.state = reduce(self.state, event, found.number)
        except BadPatch as error:
            self._refuse(f"task {self.task_id}: {error}")
        if isinstance(event, Started) and event.agent is not None:
            self.agent = event.agent

    def _refuse(self, problem: str) -> None:
        if not self.lenient:
            raise BadHistory(self.task_id, problem)
        self.skipped.append(problem)


async def walk_states(
    gateway: Gateway, partition: Partition, task_id: str, *, lenient: bool = False
) -> AsyncIterator[tuple[TaskEvent, PastState]]:
    """Yield every entry of a task's log with the reduction up to it, which is one object that changes.

    Args:
        lenient: Skip entries that cannot be read.

    Raises `BadHistory`.
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
            return past
    if at is not None:
        raise BadHistory(task_id, f"task {task_id} has no event {at}: the last one is {past.number}")
    return past


async def read_snapshot(gateway: Gateway, partition: Partition, task_id: str) -> StoredState | None:
    """Return the snapshot of a task's state, if there is one. Raises `BadSnapshot`, `DecryptionError`."""
    data = (await checkpoint_fields(gateway, partition, task_id, SNAPSHOT)).get(SNAPSHOT)
    if data is None:
        return None
    return decode_snapshot(task_id, data, await checkpoint_fields(gateway, partition, task_id, BLOB))


async def check_state(gateway: Gateway, partition: Partition, task_id: str) -> StoredState | None:
    """Compare a task's snapshot with the reduction of its log. Return the snapshot, if there is one.

    Raises:
        StateDrift: They differ; the error names the first event that the snapshot disagrees with.
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
    raise StateDrift(task_id, number, [str(one["path"]) for one in differences[:10]])


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
        compare(past.state, past.number)
        former = past.state
    return min(last[name] + 1 if name in last else stored.number for name in fields)

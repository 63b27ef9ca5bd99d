"""Going back in a task's log: the state as any of its events left it, and whether what is stored agrees with that.

The log is read a page at a time, so that its length costs time and no memory.
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

__all__ = ["Past", "check_state", "read_snapshot", "state_at", "walk_states"]


@dataclass(slots=True)
class Past:
    """What a task's log comes to, as far as it has been read.

    number: of the last event in the state. entry: the id of the last entry that was read. agent: whose state it is;
    None for that of a function, which has no more than what it told. skipped: events that could not be read, and that
    the state is without.
    """

    task_id: str
    lenient: bool = False
    state: State = field(default_factory=empty_state)
    number: int = 0
    entry: str = "0-0"
    agent: str | None = None
    skipped: list[str] = field(default_factory=list)

    def take(self, found: TaskEvent) -> None:
        """Go on by one entry. Raises `BadHistory` for one that cannot be read or does not follow, unless lenient."""
        self.entry = found.id
        if found.number is None:
            if found.type == "replayed" and isinstance(found.data, dict) and found.data.get("fresh"):
                self.state, self.agent = empty_state(), None
            return
        if found.number != self.number + 1:
            missing = f"event {self.number + 1} of task {self.task_id} is not in its log: after it comes"
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
) -> AsyncIterator[tuple[TaskEvent, Past]]:
    """Every entry of a task's log, with what it all comes to then: one object, which goes on.

    lenient: leave out what cannot be read. Raises `BadHistory`.
    """
    past = Past(task_id, lenient)
    async for found in walk_events(gateway, partition, task_id):
        past.take(found)
        yield found, past


async def state_at(
    gateway: Gateway, partition: Partition, task_id: str, at: int | None = None, *, lenient: bool = False
) -> Past:
    """The state as an event left it. at: its number, 0 for before all of them, None for the latest.

    Raises `BadHistory`, also where there is no such event.
    """
    past = Past(task_id, lenient)
    if at == 0:
        return past
    async for _, past in walk_states(gateway, partition, task_id, lenient=lenient):
        if past.number == at:
            return past
    if at is not None:
        raise BadHistory(task_id, f"there is no event {at} of task {task_id}: the last one is {past.number}")
    return past


async def read_snapshot(gateway: Gateway, partition: Partition, task_id: str) -> StoredState | None:
    """The stored snapshot of a task's state, None where there is none. Raises `BadSnapshot`, `DecryptionError`."""
    data = (await checkpoint_fields(gateway, partition, task_id, SNAPSHOT)).get(SNAPSHOT)
    if data is None:
        return None
    return decode_snapshot(task_id, data, await checkpoint_fields(gateway, partition, task_id, BLOB))


async def check_state(gateway: Gateway, partition: Partition, task_id: str) -> StoredState | None:
    """Compare the stored snapshot with what the log comes to; returns the snapshot, None where there is none.

    Raises `StateDrift`, which names the first event that the snapshot does not agree with; `BadHistory`, `BadSnapshot`.
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
    """The first event after which any of these fields never had its stored form again.

    A field that never had it was given it by the snapshot, whose last event it is then.
    """
    former: State = {}
    agree: dict[str, bool] = {}
    last: dict[str, int] = {}

    def look(state: State, number: int) -> None:
        for name in fields:
            if name not in agree or state.get(name) is not former.get(name):
                agree[name] = not diff(state.get(name), stored.state.get(name))
            if agree[name]:
                last[name] = number

    look(empty_state(), 0)
    async for _, past in walk_states(gateway, partition, task_id):
        if past.number > stored.number:
            break
        look(past.state, past.number)
        former = past.state
    return min(last[name] + 1 if name in last else stored.number for name in fields)

"""Checks of a simulated run: the guarantees, after every write and at the end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from .app import Entry, messages_of
from .deliveries import DeliveryChecks
from .fleet.families import check_families, left_behind
from .fleet.limit_checks import LimitChecks
from .fleet.limits import DROPPED
from .fleet.releases import check_release
from .fleet.resharding import KeyOrder, RecordPlaces
from .fleet.sessions import check_turn
from .fleet.settings import check_settings
from .fleet.stream_checks import check_streams
from .fleet.streams import HANDED_OVER
from .fleet.supervisors import SupervisorChecks
from .fleet.values import ValueChecks
from .fleet.waits import check_waits
from .loop import current
from .plan import LISTENING

if TYPE_CHECKING:
    from .world import World

__all__ = ["Checks", "Violation"]

_RECORD: Final = re.compile(rb"(\{sim:sim:\d+\}):(?:record|steps|log|inbox|control):(.+)")
_ENDED: Final = frozenset({b"succeeded", b"dead", b"cancelled"})
_PLACE: Final = {b"queued": "ready", b"scheduled": "due", b"limited": "limited", b"dead": "dead"}


@dataclass(frozen=True)
class Violation:
    """A guarantee that did not hold. kind: the same for one defect, whatever the run."""

    kind: str
    text: str
    at: float

    def __str__(self) -> str:
        return f"{self.at:9.4f}  {self.kind}: {self.text}"


class Checks:
    """Checks of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []
        self._tasks: dict[tuple[bytes, ...], bytes | None] = {}
        self._deliveries = DeliveryChecks(world, self.add)
        self._records = RecordPlaces(world)
        self.order = KeyOrder(world)
        self.supervisors = SupervisorChecks(world)
        self.values = ValueChecks(world)
        self.limits = LimitChecks(world)
        self._steps: dict[str, str] = {}
        self._began: dict[int, float] = {}
        self._fences: dict[tuple[str, tuple[object, ...]], int] = {}
        self.states: dict[str, list[tuple[float, str]]] = {}
        """States that each task has had, with the times from which it had them."""
        world.server.on_write = self.check_write
        world.journal.on_entry = self.check_entry

    def add(self, kind: str, text: str) -> None:
        """Report a violation."""
        self.violations.append(Violation(kind, text, self._world.loop.now - self._world.begin))

    # after every write

    def check_write(self, fields: list[bytes]) -> None:
        """Check that each task whose keys a command names is in one place."""
        touched = {found.groups() for field in fields if (found := _RECORD.fullmatch(field))}
        for tag, task in sorted(touched):
            self._check_place(tag, task)
            self._records.check(tag, task)
        self._deliveries.check_pending(fields)
        self.values.check_write(fields)
        self.limits.check_write(fields)
        if self._world.plan.supervisors is not None:
            self.supervisors.check_write(fields)
        if self.order.called and fields[0].upper() == b"XREADGROUP":
            for field in fields:
                if field.endswith(b":ready"):
                    self.order.read(field, self._messages(field.removesuffix(b":ready"), "ready"))

    def check_entry(self, entry: Entry) -> None:
        """Check that the server has the result that a run takes for recorded."""
        self.limits.check_entry(entry)
        if entry.what == "run":
            self._began[entry.run] = self._handed_out(entry)
            self._check_run(entry)
            check_release(self._world, self._world.process_of(current()), entry)
        elif entry.what == "effect":
            self._steps[entry.value] = entry.step
            check_turn(self._world, self._world.process_of(current()), entry)
        elif entry.what == "dies":
            self.supervisors.dies(self._world.process_of(current()), entry)
        elif entry.what == "got" and self._world.server.up:
            step = b"d:" + self._steps[entry.value].encode()
            for key in self._items:
                if key.endswith(b":steps:" + entry.task.encode()):
                    stored = self._hash(key).get(step)
                    # The confirmation that a frozen process reads later may be older than the loss.
                    known = stored is None or f'"{entry.value}"'.encode() in stored or self._lost_value(entry)
                    if stored is not None and not known:
                        self.add("other result", f"{entry.task} got {entry.value}, but {stored.decode()} is stored")

    def _check_run(self, entry: Entry) -> None:
        """Check that a worker runs no more than it has slots, and that each run has a fence of its own."""
        for process in self._world.processes:
            if process.name == entry.machine and process.worker is not None:
                running, slots = self._world.journal.running[entry.machine], process.worker._slots.capacity
                if running > slots:  # not those that only wait for Redis to store their outcome
                    self.add("slots", f"{entry.machine} runs {running} tasks in {slots} slots")
                task = asyncio.current_task()
                for run in process.runs():
                    if run.task is task:
                        former = self._fences.setdefault((entry.task, run.delivery.fence), entry.run)
                        if former != entry.run:
                            self.add(
                                "same fence", f"runs {former} and {entry.run} of {entry.task}: {run.delivery.fence}"
                            )

    def _handed_out(self, entry: Entry) -> float:
        """Return when the server handed out the task of a run, which must know what was recorded before.

        It may be long before its handler begins, if its worker stands still meanwhile.
        """
        for process in self._world.processes:
            if process.name == entry.machine:
                for run in process.runs():
                    if run.id == entry.task:
                        return self._deliveries.since(run.delivery)
        return entry.at

    def _check_place(self, tag: bytes, task: bytes) -> None:
        record = self._hash(tag + b":record:" + task)
        state = record.get(b"state")
        self._note_state(task, state)
        found = [
            (name, entry) for name in ("ready", "dead") for entry, held in self._messages(tag, name) if held == task
        ]
        if task in self._zset(tag + b":due"):
            found.append(("due", b""))
        if state == b"limited" and task in self._zset(tag + b":limited:" + record.get(b"gate", b"").partition(b" ")[0]):
            found.append(("limited", b""))  # those of an ordered key are there until they end
        wanted = _PLACE.get(state or b"")
        places = [name for name, _ in found]
        if places != ([wanted] if wanted else []):
            self.add("one place", f"{task.decode()} is {(state or b'unknown').decode()}, and in {places or 'no place'}")
        elif wanted == "ready" and record.get(b"entry") != found[0][1]:
            self.add("one place", f"the record of {task.decode()} names {record.get(b'entry')!r}, not {found[0][1]!r}")

    def _note_state(self, task: bytes, state: bytes | None) -> None:
        known, shown = self.states.setdefault(task.decode(), []), (state or b"expired").decode()
        if not known or known[-1][1] != shown:
            known.append((self._world.loop.now, shown))

    def _messages(self, tag: bytes, name: str) -> list[tuple[bytes, bytes | None]]:
        """Return entries of a stream of tasks, each with the id of its task."""
        key = tag + b":" + name.encode()
        item = self._items.get(key)
        found = []
        for entry, pairs in item.value if item is not None else ():
            cached = tuple(pairs)  # not the id of the entry: after lost writes another one may have it
            if cached not in self._tasks:
                values = dict(zip(pairs[::2], pairs[1::2], strict=True))
                self._tasks[cached] = values.get(b"id") or _id(values[b"env"])
            found.append((entry, self._tasks[cached]))
        return found

    @property
    def _items(self) -> dict[bytes, Any]:
        return self._world.server.items

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        item = self._items.get(key)
        return {} if item is None else item.value._values

    def _zset(self, key: bytes) -> Any:
        item = self._items.get(key)
        return () if item is None else item.value

    # at the end

    def state(self, task: str) -> str | None:
        """Return the state of a task; None if it has no record."""
        for key, item in self._items.items():
            found = _RECORD.fullmatch(key)
            if found and found[2] == task.encode() and b":record:" in key:
                state: bytes | None = item.value._values.get(b"state")
                return state.decode() if state else None
        return None

    def unfinished(self) -> list[str]:
        """Return the tasks that may still get an outcome."""
        acked = {entry.task for entry in self._world.journal.entries if entry.what == "acked"}
        live = {
            found[2].decode()
            for key, item in self._items.items()
            if (found := _RECORD.fullmatch(key))
            and b":record:" in key
            and item.value._values.get(b"state") not in _ENDED
        }
        sessions = [caller.plan.id for caller in self._world.callers if caller.is_busy]
        busy = [
            *sorted(live - self._waiting()),
            *(task.id for task in self._world.plan.tasks if task.id not in acked),
            *sessions,
            *left_behind(self._world),
            *self._world.pages.busy,
        ]
        return [*busy, *self.limits.still_left(busy=bool(busy))]

    def _waiting(self) -> set[str]:
        """Return the tasks, and their successors, that wait for a message which the server has lost or never had."""
        found = {
            task.id
            for task in self._world.plan.tasks
            if task.id in self._world.unsent
            or (task.kind in LISTENING and any(self.lost(text) for text in messages_of(task.id)))
        }
        return found | {f"{task}.h1" for task in found}

    def finish(self) -> None:
        """Check what holds at the end of a run."""
        world = self._world
        for context in world.loop.failures:
            error = context.get("exception")
            self.add("unhandled", f"{context.get('message')}: {error!r}")
        self._check_outcomes()
        self._check_others()
        self._check_steps()
        self._check_logs()
        self._check_keys()
        check_settings(world)
        check_waits(world)
        check_families(world)
        check_streams(world)
        self.values.finish()
        self.limits.finish()
        self.supervisors.finish()
        self.order.finish()
        for caller in world.callers:
            caller.check()

    def _check_outcomes(self) -> None:
        world = self._world
        acked, waiting = {entry.task for entry in world.journal.entries if entry.what == "acked"}, self._waiting()
        for task in world.plan.tasks:
            if task.id in waiting:
                continue
            state = self.state(task.id)
            wanted = {"cancelled", None, *_wanted(task.kind)} if task.id in world.cancelled else _wanted(task.kind)
            if task.id not in acked:
                self.add("not enqueued", f"{task.id} was not acknowledged")
            elif state is None and self.lost(task.id):
                continue
            elif state is None and task.id not in world.cancelled:
                self.add("lost", f"{task.id} ({task.kind}) has no record")
            elif state not in wanted:
                kind = "no progress" if state in ("queued", "scheduled", "limited") else "wrong outcome"
                self.add(kind, f"{task.id} ({task.kind}) is {state}{self._why(task.id)}")
            elif state != "succeeded" or task.kind == "relay" or task.kind in HANDED_OVER:
                continue
            elif task.kind == "hopeless":
                self.add("wrong outcome", f"{task.id} has the result of a child that waits for ever")
            elif task.kind == "listens":
                self._check_messages(task.id)
            elif task.kind == "passes":
                self._check_forwarded(task.id)
            else:
                self._check_result(task.id)

    def _why(self, task: str) -> str:
        for key, item in self._items.items():
            if key.endswith(b":record:" + task.encode()):
                fields = item.value._values
                return f": { ({name: value for name, value in fields.items() if name not in (b'env', b'args')})!r}"[
                    :900
                ]
        return ""

    def lost(self, text: str) -> bool:
        """Return whether the server lost a write that contains a text."""
        return any(text.encode() in field for fields in self._world.server.lost for field in fields)

    def _check_result(self, task: str) -> None:
        """Compare the result with what the handlers saw."""
        last = [entry.value for entry in self._world.journal.entries if entry.what == "result" and entry.task == task]
        for key, item in self._items.items():
            if key.endswith(b":record:" + task.encode()) and b"result" in item.value._values:
                stored = orjson.loads(item.value._values[b"result"])
                if stored not in last:
                    self.add("wrong result", f"{task} has {stored}, its handler returned {last}")

    def _check_messages(self, task: str) -> None:
        """Check that a task got each of its messages once and in order."""
        for key, item in self._items.items():
            if key.endswith(b":record:" + task.encode()):
                got = orjson.loads(item.value._values.get(b"result", b"null"))
                if got != messages_of(task):
                    self.add("messages", f"{task} got {got}")

    def _check_forwarded(self, task: str) -> None:
        """Check that the successor of a task got the messages which were sent to the task, in any order."""
        for key, item in self._items.items():
            if key.endswith(f":record:{task}.h1".encode()) and item.value._values.get(b"state") == b"succeeded":
                got = orjson.loads(item.value._values[b"result"])
                if sorted(got) != messages_of(task):
                    self.add("messages", f"the successor of {task} got {got}")

    def _check_others(self) -> None:
        """Check that successors and forks have an outcome as well."""
        known = self._waiting() | {task.id for task in self._world.plan.tasks}
        for task, state in self._states():
            if task.decode() not in known and state not in _ENDED:
                self.add("no progress", f"{task.decode()}, a successor or fork, is {state!r}")

    def _states(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield each task that has a record, with its state."""
        for key, item in self._items.items():
            found = _RECORD.fullmatch(key)
            if found and b":record:" in key:
                yield found[2], item.value._values.get(b"state")

    def _check_steps(self) -> None:
        """Check that no recorded step ran again, and that each has one result."""
        made: dict[str, Entry] = {}
        got: dict[tuple[str, str], Entry] = {}
        for entry in self._world.journal.entries:
            if entry.what == "fresh":
                got = {place: one for place, one in got.items() if place[0] != entry.task}
            elif entry.what == "effect":
                made[entry.value] = entry
                earlier = got.get((entry.task, entry.step))
                if (
                    earlier
                    and (earlier.at < self._began[entry.run] or earlier.run == entry.run)
                    and not self._lost_value(earlier)
                ):
                    self.add("repeated", f"{entry.task} {entry.step}: {earlier.value} was recorded, {entry.value} made")
            elif entry.what == "got":
                source = made[entry.value]
                place = (entry.task, source.step)
                earlier = got.get(place)
                lost = self._lost_value(entry) or (earlier is not None and self._lost_value(earlier))
                if earlier and earlier.value != entry.value and not lost:
                    self.add("two results", f"{entry.task} {source.step}: {earlier.value}, then {entry.value}")
                if not earlier or earlier.value != entry.value:
                    got[place] = entry

    def _check_logs(self) -> None:
        """Check that each log has an entry of a run once and in order, and each event."""
        for key, item in self._items.items():
            if b":log:" in key:
                lines = [dict(zip(pairs[::2], pairs[1::2], strict=True)) for _, pairs in item.value]
                for field in (b"e", b"n"):
                    numbers = [int(line[field]) for line in lines if field in line]
                    if numbers != sorted(set(numbers)):
                        self.add("log", f"{key.decode()} has the numbers {numbers} ({field.decode()})")

    def _lost_value(self, entry: Entry) -> bool:
        return self.lost(f'"{entry.value}"')

    def _check_keys(self) -> None:
        """Check that each key belongs to a live task or has a TTL."""
        for key, item in self._items.items():
            found = _RECORD.fullmatch(key)
            if found is None or item.expireat is not None:
                continue
            state = self._hash(found[1] + b":record:" + found[2]).get(b"state")
            if state not in (b"queued", b"scheduled", b"limited"):
                self.add("leak", f"{key.decode()} has no TTL, and its task is {state!r}")


def _wanted(kind: str) -> set[str | None]:
    """Return the states in which a task of a kind may end that is not cancelled."""
    if kind == "laments":  # it may be replayed
        return {"dead", "succeeded"}
    if kind in DROPPED:
        return {"succeeded", "cancelled"}
    return {"dead"} if kind in ("doomed", "poison") else {"succeeded"}


def _id(envelope: bytes) -> bytes | None:
    """Return the id of a task; None for an unreadable message."""
    try:
        found: str = orjson.loads(envelope)["id"]
    except orjson.JSONDecodeError:
        return None
    return found.encode()

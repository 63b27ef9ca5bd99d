"""Checks of streams at the end of a run: what each task has emitted is visible once, and its readers have seen it.

They read the stored entries, and find out themselves which of them marks have voided.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from .pages import Reader, number_of
from .streams import IN_ORDER, STREAMING

if TYPE_CHECKING:
    from ..app import Entry
    from ..world import World

__all__ = ["check_streams"]


@dataclass(frozen=True)
class _Stored:
    """An entry of a stream, as the server has it. attempt: of a mark, all items up to it are void; -1 for any.

    value: `{}` of a notice of a resume.
    """

    number: int
    unit: str
    attempt: int
    key: str
    mark: bool
    value: Any


def _stored(pairs: Sequence[bytes], entry: bytes) -> _Stored:
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
    cut = fields.get(b"cut")
    is_notice = fields.get(b"k", b"").startswith(b"resumed-")
    return _Stored(
        int(entry.partition(b"-")[0]),
        fields.get(b"u", b"").decode(),
        -1 if cut == b"all" else int(fields.get(b"y", 0)),
        fields.get(b"k", b"").decode(),
        cut is not None,
        None if cut else {} if is_notice else orjson.loads(fields[b"d"]),
    )


def _visible(entries: Iterable[_Stored]) -> list[_Stored]:
    """Return the items that no later mark voids."""
    shown: list[_Stored] = []
    for entry in entries:
        if entry.value == {}:
            continue
        if not entry.mark:
            shown.append(entry)
        elif entry.attempt < 0:
            shown = [item for item in shown if item.key]
        else:
            shown = [item for item in shown if item.key or item.unit != entry.unit or item.attempt > entry.attempt]
    return shown


@dataclass
class _Account:
    """What the handlers of a task have done, as the journal has it.

    Attributes:
        by_token: What a try has emitted that was not cut off. units: its step.
        finisher: The run that has returned a result last.
    """

    by_token: dict[str, dict[str, Any]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    runs: dict[int, list[Entry]] = field(default_factory=dict)
    finisher: int = 0

    def streams(self, token: str) -> Iterable[str]:
        """Return the streams into which a try has emitted."""
        return [*self.by_token[token]["counts"]] if token in self.by_token else []

    def places(self, token: str, stream: str) -> _Places:
        """Return what a try has emitted into a stream."""
        return [(token, number) for number in range(self.by_token[token]["counts"][stream])]

    @property
    def last_run(self) -> list[Entry]:
        """Calls of the run that has returned a result last."""
        return self.runs.get(self.finisher, [])


_Places = list[tuple[str, int]]
"""Items, each as the token of its try ("" for the body of a handler) and its number there."""


def _place(item: _Stored) -> tuple[str, int]:
    value = item.value
    return (value["token"], value["number"]) if "token" in value else ("", value["body"])


def check_streams(world: World) -> None:
    """Check at the end that each stream has what its task has emitted, and that readers have seen it."""
    if not any(task.kind in STREAMING for task in world.plan.tasks):
        return
    accounts: dict[str, _Account] = defaultdict(_Account)
    for entry in world.journal.entries:
        about = accounts[entry.task]
        if entry.what == "emitted":
            about.by_token[entry.value["token"]] = entry.value
            about.units[entry.value["token"]] = entry.step
        elif entry.what in ("says", "notes", "heard"):
            about.runs.setdefault(entry.run, []).append(entry)
        elif entry.what == "result":
            about.finisher = entry.run
    streams = _streams_of(world)
    kinds = {task.id: task.kind for task in world.plan.tasks if task.kind in STREAMING}
    kinds |= {f"{task}.h1": "narrates" for task, kind in kinds.items() if kind == "forwards"}
    for task, kind in kinds.items():
        _TaskCheck(world, task, kind, streams.get(task, {}), accounts[task]).check()
    _check_keys(world)
    for reader in world.pages.readers:
        _check_reader(world, reader, streams)


_KEY: Final = re.compile(rb"(\{sim:sim:\d+\}):(?:stream|stream-keys):(.+):[^:]+")


def _check_keys(world: World) -> None:
    """Check that each stream lives as long as the record of its task."""
    items = world.server.items
    for key, item in items.items():
        if (found := _KEY.fullmatch(key)) is not None:
            record = items.get(found[1] + b":record:" + found[2])
            ends = None if record is None else record.expireat
            if (
                record is None
                or (item.expireat is None) != (ends is None)
                or abs((item.expireat or 0) - (ends or 0)) > 1
            ):
                world.checks.add("leak", f"{key.decode()} ends at {item.expireat}, its record at {ends}")


def _streams_of(world: World) -> dict[str, dict[str, list[_Stored]]]:
    found: dict[str, dict[str, list[_Stored]]] = {}
    for key, item in world.server.items.items():
        if b":stream:" in key:
            task, _, name = key.partition(b":stream:")[2].decode().rpartition(":")
            found.setdefault(task, {})[name] = [_stored(pairs, entry) for entry, pairs in item.value]
    return found


class _TaskCheck:
    """Checks of the streams of one task."""

    def __init__(
        self, world: World, task: str, kind: str, streams: dict[str, list[_Stored]], account: _Account
    ) -> None:
        self._world, self._task, self._kind = world, task, kind
        self._streams, self._account = streams, account
        self._visible = {name: _visible(entries) for name, entries in streams.items()}

    def _add(self, kind: str, text: str) -> None:
        self._world.checks.add(kind, f"{self._task} ({self._kind}) {text}")

    def check(self) -> None:
        for name, entries in self._streams.items():
            self._check_ids(name, entries)
            self._check_runs(name, entries)
            self._check_units(name)
        for key, token in _recorded(self._world, self._task).items():
            for name in self._account.streams(token):
                self._compare(name, key, self._account.places(token, name))
            self._check_keys(self._account.by_token.get(token, {}).get("keys", ()))
        if self._world.checks.state(self._task) == "succeeded":
            self._check_succeeded()

    def _trimmed(self, name: str) -> bool:
        entries = self._streams.get(name) or []
        return any(entry.number > 1 for entry in entries[:1])

    def _check_ids(self, name: str, entries: list[_Stored]) -> None:
        numbers = [entry.number for entry in entries]
        first = numbers[0] if numbers and self._kind == "floods" else 1
        if numbers != [*range(first, first + len(numbers))]:
            self._add("stream ids", f"has the items {numbers} in {name}")
        keyed = Counter(entry.key for entry in entries if entry.key)
        if any(count > 1 for count in keyed.values()):
            self._add("keyed twice", f"has {keyed} in {name}")

    def _check_runs(self, name: str, entries: list[_Stored]) -> None:
        """Check that no run emits after a later one has."""
        runs = [entry.value["run"] for entry in entries if not entry.mark and "run" in entry.value]
        order = [run for at, run in enumerate(runs) if at == 0 or runs[at - 1] != run]
        if len(order) > len(set(order)):
            self._add("stale item", f"has items of the runs {order} in {name}")

    def _check_units(self, name: str) -> None:
        """Check that visible items of a unit are of one try, each once and in order."""
        units: dict[str, _Places] = defaultdict(list)
        for item in self._plain(name):
            units[item.unit].append(_place(item))
        for unit, places in units.items():
            tokens, numbers = {token for token, _ in places}, [number for _, number in places]
            first = numbers[0] if self._trimmed(name) else int(tokens == {""})
            if len(tokens) > 1 or numbers != [*range(first, first + len(numbers))]:
                self._add("doubled item", f"has {places} of {unit!r} in {name}")

    def _compare(self, name: str, unit: str, wanted: _Places) -> None:
        items = [item for item in self._plain(name) if item.unit == unit]
        self._check_same("missing item", f"of {unit!r} in {name}", name, items, wanted)

    def _plain(self, name: str) -> list[_Stored]:
        return [item for item in self._visible.get(name, ()) if not item.key]

    def _check_same(self, kind: str, where: str, name: str, items: Iterable[_Stored], wanted: _Places) -> None:
        """Check that items are the wanted ones, or the last of them in a stream that was trimmed."""
        found = [_place(item) for item in items]
        if found != wanted and not (self._trimmed(name) and found == wanted[len(wanted) - len(found) :]):
            self._add(kind, f"has {found} {where}, not {wanted}")

    def _check_keys(self, keys: Iterable[str]) -> None:
        stored = {item.value.get("key") for item in self._visible.get("facts", ()) if item.key}
        if missing := set(keys) - stored:
            self._add("missing item", f"has no {sorted(missing)} in facts")

    def _check_succeeded(self) -> None:
        """Check what the run has emitted that has returned the result."""
        if self._kind == "speaks":
            for token in _result_of(self._world, self._task) or ():
                self._compare("output", self._account.units[token], self._account.places(token, "output"))
        for item in [item for items in self._visible.values() for item in items if "token" in item.value]:
            if item.value["token"] not in self._account.by_token:
                self._add("void item", f"has {item.value} of a try that was cut off")
        bodies: dict[tuple[str, str], _Places] = defaultdict(list)
        whole: dict[str, _Places] = defaultdict(list)
        for entry in self._account.last_run:
            if entry.what == "says":
                name, number = entry.value
                bodies[name, entry.step].append(("", number))
                whole[name].append(("", number))
            elif entry.what == "notes":
                self._check_keys([entry.value])
            else:
                for name in self._account.streams(entry.value):
                    whole[name] += self._account.places(entry.value, name)
        for (name, scope), wanted in bodies.items():
            self._compare(name, scope, wanted)
        if self._kind in IN_ORDER:
            for name, wanted in whole.items():
                self._check_same("item order", f"in {name}", name, self._plain(name), wanted)


def _recorded(world: World, task: str) -> dict[str, str]:
    """Return the results of the recorded steps of a task that are tokens, by step."""
    found = {}
    for key, item in world.server.items.items():
        if key.endswith(b":steps:" + task.encode()):
            for name, value in item.value._values.items():
                result = value.partition(b"\n")[2]
                if name.startswith(b"d:") and result.startswith(b'"'):
                    found[name[2:].decode()] = orjson.loads(result)
    return found


def _result_of(world: World, task: str) -> Any:
    for key, item in world.server.items.items():
        if key.endswith(b":record:" + task.encode()) and b"result" in item.value._values:
            return orjson.loads(item.value._values[b"result"])
    return None


def _check_reader(world: World, reader: Reader, streams: dict[str, dict[str, list[_Stored]]]) -> None:
    """Check that a page shows what is stored, and has the end that the record has."""
    end, lost = reader.end, world.checks.lost(f":record:{reader.task}")
    if end is None:
        if not reader.gone:
            world.checks.add("no end", f"{reader} has {len(reader.shown)} items and no end")
        elif not lost and reader.task not in world.cancelled:
            world.checks.add("no end", f"{reader} did not find the task")
        return
    states = world.checks.states.get(end.task_id, [])
    if not lost and not _held(states, end.state, reader.opened, reader.ended):
        world.checks.add("other end", f"{reader} ended with {end.state} at {reader.ended}: {states}")
    if end.state == "succeeded" and not lost and end.result != _result_of(world, end.task_id):
        world.checks.add("other end", f"{reader} ended with {end.result}")
    tasks = [*dict.fromkeys([item.task_id for item in reader.shown] + [end.task_id])]
    for task in tasks:
        stored = streams.get(task, {}).get(reader.stream, [])
        until = number_of(end) if task == end.task_id else stored[-1].number if stored else 0
        begins = reader.last is not None and task == next(iter(reader.seen), end.task_id)
        begin = reader.seen.get(task, until + 1) if begins else 1
        kept = [item for item in _visible(entry for entry in stored if entry.number <= until) if item.number >= begin]
        shown = [(number_of(item), item.value) for item in reader.shown if item.task_id == task]
        wanted = [(item.number, item.value) for item in kept]
        if lost and (
            reader.loads > 1 or task != end.task_id or world.server.lost_at > reader.ended or end.state == "expired"
        ):
            continue  # other items have the numbers of those that were lost, and its cursor does not tell
        if lost and reader.opened < world.server.lost_at and _differ_at_the_beginning(shown, wanted):
            continue  # the same, and the lost ones were stored again before it looked the next time
        if reader.trimmed or (stored and stored[0].number > 1):
            shown = [item for item in shown if item[0] >= stored[0].number]
            missing = False
        else:
            missing = shown != wanted
        if missing or not set(map(str, shown)) <= set(map(str, wanted)):
            world.checks.add("shown", f"{reader} shows {shown} of {task} at its end, not {wanted}")
    last = streams.get(end.task_id, {}).get(reader.stream, [])
    if last and last[-1].number > number_of(end) and not world.replays[end.task_id] and not lost:
        world.checks.add("shown", f"{reader} ended at {number_of(end)}, and {last[-1].number} items are stored")


def _differ_at_the_beginning(shown: Sequence[tuple[int, Any]], wanted: Sequence[tuple[int, Any]]) -> bool:
    """Return whether only the values of the first items differ, which have the same numbers."""
    differs = [one != other for one, other in zip(shown, wanted, strict=False)]
    return [number for number, _ in shown] == [number for number, _ in wanted] and differs == sorted(
        differs, reverse=True
    )


def _held(states: Sequence[tuple[float, str]], state: str | None, since: float, until: float) -> bool:
    """Return whether a task had a state at a time between two."""
    ends = [at for at, _ in states[1:]] + [float("inf")]
    return any(name == state and at <= until and end >= since for (at, name), end in zip(states, ends, strict=True))

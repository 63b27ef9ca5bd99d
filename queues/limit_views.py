"""Limits as operators see them: their numbers, what holds them, what waits for them, and the last changes.

Reading is bounded: of many holders, keys and tasks the first ones are read, and counts that leave some out say so.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from pydantic_core import from_json

from .catalog import CatalogTask, read_catalog
from .envelope import NO_KEY
from .errors import QueueError, Refused, WrongType
from .inspection.views import queue_partitions
from .keys import Namespace, Partition
from .limits.control import LimitNote, read_notes
from .limits.definition import label_text
from .limits.store import LimitStore, LimitView, parse_member
from .limits.task_limits import UseOfLimit
from .records import Record, read_tasks
from .transport.gateway import Gateway
from .transport.pipelining import Command
from .transport.scripts import pairs
from .wording import duration, iso_time

_KEYS: Final = 1_000
"""Waiting keys of a ring whose tasks are counted."""

_CONCURRENT: Final = 64
"""Partitions that are read at the same time."""

_UNITS: Final = (("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000))

_EXACT: Final = 1e-3
"""Difference to a whole number that comes from rounding."""

_ABSENT: Final = ("", "-")

BreakerState = Literal["closed", "open", "half-open"]


class HoldingTask(NamedTuple):
    """Task that holds a limit.

    key: text of its key; the digest if that is not known, empty where the limit has no keys. seconds: until its token
    expires unless it is renewed.
    """

    task_id: str
    queue: str
    partition: int
    key: str
    seconds: float

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return self._asdict()


class WaitingKey(NamedTuple):
    """Tasks that wait for their turn under one key.

    task_id: the first of them, since `since` (ms of Redis' clock). key_id, ring: their waiting list, see `gate_of`.
    label: text of the key of the limit; the digest if that is not known, empty where the limit has no keys.
    """

    queue: str
    partition: int
    key_id: str
    ring: str
    tasks: int
    task_id: str
    since: int
    label: str = ""

    def key_of(self, limit: str) -> str:
        """Return the digest of the key that these tasks have of one of their limits; `-` for none."""
        names, keys = self.ring.split(","), self.key_id.removeprefix("o").split(",")
        key = dict(zip(names, keys, strict=False)).get(limit, NO_KEY)
        return NO_KEY if key.startswith("-") else key

    @property
    def hint(self) -> str:
        """The waiter that an admission looks at, see `admit_now`."""
        return f"{self.queue}/{self.partition}/{self.key_id}/{self.ring}"

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "queue": self.queue,
            "partition": self.partition,
            "key": self.label,
            "limits": self.ring.split(","),
            "tasks": self.tasks,
            "first": self.task_id,
            "since": iso_time(self.since),
        }


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """A limit in numbers, by the definition and what operators have set.

    Attributes:
        fields: Stored fields that are in force, see `Limit.published`.
        changed: Names of those that an operator has set.
        in_use: Tokens that tasks hold, of all keys.
        waiting: Tasks that wait for it; `more` if not all were counted.
        held_until: Time until which it is held, in milliseconds of Redis' clock; None if it is not.
        breaker: State of its breaker; None without one. open_until: of an open one, in milliseconds.
        problem: What is wrong with it; empty for nothing.
        revision: Number of its last change by an operator; a change that names it replaces no other one.
    """

    name: str
    app: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    in_use: int = 0
    waiting: int = 0
    more: bool = False
    held_until: int | None = None
    breaker: BreakerState | None = None
    open_until: int | None = None
    now: int = 0
    problem: str = ""
    revision: int = 0

    def number(self, name: str) -> int | None:
        """Return a number of tokens; None for no such limit."""
        text = self.fields.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else None

    @property
    def total(self) -> int | None:
        """Tokens of all keys at once."""
        return self.number("total")

    @property
    def running(self) -> int | None:
        """Tokens of each key at once."""
        return self.number("running")

    @property
    def rate(self) -> str | None:
        """The rate, such as `500/m`."""
        return _shown_rate(self.fields, "interval", "burst")

    @property
    def cost(self) -> str | None:
        """The rate of the costs."""
        return _shown_rate(self.fields, "cost_interval", "cost_burst")

    @property
    def by(self) -> str:
        """Names of the arguments that make its key, or `a function`; empty for no keys."""
        return self.fields.get("by", "")

    @property
    def state(self) -> str:
        """The hold or the breaker that stops all starts: `held 25 s`, `breaker open 12 s`; empty for neither."""
        if self.held_until is not None:
            return f"held {duration((self.held_until - self.now) / 1000, whole=True)}"
        if self.breaker == "open" and self.open_until is not None:
            return f"breaker open {duration((self.open_until - self.now) / 1000, whole=True)}"
        return "breaker half-open" if self.breaker == "half-open" else ""

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "name": self.name,
            "app": self.app,
            "total": self.total,
            "running": self.running,
            "by": self.by or None,
            "rate": self.rate,
            "cost": self.cost,
            "changed": list(self.changed),
            "in_use": self.in_use,
            "waiting": self.waiting,
            "waiting_more": self.more,
            "held_until": iso_time(self.held_until),
            "breaker": self.breaker,
            "open_until": iso_time(self.open_until),
            "revision": self.revision,
            **({"problem": self.problem} if self.problem else {}),
        }


class LimitDetails(NamedTuple):
    """A limit with the first of its holders and of the keys that wait, and the last changes.

    queues: waiting tasks by queue.
    """

    status: LimitStatus
    holders: Sequence[HoldingTask]
    waiting: Sequence[WaitingKey]
    queues: Mapping[str, int]
    notes: Sequence[LimitNote]


class Waiting(NamedTuple):
    """Tasks that wait for a limit. tasks: by queue. keys: the first ones. more: whether some were not counted."""

    tasks: Mapping[str, int]
    keys: Sequence[WaitingKey]
    more: bool = False


async def list_limits(gateway: Gateway, namespace: Namespace) -> list[LimitStatus]:
    """Return all limits of a namespace by name, with the numbers of what holds them and what waits.

    One of which another program wrote a key is a row with its problem, and hides no other.
    """
    store = LimitStore(gateway, namespace)
    names = await store.names()
    problems: dict[str, str] = {}
    try:
        views = await store.read(names, most=1)
    except WrongType:
        views = []
        for name in names:
            try:
                views += await store.read([name], most=1)
            except WrongType:
                problems[name] = "another program wrote a key of it: workers move the value away at its next use"
    waiting = await waiting_for(gateway, namespace, [view.name for view in views])
    found = [_status(view, waiting[view.name]) for view in views if _is_known(view)]
    damaged = [LimitStatus(name, problem=problem) for name, problem in problems.items()]
    return sorted([*found, *damaged], key=lambda status: status.name)


async def show_limit(gateway: Gateway, namespace: Namespace, name: str, *, most: int = 100) -> LimitDetails | None:
    """Return a limit with its first holders and waiting keys; None for one that is neither published nor in use."""
    (view,) = await LimitStore(gateway, namespace).read([name], most=most)
    waiting = (await waiting_for(gateway, namespace, [name], most=most))[name]
    notes = await read_notes(gateway, namespace, name)
    status = _status(view, waiting)
    if not (_is_known(view) or view.held or waiting.keys):
        return None
    tasks = {key.key_of(name): (key.queue, key.partition, key.task_id) for key in waiting.keys}
    for holder in view.holders:
        if (place := parse_member(holder.member)) is not None:
            tasks[holder.key] = (place.queue, place.partition, place.task_id)
    texts = await _labels(gateway, namespace, name, tasks)
    keys = [key._replace(label=texts[key.key_of(name)]) for key in waiting.keys]
    return LimitDetails(status, _holders(view, texts), keys, waiting.tasks, notes)


def _is_known(view: LimitView) -> bool:
    """Return whether there is more than what is left of a change that was reset."""
    return "digest" in view.defined or bool(_overrides(view)) or _held_until(view) is not None


def _overrides(view: LimitView) -> dict[str, str]:
    return {name: value for name, value in view.overrides.items() if name not in ("change", "act", "at", "hold", "by")}


def _held_until(view: LimitView) -> int | None:
    ends = max(_whole(view.defined.get("hold")), _whole(view.overrides.get("hold")))
    return ends if ends > view.now else None


def _status(view: LimitView, waiting: Waiting) -> LimitStatus:
    overrides = _overrides(view)
    fields = {name: value for name, value in {**view.defined, **overrides}.items() if value not in _ABSENT}
    breaker, open_until = _breaker(view, fields)
    return LimitStatus(
        view.name,
        app=view.defined.get("app", ""),
        fields=fields,
        changed=tuple(sorted(overrides)),
        in_use=view.held,
        waiting=sum(waiting.tasks.values()),
        more=waiting.more,
        held_until=_held_until(view),
        breaker=breaker,
        open_until=open_until,
        now=view.now,
        problem="" if "digest" in view.defined else "no worker has published it: tasks that need it wait",
        revision=view.revision,
    )


def status_of(view: LimitView) -> LimitStatus:
    """Return a limit in numbers, without what waits for it."""
    return _status(view, Waiting({}, [], False))


def _breaker(view: LimitView, fields: Mapping[str, str]) -> tuple[BreakerState | None, int | None]:
    if "errors" not in fields:
        return None, None
    opened = _whole(view.defined.get("opened"))
    if not opened:
        return "closed", None
    return ("open", opened) if opened > view.now else ("half-open", None)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def _shown_rate(fields: Mapping[str, str], interval_name: str, burst_name: str) -> str | None:
    try:
        interval, burst = float(fields[interval_name]), int(fields[burst_name])
    except (LookupError, ValueError):
        return None
    if not 0 < interval < float("inf"):
        return None
    whole = [(round(ms / interval), unit) for unit, ms in _UNITS if abs(ms / interval - round(ms / interval)) < _EXACT]
    for count, unit in whole:
        if count == burst:
            return f"{count:,}/{unit}"
    for count, unit in whole:
        if count > 0:
            return f"{count:,}/{unit} (burst {burst:,})"
    return f"1 each {duration(interval / 1000)} (burst {burst:,})"


def _holders(view: LimitView, texts: Mapping[str, str]) -> list[HoldingTask]:
    found = []
    for holder in view.holders:
        place = parse_member(holder.member)
        task = (holder.member, "", 0) if place is None else (place.task_id, place.queue, place.partition)
        found.append(HoldingTask(*task, texts.get(holder.key, holder.key), max(0.0, holder.left)))
    return found


_Place = tuple[str, int, str]
"""Queue, partition and id of a task."""


async def _labels(gateway: Gateway, namespace: Namespace, name: str, tasks: Mapping[str, _Place]) -> dict[str, str]:
    """Return the texts of keys of a limit by their digests; the digest where it is not known, nothing for no key.

    The text of a key of `ctx.limit` is stored. That of a task is made of its arguments, by the catalog: so no task that
    starts writes one. tasks: a task of each digest.
    """
    places = [(name, digest) for digest in sorted(tasks.keys() - {NO_KEY})]
    known = await LimitStore(gateway, namespace).labels(places) if places else {}
    found = {digest: known[name, digest] for _, digest in places if (name, digest) in known}
    unknown = {digest: tasks[digest] for _, digest in places if digest not in found}
    if unknown:
        found |= await _texts_of_tasks(gateway, namespace, name, unknown)
    return {NO_KEY: ""} | {digest: digest for _, digest in places} | found


async def _texts_of_tasks(
    gateway: Gateway, namespace: Namespace, name: str, tasks: Mapping[str, _Place]
) -> dict[str, str]:
    """Return the texts of the keys that the arguments of tasks make, by their digests, of those that are known."""
    catalog = await read_catalog(gateway, namespace)
    by_partition: dict[Partition, list[str]] = defaultdict(list)
    for queue, index, task_id in tasks.values():
        by_partition[Partition(namespace.name, queue, index)].append(task_id)
    texts: dict[str, str] = {}
    for partition, task_ids in by_partition.items():
        for record in await read_tasks(gateway, partition, task_ids):
            if record is not None and record.task is not None:
                for use, values in _uses(record, catalog.named(record.task, record.app)):
                    if use.name == name and values is not None:
                        texts[use.key] = label_text(values)
    return texts


def _uses(record: Record, tasks: Sequence[CatalogTask]) -> Sequence[UseOfLimit]:
    """Return the uses of limits of a task by its arguments; none if these or its definition cannot be read."""
    try:
        arguments = from_json(record.shown_arguments() or b"")
        limits = tasks[0].task_limits() if tasks else None
        return [] if limits is None else limits.uses(arguments, ())
    except (QueueError, ValueError, TypeError):  # such as a key that only the app can make
        return []


async def waiting_for(
    gateway: Gateway, namespace: Namespace, names: Collection[str], *, most: int = 0
) -> dict[str, Waiting]:
    """Return the tasks that wait for each of these limits, of all queues. most: keys that are returned of each."""
    tasks: dict[str, dict[str, int]] = {name: defaultdict(int) for name in names}
    keys: dict[str, list[WaitingKey]] = {name: [] for name in names}
    more: set[str] = set()
    partitions = await queue_partitions(gateway, namespace) if names else []
    for start in range(0, len(partitions), _CONCURRENT):
        some = partitions[start : start + _CONCURRENT]
        for lines in await asyncio.gather(*(_lines(gateway, one, names, most) for one in some)):
            for line in lines:
                for name in tasks.keys() & set(line.ring.split(",")):
                    tasks[name][line.queue] += line.tasks
                    keys[name] += line.keys
                    more |= {name} if line.more else set()
    found = {name: sorted(keys[name], key=lambda key: key.since)[:most] for name in names}
    return {name: Waiting(dict(tasks[name]), found[name], name in more) for name in names}


class _Line(NamedTuple):
    """Tasks of one ring of a partition."""

    queue: str
    ring: str
    tasks: int
    keys: Sequence[WaitingKey]
    more: bool


async def _lines(gateway: Gateway, partition: Partition, names: Collection[str], most: int) -> list[_Line]:
    try:
        listed = await gateway.command("ZRANGE", partition.rings, 0, -1)
    except Refused:  # of another type: workers move it out of the way
        return []
    rings = [ring.decode("utf-8", "replace") for ring in listed]
    return [await _line(gateway, partition, ring, most) for ring in rings if set(names) & set(ring.split(","))]


async def _line(gateway: Gateway, partition: Partition, ring: str, most: int) -> _Line:
    turns = partition.turns(ring)
    listed, size = await gateway.pipeline([("ZRANGE", turns, 0, _KEYS), ("ZCARD", turns)])
    key_ids = [key.decode("utf-8", "replace") for key in listed if key != b"~"]
    reads: list[Command] = []
    for key_id in key_ids:
        reads += [("ZCARD", partition.limited(key_id)), ("ZRANGE", partition.limited(key_id), 0, _FIRST, "WITHSCORES")]
    replies = await gateway.pipeline(reads) if reads else []
    counted, found = 0, list[WaitingKey]()
    for key_id, listed_tasks, flat in zip(key_ids, replies[::2], replies[1::2], strict=True):
        places = {task.decode("utf-8", "replace"): float(place) for task, place in pairs(flat).items()}
        tasks = listed_tasks
        if key_id.startswith("o"):  # tasks of an ordered key keep their place while they run
            for task_id in await _started(gateway, partition, list(places)):
                del places[task_id]
                tasks -= 1
        if tasks > 0 and places:
            counted += tasks
            if len(found) < most:
                task_id, place = next(iter(places.items()))
                since = int(place / 1000)
                found.append(WaitingKey(partition.queue, partition.index, key_id, ring, tasks, task_id, since))
    return _Line(partition.queue, ring, counted, found, size > _KEYS + 1)


_FIRST: Final = 15
"""Rank of the last task of a waiting list that is read."""


async def _started(gateway: Gateway, partition: Partition, task_ids: Sequence[str]) -> set[str]:
    """Return the tasks of an ordered key that do not wait for its limit."""
    states = await gateway.pipeline([("HGET", partition.record(task_id), "state") for task_id in task_ids])
    return {task_id for task_id, state in zip(task_ids, states, strict=True) if state != b"limited"}

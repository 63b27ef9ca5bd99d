"""Unique tasks: the rule, the digest of a key, and the marker that names the task of a key.

A marker is one string key in a slot of its own, since the tasks of one key may be in any partition:

    time of the claim in ms of Redis' clock, space, encrypted JSON: id of the task, index of its partition, the rule,
    whether the task is known to be stored, id and index of the task that it replaces, and a token of the claim

Its name is a digest of the task's queue, its name and the values of the key: the values themselves are in no key. The
marker says only which task to look at. Whether that task still has the key follows from its record (`holds`), so a
marker cannot leak: a task that has moved on has it no longer, whether or not anything removed the marker. A worker
removes it after the end of the task, so that keys that occur once take no memory.

unique_enqueueing.py has the acts of a producer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import orjson
from pydantic_core import from_json

from .defaults import MAX_SECONDS
from .durations import Duration, to_seconds
from .envelope import TaskMessage, is_task_id, plain_data
from .errors import InvalidUniqueKey, KeyMissing, NotEncrypted, TamperedData
from .keys import MarkerKey, Namespace, tenant_of
from .records import Record, State
from .transport.gateway import Gateway
from .transport.scripts import queue_script

if TYPE_CHECKING:
    from .argument_keys import By

_CLAIM = queue_script("claim_unique")


UniqueState = Literal["while_queued", "while_running"]
"""States of a task in which it has its key."""

Keep = Literal["first", "last"]

CLAIM_MS: Final = 10_000
"""Milliseconds for which a claim is respected whose task is not stored yet."""

STORE_MS: Final = 5_000
"""Milliseconds in which the task of a claim must be stored. The rest is for clocks of a cluster's nodes that differ."""

_KEPT_MS: Final = 400 * 86_400_000
"""Milliseconds for which a marker is kept after its task is due."""


@dataclass(frozen=True, slots=True)
class Unique:
    """Rule for tasks of which one of each key may be there: `@app.task(unique=Unique("while_running", by="order"))`.

    Enqueueing another one returns the handle of the task that is there, with `existed` true, or replaces it.

    Args:
        during: `while_queued`: until a worker starts the task. `while_running`: until it has ended. Or seconds (a
            number or a timedelta) from the enqueueing on, whatever becomes of the task.
        by: names of the arguments that make the key, whose values are texts, numbers, true, false or null; or a
            function that gets all arguments by name, as JSON data, and returns such a value or a tuple of them. None:
            all arguments.
        keep: `first` keeps the task that is there. `last` stores the new one and cancels the other.
        quiet: seconds without another enqueue after which the task may run, with the last arguments: a debounce.
            Implies `while_queued` and `last`.

    Raises:
        ValueError, TypeError: an argument is not one of these.
    """

    during: UniqueState | Duration = "while_queued"
    by: By = None
    keep: Keep | None = None
    quiet: Duration | None = None

    def __post_init__(self) -> None:
        during: object = self.during
        if not isinstance(during, str):
            object.__setattr__(self, "during", _seconds("a time", self.during))
        elif during not in get_args(UniqueState):
            raise ValueError(f"unique must be 'while_queued', 'while_running' or seconds, got {during!r}")
        from .argument_keys import check_by

        object.__setattr__(self, "by", check_by(self.by, "unique"))
        if self.keep not in (None, *get_args(Keep)):
            raise ValueError(f"keep of unique must be 'first' or 'last', got {self.keep!r}")
        if self.quiet is not None:
            object.__setattr__(self, "quiet", _seconds("quiet", self.quiet))
            if self.during != "while_queued" or self.keep == "first":
                raise ValueError("quiet of unique must go with 'while_queued' and keep='last'")
        object.__setattr__(self, "keep", self.keep or ("last" if self.quiet is not None else "first"))

    @property
    def span(self) -> UniqueState | float:
        """The states or the seconds in which a task has its key."""
        return self.during if isinstance(self.during, str) else to_seconds(self.during)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the arguments that make the key; None for all of them, or a function."""
        return self.by if isinstance(self.by, tuple) else None


def _seconds(what: str, given: Any) -> float:
    if isinstance(given, bool):
        raise TypeError(f"{what} of unique must be seconds or a timedelta, got {given!r}")
    seconds = to_seconds(given, f"{what} of unique")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{what} of unique must be more than 0 seconds and at most {MAX_SECONDS:.0e}, got {seconds:g}")
    return seconds


def check_unique(unique: object) -> Unique:
    """Return a rule. Raises `TypeError` for anything else."""
    if not isinstance(unique, Unique):
        raise TypeError(f"unique must be a Unique, such as Unique('while_running', by='order'), got {unique!r}")
    return unique


@dataclass(frozen=True, slots=True)
class UniqueTask:
    """The rule of one task. defaults: those of its arguments, as JSON data, where the producer knows them."""

    rule: Unique
    task: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, task: str, published: Mapping[str, Any]) -> UniqueTask:
        """Return the rule that workers have published for a task. Raises `ValueError`, `TypeError`."""
        names, defaults = published.get("by"), published.get("defaults")
        rule = Unique(published["during"], by=names, keep=published.get("keep"), quiet=published.get("quiet"))
        return cls(rule, task, defaults if isinstance(defaults, dict) else {})

    def published(self) -> dict[str, Any]:
        """Return the rule as JSON data, for the catalog of tasks. function: whether a function makes the key."""
        rule = self.rule
        shown = {"during": rule.during, "by": rule.names, "keep": rule.keep, "quiet": rule.quiet}
        return {**shown, "function": callable(rule.by), "defaults": dict(self.defaults)}

    def check_delay(self, delay: float) -> float:
        """Return the seconds until a task may run. Raises `ValueError` for a delay of a rule with `quiet`."""
        if self.rule.quiet is None:
            return delay
        if delay:
            raise ValueError(f"task {self.task!r}: delay must not be given where its rule for unique tasks has quiet")
        return to_seconds(self.rule.quiet)

    def digest(self, queue: str, message: TaskMessage) -> str:
        """Return the digest of the key of a message that is not encrypted yet. Raises `InvalidUniqueKey`."""
        secrets = {path[0] for path in orjson.loads(message.envelope).get("secrets", ()) if path}
        key = self.key(from_json(message.arguments), secrets)  # which keeps whole numbers of any size
        tenant = tenant_of(message.id)
        data = json.dumps([queue, self.task, key, *([] if tenant is None else [tenant])], sort_keys=True)
        return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()

    def key(self, given: Mapping[str, Any], secrets: set[str]) -> Any:
        """Return what makes the key of arguments, as JSON data. secrets: names of those that hold secrets."""
        from .argument_keys import KeyProblem, canonical, check_secret, named_values, returned_values

        by, arguments = self.rule.by, {**self.defaults, **given}
        try:
            if callable(by):
                return ["by", *returned_values(by, arguments)]
            if (names := self.rule.names) is not None:
                return named_values(names, arguments, secrets)
            for name in secrets.intersection(arguments):
                check_secret(name, secrets)
        except KeyProblem as problem:
            raise InvalidUniqueKey(f"task {self.task!r}: unique key {problem}") from None
        return canonical(arguments)


def unique_task(task: str, unique: Unique | Literal[False] | None) -> UniqueTask | None:
    """Return the rule of one call as that of a task; None without one. Raises `TypeError` for anything else."""
    return None if unique is None or unique is False else UniqueTask(check_unique(unique), task)


class KeyHolder(NamedTuple):
    """A task that has or had a key. partition: index of the partition where it is likely to be."""

    task_id: str
    partition: int


class Marker(NamedTuple):
    """Content of a marker. at: time of the claim, in milliseconds of Redis' clock; 0 for one that is not stored yet.

    holder: the task that has the key. during: its rule. stored: whether it is known to be stored. former: the task that
    it replaces. claim: a token, so that two claims of a task differ.
    """

    at: int
    holder: KeyHolder
    during: UniqueState | float
    stored: bool = False
    former: KeyHolder | None = None
    claim: str = ""

    def encode(self) -> bytes:
        """Return what is encrypted. The time is the server's."""
        return orjson.dumps([*self.holder, self.during, self.stored, *(self.former or ("", 0)), self.claim])

    def claimed(self, now: int) -> bool:
        """Return whether the task may still be stored. now: milliseconds of Redis' clock."""
        return not self.stored and now < self.at + CLAIM_MS

    def kept_ms(self, delay: float) -> int:
        """Return for how many milliseconds the marker is kept. delay: seconds until its task is due."""
        if isinstance(self.during, str):
            return _KEPT_MS + round(delay * 1000)
        return max(CLAIM_MS, round(self.during * 1000))


def holds(rule: Unique, marker: Marker, record: Record | None, now: int) -> bool:
    """Return whether the task of a marker has the key. record: None if it is not there, or not any more."""
    if not isinstance(span := rule.span, str):
        if now >= marker.at + span * 1000:
            return False
        if rule.keep == "first":
            return marker.stored or record is not None
        return record is not None and not record.state.terminal
    if record is None or record.state.terminal:
        return False
    return rule.during == "while_running" or not has_started(record)


def has_started(record: Record) -> bool:
    """Return whether a worker has started a task, in whatever state it is now."""
    begun = record.attempts or record.crashes or record.replays or record.returned or record.deliveries
    return bool(begun) or record.worker is not None or record.state in (State.RUNNING, State.WAITING)


class MarkerReply(NamedTuple):
    """Reply of the script.

    taken: whether the marker is what the caller wanted. now: time of Redis, of the claim if it is taken. held: the
    marker, if it is another one; empty for none.
    """

    taken: bool
    now: int
    held: bytes = b""


async def write_marker(
    gateway: Gateway, place: MarkerKey, marker: bytes, read: bytes, kept_ms: int, *, since_read: bool = False
) -> MarkerReply:
    """Replace a marker that the caller has read; see claim_unique.lua. marker: encrypted, empty to remove it."""
    taken, *rest = await gateway.run(_CLAIM, [place.key], [marker, read, kept_ms, "1" if since_read else ""])
    return MarkerReply(bool(taken), *rest)


def encode_marker(gateway: Gateway, place: MarkerKey, marker: Marker) -> bytes:
    """Return a marker encrypted."""
    return gateway.encryptor.of(place.place, place.digest).encrypt("unique", marker.encode())


def decode_marker(gateway: Gateway, place: MarkerKey, held: bytes) -> Marker | None:
    """Decode a marker; None for what no producer has written. Raises `KeyMissing`."""
    at, _, data = held.partition(b" ")
    try:
        fields = plain_data(gateway.encryptor.of(place.place, place.digest).decrypt("unique", data))
        task_id, partition, during, stored, former, former_partition, claim = fields
        if during not in get_args(UniqueState):
            during = float(during)
        holder = KeyHolder(task_id, partition)
        replaced = KeyHolder(former, former_partition) if former else None
        if not all(is_task_id(one.task_id) and one.partition >= 0 for one in (holder, replaced or holder)):
            return None
        return Marker(int(at), holder, during, bool(stored), replaced, str(claim))
    except KeyMissing:
        raise
    except (TamperedData, NotEncrypted, ValueError, TypeError):
        return None


async def free_marker(gateway: Gateway, namespace: Namespace, digest: str, task_id: str) -> None:
    """Remove the marker of a task that has ended, unless another one has the key, or it is for a number of seconds."""
    place = namespace.unique(digest)
    held = await gateway.command("GET", place.key)
    marker = None if held is None else decode_marker(gateway, place, held)
    if held is not None and marker is not None and marker.holder.task_id == task_id and isinstance(marker.during, str):
        await write_marker(gateway, place, b"", held, 0)

"""Stored schedules: reading them, publishing those of the code, and changes by operators.

A schedule is a hash in the slot of the namespace, which has, beside the definition, what operators have set in its
place, the last planned time that was fired, and the firing that is under way. Each change compares the revision that
its caller has read (write_compared.lua). The set of the schedules' names has the time at which workers look at each one
next; 0 lets them look now.

The code owns the schedules that its workers publish, and operators own those that they add. A worker publishes when
it starts, and renews that while it runs: a schedule that no running worker has any more is not fired, and is deleted a
month later. What operators set stays beside the definition, also when the code changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, TypeVar

import orjson

from ..compared_writes import Change, write_compared
from ..errors import ChangedMeanwhile, QueueError, ScheduleError, ScheduleNotFound, WrongType
from ..junk import count_of
from ..keys import LEFT_TTL_MS, Namespace
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from ..transport.pipelining import Command
from ..transport.scripts import milliseconds, pairs
from .call import ScheduledCall
from .definition import Cron, Every, Rules, read_when

FULL: Final = "full"
"""Field with the time at which a worker found no room in the queue, in milliseconds."""

FULL_MS: Final = 10_000
"""Milliseconds for which that counts: workers look again before."""

MAX_RUNS: Final = 20
"""Firings that a schedule remembers."""

FRESH_MS: Final = 60_000
"""Milliseconds for which a schedule of the code is fired after a worker has published it last, at least."""

KEPT_MS: Final = 30 * 86_400_000
"""Milliseconds after which a schedule of the code is deleted that no worker publishes."""

_CALL: Final = "call"
"""Kind of encrypted data: the task of a schedule."""

_TRIES: Final = 100
"""Changes of one schedule by others that one call may meet."""

T = TypeVar("T")

Owner = Literal["code", "operator"]


@dataclass(frozen=True, slots=True)
class ScheduleDefinition:
    """A schedule as it is declared."""

    name: str
    when: Cron | Every
    rules: Rules
    call: ScheduledCall


class ScheduledRun(NamedTuple):
    """A firing. planned, at: milliseconds. how: `fired`, `unique` if another task had the unique key, or `by hand`."""

    planned: int
    task_id: str
    queue: str
    at: int
    how: str = "fired"


@dataclass(frozen=True)
class StoredSchedule:
    """A schedule as it is stored: fields of the hash, as they were read at `now`, in milliseconds of Redis' clock."""

    name: str
    fields: Mapping[bytes, bytes]
    now: int
    look: float | None = None
    open_call: Callable[[str, bytes], bytes] = field(default=lambda _, data: data, repr=False)

    def text(self, name: str) -> str:
        return self.fields.get(name.encode(), b"").decode("utf-8", "replace")

    def number(self, name: str) -> int:
        return count_of(self.fields.get(name.encode()))

    @property
    def exists(self) -> bool:
        return b"owner" in self.fields and b"removed" not in self.fields

    @property
    def revision(self) -> int:
        return self.number("revision")

    @property
    def definition_revision(self) -> str:
        """Digest of the definition, of what operators have set, and of the pause: firings do not change it."""
        names = ("owner", "app", "when", "rules", "call", "paused", "set:when", "set:rules", "set:call")
        parts = [self.fields.get(name.encode(), b"").hex() for name in names]
        return hashlib.blake2b(orjson.dumps(parts), digest_size=8).hexdigest()

    @property
    def owner(self) -> Owner:
        return "operator" if self.text("owner") == "operator" else "code"

    @property
    def app(self) -> str:
        """The app whose workers publish it, or whose task it enqueues; empty for any."""
        return self.text("app")

    @property
    def published(self) -> bool:
        """Whether a running worker has it, or an operator owns it."""
        if self.owner == "operator":
            return True
        return self.now - self.number("seen") <= max(FRESH_MS, self.number("fresh"))

    @property
    def paused(self) -> Mapping[str, Any] | None:
        """The pause: who paused it, and why; None without one."""
        if b"paused" not in self.fields:
            return None
        return _object(self.fields[b"paused"])

    @property
    def edited(self) -> list[str]:
        """The parts that operators have set in place of the definition."""
        return [part for part in ("when", "rules", "call") if f"set:{part}".encode() in self.fields]

    def _part(self, name: str) -> bytes:
        return self.fields.get(f"set:{name}".encode(), self.fields.get(name.encode(), b""))

    @cached_property
    def when(self) -> Cron | Every:
        """When it fires. Raises `ScheduleError`."""
        return self._read("its times", lambda: read_when(orjson.loads(self._part("when"))))

    @cached_property
    def rules(self) -> Rules:
        """Raises `ScheduleError`."""

        def read() -> Rules:
            found = orjson.loads(self._part("rules"))
            return Rules.of(self.when, found["missed"], found["jitter"])

        return self._read("its rules", read)

    @cached_property
    def call(self) -> ScheduledCall:
        """The task. Raises `ScheduleError`, `DecryptionError`."""
        return self.open(self._part("call"))

    @property
    def stored_call(self) -> bytes:
        """The task as it is stored."""
        return self._part("call")

    def open(self, stored: bytes) -> ScheduledCall:
        """Return a stored task. Raises `ScheduleError`, `DecryptionError`."""
        return self._read("its task", lambda: ScheduledCall.decode(self.open_call(self.name, stored)))

    def _read(self, what: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except QueueError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ScheduleError(f"could not read schedule {self.name!r}: {what}: {error}") from None

    @property
    def last(self) -> int:
        """The last planned time that was fired or left out, in milliseconds."""
        return self.number("last")

    @property
    def epoch(self) -> int:
        """A number that is raised when the planned times begin again; see fire_schedule.lua."""
        return self.number("epoch")

    @property
    def ahead(self) -> bool:
        """Whether the last planned time is later than Redis' clock, which was set back: nothing is fired until then."""
        return self.last > self.now

    @property
    def full(self) -> bool:
        """Whether a planned time waits for room in the queue."""
        return self.now - self.number(FULL) < FULL_MS

    @property
    def next(self) -> int | None:
        """The next planned time, in milliseconds; None if it is not known yet, or there is no later time."""
        return self.number("next") or None

    @property
    def runs(self) -> list[ScheduledRun]:
        """The last firings, the newest first."""
        found = []
        with suppress(ValueError, TypeError):
            for run in orjson.loads(self.fields.get(b"runs", b"[]")):
                planned, task_id, queue, at, how = run
                found.append(ScheduledRun(int(planned), str(task_id), str(queue), int(at), str(how)))
        return found

    @property
    def firing(self) -> Mapping[str, Any] | None:
        """The firing under way: its planned times, queue and index of the partition; None without one."""
        return _object(self.fields[b"firing"]) if b"firing" in self.fields else None


def _object(data: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        found = orjson.loads(data)
        if isinstance(found, dict):
            return found
    return {}


class ScheduleStore:
    """The schedules of a namespace."""

    def __init__(self, gateway: Gateway, namespace: Namespace) -> None:
        self._gateway = gateway
        self._namespace = namespace

    async def read(self, name: str) -> StoredSchedule:
        """Return a schedule; `exists` says whether there is one."""
        (found,) = await self._read([name])
        return found

    async def read_all(self, most: int = 10_000) -> list[StoredSchedule]:
        """Return all schedules by name."""
        names = await self._gateway.command("ZRANGE", self._namespace.schedules, 0, most - 1)
        read = await self._read(sorted(name.decode("utf-8", "replace") for name in names))
        return [schedule for schedule in read if schedule.exists]

    async def _read(self, names: Sequence[str]) -> list[StoredSchedule]:
        index = self._namespace.schedules
        keys = [self._namespace.schedule(name) for name in names]
        commands: list[Command] = [("HGETALL", key) for key in keys]
        commands += [*(("ZSCORE", index, name) for name in names), ("TIME",)]
        replies: list[Any] = []
        for _ in range(2):
            replies = await self._gateway.pipeline_each(commands, node_of=index)
            pairs_of_keys = zip([*keys, *([index] * len(names))], replies, strict=False)
            wrong = {key for key, reply in pairs_of_keys if isinstance(reply, WrongType)}
            if not wrong or not await self._gateway.set_keys_aside(wrong):
                break
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        now, looks = milliseconds(replies[-1]), replies[len(names) : -1]
        return [
            StoredSchedule(name, pairs(fields), now, None if look is None else float(look), self._open)
            for name, fields, look in zip(names, replies, looks, strict=False)
        ]

    def _open(self, name: str, data: bytes) -> bytes:
        return self._gateway.encryptor.of(self._namespace.schedule_place, name).decrypt(_CALL, data)

    def _seal(self, name: str, call: ScheduledCall) -> bytes:
        return self._gateway.encryptor.of(self._namespace.schedule_place, name).encrypt(_CALL, call.encode())

    async def write(
        self, read: StoredSchedule, change: Change, *, look: int | Literal["-"] | None = None, ttl: int | None = None
    ) -> bool:
        """Change a schedule if nothing has since it was read; return whether it was changed.

        Args:
            look: Milliseconds of the next look; "-" for none.
            ttl: Milliseconds after which it is deleted.
        """
        key, index = self._namespace.schedule(read.name), self._namespace.schedules
        how: Any = {"index": index, "name": read.name, "score": look, "ttl": ttl}
        changed = await write_compared(self._gateway, key, read.revision, change, **how)
        if changed and look == 0:
            with suppress(QueueError):  # a hint: workers look once a second
                await self._gateway.command("PUBLISH", self._namespace.schedule_channel, read.name)
        return changed

    async def _change(
        self, name: str, make: Callable[[StoredSchedule], tuple[Change, int | Literal["-"] | None, int | None] | None]
    ) -> StoredSchedule:
        """Read and change a schedule until nothing came between. make: returns None for no change."""
        for _ in range(_TRIES):
            read = await self.read(name)
            made = make(read)
            if made is None or await self.write(read, made[0], look=made[1], ttl=made[2]):
                return await self.read(name)
        raise ScheduleError(f"could not change schedule {name!r}: others change it all the time; try again")

    def _stored(self, definition: ScheduleDefinition) -> dict[str, bytes | str]:
        """Return the fields of a definition."""
        return {
            "when": orjson.dumps(definition.when.form()),
            "rules": orjson.dumps({"missed": definition.rules.missed, "jitter": definition.rules.jitter}),
            "task": definition.call.task,
            "queue": definition.call.queue,
        }

    async def publish(
        self,
        definitions: Sequence[ScheduleDefinition],
        app: str,
        *,
        aliases: Collection[str] = (),
        starts: bool = False,
        fresh: float = 0.0,
    ) -> list[str]:
        """Publish the schedules of a worker's code, or renew them; return what is wrong, a sentence each.

        Args:
            starts: Whether the worker starts: its definitions replace those of earlier workers.
            fresh: Seconds for which the schedules count as published.
        """
        problems = []
        for read in await self._read([definition.name for definition in definitions]) if definitions else []:
            definition = next(one for one in definitions if one.name == read.name)
            problem = await self._publish(read, definition, {app, *aliases}, app, starts, round(fresh * 1000))
            if problem:
                problems.append(problem)
        return problems

    async def _publish(
        self,
        read: StoredSchedule,
        definition: ScheduleDefinition,
        apps: Collection[str],
        app: str,
        starts: bool,
        fresh: int,
    ) -> str | None:
        for _ in range(_TRIES):
            if read.exists and read.owner == "operator":
                return (
                    f"schedule {read.name!r} of app {app!r} is not published: an operator has added one of this name; "
                    f"remove that with 'perdure schedule remove {read.name}', or rename the one of the code"
                )
            if read.exists and read.app not in apps and read.published:
                return (
                    f"schedule {read.name!r} of app {app!r} is not published: app {read.app!r} has one of this name; "
                    "rename one of them"
                )
            change, look = self._publication(read, definition, app, starts, fresh)
            if not change or await self.write(read, change, look=look):
                return None
            read = await self.read(read.name)
        return f"schedule {read.name!r} of app {app!r} is not published: others change it all the time"

    def _publication(
        self, read: StoredSchedule, definition: ScheduleDefinition, app: str, starts: bool, fresh: int
    ) -> tuple[Change, int | None]:
        """Return what publishing changes, and the time of the next look."""
        change: dict[str, str | int | bytes] = {}
        look: int | None = None
        if not read.published or not 0 <= read.now - read.number("seen") <= FRESH_MS // 3:
            change |= {"seen": read.now, "fresh": fresh}
        if not read.exists:
            change |= {
                "owner": "code",
                "app": app,
                "last": read.now,
                "epoch": read.now,
                "removed": "",
                "seen": read.now,
                "fresh": fresh,
            }
            change |= {**self._stored(definition), "call": self._seal(read.name, definition.call)}
            return change, 0
        if starts or read.app != app:
            stored = self._stored(definition)
            known = {name: read.fields.get(name.encode()) for name in stored}
            changed = {name: value for name, value in stored.items() if known[name] != _bytes(value)}
            if not self._same_call(read, definition.call):
                changed["call"] = self._seal(read.name, definition.call)
            change |= changed
            if read.app != app:
                change["app"] = app
            if {"when", "rules"} & {*changed}:
                look = 0
            if "when" in changed and "set:when" not in [f"set:{part}" for part in read.edited]:
                change |= {"last": max(read.last, read.now), "next": ""}
        if not read.published or (change and read.look is None):
            look = 0
        return change, look

    def _same_call(self, read: StoredSchedule, call: ScheduledCall) -> bool:
        try:
            return read.open(read.fields.get(b"call", b"")) == call
        except QueueError:
            return False

    async def add(self, definition: ScheduleDefinition) -> StoredSchedule:
        """Add a schedule that operators own. Raises `ScheduleError` if there is one of this name."""
        token = RUNTIME.token(8)

        def make(read: StoredSchedule) -> tuple[Change, int, None] | None:
            if read.exists and read.text("added") == token:
                return None
            if read.exists:
                owned = (
                    f"app {read.app!r} defines it in its code" if read.owner == "code" else "an operator has added it"
                )
                raise ScheduleError(
                    f"schedule {read.name!r} exists: {owned}; change it with 'perdure schedule edit {read.name}'"
                )
            fields: dict[str, str | int | bytes] = {"owner": "operator", "last": read.now, "epoch": read.now}
            fields |= {"removed": "", "added": token}
            fields |= {"app": definition.call.app or "", "call": self._seal(read.name, definition.call)}
            return {**fields, **self._stored(definition)}, 0, None

        return await self._change(definition.name, make)

    async def edit(
        self,
        name: str,
        *,
        when: Cron | Every | None = None,
        rules: Rules | None = None,
        call: ScheduledCall | None = None,
        reset: bool = False,
        revision: str | None = None,
    ) -> StoredSchedule:
        """Set parts of a schedule in place of its definition, or return to that with `reset`.

        Args:
            revision: `StoredSchedule.definition_revision` as the caller has read it; None for whatever it is now.

        Raises:
            ScheduleNotFound: There is no schedule of this name.
            ChangedMeanwhile: The revision is another one.
        """

        def make(read: StoredSchedule) -> tuple[Change, int, None]:
            self._check(read)
            if revision not in (None, read.definition_revision):
                raise ChangedMeanwhile(
                    f"could not change schedule {name!r}: it was changed since you have read it; look at it again"
                )
            change: dict[str, str | int | bytes] = {}
            if reset:
                change = {f"set:{part}": "" for part in ("when", "rules", "call", "task", "queue")}
            if when is not None:
                change["set:when"] = orjson.dumps(when.form())
            if when is not None or (reset and "when" in read.edited):
                change |= {"last": max(read.last, read.now), "next": ""}
            if rules is not None:
                change["set:rules"] = orjson.dumps({"missed": rules.missed, "jitter": rules.jitter})
            if call is not None:
                change |= {"set:call": self._seal(name, call), "set:task": call.task, "set:queue": call.queue}
            return change, 0, None

        return await self._change(name, make)

    async def pause(self, name: str, *, by: str = "", why: str = "") -> StoredSchedule:
        """Let a schedule fire nothing until it is resumed. Raises `ScheduleError`."""

        def make(read: StoredSchedule) -> tuple[Change, None, None]:
            self._check(read)
            return {"paused": orjson.dumps({"by": by[:200], "why": why[:2_000], "at": read.now})}, None, None

        return await self._change(name, make)

    async def resume(self, name: str) -> StoredSchedule:
        """Let a paused schedule fire from now on; planned times of the pause are left out.

        One that waits for a clock that was set back begins its planned times again from now on.

        Raises `ScheduleError`.
        """

        def make(read: StoredSchedule) -> tuple[Change, int, None] | None:
            self._check(read)
            if read.paused is None and not read.ahead:
                return None
            change: dict[str, str | int | bytes] = {"paused": "", "last": read.now, "next": ""}
            if read.ahead:
                change["epoch"] = max(read.now, read.epoch + 1)
            return change, 0, None

        return await self._change(name, make)

    async def remove(self, name: str) -> None:
        """Remove a schedule that operators own, or that no worker publishes any more. Raises `ScheduleError`."""

        def make(read: StoredSchedule) -> tuple[Change, Literal["-"], int] | None:
            if not read.exists and read.revision:
                return None
            self._check(read)
            if read.owner == "code" and read.published:
                raise ScheduleError(
                    f"schedule {name!r} is in the code of app {read.app!r}, whose workers would publish it again; "
                    f"remove it there, or pause it with 'perdure schedule pause {name}'"
                )
            return removal(read), "-", LEFT_TTL_MS

        found = await self.read(name)
        self._check(found)
        await self._change(name, make)

    def _check(self, read: StoredSchedule) -> None:
        if not read.exists:
            raise ScheduleNotFound(f"there is no schedule {read.name!r}; 'perdure schedule list' lists them")

    async def note_run(self, name: str, run: ScheduledRun) -> None:
        """Remember a firing by hand. Raises `ScheduleError`."""

        def make(read: StoredSchedule) -> tuple[Change, None, None] | None:
            if not read.exists or run in read.runs:
                return None
            return {"runs": encode_runs([run, *read.runs])}, None, None

        await self._change(name, make)


def removal(read: StoredSchedule) -> dict[str, str | int | bytes]:
    """Return the change that removes a schedule: what stays tells late bytes that it was removed."""
    gone = {name.decode("utf-8", "replace"): "" for name in read.fields if name not in (b"revision", b"token")}
    return {**gone, "removed": read.now}


def encode_runs(runs: Sequence[ScheduledRun]) -> bytes:
    return orjson.dumps([list(run) for run in runs[:MAX_RUNS]])


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()

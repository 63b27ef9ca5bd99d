"""Worker registry: one hash with a TTL per worker, and an index. The id of the deployment.

Two servers may use the same namespace. Data of a deployment outside Redis is named by its id, so that no deployment
takes the data of another one for its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import orjson

from .errors import QueueError, WrongType
from .junk import count_of
from .keys import Namespace
from .member_registry import MemberRegistry, report_problems
from .runtime import RUNTIME
from .shared_config import SharedConfig, read_seconds
from .transport.gateway import Gateway
from .transport.pipelining import Argument
from .transport.scripts import pairs, queue_script
from .wording import iso_time

_REGISTER = queue_script("register_worker")
_DRAIN = queue_script("drain_worker")

_MISSED: Final = 2
"""Intervals without a registration after which a worker is presumed dead."""

_DEFAULT_INTERVAL: Final = 5.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A registered worker. Workers of several versions read each other: a new field needs a default.

    Attributes:
        concurrency: Number of slots.
        started: Milliseconds of Redis' clock.
        seen: Seconds since the last registration.
        progress: Seconds since the worker started, recorded or settled anything; None if it does not report that.
        interval: Seconds between registrations.
        rates: Deliveries settled per second, by queue.
        lease: Seconds after which it claims the tasks of a silent worker; None from earlier versions.
        health: Its health report as plain data, empty if it does not report one.
        catalog: Version of its entry in the catalog, empty if it does not report one.
        aliases: Former names of its app.
        capacity: Share of its slots that it may fill now (`figure`, 0 to 1), and what that depends on: `free_slots`,
            `lag` of its event loop in seconds, `memory` and `memory_limit` in bytes. Empty if it reports none.
        draining: Whether it takes no more tasks and stops when its tasks have ended; None from earlier versions, which
            cannot be asked to.
        drain: Time at which an operator has asked it to, in milliseconds of Redis' clock; None if none has.
        drain_by: Who has asked it to; may be empty.
        blocked: Whether it renews leases but does not register: its event loop is blocked. Set by `observed_workers`.
    """

    id: str
    app: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    concurrency: int
    in_flight: int
    started: int
    seen: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    progress: float | None = None
    interval: float = _DEFAULT_INTERVAL
    lease: float | None = None
    health: Mapping[str, Any] = field(default_factory=dict)
    catalog: str = ""
    aliases: tuple[str, ...] = ()
    capacity: Mapping[str, Any] = field(default_factory=dict)
    blocked: bool = False
    draining: bool | None = None
    drain: int | None = None
    drain_by: str = ""

    @property
    def presumed_dead(self) -> bool:
        """Whether it has missed two registrations: it died, is stuck, or cannot reach Redis."""
        return not self.blocked and self.seen > _MISSED * self.interval

    @property
    def free_slots(self) -> int:
        """Slots that it may fill now; if it reports none, those that its tasks leave if each takes one."""
        reported = _whole(self.capacity, "free_slots")
        return max(0, self.concurrency - self.in_flight) if reported is None else reported

    @property
    def memory_share(self) -> float:
        """Share of its memory limit that is used; 0 without a limit."""
        used, limit = self.memory, self.memory_limit
        return used / limit if used and limit else 0.0

    @property
    def status(self) -> str:
        """`ready`, `draining`, `blocked`, `presumed dead`, `not` with the failing levels, or `?` without a report."""
        if self.blocked:
            return "blocked"
        if self.presumed_dead:
            return "presumed dead"
        if self.draining or self.drain is not None:
            return "draining"
        levels = self.levels
        failing = [name for name, ok in levels.items() if not ok]
        return f"not {', '.join(failing)}" if failing else "ready" if levels else "?"

    @property
    def levels(self) -> dict[str, bool]:
        """Whether each level of its health report is ok; empty without a report that can be read."""
        reported: object = self.health  # any JSON, if another program wrote it
        levels = reported.get("levels") if isinstance(reported, Mapping) else None
        found = levels if isinstance(levels, list) else []
        return {str(level["name"]): bool(level["ok"]) for level in found if _is_level(level)}

    @property
    def memory(self) -> int | None:
        """Bytes that it uses; None if it does not report them."""
        return _whole(self.capacity, "memory")

    @property
    def memory_limit(self) -> int | None:
        """Bytes that it may use; None without a limit."""
        return _whole(self.capacity, "memory_limit")

    def runs(self, app: str | None) -> bool:
        """Return whether it runs tasks of an app. None: the producer named no app."""
        return app is None or app == self.app or app in self.aliases

    def summary(self) -> dict[str, Any]:
        """Return the worker as plain data, times as ISO 8601."""
        times = {"started": iso_time(self.started), "drain": iso_time(self.drain)}
        return asdict(self) | times | {"presumed_dead": self.presumed_dead}


def _is_level(found: object) -> bool:
    return isinstance(found, dict) and {"name", "ok"} <= found.keys()


def _whole(reported: object, name: str) -> int | None:
    """Return a number that a worker reports; None for any other JSON, if another program wrote it."""
    found = reported.get(name) if isinstance(reported, Mapping) else None
    return found if type(found) is int and found >= 0 else None


class Announced(NamedTuple):
    """Reply to a registration. started: start time of the worker in milliseconds of Redis' clock.

    schedules, jobs: whether the namespace has any; jobs that have ended count too. pauses: the stored ones, see
    pauses.py. drain: whether an operator drains the worker.
    """

    started: int
    config: SharedConfig
    schedules: bool
    pauses: Mapping[bytes, bytes]
    jobs: bool
    drain: bool


async def announce(gateway: Gateway, namespace: Namespace, info: WorkerInfo, ttl: float) -> Announced:
    """Register a worker for `ttl` seconds. Its start time is that of `info`, or now."""
    since = -1 if info.progress is None else max(0, round(info.progress * 1000))
    args: list[Argument] = [info.id, round(ttl * 1000), info.started, since]
    for name, (write, _) in _FIELDS.items():
        args += (name, write(getattr(info, name)))
    keys = [namespace.worker(info.id), namespace.workers, namespace.config]
    keys += [namespace.schedules, namespace.pauses, namespace.jobs]
    started, now, stored, schedules, pauses, jobs, drain = await gateway.run(_REGISTER, keys, args)
    config = SharedConfig.decode(pairs(stored), int(now))
    return Announced(int(started), config, bool(schedules), pairs(pauses), bool(jobs), bool(drain))


class DrainAnswer(StrEnum):
    """Answer to a request to drain a worker."""

    ASKED = "asked"
    ASKED_BEFORE = "asked before"
    NOT_REGISTERED = "not registered"
    UNSUPPORTED = "of an earlier version"


async def drain_worker(gateway: Gateway, namespace: Namespace, worker_id: str, *, by: str = "") -> DrainAnswer:
    """Ask a worker to take no more tasks, to finish what it runs, and to stop. It follows within a moment."""
    found = await gateway.run(_DRAIN, [namespace.worker(worker_id)], [by[:200]])
    if found == 1:
        with suppress(QueueError):  # a hint: workers register every few seconds
            await gateway.command("PUBLISH", namespace.pause_channel, "")
    return _ANSWERS[found]


_ANSWERS: Final[Mapping[int, DrainAnswer]] = {
    1: DrainAnswer.ASKED,
    2: DrainAnswer.ASKED_BEFORE,
    0: DrainAnswer.NOT_REGISTERED,
    -1: DrainAnswer.UNSUPPORTED,
}


async def withdraw(gateway: Gateway, namespace: Namespace, worker_id: str) -> None:
    """Deregister a worker for good."""
    await _registry(gateway, namespace).withdraw(worker_id)


async def trim_registry(gateway: Gateway, namespace: Namespace) -> int:
    """Remove the members of the registry whose registration has expired; return their number."""
    before = await gateway.command("ZCARD", namespace.workers)
    await _registry(gateway, namespace).trim()
    after: int = await gateway.command("ZCARD", namespace.workers)
    return max(0, int(before) - after)


def _registry(gateway: Gateway, namespace: Namespace) -> MemberRegistry:
    return MemberRegistry(gateway, namespace.workers, namespace.worker)


class Registered(NamedTuple):
    """Registered workers, the longest running first, and what another program wrote, by the name of entry or key."""

    workers: list[WorkerInfo]
    problems: dict[str, str]


async def list_workers(gateway: Gateway, namespace: Namespace) -> list[WorkerInfo]:
    """Return the registered workers, the longest running first. Some may be presumed dead."""
    workers, problems = await read_registered(gateway, namespace)
    report_problems("registry of workers", problems)
    return workers


async def read_registered(gateway: Gateway, namespace: Namespace) -> Registered:
    """Return the registered workers, and what cannot be read."""
    registry = _registry(gateway, namespace)
    workers = await registry.read(_decode)
    return Registered(sorted(workers, key=lambda worker: worker.started), registry.problems)


async def present_workers(gateway: Gateway, namespace: Namespace) -> set[str]:
    """Return the ids of the workers that are not presumed dead."""
    return {worker.id for worker in await list_workers(gateway, namespace) if not worker.presumed_dead}


def total_rates(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """Return deliveries settled per second by all workers, by queue. Queues without any are left out."""
    rates: Counter[str] = Counter()
    for worker in workers:
        if not worker.presumed_dead:
            rates.update(worker.rates)
    return dict(rates)


def _read_names(data: bytes) -> list[str]:
    """Decode a list of names. Raises `ValueError`."""
    found = orjson.loads(data)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"must be a list of names, got {data!r}")
    return found


def _read_rates(data: bytes) -> dict[str, float]:
    """Decode numbers by name; nothing of any other JSON, if another program wrote it. Raises `ValueError`."""
    found = orjson.loads(data)
    each = found.items() if isinstance(found, dict) else ()
    return {name: float(rate) for name, rate in each if isinstance(rate, (int, float)) and not isinstance(rate, bool)}


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], str | bytes], Callable[[bytes], Any]]]] = {
    "app": (str, bytes.decode),
    "host": (str, bytes.decode),
    "pid": (str, int),
    "version": (str, bytes.decode),
    "queues": (orjson.dumps, _read_names),
    "concurrency": (str, int),
    "in_flight": (str, int),
    "rates": (orjson.dumps, _read_rates),
    "interval": (str, float),
    "lease": (str, read_seconds),
    "health": (orjson.dumps, orjson.loads),
    "catalog": (str, bytes.decode),
    "aliases": (orjson.dumps, _read_names),
    "capacity": (orjson.dumps, orjson.loads),
    "draining": (lambda draining: "1" if draining else "0", lambda stored: stored == b"1"),
}
"""Encoder and decoder of each field of the hash."""

_READERS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    **{name: read for name, (_, read) in _FIELDS.items()},
    "id": bytes.decode,
    "started": int,
    "seen": int,
    "progress": int,  # written by the script
    "drain": count_of,
    "drain_by": lambda stored: stored.decode("utf-8", "replace"),
}


def _decode(_: str, fields: Mapping[bytes, bytes], now: int) -> WorkerInfo:
    """Decode a registration of any version."""
    known: dict[str, Any] = {
        name: read(fields[name.encode()]) for name, read in _READERS.items() if name.encode() in fields
    }
    known["seen"] = max(0.0, (now - known["seen"]) / 1000)
    if "progress" in known:
        known["progress"] = max(0.0, (now - known["progress"]) / 1000)
    known["queues"] = tuple(known["queues"])
    known["aliases"] = tuple(known.get("aliases", ()))
    return WorkerInfo(**known)


async def deployment_id(gateway: Gateway, namespace: Namespace) -> str:
    """Return the id of the deployment: 32 hexadecimal digits, created atomically by the first call.

    A hash of another type is moved out of the way, with a warning: the deployment gets a new id.
    """
    key = namespace.deployment
    read: tuple[str | bytes, ...] = ("HGET", key, "id")
    try:
        found = await gateway.command(*read)
    except WrongType:
        await gateway.set_keys_aside([key])
        found = None
    if found is None:
        made: tuple[str | bytes, ...] = ("HSETNX", key, "id", RUNTIME.token(16))
        _, found = await gateway.pipeline([made, ("HGET", key, "id")])
    return str(found.decode("utf-8", "backslashreplace"))

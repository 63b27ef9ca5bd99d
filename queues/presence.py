"""Who is working: one hash per worker, with a TTL, and the list of them.

What tells one deployment from every other: an id that its Redis keeps.

Two servers can have the same namespace. What belongs to a deployment and is kept outside Redis goes by this id, so that
none takes another's for its own.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson

from .keys import Namespace
from .transport import Argument, Gateway, pairs, queue_script

__all__ = ["WorkerInfo", "announce", "deployment_id", "list_workers", "present_workers", "total_rates", "withdraw"]

_ANNOUNCE = queue_script("register_worker")
_PRESENT = queue_script("read_workers")

_MISSED: Final = 2
"""Intervals without an announcement after which a worker is presumed dead."""

_DEFAULT_INTERVAL: Final = 5.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker. concurrency: its slots. started: milliseconds of Redis' clock. seen, progress: seconds since its last
    sign of life, and since it began, recorded or settled anything (None where it does not tell). interval: seconds
    between two signs of life. rates: by queue, deliveries it settles per second at present. health: what it says of
    itself, as plain data; empty where it does not tell.

    Workers of several versions read each other's announcements: a field that is added here needs a default.
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
    health: Mapping[str, Any] = field(default_factory=dict)

    @property
    def presumed_dead(self) -> bool:
        """Whether it has missed two signs of life: it died, or is stuck, or cannot reach Redis."""
        return self.seen > _MISSED * self.interval

    def summary(self) -> dict[str, Any]:
        """The worker as plain data, for programs."""
        return asdict(self) | {"presumed_dead": self.presumed_dead}


async def announce(gateway: Gateway, namespace: Namespace, info: WorkerInfo, ttl: float) -> int:
    """Say that the worker is there. ttl: seconds after which it is forgotten without another word.

    Returns when it started, in milliseconds of Redis' clock: now, where `info` does not say.
    """
    since = -1 if info.progress is None else max(0, round(info.progress * 1000))
    args: list[Argument] = [info.id, round(ttl * 1000), info.started, since]
    for name, (write, _) in _FIELDS.items():
        args += (name, write(getattr(info, name)))
    return int(await gateway.run(_ANNOUNCE, [namespace.worker(info.id), namespace.workers], args))


async def withdraw(gateway: Gateway, namespace: Namespace, worker_id: str) -> None:
    """Say that the worker has left."""
    await gateway.pipeline([("DEL", namespace.worker(worker_id)), ("ZREM", namespace.workers, worker_id)])


async def list_workers(gateway: Gateway, namespace: Namespace) -> list[WorkerInfo]:
    """Workers that were heard of lately, the longest running first; some of them may be presumed dead."""
    ids = await gateway.command("ZRANGE", namespace.workers, 0, -1)
    if not ids:
        return []
    now, announced = await gateway.run(_PRESENT, [namespace.worker(worker.decode()) for worker in ids], [])
    workers = [_read(found, now) for found in announced]
    return sorted((worker for worker in workers if worker is not None), key=lambda worker: worker.started)


async def present_workers(gateway: Gateway, namespace: Namespace) -> set[str]:
    """Ids of the workers that are not presumed dead."""
    return {worker.id for worker in await list_workers(gateway, namespace) if not worker.presumed_dead}


def total_rates(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """By queue, what all of them settle per second. Queues on which nobody settles anything are left out."""
    rates: Counter[str] = Counter()
    for worker in workers:
        if not worker.presumed_dead:
            rates.update(worker.rates)
    return dict(rates)


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], str | bytes], Callable[[bytes], Any]]]] = {
    "app": (str, bytes.decode),
    "host": (str, bytes.decode),
    "pid": (str, int),
    "version": (str, bytes.decode),
    "queues": (orjson.dumps, orjson.loads),
    "concurrency": (str, int),
    "in_flight": (str, int),
    "rates": (orjson.dumps, orjson.loads),
    "interval": (str, float),
    "health": (orjson.dumps, orjson.loads),
}
"""How a field is written into the hash, and read."""

_WRITTEN_BY_THE_SCRIPT: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "id": bytes.decode,
    "started": int,
    "seen": int,
    "progress": int,
}
_READERS: Final[dict[str, Callable[[bytes], Any]]] = {
    **{name: read for name, (_, read) in _FIELDS.items()},
    **_WRITTEN_BY_THE_SCRIPT,
}


def _read(announced: bytes | list[bytes] | None, now: int) -> WorkerInfo | None:
    """What was announced, by this version or another; None where nothing was, or nothing that can be understood."""
    if not announced:
        return None
    try:
        if isinstance(announced, bytes):
            told: dict[str, Any] = {name: value for name, value in orjson.loads(announced).items() if name in _READERS}
        else:
            fields = {name.decode(): value for name, value in pairs(announced).items()}
            told = {name: read(fields[name]) for name, read in _READERS.items() if name in fields}
        told["seen"] = max(0.0, (now - told["seen"]) / 1000)
        if "progress" in told:
            told["progress"] = max(0.0, (now - told["progress"]) / 1000)
        return WorkerInfo(**told | {"queues": tuple(told["queues"])})
    except (KeyError, TypeError, ValueError):
        return None


async def deployment_id(gateway: Gateway, namespace: Namespace) -> str:
    """The id: 32 hexadecimal digits, made when it is first asked for. Of several that ask at once, all get the same."""
    key = namespace.deployment
    made: tuple[str | bytes, ...] = ("HSETNX", key, "id", uuid.uuid4().hex)
    _, found = await gateway.pipeline([made, ("HGET", key, "id")])
    return str(found.decode())

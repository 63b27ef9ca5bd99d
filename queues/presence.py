"""Who is working: one hash per worker, with a TTL, and the list of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import orjson

from .gateway import Gateway
from .keys import Namespace

__all__ = ["WorkerInfo", "announce", "list_workers", "total_rates", "withdraw"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker. started: milliseconds of Redis' clock. seen: seconds since its last sign of life. rates: by queue,
    deliveries it settles per second at present.

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

    def summary(self) -> dict[str, Any]:
        """The worker as plain data, for programs."""
        return asdict(self)


async def announce(gateway: Gateway, namespace: Namespace, info: WorkerInfo, ttl: float) -> int:
    """Say that the worker is there. ttl: seconds after which it counts as gone without another word.

    Returns when it started, in milliseconds of Redis' clock: now, where `info` does not say.
    """
    key = namespace.worker(info.id)
    now = await _now_ms(gateway, namespace)
    started = info.started or now
    told = asdict(info) | {"queues": list(info.queues), "started": started, "seen": now}
    await gateway.pipeline(
        [
            ("SET", key, orjson.dumps(told), "PX", round(ttl * 1000)),
            ("ZADD", namespace.workers, now, info.id),
            ("ZREMRANGEBYSCORE", namespace.workers, "-inf", now - round(ttl * 1000)),
        ]
    )
    return started


async def withdraw(gateway: Gateway, namespace: Namespace, worker_id: str) -> None:
    """Say that the worker has left."""
    await gateway.pipeline([("DEL", namespace.worker(worker_id)), ("ZREM", namespace.workers, worker_id)])


async def list_workers(gateway: Gateway, namespace: Namespace) -> list[WorkerInfo]:
    """Workers that were heard of lately, the longest running first."""
    ids = await gateway.command("ZRANGE", namespace.workers, 0, -1)
    if not ids:
        return []
    found = await gateway.command("MGET", *(namespace.worker(worker.decode()) for worker in ids))
    now = await _now_ms(gateway, namespace)
    workers = []
    for data in found:
        if data is not None:
            told = {name: value for name, value in orjson.loads(data).items() if name in _KNOWN}
            seen = (now - told["seen"]) / 1000
            workers.append(WorkerInfo(**told | {"queues": tuple(told["queues"]), "seen": max(0.0, seen)}))
    return sorted(workers, key=lambda worker: worker.started)


def total_rates(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """By queue, what all of them settle per second. Queues on which nobody settles anything are left out."""
    rates: Counter[str] = Counter()
    for worker in workers:
        rates.update(worker.rates)
    return dict(rates)


_KNOWN = {one.name for one in fields(WorkerInfo)}


async def _now_ms(gateway: Gateway, namespace: Namespace) -> int:
    seconds, micros = await gateway.command("TIME", node_of=namespace.workers)
    return int(seconds) * 1000 + int(micros) // 1000

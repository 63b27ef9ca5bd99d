"""The cost of each operation with a small and a large backlog, measured alternately."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median

from perdure import Producer
from perdure.deadletter.letters import Filter, list_letters
from perdure.queues import Gateway, Namespace, Partition, list_queues
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.leases import Leases
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.delivery.stream_reader import read_partitions

from ..raw.client import RawClient
from ..sizes import Backlog, Size
from ..support.deployment import Deployment
from .measure import Figure, Line, Measure

__all__ = ["BACKLOG"]

_CHUNK = 10_000
_SHOWN = 20
"""Dead letters listed."""

_AN_HOUR = 3600.0


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    small = _Side(deployment.within("small"))
    great = _Side(deployment.within("great"))
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in _Side.ACTS}
    try:
        await small.open(size.small_backlog)
        await great.open(size.backlog)
        for number in range(size.backlog_samples):
            for name in _Side.ACTS:
                for side in (small, great) if number % 2 else (great, small):
                    found[name][side is small].append(await side.cost(name))
    finally:
        await small.close()
        await great.close()
    return {f"backlog_{name}": Figure(median(beside), median(alone)) for name, (beside, alone) in found.items()}


class _Side:
    """A queue with a backlog, with a producer and a consumer."""

    ACTS = ("enqueue", "read", "settle", "promote", "dlq_list", "queue_list")

    def __init__(self, deployment: Deployment) -> None:
        self._place = deployment
        self._namespace = Namespace(deployment.namespace)
        self._partition = Partition(deployment.namespace, "bench", 0)
        self._producer = Producer(deployment.url, namespace=deployment.namespace)

    @property
    def _gateway(self) -> Gateway:
        return self._producer.gateway

    async def open(self, backlog: Backlog) -> None:
        await self._producer.__aenter__()
        for count, delay in ((backlog.queued, 0.0), (backlog.due, _AN_HOUR)):
            for start in range(0, count, _CHUNK):
                some = ({"number": number} for number in range(start, min(start + _CHUNK, count)))
                await self._producer.enqueue_many("noop", some, delay=delay, queue="bench")
        self._consumer = Consumer(
            self._gateway, read_partitions(self._gateway, "bench"), [self._partition], "bench", 60.0, Leases()
        )
        await self._consumer.create_groups()
        with RawClient(self._place.url) as client:
            letter = ("XADD", self._partition.dead, "*", *_LETTER)
            for start in range(0, backlog.dead, _CHUNK):
                client.pipeline([letter] * min(_CHUNK, backlog.dead - start))

    async def close(self) -> None:
        await self._producer.__aexit__(None, None, None)

    async def cost(self, name: str) -> float:
        """Return the microseconds of one operation; its input is prepared before."""
        act: Callable[[], Awaitable[object]]
        if name == "settle":
            taken = await self._consumer.read(1, block=None)
            (delivery,) = taken.deliveries
            task_id = delivery.fields[b"env"].split(b'"id":"')[1].split(b'"')[0].decode()

            async def settle() -> None:
                await succeed(self._gateway, delivery, task_id, b"1", Counters(1), ran=0.0, ttl=60.0)

            act = settle
        elif name == "promote":
            await self._producer.enqueue("noop", {"number": 1}, delay=0.001, queue="bench")
            await asyncio.sleep(0.002)  # due times are compared with the server's clock
            act = self._promote
        else:
            act = getattr(self, f"_{name}")
        began = time.perf_counter()
        await act()
        return (time.perf_counter() - began) * 1e6

    async def _enqueue(self) -> None:
        await self._producer.enqueue("noop", {"number": 1}, queue="bench")

    async def _read(self) -> None:
        if not (await self._consumer.read(1, block=None)).deliveries:
            raise RuntimeError("the backlog is too small")

    async def _promote(self) -> None:
        moved, _ = await promote_due(self._gateway, self._partition)
        if moved != 1:
            raise RuntimeError(f"{moved} tasks were promoted instead of one")

    async def _dlq_list(self) -> None:
        shown = 0
        async for _ in list_letters(self._gateway, [self._partition], Filter()):
            shown += 1
            if shown == _SHOWN:
                return

    async def _queue_list(self) -> None:
        await list_queues(self._gateway, self._namespace)


_LETTER = (
    "id",
    "01a1ffcc-4142-770f-9e12-6d48ee69b99a",
    "task",
    "noop",
    "reason",
    "attempts_exhausted",
    "evidence",
    '{"error":"ValueError","message":"no","traceback":""}',
    "attempts",
    "3",
    "crashes",
    "0",
    "worker",
    "bench",
    "env",
    '{"v":1,"id":"01a1ffcc-4142-770f-9e12-6d48ee69b99a","task":"noop"}',
    "args",
    '{"number":1}',
)

_LIMIT = "the same with the small backlog, alternately"

BACKLOG = Measure(
    "backlog",
    [
        Line("backlog_enqueue", "enqueue one task with the large backlog", "us", _LIMIT),
        Line("backlog_read", "read one", "us", _LIMIT),
        Line("backlog_settle", "settle one", "us", _LIMIT),
        Line("backlog_promote", "promote one due task", "us", _LIMIT),
        Line("backlog_dlq_list", f"dlq list --limit {_SHOWN}", "us", _LIMIT),
        Line("backlog_queue_list", "queue list", "us", _LIMIT),
    ],
    _round,
    repeated=False,
)

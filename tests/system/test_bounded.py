"""Bounded: whatever became of how many tasks, nothing of them is left, neither in Redis nor in the worker.

`make bounded` runs 100,000 tasks. BOUNDED_TASKS changes how many.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import App, Producer, Settings, TaskHandle, Worker
from perdure.deadletter.replay import trim_letters
from perdure.queues import Partition, list_workers, set_partitions
from perdure.queues.inspection.timeline import trim_timeline
from perdure.queues.inspection.views import queue_partitions
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import pairs

from tests.conftest import default_kind
from tests.support.command_line import COMMAND
from tests.support.programs import mixed
from tests.support.servers import RedisServer, find_program

pytestmark = [pytest.mark.integration, pytest.mark.processes]

TASKS = int(os.environ.get("BOUNDED_TASKS", "6000"))
ROUND = min(TASKS // 2, 5_000)
"""Tasks that are under way at once; as many are run before anything is measured."""

CONCURRENCY = 32
LEASE = 1.0
KEPT = 1.0
"""Seconds that outcomes and dead letters are kept."""

PATIENCE = 40.0
"""Seconds in which nothing changes before something counts as stuck, or as never given back."""

MEBIBYTE = 1024 * 1024

PASSING = (b":lock:", b":registry:worker:")
"""Parts of the names of fleet locks, which live for seconds, and of workers, whose hashes are marks for an hour."""

KINDS = {"plain": 40, "steps": 14, "mends": 12, "dies": 9, "keyed": 10, "delayed": 4, "due": 2, "waiting": 4}
"""Number of tasks of each kind per hundred; the rest are unknown tasks and unreadable messages."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of its own: its memory is measured."""
    program = find_program(default_kind())
    assert program is not None
    server = RedisServer(program).start()
    yield server
    server.stop()


@pytest.fixture
def settings(server: RedisServer) -> Settings:
    return Settings(
        redis_url=server.url, namespace="bounded", lease=LEASE, grace=5.0, result_ttl=KEPT, dead_letter_ttl=KEPT
    )


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace, result_ttl=KEPT) as producer:
        yield producer


@contextmanager
def watched_worker(settings: Settings, log: Path) -> Iterator[None]:
    reported = {
        "PERDURE_REDIS_URL": settings.redis_url,
        "PERDURE_NAMESPACE": settings.namespace,
        "PERDURE_LEASE": str(settings.lease),
        "PERDURE_RESULT_TTL": str(settings.result_ttl),
        "PERDURE_DEAD_LETTER_TTL": str(settings.dead_letter_ttl),
        "PERDURE_UNKNOWN_TASK": '{"max_attempts": 2, "base": 0.01, "jitter": 0.0}',
    }
    command = [*COMMAND, "worker", "run", f"{mixed.__file__}:app", "--no-supervisor", "--concurrency", str(CONCURRENCY)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, env=os.environ | reported)
    try:
        yield
        assert process.poll() is None, "the worker has ended"
    finally:
        process.terminate()
        process.wait(PATIENCE)


class Load:
    """Gives tasks of all kinds, and sees them through."""

    def __init__(self, producer: Producer, settings: Settings) -> None:
        self.producer = producer
        self.settings = settings
        self.given: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """So many tasks, round by round; each round begins when nothing is left of the one before."""
        while count > 0:
            await self._round(min(count, ROUND))
            count -= ROUND

    async def _round(self, count: int) -> None:
        share = {kind: max(1, count * part // 100) for kind, part in KINDS.items()}
        for kind in ("plain", "steps", "mends", "dies"):
            await self._give(kind, share[kind])
        await self._give("keyed", share["keyed"], queue="keyed", key=lambda args: f"key {args['number'] % 50}")
        await self._give("plain", share["delayed"], delay=0.05)
        await self._give("dawdles", max(1, count // 200))
        await self._give("unheard-of", max(1, count // 50))
        await self._post_garbage(max(1, count // 50))
        await self._cancel(await self._give("plain", share["due"], delay=3600))
        await self._cancel(await self._give("plain", share["waiting"]))
        await self._cancel_what_runs(max(1, count // 1000))
        await self._crash(max(1, count // 500))
        await self._hand_over()
        await self._until_done()

    async def _give(
        self, kind: str, count: int, *, queue: str = "mixed", key: Any = None, delay: float = 0.0
    ) -> list[TaskHandle[Any]]:
        self.given[kind] += count
        many = [{"number": number} for number in range(count)]
        return await self.producer.enqueue_many(kind, many, queue=queue, key=key, delay=delay)

    async def _post_garbage(self, count: int) -> None:
        stream = self.producer.namespace.partition("mixed").ready
        self.given["garbage"] += count
        await self.producer.gateway.pipeline([("XADD", stream, "*", "env", "garbage", "x", "y")] * count)

    async def _cancel(self, handles: list[TaskHandle[Any]]) -> None:
        """Most while they wait; some have ended by then."""
        self.given["cancelled"] += len(handles)
        await asyncio.gather(*(handle.cancel() for handle in handles))

    async def _cancel_what_runs(self, count: int) -> None:
        for handle in await self._give("many_steps", count):
            async for event in handle.events():
                if event.type == "step_completed":
                    break
            await handle.cancel()

    async def _crash(self, count: int) -> None:
        """A worker takes tasks and is never heard of again."""
        gateway, partition = self.producer.gateway, self.producer.namespace.partition("mixed")
        await self._give("steps", count)
        ask = ("COUNT", count, "STREAMS", partition.ready, ">")
        taken = await gateway.command("XREADGROUP", "GROUP", GROUP, "dead", *ask) or [(b"", [])]
        idle = ("IDLE", 3_600_000, "JUSTID")
        for entry, _ in taken[0][1]:
            await gateway.command("XCLAIM", partition.ready, GROUP, "dead", 0, entry, *idle)
        self.given["crashed"] += len(taken[0][1])

    async def _hand_over(self) -> None:
        """A worker that stops gives back what it runs: it has some, where there is more than the other one can take."""
        app = App("mixed", settings=self.settings)
        for task in mixed.app.tasks.values():
            app.task(name=task.name, queue=task.queue, retry=task.retry)(task.handler)
        handles = await self._give("many_steps", CONCURRENCY + 4)
        async with Worker(app, concurrency=4, queues=["mixed"]) as worker:
            running = asyncio.create_task(worker.run())
            while not worker.in_flight and (await self._waiting()):  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.005)
            worker.stop()
            await running
        await self._cancel(handles)

    async def _until_done(self) -> None:
        last, since = -1, time.monotonic()
        while (left := await self._waiting()) > 0:
            if left != last:
                last, since = left, time.monotonic()
            assert time.monotonic() < since + PATIENCE, f"{left} are left"
            await anyio.sleep(0.02)

    async def _waiting(self) -> int:
        """Messages and tasks that wait or run, in all partitions."""
        ask = [("XLEN", one.ready) for one in await self.partitions()]
        ask += [("ZCARD", one.due) for one in await self.partitions()]
        return int(sum(await self.producer.gateway.pipeline(ask)))

    async def partitions(self) -> list[Partition]:
        return await queue_partitions(self.producer.gateway, self.producer.namespace)


class Footprint:
    """Resources in Redis and in the worker."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._gateway = load.producer.gateway
        self.keys: set[bytes] = set()
        self.lasting: set[bytes] = set()
        self.memory = 0
        self.clients = 0
        self.worker: dict[str, int] = {}

    async def take(self, before: Footprint | None = None) -> Footprint:
        """Once all that has a time to live is gone; with `before`, once it is what it was, or will not be any more."""
        since = time.monotonic()
        self.worker = await self._look()
        while True:
            for partition in await self._load.partitions():  # what a janitor does once in a minute
                await trim_letters(self._gateway, partition, KEPT)
                await trim_timeline(self._gateway, partition)
            keys = await self._gateway.command("KEYS", "*")
            self.keys = {key for key in keys if not any(part in key for part in PASSING)}
            ended = all(b":record:" not in key and not key.endswith(b":timeline") for key in self.keys)
            self.memory = await self._memory()
            as_before = before is None or (self.keys <= before.keys and self.memory <= before.memory * 1.05)
            if (ended and as_before) or time.monotonic() > since + PATIENCE:
                self.lasting = {key for key in self.keys if await self._gateway.command("PTTL", key) == -1}
                self.clients = int(pairs_of(await self._gateway.command("INFO", "clients"))["connected_clients"])
                return self
            await anyio.sleep(0.2)

    async def _look(self) -> dict[str, int]:
        """The best of some: between two tasks, a worker may be reading, claiming, promoting."""
        seen: list[dict[str, int]] = []
        for _ in range(5):
            handle = await self._load.producer.enqueue("look", queue="looks")
            seen.append(await handle.result(timeout=PATIENCE))
        return {name: min(one[name] for one in seen) for name in seen[0]}

    async def _memory(self) -> int:
        """Bytes in use, without what clients have at the moment: buffers of replies, which come and go.

        Nor with the slow log, which a busy machine fills: its 128 entries have more than 100 kB.
        """
        await self._gateway.command("SLOWLOG", "RESET")
        reported = pairs(await self._gateway.command("MEMORY", "STATS"))
        return int(reported[b"total.allocated"]) - int(reported[b"clients.normal"])

    def __str__(self) -> str:
        return f"{len(self.keys)} keys, {self.memory:,} bytes, {self.clients} clients; the worker: {self.worker}"


def pairs_of(info: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)


OBJECTS = 1_000
"""Objects that hold others, of which a process at rest has about as many each time: one for each task would be more."""

BLOCKS = 2_500
"""Blocks of memory of any kind that may be more: caches that were not full, what the interpreter keeps for later."""

THREADS = 48
"""Threads of the pool for synchronous steps: as many as were busy at once, at most 40, for a while."""

ROOM = 8 * MEBIBYTE
"""Bytes by which the process may be larger: 80 for each of 100,000 tasks, less than the smallest dictionary has."""


async def test_tasks_of_all_outcomes_leave_nothing_behind(
    settings: Settings, producer: Producer, tmp_path: Path
) -> None:
    await set_partitions(producer.gateway, producer.namespace, "keyed", 4)
    with watched_worker(settings, tmp_path / "log"):
        with anyio.fail_after(PATIENCE):
            while not await list_workers(producer.gateway, producer.namespace):  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)
        load = Load(producer, settings)
        await load.run(ROUND)
        before = await Footprint(load).take()
        await load.run(TASKS - ROUND)
        after = await Footprint(load).take(before)
    print(f"{dict(load.given)}\nafter {ROUND}: {before}\nafter {TASKS}: {after}")  # noqa: T201

    assert after.keys <= before.keys  # those with a time to live may have expired meanwhile
    assert after.lasting == before.lasting
    assert after.memory <= before.memory * 1.05
    assert after.clients <= before.clients + 2  # they are made when they are needed, and kept
    more = {name: after.worker[name] - before.worker[name] for name in after.worker}
    assert more["tasks"] <= 1  # one that waits may be between two waits
    assert after.worker["threads"] <= THREADS
    assert more["files"] <= 2
    assert more["objects"] <= OBJECTS
    assert more["blocks"] <= BLOCKS
    assert more["memory"] <= ROOM
    assert "the worker failed" not in (tmp_path / "log").read_text()

"""Redis unavailable in every way, and six clients of it: a running task, an idle worker, a producer, a caller of
`result`, the heartbeat, and the command line.

Each outage happens between two steps of a running task. Afterwards the task succeeds, its waiter has the result, the
idle worker runs new tasks, the producer's task is stored once, and a command succeeds. The server is real and has an
append-only file; a proxy in front of it breaks, stops or delays connections.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync
from perdure import App, Context, Settings, State, TaskHandle, Unavailable
from perdure.queues import Address, Gateway, QueueError
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.delivery.leases import Delivery, Leases
from perdure.queues.transport.gateway import GatewayTimings
from perdure.worker.log import logger

from tests.support.command_line import call
from tests.support.consumers import Held, age, pending, read_one, worker
from tests.support.lossy_proxy import LossyProxy
from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.workers import bounded, history, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
NAMESPACE = "leaves"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own."""
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program, DURABLE).start()
    yield server
    server.stop()


@pytest.fixture
async def line(server: RedisServer, tmp_path: Path) -> AsyncIterator[LossyProxy]:
    """Proxy that the six clients are connected through."""
    async with LossyProxy(server.socket, tmp_path / "line").open() as line:
        yield line


@pytest.fixture
async def direct(server: RedisServer) -> AsyncIterator[Gateway]:
    """Gateway to the server that bypasses the proxy, for the test itself."""
    gateway = Gateway(Address(server.url), patience=20.0)
    await gateway.open()
    yield gateway
    await gateway.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a silent server as dead after a fraction of a second instead of ten seconds."""
    short = GatewayTimings(reply=0.5, block=0.3, read_margin=0.3, silence=0.3, ping=0.3)
    monkeypatch.setattr(Gateway, "timings", short)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Return the messages logged during the test."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


Way = Callable[["Scene"], Awaitable[None]]


class Scene:
    """The six, at work."""

    def __init__(self, app: App, server: RedisServer, line: LossyProxy, direct: Gateway) -> None:
        self.app = app
        self.server = server
        self.line = line
        self.direct = direct
        self.between = asyncio.Event()
        self.proceed = asyncio.Event()
        self.calls: list[str] = []

        @app.task
        async def job(ctx: Context) -> tuple[int, int]:
            await ctx.step("first", self.calls.append, "first")
            self.between.set()
            await self.proceed.wait()
            await ctx.step("second", self.calls.append, "second")
            return ctx.attempt, ctx.crashes

        @app.task(queue="idle")
        async def later(ctx: Context, number: int) -> int:
            return number

        self.job, self.later = job, later

    async def play(self, way: Way) -> TaskHandle[tuple[int, int]]:
        """Redis leaves in this way, and comes back; afterwards all is as it should be."""
        async with running_worker(self.app, queues=["leaves"]), running_worker(self.app, queues=["idle"]):
            warm = await self.later.enqueue(0)
            assert await bounded(warm.result()) == 0
            handle = await self.job.enqueue()
            waiting = asyncio.create_task(handle.result())
            await bounded(self.between.wait())
            await wait_until(self._has_subscriber, "the waiter listens")
            producing = asyncio.create_task(self._produce())
            await way(self)
            numbered = await bounded(producing)
            self.proceed.set()
            assert await bounded(waiting) == (1, 0)
            assert await bounded(numbered.result()) == 7
        await self._nothing_is_left(handle, numbered)
        return handle

    async def _has_subscriber(self) -> bool:
        channels = await self.direct.command("PUBSUB", "CHANNELS", "*")
        return bool(channels)

    async def _produce(self) -> TaskHandle[int]:
        """Enqueue with the same id until the task is stored, as a caller that may not lose it does."""
        while True:
            try:
                return await self.later.options(task_id="mine").enqueue(7)
            except Unavailable:
                await asyncio.sleep(0.05)

    async def _nothing_is_left(self, *handles: TaskHandle[Any]) -> None:
        assert self.calls == ["first", "second"]
        for handle in handles:
            record = await handle.record()
            assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 1, 0)
            assert await self.direct.command("XLEN", handle.partition.ready) == 0
        completed = [event.step for event in await history(handles[0]) if event.type == "step_completed"]
        assert completed == ["first", "second"]
        where = ("--redis-url", f"unix://{self.line.path}", "--namespace", NAMESPACE)
        answer = await run_sync(lambda: call("task", "show", handles[0].id, *where, "--json"))
        assert (answer.code, answer.json["state"]) == (0, "succeeded")


@pytest.fixture
async def scene(impatient: None, server: RedisServer, line: LossyProxy, direct: Gateway) -> AsyncIterator[Scene]:
    settings = Settings(redis_url=f"unix://{line.path}", namespace=NAMESPACE, lease=6.0, grace=5.0)
    async with App("leaves", settings=settings) as app:
        yield Scene(app, server, line, direct)


async def restarted(scene: Scene) -> None:
    await run_sync(scene.server.end)
    await run_sync(scene.server.start)


async def killed(scene: Scene) -> None:
    await run_sync(scene.server.kill)
    await run_sync(scene.server.start)


async def loading(scene: Scene) -> None:
    """It answers, but only that it is busy reading its data."""
    for number in range(12):  # it looks after its clients each 2 MiB, and here waits a little for each key
        await scene.direct.command("SET", f"ballast-{number}", os.urandom(2_200_000), "PX", 60_000)
    await scene.direct.command("CONFIG", "SET", "appendonly", "no")
    await scene.direct.command("SAVE")
    await run_sync(scene.server.kill)
    scene.server.launch("--appendonly", "no", "--key-load-delay", "100000")

    async def busy() -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(scene.server.socket)
        except OSError:
            return False
        writer.write(b"GET x\r\n")
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return answer.startswith(b"-LOADING")

    await wait_until(busy, "the server is loading")


async def all_clients_killed(scene: Scene) -> None:
    assert await scene.direct.command("CLIENT", "KILL", "TYPE", "normal") > 3


async def subscribers_killed(scene: Scene) -> None:
    assert await scene.direct.command("CLIENT", "KILL", "TYPE", "pubsub") == 1


async def blocked_readers_killed(scene: Scene) -> None:
    async def kill() -> bool:
        listed = await scene.direct.command("CLIENT", "LIST")
        blocked = [row.split()[0].removeprefix(b"id=") for row in listed.splitlines() if b" flags=b" in row]
        killed = [await scene.direct.command("CLIENT", "KILL", "ID", one) for one in blocked]
        return any(killed)

    for _ in range(3):
        await wait_until(kill, "a read that waits is killed")


async def scripts_flushed(scene: Scene) -> None:
    await scene.direct.command("SCRIPT", "FLUSH")


async def demoted(scene: Scene) -> None:
    """For a while the server is a replica without a primary, and refuses writes."""
    await scene.direct.command("CONFIG", "RESETSTAT")
    await scene.direct.command("REPLICAOF", "127.0.0.1", "1")

    async def refused() -> bool:
        return b"errorstat_READONLY" in await scene.direct.command("INFO", "errorstats")

    await wait_until(refused, "a refused write")
    await scene.direct.command("REPLICAOF", "NO", "ONE")


async def hung_both_ways(scene: Scene) -> None:
    assert scene.line.hang() > 0


async def hung_there(scene: Scene) -> None:
    assert scene.line.hang(back=False) > 0


async def hung_back(scene: Scene) -> None:
    assert scene.line.hang(there=False) > 0


async def slow(scene: Scene) -> None:
    """Each reply takes a good part of the time after which a server is taken for dead."""
    scene.line.delay = 0.1


WAYS: dict[str, Way] = {
    "restarted": restarted,
    "killed": killed,
    "loading": loading,
    "clients killed": all_clients_killed,
    "subscribers killed": subscribers_killed,
    "blocked readers killed": blocked_readers_killed,
    "scripts flushed": scripts_flushed,
    "demoted": demoted,
    "hung both ways": hung_both_ways,
    "hung on the way there": hung_there,
    "hung on the way back": hung_back,
    "slow": slow,
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_component_recovers(scene: Scene, way: str) -> None:
    await scene.play(WAYS[way])


async def test_a_worker_logs_that_it_waits_and_that_it_continues(scene: Scene, said: list[str]) -> None:
    """Its reads, and its beat, which renews the leases."""

    async def away_for_a_beat(scene: Scene) -> None:
        await run_sync(scene.server.kill)
        failed = (
            r"could not renew leases: .* \(leaves\)"  # the other worker may settle its task, and renew no lease again
        )
        await wait_until(lambda: _has(said, failed), "the heartbeat logs that it cannot renew")
        await wait_until(lambda: _has(said, "could not read messages"), "the worker logs that it cannot read")
        await run_sync(scene.server.start)
        await wait_until(lambda: _has(said, "lease renewal recovered"), "the heartbeat logs that it renews again")
        await wait_until(lambda: _has(said, "reading messages again"), "the worker logs that it reads again")

    await scene.play(away_for_a_beat)


async def _has(lines: list[str], pattern: str) -> bool:
    """Return whether a line has this pattern."""
    return any(re.search(pattern, line) for line in lines)


@pytest.mark.parametrize("way", ["hung both ways", "hung on the way there", "hung on the way back", "killed", "slow"])
async def test_the_beat_renews_again(scene: Scene, way: str) -> None:
    """The heartbeat has its own connection, which no other component uses."""
    troubles: list[QueueError | None] = []
    leases = Leases[Any]()
    partition = scene.app.producer.namespace.partition("leaves")
    handle = await scene.job.enqueue()
    delivery = await read_one(await worker(scene.direct, partition, leases=leases))
    leases.hold(Held(delivery, handle.id))
    beat = LeaseHeartbeat(scene.app.producer.address, lambda: None, "a", leases, 0.6, troubles.append)
    await age(scene.direct, delivery)
    beat.start()
    try:
        await wait_until(lambda: _was_renewed(scene, delivery), "the lease is renewed")
        await WAYS[way](scene)
        if way.startswith("hung"):
            await wait_until(lambda: _met(troubles), "the beat met trouble")
        await age(scene.direct, delivery)
        await wait_until(lambda: _was_renewed(scene, delivery), "the lease is renewed again")
        await wait_until(lambda: _is_well(troubles), "the beat says that it is well")
    finally:
        await run_sync(beat.stop)


async def _met(troubles: list[QueueError | None]) -> bool:
    return bool(troubles)


async def _is_well(troubles: list[QueueError | None]) -> bool:
    return troubles[-1:] in ([], [None])


async def _was_renewed(scene: Scene, delivery: Delivery) -> bool:
    (_, _, idle, _) = (await pending(scene.direct, delivery.partition))[0]
    return idle < 60_000

"""Redis was away for longer than the lease, or its clock was set: live workers keep their tasks.

In each test the heartbeat of the live worker comes last, when a worker has swept already.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from anyio.to_thread import run_sync
from perdure import App, Context, Settings, State, TaskHandle, Worker
from perdure.queues import Gateway
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.transport.gateway import GatewayTimings
from perdure.worker.log import logger

from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.servers.clock import SettableClock, compiler
from tests.support.workers import bounded, running_worker, take_and_die, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

LEASE = 1.5
TASKS = 8
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")

needs_compiler = pytest.mark.skipif(compiler() is None, reason="the clock of a server is set by a library written in C")


@pytest.fixture
def clock(tmp_path: Path) -> SettableClock:
    return SettableClock(tmp_path)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of the test's own; with a clock that can be set if the test asks for one."""
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program, DURABLE)
    if "clock" in request.fixturenames:
        server.environment = request.getfixturevalue("clock").environment
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.process.send_signal(signal.SIGCONT)
    server.stop()


class Scene:
    """Tasks that wait in the middle of a run, and the workers that have swept."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.proceed = asyncio.Event()
        self.started: list[int] = []
        self.renewing = threading.Event()
        self.renewing.set()
        self.renewed: list[str] = []
        self.swept: list[str] = []

        @app.task
        async def job(ctx: Context, number: int) -> tuple[int, int]:
            self.started.append(number)
            await self.proceed.wait()
            return await ctx.step("crashes", lambda: (number, ctx.crashes))

        self.job = job

    async def sweeps(self, worker: Worker) -> None:
        """Wait until a worker has swept once more."""
        before = self.swept.count(worker.id)
        await wait_until(lambda: _more(self.swept, worker.id, before), f"{worker.id} sweeps")

    async def renews(self, worker: Worker) -> None:
        """Let heartbeats through, and wait for the one of a worker."""
        self.renewing.set()
        before = self.renewed.count(worker.id)
        await wait_until(lambda: _more(self.renewed, worker.id, before), f"{worker.id} renews")

    async def begin(self) -> list[TaskHandle[tuple[int, int]]]:
        handles = [await self.job.enqueue(number) for number in range(TASKS)]
        await wait_until(lambda: _more(self.started, None, TASKS - 1), "all tasks run")
        return handles

    async def finish(self, handles: list[TaskHandle[tuple[int, int]]]) -> None:
        """Let the tasks end, and expect that no other worker had them."""
        self.proceed.set()
        assert [await bounded(handle.result()) for handle in handles] == [(number, 0) for number in range(TASKS)]
        assert sorted(self.started) == list(range(TASKS))
        for handle in handles:
            record = await handle.record()
            assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 1, 0)


async def _more(found: list[str] | list[int], one: str | None, before: int) -> bool:
    return (len(found) if one is None else [*found].count(one)) > before


@pytest.fixture
async def scene(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    settings = Settings(redis_url=server.url, namespace="restart", lease=LEASE, grace=5.0)
    async with App("restart", settings=settings) as app:
        scene = Scene(app)
        claim, renew = Consumer.claim, LeaseHeartbeat._renew_all

        async def swept(self: Consumer, *arguments: object) -> object:
            result = await claim(self, *arguments)  # type: ignore[arg-type]
            scene.swept.append(self._worker)
            return result

        def renewed(self: LeaseHeartbeat, *arguments: object) -> None:
            if scene.renewing.is_set():
                renew(self, *arguments)  # type: ignore[arg-type]
                scene.renewed.append(self._worker)

        # A clock that was set back stops the timer of a blocking read.
        monkeypatch.setattr(Gateway, "timings", GatewayTimings(block=0.3, read_margin=0.3))
        monkeypatch.setattr(Consumer, "claim", swept)
        monkeypatch.setattr(LeaseHeartbeat, "_renew_all", renewed)
        yield scene


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return the messages logged during the test."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


async def stopped(server: RedisServer) -> None:
    """The process of Redis is stopped for longer than the lease, as its host may be."""
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(1.2 * LEASE)
    os.kill(server.pid, signal.SIGCONT)


async def killed(server: RedisServer) -> None:
    """Redis is killed, and starts again after more than a lease."""
    await run_sync(server.kill)
    await asyncio.sleep(1.2 * LEASE)
    await run_sync(server.start)


@pytest.mark.parametrize("away", [stopped, killed])
async def test_a_worker_that_starts_when_redis_returns_claims_no_task_of_a_live_one(
    server: RedisServer, scene: Scene, away: Callable[[RedisServer], Awaitable[None]]
) -> None:
    async with running_worker(scene.app) as live:
        handles = await scene.begin()
        scene.renewing.clear()
        await away(server)
        async with running_worker(scene.app) as newcomer:
            await scene.sweeps(newcomer)
            await scene.renews(live)
            await scene.sweeps(newcomer)
            await scene.finish(handles)


async def test_the_tasks_of_lost_workers_are_claimed_one_lease_after_redis_returned(
    server: RedisServer, scene: Scene
) -> None:
    handle = await scene.job.enqueue(0)
    await take_and_die(scene.app)
    await stopped(server)
    returned = time.monotonic()
    scene.proceed.set()
    async with running_worker(scene.app):
        assert await bounded(handle.result()) == (0, 1)
    assert time.monotonic() - returned >= LEASE


@needs_compiler
@pytest.mark.parametrize("step", [600, -600])
async def test_a_step_of_the_clock_takes_no_task_from_a_live_worker(
    clock: SettableClock, server: RedisServer, scene: Scene, logged: list[str], step: int
) -> None:
    async with running_worker(scene.app) as live:
        handles = await scene.begin()
        await scene.sweeps(live)
        scene.renewing.clear()
        clock.set(step)
        await scene.sweeps(live)
        await scene.sweeps(live)
        await scene.renews(live)
        await scene.finish(handles)
    (line,) = [line for line in logged if "clock" in line]
    found = re.match(r"the clock of Redis was set (\w+) by ([\d.]+) s: all leases were restarted", line)
    assert found is not None
    assert found[1] == ("forward" if step > 0 else "back")
    assert float(found[2]) == pytest.approx(abs(step), abs=2)  # the time on the way is not counted


@needs_compiler
async def test_leases_locks_and_due_times_work_after_the_clock_was_set_back(
    clock: SettableClock, server: RedisServer, scene: Scene
) -> None:
    """Without that, the sweep lock and the lease of the lost worker would last ten minutes longer."""
    scene.proceed.set()
    lost = await scene.job.enqueue(0)
    await take_and_die(scene.app)
    async with running_worker(scene.app) as worker:
        await scene.sweeps(worker)
        clock.set(-600)
        assert await bounded(lost.result()) == (0, 1)
        assert await bounded((await scene.job.options(delay=0.2).enqueue(1)).result()) == (1, 0)

"""Redis is killed and comes back, with its append-only file: workers wait, go on, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings, State
from perdure.queues import TaskHandle

from tests.conftest import default_kind
from tests.support.servers import RedisServer, find_program
from tests.support.workers import bounded, history, pending, recorded_steps, redis_command, running_worker, wait_until

pytestmark = pytest.mark.integration

DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own."""
    program = find_program(default_kind())
    assert program is not None
    server = RedisServer(program, DURABLE).start()
    yield server
    server.stop()


@pytest.fixture
async def app(server: RedisServer) -> AsyncIterator[App]:
    settings = Settings(redis_url=server.url, namespace="gone", lease=2.0, grace=5.0)
    async with App("gone", settings=settings) as app:
        yield app


class Scene:
    """A task that stands between two steps until the test lets it go on."""

    def __init__(self, app: App) -> None:
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

        self.task = job


async def test_a_task_between_two_steps_continues_when_redis_is_back(app: App, server: RedisServer) -> None:
    scene = Scene(app)
    async with running_worker(app):
        handle = await scene.task.enqueue()
        await bounded(scene.between.wait())
        server.kill()
        scene.proceed.set()  # the second step's record waits for Redis
        await until_called(scene, "second")
        server.start()
        assert await bounded(handle.result()) == (1, 0)
    assert scene.calls == ["first", "second"]
    assert set(await recorded_steps(app, handle)) == {"d:first", "d:second"}


async def until_called(scene: Scene, name: str) -> None:
    async def called() -> bool:
        return name in scene.calls

    await wait_until(called, f"step {name} runs")


async def test_an_idle_worker_takes_work_again_when_redis_is_back(app: App, server: RedisServer) -> None:
    scene = Scene(app)
    scene.proceed.set()
    async with running_worker(app):
        before = await scene.task.enqueue()
        await until_succeeded(before)
        server.kill()
        server.start()
        after = await scene.task.enqueue()
        await until_succeeded(after)
        assert await before.status() is State.SUCCEEDED


async def until_succeeded(handle: TaskHandle[Any]) -> None:
    async def succeeded() -> bool:
        return await handle.status() is State.SUCCEEDED

    await wait_until(succeeded, "the task succeeds")


async def test_waiters_get_their_results_when_redis_is_back(app: App, server: RedisServer) -> None:
    """The connection on which this process has heard the first result is gone when it waits for the second."""
    scene = Scene(app)
    scene.proceed.set()
    async with running_worker(app):
        before = await scene.task.enqueue()
        assert await bounded(before.result()) == (1, 0)
        server.kill()
        server.start()
        after = await scene.task.enqueue()
        assert await bounded(after.result()) == (1, 0)


async def test_of_many_tasks_none_is_lost(app: App, server: RedisServer) -> None:
    """Killed twice while tasks run, wait on the stream, and wait for their time."""
    ran: dict[str, int] = {}

    @app.task
    async def job(ctx: Context, number: int) -> int:
        ran[ctx.task_id] = ran.get(ctx.task_id, 0) + 1
        found = 0
        for _ in range(5):
            found += await ctx.step("add", add, number)
        return found

    handles: list[TaskHandle[int]] = await job.enqueue_many({"number": number} for number in range(80))
    handles += await job.options(delay=0.5).enqueue_many({"number": number} for number in range(80, 100))
    async with running_worker(app, concurrency=4):
        for some in (5, 40):

            async def enough(some: int = some) -> bool:
                return len(ran) >= some

            await wait_until(enough, f"{some} tasks have started")
            server.kill()
            server.start()
        for number, handle in enumerate(handles):
            assert await bounded(handle.result()) == number * 5
    assert await pending(app) == []
    assert await redis_command(app, "XLEN", handles[0].partition.ready) == 0
    assert await redis_command(app, "ZCARD", handles[0].partition.due) == 0
    for handle in handles:
        completed = [event.step for event in await history(handle) if event.type == "step_completed"]
        assert len(completed) == len(set(completed)) == 5
        assert (await handle.record()).attempts == 1


async def add(number: int) -> int:
    await anyio.sleep(0.002)
    return number


async def test_a_record_waits_for_redis_for_longer_than_any_command_would(server: RedisServer) -> None:
    """The lease is long: the run that made the step has to bring its record home itself."""
    settings = Settings(redis_url=server.url, namespace="gone", lease=60.0, grace=5.0)
    async with App("gone", settings=settings) as app:
        scene = Scene(app)
        async with running_worker(app):
            handle = await scene.task.enqueue()
            await bounded(scene.between.wait())
            server.kill()
            scene.proceed.set()
            await until_called(scene, "second")
            await anyio.sleep(app.producer.gateway.patience + 1.0)  # the absence itself
            server.start()
            assert await bounded(handle.result()) == (1, 0)
    assert scene.calls == ["first", "second"]


async def test_a_task_waits_out_an_absence_that_is_longer_than_its_lease(app: App, server: RedisServer) -> None:
    """The run may continue or be resumed elsewhere: each step is recorded once, and the task ends."""
    scene = Scene(app)
    async with running_worker(app):
        handle = await scene.task.enqueue()
        await bounded(scene.between.wait())
        server.kill()
        await anyio.sleep(app.settings.lease + 0.5)  # the absence itself
        server.start()
        scene.proceed.set()
        attempt, crashes = await bounded(handle.result())
    assert attempt == 1
    assert crashes <= 1
    assert scene.calls.count("first") == 1
    assert scene.calls.count("second") <= 1 + crashes
    completed = [event.step for event in await history(handle) if event.type == "step_completed"]
    assert completed == ["first", "second"]


async def test_a_wait_that_starts_while_redis_is_away_lasts_until_it_is_back(app: App, server: RedisServer) -> None:
    """For the result and for the events; for longer than any command is asked again."""
    app.producer.gateway.patience = 0.1
    scene = Scene(app)
    scene.proceed.set()
    handle = await scene.task.enqueue()
    server.kill()
    waiting = asyncio.create_task(handle.result())
    following = asyncio.create_task(_types(handle))
    with pytest.raises(TimeoutError):
        await handle.result(timeout=1.0)
    assert not waiting.done()
    assert not following.done()
    server.start()
    async with running_worker(app):
        assert await bounded(waiting) == (1, 0)
        assert await bounded(following) == ["step_completed", "step_completed"]


async def _types(handle: TaskHandle[Any]) -> list[str]:
    return [event.type async for event in handle.events()]

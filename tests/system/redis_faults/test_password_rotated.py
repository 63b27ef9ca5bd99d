"""A password that is set on the server while workers run and callers wait, and is removed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from perdure import App, Context, Settings
from perdure.queues import Refused
from perdure.queues.transport import backoff

from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.workers import bounded, running_worker

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[RedisServer]:
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    yield server
    server.stop()


@pytest.fixture
def operator(server: RedisServer) -> Iterator[redis.Redis]:
    """Connection of an operator, which a new password does not end."""
    with redis.Redis.from_url(server.url, single_connection_client=True) as client:
        client.ping()
        yield client


@pytest.fixture
async def app(server: RedisServer, namespace_name: str) -> AsyncIterator[App]:
    async with App("rotated", settings=Settings(redis_url=server.url, namespace=namespace_name, lease=1.0)) as app:
        app.producer.gateway.patience = 0.1
        yield app


def set_password(operator: redis.Redis, password: str) -> None:
    operator.config_set("requirepass", password)
    for kind in ("normal", "pubsub"):
        operator.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


async def until_refused(app: App) -> None:
    """Wait until commands of the app are refused."""
    while True:
        try:
            await app.producer.gateway.command("PING")
        except Refused:
            return
        await asyncio.sleep(0.01)


async def test_waits_and_runs_outlast_a_rotation(app: App, operator: redis.Redis) -> None:
    finish = asyncio.Event()
    started = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        started.set()
        await finish.wait()
        return await ctx.step("record", lambda: "recorded")

    async with running_worker(app):
        handle = await job.enqueue()
        waiting = [asyncio.create_task(handle.result()) for _ in range(2)]
        await bounded(started.wait())
        await asyncio.sleep(0)
        set_password(operator, "new")
        await bounded(until_refused(app))
        waiting.append(asyncio.create_task(handle.result()))  # it has no subscription yet
        finish.set()
        with pytest.raises(Refused, match="refused the credentials: Authentication required"):
            await job.enqueue()
        finished, _ = await asyncio.wait(waiting, timeout=1.0)
        assert not finished
        set_password(operator, "")
        assert await bounded(asyncio.gather(*waiting)) == ["recorded"] * 3
        assert (await handle.record()).attempts == 1


async def test_a_wait_ends_if_the_password_stays_wrong(
    app: App, operator: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "CREDENTIALS_PATIENCE", 0.5)

    @app.task
    async def job(ctx: Context) -> None: ...

    handle = await job.enqueue()
    waiting = asyncio.create_task(handle.result())
    await asyncio.sleep(0)
    set_password(operator, "new")
    shown = app.producer.gateway.address.shown
    with pytest.raises(Refused, match=f"^{shown} refused the credentials: Authentication required"):
        await bounded(waiting)
    set_password(operator, "")

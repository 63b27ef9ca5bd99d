"""A worker of which the event loop, the thread that renews leases, or both do not reach Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from perdure import App, Context, Settings, Worker
from perdure.worker.runtime.health import redis_contact

from tests.support.workers import bounded, running_worker, wait_until

pytestmark = pytest.mark.integration


class Line:
    """A path to the server's socket of which connections of each kind can be cut."""

    def __init__(self, server: Path, path: Path) -> None:
        path.symlink_to(server)
        self.path = path
        self.cut: set[str] = set()
        self._open: list[tuple[str, Any]] = []

    def connect(self, kind: str, connection: Any) -> None:
        if connection.path == str(self.path):
            if kind in self.cut:
                raise ConnectionRefusedError("this connection is cut")
            self._open.append((kind, connection))

    def hang_up(self, *kinds: str) -> None:
        """Cut these kinds of connections, and allow the others."""
        self.cut = set(kinds)
        for kind, connection in self._open:
            if kind == "loop" and kind in kinds and connection._writer is not None:
                connection._writer.transport.abort()
            elif kind == "thread" and kind in kinds and connection._sock is not None:
                connection._sock.shutdown(2)
        self._open = [(kind, connection) for kind, connection in self._open if kind not in kinds]


@pytest.fixture
def line(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    line = Line(Path(settings.redis_url.removeprefix("unix://")), tmp_path / "line.sock")
    connect: Any = redis.asyncio.UnixDomainSocketConnection._connect
    connect_sync: Any = redis.UnixDomainSocketConnection._connect

    async def connect_loop(connection: Any) -> None:
        line.connect("loop", connection)
        await connect(connection)

    def connect_thread(connection: Any) -> Any:
        line.connect("thread", connection)
        return connect_sync(connection)

    monkeypatch.setattr(redis.asyncio.UnixDomainSocketConnection, "_connect", connect_loop)
    monkeypatch.setattr(redis.UnixDomainSocketConnection, "_connect", connect_thread)
    yield line
    line.hang_up()


class Scene:
    """The same app on a line of its own, and directly. Each task runs until `finish`."""

    def __init__(self, settings: Settings, line: Line) -> None:
        self.runs: list[str] = []
        self.finish = asyncio.Event()
        self.cut = self._app("cut", settings.model_copy(update={"redis_url": f"unix://{line.path}", "heartbeat": 0.5}))
        self.direct = self._app("direct", settings)

    def _app(self, name: str, settings: Settings) -> App:
        app = App("contact", settings=settings)

        @app.task
        async def job(ctx: Context) -> str:
            self.runs.append(name)
            await self.finish.wait()
            return await ctx.step("record", lambda: "recorded")

        return app

    async def ran(self, times: int) -> None:
        async def so() -> bool:
            return len(self.runs) == times

        await wait_until(so, f"{times} runs have started")


@pytest.fixture
async def scene(settings: Settings, line: Line, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(redis_contact, "_SHORTEST", 0.0)  # two leases decide
    scene = Scene(settings, line)
    async with scene.direct:
        yield scene


async def until_health(worker: Worker, *, live: bool, ready: bool) -> None:
    async def so() -> bool:
        report = worker.health()
        return (report.live, report.ready) == (live, ready)

    await wait_until(so, f"the worker is {'' if live else 'not '}live and {'' if ready else 'not '}ready")


async def test_a_worker_whose_event_loop_alone_is_cut_off_gives_its_tasks_away(scene: Scene, line: Line) -> None:
    async with running_worker(scene.cut) as worker:
        handle = await scene.direct.tasks["job"].enqueue()
        await scene.ran(1)
        await until_health(worker, live=True, ready=True)
        async with running_worker(scene.direct):
            line.hang_up("loop")
            await until_health(worker, live=False, ready=False)
            (alive,) = [level for level in worker.health().levels if level.name == "alive"]
            assert alive.said.startswith("the event loop has not reached Redis for ")
            assert "this connection is cut" in alive.said
            await scene.ran(2)
            assert scene.runs == ["cut", "direct"]
            line.hang_up()
            await until_health(worker, live=True, ready=True)
            scene.finish.set()
            assert await bounded(handle.result()) == "recorded"
            assert (await handle.record()).crashes == 1
        assert await bounded((await scene.direct.tasks["job"].enqueue()).result()) == "recorded"
        assert scene.runs[2:] == ["cut"]


async def test_an_idle_worker_whose_event_loop_alone_is_cut_off_is_not_live(scene: Scene, line: Line) -> None:
    async with running_worker(scene.cut) as worker:
        await until_health(worker, live=True, ready=True)
        line.hang_up("loop")
        await until_health(worker, live=False, ready=False)
        line.hang_up()
        await until_health(worker, live=True, ready=True)


async def test_a_worker_whose_renewal_alone_is_cut_off_is_not_live(scene: Scene, line: Line) -> None:
    async with running_worker(scene.cut) as worker:
        handle = await scene.direct.tasks["job"].enqueue()
        await scene.ran(1)
        line.hang_up("thread")
        await until_health(worker, live=True, ready=False)
        await until_health(worker, live=False, ready=False)
        line.hang_up()
        await until_health(worker, live=True, ready=True)
        scene.finish.set()
        assert await bounded(handle.result()) == "recorded"


async def test_redis_away_makes_no_worker_dead_and_no_lease_expires(scene: Scene, line: Line) -> None:
    async with running_worker(scene.cut) as worker:
        handle = await scene.direct.tasks["job"].enqueue()
        await scene.ran(1)
        line.hang_up("loop", "thread")
        await until_health(worker, live=True, ready=False)
        until = asyncio.get_running_loop().time() + 2 * worker._contact.limit
        while asyncio.get_running_loop().time() < until:
            assert worker.health().live
            await asyncio.sleep(0.05)
        line.hang_up()
        await until_health(worker, live=True, ready=True)
        scene.finish.set()
        assert await bounded(handle.result()) == "recorded"
        assert scene.runs == ["cut"]
        assert (await handle.record()).crashes == 0

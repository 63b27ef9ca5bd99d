"""Readers of a stream whose worker is killed, whose Redis is killed, and whose own process starts again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Settings, StreamItem, TaskHandle
from perdure.queues import Producer

from tests.conftest import default_kind
from tests.support.paths import PROGRAMS
from tests.support.programs.chatting import WORDS
from tests.support.servers import RedisServer, find_program
from tests.support.workers import BOUND, bounded, running_worker

pytestmark = [pytest.mark.integration, pytest.mark.processes]

TEXT = "".join(WORDS)


@pytest.fixture
def worker(settings: Settings, tmp_path: Path) -> Callable[..., Any]:
    """Function that runs a supervisor with one worker, which dies after so many tokens, once for each number."""

    @contextmanager
    def run(*deaths: int) -> Iterator[None]:
        environment = os.environ | {
            "PERDURE_REDIS_URL": settings.redis_url,
            "PERDURE_NAMESPACE": settings.namespace,
            "PERDURE_LEASE": "1",
            "DEATHS": ",".join(map(str, deaths)),
            "GRAVES": str(tmp_path),
            "CALLS": str(tmp_path / "calls"),
        }
        program = f"{PROGRAMS / 'chatting.py'}:app"
        process = subprocess.Popen(
            [sys.executable, "-m", "perdure.worker.cli", "worker", "run", program, "--processes", "1"], env=environment
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND) == 0

    return run


def show(items: list[StreamItem], page: list[StreamItem]) -> str:
    """Return the text that a page shows which drops what marks make void; page: its items, which change."""
    for item in items:
        page[:] = [shown for shown in page if not item.voids(shown)]
        if item.kind == "item":
            page.append(item)
    return "".join(item.value for item in page)


async def read_to_end(handle: TaskHandle[Any], name: str, **options: Any) -> list[StreamItem]:
    async def read() -> list[StreamItem]:
        return [item async for item in handle.stream(name, **options)]

    return await bounded(read())


async def test_a_page_shows_each_token_once_through_kills_and_refreshes(
    worker: Callable[..., Any], producer: Producer, tmp_path: Path
) -> None:
    handle = await producer.enqueue("chat", queue="chatting")
    page: list[StreamItem] = []
    cursor: str | None = None
    ended: StreamItem | None = None
    with worker(3, 14, 27):
        while ended is None:  # the connection of the page breaks after every seventh item
            async with aclosing(handle.stream("tokens", after=cursor)) as items:
                for _ in range(7):
                    item = await bounded(anext(items))
                    show([item], page)
                    cursor = item.cursor
                    if item.kind == "end":
                        ended = item
                        break
    assert show([], page) == f"begin{TEXT}end"
    assert (ended.state, ended.result) == ("succeeded", TEXT)
    everything = await read_to_end(handle, "tokens")
    assert show(everything, []) == f"begin{TEXT}end", "the same for a page that is opened now"
    marks = [item.reason for item in everything if item.kind == "cut_off"]
    assert marks[-2:] == ["retried"] * 2, "the first three tokens may not have been stored"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(WORDS) + 3 + 4 + 7, "the call continued from the text that it had saved"


async def test_a_crash_limit_gives_an_end(worker: Callable[..., Any], producer: Producer) -> None:
    handle = await producer.enqueue("poison", queue="chatting")
    reading = asyncio.create_task(read_to_end(handle, "output"))
    with worker():
        item, end = await bounded(reading)
    assert item.value == "last words"
    assert (end.kind, end.state, end.reason) == ("end", "dead", "crash_loop")
    assert end.error


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own."""
    program = find_program(default_kind())
    assert program is not None
    server = RedisServer(program, ("--save", "", "--appendonly", "yes", "--appendfsync", "always")).start()
    yield server
    server.stop()


async def test_readers_continue_when_redis_is_back(server: RedisServer) -> None:
    settings = Settings(redis_url=server.url, namespace="gone", lease=2.0, grace=5.0)
    proceed = asyncio.Event()
    async with App("gone", settings=settings) as app:

        @app.task
        async def count(ctx: Context) -> int:
            for number in range(5):
                await ctx.emit(number)
            await proceed.wait()
            for number in range(5, 10):
                await ctx.emit(number)
            return 10

        async with running_worker(app):
            handle = await count.enqueue()
            async with aclosing(handle.stream()) as items, aclosing(handle.stream(last=2)) as late:
                assert [(await bounded(anext(items))).value for _ in range(5)] == [*range(5)]
                assert (await bounded(anext(late))).value == 3
                server.kill()
                waiting = asyncio.ensure_future(anext(items))
                await asyncio.sleep(0.2)
                server.start()
                proceed.set()
                found = [await bounded(waiting)] + [await bounded(anext(items)) for _ in range(5)]
                assert [item.value for item in found] == [5, 6, 7, 8, 9, None]
                assert (found[-1].state, found[-1].result) == ("succeeded", 10)
                assert [(await bounded(anext(late))).value for _ in range(6)] == [*range(4, 10)]

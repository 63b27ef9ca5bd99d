"""Messages whose reply was late: a stalled connection, a server that was unavailable, or a process that was stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import App, Context, State
from perdure.queues import Unavailable
from perdure.queues.delivery.stream_reader import SingleNodeReader

from tests.support.workers import bounded, pending, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.app(lease=0.6)]


class SlowReply:
    """The first reply with a message reaches its worker when `arrive` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrive = asyncio.Event()
        self.arrived = asyncio.Event()
        self.held = False
        read = SingleNodeReader.read

        async def slow(reader: SingleNodeReader, *arguments: Any) -> Any:
            reply = await read(reader, *arguments)
            if reply and not self.held:
                self.held = True
                await self.arrive.wait()
                self.arrived.set()
            return reply

        monkeypatch.setattr(SingleNodeReader, "read", slow)


class GivenUpReply:
    """The first reply with a message seems lost: it reaches its worker when `arrive` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrive = asyncio.Event()
        self.arrived = asyncio.Event()
        self._kept: Any = None
        read = SingleNodeReader.read

        async def late(reader: SingleNodeReader, *arguments: Any) -> Any:
            if self.arrive.is_set() and not self.arrived.is_set():
                self.arrived.set()
                return self._kept
            reply = await read(reader, *arguments)
            if reply and self._kept is None:
                self._kept = reply
                raise Unavailable("the node does not answer")
            return reply

        monkeypatch.setattr(SingleNodeReader, "read", late)


async def test_a_message_that_another_worker_claimed_meanwhile_starts_no_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    @app.task
    async def job(ctx: Context) -> int:
        started.append(ctx.crashes)
        return ctx.crashes

    reply = SlowReply(monkeypatch)
    async with running_worker(app) as slow:
        handle = await job.enqueue()
        await wait_until(lambda: _is(reply.held), "the message is on its way")
        async with running_worker(app):
            assert await bounded(handle.result()) == 1
        reply.arrive.set()
        await bounded(reply.arrived.wait())
        second = await job.enqueue()
        assert await bounded(second.result()) == 0
        assert slow.in_flight == 0
    assert started == [1, 0]


async def test_a_message_that_is_still_the_workers_is_run(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def job(ctx: Context) -> int:
        return ctx.crashes

    reply = SlowReply(monkeypatch)
    async with running_worker(app):
        handle = await job.enqueue()
        await wait_until(lambda: _is(reply.held), "the message is on its way")

        async def late() -> bool:
            return bool((await pending(app))[0][2] > 0.7 * app.settings.lease * 1000)

        await wait_until(late, "the lease has nearly expired")
        reply.arrive.set()
        assert await bounded(handle.result()) == 0
        assert (await handle.record()).state is State.SUCCEEDED


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
async def test_a_message_that_was_recovered_meanwhile_starts_no_second_run(
    app: App, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """A reader of a cluster uses a late reply; by then the worker may have recovered what the reply has."""
    started: list[str] = []
    called: list[str] = []
    in_step, proceed = asyncio.Event(), asyncio.Event()

    async def call(name: str) -> None:
        called.append(name)

    @app.task
    async def job(ctx: Context, name: str) -> str:
        started.append(name)
        await ctx.step("call", call, name)
        in_step.set()
        if name == "first":
            await proceed.wait()
        return name

    reply = GivenUpReply(monkeypatch)
    async with running_worker(app):
        first = await job.enqueue("first")
        await bounded(in_step.wait())
        if ended:
            proceed.set()
            await bounded(first.result())
        reply.arrive.set()
        assert await bounded((await job.enqueue("second")).result()) == "second"
        await bounded(reply.arrived.wait())
        assert await bounded((await job.enqueue("third")).result()) == "third"
        proceed.set()
        assert await bounded(first.result()) == "first"
        assert (await first.record()).crashes == 0
    assert started == called == ["first", "second", "third"]


async def _is(value: bool) -> bool:
    return value

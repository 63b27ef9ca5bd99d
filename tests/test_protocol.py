"""Protocol 3 on the line, replies in the shape of protocol 2 for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from perdure import App, Context, Settings, TaskCancelled
from perdure.queues import Gateway, Producer, default_address, list_queues
from perdure.queues.keys import GROUP
from perdure.queues.protocol import plain
from perdure.queues.wire import Command
from working import soon, working


@pytest.mark.parametrize(
    ("command", "reply", "shape"),
    [
        (("HGETALL", "key"), {b"a": b"1", b"b": b"2"}, [b"a", b"1", b"b", b"2"]),
        (("XINFO", "CONSUMERS", "key", "g"), [{b"name": b"w", b"idle": 5}], [[b"name", b"w", b"idle", 5]]),
        (("XREADGROUP",), {b"s": [[b"1-0", [b"f", b"v"]]]}, [[b"s", [[b"1-0", [b"f", b"v"]]]]]),
        (("ZSCORE", "key", "m"), 1795291786159.0, b"1795291786159"),
        (("ZSCORE", "key", "m"), 0.1, b"0.10000000000000001"),
        (("SMEMBERS", "key"), {b"one"}, [b"one"]),
        (("EVAL", "return true", 0), True, 1),
        (("GET", "key"), None, None),
        (("GET", "key"), b"text", b"text"),
    ],
)
def test_a_reply_has_the_shape_that_callers_know(command: Command, reply: Any, shape: Any) -> None:
    assert plain(command, reply) == shape
    assert plain(command, shape) == shape


@pytest.fixture
def url(redis_url: str) -> str:
    return f"{redis_url}?protocol=3"


@pytest.fixture
async def gateway(url: str) -> AsyncIterator[Gateway]:
    gateway = Gateway(default_address(url))
    await gateway.open()
    yield gateway
    await gateway.close()


@pytest.mark.integration
async def test_the_line_speaks_protocol_3(gateway: Gateway, namespace_name: str) -> None:
    key = f"{{{namespace_name}}}:queues"
    await gateway.command("HSET", key, "a", 1)
    hello = await gateway.command("HELLO")
    assert dict(zip(hello[::2], hello[1::2], strict=True))[b"proto"] == 3
    assert await gateway.command("HGETALL", key) == [b"a", b"1"]
    await gateway.command("DEL", key)


@pytest.mark.integration
async def test_messages_are_read_and_queues_looked_at(gateway: Gateway, namespace_name: str) -> None:
    async with Producer(namespace=namespace_name, gateway=gateway) as producer:
        handle = await producer.enqueue("t")
        partition = handle.partition
        await gateway.command("XGROUP", "CREATE", partition.ready, GROUP, "0")
        reader = gateway.reader()
        reply = await reader.read("XREADGROUP", "GROUP", GROUP, "w", "STREAMS", partition.ready, ">")
        assert [stream for stream, _ in reply] == [partition.ready.encode()]
        await reader.close()
        (stats,) = await list_queues(gateway, producer.namespace)
        assert (stats.in_flight, stats.consumers) == (1, {"w": 1})


@pytest.mark.integration
async def test_a_worker_works_and_is_told_to_cancel(url: str, namespace_name: str) -> None:
    settings = Settings(redis_url=url, namespace=namespace_name, lease=0.9)
    began = asyncio.Event()
    async with App("protocol", settings=settings) as app:

        @app.task
        async def double(ctx: Context, number: int) -> int:
            return await ctx.step("double", lambda: number * 2)

        @app.task
        async def endless(ctx: Context) -> None:
            began.set()
            await asyncio.Event().wait()

        async with working(app):
            assert await soon((await double.enqueue(4)).result()) == 8
            handle = await endless.enqueue()
            await soon(began.wait())
            await handle.cancel()  # the beat hears of it
            with pytest.raises(TaskCancelled):
                await soon(handle.result())

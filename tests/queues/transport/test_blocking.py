"""Interruption of a blocking read, at each of its stages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from perdure.queues import Unavailable
from perdure.queues.transport.address import Node
from perdure.queues.transport.blocking import BlockingConnection

from tests.support.workers import bounded


class Client:
    """A client whose blocking read lasts until it is released, and whose handshake can be delayed."""

    def __init__(self) -> None:
        self.greeted = asyncio.Event()
        self.released = asyncio.Event()
        self.reads = 0

    async def execute_command(self, *command: Any) -> Any:
        if command[:2] == ("CLIENT", "ID"):
            await self.greeted.wait()
            return 7
        self.reads += 1
        await self.released.wait()
        return None

    async def aclose(self) -> None: ...


class SilentClient(Client):
    """A client whose server stops answering after a read is sent; only closing the connection ends the read."""

    def __init__(self) -> None:
        super().__init__()
        self.greeted.set()
        self.reading = asyncio.Event()
        self.connection_pool = self

    async def disconnect(self) -> None:
        self.released.set()

    async def execute_command(self, *command: Any) -> Any:
        if command[:2] == ("CLIENT", "ID"):
            return await super().execute_command(*command)
        self.reading.set()
        await super().execute_command(*command)
        raise redis.ConnectionError("Connection closed")


class Scene:
    """A blocking connection to a server that ends the read at the third request only."""

    def __init__(self) -> None:
        self.client = Client()
        self.unblocked: list[int] = []
        self.connection = BlockingConnection("redis://fake", lambda _: self.client, self.unblock)  # type: ignore[arg-type, return-value]

    async def unblock(self, client_id: int, node: Node | None) -> int:
        self.unblocked.append(client_id)
        if len(self.unblocked) < 3:
            return 0
        self.client.released.set()
        return 1


async def test_the_request_is_repeated_until_the_read_ends() -> None:
    scene = Scene()
    scene.client.greeted.set()
    read = asyncio.create_task(scene.connection.read("XREADGROUP"))
    await asyncio.sleep(0)
    await bounded(scene.connection.interrupt())
    assert await bounded(read) is None
    assert scene.unblocked == [7, 7, 7]


async def test_a_read_is_not_sent_if_it_is_interrupted_while_connecting() -> None:
    scene = Scene()
    read = asyncio.create_task(scene.connection.read("XREADGROUP"))
    await asyncio.sleep(0)
    interrupting = asyncio.create_task(scene.connection.interrupt())
    await asyncio.sleep(0)
    scene.client.greeted.set()
    assert await bounded(read) is None
    await bounded(interrupting)
    assert (scene.client.reads, scene.unblocked) == (0, [])


async def test_without_a_read_no_client_is_unblocked() -> None:
    scene = Scene()
    await bounded(scene.connection.interrupt())
    assert scene.unblocked == []
    scene.client.greeted.set()
    scene.client.released.set()
    await scene.connection.read("XREADGROUP")
    assert scene.client.reads == 1


@pytest.mark.parametrize("unblocks", [False, True], ids=["the command hangs", "the command changes nothing"])
async def test_a_read_of_a_silent_server_is_ended_by_closing_its_connection(
    unblocks: bool,
) -> None:
    client = SilentClient()

    async def unblock(client_id: int, node: Node | None) -> int:
        if not unblocks:
            await asyncio.Event().wait()
        return 0

    connection = BlockingConnection(
        "redis://fake",
        lambda _: client,  # type: ignore[arg-type, return-value]
        unblock,
        unblock_timeout=0.05,
    )
    read = asyncio.create_task(connection.read("XREADGROUP"))
    await bounded(client.reading.wait())
    await bounded(connection.interrupt())
    with pytest.raises(Unavailable):
        await bounded(read)

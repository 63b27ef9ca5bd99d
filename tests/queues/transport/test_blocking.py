"""A blocking read that is told to wait no longer, at each moment of its life."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from perdure.queues import BlockingConnection, Unavailable
from perdure.queues.transport import blocking as reader_module
from perdure.queues.transport.address import Node

from tests.support.workers import soon


class Client:
    """A client whose blocking read lasts until it is released; it may be slow to reach the server."""

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
    """A client whose server answers nothing more once a read is sent: only a closed connection ends the read."""

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
    """A reader, and a server on which the read waits only from the third time on that it is told to end."""

    def __init__(self) -> None:
        self.client = Client()
        self.told: list[int] = []
        self.reader = BlockingConnection("redis://fake", lambda _: self.client, self.unblock)  # type: ignore[arg-type, return-value]

    async def unblock(self, client_id: int, node: Node | None) -> int:
        self.told.append(client_id)
        if len(self.told) < 3:
            return 0
        self.client.released.set()
        return 1


async def test_a_read_on_its_way_is_told_until_it_hears() -> None:
    scene = Scene()
    scene.client.greeted.set()
    read = asyncio.create_task(scene.reader.read("XREADGROUP"))
    await asyncio.sleep(0)
    await soon(scene.reader.interrupt())
    assert await soon(read) is None
    assert scene.told == [7, 7, 7]


async def test_a_read_whose_connection_is_being_made_does_not_begin() -> None:
    scene = Scene()
    read = asyncio.create_task(scene.reader.read("XREADGROUP"))
    await asyncio.sleep(0)
    interrupting = asyncio.create_task(scene.reader.interrupt())
    await asyncio.sleep(0)
    scene.client.greeted.set()
    assert await soon(read) is None
    await soon(interrupting)
    assert (scene.client.reads, scene.told) == (0, [])


async def test_nobody_is_told_where_nothing_is_read() -> None:
    scene = Scene()
    await soon(scene.reader.interrupt())
    assert scene.told == []
    scene.client.greeted.set()
    scene.client.released.set()
    await scene.reader.read("XREADGROUP")
    assert scene.client.reads == 1


@pytest.mark.parametrize("unblocks", [False, True], ids=["the command hangs", "the command changes nothing"])
async def test_a_read_of_a_silent_server_is_ended_by_closing_its_connection(
    monkeypatch: pytest.MonkeyPatch, unblocks: bool
) -> None:
    monkeypatch.setattr(reader_module, "_PATIENCE", 0.05)
    client = SilentClient()

    async def unblock(client_id: int, node: Node | None) -> int:
        if not unblocks:
            await asyncio.Event().wait()
        return 0

    reader = BlockingConnection("redis://fake", lambda _: client, unblock)  # type: ignore[arg-type, return-value]
    read = asyncio.create_task(reader.read("XREADGROUP"))
    await soon(client.reading.wait())
    await soon(reader.interrupt())
    with pytest.raises(Unavailable):
        await soon(read)

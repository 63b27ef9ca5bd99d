"""A demoted primary refuses writes: the command was not executed, and the next connection finds the new primary."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from hashlib import sha1
from pathlib import Path

import pytest
from perdure.queues import Address, Gateway, Unavailable
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import Script

from tests.support.servers import RedisServer
from tests.support.workers import bounded, wait_until

pytestmark = pytest.mark.integration

SOURCE = "redis.call('SET', KEYS[1], ARGV[1]) return 1"
WRITES = Script("writes", SOURCE, sha1(SOURCE.encode(), usedforsecurity=False).hexdigest())


@pytest.fixture(scope="module")
def server(server_program: Path) -> Iterator[RedisServer]:
    server = RedisServer(server_program).start()
    yield server
    server.stop()


@pytest.fixture
async def gateway(server: RedisServer) -> AsyncIterator[Gateway]:
    gateway = Gateway(Address(server.url), patience=0.0)
    await gateway.open()
    yield gateway
    await promote(gateway)
    await gateway.command("FLUSHALL")
    await gateway.close()


async def demote(gateway: Gateway) -> None:
    await gateway.command("REPLICAOF", "127.0.0.1", "1")


async def promote(gateway: Gateway) -> None:
    await gateway.command("REPLICAOF", "NO", "ONE")


async def test_commands_use_another_connection_afterwards(gateway: Gateway) -> None:
    before = await gateway.command("CLIENT", "ID")
    assert await gateway.command("CLIENT", "ID") == before
    await demote(gateway)
    with pytest.raises(Unavailable):
        await gateway.command("SET", "key", "value")
    assert await gateway.command("CLIENT", "ID") != before


async def test_scripts_use_another_connection_afterwards(gateway: Gateway) -> None:
    """Redis 6.2 reports the refusal within an error of the script."""
    await gateway.command("SCRIPT", "LOAD", SOURCE)
    before = await gateway.command("CLIENT", "ID")
    await demote(gateway)
    with pytest.raises(Unavailable):
        await gateway.run(WRITES, ["key"], ["value"])
    assert await gateway.command("CLIENT", "ID") != before


async def test_a_command_that_is_not_repeatable_is_repeated_after_a_refusal(gateway: Gateway) -> None:
    await gateway.command("CONFIG", "RESETSTAT")
    await demote(gateway)
    gateway.patience = 60.0
    writing = asyncio.create_task(gateway.command("INCR", "counter", repeatable=False))

    async def refused() -> bool:
        return b"errorstat_READONLY" in await gateway.command("INFO", "errorstats")

    await wait_until(refused, "the write was refused")
    assert not writing.done()
    await promote(gateway)
    assert await writing == 1


async def test_blocking_reads_use_another_connection_afterwards(gateway: Gateway, server: RedisServer) -> None:
    await gateway.command("XGROUP", "CREATE", "stream", GROUP, "0", "MKSTREAM")
    read = ("XREADGROUP", "GROUP", GROUP, "w", "COUNT", 1, "STREAMS", "stream", ">")
    connection = gateway.blocking_connection()
    assert await connection.read(*read) is None
    await demote(gateway)
    with pytest.raises(Unavailable):
        await connection.read(*read)

    async def gone() -> bool:
        return b"cmd=xreadgroup" not in await gateway.command("CLIENT", "LIST")

    await wait_until(gone, "the blocking connection to the replica is closed")
    await promote(gateway)
    entry = await gateway.command("XADD", "stream", "*", "field", "value")
    assert await connection.read(*read) == [[b"stream", [[entry, [b"field", b"value"]]]]]
    await connection.close()


async def test_a_read_of_a_frozen_server_is_interrupted(server: RedisServer, gateway: Gateway) -> None:
    await gateway.command("XGROUP", "CREATE", "stream", GROUP, "0", "MKSTREAM")
    connection = gateway.blocking_connection()
    read = asyncio.create_task(connection.read("XREADGROUP", "GROUP", GROUP, "w", "BLOCK", 0, "STREAMS", "stream", ">"))

    async def waits() -> bool:
        return b"blocked_clients:1" in await gateway.command("INFO", "clients")

    await wait_until(waits, "the read waits")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await bounded(connection.interrupt())
        with pytest.raises(Unavailable, match="closed"):
            await bounded(read)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await connection.close()

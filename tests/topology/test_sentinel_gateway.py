"""The gateway under real Sentinels: every connection finds the current primary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from perdure.queues import Address, Gateway, Namespace, Partition, Producer, QueueError, TaskCancelled
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.delivery.leases import Delivery, Leases
from perdure.queues.keys import GROUP

from tests.support.consumers import Held
from tests.support.servers.sentinels import SERVICE, Sentinels, private_sentinels
from tests.support.workers import bounded, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.integration]


@pytest.fixture(scope="module")
def sentinels(server_program: Path) -> Iterator[Sentinels]:
    with private_sentinels(server_program) as sentinels:
        yield sentinels


@pytest.fixture
async def gateway(sentinels: Sentinels) -> AsyncIterator[Gateway]:
    gateway = Gateway(Address(sentinels.url()), patience=60.0)
    await gateway.open()
    yield gateway
    await gateway.close()


async def test_commands_go_to_the_primary(gateway: Gateway, sentinels: Sentinels) -> None:
    info = await gateway.command("INFO", "server")
    assert f"tcp_port:{sentinels.primary.port}".encode() in info
    assert not gateway.clustered


async def test_a_sentinel_that_names_a_replica_is_not_trusted(sentinels: Sentinels) -> None:
    """A sentinel that was partitioned from the others does not know of a failover."""
    replica = next(node for node in sentinels.servers if node is not sentinels.primary)
    asked = 0
    open_ones: list[asyncio.StreamWriter] = []

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        open_ones.append(writer)
        while data := await reader.read(4096):
            if b"SENTINEL" in data:
                asked += 1
                writer.write(f"*2\r\n$9\r\n127.0.0.1\r\n${len(str(replica.port))}\r\n{replica.port}\r\n".encode())
            else:
                writer.write(b"+OK\r\n" * data.count(b"*"))

    liar = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = liar.sockets[0].getsockname()[1]
    honest = sentinels.watchers[0].port
    gateway = Gateway(Address(f"redis+sentinel://127.0.0.1:{port},127.0.0.1:{honest}/{SERVICE}"), patience=30.0)
    await gateway.open()
    try:
        info = await gateway.command("INFO", "server")
        assert f"tcp_port:{sentinels.primary.port}".encode() in info
        assert asked == 1
    finally:
        await gateway.close()
        liar.close()
        for writer in open_ones:
            writer.close()
            await writer.wait_closed()


async def test_all_connections_find_the_new_primary(
    gateway: Gateway, sentinels: Sentinels, namespace: Namespace, partition: Partition
) -> None:
    """Commands, a blocking read, a subscription and the heartbeat."""
    await gateway.command("XGROUP", "CREATE", partition.ready, GROUP, "0", "MKSTREAM")
    entry = await gateway.command("XADD", partition.ready, "*", "field", "value")
    connection = gateway.blocking_connection(partition.ready)
    read = ("XREADGROUP", "GROUP", GROUP, "w", "COUNT", 1, "BLOCK", 5000, "STREAMS", partition.ready, ">")
    ((_, ((taken, _),)),) = await connection.read(*read)
    assert taken == entry
    leases, lost, troubles = Leases(), list[str](), list[QueueError | None]()
    delivery = Delivery(partition, entry, "w", 1, {})
    leases.hold(Held(delivery, "id", lost=lambda: lost.append("lost")))
    heartbeat = LeaseHeartbeat(gateway.address, lambda: None, "w", leases, 0.6, troubles.append)
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        handle = await producer.enqueue("t", queue="another")
        await gateway.command("WAIT", 2, 5000)
        waiter = asyncio.create_task(handle.result())
        waits = asyncio.create_task(connection.read(*read))
        victim = sentinels.kill_primary()
        heartbeat.start()
        try:
            await wait_until(lambda: recovered(troubles), "the heartbeat has found the new server")
        finally:
            await asyncio.to_thread(heartbeat.stop)
        with pytest.raises(QueueError):
            await bounded(waits)
        assert await handle.status() == "queued"
        assert sentinels.primary is not victim
        second = await gateway.command("XADD", partition.ready, "*", "field", "value")
        ((_, ((taken, _),)),) = await bounded(connection.read(*read))
        assert (taken, lost) == (second, [])
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await bounded(waiter)
    await connection.close()


async def recovered(troubles: list[QueueError | None]) -> bool:
    return len(troubles) > 1 and troubles[-1] is None

"""Pages of a hash: the scan is complete also if another server process answers for the later ones."""

from __future__ import annotations

from pathlib import Path

from perdure.queues import Gateway, Partition
from perdure.queues.transport.address import Address
from perdure.queues.transport.large_results import scan_fields
from perdure.queues.transport.large_values import SCAN_START, ScanCursor, scan_page

from tests.support.consumers import needs_server
from tests.support.servers import RedisServer

FIELDS = {f"d:page {number * 7919 % 10_007}": b"%d" % number for number in range(2_000)}


async def put(gateway: Gateway, key: str) -> None:
    await gateway.command("HSET", key, *[part for field in FIELDS.items() for part in field])
    await gateway.command("PEXPIRE", key, 60_000)


async def test_the_fields_that_match_are_read_in_pages(gateway: Gateway, partition: Partition) -> None:
    key = partition.steps("x")
    await put(gateway, key)
    await gateway.command("HSET", key, "c:1:page", b"a chunk")
    found = [field async for field in scan_fields(gateway, key, "d:*")]
    assert len(found) == len(FIELDS)
    assert dict(found) == FIELDS
    cursor, page = await scan_page(gateway, key, SCAN_START, "d:*", 100)
    assert not cursor.is_end
    assert 0 < len(page) < len(FIELDS)
    assert [one async for one in scan_fields(gateway, partition.steps("none"), "*")] == []


async def test_a_cursor_of_another_server_process_starts_again(gateway: Gateway, partition: Partition) -> None:
    needs_server(gateway, "it does not know INFO")
    key = partition.steps("x")
    await put(gateway, key)
    own, first = await scan_page(gateway, key, SCAN_START, "*", 100)
    assert len(own.process) == 40
    assert await scan_page(gateway, key, ScanCursor(b"f" * 40, own.position), "*", 100) == (SCAN_START, {})
    _, second = await scan_page(gateway, key, own, "*", 100)
    assert second.keys().isdisjoint(first.keys())


async def test_a_scan_that_another_server_continues_is_complete(server_program: Path, partition: Partition) -> None:
    """As after a failover, or a restart from the append-only file."""
    key, servers = partition.steps("x"), [RedisServer(server_program).start() for _ in range(2)]
    gateways = [Gateway(Address.parse(server.url, data_dir=Path)) for server in servers]
    try:
        for gateway in gateways:
            await gateway.open()
            await put(gateway, key)
        cursor, found = await scan_page(gateways[0], key, SCAN_START, "*", 500)
        while not cursor.is_end:
            cursor, page = await scan_page(gateways[1], key, cursor, "*", 500)
            found |= page
        assert len(found) == len(FIELDS)
    finally:
        for gateway in gateways:
            await gateway.close()
        for server in servers:
            server.stop()

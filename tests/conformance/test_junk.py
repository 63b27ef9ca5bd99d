"""Items of other programs: they leave their key for the junk, once, and the junk is bounded."""

from __future__ import annotations

import logging

import pytest
from perdure.queues import Gateway, Partition
from perdure.queues.junk import JUNK_TTL, set_aside, shown_bytes, split
from perdure.queues.keys import JUNK_ENTRIES
from perdure.queues.transport.scripts import pairs

ITEMS = [b"\xff", b"", b"\x00", b"a b", b"__proto__"]


async def junk(gateway: Gateway, partition: Partition) -> list[tuple[bytes, bytes]]:
    """Return item and content of the entries."""
    found = [pairs(fields) for _, fields in await gateway.command("XRANGE", partition.junk, "-", "+")]
    assert {fields[b"key"].decode() for fields in found} <= {partition.due, partition.closed, partition.dead}
    return [(fields[b"item"], fields[b"content"]) for fields in found]


def test_items_are_split_into_good_and_bad_ones() -> None:
    assert split([b"a", b"\xff", b"", b"b"]) == (["a", "b"], [b"\xff", b""])
    assert split([b"a", b"bb"], lambda text: len(text) == 1) == (["a"], [b"bb"])


def test_an_item_is_shown_as_printable_ascii() -> None:
    assert shown_bytes(b"\x1b[31m\xff") == r"'\x1b[31m\xff'"
    assert shown_bytes(b"a" * 100) == f"'{'a' * 80}' (100 bytes)"


async def test_members_of_a_sorted_set_are_moved_once(
    gateway: Gateway, partition: Partition, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("perdure.queues.junk")  # whatever a worker of another test has set above it
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    for item in [*ITEMS, b"good"]:
        await gateway.command("ZADD", partition.due, 1, item)
    with caplog.at_level(logging.WARNING, logger.name):
        assert await set_aside(gateway, partition, partition.due, "zset", ITEMS) == len(ITEMS)
        assert await set_aside(gateway, partition, partition.due, "zset", ITEMS) == 0
    assert await gateway.command("ZRANGE", partition.due, 0, -1) == [b"good"]
    assert await junk(gateway, partition) == [(item, b"") for item in ITEMS]
    assert 0 < await gateway.command("PTTL", partition.junk) <= JUNK_TTL * 1000
    (line,) = [record.getMessage() for record in caplog.records if partition.due in record.getMessage()]
    assert r"'\xff'" in line
    await gateway.command("DEL", partition.due)


async def test_a_field_of_a_hash_is_moved_with_its_value(gateway: Gateway, partition: Partition) -> None:
    await gateway.command("HSET", partition.closed, b"\xff", b"\xfe", "kept", "1")
    assert await set_aside(gateway, partition, partition.closed, "hash", [b"\xff", b"missing"]) == 1
    assert await gateway.command("HGETALL", partition.closed) == [b"kept", b"1"]
    assert await junk(gateway, partition) == [(b"\xff", b"\xfe")]
    await gateway.command("DEL", partition.closed)


async def test_an_entry_of_a_stream_is_moved_with_its_fields(gateway: Gateway, partition: Partition) -> None:
    entry = await gateway.command("XADD", partition.dead, "*", "id", b"\xff")
    assert await set_aside(gateway, partition, partition.dead, "stream", [entry, b"1-1"]) == 1
    assert await gateway.command("XLEN", partition.dead) == 0
    assert await junk(gateway, partition) == [(entry, b"id \xff")]
    await gateway.command("DEL", partition.dead)


async def test_the_junk_is_bounded(gateway: Gateway, partition: Partition) -> None:
    items = [b"\xff%d" % number for number in range(JUNK_ENTRIES + 50)]
    await gateway.command("ZADD", partition.due, *[part for item in items for part in (1, item)])
    for first in range(0, len(items), 500):
        await set_aside(gateway, partition, partition.due, "zset", items[first : first + 500])
    assert [item for item, _ in await junk(gateway, partition)] == items[-JUNK_ENTRIES:]


async def test_an_item_keeps_its_first_bytes(gateway: Gateway, partition: Partition) -> None:
    await gateway.command("ZADD", partition.due, 1, b"\xff" * 1_000_000)
    await set_aside(gateway, partition, partition.due, "zset", [b"\xff" * 1_000_000])
    ((item, _),) = await junk(gateway, partition)
    assert item == b"\xff" * 4096

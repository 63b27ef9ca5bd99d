"""Chunks of large values in Redis: written by the owner of the delivery alone, read when asked for, deleted with it."""

from __future__ import annotations

import pytest
from perdure.queues import EntriesLost, Gateway, LeaseLost, Namespace, Partition
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history, write_entries
from perdure.queues.delivery.leases import Delivery
from perdure.queues.errors import LargeValueLost
from perdure.queues.transport.large_values import CHUNK_BYTES, LargeValue, cut, read_large

from tests.support.consumers import take_over
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.task_places import dump, lifetimes

TEXT = b"0123456789" * 120_000
VALUE, CHUNKS, _ = cut("read", TEXT, size=len(TEXT))
ENTRIES = [Entry(Kind.CHUNK, f"{VALUE.digest}:{number}", chunk) for number, chunk in enumerate(CHUNKS)]
RECORD = Entry(Kind.DONE, "read", b"{}\n" + VALUE.encode())


async def read_value(gateway: Gateway, partition: Partition) -> bytes:
    return await read_large(gateway, partition.steps("x"), "c", "read", VALUE, bytes, "the value")


def test_a_value_is_cut_and_its_reference_is_no_json() -> None:
    assert [len(chunk) for chunk in CHUNKS] == [CHUNK_BYTES, CHUNK_BYTES, len(TEXT) - 2 * CHUNK_BYTES]
    assert LargeValue.decode(VALUE.encode()) == VALUE
    assert LargeValue.decode(b'{"digest":1}') is None
    for damaged in (b"#", b"#1", b"#{}", b'#{"digest":"a","size":"x","chunks":1,"raw":false}'):
        with pytest.raises(LargeValueLost, match="reference is damaged"):
            LargeValue.decode(damaged)
    assert cut("other", TEXT, size=1)[0].digest != VALUE.digest, "each step has chunks of its own"


async def test_the_next_run_reads_the_reference_and_then_the_chunks(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    for entry in (*ENTRIES, RECORD):
        await add_entries(gateway, delivery, "x", [entry])
    history = await load_history(gateway, await take_over(gateway, delivery), "x")
    assert (history.done, history.problem) == ({"read": RECORD.value}, None)
    await history.read_all()
    assert history.done == {"read": RECORD.value}
    assert await read_value(gateway, partition) == TEXT


async def test_a_stale_worker_leaves_no_chunk(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await take_over(gateway, delivery)
    before = await dump(gateway, Namespace(partition.namespace))
    for entry in (ENTRIES[0], Entry(Kind.RESULT_CHUNK, "0", CHUNKS[0])):
        with pytest.raises(LeaseLost):
            await write_entries(gateway, delivery, "x", [entry], first=1)
    assert await dump(gateway, Namespace(partition.namespace)) == before


async def test_a_record_is_not_stored_where_redis_has_lost_a_chunk(gateway: Gateway, delivery: Delivery) -> None:
    """As after a failover to a replica that lags: the run has stored all three chunks."""
    await write_entries(gateway, delivery, "x", ENTRIES[:2], first=1)
    with pytest.raises(EntriesLost):
        await write_entries(gateway, delivery, "x", [RECORD], first=4)
    assert (await load_history(gateway, delivery, "x")).done == {}


async def test_a_dropped_step_drops_its_chunks_alone(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    other, chunks, _ = cut("other", TEXT, size=len(TEXT))
    others = [Entry(Kind.CHUNK, f"{other.digest}:{number}", chunk) for number, chunk in enumerate(chunks)]
    await add_entries(gateway, delivery, "x", [*ENTRIES, RECORD, *others])
    await add_entries(gateway, delivery, "x", [Entry(Kind.DROP, "read", f"{VALUE.digest} {VALUE.chunks}".encode())])
    names = await gateway.command("HKEYS", partition.steps("x"))
    assert sorted(names) == [f"c:{other.digest}:{number}".encode() for number in range(3)]
    await add_entries(gateway, delivery, "x", [others[0]._replace(value=b"")])
    names = await gateway.command("HKEYS", partition.steps("x"))
    assert sorted(names) == [f"c:{other.digest}:{number}".encode() for number in (1, 2)], "an empty value deletes one"


@pytest.mark.parametrize("act", ["succeed", "bury", "cancelled"])
async def test_chunks_expire_with_the_task(
    gateway: Gateway, partition: Partition, delivery: Delivery, act: str
) -> None:
    await add_entries(gateway, delivery, "x", [*ENTRIES, Entry(Kind.RESULT_CHUNK, "0", CHUNKS[0])])
    await SETTLING[act](gateway, delivery, "x")
    ttls = await lifetimes(gateway, partition, "x")
    assert {"steps", "record"} <= ttls.keys()
    assert all(ttl > 0 for ttl in ttls.values())


async def test_missing_and_changed_chunks_are_noticed(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await add_entries(gateway, delivery, "x", [*ENTRIES, RECORD])
    name = f"c:{VALUE.digest}:1"
    await gateway.command("HSET", partition.steps("x"), name, b"1" * CHUNK_BYTES)
    with pytest.raises(LargeValueLost, match="could not read the value: its chunks were changed"):
        await read_value(gateway, partition)
    await gateway.command("HDEL", partition.steps("x"), name)
    with pytest.raises(LargeValueLost, match="chunk 2 of 3 is missing"):
        await read_value(gateway, partition)

"""Streams of a task: each item is stored once, in order, and lives as long as the record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues import EntriesLost, Gateway, LeaseLost, Namespace, Partition, Producer, State
from perdure.queues.delivery.checkpoint import Entry, Kind, close_exported, load_history, read_mark, write_entries
from perdure.queues.delivery.leases import Delivery
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.sessions.removal import forget_task
from perdure.queues.stream_items import (
    CUT_ALL,
    CUT_UNIT,
    StoredItem,
    decode_item,
    item_place,
    key_digest,
    keyed_place,
    mark_place,
)

from tests.support.consumers import read_one, take_over, worker
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.task_places import dump

LIMIT = 10_000


def item(position: int, stream: str = "output", unit: str = "ask", attempt: int = 1, value: bytes = b"1") -> Entry:
    return Entry(Kind.EMITTED, item_place(stream, LIMIT, unit, attempt, position), value)


def keyed(key: str, value: bytes, limit: int = LIMIT) -> Entry:
    return Entry(Kind.EMITTED, keyed_place("output", limit, key_digest(key)), value)


def mark(unit: str, attempt: int, stream: str = "output") -> Entry:
    return Entry(Kind.CUT_OFF, mark_place(stream, unit, attempt), b"")


async def entries_of(gateway: Gateway, partition: Partition, stream: str = "output") -> list[StoredItem]:
    found = await gateway.command("XRANGE", partition.stream("x", stream), "-", "+")
    return [decode_item(entry, fields) for entry, fields in found]


async def values_of(gateway: Gateway, partition: Partition, stream: str = "output") -> list[tuple[int, bytes]]:
    return [(found.number, found.data) for found in await entries_of(gateway, partition, stream)]


# writing


async def test_items_have_numbers_without_gaps(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await add_entries(gateway, delivery, "x", [item(1, value=b"1"), item(1, "tokens", value=b"2"), item(2, value=b"3")])
    await add_entries(gateway, delivery, "x", [item(3, value=b"4"), mark("ask", 1), item(1, attempt=2, value=b"5")])
    found = await entries_of(gateway, partition)
    assert [(one.number, one.unit, one.attempt, one.position, one.data, one.cut) for one in found] == [
        (1, "ask", 1, 1, b"1", b""),
        (2, "ask", 1, 2, b"3", b""),
        (3, "ask", 1, 3, b"4", b""),
        (4, "ask", 1, 0, b"", CUT_UNIT),
        (5, "ask", 2, 1, b"5", b""),
    ]
    now, _ = await gateway.command("TIME")
    assert all(abs(one.at - int(now) * 1000) < 3_600_000 for one in found)
    assert await values_of(gateway, partition, "tokens") == [(1, b"2")]
    history = await load_history(gateway, await take_over(gateway, delivery), "x")
    assert history.streams == ["output", "tokens"]


@pytest.mark.parametrize("unit", ["", "page-3/", "two words", "größe", "line\nbreak", "a/b#2", "#plan", " "])
async def test_units_of_all_kinds(gateway: Gateway, partition: Partition, delivery: Delivery, unit: str) -> None:
    await add_entries(gateway, delivery, "x", [item(1, unit=unit), mark(unit, 7)])
    first, second = await entries_of(gateway, partition)
    assert (first.unit, second.unit, second.attempt) == (unit, unit, 7)


async def test_an_item_is_stored_once(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    """As after a lost reply, and after a reply that comes late."""
    some = [item(1, value=b"1"), item(2, value=b"2"), keyed("a", b"3"), mark("ask", 1)]
    for count in (2, 4, 4, 1):
        await write_entries(gateway, delivery, "x", some[:count], first=1)
    assert [number for number, _ in await values_of(gateway, partition)] == [1, 2, 3, 4]


async def test_a_former_delivery_emits_nothing(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await add_entries(gateway, delivery, "x", [item(1)])
    await take_over(gateway, delivery)
    with pytest.raises(LeaseLost):
        await write_entries(gateway, delivery, "x", [item(2)], first=2)
    assert [number for number, _ in await values_of(gateway, partition)] == [1]


async def test_an_item_whose_former_entries_are_lost_is_refused(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    with pytest.raises(EntriesLost):
        await write_entries(gateway, delivery, "x", [item(2)], first=2)
    assert await values_of(gateway, partition) == []


async def test_a_keyed_item_is_stored_once_in_all_runs(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await add_entries(gateway, delivery, "x", [keyed("a", b"1"), keyed("a", b"2"), keyed("b", b"3")])
    again = await take_over(gateway, delivery)
    await add_entries(gateway, again, "x", [keyed("b", b"4"), keyed("c", b"5")])
    assert await values_of(gateway, partition) == [(1, b"1"), (2, b"3"), (3, b"5")]


async def test_a_stream_keeps_as_many_items_and_keys_as_the_entry_says(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    for start in range(0, 1000, 250):
        some = [keyed(f"{number}", b"%d" % number, limit=100) for number in range(start, start + 250)]
        await add_entries(gateway, delivery, "x", some)
    found = await values_of(gateway, partition)
    assert found[-1] == (1000, b"999")
    assert 100 <= len(found) <= 300
    assert await gateway.command("ZCARD", partition.stream_keys("x", "output")) == 100
    await add_entries(gateway, delivery, "x", [keyed("999", b"again"), keyed("0", b"again")])
    assert (await values_of(gateway, partition))[-1] == (1001, b"again")


async def test_notes_are_read_with_the_history(gateway: Gateway, delivery: Delivery) -> None:
    notes = [Entry(Kind.EMITTING, unit, b"[1]") for unit in ("ask", "other")]
    await add_entries(gateway, delivery, "x", [*notes, Entry(Kind.DONE, "ask", b"1"), Entry(Kind.EMITTING, "ask", b"")])
    assert (await load_history(gateway, delivery, "x")).emitted == {"other": b"[1]"}


async def test_what_an_expired_task_of_the_id_left_is_continued(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """Its record is gone before the stream, as when another program has deleted that: numbers are not given twice."""
    stream = partition.stream("x", "output")
    await gateway.command("XADD", stream, "7-0", "t", "1", "u", "", "y", "0", "n", "1", "d", "1")
    await gateway.command("PEXPIRE", stream, 60_000)
    await add_entries(gateway, delivery, "x", [item(1, value=b"2")])
    assert await values_of(gateway, partition) == [(7, b"1"), (8, b"2")]
    assert await gateway.command("PTTL", stream) == -1
    await SETTLING["succeed"](gateway, delivery, "x")


# what another program did to a stream


async def test_an_id_that_none_can_follow(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await add_entries(gateway, delivery, "x", [item(1)])
    await gateway.command("XADD", partition.stream("x", "output"), f"{2**64 - 1}-{2**64 - 1}", "a", "b")
    await add_entries(gateway, delivery, "x", [item(2, value=b"2"), item(3, value=b"3")])
    assert await values_of(gateway, partition) == [(1, b"2"), (2, b"3")]


async def test_deleted_entries(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await add_entries(gateway, delivery, "x", [item(1), item(2), item(3)])
    await gateway.command("XDEL", partition.stream("x", "output"), "3-0", "2-0")
    await add_entries(gateway, delivery, "x", [item(4, value=b"4")])
    assert await values_of(gateway, partition) == [(1, b"1"), (4, b"4")]
    await gateway.command("XTRIM", partition.stream("x", "output"), "MAXLEN", 0)
    await add_entries(gateway, delivery, "x", [item(5, value=b"5")])
    assert await values_of(gateway, partition) == [(5, b"5")]


# the ends of a task


async def _enqueued(producer: Producer, gateway: Gateway, partition: Partition) -> Delivery:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await add_entries(gateway, delivery, "x", [item(1), item(1, "tokens"), keyed("a", b"2")])
    return delivery


def _keys(partition: Partition) -> list[str]:
    return [partition.stream("x", "output"), partition.stream("x", "tokens"), partition.stream_keys("x", "output")]


async def _ttls(gateway: Gateway, partition: Partition) -> set[str]:
    """Return what the keys of the streams have: `none`, `kept`, or `like the record`."""
    record = await gateway.command("PTTL", partition.record("x"))
    found = [await gateway.command("PTTL", key) for key in _keys(partition)]
    near = range(max(0, record - 5000), record + 100)  # the record got its TTL first
    return {
        {-2: "none", -1: "kept"}.get(ttl, "like the record" if ttl in near else f"{ttl}, not {record}") for ttl in found
    }


@pytest.mark.parametrize("act", ["succeed", "cancelled", "bury"])
async def test_an_ended_task(gateway: Gateway, partition: Partition, producer: Producer, act: str) -> None:
    delivery = await _enqueued(producer, gateway, partition)
    assert await _ttls(gateway, partition) == {"kept"}
    await SETTLING[act](gateway, delivery, "x")
    assert await _ttls(gateway, partition) == {"like the record"}


@pytest.mark.parametrize("act", ["park", "reschedule", "release"])
async def test_a_task_that_continues_later(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    await SETTLING[act](gateway, await _enqueued(producer, gateway, partition), "x")
    assert await _ttls(gateway, partition) == {"kept"}
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.cancel() is State.CANCELLED
    assert await _ttls(gateway, partition) == {"like the record"}


async def _replay(gateway: Gateway, partition: Partition, *, fresh: bool) -> None:
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert await replay(gateway, letter, Replay(fresh=fresh))


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_replayed_task(gateway: Gateway, partition: Partition, producer: Producer, fresh: bool) -> None:
    await SETTLING["bury"](gateway, await _enqueued(producer, gateway, partition), "x")
    await _replay(gateway, partition, fresh=fresh)
    assert await _ttls(gateway, partition) == {"kept"}
    for stream, number in (("output", 3), ("tokens", 2)):
        *_, last = await entries_of(gateway, partition, stream)
        assert (last.number, last.cut) == ((number, CUT_ALL) if fresh else (number - 1, b""))
    delivery = await read_one(await worker(gateway, partition))
    await add_entries(gateway, delivery, "x", [item(1, value=b"new"), keyed("a", b"again")])
    assert (await values_of(gateway, partition))[-1] == (3 + fresh, b"new")


async def _purge(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await SETTLING["bury"](gateway, await _enqueued(producer, gateway, partition), "x")
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert await purge(gateway, letter)


async def _forget(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await _enqueued(producer, gateway, partition)
    await forget_task(gateway, partition, "x")


async def _enqueue_again(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await SETTLING["succeed"](gateway, await _enqueued(producer, gateway, partition), "x")
    await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")


@pytest.mark.parametrize("act", [_purge, _forget, _enqueue_again])
async def test_a_deleted_task(
    gateway: Gateway,
    partition: Partition,
    producer: Producer,
    act: Callable[[Gateway, Partition, Producer], Awaitable[None]],
) -> None:
    await act(gateway, partition, producer)
    assert await _ttls(gateway, partition) == {"none"}


@pytest.mark.parametrize("dead", [False, True])
async def test_an_exported_task(gateway: Gateway, partition: Partition, producer: Producer, dead: bool) -> None:
    await SETTLING["bury" if dead else "park"](gateway, await _enqueued(producer, gateway, partition), "x")
    at = await read_mark(gateway, partition, "x")
    assert await close_exported(gateway, partition, "x", at, event=b"{}", retention=60)
    assert await _ttls(gateway, partition) == {"like the record"}


@pytest.mark.parametrize("queue", ["record", "stream"])
async def test_names_that_look_like_kinds_of_keys(gateway: Gateway, queue: str, namespace: Namespace) -> None:
    place = namespace.partition(queue)
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        await producer.enqueue("t", task_id="x", queue=queue)
        await SETTLING["succeed"](gateway, await _read_emitted(gateway, place), "x")
    assert await _ttls(gateway, place) == {"like the record"}


async def _read_emitted(gateway: Gateway, partition: Partition) -> Delivery:
    delivery = await read_one(await worker(gateway, partition))
    await add_entries(gateway, delivery, "x", [item(1), item(1, "tokens"), keyed("a", b"2")])
    return delivery


async def test_a_refused_end_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    delivery = await _enqueued(producer, gateway, partition)
    again = await take_over(gateway, delivery)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await SETTLING["succeed"](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before
    await SETTLING["succeed"](gateway, again, "x")

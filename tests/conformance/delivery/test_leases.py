"""Leases: the table of a worker's deliveries, and the heartbeat that renews them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from perdure.queues import Address, Gateway, Namespace, Partition, Producer, QueueError
from perdure.queues.delivery import heartbeat
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.delivery.leases import NOT_STARTED, Delivery, Leases, RunStatus
from perdure.queues.keys import GROUP

from tests.support.consumers import (
    LONG_AGO,
    Held,
    age,
    claim_all,
    claim_one,
    needs_server,
    pending,
    read,
    read_one,
    take_over,
    worker,
)
from tests.support.delivery_calls import SETTLING, beat
from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.task_places import dump

BOUND = 30.0
LEASE = 0.3


def delivery_of(partition: Partition, entry: bytes = b"1-1", count: int = 1) -> Delivery:
    return Delivery(partition, entry, "a", count, {})


def hold(
    leases: Leases, delivery: Delivery, task_id: str, lost: Callable[[], None], cancel: Callable[[], None] | None = None
) -> Held:
    held = Held(delivery, task_id, lost, cancel)
    leases.hold(held)
    return held


class Heard:
    """A signal from another thread, awaited here."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.times = 0

    def __call__(self, *_: object) -> None:
        self.times += 1
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await asyncio.wait_for(self._event.wait(), BOUND)


# the table


def test_a_fence_is_group_worker_entry_and_count(partition: Partition) -> None:
    assert Delivery(partition, b"5-0", "a", 3, {}).fence == (GROUP, "a", b"5-0", 3)


def test_a_lease_is_in_the_table_until_it_is_dropped(partition: Partition, namespace: Namespace) -> None:
    leases, other = Leases(), namespace.partition("other")
    first, second = delivery_of(partition), delivery_of(other)
    held = [hold(leases, one, "x", lambda: None) for one in (first, second)]
    assert len(leases) == 2
    assert leases.holds(partition, b"1-1")
    assert leases.holds(other, b"1-1")
    assert not leases.holds(partition, b"1-2")
    assert {key: [one.delivery for one in held] for key, held in leases.by_partition().items()} == {
        partition: [first],
        other: [second],
    }
    leases.drop(held[0])
    assert not leases.holds(partition, b"1-1")
    assert leases.holds(other, b"1-1")


def test_an_old_delivery_does_not_drop_a_newer_one_of_its_message(partition: Partition) -> None:
    """The worker lost the message and claimed it again before the first run ended."""
    leases = Leases()
    old, new = delivery_of(partition), delivery_of(partition, count=2)
    former, present = hold(leases, old, "x", lambda: None), hold(leases, new, "x", lambda: None)
    leases.drop(former)
    assert leases.holds(partition, b"1-1")
    leases.drop(present)
    assert len(leases) == 0


def test_a_run_that_a_newer_delivery_replaces_keeps_its_fence(partition: Partition) -> None:
    """It may still write: Redis must not hand out the message under its fence again."""
    leases, other = Leases(), delivery_of(partition, count=4)
    old, new = delivery_of(partition, count=2), delivery_of(partition, count=3)
    hold(leases, old, "x", lambda: None)
    hold(leases, new, "x", lambda: None)
    assert [leases.had_fence(one) for one in (old, new, other)] == [True, True, False]


def test_a_claimed_delivery_keeps_its_fence_after_its_run(partition: Partition) -> None:
    """Redis may lose the outcome that it confirmed, and let the worker claim the message again."""
    leases = Leases()
    claimed, released = delivery_of(partition, count=2), delivery_of(partition, count=3)
    leases.drop(hold(leases, claimed, "x", lambda: None))
    assert [leases.had_fence(one) for one in (claimed, released)] == [True, False]


def test_messages_that_were_read_before_are_known(partition: Partition, namespace: Namespace) -> None:
    """Ids are compared as numbers, in each partition for itself."""
    leases, other = Leases(), namespace.partition("other")
    assert [leases.note_read(partition, entry) for entry in (b"9-1", b"9-2", b"9-10", b"10-0")] == [False] * 4
    assert [leases.note_read(partition, entry) for entry in (b"10-0", b"9-10", b"1-1", b"10-1")] == [
        *(True, True, True, False)
    ]
    assert not leases.note_read(other, b"0-1")
    assert leases.had_fence(Delivery(partition, b"10-0", "a", 1, {}, repeated=True))
    assert not leases.had_fence(delivery_of(partition, b"10-2"))


def test_a_delivery_that_was_claimed_or_ran_before_has_history(partition: Partition) -> None:
    assert not Delivery(partition, b"1-1", "a", 1, {b"env": b""}).has_history
    assert Delivery(partition, b"1-1", "a", 1, {b"env": b""}, claimed=True).has_history
    assert Delivery(partition, b"1-1", "a", 1, {b"again": b"1"}).has_history


# the script


async def renew(gateway: Gateway, *held: tuple[Delivery, str]) -> list[list[int]]:
    return await beat(gateway, *((delivery, task_id, NOT_STARTED) for delivery, task_id in held))


async def test_a_heartbeat_renews_the_lease_and_nothing_else(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await age(gateway, delivery)
    before = await dump(gateway, namespace)
    assert await renew(gateway, (delivery, "x")) == [[], []]
    assert await dump(gateway, namespace) == before
    assert (await pending(gateway, partition))[0][2] < LONG_AGO / 2
    assert await claim_all(await worker(gateway, partition, name="b")) == []


async def test_a_heartbeat_reports_lost_leases_and_takes_none_back(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 6, queue="default")
    mine, claimed, mine_anew, settled, passed_on, released = await read(await worker(gateway, partition), 6)
    await take_over(gateway, claimed)
    await take_over(gateway, mine_anew, "a")
    await SETTLING["succeed"](gateway, settled, "s")
    await SETTLING["give_back"](gateway, passed_on, "p")
    assert (await claim_one(await worker(gateway, partition, name="b"))).count == passed_on.count + 1
    await SETTLING["give_back"](gateway, released, "r")
    before = await dump(gateway, namespace)
    held = [(one, "x") for one in (mine, claimed, mine_anew, settled, passed_on, released)]
    assert await renew(gateway, *held) == [[1, 2, 3, 4, 5], []]
    assert await dump(gateway, namespace) == before


async def test_a_heartbeat_returns_requests_to_cancel(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = [await producer.enqueue("t", task_id=name, queue="default") for name in ("x", "y", "z")]
    deliveries = await read(await worker(gateway, partition), 3)
    await handles[1].cancel()
    await take_over(gateway, deliveries[2])
    await handles[2].cancel()
    held = zip(deliveries, ("x", "y", "z"), strict=True)
    assert await renew(gateway, *held) == [[2], [1]]


async def test_a_heartbeat_says_since_when_a_task_runs_and_in_which_step(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await beat(gateway, (delivery, "x", RunStatus(9.0, "download", 2.0)))
    record = await handle.record()
    assert record.started_at is not None
    assert record.alive_at is not None
    assert record.step_at is not None
    assert (record.step, record.holder) == ("download", "a")
    assert record.alive_at - record.started_at == 9_000
    assert record.alive_at - record.step_at == 2_000
    await beat(gateway, (delivery, "x", RunStatus(14.0)))
    later = await handle.record()
    assert (later.step, later.step_at) == (None, None)


async def test_the_step_of_a_lost_lease_is_not_that_of_the_next_run(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await beat(gateway, (delivery, "x", RunStatus(9.0, "download", 2.0)))
    await take_over(gateway, delivery)
    await beat(gateway, (delivery, "x", RunStatus(14.0, "upload", 2.0)))
    record = await handle.record()
    assert (record.step, record.started_at, record.alive_at) == (None, None, None)


@pytest.mark.parametrize("act", ["succeed", "reschedule", "park", "release", "bury"])
async def test_a_run_that_ended_is_in_no_step(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await beat(gateway, (delivery, "x", RunStatus(9.0, "download", 2.0)))
    await SETTLING[act](gateway, delivery, "x")
    record = await handle.record()
    assert (record.step, record.step_at, record.started_at, record.alive_at) == (None, None, None, None)


async def test_a_heartbeat_stores_nothing_for_a_record_that_is_gone(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await gateway.command("DEL", partition.record("x"))
    assert await beat(gateway, (delivery, "x", RunStatus(9.0, "download", 2.0))) == [[], []]
    assert await gateway.command("EXISTS", partition.record("x")) == 0


# the thread


@pytest.fixture
def beats() -> Iterator[list[LeaseHeartbeat]]:
    started: list[LeaseHeartbeat] = []
    yield started
    for one in started:
        one.stop()


def begin(
    beats: list[LeaseHeartbeat],
    gateway: Gateway,
    leases: Leases,
    on_trouble: Callable[[QueueError | None], None] = lambda error: None,
    address: Address | None = None,
) -> LeaseHeartbeat:
    beat = LeaseHeartbeat(address or gateway.address, lambda: None, "a", leases, LEASE, on_trouble)
    beats.append(beat)
    beat.start()
    return beat


async def test_heartbeats_keep_leases_and_report_lost_ones(
    gateway: Gateway, partition: Partition, producer: Producer, beats: list[LeaseHeartbeat]
) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    mine, stolen = await read(await worker(gateway, partition), 2)
    await take_over(gateway, stolen)
    await age(gateway, mine)
    leases, lost, kept = Leases(), Heard(), Heard()
    hold(leases, mine, "x", kept)
    hold(leases, stolen, "y", lost)
    begin(beats, gateway, leases)
    await lost.wait()
    assert kept.times == 0
    assert {entry: idle < LONG_AGO / 2 for entry, _, idle, _ in await pending(gateway, partition)}[mine.entry]


async def test_an_error_at_any_place_delays_the_heartbeats_only(
    gateway: Gateway,
    partition: Partition,
    producer: Producer,
    beats: list[LeaseHeartbeat],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    await producer.enqueue_many("t", [{}] * 3, queue="default")
    broken, mine, stolen = await read(await worker(gateway, partition), 3)
    await take_over(gateway, stolen)
    await age(gateway, mine)
    leases, lost = Leases(), Heard()
    troubles: list[QueueError | None] = []

    def fail() -> None:
        raise RuntimeError("an error of the run")

    hold(leases, broken, "z", fail)
    await take_over(gateway, broken)
    hold(leases, mine, "x", lambda: None)
    hold(leases, stolen, "y", lost)
    open_really = heartbeat._open_connection
    errors = [OSError("no file"), ValueError("no address")]

    def open_connection(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return open_really(*args)

    monkeypatch.setattr(heartbeat, "_open_connection", open_connection)
    beat = begin(beats, gateway, leases, troubles.append)
    await lost.wait()
    assert {entry: idle < LONG_AGO / 2 for entry, _, idle, _ in await pending(gateway, partition)}[mine.entry]
    assert [str(trouble) for trouble in troubles[:2]] == ["ValueError: no address", "OSError: no file"]
    assert not beat.ended


async def test_heartbeats_continue_while_the_event_loop_is_blocked(
    gateway: Gateway, partition: Partition, producer: Producer, beats: list[LeaseHeartbeat]
) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    mine, stolen = await read(await worker(gateway, partition), 2)
    await take_over(gateway, stolen)
    await age(gateway, mine)
    leases, lost = Leases(), threading.Event()
    hold(leases, mine, "x", lambda: None)
    hold(leases, stolen, "y", lost.set)
    begin(beats, gateway, leases)
    assert lost.wait(BOUND), "no beat while the loop was blocked"
    assert {entry: idle < LONG_AGO / 2 for entry, _, idle, _ in await pending(gateway, partition)}[mine.entry]


async def test_a_delivery_settled_during_the_heartbeat_is_not_lost(
    gateway: Gateway, partition: Partition, producer: Producer, beats: list[LeaseHeartbeat]
) -> None:
    """The table was read, the delivery was settled and dropped, and the heartbeat reached Redis afterwards."""
    needs_server(gateway, "the beat has a connection of its own")
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    first, second = await read(await worker(gateway, partition), 2)
    await SETTLING["succeed"](gateway, first, "x")
    await take_over(gateway, second)

    class JustSettled(Leases):
        def holds(self, partition: Partition, entry: bytes) -> bool:
            return entry != first.entry and super().holds(partition, entry)

    leases, wrongly, rightly = JustSettled(), Heard(), Heard()
    hold(leases, first, "x", wrongly)
    hold(leases, second, "y", rightly)
    begin(beats, gateway, leases)
    await rightly.wait()
    assert wrongly.times == 0


async def test_a_heartbeat_delivers_a_request_to_cancel_to_the_run(
    gateway: Gateway, partition: Partition, producer: Producer, beats: list[LeaseHeartbeat]
) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    handle = await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    leases, cancel, lost = Leases(), Heard(), Heard()
    hold(leases, delivery, "x", lost, cancel)
    begin(beats, gateway, leases)
    await handle.cancel()
    await cancel.wait()
    assert lost.times == 0


async def test_more_leases_than_fit_one_call_are_renewed(
    gateway: Gateway, partition: Partition, producer: Producer, beats: list[LeaseHeartbeat]
) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    handles = await producer.enqueue_many("t", [{}] * 1_001, queue="default")
    deliveries = await read(await worker(gateway, partition), 1_001)
    await take_over(gateway, deliveries[0])
    await take_over(gateway, deliveries[-1])
    leases, first, last = Leases(), Heard(), Heard()
    other = Heard()
    for delivery, handle in zip(deliveries, handles, strict=True):
        heard = {deliveries[0].entry: first, deliveries[-1].entry: last}.get(delivery.entry, other)
        hold(leases, delivery, handle.id, heard)
    begin(beats, gateway, leases)
    await first.wait()
    await last.wait()
    assert other.times == 0


async def test_a_script_that_the_server_lost_is_sent_again(
    gateway: Gateway, partition: Partition, producer: Producer, beats: list[LeaseHeartbeat]
) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    await producer.enqueue("t", queue="default")
    stolen = await read_one(await worker(gateway, partition))
    await take_over(gateway, stolen)
    await gateway.command("SCRIPT", "FLUSH")
    leases, lost, trouble = Leases(), Heard(), Heard()
    hold(leases, stolen, "x", lost)
    begin(beats, gateway, leases, trouble)
    await lost.wait()
    assert trouble.times == 0


async def test_an_error_and_its_end_are_reported(partition: Partition, beats: list[LeaseHeartbeat]) -> None:
    program = find_program(BUNDLED)
    if program is None:
        pytest.skip("no bundled redis-server here")
    server = RedisServer(program).start()
    gateway = Gateway(Address(server.url))
    try:
        await gateway.open()
        async with Producer(namespace=partition.namespace, gateway=gateway) as producer:
            await producer.enqueue("t", queue="default")
            delivery = await read_one(await worker(gateway, partition))
        leases, away, back, lost = Leases(), Heard(), Heard(), Heard()
        hold(leases, delivery, "x", lost)
        troubles: list[QueueError | None] = []

        def on_trouble(error: QueueError | None) -> None:
            troubles.append(error)
            (away if error else back)()

        beat = begin(beats, gateway, leases, on_trouble)
        server.kill()
        await away.wait()
        server.start()
        await back.wait()
        await lost.wait()  # the server restarted empty: nothing is pending, so the lease is gone
        beat.stop()
        assert isinstance(troubles[0], QueueError)
        assert troubles.count(None) == 1
    finally:
        await gateway.close()
        server.stop()


async def test_heartbeats_end_on_stop(gateway: Gateway, beats: list[LeaseHeartbeat]) -> None:
    needs_server(gateway, "the beat has a connection of its own")
    beat = begin(beats, gateway, Leases())
    beat.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "perdure heartbeat"]

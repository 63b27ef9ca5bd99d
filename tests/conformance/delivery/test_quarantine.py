"""Crashes in Redis: a dead worker's deliveries are claimable at once, progress excuses them, suspects run alone."""

from __future__ import annotations

import pytest
from perdure.deadletter.burial import bury
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import (
    EntriesLost,
    Gateway,
    LeaseLost,
    Namespace,
    Partition,
    Producer,
    State,
    list_queues,
    set_partitions,
)
from perdure.queues.delivery import quarantine_store
from perdure.queues.delivery.checkpoint import Entry, History, Kind, load_history, write_entries
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.quarantine_store import (
    CRASH_WINDOW_MS,
    clear_quarantined,
    quarantine,
    report_crash,
    take_quarantined,
)
from perdure.queues.delivery.settlement import Counters, release, reschedule, succeed
from perdure.queues.event_log import read_events
from perdure.queues.keys import GROUP, SUSPECTS

from tests.support.consumers import (
    LONG_AGO,
    claim_all,
    claim_one,
    consumers,
    ids,
    pending,
    read,
    read_one,
    take_over,
    worker,
)
from tests.support.delivery_calls import EVIDENCE, add_entries


async def take(gateway: Gateway, partition: Partition, name: str = "b") -> Delivery:
    """Take the next suspect; there must be one."""
    found = await take_quarantined(gateway, partition, name)
    assert found.delivery is not None
    return found.delivery


async def types(gateway: Gateway, partition: Partition, task_id: str) -> list[str]:
    return [event.type for event in await read_events(gateway, partition, task_id)]


# setting aside


async def test_setting_aside_reserves_deliveries_and_counts_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await quarantine(gateway, delivery, handle.id)
    assert [(owner, count) for _, owner, _, count in await pending(gateway, partition)] == [(SUSPECTS, 1)]
    assert (await handle.record()).state is State.QUEUED
    (queue,) = await list_queues(gateway, namespace)
    assert (queue.depth, queue.in_flight) == (1, 0)
    assert queue.oldest_age is not None
    taken = await take(gateway, partition)
    assert (taken.worker, taken.count, taken.fields) == ("b", 2, delivery.fields)
    assert (await load_history(gateway, taken, handle.id)).counters == Counters()


async def test_setting_aside_twice_equals_once(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    """The reply was lost, and the worker repeats the call."""
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await quarantine(gateway, delivery, "x")
    await quarantine(gateway, delivery, "x")
    assert (await load_history(gateway, await take(gateway, partition), "x")).lost == 0
    with pytest.raises(LeaseLost):
        await quarantine(gateway, delivery, "x")


async def test_another_workers_delivery_is_not_set_aside(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await take_over(gateway, delivery, "thief")
    with pytest.raises(LeaseLost):
        await quarantine(gateway, delivery, "x")
    assert [owner for _, owner, _, _ in await pending(gateway, partition)] == ["thief"]


async def test_setting_aside_wakes_a_worker(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    a, b = await worker(gateway, partition), await worker(gateway, partition, name="b")
    await quarantine(gateway, await read_one(a), "x")
    heard = await b.read(5, block=None)
    assert (heard.quarantined, heard.claimable, heard.deliveries) == (True, False, [])


async def test_a_suspect_that_is_not_taken_is_claimed_after_a_lease(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    await quarantine(gateway, delivery, "x")
    patient = await worker(gateway, partition, name="b")
    assert await claim_all(patient) == []
    idle = ("XCLAIM", partition.ready, GROUP, SUSPECTS, 0, delivery.entry, "IDLE", LONG_AGO, "RETRYCOUNT", 0, "JUSTID")
    await gateway.command(*idle)
    claimed = await claim_one(patient)
    assert (claimed.entry, claimed.count) == (delivery.entry, 1)


async def test_a_waiting_suspect_can_be_cancelled(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handle = await producer.enqueue("t", queue="default")
    await quarantine(gateway, await read_one(await worker(gateway, partition)), handle.id)
    assert await handle.cancel() is State.CANCELLED
    assert await take_quarantined(gateway, partition, "b") == (None, False)


async def test_the_consumer_of_suspects_is_never_removed(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    a = await worker(gateway, partition)
    await quarantine(gateway, await read_one(a), "x")
    await take(gateway, partition)
    await a.remove_idle_consumers(partition, -1.0, present=["a", "b"])
    assert SUSPECTS in await consumers(gateway, partition.ready)


# taking


async def test_suspects_are_taken_one_by_one_in_order(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    for delivery, handle in zip(await read(await worker(gateway, partition), 3), handles, strict=True):
        await quarantine(gateway, delivery, handle.id)
    found = [await take_quarantined(gateway, partition, name) for name in ("b", "c", "d", "e")]
    assert ids([one.delivery for one in found if one.delivery]) == [handle.id for handle in handles]
    assert [one.more for one in found] == [True, True, False, False]


async def test_a_suspect_whose_reply_was_lost_is_adopted(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    await quarantine(gateway, await read_one(await worker(gateway, partition)), handle.id)
    await take(gateway, partition, "b")  # and the worker never receives it
    (adopted,) = await (await worker(gateway, partition, name="b")).recover_own(partition)
    assert (adopted.worker, (await load_history(gateway, adopted, handle.id)).counters.crashes) == ("b", 0)


async def test_a_suspect_whose_message_was_deleted_is_dropped(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 2, queue="default")
    gone, kept = await read(await worker(gateway, partition), 2)
    for delivery, handle in zip((gone, kept), handles, strict=True):
        await quarantine(gateway, delivery, handle.id)
    await gateway.command("XDEL", partition.ready, gone.entry)
    assert await take_quarantined(gateway, partition, "b") == (None, True)
    assert (await take(gateway, partition)).entry == kept.entry
    assert len(await pending(gateway, partition)) == 1


async def test_an_unknown_queue_has_no_suspect(gateway: Gateway, partition: Partition) -> None:
    assert await take_quarantined(gateway, partition, "b") == (None, False)


# crash reports


async def test_a_report_makes_each_delivery_claimable_and_counts_a_crash(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    await read(await worker(gateway, partition, name="dead"), 3)
    found = await report_crash(
        gateway, namespace, ["default"], "dead", exit_status="SIGKILL", steps={handles[1].id: "parse"}
    )
    assert found.deliveries == 3
    heir = await worker(gateway, partition, name="b")
    heard = await heir.read(5, block=None)
    assert (heard.claimable, heard.quarantined) == (True, False)
    for number, (taken, handle) in enumerate(zip(await claim_all(heir), handles, strict=True)):
        history = await load_history(gateway, taken, handle.id)
        assert (taken.count, history.quarantined, history.lost) == (2, False, 1)
        assert (history.crashes_in_a_row, history.crashes_in_window, history.counters.crashes) == (1, 1, 1)
        step = {"step": "parse"} if number == 1 else {}
        assert history.crash == {"how": "SIGKILL", "worker": "dead"} | step
        assert await types(gateway, partition, handle.id) == ["crashed"]


async def test_a_report_covers_all_partitions_of_one_worker(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    first = await producer.enqueue("t", queue="default")
    await read_one(await worker(gateway, partition, name="dead"))
    await set_partitions(gateway, namespace, "default", 2)
    async with Producer(namespace=namespace.name, gateway=gateway) as later:
        second, third = (
            await later.enqueue("t", key="k", queue="default"),
            await later.enqueue("t", key="k", queue="default"),
        )
    place = second.partition
    assert place != partition
    await read_one(await worker(gateway, place, name="dead"))
    await read_one(await worker(gateway, place, name="other"))
    found = await report_crash(gateway, namespace, ["default"], "dead", exit_status="SIGKILL", steps={})
    assert found.deliveries == 2
    for where, handle in ((partition, first), (place, second)):
        delivery = await claim_one(await worker(gateway, where, name="b"))
        assert (await load_history(gateway, delivery, handle.id)).crashes_in_a_row == 1
    assert [owner for _, owner, _, _ in await pending(gateway, third.partition)] == ["b", "other"]
    assert "dead" not in await consumers(gateway, partition.ready)


async def test_a_repeated_report_finds_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await read_one(await worker(gateway, partition, name="dead"))
    assert (
        await report_crash(gateway, namespace, ["default"], "dead", exit_status="SIGKILL", steps={})
    ).deliveries == 1
    assert (
        await report_crash(gateway, namespace, ["default"], "dead", exit_status="SIGKILL", steps={})
    ).deliveries == 0
    assert await types(gateway, partition, "x") == ["crashed"]


async def test_a_report_leaves_a_delivery_that_was_just_settled(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, partition, name="dead"))
    await succeed(gateway, delivery, handle.id, b"1", Counters(1), ran=0.0, ttl=60.0)
    assert (
        await report_crash(gateway, namespace, ["default"], "dead", exit_status="SIGKILL", steps={})
    ).deliveries == 0
    assert (await handle.record()).state is State.SUCCEEDED


async def test_a_report_leaves_a_delivery_that_another_worker_took(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """The dead worker had released it before it died."""
    handle = await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, partition, name="dead"))
    held = await quarantine_store._held_by(gateway, namespace, ["default"], "dead")
    await release(gateway, delivery, handle.id, data={})
    await claim_one(await worker(gateway, partition, name="b"))
    await quarantine_store._report(gateway, partition, "dead", held[partition], "SIGKILL", {})
    assert [owner for _, owner, _, _ in await pending(gateway, partition)] == ["b"]


async def test_an_unreadable_message_is_released_and_leaves_no_record(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    a = await worker(gateway, partition, name="dead")
    entry = await gateway.command("XADD", partition.ready, "*", "env", b"\xff")
    await read_one(a)
    await report_crash(gateway, namespace, ["default"], "dead", exit_status="SIGKILL", steps={})
    assert (await claim_one(await worker(gateway, partition, name="b"))).entry == entry
    assert await gateway.command("EXISTS", partition.record(f"entry-{entry.decode()}")) == 0


async def test_an_unused_queue_has_nothing_to_report(gateway: Gateway, namespace: Namespace) -> None:
    assert (await report_crash(gateway, namespace, ["never"], "dead", exit_status="SIGKILL", steps={})).deliveries == 0


# clearing


def excuse_of(history: History) -> Entry:
    """Return the entry that excuses the crashes of a task, which has some."""
    excuse = history.excuse()
    assert excuse is not None
    return excuse


async def test_progress_excuses_crashes(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    third = await take_over(gateway, await take_over(gateway, await read_one(await worker(gateway, partition))), "c")
    history = await load_history(gateway, third, "x")
    assert (history.crashes_in_a_row, history.counters.crashes) == (2, 2)
    entries = [Entry(Kind.DONE, "s", b"1"), excuse_of(history)]
    for _ in range(2):
        await write_entries(gateway, third, "x", entries, first=1)
    excused = await load_history(gateway, third, "x")
    assert (excused.crashes_in_a_row, excused.crashes_in_window, excused.counters.crashes) == (0, 2, 2)
    assert excused.excuse() is None
    assert await types(gateway, partition, "x") == ["step_completed", "cleared"]


async def test_progress_that_is_stored_already_or_has_a_gap_before_it_excuses_nothing(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    first = await read_one(await worker(gateway, partition))
    saved = Entry(Kind.SAVED, "s", b"1")
    await write_entries(gateway, first, "x", [Entry(Kind.DONE, "s", b"1"), saved, saved], first=1)
    second = await take_over(gateway, first, "b")
    excuse = excuse_of(await load_history(gateway, second, "x"))
    await write_entries(gateway, second, "x", [Entry(Kind.DONE, "s", b"1"), excuse], first=2)
    with pytest.raises(EntriesLost):
        await write_entries(gateway, second, "x", [Entry(Kind.DONE, "s", b"1"), excuse], first=5)
    assert (await load_history(gateway, second, "x")).crashes_in_a_row == 1
    assert await types(gateway, partition, "x") == ["step_completed"]


async def test_a_worker_that_lost_the_lease_excuses_and_clears_nothing(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    third = await take_over(gateway, second := await take_over(gateway, delivery, "b"), "thief")
    history = await load_history(gateway, second, "x")
    with pytest.raises(LeaseLost):
        await clear_quarantined(gateway, second, "x")
    with pytest.raises(LeaseLost):
        await write_entries(gateway, second, "x", [Entry(Kind.DONE, "s", b"1"), excuse_of(history)], first=1)
    assert (await load_history(gateway, third, "x")).crashes_in_a_row == 2


async def test_crashes_after_progress_count_within_the_window_only(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    for number, name in enumerate(("b", "c", "d"), start=1):
        delivery = await take_over(gateway, delivery, name)
        history = await load_history(gateway, delivery, "x")
        assert (history.crashes_in_a_row, history.crashes_in_window) == (1, number)
        await add_entries(gateway, delivery, "x", [excuse_of(history)])
        history = await load_history(gateway, delivery, "x")
        assert (history.crashes_in_a_row, history.crashes_in_window) == (0, number)
    long_ago = int((await gateway.command("HGET", partition.record("x"), "recent_at")).decode()) - CRASH_WINDOW_MS - 1
    await gateway.command("HSET", partition.record("x"), "recent_at", long_ago)
    delivery = await take_over(gateway, delivery, "e")
    history = await load_history(gateway, delivery, "x")
    assert (history.crashes_in_a_row, history.crashes_in_window, history.counters.crashes) == (1, 1, 4)
    await add_entries(gateway, delivery, "x", [excuse_of(history)])
    assert (await load_history(gateway, delivery, "x")).crashes_in_window == 1  # a new window


async def test_a_replay_forgets_crashes(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await take_over(gateway, await read_one(await worker(gateway, partition)), "b")
    await add_entries(gateway, delivery, "x", [excuse_of(await load_history(gateway, delivery, "x"))])
    retried = Counters(1, crashes=1)
    await bury(gateway, delivery, "x", task="t", reason=Reason.TIMEOUT, evidence=EVIDENCE, counters=retried)
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    assert await replay(gateway, letter, Replay())
    history = await load_history(gateway, await read_one(await worker(gateway, partition, name="c")), "x")
    assert (history.crashes_in_a_row, history.crashes_in_window, history.counters.crashes) == (0, 0, 0)


async def test_an_outcome_ends_the_quarantine(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await quarantine(gateway, await read_one(await worker(gateway, partition)), "x")
    taken = await take(gateway, partition)
    assert (await load_history(gateway, taken, "x")).quarantined
    await reschedule(gateway, taken, "x", Counters(1), delay=60, event="attempt_failed", data={})
    assert await gateway.command("HGET", partition.record("x"), "suspect") is None


async def test_a_survivor_is_an_ordinary_task(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await quarantine(gateway, await read_one(await worker(gateway, partition)), "x")
    taken = await take(gateway, partition)
    for _ in range(2):
        await clear_quarantined(gateway, taken, "x")
    assert not (await load_history(gateway, taken, "x")).quarantined


async def test_a_suspect_that_is_released_stays_a_suspect(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await quarantine(gateway, await read_one(await worker(gateway, partition)), "x")
    await release(gateway, await take(gateway, partition), "x", data={})
    again = await claim_one(await worker(gateway, partition, name="c"))
    history = await load_history(gateway, again, "x")
    assert (history.quarantined, history.counters.crashes) == (True, 0)

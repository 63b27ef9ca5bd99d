"""Settlement: a delivery is settled entirely or not at all, only by its owner, and a repeated call equals one call."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from perdure.deadletter.burial import bury
from perdure.deadletter.letters import find_letter
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import EntriesLost, Gateway, LeaseLost, Namespace, Partition, Producer, State
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history, write_entries
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, raise_count, release, reschedule, succeed
from perdure.queues.event_log import read_events
from perdure.queues.keys import RELEASED
from perdure.queues.transport.scripts import pairs, queue_script

from tests.support.consumers import (
    age,
    claim_all,
    claim_one,
    needs_one_server,
    pending,
    promote,
    read,
    read_one,
    take_over,
    worker,
)
from tests.support.delivery_calls import EVIDENCE, FENCED, SETTLING, SETTLING_WITH, add_entries
from tests.support.lossy_proxy import lossy_gateway
from tests.support.task_places import DEAD, DUE, PENDING, all_places, dump, lifetimes, places

WHERE = {
    "succeed": "succeeded",
    "cancelled": "cancelled",
    "reschedule": DUE,
    "park": DUE,
    "release": PENDING,
    "give_back": PENDING,
    "bury": DEAD,
    "bury_unreadable": DEAD,
}


# the lease was lost


@pytest.mark.parametrize("act", FENCED)
async def test_after_another_worker_claimed_it_a_call_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str
) -> None:
    await take_over(gateway, delivery)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before
    assert await places(gateway, partition, "x") == [PENDING]


@pytest.mark.parametrize("act", FENCED)
async def test_after_the_same_worker_claimed_it_again_the_old_delivery_is_refused(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, act: str
) -> None:
    """The worker was frozen, resumed and claimed its own message: the former run is not its owner."""
    again = await take_over(gateway, delivery, delivery.worker)
    assert (again.worker, again.count) == (delivery.worker, 2)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before
    await FENCED[act](gateway, again, "x")


@pytest.mark.parametrize("act", FENCED)
async def test_after_another_worker_settled_it_a_call_is_refused(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, act: str
) -> None:
    await SETTLING["succeed"](gateway, await take_over(gateway, delivery), "x")
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before


@pytest.mark.parametrize(
    "act", [name for name in FENCED if name not in ("release", "give_back")]
)  # leaving releases it
async def test_after_its_worker_left_a_call_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str
) -> None:
    await (await worker(gateway, partition)).leave()
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before


@pytest.mark.parametrize("act", FENCED)
async def test_after_the_message_was_deleted_and_acknowledged_a_call_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str
) -> None:
    await gateway.command("XACK", partition.ready, "workers", delivery.entry)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before


@pytest.mark.parametrize("act", FENCED)
async def test_an_expired_lease_that_was_not_claimed_is_still_owned(
    gateway: Gateway, partition: Partition, delivery: Delivery, act: str
) -> None:
    """No worker claimed it, so no other worker runs it: the late outcome counts."""
    await age(gateway, delivery)
    await FENCED[act](gateway, delivery, "x")
    assert await places(gateway, partition, "x") == [WHERE.get(act, PENDING)]


@pytest.mark.parametrize("act", FENCED)
async def test_a_refusal_names_the_task(gateway: Gateway, delivery: Delivery, act: str) -> None:
    await take_over(gateway, delivery)
    with pytest.raises(LeaseLost, match="refused, the lease has passed") as refused:
        await FENCED[act](gateway, delivery, "x")
    assert refused.value.task_id == "x"


# entries that Redis has lost


@pytest.mark.parametrize("act", ["succeed", "reschedule", "park", "release", "bury"])
async def test_an_outcome_is_refused_if_redis_has_lost_entries_that_it_follows_from(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str
) -> None:
    await write_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[1]")], first=1)
    before = await dump(gateway, namespace)
    with pytest.raises(EntriesLost) as refused:
        await SETTLING_WITH[act](gateway, delivery, "x", 2)
    assert refused.value.last == 1
    assert await dump(gateway, namespace) == before
    await write_entries(gateway, delivery, "x", [Entry(Kind.DONE, "sum", b"1")], first=2)
    await SETTLING_WITH[act](gateway, delivery, "x", 2)
    assert await places(gateway, partition, "x") == [WHERE[act]]


# repeated calls


@pytest.mark.parametrize("act", SETTLING)
async def test_a_repeated_call_returns_the_same_and_changes_nothing(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, act: str
) -> None:
    await SETTLING[act](gateway, delivery, "x")
    before = await dump(gateway, namespace)
    await SETTLING[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before


@pytest.mark.parametrize("act", SETTLING)
async def test_a_lost_reply_settles_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        line.lose(b"EVALSHA")
        await SETTLING[act](lossy, delivery, "x")
        assert line.lost == 1
    assert await places(gateway, partition, "x") == [WHERE[act]]
    assert await gateway.command("XLEN", partition.dead) == (WHERE[act] == DEAD)
    events = [event.type for event in await read_events(gateway, partition, "x")]
    assert len(events) == len(set(events))


async def test_a_call_repeated_after_the_next_run_started_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    """The reply to a retry was lost; before the call was repeated, another worker promoted and read the task."""
    await SETTLING["reschedule"](gateway, delivery, "x")
    await promote(gateway, partition, "x")
    other = await read_one(await worker(gateway, partition, name="b"))
    before = await dump(gateway, namespace)
    await SETTLING["reschedule"](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before
    await SETTLING["succeed"](gateway, other, "x")


async def test_a_call_repeated_after_a_release_and_a_claim_changes_nothing(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, partition: Partition
) -> None:
    await SETTLING["release"](gateway, delivery, "x")
    other = await claim_one(await worker(gateway, partition, name="b"))
    before = await dump(gateway, namespace)
    await SETTLING["release"](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before
    await SETTLING["succeed"](gateway, other, "x")


@pytest.mark.parametrize("act", FENCED)
@pytest.mark.parametrize("release_act", ["release", "give_back"])
async def test_after_the_same_worker_claimed_what_it_released_the_former_delivery_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str, release_act: str
) -> None:
    """Bytes of the former run, a repeated release among them, may arrive after the claim."""
    await SETTLING[release_act](gateway, delivery, "x")
    again = await claim_one(await worker(gateway, partition))
    assert (again.worker, again.count) == (delivery.worker, 2)
    before = await dump(gateway, namespace)
    with suppress(LeaseLost):  # a repeated release succeeds
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before
    await FENCED[act](gateway, again, "x")


@pytest.mark.parametrize("act", FENCED)
async def test_a_raised_count_refuses_the_former_fence(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, act: str
) -> None:
    raised, before = await raise_count(gateway, delivery)
    assert not before
    assert (raised.worker, raised.count, raised.has_history) == (delivery.worker, 2, True)
    assert (await load_history(gateway, raised, "x")).counters.crashes == 0
    stored = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await raise_count(gateway, delivery) == (raised, True)  # the reply was lost
    assert await dump(gateway, namespace) == stored
    await FENCED[act](gateway, raised, "x")


async def test_a_count_is_not_raised_after_the_lease_has_passed(
    gateway: Gateway, namespace: Namespace, delivery: Delivery
) -> None:
    await take_over(gateway, delivery)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await raise_count(gateway, delivery)
    assert await dump(gateway, namespace) == before


async def test_a_replay_removes_the_mark_of_the_former_settlement(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await SETTLING["bury"](gateway, delivery, "x")
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert await replay(gateway, letter, Replay())
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await SETTLING["bury"](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before


# the state after each outcome


async def test_success_keeps_result_payload_and_counters(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[]")])
    await succeed(gateway, delivery, "x", b'{"sum":3}', Counters(2, 1), ran=1.25, ttl=60)
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    assert (record.state, record.result, record.task, record.args) == (State.SUCCEEDED, b'{"sum":3}', "t", b'{"n":1}')
    assert (record.attempts, record.crashes, record.ran_ms, record.worker) == (2, 1, 1250, "a")
    assert record.enqueued_at == int(delivery.entry.partition(b"-")[0])
    assert record.finished_at is not None
    assert record.finished_at >= record.enqueued_at
    assert await handle.result() == {"sum": 3}


async def test_the_outcome_deletes_the_message(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await pending(gateway, partition) == []


@pytest.mark.parametrize("act", ["succeed", "cancelled", "bury", "bury_unreadable"])
async def test_every_key_of_an_ended_task_expires(
    gateway: Gateway, partition: Partition, delivery: Delivery, act: str
) -> None:
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[]"), Entry(Kind.SAVED, "sum", b"1")])
    assert await lifetimes(gateway, partition, "x") == {"record": -1, "steps": -1, "log": -1}
    await SETTLING[act](gateway, delivery, "x")
    found = await lifetimes(gateway, partition, "x")
    assert set(found) == {"record", "steps", "log"}
    assert all(50_000 < ttl <= 30 * 24 * 3_600_000 for ttl in found.values()), found


async def test_the_result_is_kept_for_its_retention(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await succeed(gateway, delivery, "x", b"1", Counters(), ran=0, ttl=12.5)
    assert 11_000 < (await lifetimes(gateway, partition, "x"))["record"] <= 12_500


async def test_a_retention_near_zero_deletes_the_record(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await succeed(gateway, delivery, "x", b"1", Counters(), ran=0, ttl=0.0001)
    while await gateway.command("EXISTS", partition.record("x")):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("act", ["reschedule", "release"])
async def test_the_keys_of_a_live_task_do_not_expire(
    gateway: Gateway, partition: Partition, delivery: Delivery, act: str
) -> None:
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[]")])
    await SETTLING[act](gateway, delivery, "x")
    assert await lifetimes(gateway, partition, "x") == {"record": -1, "steps": -1, "log": -1}


async def test_a_scheduled_retry_keeps_payload_and_checkpoint(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[1]")])
    data: dict[str, object] = {"error": "OSError"}
    await reschedule(gateway, delivery, "x", Counters(2, 1, 0), delay=90, event="attempt_failed", data=data)
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    now = int((await gateway.command("TIME"))[0]) * 1000
    assert (record.state, record.task, record.args) == (State.SCHEDULED, "t", b'{"n":1}')
    assert (record.attempts, record.crashes, record.error) == (2, 1, {"error": "OSError"})
    assert record.due_at is not None
    assert now + 88_000 < record.due_at < now + 92_000
    await promote(gateway, partition, "x")
    second = await read_one(await worker(gateway, partition))
    history = await load_history(gateway, second, "x")
    assert (history.counters, history.done) == (Counters(2, 1, 0), {"list": b"[1]"})
    assert second.fields[b"args"] == b'{"n":1}'


async def test_the_end_of_an_attempt_changes_the_checkpoint(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """The changes are part of the act: a refused one changes nothing, a repeated one nothing more."""
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[1]"), Entry(Kind.SAVED, "sum", b"2")])
    names = [field for number in range(3000) for field in (f"d:none{number}", "")]
    changes = ["d:list", "", "s:#forgotten", "{}", *names]

    async def end(last: Delivery) -> None:
        await reschedule(
            gateway, last, "x", Counters(1), delay=0, event="attempt_failed", data={}, entries=2, changes=changes
        )

    await age(gateway, delivery)
    second = await claim_one(await worker(gateway, partition, name="second"))
    with pytest.raises(LeaseLost):
        await end(delivery)
    assert set(await checkpoint_of(gateway, partition)) == {b"d:list", b"s:sum"}
    await end(second)
    assert set(await checkpoint_of(gateway, partition)) == {b"s:#forgotten", b"s:sum"}
    await end(second)
    await promote(gateway, partition, "x")
    third = await read_one(await worker(gateway, partition))
    await add_entries(gateway, third, "x", [Entry(Kind.DONE, "list", b"[3]")])
    await end(second)  # late, and its answer was lost: the outcome is stored already
    assert set(await checkpoint_of(gateway, partition)) == {b"d:list", b"s:#forgotten", b"s:sum"}


async def test_a_dead_letter_gets_the_changed_checkpoint_with_its_lifetime(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await bury(
        gateway,
        delivery,
        "x",
        task="t",
        reason=Reason.ATTEMPTS_EXHAUSTED,
        evidence=EVIDENCE,
        counters=Counters(3),
        retention=60,
        changes=("s:#forgotten", b"{}", "d:list", ""),
    )
    assert set(await checkpoint_of(gateway, partition)) == {b"s:#forgotten"}
    assert 0 < await gateway.command("PTTL", partition.steps("x")) <= 60_000


async def checkpoint_of(gateway: Gateway, partition: Partition) -> dict[bytes, bytes]:
    return pairs(await gateway.command("HGETALL", partition.steps("x")))


async def test_a_retry_keeps_the_time_of_the_first_enqueue(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    """The time is the same however often the task returns to the stream."""
    first = int(delivery.entry.partition(b"-")[0])
    handle = await producer.find("x")
    assert handle is not None
    await SETTLING["reschedule"](gateway, delivery, "x")
    while await redis_ms(gateway) <= first:
        pass
    await promote(gateway, partition, "x")
    second = await read_one(await worker(gateway, partition))
    assert (await handle.record()).enqueued_at == first < int(second.entry.partition(b"-")[0])
    await SETTLING["bury"](gateway, second, "x")
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    assert letter.enqueued_at == first
    await replay(gateway, letter, Replay())
    await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), "x")
    assert (await handle.record()).enqueued_at == first


async def redis_ms(gateway: Gateway) -> int:
    seconds, micros = await gateway.command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def test_a_retry_logs_its_reason(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await SETTLING["reschedule"](gateway, delivery, "x")
    (event,) = await read_events(gateway, partition, "x")
    assert (event.type, event.data) == ("attempt_failed", {"error": "ValueError", "message": "no such file"})


async def test_a_retry_with_the_earliest_due_time_wakes_a_worker(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await producer.enqueue("t", task_id="y", queue="default")
    b = await worker(gateway, partition, name="b")
    second = await read_one(b)
    await SETTLING["reschedule"](gateway, delivery, "x")
    assert (await b.read(5, block=None)).due
    await reschedule(gateway, second, "y", Counters(), delay=3600, event="snoozed", data={})
    assert not (await b.read(5, block=None)).due


# releasing


async def test_a_released_message_is_claimed_at_once_and_not_counted(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await release(gateway, delivery, "x", data={"why": "shutdown"})
    assert [(owner, count) for _, owner, _, count in await pending(gateway, partition)] == [(RELEASED, 1)]
    second = await claim_one(await worker(gateway, partition, name="b", lease=7 * 24 * 3600.0))
    assert (second.entry, second.worker, second.count, second.has_history) == (delivery.entry, "b", 2, True)
    assert (await load_history(gateway, second, "x")).counters == Counters()


async def test_a_release_wakes_a_worker_and_is_logged(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await release(gateway, delivery, "x", data={"why": "shutdown", "steps": 2})
    (event,) = await read_events(gateway, partition, "x")
    assert (event.type, event.data) == ("handed_off", {"why": "shutdown", "steps": 2})
    taken = await (await worker(gateway, partition, name="b")).read(5, block=None)
    assert (taken.claimable, taken.deliveries) == (True, [])


async def test_a_release_keeps_the_former_crashes(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    second = await take_over(gateway, delivery, "b")
    await SETTLING["release"](gateway, second, "x")
    third = await claim_one(await worker(gateway, partition, name="c"))
    assert third.count == 3
    assert (await load_history(gateway, third, "x")).counters.crashes == 1


async def test_releases_do_not_restore_a_lost_fence(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    """Workers a and b claim and release the message in turn: the first run of a is refused every time."""
    holder = await take_over(gateway, delivery, "b")
    for name in ("a", "b", "a"):
        await SETTLING["release"](gateway, holder, "x")
        holder = await claim_one(await worker(gateway, partition, name=name))
        assert holder.fence != delivery.fence
        before = await dump(gateway, namespace)
        with pytest.raises(LeaseLost):
            await SETTLING["succeed"](gateway, delivery, "x")
        assert await dump(gateway, namespace) == before
    await SETTLING["succeed"](gateway, holder, "x")


async def test_a_delivery_that_never_started_is_released_without_an_event(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    before = set(await dump(gateway, namespace))
    await release(gateway, delivery, None, data=None)
    assert set(await dump(gateway, namespace)) == before | {partition.nudge.encode()}
    assert await read_events(gateway, partition, "x") == []
    second = await claim_one(await worker(gateway, partition, name="b"))
    assert (second.count, (await load_history(gateway, second, "x")).counters.crashes) == (2, 0)


async def test_a_release_without_a_record_creates_none(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """It would have no TTL."""
    await gateway.command("DEL", partition.record("x"))
    await release(gateway, delivery, None, data=None)
    await release(gateway, delivery, None, data=None)  # the reply was lost
    assert await gateway.command("EXISTS", partition.record("x")) == 0


async def test_a_released_message_is_claimed_by_one_of_many(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await SETTLING["release"](gateway, delivery, "x")
    crew = [await worker(gateway, partition, name=f"w{n}") for n in range(5)]
    got = await asyncio.gather(*(claim_all(one) for one in crew))
    assert [one.count for batch in got for one in batch] == [2]


# cancelling


async def test_a_request_to_cancel_stays_after_a_retry_and_is_due_at_once(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    """It came after the run's last step: the run failed, and the cancellation must not wait hours for the retry."""
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.cancel() is State.RUNNING
    await reschedule(gateway, delivery, "x", Counters(1), delay=3600, event="attempt_failed", data={})
    assert await promote(gateway, partition) == 1
    second = await read_one(await worker(gateway, partition))
    assert (await load_history(gateway, second, "x")).cancel


async def test_a_request_to_cancel_stays_after_a_release_and_a_crash(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    handle = await producer.find("x")
    assert handle is not None
    await handle.cancel()
    second = await take_over(gateway, delivery)
    assert (await load_history(gateway, second, "x")).cancel
    await SETTLING["release"](gateway, second, "x")
    third = await claim_one(await worker(gateway, partition, name="c"))
    assert (await load_history(gateway, third, "x")).cancel


async def test_a_result_before_a_request_to_cancel_is_kept(
    gateway: Gateway, producer: Producer, delivery: Delivery
) -> None:
    handle = await producer.find("x")
    assert handle is not None
    await handle.cancel()
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await handle.result() == {"ok": True}
    assert await handle.cancel() is State.SUCCEEDED


# atomicity


@pytest.mark.parametrize("act", SETTLING)
async def test_a_concurrent_reader_sees_the_task_in_one_place(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 30, queue="default")
    names = [handle.id for handle in handles]
    a = await worker(gateway, partition)
    done = asyncio.Event()
    seen: list[list[str]] = []

    async def look() -> None:
        while not done.is_set():
            seen.extend((await all_places(gateway, partition, names)).values())

    async def work() -> None:
        for delivery, name in zip(await read(a, 30), names, strict=True):
            await SETTLING[act](gateway, delivery, name)
        done.set()

    await asyncio.gather(look(), work())
    assert {len(where) for where in seen} == {1}
    assert set((await all_places(gateway, partition, names)).popitem()[1]) == {WHERE[act]}


async def test_concurrent_outcomes_of_one_delivery_store_one(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    acts = [SETTLING[name](gateway, delivery, "x") for name in ("succeed", "bury", "reschedule", "cancelled")]
    await asyncio.gather(*acts)
    assert len(await places(gateway, partition, "x")) == 1


async def test_concurrent_owners_store_one_outcome(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    second = await take_over(gateway, delivery)
    answers = await asyncio.gather(
        SETTLING["succeed"](gateway, delivery, "x"), SETTLING["bury"](gateway, second, "x"), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [LeaseLost, type(None)]
    assert await places(gateway, partition, "x") == [DEAD]


async def test_a_worker_that_dies_before_the_outcome_leaves_the_task_pending(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """Every call before the one script only reads, or writes the checkpoint."""
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "list", b"[1]")])
    assert await places(gateway, partition, "x") == [PENDING]
    second = await take_over(gateway, delivery)
    history = await load_history(gateway, second, "x")
    assert (history.done, history.counters) == ({"list": b"[1]"}, Counters(crashes=1))


async def test_scripts_check_group_stream_and_entry(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    """A delivery of another group, stream or entry is never owned, whatever the other arguments are."""
    keys = [partition.ready, partition.record("x"), partition.inbox("x"), partition.control("x")]
    keys += [partition.retentions, partition.timeline]
    outcome: tuple[str | int, ...] = (0, "succeeded", "1", 1, 0, 1, 1000, 1024)
    others: list[tuple[str | bytes | int, ...]] = [
        ("workers", "b", delivery.entry, 1),
        ("workers", "a", delivery.entry, 2),
        ("workers", "a", delivery.entry, 11),
        ("workers", "a", "1-1", 1),
    ]
    for fence in others:
        assert await gateway.run(queue_script("finish"), keys, [*fence, *outcome]) == 0
    assert await gateway.run(queue_script("finish"), keys, [*delivery.fence, *outcome]) == 1


@pytest.mark.parametrize("act", FENCED)
async def test_a_call_on_an_emptied_server_is_refused_and_stores_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, act: str
) -> None:
    """The server restarted without its data: the lease is lost, and the call raises no server error."""
    await gateway.command("DEL", partition.ready, partition.nudge, partition.record("x"))
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await FENCED[act](gateway, delivery, "x")
    assert await dump(gateway, namespace) == before

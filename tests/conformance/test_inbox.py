"""The inbox of a task, as the scripts keep it: what is sent is there once, in order, until the act that uses it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from perdure.deadletter.burial import Evidence, bury
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import (
    Encryptor,
    Gateway,
    InboxFull,
    LeaseLost,
    Namespace,
    Partition,
    PayloadTooLarge,
    Producer,
    State,
    TaskEnded,
    TaskNotFound,
    inbox,
    read_record,
)
from perdure.queues.delivery.checkpoint import Entry, Kind
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import TIME, Counters, WakeCondition, message_after, park, reschedule, succeed
from perdure.queues.errors import NoKey
from perdure.queues.event_log import read_events
from perdure.queues.inbox import read_inbox, send_message
from perdure.queues.security.encryption import is_encrypted
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import promote, read_one, take_over, worker
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.workers import wait_until

pytestmark = pytest.mark.integration


async def unread(gateway: Gateway, partition: Partition, task: str = "t") -> list[Any]:
    return [one.content async for one in read_inbox(gateway, partition, task)]


async def use(gateway: Gateway, delivery: Delivery, *numbers: int) -> None:
    await add_entries(gateway, delivery, "t", [Entry(Kind.CONSUMED, str(number), b"") for number in numbers])


async def test_messages_are_kept_in_their_order_until_they_are_used(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    assert await unread(gateway, partition) == []
    first = await handle.send("one", sender="ada")
    second = await producer.send_message("t", {"two": [2]}, sender="bob")
    assert [(one.task_id, one.state) for one in (first, second)] == [("t", State.QUEUED)] * 2
    assert first.number < second.number
    found = await handle.pending_messages()
    assert [(one.number, one.sender, one.content) for one in found] == [
        (first.number, "ada", "one"),
        (second.number, "bob", {"two": [2]}),
    ]
    seconds = int((await gateway.command("TIME"))[0])
    assert 0 <= seconds - found[0].at // 1000 <= 60

    delivery = await read_one(await worker(gateway, partition))
    third = await handle.send("three")
    await use(gateway, delivery, first.number)
    assert await unread(gateway, partition) == [{"two": [2]}, "three"]
    await use(gateway, delivery, third.number)
    await use(gateway, delivery, third.number)
    assert await unread(gateway, partition) == [{"two": [2]}]
    await use(gateway, delivery, second.number)
    record = await handle.record()
    assert (record.unused, await unread(gateway, partition)) == (0, [])


async def test_who_lost_the_lease_uses_no_message(producer: Producer, partition: Partition) -> None:
    handle = await producer.enqueue("t", task_id="t", queue="default")
    sent = await handle.send("one")
    late = await read_one(await worker(producer.gateway, partition))
    await take_over(producer.gateway, late)
    with pytest.raises(LeaseLost):
        await use(producer.gateway, late, sent.number)
    assert await unread(producer.gateway, partition) == ["one"]


async def test_a_message_sent_again_under_its_id_is_there_once(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 3)
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    first = await handle.send("one", message_id="a")
    assert await handle.send("one", message_id="a") == first
    await use(gateway, delivery, first.number)
    second, third = await handle.send(2), await handle.send(3)
    assert await handle.send("one", message_id="a") == first, "known, though it was used long ago"
    assert await unread(gateway, partition) == [2, 3]
    await use(gateway, delivery, second.number)
    fourth = await handle.send(4)
    names = await gateway.command("HKEYS", partition.inbox("t"))
    ids = [name for name in names if name.startswith((b"id:", b"n:"))]
    assert len(ids) == 6, "an inbox knows as many ids as it holds messages"
    await succeed(gateway, delivery, "t", b"1", Counters(1), ran=0, ttl=60)
    numbers = {name: int(value) for name, value in await _fields(gateway, partition, b"id:")}
    assert sorted(numbers.values()) == [second.number, third.number, fourth.number]


async def test_a_number_is_not_used_again_after_the_server_lost_its_last_writes(
    producer: Producer, partition: Partition
) -> None:
    """A run that has used the lost message ignores its number."""
    gateway, key = producer.gateway, partition.inbox("t")
    handle = await producer.enqueue("t", task_id="t", queue="default")
    first = await handle.send("kept")
    before = await gateway.command("HGETALL", key)
    lost = await handle.send("lost")
    await gateway.pipeline([("DEL", key), ("HSET", key, *before)], node_of=key)

    async def later_than_the_lost_one() -> bool:
        seconds, micro = await gateway.command("TIME")
        return int(seconds) * 1000 + int(micro) // 1000 > lost.number

    await wait_until(later_than_the_lost_one, "a millisecond passes")
    later = await handle.send("later")
    assert first.number < lost.number < later.number


async def test_numbers_grow_although_the_clock_goes_back(producer: Producer, partition: Partition) -> None:
    gateway, ahead = producer.gateway, 9_000_000_000_000
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await handle.send("now")
    await gateway.command("HSET", partition.inbox("t"), "last", ahead)
    assert (await handle.send("next")).number == ahead + 1
    assert await unread(gateway, partition) == ["now", "next"]


async def _fields(gateway: Gateway, partition: Partition, prefix: bytes) -> list[tuple[bytes, bytes]]:
    flat = await gateway.command("HGETALL", partition.inbox("t"))
    return [pair for pair in zip(flat[::2], flat[1::2], strict=True) if pair[0].startswith(prefix)]


async def test_what_cannot_be_sent_is_refused_with_its_reason(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 2)
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    with pytest.raises(TaskNotFound, match="missing"):
        await producer.send_message("missing", "hello")
    with pytest.raises(TypeError, match="JSON"):
        await handle.send(object())
    with pytest.raises(PayloadTooLarge, match="the message"):
        await handle.send("x" * producer.payload_limit)
    first, second = await handle.send(1), await handle.send(2)
    with pytest.raises(InboxFull, match=r"inbox of task t is full: 2 messages .* --drop N"):
        await handle.send(3)
    delivery = await read_one(await worker(gateway, partition))
    await use(gateway, delivery, second.number)
    with pytest.raises(InboxFull):
        await handle.send(3)
    await use(gateway, delivery, first.number)
    last = await handle.send(3, message_id="last")
    await succeed(gateway, delivery, "t", b"1", Counters(1), ran=0, ttl=60)
    with pytest.raises(TaskEnded, match="task t reads no more messages: it is succeeded"):
        await handle.send(4)
    assert (await handle.send(3, message_id="last")).number == last.number, "it was sent, though the reply was lost"
    assert await unread(gateway, partition) == [3]


async def test_a_task_that_was_handed_on_hands_its_messages_on(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await producer.enqueue("t", task_id="next", queue="other")
    await gateway.command("HSET", partition.record("t"), "handed_to", "next")
    assert (await handle.send("hello")).task_id == "next"
    assert await unread(gateway, partition) == []
    other = Namespace(partition.namespace).partition("other")
    assert await unread(gateway, other, "next") == ["hello"]
    await gateway.command("HSET", other.record("next"), "handed_to", "t")
    with pytest.raises(TaskNotFound):
        await handle.send("round and round")


async def test_what_was_not_read_goes_along_with_a_task_that_is_handed_on(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    there = await producer.enqueue("t", task_id="next", queue="other")
    _, second, third, _ = [await handle.send(one, sender="ada", message_id=f"m{one}") for one in range(4)]
    await gateway.command("HSET", partition.inbox("t"), f"m:{second.number}", "1 broken")
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 4)
    await there.send("first", message_id="first")
    for _ in range(2):
        left = await inbox.forward_messages(gateway, partition, "t", there.partition, "next", is_used=lambda _: False)
        assert [one.number for one in left] == [second.number], "which is broken"
    assert [(one.id, one.sender, one.content) for one in await there.pending_messages()] == [
        ("first", "", "first"),
        ("m0", "ada", 0),
        ("m2", "ada", 2),
        ("m3", "ada", 3),
    ]
    delivery = await read_one(await worker(gateway, partition))
    await add_entries(gateway, delivery, "t", [Entry(Kind.TRANSFERRED, "#handed", b"next")])
    with pytest.raises(InboxFull, match="next"):
        await handle.send("later")
    broken = {f"m:{second.number}": b"1 " + orjson.dumps(_MESSAGE), f"m:{third.number}": b"1 ?"}
    await gateway.command("HSET", partition.inbox("t"), *(part for field in broken.items() for part in field))
    left = await inbox.forward_messages(gateway, partition, "t", there.partition, "next", is_used=lambda _: False)
    assert [(one.number, one.problem is None) for one in left] == [
        (second.number, True),
        (third.number, False),
    ], "there is no room"


_MESSAGE = {"id": "m", "sender": "", "content": 1}


async def test_a_correction_is_stored_once_keeps_its_kind_and_goes_along(
    producer: Producer, partition: Partition
) -> None:
    handle = await producer.enqueue("t", task_id="t", queue="default")
    there = await producer.enqueue("t", task_id="next", queue="other")
    sent = [await handle.correct({"a.b": 1}, by="ada", message_id="m") for _ in range(2)]
    assert sent[0] == sent[1]
    await handle.send("hello")
    assert [one.kind for one in await handle.pending_messages()] == ["correction", ""]
    assert (
        await inbox.forward_messages(producer.gateway, partition, "t", there.partition, "next", is_used=lambda _: False)
        == []
    )
    assert [(one.kind, one.sender, one.content) for one in await there.pending_messages()] == [
        ("correction", "ada", {"a.b": 1}),
        ("", "", "hello"),
    ]


async def test_a_dead_letter_keeps_its_messages_for_the_replay(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await handle.send("before")
    delivery = await read_one(await worker(gateway, partition))
    evidence = Evidence("ValueError", "no", "")
    await bury(
        gateway, delivery, "t", task="t", reason=Reason.TIMEOUT, evidence=evidence, counters=Counters(1), retention=60
    )
    assert (await handle.send("after")).state is State.DEAD
    assert 0 < await gateway.command("PTTL", partition.inbox("t")) <= 60_000
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    assert await replay(gateway, letter, Replay(fresh=True))
    assert await unread(gateway, partition) == ["before", "after"]
    assert await gateway.command("PTTL", partition.inbox("t")) == -1


async def test_the_first_message_to_a_dead_letter_expires_with_it(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await SETTLING["bury"](gateway, await read_one(await worker(gateway, partition)), "t")
    await handle.send("late")
    record, inbox_of_t = await gateway.pipeline(
        [("PTTL", key) for key in (partition.record("t"), partition.inbox("t"))]
    )
    assert 0 < inbox_of_t <= 60_000
    assert abs(record - inbox_of_t) <= 1_000
    assert await unread(gateway, partition) == ["late"]


@pytest.mark.parametrize("act", ["succeed", "cancelled"])
async def test_an_inbox_expires_with_its_task(producer: Producer, partition: Partition, act: str) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await handle.send("unused")
    await SETTLING[act](gateway, await read_one(await worker(gateway, partition)), "t")
    with pytest.raises(TaskEnded):
        await handle.send("late")
    assert 0 < await gateway.command("PTTL", partition.inbox("t")) <= 60_000
    again = await producer.enqueue("t", task_id="u", queue="default")
    await again.send("unused")
    await again.cancel()
    assert await gateway.command("PTTL", partition.inbox("u")) > 0


class Parking:
    """What a run does that looks for a message, finds none, and parks; and what can come between."""

    def __init__(self, producer: Producer, partition: Partition) -> None:
        self.gateway, self.partition, self.producer = producer.gateway, partition, producer
        self.seen = 0

    async def look(self) -> None:
        self.seen = int(await self.gateway.command("HGET", self.partition.inbox("t"), "last") or 0)

    async def park(self) -> None:
        for _ in range(2):  # the reply may be lost
            await park(
                self.gateway,
                self.delivery,
                "t",
                Counters(),
                delay=600,
                waits="message",
                conditions=[message_after(self.seen)],
            )

    async def send(self) -> None:
        for _ in range(2):
            await self.producer.send_message("t", "now", message_id="m")

    async def is_due(self) -> bool:
        return await _is_due(self.gateway, self.partition)

    delivery: Delivery


@pytest.mark.parametrize("sent_after", range(3))
async def test_no_message_comes_between_the_look_and_the_wait(
    producer: Producer, partition: Partition, sent_after: int
) -> None:
    """Wherever it is sent: before the look it is seen, after it the task is due at once."""
    handle = await producer.enqueue("t", task_id="t", queue="default")
    parking = Parking(producer, partition)
    parking.delivery = await read_one(await worker(producer.gateway, partition))
    acts = [parking.look, parking.park]
    acts.insert(sent_after, parking.send)
    for act in acts:
        await act()
    assert await parking.is_due() is (sent_after > 0)
    record = await handle.record()
    assert (record.state, record.waits, record.attempts, record.unused) == (State.WAITING, "message", 0, 1)
    assert await promote(producer.gateway, partition, "t") == 1
    assert await producer.gateway.command("HGET", partition.record("t"), "waits") is None
    assert await unread(producer.gateway, partition) == ["now"]


async def _is_due(gateway: Gateway, partition: Partition) -> bool:
    score, time = await gateway.pipeline([("ZSCORE", partition.due, "t"), ("TIME",)], node_of=partition.due)
    return float(score) <= int(time[0]) * 1000 + 1000


async def test_a_message_wakes_no_task_that_waits_for_something_else(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    await producer.enqueue("t", task_id="t", delay=600, queue="default")
    early = await producer.send_message("t", "early")
    assert not await _is_due(gateway, partition)
    await promote(gateway, partition, "t")
    delivery = await read_one(await worker(gateway, partition))
    await park(gateway, delivery, "t", Counters(), delay=600, waits="message", conditions=[message_after(early.number)])
    await promote(gateway, partition, "t")
    delivery = await read_one(await worker(gateway, partition))
    # a worker of an earlier version has promoted it, and left what it had waited for
    await gateway.command("HSET", partition.record("t"), "waits", "message", "wakes", "message")
    await reschedule(gateway, delivery, "t", Counters(1), delay=600, event="attempt_failed", data={})
    await producer.send_message("t", "during the backoff")
    assert not await _is_due(gateway, partition)
    record = await read_record(gateway, partition, "t")
    assert record is not None
    assert record.waits is None


async def test_a_message_wakes_no_task_that_sleeps(producer: Producer, partition: Partition) -> None:
    gateway, record = producer.gateway, partition.record("t")
    await producer.enqueue("t", task_id="t", queue="default")
    await producer.send_message("t", "before")
    delivery = await read_one(await worker(gateway, partition))
    await park(gateway, delivery, "t", Counters(), delay=600, waits="sleep", conditions=[TIME])
    await producer.send_message("t", "during")
    assert not await _is_due(gateway, partition)
    await promote(gateway, partition, "t")
    assert await gateway.command("HMGET", record, "waits", "wakes") == [None, None]
    assert await unread(gateway, partition) == ["before", "during"]


@pytest.mark.parametrize(
    ("conditions", "wakes", "woken"),
    [
        ([], "", False),
        ([TIME], "time", False),
        ([message_after(0)], "message", True),
        ([message_after(7), TIME, message_after(0), TIME], "message time", True),
        ([("answer", "message")], "answer:message", False),
        ([("answer", "a page/sign off#2"), message_after(0)], "answer:a%20page/sign%20off#2 message", True),
    ],
)
async def test_a_message_wakes_a_task_if_that_is_one_of_its_conditions(
    producer: Producer, partition: Partition, conditions: list[WakeCondition], wakes: str, *, woken: bool
) -> None:
    gateway, record = producer.gateway, partition.record("t")
    await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    for _ in range(2):  # the reply may be lost
        await park(gateway, delivery, "t", Counters(), delay=600, waits="message", conditions=conditions)
    assert await gateway.command("HGET", record, "wakes") == wakes.encode()
    assert not await _is_due(gateway, partition)
    await producer.send_message("t", "now")
    assert await _is_due(gateway, partition) is woken


@pytest.mark.parametrize("over", ["message", "answer"])
async def test_a_task_is_due_at_once_if_one_of_its_conditions_is_over(
    producer: Producer, partition: Partition, over: str
) -> None:
    """The message or the answer came after the run had looked."""
    gateway, inbox = producer.gateway, partition.inbox("t")
    await producer.enqueue("t", task_id="t", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    if over == "message":
        await producer.send_message("t", "now")
    else:
        await gateway.command("HSET", inbox, "a:sign off", "1 d {}")
    conditions = [TIME, ("answer", "other"), ("answer", "sign off"), message_after(0)]
    await park(gateway, delivery, "t", Counters(), delay=600, waits="answer or message", conditions=conditions)
    assert await _is_due(gateway, partition)


async def test_messages_are_sealed(producer: Producer, partition: Partition) -> None:
    await producer.enqueue("t", task_id="t", queue="default")
    gateway, key = producer.gateway, bytes(range(32))
    gateway.encryptor = Encryptor([key])
    sent = await send_message(gateway, partition, "t", "private", sender="ada")
    stored = await gateway.command("HGET", partition.inbox("t"), f"m:{sent.number}")
    assert is_encrypted(stored.partition(b" ")[2])
    assert b"private" not in stored
    assert [one.content async for one in read_inbox(gateway, partition, "t")] == ["private"]
    gateway.encryptor = Encryptor([bytes(32)])
    (found,) = [one async for one in read_inbox(gateway, partition, "t")]
    assert found.problem is not None
    assert "could not decrypt the message of task t: encrypted with key" in found.problem


async def test_what_is_taken_out_of_a_full_inbox_makes_room(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 2)
    handle = await producer.enqueue("t", task_id="t", queue="default")
    first = await handle.send(1)
    await handle.send(2)
    with pytest.raises(InboxFull):
        await handle.send(3)
    assert await inbox.drop_message(producer.gateway, partition, "t", first.number)
    await handle.send(3)
    with pytest.raises(InboxFull):
        await handle.send(4)
    assert [one.content for one in await handle.pending_messages()] == [2, 3]


async def test_a_message_that_is_broken_hides_no_other(producer: Producer, partition: Partition) -> None:
    handle = await producer.enqueue("t", task_id="t", queue="default")
    first, second, third, fourth = [(await handle.send(number)).number for number in range(1, 5)]
    broken = (f"m:{second}", b'1 {"id"', f"m:{third}", b"\xff")
    await producer.gateway.command("HSET", partition.inbox("t"), *broken)
    found = await handle.pending_messages()
    assert [one.content for one in found] == [1, None, None, 4]
    assert [one.problem is None for one in found] == [True, False, False, True]
    assert "problem" not in found[0].summary()
    assert await inbox.drop_message(producer.gateway, partition, "t", second)
    assert not await inbox.drop_message(producer.gateway, partition, "t", second)
    assert [one.number for one in await handle.pending_messages()] == [first, third, fourth]


async def test_a_long_inbox_is_read_page_by_page(producer: Producer, partition: Partition) -> None:
    handle = await producer.enqueue("t", task_id="t", queue="default")
    for number in range(70):
        await handle.send(number)
    assert await unread(producer.gateway, partition) == [*range(70)]
    record = await handle.record()
    assert record.summary()["unused"] == 70


async def test_a_task_that_succeeds_keeps_the_number_of_unread_messages(
    producer: Producer, partition: Partition
) -> None:
    gateway = producer.gateway
    handle = await producer.enqueue("t", task_id="t", queue="default")
    sent = [await handle.send(one) for one in ("one", "two", "three", "four")]
    delivery = await read_one(await worker(gateway, partition))
    await use(gateway, delivery, sent[1].number)
    assert await inbox.drop_message(gateway, partition, "t", sent[3].number)
    await succeed(gateway, delivery, "t", b"1", Counters(1), ran=0, ttl=60, entries=1)
    assert (await handle.record()).unused == 2
    with pytest.raises(TaskEnded):
        await handle.send("five")


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("watched", [False, True])
async def test_messages_that_are_left_unread_are_an_event_that_expires_with_the_task(
    producer: Producer, partition: Partition, written: bool, watched: bool
) -> None:
    """A run that wrote nothing has no log until then. After a lost reply, the same number is returned."""
    gateway, left = producer.gateway, list[tuple[str, int]]()
    handle = await producer.enqueue("t", task_id="t", queue="default")
    for text in ("one", "two"):
        await handle.send(text)
    delivery = await read_one(await worker(gateway, partition))
    if written:
        await add_entries(gateway, delivery, "t", [Entry(Kind.DONE, "a", b"1")])
    if watched:
        await gateway.command("HSET", partition.record("t"), "watchers", "[]")
    for _ in range(2):
        await succeed(
            gateway,
            delivery,
            "t",
            b"1",
            Counters(1),
            ran=0,
            ttl=60,
            written=written,
            on_unread=lambda task, count: left.append((task, count)),
        )
    assert left == [("t", 2), ("t", 2)]
    found = [event for event in await read_events(gateway, partition, "t") if event.type == "left_unread"]
    assert [event.data for event in found] == [{"count": 2}]
    assert 0 < await gateway.command("PTTL", partition.log("t")) <= 60_000
    if watched:  # its record is kept until the notice is delivered
        await gateway.command("DEL", partition.record("t"))


async def test_a_log_that_another_program_has_replaced_keeps_no_task_from_its_end(
    producer: Producer, partition: Partition
) -> None:
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await handle.send("one")
    delivery = await read_one(await worker(producer.gateway, partition))
    await producer.gateway.command("SET", partition.log("t"), "junk")
    await succeed(producer.gateway, delivery, "t", b"1", Counters(1), ran=0, ttl=60)
    assert (await handle.status(), (await handle.record()).unused) == (State.SUCCEEDED, 1)


async def test_a_task_that_read_all_messages_or_has_a_successor_leaves_none(
    producer: Producer, partition: Partition
) -> None:
    gateway = producer.gateway
    consumer = await worker(gateway, partition)
    for number, entry in enumerate([Entry(Kind.CONSUMED, "", b""), Entry(Kind.TRANSFERRED, "", b"next")]):
        handle = await producer.enqueue("t", task_id=f"t{number}", queue="default")
        sent = await handle.send("one")
        delivery = await read_one(consumer)
        await add_entries(gateway, delivery, handle.id, [entry._replace(step=str(sent.number))])
        await succeed(gateway, delivery, handle.id, b"1", Counters(1), ran=0, ttl=60, entries=1)
        assert (await handle.record()).unused == 0
        assert await gateway.command("HEXISTS", partition.record(handle.id), "unread") == 0


async def test_an_inbox_is_read_in_pages_of_messages_and_bytes(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_PAGE", 3)
    monkeypatch.setattr(inbox, "_PAGE_BYTES", 500)
    handle = await producer.enqueue("t", task_id="t", queue="default")
    sent = ["x" * 700 if number % 4 == 3 else number for number in range(20)]
    for content in sent:
        await handle.send(content)
    assert await unread(producer.gateway, partition) == sent
    found = [message async for message in read_inbox(producer.gateway, partition, "t", largest=300)]
    assert [message.problem is None for message in found] == [number % 4 != 3 for number in range(20)]
    assert found[3].problem is not None
    assert "bytes, and its reader takes 300" in found[3].problem


async def test_an_inbox_measures_its_messages_when_their_bound_is_over_the_limit(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "INBOX_BYTES", 1000)
    gateway, key = producer.gateway, partition.inbox("t")
    handle = await producer.enqueue("t", task_id="t", queue="default")
    first, second = [await handle.send("x" * 400) for _ in range(2)]
    with pytest.raises(
        InboxFull, match=r"2 messages with 9\d\d bytes are unread, and it holds 1,000 messages and 1,000"
    ):
        await handle.send("x" * 400)
    assert await inbox.drop_message(gateway, partition, "t", first.number)
    third = await handle.send("x" * 400)
    await gateway.command("HDEL", key, "bytes")
    with pytest.raises(InboxFull):
        await handle.send("x" * 400)
    for number in (second.number, third.number):
        assert await inbox.drop_message(gateway, partition, "t", number)
    await handle.send("x" * 900)
    assert await unread(gateway, partition) == ["x" * 900]


async def test_fields_that_no_sender_wrote_are_counted_and_not_read(producer: Producer, partition: Partition) -> None:
    gateway, key = producer.gateway, partition.inbox("t")
    handle = await producer.enqueue("t", task_id="t", queue="default")
    await handle.send("good")
    assert [message.number > 0 async for message in read_inbox(gateway, partition, "t")] == [True]
    await gateway.command("HSET", key, "m:7", "1 x", "n:900", "7 x", "junk", "1")
    good, report = [message async for message in read_inbox(gateway, partition, "t")]
    assert (good.content, report.number) == ("good", 0)
    assert report.problem is not None
    assert "at least 3 fields that no sender wrote" in report.problem


@pytest.mark.parametrize("place", ["queued", "delayed", "parked"])
async def test_a_plain_message_to_a_task_with_encrypted_data_is_refused(
    gateway: Gateway, partition: Partition, place: str
) -> None:
    gateway.encryptor = Encryptor([bytes(range(32))])
    async with Producer(namespace=partition.namespace, gateway=gateway) as producer:
        delay = 60 if place == "delayed" else 0
        handle = await producer.enqueue("t", task_id="t", queue="default", delay=delay)
        if place == "parked":
            delivery = await read_one(await worker(gateway, partition))
            await park(gateway, delivery, "t", Counters(), delay=60, waits="message", conditions=[message_after(0)])
        await handle.send("sealed")
        gateway.encryptor = Encryptor()
        with pytest.raises(NoKey, match="message to task t: the data of the task is encrypted"):
            await handle.send("plain")


async def test_a_message_is_stored_under_the_number_that_it_is_encrypted_for(
    producer: Producer, partition: Partition
) -> None:
    """Concurrent senders get different numbers; one whose number is passed by gets another one, and stores nothing."""
    gateway, inbox = producer.gateway, partition.inbox("t")
    await producer.enqueue("t", task_id="t", queue="default")
    keys = [partition.record("t"), inbox, partition.due, partition.nudge]

    async def send(digest: str, message: bytes, number: bytes = b"") -> list[bytes]:
        given: list[str | bytes | int] = ["t", digest, message, number, 1000, 1000]
        answer: list[bytes] = await gateway.run(queue_script("send_message"), keys, given)
        return answer

    (_, first), (_, second) = await send("aa", b""), await send("bb", b"")
    assert int(first) < int(second)
    assert await gateway.command("HKEYS", inbox) == [b"given"]
    assert await send("bb", b"two", second) == [b"sent", second, b"queued"]
    word, again = await send("aa", b"one", first)
    assert (word, int(again) > int(second)) == (b"number", True)
    assert await gateway.command("HEXISTS", inbox, f"m:{first.decode()}") == 0
    for _ in range(2):  # its reply is lost, or its bytes arrive late
        assert await send("aa", b"one", again) == [b"sent", again, b"queued"]
    assert await send("aa", b"one", first) == [b"sent", again, b"queued"]
    stored = [await gateway.command("HGET", inbox, f"n:{position}") for position in (1, 2, 3)]
    assert stored == [second + b" bb", again + b" aa", None]
    await gateway.command("HSET", inbox, "given", "junk", "last", "99999999999999")
    word, number = await send("cc", b"")
    assert (word, len(number)) == (b"number", 13)
    assert (await send("cc", b"three", number))[:2] == [b"sent", number]

"""Dead letters: no message is dropped, every letter can be replayed, and each replay stores one message."""

from __future__ import annotations

import asyncio
import random
import time

import orjson
import pytest
from perdure.deadletter.burial import Evidence, bury, unreadable_id
from perdure.deadletter.letters import DeadLetter, Filter, count_letters, find_letter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, purge, purge_all, replay, replay_all, trim_letters
from perdure.queues import Gateway, Namespace, Partition, Producer, State, UnreadableEnvelope, read_record
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters
from perdure.queues.envelope import Envelope
from perdure.queues.event_log import read_events

from tests.support.consumers import age, claim_one, ids, needs_one_server, pending, read, read_one, take_over, worker
from tests.support.delivery_calls import EVIDENCE, SETTLING, add_entries
from tests.support.lossy_proxy import lossy_gateway
from tests.support.task_places import DEAD, PENDING, READY, dump, keys, lifetimes, places

DAY = 24 * 3600.0
TRIED = Counters(attempts=3, crashes=1)


async def send_raw(gateway: Gateway, partition: Partition, *fields: bytes) -> bytes:
    """Add a message as another program would write it."""
    entry: bytes = await gateway.command("XADD", partition.ready, "*", *fields)
    return entry


async def bury_raw(gateway: Gateway, delivery: Delivery, task_id: str | None = None) -> str:
    """Bury a message as a worker does that cannot decode it."""
    known = task_id or unreadable_id(delivery)
    await bury(
        gateway,
        delivery,
        known,
        task="?",
        reason=Reason.UNREADABLE,
        evidence=Evidence("UnreadableEnvelope", "not an envelope"),
        counters=Counters(),
    )
    return known


async def bury_as(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    task: str = "t",
    reason: Reason = Reason.ATTEMPTS_EXHAUSTED,
    counters: Counters = TRIED,
    retention: float = DAY,
) -> None:
    await bury(
        gateway,
        delivery,
        task_id,
        task=task,
        reason=reason,
        evidence=EVIDENCE,
        counters=counters,
        retention=retention,
    )


async def letter_of(gateway: Gateway, partition: Partition, task_id: str) -> DeadLetter:
    letter = await find_letter(gateway, [partition], task_id)
    assert letter is not None
    return letter


async def letters(gateway: Gateway, partition: Partition, wanted: Filter | None = None) -> list[DeadLetter]:
    return [one async for one in list_letters(gateway, [partition], wanted or Filter())]


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, producer: Producer) -> Delivery:
    """Task x, read by worker a, with one recorded step."""
    await producer.enqueue("t", {"n": 1}, task_id="x", headers={"trace": "7"}, queue="default")
    taken = await read_one(await worker(gateway, partition))
    await add_entries(gateway, taken, "x", [Entry(Kind.DONE, "list", b"[1]")])
    return taken


# burying


async def test_a_dead_letter_contains_the_evidence(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    letter = await letter_of(gateway, partition, "x")
    assert (letter.id, letter.task, letter.reason) == ("x", "t", Reason.ATTEMPTS_EXHAUSTED)
    assert (letter.error, letter.message, letter.traceback) == ("ValueError", "no such file", "Traceback ...")
    assert (letter.attempts, letter.crashes, letter.worker) == (3, 1, "a")
    assert (letter.args, letter.raw) == (b'{"n":1}', {})
    assert letter.envelope is not None
    assert (letter.envelope.id, letter.envelope.headers) == ("x", {"trace": "7"})
    assert letter.enqueued_at == int(delivery.entry.partition(b"-")[0]) <= letter.died_at
    shown = orjson.loads(orjson.dumps(letter.summary()))
    assert (shown["id"], shown["args"], shown["headers"]) == ("x", {"n": 1}, {"trace": "7"})
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    assert (record.state, record.reason, record.task, record.args) == (State.DEAD, letter.reason, "t", b'{"n":1}')
    assert record.error == {"error": "ValueError", "message": "no such file", "traceback": "Traceback ..."}


async def test_burying_removes_the_message_and_keeps_the_checkpoint(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x", retention=DAY)
    assert await places(gateway, partition, "x") == [DEAD]
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await pending(gateway, partition) == []
    found = await lifetimes(gateway, partition, "x")
    assert set(found) == {"record", "steps", "log"}
    assert all(DAY * 1000 - 10_000 < ttl <= DAY * 1000 for ttl in found.values())
    assert [event.type for event in await read_events(gateway, partition, "x")] == ["step_completed", "buried"]


async def next_millisecond(gateway: Gateway) -> None:
    """Wait until Redis' clock shows another millisecond: entries of two streams are ordered by it."""

    async def now() -> int:
        seconds, micros = await gateway.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    began = await now()
    while await now() == began:
        pass


async def test_letters_are_listed_filtered_and_counted(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    other = namespace.partition("other")
    a, b = await worker(gateway, partition), await worker(gateway, other)
    await producer.enqueue_many("t", [{}] * 5, queue="default")
    await producer.enqueue("t", queue="other")
    kinds = [
        (Reason.TIMEOUT, "mail"),
        (Reason.TIMEOUT, "audit"),
        (Reason.CRASH_LOOP, "mail"),
        (Reason.IN_DOUBT, "mail"),
    ]
    *first, last = await read(a, 5)
    for number, (one, (reason, task)) in enumerate(zip(first, kinds, strict=True)):
        await bury_as(gateway, one, f"x{number}", task, reason)
    await next_millisecond(gateway)
    await bury_as(gateway, await read_one(b), "y", "mail", Reason.TIMEOUT)
    await next_millisecond(gateway)
    await bury_as(gateway, last, "x4", "audit", Reason.IN_DOUBT)

    async def listed(wanted: Filter, *, oldest_first: bool = False) -> list[str]:
        found = list_letters(gateway, [partition, other], wanted, oldest_first=oldest_first)
        return [one.id async for one in found]

    assert await listed(Filter()) == ["x4", "y", "x3", "x2", "x1", "x0"]
    assert await listed(Filter(), oldest_first=True) == ["x0", "x1", "x2", "x3", "y", "x4"]
    assert await listed(Filter(reason=Reason.TIMEOUT)) == ["y", "x1", "x0"]
    assert await listed(Filter(task="mail")) == ["y", "x3", "x2", "x0"]
    assert await listed(Filter(reason=Reason.TIMEOUT, task="mail")) == ["y", "x0"]
    assert await listed(Filter(task="nothing")) == []
    assert await count_letters(gateway, [partition, other]) == 6
    assert await find_letter(gateway, [partition], "y") is None
    assert (await letter_of(gateway, other, "y")).partition == other


async def test_an_unknown_reason_is_shown_unchanged(gateway: Gateway, partition: Partition) -> None:
    said = ("reason", "of_the_future", "evidence", "{}", "attempts", 1, "crashes", 0, "worker", "w")
    await gateway.command("XADD", partition.dead, "*", "id", "x", "task", "t", *said)
    found = [letter async for letter in list_letters(gateway, [partition], Filter())]
    assert [letter.summary()["reason"] for letter in found] == ["of_the_future"]


async def test_a_former_name_of_a_reason_is_read_as_the_present_one(gateway: Gateway, partition: Partition) -> None:
    fields = ("reason", "sealed", "evidence", "{}", "attempts", 1, "crashes", 0, "worker", "w")
    await gateway.command("XADD", partition.dead, "*", "id", "x", "task", "t", *fields)
    wanted = Filter(reason=Reason.UNDECRYPTABLE)
    found = [letter async for letter in list_letters(gateway, [partition], wanted)]
    assert [letter.summary()["reason"] for letter in found] == ["undecryptable"]


@pytest.mark.parametrize("oldest_first", [False, True])
async def test_letters_of_several_pages_are_listed_once_each(
    gateway: Gateway, partition: Partition, oldest_first: bool
) -> None:
    for number in range(401):
        await gateway.command(
            *("XADD", partition.dead, "*", "id", f"x{number}", "task", "t", "reason", "timeout"),
            *("evidence", "{}", "attempts", 1, "crashes", 0, "worker", "a", "at", 1),
        )
    found = [one.id async for one in list_letters(gateway, [partition], Filter(), oldest_first=oldest_first)]
    numbers = [f"x{number}" for number in range(401)]
    assert found == (numbers if oldest_first else numbers[::-1])


# unreadable messages

RAW: dict[str, tuple[bytes, ...]] = {
    "not UTF-8": (b"\xff\xfe", b"\x80\x00\x81", b"env", b"\xc3\x28"),
    "empty names and values": (b"", b"", b"env", b""),
    "line breaks and NUL": (b"a\r\nb", b"\r\n", b"nul\x00name", b"\x00"),
    "not an envelope": (b"payload", b'{"hello":1}'),
    "words of our own": (b"id", b"1", b"task", b"t", b"reason", b"r", b"evidence", b"e", b"raw:x", b"y"),
    "magic characters": (b"%d+(.*)", b"%1", b"^raw:$", b"%%"),
    "of a version to come": (b"env", b'{"v":99,"id":"z","task":"t"}', b"args", b"{}"),
}


@pytest.mark.parametrize("kind", RAW)
async def test_an_unreadable_message_is_buried_with_all_its_bytes(
    gateway: Gateway, partition: Partition, kind: str
) -> None:
    a = await worker(gateway, partition)
    entry = await send_raw(gateway, partition, *RAW[kind])
    taken = await read_one(a)
    with pytest.raises(UnreadableEnvelope):
        Envelope.decode(taken.fields.get(b"env", b""))
    task_id = await bury_raw(gateway, taken)
    assert task_id == f"unreadable-{entry.decode()}"
    (letter,) = await letters(gateway, partition)
    assert (letter.id, letter.reason, letter.envelope) == (task_id, Reason.UNREADABLE, None)
    fields = dict(zip(RAW[kind][::2], RAW[kind][1::2], strict=True))
    assert letter.raw == {name.decode("utf-8", "replace"): value for name, value in fields.items()}
    assert orjson.dumps(letter.summary())
    stored = (await gateway.command("XRANGE", partition.dead, "-", "+"))[0][1]
    kept = dict(zip(stored[::2], stored[1::2], strict=True))
    assert {name[4:]: value for name, value in kept.items() if name.startswith(b"raw:")} == fields


@pytest.mark.parametrize("kind", RAW)
async def test_a_replay_of_a_raw_letter_restores_the_message(gateway: Gateway, partition: Partition, kind: str) -> None:
    a = await worker(gateway, partition)
    await send_raw(gateway, partition, *RAW[kind])
    taken = await read_one(a)
    await bury_raw(gateway, taken)
    (letter,) = await letters(gateway, partition)
    assert await replay(gateway, letter, Replay())
    again = await read_one(a)
    assert again.fields == {**taken.fields, b"again": b"1"}
    assert await gateway.command("XLEN", partition.dead) == 0


async def test_a_raw_message_that_is_buried_repeatedly_does_not_grow(gateway: Gateway, partition: Partition) -> None:
    a = await worker(gateway, partition)
    await send_raw(gateway, partition, b"payload", b"1")
    for _ in range(4):
        taken = await read_one(a)
        await bury_raw(gateway, taken)
        (letter,) = await letters(gateway, partition)
        assert await replay(gateway, letter, Replay())
    assert (await read_one(a)).fields == {b"payload": b"1", b"again": b"1"}


async def test_a_replay_of_a_message_without_an_id_leaves_no_record(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    a = await worker(gateway, partition)
    await send_raw(gateway, partition, b"payload", b"1")
    task_id = await bury_raw(gateway, await read_one(a))
    assert await read_record(gateway, partition, task_id) is not None
    (letter,) = await letters(gateway, partition)
    await replay(gateway, letter, Replay())
    assert not [key for key in await keys(gateway, namespace) if b":record:" in key]


async def test_a_message_of_a_newer_version_is_buried_under_its_own_id(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """The producer that waits for it sees the outcome, and an upgraded worker can run it after a replay."""
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    (entry,) = await gateway.command("XRANGE", partition.ready, "-", "+")
    await gateway.command("DEL", partition.ready, partition.record("x"))
    newer = entry[1][1].replace(b'"v":1', b'"v":2')
    entry_id = await send_raw(gateway, partition, b"env", newer, b"args", b'{"n":1}')
    await gateway.command("HSET", partition.record("x"), "state", "queued", "entry", entry_id)
    a = await worker(gateway, partition)
    await bury_raw(gateway, await read_one(a), "x")
    record = await handle.record()
    assert (record.state, record.reason) == (State.DEAD, "unreadable")
    assert await replay(gateway, await letter_of(gateway, partition, "x"), Replay())
    assert (await handle.record()).state is State.QUEUED
    again = await read_one(a)
    assert (again.fields[b"env"], again.fields[b"args"]) == (newer, b'{"n":1}')


async def test_a_message_of_ten_thousand_fields_keeps_its_first_500(gateway: Gateway, partition: Partition) -> None:
    a = await worker(gateway, partition)
    fields = [part for n in range(10_000) for part in (b"f%d" % n, b"v%d" % n)]
    await send_raw(gateway, partition, *fields)
    taken = await read_one(a)
    assert len(taken.fields) == 10_000
    await bury_raw(gateway, taken)
    (letter,) = await letters(gateway, partition)
    assert letter.raw == {f"f{n}": b"v%d" % n for n in range(500)}
    assert await replay(gateway, letter, Replay())
    assert len((await read_one(a)).fields) == 501


async def test_a_message_of_ten_thousand_fields_can_be_claimed_and_released(
    gateway: Gateway, partition: Partition
) -> None:
    await send_raw(gateway, partition, *(part for n in range(10_000) for part in (b"f%d" % n, b"")))
    taken = await read_one(await worker(gateway, partition))
    second = await take_over(gateway, taken)
    assert len(second.fields) == 10_000
    await SETTLING["give_back"](gateway, second, "")
    assert (await claim_one(await worker(gateway, partition, name="c"))).count == second.count + 1


async def test_ten_thousand_fields_beside_an_envelope_are_ignored(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """A readable message with foreign fields settles like any other; only the fields of Perdure are kept."""
    envelope = Envelope(id="x", task="t").encode()
    strange = [part for n in range(10_000) for part in (b"f%d" % n, b"v")]
    for act in ("reschedule", "succeed"):
        entry = await send_raw(gateway, partition, *strange, b"env", envelope, b"args", b"{}")
        await gateway.command("HSET", partition.record("x"), "state", "queued", "entry", entry)
        await SETTLING[act](gateway, await read_one(await worker(gateway, partition)), "x")
        record = await gateway.command("HGETALL", partition.record("x"))
        assert len(record) < 40
        if act == "reschedule":
            await gateway.command("ZREM", partition.due, "x")


# replaying


async def test_a_replay_resets_the_counters_and_keeps_the_checkpoint(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x", counters=Counters(5, 2, 1))
    assert await replay(gateway, await letter_of(gateway, partition, "x"), Replay())
    assert await places(gateway, partition, "x") == [READY]
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes, record.replays) == (State.QUEUED, 0, 0, 1)
    assert (record.reason, record.error, record.finished_at) == (None, None, None)
    assert record.args == b'{"n":1}'
    again = await read_one(await worker(gateway, partition))
    history = await load_history(gateway, again, "x")
    assert again.has_history
    assert (history.counters, history.done) == (Counters(), {"list": b"[1]"})
    assert Envelope.decode(again.fields[b"env"]).headers == {"trace": "7"}


async def test_the_keys_of_a_replayed_task_do_not_expire(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    await replay(gateway, await letter_of(gateway, partition, "x"), Replay())
    assert await lifetimes(gateway, partition, "x") == {"record": -1, "steps": -1, "log": -1}
    types = [event.type for event in await read_events(gateway, partition, "x")]
    assert types == ["step_completed", "buried", "replayed"]


async def test_a_fresh_replay_starts_at_the_first_step(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    await replay(gateway, await letter_of(gateway, partition, "x"), Replay(fresh=True))
    again = await read_one(await worker(gateway, partition))
    history = await load_history(gateway, again, "x")
    assert (history.done, history.counters) == ({}, Counters())
    assert await gateway.command("EXISTS", partition.steps("x")) == 0
    assert (await read_events(gateway, partition, "x"))[-1].data == {"fresh": True}


async def test_a_fresh_replay_drops_the_handoff(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    """The worker died repeatedly between the handoff and its outcome; then an operator replays the task here."""
    await add_entries(gateway, delivery, "x", [Entry(Kind.TRANSFERRED, "x.h1", b"x.h1")])
    await bury_as(gateway, delivery, "x")
    assert await replay(gateway, await letter_of(gateway, partition, "x"), Replay(fresh=True))
    sent = await producer.send_message("x", "hello")
    assert sent.task_id == "x"


async def test_a_replay_can_change_the_arguments(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await bury_as(gateway, delivery, "x")
    await replay(gateway, await letter_of(gateway, partition, "x"), Replay(args=b'{"n":2}'))
    again = await read_one(await worker(gateway, partition))
    assert (again.fields[b"args"], ids([again])) == (b'{"n":2}', ["x"])


async def test_a_raw_replay_can_change_the_arguments(gateway: Gateway, partition: Partition) -> None:
    a = await worker(gateway, partition)
    await send_raw(gateway, partition, b"env", b"broken", b"args", b"[1", b"more", b"1")
    await bury_raw(gateway, await read_one(a))
    (letter,) = await letters(gateway, partition)
    await replay(gateway, letter, Replay(args=b"{}"))
    assert (await read_one(a)).fields == {b"again": b"1", b"env": b"broken", b"args": b"{}", b"more": b"1"}


async def test_concurrent_replays_store_one_message(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await bury_as(gateway, delivery, "x")
    letter = await letter_of(gateway, partition, "x")
    answers = await asyncio.gather(*(replay(gateway, letter, Replay()) for _ in range(10)))
    assert sorted(answers) == [False] * 9 + [True]
    assert await places(gateway, partition, "x") == [READY]
    assert await gateway.command("HGET", partition.record("x"), "replays") == b"1"


async def test_a_replayed_letter_is_not_replayed_or_purged_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    letter = await letter_of(gateway, partition, "x")
    await replay(gateway, letter, Replay())
    before = await dump(gateway, namespace)
    assert not await replay(gateway, letter, Replay(fresh=True))
    assert not await purge(gateway, letter)
    assert await dump(gateway, namespace) == before


async def test_the_former_letter_of_a_task_that_died_again_is_removed(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    first = await letter_of(gateway, partition, "x")
    await replay(gateway, first, Replay())
    await bury_as(gateway, await read_one(await worker(gateway, partition)), "x")
    before = await dump(gateway, namespace)
    assert not await replay(gateway, first, Replay())
    assert not await purge(gateway, first)
    assert await dump(gateway, namespace) == before
    second = await letter_of(gateway, partition, "x")
    assert second.entry != first.entry
    await replay(gateway, second, Replay())
    assert await gateway.command("HGET", partition.record("x"), "replays") == b"2"


async def test_a_letter_whose_record_has_expired_can_be_replayed(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    await gateway.command("DEL", partition.record("x"), partition.steps("x"), partition.log("x"))
    (letter,) = await letters(gateway, partition)
    assert await replay(gateway, letter, Replay())
    assert await places(gateway, partition, "x") == [READY]
    handle = await producer.find("x")
    assert handle is not None
    assert (await handle.record()).args == b'{"n":1}'
    again = await read_one(await worker(gateway, partition))
    await SETTLING["succeed"](gateway, again, "x")
    assert await handle.result() == {"ok": True}


@pytest.mark.parametrize("meanwhile", ["queued", "running", "scheduled", "succeeded"])
async def test_a_replay_refuses_a_letter_whose_id_was_enqueued_again(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    meanwhile: str,
) -> None:
    """The record expired before the letter was trimmed: a replay would put one task in two places."""
    await bury_as(gateway, delivery, "x")
    await gateway.command("DEL", partition.record("x"), partition.steps("x"), partition.log("x"))
    await producer.enqueue("t", {"n": 2}, task_id="x", delay=60 if meanwhile == "scheduled" else 0, queue="default")
    if meanwhile in ("running", "succeeded"):
        taken = await read_one(await worker(gateway, partition))
        if meanwhile == "succeeded":
            await SETTLING["succeed"](gateway, taken, "x")
    (letter,) = await letters(gateway, partition)
    before = await dump(gateway, namespace)
    assert not await replay(gateway, letter, Replay())
    assert await dump(gateway, namespace) == before
    assert await purge(gateway, letter)
    after = await dump(gateway, namespace)
    dead = partition.dead.encode()
    assert {key: after[key] for key in after if key != dead} == {key: before[key] for key in before if key != dead}


async def test_a_lost_reply_replays_once(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    await bury_as(gateway, delivery, "x")
    letter = await letter_of(gateway, partition, "x")
    async with lossy_gateway(gateway) as (lossy, line):
        line.lose(b"EVALSHA")
        assert not await replay(lossy, letter, Replay())  # it was replayed; the reply does not say by which caller
        assert line.lost == 1
    assert await places(gateway, partition, "x") == [READY]


async def test_a_replay_concurrent_with_a_purge_has_one_outcome(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 20, queue="default")
    a = await worker(gateway, partition)
    for one, handle in zip(await read(a, 20), handles, strict=True):
        await bury_as(gateway, one, handle.id)
    for letter in await letters(gateway, partition):
        acts = [replay(gateway, letter, Replay()), purge(gateway, letter)]
        random.shuffle(acts)
        answers = await asyncio.gather(*acts)
        assert sum(answers) == 1
        assert await places(gateway, partition, letter.id) in ([READY], [])


async def test_replay_all_respects_the_rate(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handles = await producer.enqueue_many("t", [{}] * 5, queue="default")
    a = await worker(gateway, partition)
    for one, handle in zip(await read(a, 5), handles, strict=True):
        await bury_as(gateway, one, handle.id)
    began = time.monotonic()
    found = list_letters(gateway, [partition], Filter(), oldest_first=True)
    done = [(letter.id, again) async for letter, again in replay_all(gateway, found, Replay(rate=50))]
    assert time.monotonic() - began >= 4 / 50
    assert done == [(handle.id, True) for handle in handles]
    assert ids(await read(a, 10)) == [handle.id for handle in handles]


@pytest.mark.parametrize("oldest_first", [False, True])
async def test_replay_all_replays_a_task_that_dies_again_once(
    gateway: Gateway, partition: Partition, producer: Producer, oldest_first: bool
) -> None:
    """The list is read page by page while workers bury tasks again: it must end."""
    handles = await producer.enqueue_many("t", [{}] * 250, queue="default")
    a = await worker(gateway, partition)
    for one, handle in zip(await read(a, 250), handles, strict=True):
        await bury_as(gateway, one, handle.id)
    count = 0
    found = list_letters(gateway, [partition], Filter(), oldest_first=oldest_first)
    async for letter, again in replay_all(gateway, found, Replay()):
        assert again
        await bury_as(gateway, await read_one(a), letter.id)
        count += 1
        assert count <= 250
    assert count == 250


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Replay(rate=rate)


# purging and trimming


async def test_a_purge_removes_all_keys_of_the_task(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    letter = await letter_of(gateway, partition, "x")
    assert await purge(gateway, letter)
    assert await places(gateway, partition, "x") == []
    assert not [key for key in await keys(gateway, namespace) if b":record:" in key]
    assert await count_letters(gateway, [partition]) == 0
    assert not await purge(gateway, letter)


async def test_purge_all_removes_the_letters_of_a_filter(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    a = await worker(gateway, partition)
    for number in range(6):
        await producer.enqueue("t", task_id=f"x{number}", queue="default")
        reason = Reason.TIMEOUT if number % 2 else Reason.CRASH_LOOP
        await bury_as(gateway, await read_one(a), f"x{number}", reason=reason)
    found = list_letters(gateway, [partition], Filter(reason=Reason.TIMEOUT))
    assert [(letter.id, gone) async for letter, gone in purge_all(gateway, found)] == [
        (name, True) for name in ("x5", "x3", "x1")
    ]
    assert [letter.id for letter in await letters(gateway, partition)] == ["x4", "x2", "x0"]


async def test_letters_past_their_retention_are_trimmed(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    assert await trim_letters(gateway, partition, DAY) == 0
    assert await places(gateway, partition, "x") == [DEAD]
    assert await trim_letters(gateway, partition, -10.0) == 1
    assert await count_letters(gateway, [partition]) == 0


async def test_a_trimmed_letter_leaves_no_record(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """The worker that buried it kept the record for longer: it would stay dead without a letter to replay."""
    a = await worker(gateway, partition)
    for number in range(250):
        await producer.enqueue("t", task_id=f"x{number}", queue="default")
        await bury_as(gateway, await read_one(a), f"x{number}", retention=DAY)
    await producer.enqueue("t", task_id="new", queue="default")
    await gateway.command("HDEL", partition.record("x7"), "dead")  # its id belongs to another task meanwhile
    assert await trim_letters(gateway, partition, -10.0) == 250
    assert await count_letters(gateway, [partition]) == 0
    kept = {key for key in await keys(gateway, namespace) if b":record:" in key}
    assert kept == {partition.record("new").encode(), partition.record("x7").encode()}


async def test_a_retention_longer_than_the_clock_trims_nothing(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """Milliseconds since 1970 less a hundred years are negative, which is no valid entry id."""
    await bury_as(gateway, delivery, "x", retention=100 * 365 * DAY)
    assert await trim_letters(gateway, partition, 100 * 365 * DAY) == 0
    assert await places(gateway, partition, "x") == [DEAD]


async def test_letters_of_an_unused_partition_are_an_empty_list(gateway: Gateway, partition: Partition) -> None:
    assert await letters(gateway, partition) == []
    assert await count_letters(gateway, [partition]) == 0
    assert await count_letters(gateway, []) == 0
    assert await find_letter(gateway, [partition], "x") is None
    assert await trim_letters(gateway, partition, DAY) == 0


async def test_a_task_whose_cancellation_was_requested_is_not_buried(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    """The request was accepted: the worker stores that the task was cancelled instead."""
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.cancel() is State.RUNNING
    before = await dump(gateway, namespace)
    assert not await bury(
        *(gateway, delivery, "x"), task="t", reason=Reason.TIMEOUT, evidence=EVIDENCE, counters=Counters(1, 0, 0)
    )
    assert await dump(gateway, namespace) == before


async def test_a_dead_task_is_not_cancelled(
    gateway: Gateway, namespace: Namespace, producer: Producer, delivery: Delivery
) -> None:
    await bury_as(gateway, delivery, "x")
    handle = await producer.find("x")
    assert handle is not None
    before = await dump(gateway, namespace)
    assert await handle.cancel() is State.DEAD
    assert await dump(gateway, namespace) == before


async def test_evidence_of_any_length_is_stored(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    try:
        raise ValueError("\ud800 " + "x" * 1_000_000)
    except ValueError as error:
        evidence = Evidence.of(error)
    await bury(
        gateway,
        delivery,
        "x",
        task="t",
        reason=Reason.NOT_RETRYABLE,
        evidence=evidence,
        counters=Counters(1),
    )
    letter = await letter_of(gateway, partition, "x")
    assert letter.error == "ValueError"
    assert len(letter.message) < 4_200
    assert "characters left out" in letter.message
    assert len(letter.traceback) < 16_300


def test_evidence_of_an_error_whose_str_raises_is_stored() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert Evidence.of(Mute()).message == "<no message: str() raised RuntimeError>"


async def test_lease_and_letter_of_a_claimed_task(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await age(gateway, delivery)
    second = await claim_one(await worker(gateway, partition, name="b"))
    assert await places(gateway, partition, "x") == [PENDING]
    await bury_as(gateway, second, "x")
    assert (await letter_of(gateway, partition, "x")).worker == "b"

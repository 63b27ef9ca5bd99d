"""The checkpoint in Redis: the next run finds each recorded step once, and only the owner of the delivery writes."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import (
    Encryptor,
    EntriesLost,
    Gateway,
    LeaseLost,
    Namespace,
    NotEncrypted,
    Partition,
    Producer,
    TamperedData,
)
from perdure.queues.delivery.checkpoint import Entry, History, Kind, last_step, load_history, write_entries
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, reschedule
from perdure.queues.delivery.step_pages import PAGE
from perdure.queues.event_log import read_events
from perdure.queues.security.keyring import read_keys
from perdure.queues.transport.pipelining import Command
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import claim_one, needs_one_server, promote, read_one, take_over, worker
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.lossy_proxy import lossy_gateway
from tests.support.stored_data import FIRST
from tests.support.task_places import dump, lifetimes


def done(step: str, value: bytes = b"1", log: bytes = b"{}") -> Entry:
    return Entry(Kind.DONE, step, value, log)


async def test_a_first_run_has_no_history(gateway: Gateway, delivery: Delivery) -> None:
    history = await load_history(gateway, delivery, "x")
    assert (history.counters, history.cancel) == (Counters(), False)
    assert (history.done, history.intents, history.saved) == ({}, {}, {})


async def test_the_next_run_finds_recorded_steps(gateway: Gateway, delivery: Delivery) -> None:
    entries = [done("list", b"[1,2]"), Entry(Kind.INTENT, "mail", b'{"to":1}'), Entry(Kind.SAVED, "sum", b"7")]
    assert await add_entries(gateway, delivery, "x", entries) == (False, 0)
    history = await load_history(gateway, await take_over(gateway, delivery), "x")
    assert history.done == {"list": b"[1,2]"}
    assert history.intents == {"mail": b'{"to":1}'}
    assert history.saved == {"sum": b"7"}


async def test_a_completed_step_removes_its_intent_and_progress(gateway: Gateway, delivery: Delivery) -> None:
    for kind in (Kind.INTENT, Kind.SAVED):
        await add_entries(gateway, delivery, "x", [Entry(kind, "mail", b"1"), Entry(kind, "other", b"2")])
    await add_entries(gateway, delivery, "x", [done("mail", b"3")])
    history = await load_history(gateway, delivery, "x")
    assert (history.done, history.intents, history.saved) == ({"mail": b"3"}, {"other": b"2"}, {"other": b"2"})


@pytest.mark.parametrize("kind", [Kind.DONE_WITH_EVENT, Kind.DROP])
async def test_an_intent_and_progress_that_follow_in_one_act_stay(
    gateway: Gateway, delivery: Delivery, kind: Kind
) -> None:
    """A failure of a step is recorded, and dropped, without the doubt and the progress of the step."""
    kept = [Entry(Kind.INTENT, "mail", b"1"), Entry(Kind.SAVED, "mail", b"2")]
    await add_entries(gateway, delivery, "x", kept)
    await add_entries(gateway, delivery, "x", [Entry(kind, "mail", b""), *kept])
    history = await load_history(gateway, await take_over(gateway, delivery), "x")
    assert (history.intents, history.saved) == ({"mail": b"1"}, {"mail": b"2"})
    assert history.done == ({"mail": b""} if kind is Kind.DONE_WITH_EVENT else {})


async def test_a_dropped_step_is_removed_and_others_stay(gateway: Gateway, delivery: Delivery) -> None:
    parts = [done("read/a"), Entry(Kind.INTENT, "read/b", b"1"), Entry(Kind.SAVED, "read/c", b"2"), done("read")]
    await add_entries(gateway, delivery, "x", parts)
    dropped = [Entry(Kind.DROP, key, b"") for key in ("read/a", "read/b", "read/c")]
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE_WITH_EVENT, "next", b"3"), *dropped])
    history = await load_history(gateway, await take_over(gateway, delivery), "x")
    assert (history.done, history.intents, history.saved) == ({"read": b"1", "next": b"3"}, {}, {})


async def test_an_event_is_logged_once_per_number(gateway: Gateway, delivery: Delivery, partition: Partition) -> None:
    first, second = (Entry(Kind.EVENT, "decided", number, b'{"choice":"go"}') for number in (b"1", b"2"))
    for entries in ([first], [first, second], [first, second]):  # as after lost replies
        await write_entries(gateway, delivery, "x", entries, first=1)
    assert [event.number for event in await read_events(gateway, partition, "x")] == [1, 2]
    assert (await load_history(gateway, await take_over(gateway, delivery), "x")).events == 2


async def test_an_event_from_which_the_log_may_start_deletes_what_is_before_the_former_one(
    gateway: Gateway, delivery: Delivery, partition: Partition
) -> None:
    kinds = [Kind.EVENT, Kind.BASE, Kind.EVENT, Kind.BASE, Kind.EVENT, Kind.BASE]
    events = [Entry(kind, kind.value, b"%d" % number, b"[]") for number, kind in enumerate(kinds, 1)]
    for count, left in ((2, [1, 2]), (4, [2, 3, 4]), (6, [4, 5, 6]), (6, [4, 5, 6])):
        await write_entries(gateway, delivery, "x", events[:count], first=1)  # the last one as after a lost reply
        found = await read_events(gateway, partition, "x")
        assert [(event.number, event.type) for event in found] == [(n, kinds[n - 1].value) for n in left]
    assert (await load_history(gateway, await take_over(gateway, delivery), "x")).events == 6


async def test_the_last_step_is_of_a_function_or_a_plan(
    gateway: Gateway, delivery: Delivery, partition: Partition
) -> None:
    await add_entries(gateway, delivery, "x", [done("list")])
    assert await last_step(gateway, partition, "x") == "list"
    planned = Entry(Kind.EVENT, "step_completed", b"1", b'{"step":"read"}')
    await add_entries(gateway, delivery, "x", [planned, Entry(Kind.EVENT, "decided", b"2", b'{"choice":"go"}')])
    assert await last_step(gateway, partition, "x") == "read"


async def test_steps_of_the_same_name_and_different_kinds_are_separate(gateway: Gateway, delivery: Delivery) -> None:
    """A key may contain colons, and the separator of the kinds."""
    names = ["d:x", "i:d:x", "s:", "a:b:c", "größe", "two words", "*"]
    await add_entries(gateway, delivery, "x", [done(name, name.encode()) for name in names])
    assert (await load_history(gateway, delivery, "x")).done == {name: name.encode() for name in names}


async def test_values_are_stored_byte_by_byte(gateway: Gateway, delivery: Delivery) -> None:
    values = {"empty": b"", "zero": b"a\x00b", "raw": bytes(range(256)), "crlf": b"\r\n$-1\r\n"}
    await add_entries(gateway, delivery, "x", [done(name, value) for name, value in values.items()])
    assert (await load_history(gateway, delivery, "x")).done == values


async def test_a_step_that_is_written_repeatedly_is_logged_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await write_entries(gateway, delivery, "x", [done("list", b"[1]", b'{"ms":3}')], first=1)
    before = await dump(gateway, namespace)
    await write_entries(gateway, delivery, "x", [done("list", b"[1]", b'{"ms":4}')], first=1)
    assert await dump(gateway, namespace) == before
    (event,) = await read_events(gateway, partition, "x")
    assert (event.type, event.step, event.data) == ("step_completed", "list", {"ms": 3})


async def test_a_batch_is_written_and_logged_in_order(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await add_entries(gateway, delivery, "x", [Entry(Kind.SAVED, "b", b"1"), done("a"), done("b"), done("c")])
    assert [event.step for event in await read_events(gateway, partition, "x")] == ["a", "b", "c"]
    assert (await load_history(gateway, delivery, "x")).saved == {}


async def test_a_step_dropped_with_its_parent_is_logged_once(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """The steps within a step of an agent's plan may be sent together with it, when no caller waits for them."""
    act = [done("read/list"), Entry(Kind.EVENT, "step_completed", b"1"), Entry(Kind.DROP, "read/list", b"")]
    await write_entries(gateway, delivery, "x", act, first=1)
    await write_entries(gateway, delivery, "x", [*act, done("next"), Entry(Kind.EVENT, "decided", b"2")], first=1)
    logged = [(event.type, event.step, event.number) for event in await read_events(gateway, partition, "x")]
    assert logged == [
        ("step_completed", "read/list", None),
        ("step_completed", None, 1),
        ("step_completed", "next", None),
        ("decided", None, 2),
    ]


async def test_entries_are_numbered_over_all_runs(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await write_entries(gateway, delivery, "x", [done("a"), done("b")], first=1)
    second = await take_over(gateway, delivery)
    assert (await load_history(gateway, second, "x")).entries == 2
    await write_entries(gateway, second, "x", [done("c"), Entry(Kind.SAVED, "d", b"1")], first=3)
    await SETTLING["reschedule"](gateway, second, "x")
    await promote(gateway, partition, "x")
    third = await read_one(await worker(gateway, partition))
    assert (await load_history(gateway, third, "x")).entries == 4
    logged = await gateway.command("XRANGE", partition.log("x"), "-", "+")
    numbers = [fields[fields.index(b"e") + 1] for _, fields in logged if b"e" in fields]
    assert numbers == [b"1", b"2", b"3"]


async def test_entries_that_are_stored_are_skipped_and_the_others_are_stored(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    """A run that does not know what arrived sends its entries again, merged with later ones."""
    saved = [Entry(Kind.SAVED, "sum", b"%d" % n) for n in range(4)]
    await write_entries(gateway, delivery, "x", saved[:2], first=1)
    await write_entries(gateway, delivery, "x", [*saved[1:3], done("list"), saved[3]], first=2)
    history = await load_history(gateway, delivery, "x")
    assert (history.saved, history.entries) == ({"sum": b"3"}, 5)
    assert [event.step for event in await read_events(gateway, partition, "x")] == ["list"]


async def test_an_entry_that_arrives_late_changes_nothing(
    gateway: Gateway, namespace: Namespace, delivery: Delivery
) -> None:
    """It was sent again on another connection, and others followed: progress never goes back."""
    for number in range(1, 4):
        await write_entries(gateway, delivery, "x", [Entry(Kind.SAVED, "sum", b"%d" % number)], first=number)
    await write_entries(gateway, delivery, "x", [Entry(Kind.DROP, "sum", b"")], first=4)
    before = await dump(gateway, namespace)
    for number in range(1, 5):
        await write_entries(gateway, delivery, "x", [Entry(Kind.SAVED, "sum", b"%d" % number)], first=number)
    assert await dump(gateway, namespace) == before


@pytest.mark.parametrize("stored", [0, 2])
async def test_entries_that_would_leave_a_gap_are_refused(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, stored: int
) -> None:
    """Redis has lost what it had confirmed; the run sends it again together with the rest."""
    entries = [done(name) for name in "abcd"]
    if stored:
        await write_entries(gateway, delivery, "x", entries[:stored], first=1)
    before = await dump(gateway, namespace)
    with pytest.raises(EntriesLost) as refused:
        await write_entries(gateway, delivery, "x", entries[3:], first=4)
    assert (refused.value.last, refused.value.task_id) == (stored, "x")
    assert await dump(gateway, namespace) == before
    await write_entries(gateway, delivery, "x", entries[stored:], first=stored + 1)
    assert set((await load_history(gateway, delivery, "x")).done) == set("abcd")


async def test_a_lost_reply_records_once(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        line.lose(queue_script("write_checkpoint").sha.encode())
        await add_entries(lossy, delivery, "x", [done("list"), done("sum")])
        assert line.lost == 1
    assert [event.step for event in await read_events(gateway, partition, "x")] == ["list", "sum"]


async def test_a_refused_batch_stores_nothing(gateway: Gateway, namespace: Namespace, delivery: Delivery) -> None:
    await take_over(gateway, delivery)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost, match="record of list, sum"):
        await add_entries(gateway, delivery, "x", [done("list"), Entry(Kind.INTENT, "sum", b"1")])
    assert await dump(gateway, namespace) == before


async def test_only_the_owner_of_two_concurrent_runs_writes(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    second = await take_over(gateway, delivery)
    await asyncio.gather(
        *(write_entries(gateway, delivery, "x", [done(f"old{n}")], first=n + 1) for n in range(10)),
        *(write_entries(gateway, second, "x", [done(f"new{n}")], first=n + 1) for n in range(10)),
        return_exceptions=True,
    )
    assert set((await load_history(gateway, second, "x")).done) == {f"new{n}" for n in range(10)}
    assert len(await read_events(gateway, partition, "x")) == 10


async def test_a_write_returns_a_request_to_cancel_and_the_number_of_the_last_message(
    gateway: Gateway, producer: Producer, delivery: Delivery
) -> None:
    handle = await producer.find("x")
    assert handle is not None
    assert await add_entries(gateway, delivery, "x", [done("a")]) == (False, 0)
    first = await handle.send("one")
    assert await add_entries(gateway, delivery, "x", [done("b")]) == (False, first.number)
    second = await handle.send("two")
    used = [Entry(Kind.CONSUMED, str(one.number), b"") for one in (first, second)]
    assert await add_entries(gateway, delivery, "x", used) == (False, second.number), "also if it was used"
    await handle.cancel()
    assert await add_entries(gateway, delivery, "x", [done("c")]) == (True, second.number)
    assert await write_entries(gateway, delivery, "x", [done("c")], first=5) == (True, second.number), "repeated"
    assert set((await load_history(gateway, delivery, "x")).done) == {"a", "b", "c"}


async def test_counters_are_kept_over_crashes_retries_and_releases(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    second = await take_over(gateway, delivery, "b")
    third = await take_over(gateway, second, "c")
    assert (await load_history(gateway, third, "x")).counters == Counters(crashes=2)
    await reschedule(gateway, third, "x", Counters(1, 2, 1), delay=1, event="attempt_failed", data={})
    await promote(gateway, partition, "x")
    fourth = await read_one(await worker(gateway, partition))
    assert (await load_history(gateway, fourth, "x")).counters == Counters(1, 2, 1)
    await SETTLING["release"](gateway, fourth, "x")
    fifth = await claim_one(await worker(gateway, partition, name="d"))
    assert (await load_history(gateway, fifth, "x")).counters == Counters(1, 2, 1)
    sixth = await take_over(gateway, fifth, "e")
    assert (await load_history(gateway, sixth, "x")).counters == Counters(1, 3, 1)


async def test_a_retry_keeps_the_whole_checkpoint(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await add_entries(gateway, delivery, "x", [done("a"), Entry(Kind.INTENT, "b", b"2"), Entry(Kind.SAVED, "c", b"3")])
    before = await load_history(gateway, delivery, "x")
    await SETTLING["reschedule"](gateway, delivery, "x")
    await promote(gateway, partition, "x")
    after = await load_history(gateway, await read_one(await worker(gateway, partition)), "x")
    assert (after.done, after.intents, after.saved) == (before.done, before.intents, before.saved)


async def test_the_checkpoint_of_a_live_task_does_not_expire(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await add_entries(gateway, delivery, "x", [done("a")])
    assert await lifetimes(gateway, partition, "x") == {"record": -1, "steps": -1, "log": -1}


async def test_events_can_be_read_from_any_id(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await add_entries(gateway, delivery, "x", [done(name) for name in "abcd"])
    events = await read_events(gateway, partition, "x")
    assert [one.step for one in await read_events(gateway, partition, "x", after=events[1].id)] == ["c", "d"]
    assert [one.step for one in await read_events(gateway, partition, "x", limit=3)] == ["a", "b", "c"]
    assert events[0].summary() | {"id": "", "at": 0} == {
        "id": "",
        "at": 0,
        "type": "step_completed",
        "step": "a",
        "data": {},
    }


# large checkpoints

NAMES = {
    "counted": ["read", *(f"read#{number}" for number in range(2, 1400))],
    "numbered": [f"page-{number}" for number in range(1400)],
    "padded": [f"page-{number:03d}/fetch" for number in range(1400)],
    "several": [f"{name}#{number}" for number in range(1, 500) for name in ("fetch", "parse", "store")],
    "without order": [hashlib.sha256(str(number).encode()).hexdigest() for number in range(1400)],
    "mixed": [f"page-{number}" if number % 2 else f"{number}{'x' * (number % 7)}" for number in range(1400)],
}
ABSENT = ["read#1400", "read#1401", "page-1400", "page-1401", "page-1402/fetch", "other", "fetch#500", "x#2", "1"]


async def large(gateway: Gateway, delivery: Delivery, names: Sequence[str]) -> History:
    """Return the history of a task with these steps, an intent and saved progress."""
    entries = [done(name, name.encode()) for name in names]
    entries += [Entry(Kind.INTENT, "mail", b"1"), *(Entry(Kind.SAVED, f"part-{number}", b"2") for number in range(5))]
    for start in range(0, len(entries), 200):
        await add_entries(gateway, delivery, "x", entries[start : start + 200])
    return await load_history(gateway, delivery, "x")


def measure_pages(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, size: Callable[[Sequence[Any]], int]) -> list[int]:
    """Return a list to which the size of each page is added that is read from now on, or was read ahead."""
    sizes: list[int] = []
    pipeline, submit_now = gateway.pipeline, gateway.submit_now

    async def measuring(commands: Sequence[Command], **options: Any) -> list[Any]:
        replies = await pipeline(commands, **options)
        sizes.append(sum(size(page) for page in replies if isinstance(page, list)))
        return replies

    def measuring_ahead(*command: Any) -> asyncio.Future[Any]:
        reply = submit_now(*command)
        reply.add_done_callback(lambda done: sizes.append(size(done.result())))
        return reply

    monkeypatch.setattr(gateway, "pipeline", measuring)
    monkeypatch.setattr(gateway, "submit_now", measuring_ahead)
    return sizes


async def take(history: History, step: str) -> bytes | None:
    """Read a record and use it, as a run does when it calls the step."""
    record = await history.read_record(step)
    if record is not None:
        assert history.take_known(step) == record
    return record


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled", "at once"])
@pytest.mark.parametrize("kind", NAMES)
async def test_each_step_of_a_large_checkpoint_is_found(
    gateway: Gateway, delivery: Delivery, kind: str, order: str
) -> None:
    names = NAMES[kind]
    history = await large(gateway, delivery, names)
    assert history.pages is not None
    assert len(history.done) < len(names)
    assert history.records == len(names) + 6
    asked = [*names, *(name for name in ABSENT if name not in names)]
    if order == "backward":
        asked.reverse()
    elif order == "shuffled":
        random.Random(3).shuffle(asked)
    if order == "at once":
        found = await asyncio.gather(*(take(history, name) for name in asked))
    else:
        found = [await take(history, name) for name in asked]
    assert found == [name.encode() if name in set(names) else None for name in asked]
    for name in names[::97]:  # also after it was used
        assert await history.read_record(name) == name.encode()


@pytest.mark.parametrize("kind", ["numbered", "without order"])
async def test_a_step_that_is_not_recorded_brings_its_intent_and_its_progress(
    gateway: Gateway, delivery: Delivery, kind: str
) -> None:
    history = await large(gateway, delivery, NAMES[kind])
    for name in NAMES[kind][:600]:
        assert await take(history, name) is not None
    assert await history.read_record("mail") is None
    assert history.intents == {"mail": b"1"}
    for number in range(5):
        assert await history.read_record(f"part-{number}") is None
    assert history.saved == {f"part-{number}": b"2" for number in range(5)}


async def test_the_intent_of_a_recorded_step_is_read_when_it_is_asked_for(gateway: Gateway, delivery: Delivery) -> None:
    """A step that runs again with other arguments may have been cut off in that."""
    history = await large(gateway, delivery, NAMES["numbered"])
    await add_entries(gateway, delivery, "x", [Entry(Kind.INTENT, "page-7", b"3")])
    assert await history.read_record("page-7") == b"page-7"
    await history.read_unfinished("page-7")
    assert history.intents["page-7"] == b"3"


async def test_what_a_run_knows_is_not_replaced_by_a_later_read(gateway: Gateway, delivery: Delivery) -> None:
    history = await large(gateway, delivery, NAMES["numbered"])
    history.saved["part-1"] = b"newer"
    await history.read_unfinished("part-1", "part-2")
    await history.read_all()
    assert history.saved == {f"part-{number}": b"newer" if number == 1 else b"2" for number in range(5)}
    assert history.intents == {"mail": b"1"}


@pytest.mark.parametrize(("kind", "most"), [("counted", 8), ("numbered", 8), ("several", 10), ("without order", 10)])
async def test_a_large_checkpoint_is_read_in_few_pages(
    gateway: Gateway, delivery: Delivery, kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await large(gateway, delivery, NAMES[kind])
    sizes = measure_pages(gateway, monkeypatch, len)
    known = [len(history.done)]
    for name in NAMES[kind]:
        assert await take(history, name) is not None
        known.append(len(history.done))
    assert len(sizes) <= most
    assert max(sizes) <= 2 * PAGE
    if kind != "without order":
        assert max(known) <= 3 * PAGE  # records that were used are released
    del sizes[:]
    following = [f"{NAMES[kind][-1].partition('#')[0]}#{number}" for number in range(1400, 1600)]
    assert [await take(history, name) for name in following] == [None] * len(following)
    assert len(sizes) <= 2  # steps that are not recorded are read ahead as well


async def test_all_records_of_a_large_checkpoint_include_those_that_were_used(
    gateway: Gateway, delivery: Delivery
) -> None:
    history = await large(gateway, delivery, NAMES["numbered"])
    for name in NAMES["numbered"][:700]:
        assert await take(history, name) is not None
    await history.read_all()
    assert history.done == {name: name.encode() for name in NAMES["numbered"]}
    assert await history.read_record("other") is None


async def test_pages_of_large_records_have_fewer_of_them(
    gateway: Gateway, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(1, 601, 100):
        entries = [done(f"page-{number}", b"x" * 20_000) for number in range(first, first + 100)]
        await add_entries(gateway, delivery, "x", entries)
    history = await load_history(gateway, delivery, "x")
    sizes = measure_pages(gateway, monkeypatch, lambda page: sum(map(len, filter(None, page))))
    for number in range(1, 601):
        assert await take(history, f"page-{number}") == b"x" * 20_000
    assert max(sizes[1:]) < 1.1 * 2**20
    assert 1 < len(sizes) < 20


async def test_a_changed_or_plain_record_is_refused_when_its_page_is_read(gateway: Gateway, delivery: Delivery) -> None:
    cipher = Encryptor(read_keys(FIRST, "the test")).of(delivery.partition, "x")
    entries = [done(f"page-{number}").encrypted(cipher) for number in range(1, 1200)]
    for start in range(0, len(entries), 200):
        await add_entries(gateway, delivery, "x", entries[start : start + 200])
    history = await load_history(gateway, delivery, "x")
    history.decrypt(cipher)
    one, other = [entry.step for entry in entries if entry.step not in history.done][:2]
    steps = delivery.partition.steps("x")
    await gateway.command("HSET", steps, f"d:{other}", await gateway.command("HGET", steps, f"d:{one}"))
    with pytest.raises(TamperedData):
        await history.read_record(other)
    await gateway.command("HSET", steps, f"d:{other}", b"{}\n1")
    assert history.pages is not None
    history.pages.cipher = Encryptor(read_keys(FIRST, "the test"), required=True).of(delivery.partition, "x")
    with pytest.raises(NotEncrypted):
        await history.read_record(other)


def reported(done: int) -> Entry:
    return Entry(Kind.PROGRESS, "", b'{"done":%d,"total":10,"note":"page"}' % done)


async def test_progress_is_replaced_fenced_and_not_logged(
    gateway: Gateway, producer: Producer, delivery: Delivery
) -> None:
    handle = await producer.find("x")
    assert handle is not None
    await write_entries(gateway, delivery, "x", [reported(1), reported(2)], first=1)
    progress = await handle.progress()
    assert progress is not None
    assert (progress.done, progress.total, progress.note) == (2, 10, "page")
    assert [event.type async for event in handle.events(follow=False)] == []
    await write_entries(gateway, delivery, "x", [reported(1)], first=1)
    assert await handle.progress() == progress, "it is stored already"
    await take_over(gateway, delivery)
    with pytest.raises(LeaseLost):
        await write_entries(gateway, delivery, "x", [reported(3)], first=3)
    assert await handle.progress() == progress


@pytest.mark.parametrize(("fresh", "kept"), [(False, True), (True, False)])
async def test_progress_is_kept_by_the_next_run_unless_it_starts_fresh(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, fresh: bool, kept: bool
) -> None:
    handle = await producer.find("x")
    assert handle is not None
    await write_entries(gateway, delivery, "x", [reported(2)], first=1)
    await SETTLING["bury"](gateway, delivery, "x")
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    assert await replay(gateway, letter, Replay(fresh=fresh))
    assert (await handle.progress() is not None) is kept

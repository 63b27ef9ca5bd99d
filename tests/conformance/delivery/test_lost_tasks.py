"""Tasks that another program took out of the queue: they are put back once, and no late delivery settles them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, Refused, State, read_record
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history, write_entries
from perdure.queues.delivery.leases import Delivery, RunStatus
from perdure.queues.delivery.lost_tasks import Place, find_places, put_back_lost, replace_exhausted
from perdure.queues.derived_tasks import read_task_input
from perdure.queues.keys import GROUP, RELEASED

from tests.support.consumers import (
    claim_all,
    consumers,
    ids,
    make_due,
    needs_server,
    pending,
    promote,
    read,
    read_one,
    take_over,
    worker,
)
from tests.support.delivery_calls import SETTLING, WRITING, beat
from tests.support.task_places import DUE, PENDING, READY, dump, places

LAST_ID = "18446744073709551615-18446744073709551615"
FAR_ID = "18446744073709551614-0"

Mistake = Callable[[Gateway, Partition, Delivery], Awaitable[object]]


async def _acknowledge(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await gateway.command("XACK", partition.ready, GROUP, delivery.entry)


async def _delete_consumer(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await gateway.command("XGROUP", "DELCONSUMER", partition.ready, GROUP, delivery.worker)


async def _delete_both(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await _acknowledge(gateway, partition, delivery)
    await gateway.command("XDEL", partition.ready, delivery.entry)


async def _delete_stream(gateway: Gateway, partition: Partition, delivery: Delivery) -> None:
    await gateway.command("DEL", partition.ready)


MISTAKES: dict[str, Mistake] = {
    "XACK": _acknowledge,
    "XGROUP DELCONSUMER": _delete_consumer,
    "XACK and XDEL": _delete_both,
    "DEL": _delete_stream,
}


async def stored(producer: Producer, *task_ids: str) -> None:
    for task_id in task_ids:
        await producer.enqueue("t", {"n": task_id}, task_id=task_id, queue="default")


async def test_a_sound_task_stays_where_it_is(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "read", "released", "suspect", "retried", "ended", "new")
    await producer.enqueue("t", delay=60, task_id="later", queue="default")
    a = await worker(gateway, partition)
    running, released, suspect, retried, ended = await read(a, 5)
    await SETTLING["release"](gateway, released, "released")
    await SETTLING["reschedule"](gateway, retried, "retried")
    await SETTLING["succeed"](gateway, ended, "ended")
    del running, suspect
    before = await dump(gateway, namespace)
    assert await put_back_lost(gateway, partition, 0.0) == 0
    await gateway.command("DEL", partition.checked)
    assert await dump(gateway, namespace) == before


async def test_a_task_whose_message_was_deleted_is_put_back_with_its_payload(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "x")
    await producer.enqueue("t", {"n": 1}, task_id="y", queue="default", headers={"a": "b"})
    told = await read_task_input(gateway, partition, "x"), await read_task_input(gateway, partition, "y")
    at = (await read_record(gateway, partition, "x") or pytest.fail()).enqueued_at
    await gateway.command("XTRIM", partition.ready, "MAXLEN", 0)
    assert await find_places(gateway, partition, ["x", "y", "z"]) == [Place.NO_MESSAGE, Place.NO_MESSAGE, Place.SOUND]
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await put_back_lost(gateway, partition, 0.0) == 2
    assert await put_back_lost(gateway, partition, 0.0) == 0
    assert await find_places(gateway, partition, ["x", "y"]) == [Place.SOUND, Place.SOUND]
    a = await worker(gateway, partition)
    deliveries = await read(a, 3)
    assert ids(deliveries) == ["x", "y"]
    assert [delivery.fields[b"args"] for delivery in deliveries] == [b'{"n":"x"}', b'{"n":1}']
    assert (await read_task_input(gateway, partition, "x"), await read_task_input(gateway, partition, "y")) == told
    assert (await read_record(gateway, partition, "x") or pytest.fail()).enqueued_at == at
    for delivery in deliveries:
        await SETTLING["succeed"](gateway, delivery, ids([delivery])[0])
    assert (await read_record(gateway, partition, "x") or pytest.fail()).enqueued_at == at


@pytest.mark.parametrize("name", ['a "name"', "a\\b", "\x00\x1f\x7f", "h\u00e9 \U0001f600", "a/b"])
async def test_the_names_of_a_task_and_its_app_come_back(
    gateway: Gateway, partition: Partition, producer: Producer, name: str
) -> None:
    await producer.enqueue(name, task_id="x", queue="default")
    before = await read_task_input(gateway, partition, "x")
    await gateway.command("XTRIM", partition.ready, "MAXLEN", 0)
    assert await put_back_lost(gateway, partition, 0.0) == 1
    assert (await read_task_input(gateway, partition, "x")).envelope == before.envelope


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("act", [*SETTLING, *WRITING])
async def test_a_former_delivery_of_a_task_that_was_put_back_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, mistake: str, act: str
) -> None:
    """Also where the same worker reads the task again: its fence is another one."""
    await stored(producer, "x")
    a = await worker(gateway, partition)
    former = await read_one(a)
    await WRITING["record"](gateway, former, "x")
    await MISTAKES[mistake](gateway, partition, former)
    expected = Place.SKIPPED if mistake in ("XACK", "XGROUP DELCONSUMER") else Place.NO_MESSAGE
    assert await find_places(gateway, partition, ["x"]) == [expected]
    assert await put_back_lost(gateway, partition, 0.0) == 1
    await a.create_groups()
    assert await places(gateway, partition, "x") == [READY]
    newer = await read_one(await worker(gateway, partition))
    assert newer.fence != former.fence
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await (SETTLING | WRITING)[act](gateway, former, "x")
    assert await dump(gateway, namespace) == before
    history = await load_history(gateway, newer, "x")
    assert (history.lost, history.entries) == (0, 4)  # the checkpoint is kept, and nothing counts as a crash
    await SETTLING["succeed"](gateway, newer, "x")


async def test_a_run_with_a_heartbeat_just_now_is_left_alone(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "x")
    delivery = await read_one(await worker(gateway, partition))
    await beat(gateway, (delivery, "x", RunStatus(1.0)))
    await gateway.command("XACK", partition.ready, GROUP, delivery.entry)
    assert await put_back_lost(gateway, partition, 60.0) == 0
    await gateway.command("HSET", partition.record("x"), "alive", 1, "lost", lost_at(delivery, 1))
    assert await put_back_lost(gateway, partition, 60.0) == 1


def lost_at(delivery: Delivery, ms: int) -> bytes:
    """Return the field of a record that says since when its message is lost."""
    return b"%b %d" % (delivery.entry, ms)


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_run_without_a_heartbeat_yet_is_left_alone_for_a_lease(
    gateway: Gateway, partition: Partition, producer: Producer, mistake: str
) -> None:
    await stored(producer, "x")
    a = await worker(gateway, partition)
    delivery = await read_one(a)
    await MISTAKES[mistake](gateway, partition, delivery)
    for _ in range(2):
        assert await put_back_lost(gateway, partition, 60.0) == 0
        assert await find_places(gateway, partition, ["x"]) != [Place.SOUND]
    record = partition.record("x")
    earlier = await gateway.command("HGET", record, "lost")
    assert earlier.startswith(delivery.entry + b" ")
    await gateway.command("HSET", record, "lost", lost_at(delivery, 1))
    assert await put_back_lost(gateway, partition, 60.0) == 1
    assert await gateway.command("HGET", record, "lost") is None
    await a.create_groups()
    again = await read_one(a)
    await gateway.command("HSET", record, "lost", lost_at(delivery, 1))  # of the former message
    await gateway.command("XACK", partition.ready, GROUP, again.entry)
    assert await put_back_lost(gateway, partition, 60.0) == 0


async def test_a_message_that_was_never_delivered_is_put_back_at_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "x", "y")
    await read_one(await worker(gateway, partition))
    await gateway.command("XTRIM", partition.ready, "MAXLEN", 0)
    assert await put_back_lost(gateway, partition, 60.0) == 1
    assert await find_places(gateway, partition, ["x", "y"]) == [Place.SOUND, Place.SOUND]


@pytest.mark.parametrize("act", ["succeed", "cancelled", "reschedule", "park", "bury"])
async def test_a_delivery_whose_message_was_deleted_settles(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    await stored(producer, "x")
    delivery = await read_one(await worker(gateway, partition))
    await gateway.command("XDEL", partition.ready, delivery.entry)
    assert await find_places(gateway, partition, ["x"]) == [Place.SOUND]
    assert await put_back_lost(gateway, partition, 0.0) == 0
    await SETTLING[act](gateway, delivery, "x")
    assert await pending(gateway, partition) == []
    if act == "bury":
        (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
        assert await replay(gateway, letter, Replay())
    elif act in ("reschedule", "park"):
        assert await promote(gateway, partition, "x") == 1
    else:
        assert (await read_task_input(gateway, partition, "x")).arguments == b'{"n":"x"}'
        return
    again = await read_one(await worker(gateway, partition))
    assert again.fields[b"args"] == b'{"n":"x"}'
    await SETTLING["succeed"](gateway, again, "x")


@pytest.mark.parametrize("how", ["lease", "released", "suspect"])
async def test_a_pending_entry_without_a_message_is_put_back_once_it_was_claimed(
    gateway: Gateway, partition: Partition, producer: Producer, how: str
) -> None:
    await stored(producer, "x")
    delivery = await read_one(await worker(gateway, partition))
    if how == "released":
        await SETTLING["release"](gateway, delivery, "x")
    await gateway.command("XDEL", partition.ready, delivery.entry)
    assert await claim_all(await worker(gateway, partition, name="b", lease=0)) == []
    assert await put_back_lost(gateway, partition, 0.0) == 1
    assert await places(gateway, partition, "x") == [READY]


async def test_ids_that_a_deleted_stream_gives_again_confuse_no_tasks(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "x", "y", "z")
    entries = [entry for entry, _ in await gateway.command("XRANGE", partition.ready, "-", "+")]
    messages = [message for _, message in await gateway.command("XRANGE", partition.ready, "-", "+")]
    await gateway.command("DEL", partition.ready)
    await gateway.command("XADD", partition.ready, entries[0], *messages[1])  # y has the id of x
    await gateway.command("HSET", partition.record("y"), "entry", entries[0])
    ahead = b"%d-5" % (int(entries[2].partition(b"-")[0]) + 3_600_000)  # the clock was set back to this millisecond
    await gateway.command("HSET", partition.record("z"), "entry", ahead)
    assert await find_places(gateway, partition, ["x", "y", "z"]) == [Place.NO_MESSAGE, Place.SOUND, Place.NO_MESSAGE]
    assert await put_back_lost(gateway, partition, 0.0) == 2
    assert await put_back_lost(gateway, partition, 0.0) == 0
    assert sorted(ids(await read(await worker(gateway, partition), 5))) == ["x", "y", "z"]


@pytest.mark.parametrize("how", ["XGROUP SETID", "XGROUP DESTROY"])
async def test_a_run_that_does_not_know_the_checkpoint_writes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, how: str
) -> None:
    """A group that reads a message again as a new one would repeat the run of the first delivery."""
    await stored(producer, "x")
    first = await read_one(await worker(gateway, partition))
    entries = [Entry(Kind.DONE, "a", b"1"), Entry(Kind.DONE, "b", b"2")]
    for _ in range(2):  # a reply was lost
        await write_entries(gateway, first, "x", entries, first=1)
    if how == "XGROUP SETID":
        await gateway.command("XGROUP", "SETID", partition.ready, GROUP, "0")
    else:
        await gateway.command("XGROUP", "DESTROY", partition.ready, GROUP)
    b = await worker(gateway, partition, name="b")
    await b.create_groups()
    second = await read_one(b)
    assert (second.count, second.has_history) == (1, False)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await write_entries(gateway, second, "x", entries, first=1)
    assert await dump(gateway, namespace) == before
    third = await take_over(gateway, second, "c")
    assert (await load_history(gateway, third, "x")).entries == 2
    await SETTLING["succeed"](gateway, third, "x")


async def test_new_messages_that_a_group_skips_are_put_back(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "x", "y")
    a = await worker(gateway, partition)
    await gateway.command("XGROUP", "SETID", partition.ready, GROUP, "$")
    assert await read(a, 5) == []
    assert await find_places(gateway, partition, ["x", "y"]) == [Place.SKIPPED] * 2
    assert await put_back_lost(gateway, partition, 0.0) == 2
    assert ids(await read(a, 5)) == ["x", "y"]
    assert await gateway.command("XLEN", partition.ready) == 2


@pytest.mark.parametrize("kind", ["delay", "retry", "wait"])
async def test_a_due_time_that_was_deleted_is_set_again(
    gateway: Gateway, partition: Partition, producer: Producer, kind: str
) -> None:
    """At its time; a task that waits is due now, since a message may have come."""
    await producer.enqueue("t", task_id="x", delay=60 if kind == "delay" else 0, queue="default")
    if kind != "delay":
        act = SETTLING["reschedule" if kind == "retry" else "park"]
        await act(gateway, await read_one(await worker(gateway, partition)), "x")
    due = await gateway.command("ZSCORE", partition.due, "x")
    await gateway.command("DEL", partition.due)
    assert await find_places(gateway, partition, ["x"]) == [Place.NOT_DUE]
    assert await put_back_lost(gateway, partition, 0.0) == 1
    assert await places(gateway, partition, "x") == [DUE]
    score = await gateway.command("ZSCORE", partition.due, "x")
    assert float(score) < float(due) if kind == "wait" else score == due
    assert await promote(gateway, partition, "x") == 1
    await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), "x")


async def test_a_foreign_due_time_of_a_queued_task_adds_no_message(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await stored(producer, "queued", "ended")
    await gateway.command("XDEL", partition.ready, (await gateway.command("XRANGE", partition.ready, "-", "+"))[0][0])
    await put_back_lost(gateway, partition, 0.0)
    ended, queued = await read(await worker(gateway, partition), 2)
    await SETTLING["succeed"](gateway, ended, "ended")
    await gateway.command("ZADD", partition.due, 1, "queued", 1, "ended")
    assert await promote(gateway, partition) == 0
    assert await places(gateway, partition, "queued") == [PENDING]
    await SETTLING["succeed"](gateway, queued, "queued")
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await gateway.command("ZCARD", partition.due) == 0


async def test_a_task_without_a_payload_is_reported(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await stored(producer, "x")
    await gateway.command("HDEL", partition.record("x"), "task", "args")
    await gateway.command("XTRIM", partition.ready, "MAXLEN", 0)
    assert await find_places(gateway, partition, ["x"]) == [Place.NO_PAYLOAD]
    assert await put_back_lost(gateway, partition, 0.0) == 0
    assert (await read_record(gateway, partition, "x") or pytest.fail()).state is State.QUEUED


async def test_a_round_that_finds_a_lost_task_looks_at_all(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_PAGE", 2), ("_NEWEST", 2), ("_ROUND", 3), ("_PAGE_BYTES", 1)):
        monkeypatch.setattr(f"perdure.queues.delivery.lost_tasks.{name}", value)
    names = [f"t{number}" for number in range(9)]
    await stored(producer, *names)
    entries = [entry for entry, _ in await gateway.command("XRANGE", partition.ready, "-", "+")]
    first = int(entries[0].partition(b"-")[0])
    for number, name in enumerate(names):  # tasks of one millisecond would be looked at together
        await gateway.command("ZADD", partition.timeline, "XX", first + number, name)
    await gateway.command("XDEL", partition.ready, entries[5])
    assert await put_back_lost(gateway, partition, 0.0) == 0  # the last two, and the first three
    assert await put_back_lost(gateway, partition, 0.0) == 1
    await gateway.command("XTRIM", partition.ready, "MAXLEN", 0)
    assert await put_back_lost(gateway, partition, 0.0) == 9
    assert sorted(ids(await read(await worker(gateway, partition), 20))) == names


async def test_a_round_looks_at_the_tasks_before_the_first_message(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trim removes the oldest messages."""
    for name, value in (("_PAGE", 2), ("_NEWEST", 4), ("_ROUND", 3)):
        monkeypatch.setattr(f"perdure.queues.delivery.lost_tasks.{name}", value)
    names = [f"t{number}" for number in range(9)]
    await stored(producer, *names)
    await gateway.command("XTRIM", partition.ready, "MAXLEN", 4)
    first = int((await gateway.command("XRANGE", partition.ready, "-", "+"))[0][0].partition(b"-")[0])
    for number, name in enumerate(names):
        await gateway.command("ZADD", partition.timeline, "XX", first + number - 5, name)
    await gateway.command("SET", partition.checked, 5, "PX", 60_000)
    assert await put_back_lost(gateway, partition, 0.0) == 5


# exhausted ids


@pytest.mark.parametrize("last", [LAST_ID, FAR_ID, "99999999999999-0"])
async def test_a_stream_with_ids_ahead_of_the_clock_is_replaced(
    gateway: Gateway, partition: Partition, producer: Producer, last: str
) -> None:
    needs_server(gateway, "it does not check the largest id")
    await stored(producer, "running", "released", "new")
    a = await worker(gateway, partition)
    running, released = await read(a, 2)
    running = await take_over(gateway, running, "b")
    await SETTLING["release"](gateway, released, "released")
    await gateway.command("XADD", partition.ready, last, "a", "b")
    before = await pending(gateway, partition)
    if last == LAST_ID:
        with pytest.raises(Refused, match="no id is left"):
            await stored(producer, "refused")
        assert await producer.find("refused") is None
    else:
        await stored(producer, "far")
    names = await consumers(gateway, partition.ready)
    assert await replace_exhausted(gateway, partition)
    assert not await replace_exhausted(gateway, partition)
    assert await put_back_lost(gateway, partition, 0.0) == (0 if last == LAST_ID else 1)
    await stored(producer, "later")
    after = await pending(gateway, partition)
    assert [(entry, owner, count) for entry, owner, _, count in after] == [
        (entry, owner, count) for entry, owner, _, count in before
    ]
    assert all(new[2] >= old[2] for new, old in zip(after, before, strict=True))
    assert after[1][1] == RELEASED
    assert await consumers(gateway, partition.ready) == names
    await SETTLING["succeed"](gateway, running, "running")
    (again,) = await claim_all(a)
    rest = await read(a, 5)
    assert ids([again, *rest]) == ["released", "new", *([] if last == LAST_ID else ["far"]), "later"]
    for delivery in (again, *rest):
        await SETTLING["succeed"](gateway, delivery, ids([delivery])[0])
    assert await gateway.command("XLEN", partition.ready) == 0


async def test_a_stream_without_a_group_is_replaced(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    needs_server(gateway, "it does not check the largest id")
    await gateway.command("XADD", partition.ready, LAST_ID, "a", "b")
    assert await replace_exhausted(gateway, partition)
    await stored(producer, "x")
    await gateway.command("XADD", partition.ready, LAST_ID, "a", "b")
    assert await replace_exhausted(gateway, partition)
    assert ids(await read(await worker(gateway, partition), 5)) == ["x"]


async def test_running_tasks_with_ids_ahead_of_the_clock_are_put_back(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "it does not check the largest id")
    await gateway.command("XADD", partition.ready, FAR_ID, "a", "b")
    await stored(producer, "x")
    a = await worker(gateway, partition)
    _, former = await read(a, 2)
    assert await put_back_lost(gateway, partition, 0.0) == 1
    newer = await read_one(a)
    with pytest.raises(LeaseLost):
        await SETTLING["succeed"](gateway, former, "x")
    await SETTLING["succeed"](gateway, newer, "x")


async def test_a_large_stream_is_replaced_in_part_and_the_rest_is_put_back(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_server(gateway, "it does not check the largest id")
    monkeypatch.setattr("perdure.queues.delivery.lost_tasks._KEPT", 1)
    names = [f"t{number:03}" for number in range(120)]
    await stored(producer, *names)
    await gateway.command("XADD", partition.ready, LAST_ID, "a", "b")
    assert await put_back_lost(gateway, partition, 0.0) == 70
    assert sorted(ids(await read(await worker(gateway, partition), 200))) == names


async def test_nudges_with_used_up_ids_are_replaced(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    needs_server(gateway, "it does not check the largest id")
    await worker(gateway, partition)
    await gateway.command("XADD", partition.nudge, LAST_ID, "why", "due")
    assert await replace_exhausted(gateway, partition)
    await producer.enqueue("t", delay=60, task_id="x", queue="default")
    assert await gateway.command("XLEN", partition.nudge) == 1


async def test_a_promotion_follows_a_due_time_that_was_set_again(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", delay=60, queue="default")
    await make_due(gateway, partition, "x")
    await gateway.command("DEL", partition.due)
    await put_back_lost(gateway, partition, 0.0)
    assert await promote(gateway, partition, "x") == 1
    assert await gateway.command("HGET", partition.record("x"), "due") is None


async def buried(gateway: Gateway, partition: Partition, producer: Producer, task_id: str) -> bytes:
    """Bury a task; return the id of its letter."""
    await stored(producer, task_id)
    await SETTLING["bury"](gateway, await read_one(await worker(gateway, partition)), task_id)
    found: bytes = await gateway.command("HGET", partition.record(task_id), "dead")
    return found


async def test_a_dead_letter_stream_with_used_up_ids_keeps_its_letters(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "it does not check the largest id")
    first = await buried(gateway, partition, producer, "first")
    await gateway.command("XADD", partition.dead, FAR_ID, "a", "b")
    ahead = await buried(gateway, partition, producer, "ahead")
    assert not await replace_exhausted(gateway, partition)
    await gateway.command("XADD", partition.dead, LAST_ID, "a", "b")
    await stored(producer, "last")
    delivery = await read_one(await worker(gateway, partition))
    with pytest.raises(Refused, match="no id is left"):
        await SETTLING["bury"](gateway, delivery, "last")
    assert await replace_exhausted(gateway, partition)
    assert not await replace_exhausted(gateway, partition)
    assert [entry for entry, _ in await gateway.command("XRANGE", partition.dead, "-", "+")] == [first, ahead]
    await SETTLING["bury"](gateway, delivery, "last")
    letters = [one async for one in list_letters(gateway, [partition], Filter())]
    assert len(letters) == 3
    for letter in letters:
        assert await replay(gateway, letter, Replay())


async def test_a_letter_with_the_last_id_stays_listed(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "it does not check the largest id")
    await gateway.command("XADD", partition.dead, LAST_ID[:-1] + "4", "a", "b")
    assert await buried(gateway, partition, producer, "x") == LAST_ID.encode()
    assert await replace_exhausted(gateway, partition)
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    assert letter.id == "x"


@pytest.mark.parametrize("act", ["bury", "reschedule", "release"])
async def test_a_log_without_an_id_left_stops_no_outcome(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    needs_server(gateway, "it does not check the largest id")
    await stored(producer, "x")
    delivery = await read_one(await worker(gateway, partition))
    await gateway.command("XADD", partition.log("x"), LAST_ID, "a", "b")
    await SETTLING[act](gateway, delivery, "x")
    assert (await gateway.command("PTTL", partition.record("x")) > 0) == (act == "bury")
    if act == "bury":
        (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
        assert await replay(gateway, letter, Replay())
        assert await gateway.command("PTTL", partition.record("x")) == -1

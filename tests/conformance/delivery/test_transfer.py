"""Import of a task with its past, and the end of an exported one: each in one act, and only if nothing has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from perdure.deadletter.burial import bury
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, Namespace, Partition, Producer, State, TaskExists
from perdure.queues.delivery.checkpoint import Entry, Kind, close_exported, load_history, read_mark
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, message_after, park, release
from perdure.queues.derived_tasks import TaskPast, read_task_input, store_copy
from perdure.queues.ended_tasks import Outcome, store_ended
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.errors import LargeValueLost
from perdure.queues.event_log import read_events
from perdure.queues.inbox import read_inbox, send_message
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script, milliseconds

from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import EVIDENCE, add_entries
from tests.support.task_places import places

PAST: Final = TaskPast(
    events=2,
    entries=4,
    format=None,
    fields={"d:a": b'{}\n"done"', "s:#state": b"{}", "c:#step:old": b"{}"}.items(),
    inbox={
        "m:7": b'5 {"id":"i","sender":"s","content":1}',
        "n:1": b"7 x",
        "id:x": b"7",
        "sent": b"1",
        "last": b"7",
    }.items(),
    log=[
        ("1-1", {"type": b"started", "n": b"1", "data": b'{"goal":"g"}', "e": b"1"}),
        ("1-2", {"type": b"step_completed", "step": b"a", "e": b"3"}),
        ("2-0", {"type": b"attempt_failed", "data": b'{"error":"E"}'}),
    ],
)


async def store(gateway: Gateway, namespace: Namespace, past: TaskPast = PAST, token: str = "import 1") -> Partition:
    envelope = Envelope(id="x", task="t").encode()
    return await store_copy(
        gateway, namespace, "default", "x", envelope=envelope, arguments=b"{}", past=past, source=token
    )


async def test_an_imported_task_has_its_past(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    assert await store(gateway, namespace) == partition
    assert await store(gateway, namespace, replace(PAST, fields=())) == partition  # the reply of the first was lost
    with pytest.raises(TaskExists):
        await store(gateway, namespace, token="import 2")
    assert [(e.id, e.type, e.number, e.step, e.data) for e in await read_events(gateway, partition, "x")] == [
        ("1-1", "started", 1, None, {"goal": "g"}),
        ("1-2", "step_completed", None, "a", None),
        ("2-0", "attempt_failed", None, None, {"error": "E"}),
    ]
    assert [(m.number, m.content, m.at) async for m in read_inbox(gateway, partition, "x")] == [(7, 1, 5)]
    delivery = await read_one(await worker(gateway, partition))
    history = await load_history(gateway, delivery, "x")
    assert (history.events, history.entries, history.saved) == (2, 4, {"#state": b"{}"})
    await add_entries(gateway, delivery, "x", [Entry(Kind.EVENT, "changed", b"3")])


async def test_a_copy_without_a_past_has_none_of_an_expired_task(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    """The record of the expired task is gone, its other keys are not yet."""
    await gateway.command("HSET", partition.steps("x"), "d:a", "1")
    await gateway.command("HSET", partition.inbox("x"), "m:1", "1 old")
    await gateway.command("XADD", partition.log("x"), "1-1", "type", "started")
    left = [partition.steps("x"), partition.inbox("x"), partition.log("x")]
    for key in left:
        await gateway.command("PEXPIRE", key, 60_000)
    await store(gateway, namespace, replace(PAST, fields=(), inbox=(), log=()))
    assert [await gateway.command("EXISTS", key) for key in left] == [0, 0, 0]


async def uploads(gateway: Gateway, partition: Partition) -> list[int]:
    """Return the TTLs of the uploads of the partition, in milliseconds."""
    pattern = partition.upload("*", "*").replace("{", "[{]").replace("}", "[}]")
    found = await gateway.command("KEYS", pattern, node_of=partition.ready)
    return [await gateway.command("PTTL", key.decode()) for key in found]


BIG: Final = replace(
    PAST,
    fields=[(f"d:{number}", b'{}\n"%s"' % (b"x" * 200_000)) for number in range(6)],
    log=[(f"{number}-1", {"type": b"noted", "data": b'{"n":"%s"}' % (b"y" * 900)}) for number in range(1, 701)],
)


async def test_a_past_is_uploaded_in_portions(
    gateway: Gateway, namespace: Namespace, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command holds up Redis, what a dead caller has uploaded expires, and a lost upload is repeated."""
    sizes: list[int] = []
    run, lost = Gateway.run, [1]

    async def watched(self: Gateway, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        sizes.append(sum(len(one) for one in args if isinstance(one, bytes)))
        if script.name == "enqueue_copy":
            found = await uploads(gateway, partition)
            assert len(found) in (3, 5)  # the second time, beside the steps and the inbox of the first
            assert all(0 < ttl <= 600_000 for ttl in found)
            if lost:
                lost.pop()
                await gateway.command("DEL", next(key for key in keys if key.endswith(".log")))
        return await run(self, script, keys, args)

    monkeypatch.setattr(Gateway, "run", watched)
    assert await store(gateway, namespace, BIG) == partition
    assert max(sizes) < 1_000_000
    assert await gateway.command("HLEN", partition.steps("x")) == 6
    assert await gateway.command("XLEN", partition.log("x")) == 700
    for key in (partition.record("x"), partition.steps("x"), partition.log("x"), partition.inbox("x")):
        assert await gateway.command("PTTL", key) == -1


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, producer: Producer) -> Delivery:
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    found = await read_one(await worker(gateway, partition))
    await add_entries(gateway, found, "x", [Entry(Kind.EVENT, "started", b"1")])
    return found


async def close(gateway: Gateway, partition: Partition, mark: tuple[bytes, ...]) -> bool:
    return await close_exported(gateway, partition, "x", mark, event=b'{"digest":"d"}', retention=60)


async def test_a_parked_task_ends_if_it_is_as_it_was_read(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    assert not await close(gateway, partition, await read_mark(gateway, partition, "x"))  # a worker has it
    await park(gateway, delivery, "x", Counters(), delay=3600, waits="message", conditions=[message_after(0)])
    mark = await read_mark(gateway, partition, "x")
    await send_message(gateway, partition, "x", "news")
    assert not await close(gateway, partition, mark)
    mark = await read_mark(gateway, partition, "x")
    assert await close(gateway, partition, mark)
    assert await places(gateway, partition, "x") == ["cancelled"]
    handle = await producer.find("x")
    assert handle is not None
    assert await handle.status() is State.CANCELLED
    assert (await read_events(gateway, partition, "x"))[-1].type == "exported"
    for key in (partition.record("x"), partition.log("x"), partition.inbox("x")):
        assert 0 < await gateway.command("PTTL", key) <= 60_000
    assert not await close(gateway, partition, mark)


async def test_a_dead_letter_ends_as_a_cancelled_task(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await bury(
        gateway,
        delivery,
        "x",
        task="t",
        reason=Reason.NOT_RETRYABLE,
        evidence=EVIDENCE,
        counters=Counters(),
    )
    assert await close(gateway, partition, await read_mark(gateway, partition, "x"))
    assert await gateway.command("XLEN", partition.dead) == 0
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    assert (record.state, record.task, record.reason) == (State.CANCELLED, "t", None)


async def test_a_queued_task_ends_if_no_worker_has_it(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    mark = await read_mark(gateway, partition, "x")
    fresh = EnvelopeTemplate("t").message(b"{}", task_id="x")
    await handle.cancel()
    await producer.enqueue_fresh(fresh, queue="default")
    assert not await close(gateway, partition, mark), "the id belongs to another task by now"
    mark = await read_mark(gateway, partition, "x")
    delivery = await read_one(await worker(gateway, partition))
    assert not await close(gateway, partition, mark), "a worker has it"
    assert await places(gateway, partition, "x") == ["pending"]
    await release(gateway, delivery, "x", data=None)
    assert await places(gateway, partition, "x") == ["pending"], "for any worker"
    assert await close(gateway, partition, mark)
    assert await places(gateway, partition, "x") == ["cancelled"]
    assert await gateway.command("XLEN", partition.ready) == 0
    assert (await read_task_input(gateway, partition, "x")).arguments == b"{}"
    assert not await close(gateway, partition, await read_mark(gateway, partition, "x"))


async def test_a_queued_task_that_another_one_waits_for_does_not_end(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    await gateway.command("HSET", partition.record("x"), "watchers", "[]")
    assert not await close(gateway, partition, await read_mark(gateway, partition, "x"))
    await gateway.command("HDEL", partition.record("x"), "watchers")
    assert await close(gateway, partition, await read_mark(gateway, partition, "x"))


async def test_a_copy_is_due_when_its_source_is(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    now = milliseconds(await gateway.command("TIME", node_of=partition.ready))
    for due, place in ((now + 60_000, "due"), (now - 1, "ready")):
        task_id = f"x{place}"
        envelope = Envelope(id=task_id, task="t").encode()
        how: dict[str, Any] = {"envelope": envelope, "arguments": b"{}", "past": PAST, "due": due}
        for _ in range(2):
            await store_copy(gateway, namespace, "default", task_id, **how, source="import 1")
        assert await places(gateway, partition, task_id) == [place]
    assert float(await gateway.command("ZSCORE", partition.due, "xdue")) == now + 60_000


async def store_end(gateway: Gateway, namespace: Namespace, state: State, past: TaskPast = PAST) -> Partition:
    fields = {"at": b"7", "finished": b"9", "attempts": b"2", "reason": b"not_retryable"}
    sealed = {"result": b'"done"'} if state is State.SUCCEEDED else {"error": b'{"error":"E","message":"no"}'}
    envelope = Envelope(id="x", task="t").encode()
    outcome = Outcome(state, fields, sealed)
    how: dict[str, Any] = {"envelope": envelope, "arguments": b'{"n":1}', "past": past, "outcome": outcome}
    return await store_ended(gateway, namespace, "default", "x", **how, retention=60)


@pytest.mark.parametrize("past", [PAST, replace(PAST, fields=(), inbox=(), log=())], ids=["with a past", "without"])
@pytest.mark.parametrize("state", [State.SUCCEEDED, State.CANCELLED, State.DEAD])
async def test_an_ended_task_is_stored_for_reading(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, state: State, past: TaskPast
) -> None:
    assert await store_end(gateway, namespace, state, past) == partition
    with pytest.raises(TaskExists):
        await store_end(gateway, namespace, state, past)
    handle = await producer.find("x")
    assert handle is not None
    record = await handle.record()
    assert (record.state, record.task, record.enqueued_at, record.finished_at) == (state, "t", 7, 9)
    assert (record.attempts, record.args) == (2, b'{"n":1}')
    assert record.shown_result() == (b'"done"' if state is State.SUCCEEDED else None)
    assert await places(gateway, partition, "x") == ["dead" if state is State.DEAD else state.value]
    assert await gateway.command("ZSCORE", partition.timeline, "x") is not None
    for key in (partition.record("x"), partition.steps("x"), partition.log("x"), partition.inbox("x")):
        ttl = await gateway.command("PTTL", key)
        assert 0 < ttl <= 60_000 or (ttl == -2 and past is not PAST)
    if state is State.DEAD:
        (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
        assert (letter.id, letter.task, letter.reason, letter.message) == ("x", "t", Reason.NOT_RETRYABLE, "no")
        assert await replay(gateway, letter, Replay())
        delivery = await read_one(await worker(gateway, partition))
        assert (await load_history(gateway, delivery, "x")).entries == 4


async def test_an_ended_task_is_stored_whole_or_not_at_all(
    gateway: Gateway, namespace: Namespace, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that has expired is repeated, and a call whose reply was lost stores nothing twice."""
    run, lost = Gateway.run, [1, 2, 3, 4]

    async def losing(self: Gateway, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        if script.name != "store_ended":
            return await run(self, script, keys, args)
        if lost:
            await gateway.command("DEL", keys[3 + lost.pop()])
            return await run(self, script, keys, args)
        assert await run(self, script, keys, args) == 1
        return await run(self, script, keys, args)

    monkeypatch.setattr(Gateway, "run", losing)
    with pytest.raises(LargeValueLost):
        await store_end(gateway, namespace, State.DEAD)
    assert await places(gateway, partition, "x") == []
    assert await store_end(gateway, namespace, State.DEAD) == partition
    assert await gateway.command("XLEN", partition.dead) == 1

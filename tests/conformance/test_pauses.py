"""Pauses of operators: stored once, parked in one act, and woken by the number of the rule whatever came between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, State
from perdure.queues.argument_conditions import ArgumentCondition
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.paused_tasks import LOOK, await_resume, count_held, wake_paused
from perdure.queues.delivery.settlement import Counters
from perdure.queues.errors import PauseError
from perdure.queues.inspection.views import list_queues
from perdure.queues.pauses import MAX_RULES, PauseRule, Pauses, PauseStore, load_pauses
from perdure.queues.security.encryption import Encryptor
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script, queue_script

from tests.support.consumers import needs_one_server, promote, read, read_one, take_over, worker
from tests.support.lossy_proxy import lossy_gateway
from tests.support.task_places import DUE, dump, places

TENANT = (ArgumentCondition.parse("tenant=acme"),)


@pytest.fixture
async def store(gateway: Gateway, namespace: Namespace, partition: Partition) -> AsyncIterator[PauseStore]:
    yield PauseStore(gateway, namespace)
    await gateway.command("DEL", namespace.pauses)
    await gateway.command("DEL", partition.paused)


async def due_in(gateway: Gateway, partition: Partition, task_id: str = "x") -> float:
    """Return the seconds until a task is due."""
    seconds, micro = await gateway.command("TIME")
    return float(await gateway.command("ZSCORE", partition.due, task_id)) / 1000 - int(seconds) - int(micro) / 1e6


async def park_another(gateway: Gateway, partition: Partition, producer: Producer, task_id: str, number: int) -> None:
    await producer.enqueue("t", task_id=task_id, queue="default")
    await await_resume(gateway, await read_one(await worker(gateway, partition)), task_id, number, Counters())


# await_resume


async def test_a_task_is_parked_at_no_cost(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    store: PauseStore,
) -> None:
    await await_resume(gateway, delivery, "x", 7, Counters(1, 2, 3))
    stored = await dump(gateway, namespace)
    await await_resume(gateway, delivery, "x", 7, Counters(1, 2, 3))
    assert await dump(gateway, namespace) == stored, "a lost reply changes nothing"
    assert await places(gateway, partition, "x") == [DUE]
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    found = await handle.record()
    assert (found.state, found.paused_by, found.waits) == (State.SCHEDULED, 7, None)
    assert (found.attempts, found.crashes, found.args) == (1, 2, b'{"n":1}')
    assert LOOK - 60 < await due_in(gateway, partition) <= LOOK
    assert await gateway.command("ZRANGE", partition.paused, 0, -1, "WITHSCORES") == [b"x", b"7"]
    assert LOOK * 1000 < await gateway.command("PTTL", partition.paused) <= 2 * LOOK * 1000
    (stats,) = await list_queues(gateway, namespace, "default")
    assert (stats.held, stats.due, stats.depth) == (1, 1, 0)


async def test_a_lost_delivery_is_not_parked(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, store: PauseStore
) -> None:
    await take_over(gateway, delivery)
    before = await dump(gateway, namespace)
    with pytest.raises(LeaseLost):
        await await_resume(gateway, delivery, "x", 7, Counters())
    assert await dump(gateway, namespace) == before


async def test_a_requested_cancel_makes_it_due_at_once(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, store: PauseStore
) -> None:
    assert await (await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")).cancel() is State.RUNNING
    await await_resume(gateway, delivery, "x", 7, Counters())
    assert await due_in(gateway, partition) <= 0


async def test_a_parked_task_is_cancelled_at_once(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, store: PauseStore
) -> None:
    await await_resume(gateway, delivery, "x", 7, Counters())
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    assert await handle.cancel() is State.CANCELLED
    assert await gateway.command("EXISTS", partition.paused, partition.due) == 0


# wake_paused


async def test_only_tasks_of_ended_pauses_are_woken(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, store: PauseStore
) -> None:
    await await_resume(gateway, delivery, "x", 2, Counters())
    for task_id, number in (("first", 1), ("kept", 3), ("between", 4), ("unread", 5), ("later", 9)):
        await park_another(gateway, partition, producer, task_id, number)
    known = Pauses([PauseRule(task="t", number=3)], revision=8, unread=[5])
    assert await wake_paused(gateway, partition, known) == (3, 3)
    assert [due <= 0 for due in [await due_in(gateway, partition, one) for one in ("x", "first", "between")]] == [
        True
    ] * 3
    assert await gateway.command("ZRANGE", partition.paused, 0, -1) == [b"kept", b"unread", b"later"]
    assert min([await due_in(gateway, partition, one) for one in ("kept", "unread", "later")]) > LOOK - 60
    assert await wake_paused(gateway, partition, known) == (0, 0)
    assert await wake_paused(gateway, partition, Pauses(revision=9)) == (3, 3)
    assert await gateway.command("EXISTS", partition.paused) == 0


async def test_pages_of_tasks_are_woken(
    gateway: Gateway, partition: Partition, producer: Producer, store: PauseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.delivery.paused_tasks._PAGE", 2)
    for number in range(5):
        await park_another(gateway, partition, producer, f"task-{number}", 1 + number % 3)
    assert await wake_paused(gateway, partition, Pauses(revision=9), pages=2) == (4, 4)
    assert await wake_paused(gateway, partition, Pauses(revision=9)) == (1, 1)


async def test_a_task_that_is_due_no_more_is_not_scheduled_again(
    gateway: Gateway, partition: Partition, delivery: Delivery, store: PauseStore
) -> None:
    await await_resume(gateway, delivery, "x", 1, Counters())
    assert await promote(gateway, partition, "x") == 1
    assert await wake_paused(gateway, partition, Pauses(revision=1)) == (1, 0)
    assert await gateway.command("EXISTS", partition.due, partition.paused) == 0
    assert len(await read(await worker(gateway, partition))) == 1


# changes of the rules


async def test_a_pause_is_stored_once_and_found_by_its_target(
    gateway: Gateway, namespace: Namespace, store: PauseStore
) -> None:
    rule, stored = await store.add(PauseRule("default", "report", TENANT, by="ann", why="a move"))
    assert (stored, rule.number, rule.by) == (True, 1, "ann")
    other, stored = await store.add(PauseRule("default", "report", TENANT, by="bob"))
    assert (other, stored) == (rule, False)
    queue, _ = await store.add(PauseRule("default"))
    found = await load_pauses(gateway, namespace)
    assert (found.rules, found.revision, found.problems) == ([rule, queue], 2, {})
    assert (found.of_tasks, found.queues) == ([rule], {"default": queue})
    assert found.numbered(1) == rule
    assert await store.remove(PauseRule("default", "report")) is None
    assert await store.remove(PauseRule("default", "report", TENANT)) == rule
    again, _ = await store.add(PauseRule("default", "report", TENANT))
    assert again.number == 4, "a number is never used again"
    assert [one.number for one in (await load_pauses(gateway, namespace)).rules] == [2, 4]


async def test_conditions_in_another_order_are_the_same_pause(store: PauseStore) -> None:
    one, two = ArgumentCondition.parse("a=1"), ArgumentCondition.parse("b.c=x y")
    rule, _ = await store.add(PauseRule(where=(one, two)))
    assert await store.remove(PauseRule(where=(two, one, one))) == rule


async def test_there_is_a_largest_number_of_pauses(
    store: PauseStore, gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.pauses.MAX_RULES", 2)
    for name in "ab":
        await store.add(PauseRule(name))
    with pytest.raises(PauseError, match="2 pauses already"):
        await store.add(PauseRule("c"))
    assert await store.remove(PauseRule("a")) is not None
    assert (await store.add(PauseRule("c")))[1]
    assert MAX_RULES == 100


@pytest.mark.parametrize("change", ["add", "remove"])
async def test_two_changes_at_once_are_both_made(
    gateway: Gateway, namespace: Namespace, store: PauseStore, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The second one comes between the read and the write of the first."""
    if change == "remove":
        await store.add(PauseRule("mine"))
    run, others = gateway.run, [PauseRule("first"), PauseRule("second")]

    async def late(script: Script, keys: list[str], args: list[Argument], **derived: object) -> object:
        if script.name == "write_compared" and others:
            other = others.pop()
            monkeypatch.setattr(gateway, "run", run)
            await PauseStore(gateway, namespace).add(other)
            monkeypatch.setattr(gateway, "run", late)
        return await run(script, keys, args)

    monkeypatch.setattr(gateway, "run", late)
    if change == "add":
        assert (await store.add(PauseRule("mine")))[1]
    else:
        assert await store.remove(PauseRule("mine")) is not None
    mine = {"mine"} if change == "add" else set()
    assert (await load_pauses(gateway, namespace)).queues.keys() == {"first", "second"} | mine


@pytest.mark.parametrize("change", ["add", "remove"])
async def test_a_lost_reply_changes_nothing_twice(
    gateway: Gateway, namespace: Namespace, store: PauseStore, change: str
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    await store.add(PauseRule("other"))
    async with lossy_gateway(gateway) as (lossy, line):
        mine = PauseStore(lossy, namespace)
        if change == "remove":
            await store.add(PauseRule("mine"))
        line.lose(queue_script("write_compared").sha.encode())
        if change == "add":
            assert (await mine.add(PauseRule("mine")))[1]
        else:
            assert await mine.remove(PauseRule("mine")) is not None
    found = await load_pauses(gateway, namespace)
    assert found.revision == (2 if change == "add" else 3)
    assert ("mine" in found.queues) is (change == "add")


# what cannot be read


async def test_fields_that_no_part_of_perdure_wrote_are_problems(
    gateway: Gateway, namespace: Namespace, store: PauseStore
) -> None:
    rule, _ = await store.add(PauseRule("default"))
    form = rule.encode()
    junk = [b"x", b"1 x", b"1 []", b'1 {"queue":null,"task":null,"where":[],"at":1,"by":"","why":""}', b"1 " + form]
    for number, value in enumerate(junk):
        await gateway.command("HSET", namespace.pauses, f"junk-{number}", value)
    found = await load_pauses(gateway, namespace)
    assert (found.rules, len(found.problems)) == ([rule], len(junk))
    assert (await store.add(PauseRule("other")))[1]


async def test_pauses_are_encrypted_and_a_plain_one_is_refused_where_encryption_is_required(
    gateway: Gateway, namespace: Namespace, store: PauseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = await store.add(PauseRule("plain"))
    monkeypatch.setattr(gateway, "encryptor", Encryptor([b"k" * 32], required=True))
    secret, _ = await store.add(PauseRule(task="report", where=TENANT, why="a secret reason"))
    stored = b" ".join(await gateway.command("HGETALL", namespace.pauses))
    assert b"secret reason" not in stored
    assert b"acme" not in stored
    found = await load_pauses(gateway, namespace)
    assert found.rules == [secret]
    assert list(found.problems) == [plain.id]
    assert found.unread == [1], "its tasks stay parked"
    assert await store.remove(PauseRule("plain")) is not None
    monkeypatch.setattr(gateway, "encryptor", Encryptor())
    assert list((await load_pauses(gateway, namespace)).problems) == [secret.id]


async def test_held_tasks_are_counted_by_rule(
    gateway: Gateway, partition: Partition, producer: Producer, delivery: Delivery, store: PauseStore
) -> None:
    await await_resume(gateway, delivery, "x", 1, Counters())
    await park_another(gateway, partition, producer, "y", 2)
    rules = [PauseRule(task=f"t{number}", number=number) for number in (1, 2, 3)]
    other = replace(partition, index=1)
    assert await count_held(gateway, [partition, other], rules) == {1: 1, 2: 1, 3: 0}

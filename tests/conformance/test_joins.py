"""Joins: each child ends in the join of its parent exactly once, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from perdure.deadletter.letters import DeadLetter, find_letter
from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues import Gateway, Namespace, Partition, Producer, State, find_task, joins, read_record, set_partitions
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, WakeCondition, park, succeed
from perdure.queues.derived_tasks import Successor, enqueue_successor
from perdure.queues.envelope import DEFAULT_PAYLOAD_LIMIT, Envelope, EnvelopeTemplate
from perdure.queues.errors import LeaseLost, TaskNotFound
from perdure.queues.handle import cancel_task
from perdure.queues.joins import (
    ChildEnd,
    ChildOutcome,
    JoinPlace,
    OnFailure,
    PlannedChild,
    add_children,
    child_places,
    close_join,
    deliver_notices,
    ended_children,
    life_of,
    list_watchers,
    look_at_join,
    read_join,
    read_outcomes,
    sweep_notices,
    watch_task,
)
from perdure.queues.open_joins import stop_join
from perdure.queues.security.encryption import Encryptor
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import read, read_one, worker
from tests.support.delivery_calls import SETTLING

LIFE = life_of(0, 0)
DAY = 86_400.0


def child(name: str, arguments: bytes = b'{"n":1}', queue: str = "small") -> PlannedChild:
    return PlannedChild(queue, EnvelopeTemplate("c").message(arguments, task_id=name))


class Family:
    """A parent that a worker runs, and a worker of the queue of its children."""

    def __init__(self, gateway: Gateway, place: JoinPlace, parent: Delivery, children: Consumer) -> None:
        self.gateway, self.place, self.parent, self.consumer = gateway, place, parent, children
        self.partition = Namespace(place.partition.namespace).partition("small")

    async def spawn(
        self, *names: str, limit: int = 0, on_failure: OnFailure = OnFailure.RAISE, first: int = 0
    ) -> dict[str, Partition]:
        planned = [child(name) for name in names]
        return await add_children(
            self.gateway,
            self.parent,
            self.place,
            planned,
            on_failure=on_failure,
            limit=limit,
            life=LIFE,
            first=first,
        )

    async def run(self, how: str = "succeed") -> str:
        """Run the next child to its end, without a notice; return its id."""
        delivery = await read_one(self.consumer)
        name = delivery.task_id
        assert name is not None
        await SETTLING[how](self.gateway, delivery, name)
        return name

    async def deliver(self, *names: str) -> int:
        return (await deliver_notices(self.gateway, [(self.partition, name) for name in names])).done

    async def end(self, how: str = "succeed") -> str:
        name = await self.run(how)
        assert await self.deliver(name) == 1
        return name

    async def outbox(self) -> list[str]:
        return [name.decode() for name in await self.gateway.command("ZRANGE", self.partition.outbox, 0, -1)]

    async def outcomes(self, *names: str) -> list[ChildOutcome]:
        return [outcome async for outcome in read_outcomes(self.gateway, self.place, names)]

    async def numbers(self) -> tuple[int, int, int, int] | None:
        state = await read_join(self.gateway, self.place)
        return None if state is None else (state.total, state.ended, state.open, state.todo)

    async def look(self) -> bool:
        return await look_at_join(self.gateway, self.place, retention=DAY)


async def letter(family: Family) -> DeadLetter:
    found = await find_letter(family.gateway, [family.partition], "a")
    assert found is not None
    return found


@pytest.fixture
async def family(gateway: Gateway, producer: Producer, partition: Partition) -> Any:
    await producer.enqueue("p", {}, task_id="parent", queue=partition.queue)
    small = Namespace(partition.namespace).partition("small")
    parent = await read_one(await worker(gateway, partition))
    found = Family(gateway, JoinPlace(partition, "parent", "gather"), parent, await worker(gateway, small))
    yield found
    await close_join(gateway, found.place, retention=DAY)
    await found.deliver(*await found.outbox())


async def test_children_are_stored_once_and_their_results_are_read_in_order(family: Family) -> None:
    assert set(await family.spawn("a", "b", "c")) == {"a", "b", "c"}
    assert await family.spawn("a", "b", "c") == {}, "their launch was confirmed"
    assert await family.gateway.command("XLEN", family.partition.ready) == 3
    assert await family.numbers() == (3, 0, 3, 0)
    names = [await family.run() for _ in range(3)]
    assert await family.outbox() == names == ["a", "b", "c"]
    for name in ("c", "a", "b"):
        assert await family.deliver(name) == 1
    assert await family.outbox() == []
    assert await family.numbers() == (3, 3, 0, 0)
    assert await ended_children(family.gateway, family.place, 0) == ["c", "a", "b"]
    assert await ended_children(family.gateway, family.place, 1, 1) == ["a"]
    found = await family.outcomes("a", "b", "c")
    assert [(one.child, one.state, one.result) for one in found] == [
        (name, ChildEnd.SUCCEEDED, b'{"ok":true}') for name in "abc"
    ]


async def test_a_record_expires_after_its_notice_only(family: Family) -> None:
    await family.spawn("a")
    await family.run()
    record = family.partition.record("a")
    assert await family.gateway.command("PTTL", record) == -1
    await family.deliver("a")
    assert 0 < await family.gateway.command("PTTL", record) <= 1_200_000
    assert await family.gateway.command("HMGET", record, "watchers", "kept") == [None, None]


async def test_the_retention_of_a_child_counts_from_its_end(family: Family) -> None:
    await family.spawn("a")
    delivery, record = await read_one(family.consumer), family.partition.record("a")
    await succeed(family.gateway, delivery, "a", b"1", Counters(1), ran=0.1, ttl=DAY)
    ended = int(await family.gateway.command("HGET", record, "finished")) - 3_600_000
    await family.gateway.command("HSET", record, "finished", ended)
    await family.deliver("a")
    left = await family.gateway.command("PTTL", record)
    assert 22.9 * 3_600_000 < left <= 23 * 3_600_000


async def test_a_notice_that_arrives_twice_changes_nothing(family: Family) -> None:
    await family.spawn("a", "b", "c", limit=1)
    await family.run()
    partition, record = family.place.partition, family.partition.record("a")
    stored = await family.gateway.command("HGET", record, "watchers")
    await family.deliver("a")
    before = await family.numbers()
    await family.gateway.command("HSET", record, "watchers", stored)
    await family.gateway.command("ZADD", family.partition.outbox, 0, "a")
    assert await family.deliver("a") == 1
    assert await family.numbers() == before == (3, 1, 1, 1)
    assert await family.gateway.command("XLEN", family.partition.ready) == 1, "no further child was launched"
    keys = [partition.record("parent"), *family.place.keys, partition.joins, partition.due, partition.nudge]
    late = await family.gateway.run(queue_script("notify_join"), keys, ["parent", "gather", "a", "dead", b"{}", ""])
    assert late == [0]


async def test_a_window_advances_with_each_notice(family: Family) -> None:
    names = [f"c{number}" for number in range(7)]
    assert set(await family.spawn(*names, limit=2)) == {"c0", "c1"}
    for number in range(7):
        assert await family.gateway.command("XLEN", family.partition.ready) <= 2
        assert await family.end() == f"c{number}"
    assert await family.numbers() == (7, 7, 0, 0)


async def test_a_launch_that_its_deliverer_did_not_do_is_repeated(family: Family) -> None:
    """The process dies between the notice and the launch of the next child."""
    await family.spawn("a", "b", limit=1)
    partition = family.place.partition
    keys = [partition.record("parent"), *family.place.keys, partition.joins, partition.due, partition.nudge]
    await family.run()
    sealed = family.gateway.encryptor.of(partition, "parent").encrypt("join:gather:a", b'{"state":"succeeded"}\nnull')
    answer = await family.gateway.run(
        queue_script("notify_join"), keys, ["parent", "gather", "a", "succeeded", sealed, ""]
    )
    assert answer[:2] == [1, b"b"]
    assert await family.gateway.command("XLEN", family.partition.ready) == 0
    assert await family.look()
    assert not await family.look()
    assert await family.gateway.command("XLEN", family.partition.ready) == 1
    assert set(await child_places(family.gateway, family.place, ["a", "b"])) == {"a", "b"}


async def test_a_child_that_ends_before_its_launch_is_confirmed_has_its_place(family: Family) -> None:
    """The parent's process dies between the two; its next run gets the handle of the child from the join."""
    await family.spawn("a")
    join = family.place.keys[0]
    await family.gateway.command("HDEL", join, "p:a")
    await family.gateway.command("HSET", join, "l:a", "")
    await family.end()

    assert await family.spawn("a") == {}
    [place] = (await child_places(family.gateway, family.place, ["a"])).values()
    assert (place.partition, place.task_id, place.watched) == (family.partition, "a", False)


async def test_the_launch_of_a_child_is_repeated_in_a_partition_that_was_closed_since(
    family: Family, gateway: Gateway, namespace: Namespace
) -> None:
    """The launch was not confirmed: the queue has other partitions when it is repeated."""
    await family.spawn("a")
    await set_partitions(gateway, namespace, "small", 2)
    await gateway.command("HSET", family.place.keys[0], "total", 0)
    await gateway.command("SREM", family.place.keys[1], "a")
    assert await family.spawn("a") == {"a": family.partition}
    found = [await gateway.command("EXISTS", namespace.partition("small", index).record("a")) for index in range(3)]
    assert found == [1, 0, 0]


async def test_a_parent_without_its_lease_adds_nothing(family: Family) -> None:
    await SETTLING["succeed"](family.gateway, family.parent, "parent")
    with pytest.raises(LeaseLost):
        await family.spawn("a")
    assert await family.numbers() is None


async def test_children_of_which_redis_lost_some_are_added_again(family: Family) -> None:
    await family.spawn("a", "b", "c")
    await family.gateway.command("HSET", family.place.keys[0], "total", 1)
    await family.gateway.command("SREM", family.place.keys[1], "b", "c")
    await family.spawn("a", "b", "c", "d")
    assert await family.numbers() == (4, 0, 4, 0)
    assert await family.gateway.command("XLEN", family.partition.ready) == 4


async def test_children_are_added_in_chunks_by_size(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    run = Gateway.run

    async def counted(self: Gateway, script: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        nonlocal calls
        calls += script.name == "add_children"
        return await run(self, script, keys, args)

    monkeypatch.setattr(Gateway, "run", counted)
    large = [child(f"c{number}", b'{"n":"%b"}' % (b"x" * 200_000)) for number in range(10)]
    options: Any = {"on_failure": OnFailure.KEEP, "life": LIFE, "limit": 2}
    await add_children(family.gateway, family.parent, family.place, large, **options)
    assert calls == 5
    assert await family.numbers() == (10, 0, 2, 8)


@pytest.mark.parametrize(
    ("mode", "failed", "numbers"),
    [
        (OnFailure.RAISE, "a", (3, 1, 0, 2)),
        (OnFailure.KEEP, None, (3, 1, 1, 1)),
        (OnFailure.WAIT, None, (3, 0, 1, 2)),
    ],
)
async def test_a_dead_child_ends_the_join_or_is_a_result_or_stays_open(
    family: Family, mode: OnFailure, failed: str | None, numbers: tuple[int, int, int, int]
) -> None:
    await family.spawn("a", "b", "c", limit=1, on_failure=mode)
    await family.end("bury")
    state = await read_join(family.gateway, family.place)
    assert state is not None
    assert (state.failed, state.over) == (failed, mode is OnFailure.RAISE)
    assert await family.numbers() == numbers
    found = await family.outcomes("a", "b")
    assert [(one.state, one.reason, one.error.get("error")) for one in found] == (
        [] if mode is OnFailure.WAIT else [(ChildEnd.DEAD, "attempts_exhausted", "ValueError")]
    )


async def test_a_replayed_child_satisfies_a_join_that_waits(family: Family, namespace: Namespace) -> None:
    await family.spawn("a", "b", limit=1, on_failure=OnFailure.WAIT)
    await family.end("bury")
    assert not await family.look(), "a dead child of such a join needs nothing"
    assert await family.gateway.command("PTTL", family.partition.record("a")) > 0
    assert await replay(family.gateway, await letter(family), Replay())
    assert await family.end() == "a"
    assert await family.end() == "b"
    assert [one.state for one in await family.outcomes("a", "b")] == [ChildEnd.SUCCEEDED] * 2


async def test_a_child_that_is_replayed_before_its_notice_lives_on(family: Family) -> None:
    await family.spawn("a")
    await family.run("bury")
    assert await replay(family.gateway, await letter(family), Replay())
    assert await family.deliver("a") == 1
    assert await family.outbox() == []
    assert await family.numbers() == (1, 0, 1, 0)
    assert await family.gateway.command("PTTL", family.partition.record("a")) == -1
    await family.end()
    assert await family.numbers() == (1, 1, 0, 0)


async def test_a_child_whose_record_is_gone_counts_as_lost(family: Family) -> None:
    await family.spawn("a", on_failure=OnFailure.WAIT)
    await family.end("bury")
    assert await purge(family.gateway, await letter(family))
    assert await family.look()
    [found] = await family.outcomes("a")
    assert (found.state, found.result) == (ChildEnd.LOST, None)
    state = await read_join(family.gateway, family.place)
    assert state is not None
    assert state.over


async def test_a_cancelled_child_ends_the_join(family: Family) -> None:
    await family.spawn("a", "b")
    assert await cancel_task(family.gateway, family.partition, "b", retention=60) is State.CANCELLED
    assert await family.outbox() == ["b"]
    await family.deliver("b")
    [found] = await family.outcomes("a", "b")
    assert (found.child, found.state) == ("b", ChildEnd.CANCELLED)
    state = await read_join(family.gateway, family.place)
    assert state is not None
    assert state.failed == "b"


async def test_watchers_that_come_while_a_task_runs_get_a_notice(family: Family, producer: Producer) -> None:
    handle = await producer.enqueue("c", {}, task_id="other", queue="small")
    delivery = await read_one(family.consumer)
    for _ in range(2):
        watched = watch_task(family.gateway, family.parent, family.place, handle.partition, "other", life=LIFE)
        assert await watched is None
    assert await list_watchers(family.gateway, handle.partition, "other") == [family.place]
    await SETTLING["succeed"](family.gateway, delivery, "other")
    assert await family.outbox() == ["other"]
    await family.deliver("other")
    [found] = await family.outcomes("other")
    assert found.result == b'{"ok":true}'


async def test_many_that_wait_for_one_task_add_their_watchers_in_turn(
    family: Family, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await producer.enqueue("c", {}, task_id="other", queue="small")
    places = [family.place._replace(group=f"g{number}") for number in range(40)]
    run, scripts = Gateway.run, Counter[str]()

    async def counted(gateway: Gateway, script: Any, *args: Any) -> Any:
        scripts[script.name] += 1
        return await run(gateway, script, *args)

    monkeypatch.setattr(Gateway, "run", counted)
    watch = partial(watch_task, family.gateway, family.parent, partition=handle.partition, task_id="other", life=LIFE)
    assert set(await asyncio.gather(*(watch(place=place) for place in places))) == {None}
    assert scripts["watch"] == len(places)
    assert set(await list_watchers(family.gateway, handle.partition, "other")) == set(places)
    for place in places:
        await close_join(family.gateway, place, retention=DAY)
    await family.end()


async def test_a_task_that_has_ended_needs_no_watcher(family: Family, producer: Producer) -> None:
    handle = await producer.enqueue("c", {}, task_id="other", queue="small")
    await family.run()
    found = await watch_task(family.gateway, family.parent, family.place, handle.partition, "other", life=LIFE)
    assert found is ChildEnd.SUCCEEDED
    assert await family.numbers() is None
    with pytest.raises(TaskNotFound):
        await watch_task(family.gateway, family.parent, family.place, handle.partition, "no", life=LIFE)
    assert await family.numbers() is None


async def test_the_result_of_a_successor_is_the_result_of_the_child(family: Family, namespace: Namespace) -> None:
    await family.spawn("a")
    delivery = await read_one(family.consumer)
    next_ = Successor(Envelope(id="a.h1", task="c"), "small", b"{}", ("#received", b"{}"), "a token")
    await enqueue_successor(family.gateway, namespace, next_)
    await succeed(family.gateway, delivery, "a", b"null", Counters(1), ran=0.1, ttl=60, handed_to="a.h1")
    await family.deliver("a")
    assert await family.numbers() == (1, 0, 1, 0)
    [place] = (await child_places(family.gateway, family.place, ["a"])).values()
    assert place.task_id == "a.h1"
    assert not await family.look()
    assert await family.run() == "a.h1"
    await family.deliver("a.h1")
    [found] = await family.outcomes("a")
    assert found.result == b'{"ok":true}'


@pytest.mark.parametrize("field", ["place", "handed_to"])
async def test_a_plain_field_leads_to_no_other_task(family: Family, producer: Producer, field: str) -> None:
    """Another program that can write to Redis, and has no key, cannot have a worker pass on another task's result."""
    await family.spawn("a")
    await producer.enqueue("c", {}, task_id="secret", queue="small")
    gateway, record = family.gateway, family.partition.record("a")
    assert [await family.run(), await family.run()] == ["a", "secret"]
    if field == "place":
        await gateway.command("HSET", family.place.keys[0], "p:a", "small 0 secret")
        await family.look()
        assert await family.numbers() == (1, 0, 1, 0)
    else:
        await gateway.command("HSET", record, "handed_to", "secret")
        await family.deliver("a")
        [found] = await family.outcomes("a")
        assert (found.state, found.result) == (ChildEnd.LOST, None)


@pytest.mark.parametrize("lost", ["outbox", "watchers"])
async def test_the_end_of_a_child_is_found_from_its_state(family: Family, lost: str) -> None:
    """A failover of the child's server has lost the notice, or the watchers."""
    await family.spawn("a")
    if lost == "watchers":
        await family.gateway.command("HDEL", family.partition.record("a"), "watchers")
        assert await family.look()
        assert await list_watchers(family.gateway, family.partition, "a") == [family.place]
        await family.end()
    else:
        await family.run()
        await family.gateway.command("ZREM", family.partition.outbox, "a")
        assert await family.look()
        await family.gateway.command("DEL", family.partition.record("a"))
    [found] = await family.outcomes("a")
    assert found.result == b'{"ok":true}'


async def test_a_parent_that_has_ended_leaves_no_join_and_no_child(family: Family) -> None:
    await family.spawn("a", "b", "c", limit=2)
    await SETTLING["succeed"](family.gateway, family.parent, "parent")
    assert await family.look()
    assert await family.numbers() is None
    assert not await family.gateway.command("EXISTS", family.place.partition.joins)
    for name, state in (("a", State.CANCELLED), ("b", State.CANCELLED)):
        record = await read_record(family.gateway, family.partition, name)
        assert record is not None
        assert record.state is state
    assert await read_record(family.gateway, family.partition, "c") is None
    assert await family.deliver("a", "b") == 2
    assert await family.outbox() == []
    assert await family.numbers() is None, "a late notice does not create the join again"


async def test_the_record_of_a_cancelled_child_expires_though_no_worker_serves_its_queue(family: Family) -> None:
    await family.spawn("a", "b")
    await close_join(family.gateway, family.place, retention=DAY)
    assert await family.outbox() == []
    for name in ("a", "b"):
        assert 0 < await family.gateway.command("PTTL", family.partition.record(name)) <= DAY * 1000


async def test_a_join_of_another_attempt_is_closed(family: Family) -> None:
    await family.spawn("a")
    assert not await family.look()
    await SETTLING["reschedule"](family.gateway, family.parent, "parent")
    assert await family.look()
    assert await family.numbers() is None


async def test_a_join_whose_closing_was_cut_off_is_closed(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(*args: Any, **options: Any) -> None:
        raise ConnectionAbortedError

    await family.spawn("a", "b", limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(joins, "cancel_task", die)
        with pytest.raises(ConnectionAbortedError):
            await close_join(family.gateway, family.place, retention=DAY)
    assert await family.numbers() is not None
    assert await family.look(), "the parent is in the same attempt"
    assert await family.numbers() is None
    record = await read_record(family.gateway, family.partition, "a")
    assert record is not None
    assert record.state is State.CANCELLED


async def test_a_join_whose_closing_was_lost_is_not_deleted(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancel_and_lose(*args: Any, **options: Any) -> State:
        await family.gateway.command("HDEL", family.place.keys[0], "closed")  # with it, the cancellation of the child
        return State.CANCELLED

    await family.spawn("a")
    with monkeypatch.context() as patch:
        patch.setattr(joins, "cancel_task", cancel_and_lose)
        await close_join(family.gateway, family.place, retention=DAY)
    assert await family.numbers() == (1, 0, 1, 0)
    await close_join(family.gateway, family.place, retention=DAY)
    assert await family.numbers() is None
    record = await read_record(family.gateway, family.partition, "a")
    assert record is not None
    assert record.state is State.CANCELLED


async def test_a_join_that_is_stopped_launches_nothing(family: Family) -> None:
    await family.spawn("a", "b", limit=1, on_failure=OnFailure.KEEP)
    assert await stop_join(family.gateway, family.place.partition, "parent", "gather") == [(family.partition, "a")]
    await family.end("cancelled")
    assert await family.numbers() == (2, 1, 0, 1)
    assert await read_record(family.gateway, family.partition, "b") is None
    await close_join(family.gateway, family.place, retention=DAY)
    assert not await stop_join(family.gateway, family.place.partition, "parent", "gather")


async def test_a_watched_task_is_not_cancelled_with_the_parent(family: Family, producer: Producer) -> None:
    handle = await producer.enqueue("c", {}, task_id="other", queue="small")
    await watch_task(family.gateway, family.parent, family.place, handle.partition, "other", life=LIFE)
    await close_join(family.gateway, family.place, retention=DAY)
    assert await handle.status() is State.QUEUED
    await family.end()


async def test_a_child_whose_launch_is_not_confirmed_is_cancelled_for_good(family: Family) -> None:
    """A launch that is still on its way finds the record of the cancelled child."""
    await family.spawn("a", "b", limit=1)
    partition = family.place.partition
    keys = [partition.record("parent"), *family.place.keys, partition.joins, partition.due, partition.nudge]
    await family.gateway.run(queue_script("notify_join"), keys, ["parent", "gather", "a", "succeeded", b"{}\nnull", ""])
    await close_join(family.gateway, family.place, retention=DAY)
    record = await read_record(family.gateway, family.partition, "b")
    assert record is not None
    assert record.state is State.CANCELLED


async def park_parent(family: Family, *conditions: WakeCondition) -> None:
    waits: Any = {"delay": DAY, "waits": "children", "conditions": conditions}
    await park(family.gateway, family.parent, "parent", Counters(), **waits)


async def is_due(family: Family) -> bool:
    due = family.place.partition.due
    score = float(await family.gateway.command("ZSCORE", due, "parent"))
    return score <= int((await family.gateway.command("TIME", node_of=due))[0]) * 1000 + 1000


@pytest.mark.parametrize(
    ("wakes", "after"),
    [
        ([("join", "gather")], 3),
        ([("message", "0"), ("join", "gather"), ("time", "")], 3),
        ([("join", "gather:0")], 1),
        ([("join", "gather:1")], 2),
        ([("join", "gather:1"), ("join", "gather:0")], 1),
        ([("join", "gather:7")], 3),
        ([("message", "0")], None),
    ],
)
async def test_a_parked_parent_is_woken_by_what_it_waits_for(
    family: Family, wakes: list[WakeCondition], after: int | None
) -> None:
    await family.spawn("a", "b", "c")
    await park_parent(family, *wakes)
    for number in range(1, 4):
        assert not await is_due(family)
        await family.end()
        if number == after:
            assert await is_due(family)
            return
    assert after is None
    assert not await is_due(family)


@pytest.mark.parametrize(
    ("condition", "due"),
    [("gather:0", True), ("gather:1", False), ("gather", False), ("gone", True), ("gone:3", True)],
)
async def test_a_parent_whose_condition_is_over_is_due_at_once(family: Family, condition: str, due: bool) -> None:
    """The notice came between the look of the run and its park."""
    await family.spawn("a", "b")
    await family.end()
    await park_parent(family, ("message", "0"), ("join", condition))
    assert await is_due(family) is due


async def test_a_failed_join_wakes_its_parent_before_and_after_it_is_parked(family: Family) -> None:
    await family.spawn("a", "b")
    await family.end("bury")
    await park_parent(family, ("join", "gather"))
    assert await is_due(family)


async def test_a_sweep_delivers_what_a_dead_worker_left(family: Family) -> None:
    await family.spawn("a", "b")
    names = [await family.run(), await family.run("bury")]
    assert await sweep_notices(family.gateway, family.partition, retention=DAY) == 0, "its worker has time to deliver"
    for name in names:
        await family.gateway.command("ZADD", family.partition.outbox, 0, name)
    await family.gateway.command("ZADD", family.partition.outbox, 0, "not a task id")
    await family.gateway.command("ZADD", family.place.partition.joins, 0, "nonsense")
    assert await sweep_notices(family.gateway, family.partition, retention=DAY) == 2
    assert await family.outbox() == []
    assert await family.numbers() == (2, 2, 0, 0)
    await sweep_notices(family.gateway, family.place.partition, retention=DAY)
    assert await family.gateway.command("ZRANGE", family.place.partition.joins, 0, -1) == [b"parent:gather"]


async def test_a_sweep_reaches_a_join_behind_many_others(family: Family) -> None:
    await family.spawn("a")
    scores = [part for number in range(200) for part in (0, f"p{number}:g")]
    await family.gateway.command("ZADD", family.place.partition.joins, *scores, 1, "parent:gather")
    await family.gateway.command("DEL", family.partition.record("a"))
    await sweep_notices(family.gateway, family.place.partition, retention=DAY)
    assert await family.numbers() == (1, 1, 0, 0)


async def test_a_sweep_closes_joins_without_a_parent(family: Family) -> None:
    await family.spawn("a")
    await SETTLING["succeed"](family.gateway, family.parent, "parent")
    await family.gateway.command("ZADD", family.place.partition.joins, 0, "parent:gather")
    assert await sweep_notices(family.gateway, family.place.partition, retention=DAY) == 1
    assert await family.numbers() is None


async def test_a_large_result_is_read_from_the_join(family: Family) -> None:
    await family.spawn("a")
    delivery = await read_one(family.consumer)
    result = b'"%b"' % (b"x" * (2 * DEFAULT_PAYLOAD_LIMIT))
    await succeed(family.gateway, delivery, "a", result, Counters(1), ran=0.1, ttl=60)
    await family.deliver("a")
    await family.gateway.command("DEL", family.partition.record("a"))
    [found] = await family.outcomes("a")
    assert found.result == result
    assert await family.gateway.command("HSTRLEN", family.place.keys[0], "r:a") < 1000


async def test_a_child_with_large_arguments_is_launched_by_its_parent(family: Family) -> None:
    large = child("a", b'{"n":"%b"}' % (b"x" * (2 * DEFAULT_PAYLOAD_LIMIT)))
    options: Any = {"on_failure": OnFailure.RAISE, "life": LIFE, "limit": 1}
    await add_children(family.gateway, family.parent, family.place, [large, child("b")], **options)
    assert await family.numbers() == (2, 0, 1, 1)
    await family.end()
    await family.end()
    assert await family.numbers() == (2, 2, 0, 0)


async def test_messages_and_results_are_sealed_for_their_place(
    family: Family, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes.fromhex("11" * 32)], required=True))
    await family.spawn("a", "b", limit=1)
    join, _, todo = family.place.keys
    await family.end()
    assert await gateway.command("LLEN", todo) == 0
    result = await gateway.command("HGET", join, "r:a")
    assert result[:1] == b"\xc1"
    record = family.partition.record("b")
    arguments, watchers = await gateway.command("HMGET", record, "args", "watchers")
    assert arguments[:1] == watchers[:1] == b"\xc1"
    await family.end()
    assert [one.result for one in await family.outcomes("a", "b")] == [b'{"ok":true}'] * 2
    await gateway.command("HSET", join, "r:b", result)
    with pytest.raises(Exception, match="join of task parent"):
        await family.outcomes("b")


async def test_what_cannot_be_read_hides_no_other_notice(
    family: Family, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await family.spawn("a", "b", "c")
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes.fromhex("11" * 32)]))
    names = [await family.run() for _ in range(3)]
    stranger = Encryptor([bytes.fromhex("22" * 32)]).of(family.partition, "a")
    await gateway.command("HSET", family.partition.record("a"), "watchers", stranger.encrypt("watchers", b"[]"))
    await gateway.command("HSET", family.partition.record("b"), "watchers", b"no json")
    assert await family.deliver(*names) == 2
    assert await family.outbox() == ["a"], "another process may have the key"
    assert await gateway.command("PTTL", family.partition.record("a")) == -1
    assert await family.numbers() == (3, 1, 2, 0)
    assert await family.look(), "the state of the children is what counts"
    assert await family.numbers() == (3, 3, 0, 0)
    assert [one.state for one in await family.outcomes(*names)] == [ChildEnd.SUCCEEDED] * 3
    await gateway.command("DEL", family.partition.outbox, family.partition.record("a"))


async def test_a_closed_partition_is_not_retired_while_it_has_joins_or_notices(
    family: Family, gateway: Gateway
) -> None:
    await family.spawn("a")
    await family.run()
    for partition in (family.partition, family.place.partition):
        await gateway.command("HSET", partition.closed, "route", "x", "last", "0-0")
    await SETTLING["succeed"](gateway, family.parent, "parent")

    async def retired(partition: Partition) -> bool:
        keys = [partition.ready, partition.nudge, partition.dead, partition.due, partition.closed]
        keys += [partition.retentions, partition.timeline, partition.outbox, partition.joins, partition.rings]
        found = await gateway.run(queue_script("retire_partition"), keys, [1000])
        return bool(found) or bool(await gateway.command("HEXISTS", partition.closed, "empty"))

    assert not await retired(family.partition)
    assert not await retired(family.place.partition)
    await family.look()
    await family.deliver("a")
    assert await retired(family.partition)
    assert await retired(family.place.partition)


async def test_many_children_in_a_window_end_once_each(family: Family) -> None:
    names = [f"c{number}" for number in range(300)]
    await family.spawn(*names, limit=20)
    ran: list[str] = []
    while len(ran) < 300:
        deliveries = await read(family.consumer, 20)
        for delivery in deliveries:
            name = str(delivery.task_id)
            await SETTLING["succeed"](family.gateway, delivery, name)
            ran.append(name)
        await asyncio.gather(*(family.deliver(str(one.task_id)) for one in deliveries for _ in range(2)))
    assert sorted(ran) == sorted(names)
    assert await family.numbers() == (300, 300, 0, 0)
    assert await find_task(family.gateway, Namespace(family.partition.namespace), "c299") == family.partition


class Dies(BaseException):
    """The process dies."""


@pytest.mark.parametrize("replied", [True, False], ids=["after the reply", "before the reply"])
async def test_a_process_may_die_after_each_of_its_writes(
    family: Family, monkeypatch: pytest.MonkeyPatch, replied: bool
) -> None:
    """After each script that spawning, delivery and closing run, another process finds out what is left to do."""
    run = Gateway.run
    left: int | None = None

    async def dying(self: Gateway, script: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        nonlocal left
        if left is None or script.name in ("finish", "due"):
            return await run(self, script, keys, args)
        left -= 1
        if left < 0 and not replied:
            raise Dies
        answer = await run(self, script, keys, args)
        if left <= 0:
            raise Dies
        return answer

    monkeypatch.setattr(Gateway, "run", dying)
    deaths, ended = 0, 0
    place = family.place
    for writes in range(1, 12):
        group = family.place = place._replace(group=f"g{writes}")
        names = [f"{writes}-{number}" for number in range(4)]
        for act in ("spawn", "deliver"):
            for _ in names if act == "deliver" else [""]:
                ran = await family.run() if act == "deliver" else ""
                ended += act == "deliver"
                try:
                    left = writes
                    await (family.spawn(*names, limit=2) if act == "spawn" else family.deliver(ran))
                except Dies:
                    deaths += 1
                    left = None
                    if act == "spawn":
                        await family.spawn(*names, limit=2)
                    await family.look()
                    await family.deliver(*await family.outbox())
                left = None
        assert await family.numbers() == (4, 4, 0, 0), writes
        assert await ended_children(family.gateway, group, 0) == names
        assert await family.outbox() == []
        assert await family.gateway.command("XLEN", family.partition.ready) == 0, "no child was enqueued twice"
        try:
            left = writes
            await close_join(family.gateway, group, retention=DAY)
        except Dies:
            deaths += 1
            left = None
            await close_join(family.gateway, group, retention=DAY)
        left = None
        assert await family.numbers() is None
    assert deaths >= 15
    assert ended == 44
    family.place = place

"""Lanes on every kind of server: which messages a read returns, and routes that lose or get lanes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Partition, Producer, find_task, list_queues, set_partitions
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.inspection.views import queue_partitions
from perdure.queues.lanes import LANES
from perdure.queues.partitions.assignment import PartitionAssignment
from perdure.queues.partitions.resharding import load_route, retire_generation, sync_route
from perdure.queues.partitions.route import Route
from perdure.queues.partitions.router import PartitionRouter

from tests.support.consumers import ids, read, worker


async def fill(producer: Producer, **counts: int) -> None:
    """Enqueue tasks on the default queue, the lowest lane first."""
    for lane in reversed(LANES):
        options: dict[str, Any] = {"idle": True} if lane == "idle" else {"priority": lane}
        if count := counts.get(lane):
            await producer.enqueue_many("t", [{"lane": lane}] * count, queue="default", **options)


def lanes_of(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.partition.lane for delivery in deliveries]


async def consumer_of(gateway: Gateway, namespace: Namespace, name: str = "a") -> Consumer:
    """Return a consumer that reads all partitions of the default queue."""
    return await worker(gateway, *await queue_partitions(gateway, namespace, "default"), name=name)


async def known_by(gateway: Gateway, namespace: Namespace, **options: Any) -> PartitionAssignment:
    assignment = PartitionAssignment(gateway, namespace, ["default"], "a", share=False, **options)
    await assignment.refresh()
    return assignment


# reads


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("most", [1, 2, 8, 20])
async def test_reads_take_the_highest_lane_but_for_the_turns_of_the_others(
    gateway: Gateway, namespace: Namespace, producer: Producer, partitions: int, most: int
) -> None:
    await set_partitions(gateway, namespace, "default", partitions)
    await fill(producer, low=12, normal=12, high=40)
    consumer, found = await consumer_of(gateway, namespace), list[str]()
    while taken := lanes_of(await read(consumer, most)):
        assert len(taken) <= most
        found += taken
    assert len(found) == 64
    mixed = found[: len(found) - found[::-1].index("high")]
    for first in range(len(mixed) - 7):
        assert set(mixed[first : first + 8]) != {"high"}
    assert len(mixed) <= 40 + 2 * 6


async def test_all_partitions_of_a_lane_are_read_before_the_next_lane(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """More partitions than slots, and few messages in some of them: the first ones fill most of the slots."""
    await set_partitions(gateway, namespace, "default", 24)
    await sync_route(gateway, namespace, "default", lanes=["high"])
    consumer = await consumer_of(gateway, namespace)
    await producer.enqueue_many("t", [{}] * 200, queue="default")
    for turn in range(8):
        keys = [f"{turn}-{number}" for number in range(6)]
        handles = [await producer.enqueue("t", queue="default", priority="high", key=key) for key in keys]
        taken = await read(consumer, 7)
        assert {handle.id for handle in handles} <= set(ids(taken))


@pytest.mark.parametrize("lane", LANES)
async def test_a_read_that_does_not_block_looks_at_all_partitions(
    gateway: Gateway, namespace: Namespace, producer: Producer, lane: str
) -> None:
    """Also after an empty read: a burst ends if it finds nothing, and a handler has just enqueued a task."""
    await set_partitions(gateway, namespace, "default", 24)
    await sync_route(gateway, namespace, "default", lanes=["high", "low", "idle"])
    consumer = await consumer_of(gateway, namespace)
    for _ in range(6):  # in any partition
        assert await read(consumer, 1) == []
        await fill(producer, **{lane: 1})
        assert lanes_of(await read(consumer, 1)) == [lane]
        assert await read(consumer, 1) == []


async def test_idle_messages_are_read_after_all_others_and_no_more_than_are_spare(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await fill(producer, idle=10, low=3, high=2)
    consumer = await consumer_of(gateway, namespace)

    async def take(most: int, spare: int) -> list[str]:
        return lanes_of((await consumer.read(most, block=None, spare=spare)).deliveries)

    assert await take(4, 4) == ["high", "high", "low", "low"]
    assert await take(4, 1) == ["low"]  # the spare slot has gone to a task of another lane
    assert await take(4, 0) == []
    assert await take(4, 3) == ["idle"] * 3
    assert await take(8, 2) == ["idle"] * 2
    assert (await consumer.read(8, block=0.01, spare=0)).deliveries == []
    assert await take(8, 8) == ["idle"] * 5


async def test_a_blocking_read_returns_no_more_idle_messages_than_are_spare(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """Also if they come while it blocks, beside those of other lanes."""
    await fill(producer, idle=1, normal=1)
    consumer = await consumer_of(gateway, namespace)
    assert sorted(lanes_of(await read(consumer, 8))) == ["idle", "normal"]
    await fill(producer, idle=6, normal=1)
    taken = lanes_of((await consumer.read(8, block=0.01, spare=2)).deliveries)
    assert taken == ["normal", "idle"]  # one of two spare slots is used by the other one
    assert lanes_of((await consumer.read(8, block=0.01, spare=2)).deliveries) == ["idle"] * 2


# routes


async def test_producers_that_add_lanes_at_the_same_time_add_each_once(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 2)
    others = [Producer(namespace=namespace.name, gateway=gateway) for _ in range(6)]
    options: list[dict[str, Any]] = [{"priority": "high"}, {"priority": "low"}, {"idle": True}] * 2
    calls = (one.enqueue("t", queue="default", **each) for one, each in zip(others, options, strict=True))
    handles = await asyncio.gather(*calls)
    route = await load_route(gateway, namespace, "default")
    assert route is not None
    assert route.lanes == LANES
    assert [generation.count for generation in route.generations] == [2, 2, 2, 2]
    for handle in handles:
        assert await find_task(gateway, namespace, handle.id) == handle.partition


async def test_a_lane_that_the_server_lost_comes_back_from_a_worker_that_knows_it(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default", priority="high")
    assignment = await known_by(gateway, namespace)
    await gateway.command("HSET", namespace.queues, "default", "1")
    await assignment.refresh()
    route = await load_route(gateway, namespace, "default")
    assert route is not None
    assert "high" in route.lanes
    assert handle.partition in assignment.read_from


@pytest.mark.parametrize("delay", [0, 60])
async def test_a_lane_that_only_its_producer_knows_is_found_by_its_tasks(
    gateway: Gateway, namespace: Namespace, producer: Producer, delay: float
) -> None:
    """The server lost the route before a worker had read it; the producer stored a task all the same."""
    await set_partitions(gateway, namespace, "default", 3)
    await producer.enqueue("t", queue="default", priority="low")
    await gateway.command("HSET", namespace.queues, "default", "3")
    handle = await producer.enqueue("t", queue="default", priority="low", delay=delay)
    assignment = await known_by(gateway, namespace)
    assert handle.partition in assignment.read_from
    assert (await _stored(gateway, namespace)).lanes == ("normal", "low")


async def test_a_route_of_an_earlier_version_gets_lanes(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    for stored in (b"2", b'{"generations":[[0,1],[1,3]]}'):
        await gateway.command("HSET", namespace.queues, "default", stored)
        width = Route.decode(stored).last.count
        async with Producer(namespace=namespace.name, gateway=gateway) as fresh:
            handle = await fresh.enqueue("t", queue="default", priority="low", key="a")
        route = await load_route(gateway, namespace, "default")
        assert route is not None
        assert route.of("normal") == Route.decode(stored)
        assert route.of("low") is not None
        assert route.latest[1].count == width
        assert handle.partition.index in route.latest[1].indexes


async def test_a_worker_adds_the_lanes_of_its_tasks_and_those_that_are_asked_for(
    gateway: Gateway, namespace: Namespace
) -> None:
    assignment = await known_by(gateway, namespace, lanes={"default": {"low"}, "other": {"high"}})
    assert {partition.lane for partition in assignment.read_from} == {"low", "normal"}
    assignment.want("default", "idle")
    assignment.want("other", "high")
    await assignment.refresh()
    assert {partition.lane for partition in assignment.served} == {"low", "normal", "idle"}


async def test_a_new_lane_nudges_workers_to_read_the_route(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    consumer = await worker(gateway, namespace.partition("default"))
    handle = await producer.enqueue("t", queue="default", idle=True)
    taken = await consumer.read(8, block=None)
    assert (taken.route_changed, taken.deliveries) == (True, [])
    assignment = await known_by(gateway, namespace)
    await consumer.assign(assignment.read_from, assignment.served)
    assert ids(await read(consumer, 8)) == [handle.id]


async def test_a_producer_that_may_not_add_a_lane_asks_for_it_and_stores_a_normal_task(
    gateway: Gateway, namespace: Namespace, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await worker(gateway, namespace.partition("default"))
    monkeypatch.setattr(gateway, "denied", {"set_route"})
    first = await producer.enqueue("t", queue="default", priority="high")
    assert first.partition.lane == "normal"
    taken = await consumer.read(8, block=None)
    assert taken.lanes == {("default", "high")}
    assert ids(taken.deliveries) == [first.id]


async def test_a_reshard_reads_each_lane_to_its_end_before_the_next_partitions(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await fill(producer, normal=1, high=1)
    await set_partitions(gateway, namespace, "default", 2)
    await fill(producer, normal=1, high=1)
    assignment = await known_by(gateway, namespace)
    assert sorted(partition.index for partition in assignment.read_from) == [0, 1_000_000]
    consumer = await worker(gateway, namespace.partition("default", 1_000_000))
    (delivery,) = await read(consumer, 8)
    await assignment.follow_changes()
    assert sorted(partition.index for partition in assignment.read_from) == [0, 1_000_000, 1_000_001, 1_000_002]
    assert delivery.partition in assignment.served


async def test_a_previous_generation_of_a_lane_is_retired(gateway: Gateway, namespace: Namespace) -> None:
    await sync_route(gateway, namespace, "default", lanes=["high"])
    route = await set_partitions(gateway, namespace, "default", 2)
    for generation in route.previous:
        assert await retire_generation(gateway, namespace, "default", await _stored(gateway, namespace), generation)
    assert await _stored(gateway, namespace) == Route(route.latest)


async def _stored(gateway: Gateway, namespace: Namespace) -> Route:
    found = await load_route(gateway, namespace, "default")
    assert found is not None
    return found


# ids


@pytest.mark.parametrize("first", LANES)
async def test_an_id_is_looked_up_in_all_lanes(
    gateway: Gateway, namespace: Namespace, producer: Producer, first: str
) -> None:
    """By any producer: also by one that has read the route before the lane was there, when it reads it again."""
    await set_partitions(gateway, namespace, "default", 3)
    home: Partition | None = None
    for lane in (first, *LANES):
        options: dict[str, Any] = {"idle": True} if lane == "idle" else {"priority": lane}
        async with Producer(namespace=namespace.name, gateway=gateway) as fresh:
            handle = await fresh.enqueue("t", queue="default", task_id="one", **options)
            home = home or handle.partition
            assert handle.partition == home
            assert handle.existed is (lane != first or handle.existed)
    (stats,) = await list_queues(gateway, namespace, "default")
    assert stats.depth == 1


async def test_a_router_of_a_lane_follows_a_closed_partition(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """A producer that knows the route before the change finds the next partitions of its lane."""
    router = PartitionRouter(gateway, namespace, "default").of("low")
    await router.refresh()
    await set_partitions(gateway, namespace, "default", 2)

    async def store(partition: Partition) -> bool:
        return not await gateway.command("EXISTS", partition.closed)

    found = await router.place(7, store)
    assert found.lane == "low"
    assert found.index in (await _stored(gateway, namespace)).latest[1].indexes

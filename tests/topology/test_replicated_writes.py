"""Writes of producers to a cluster, and the replicas that confirm them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from perdure import NotReplicated, Producer, State, TaskHandle, TaskNotFound, Unavailable
from perdure.queues.transport.replication import Replication
from redis.exceptions import ResponseError

from tests.support.servers.clusters import Cluster, private_cluster, slot_of
from tests.support.servers.nodes import Node, wait_for
from tests.support.workers import bounded

pytestmark = [pytest.mark.cluster, pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
async def cluster(server_program: Path) -> AsyncIterator[Cluster]:
    """A separate cluster for the test."""
    with private_cluster(server_program) as cluster:
        yield cluster


@pytest.fixture
async def producer(cluster: Cluster, namespace_name: str) -> AsyncIterator[Producer]:
    async with Producer(cluster.url(), namespace=namespace_name, replication=Replication(1, 2.0)) as producer:
        yield producer


async def test_a_write_that_only_a_killed_primary_had_was_not_confirmed(cluster: Cluster, producer: Producer) -> None:
    """Replication is asynchronous: a plain `enqueue` returns when the primary has the task."""
    slot = slot_of(producer.namespace.partition("default").ready)
    kept = await producer.enqueue("task", durability="replicated", queue="default")
    (replica,) = cluster.replicas_of(cluster.owner(slot))
    replica.freeze()
    cluster.owner(slot).command("CLIENT", "KILL", "TYPE", "replica")  # so that no write waits in its socket buffer
    gone = await producer.enqueue("task", queue="default")
    assert await gone.status() is State.QUEUED
    with pytest.raises(NotReplicated):
        await producer.enqueue("task", task_id="unsure", durability="replicated", queue="default")
    victim = await run_sync(cluster.kill_primary, slot)
    replica.thaw()
    await run_sync(cluster.failed_over, slot, victim)
    assert await kept.status() is State.QUEUED
    with pytest.raises(TaskNotFound):
        await gone.status()
    assert await producer.find("unsure") is None
    await run_sync(cluster.restart, victim)
    assert await (await confirmed_on(producer, "default", "unsure")).status() is State.QUEUED


def has(replica: Node, key: str) -> bool:
    """Whether a replica has a key; it may not know yet that its primary owns the slot."""
    found: list[bool] = []

    def answers() -> bool:
        with suppress(ResponseError):
            found.append(replica.command("EXISTS", key) == 1)
        return bool(found)

    wait_for(answers, "the replica to know its slots")
    return found[0]


async def confirmed_on(producer: Producer, queue: str, task_id: str) -> TaskHandle[Any]:
    """Enqueue under the same id until the task is confirmed."""
    while True:
        try:
            return await bounded(producer.enqueue("task", queue=queue, task_id=task_id, durability="replicated"))
        except Unavailable:
            await anyio.sleep(0.05)


async def test_replicas_of_the_partitions_node_are_asked(cluster: Cluster, producer: Producer) -> None:
    """One node's replica is frozen: writes to the other nodes are confirmed, and migrated slots are followed."""
    slots: dict[str, int] = {}
    while len({cluster.owner(slot) for slot in slots.values()}) < len(cluster.serving()):
        name = f"q{len(slots)}"
        slots[name] = slot_of(producer.namespace.partition(name).ready)
    queues = list(slots)
    handles = [await producer.enqueue("task", queue=queue, durability="replicated") for queue in queues]
    hit = queues[0]
    (replica,) = cluster.replicas_of(cluster.owner(slots[hit]))
    replica.freeze()
    try:
        for queue in queues:
            if cluster.owner(slots[queue]) is cluster.owner(slots[hit]):
                with pytest.raises(NotReplicated):
                    await producer.enqueue("task", queue=queue, durability="replicated")
            else:
                await producer.enqueue("task", queue=queue, durability="replicated")
    finally:
        replica.thaw()
    serving = cluster.serving()
    target = serving[(serving.index(cluster.owner(slots[hit])) + 1) % len(serving)]
    move = cluster.migrate(slots[hit], target)
    await run_sync(move.begin)
    moving = asyncio.create_task(confirmed_on(producer, hit, "while-moving"))  # meets ASK and TRYAGAIN
    await run_sync(move.keys)
    await run_sync(move.finish)
    moved = await confirmed_on(producer, hit, "moved")
    (copy,) = cluster.replicas_of(target)
    copy.command("READONLY")
    for handle in (await moving, moved):
        assert await run_sync(has, copy, handle.partition.record(handle.id))
    assert len({handle.id for handle in handles}) == len(queues)


async def test_a_primary_that_requires_replicas_refuses_writes_without_them(
    cluster: Cluster, producer: Producer
) -> None:
    """`min-replicas-to-write`: the producer gets an error, and nothing is stored."""
    owner = cluster.owner(slot_of(producer.namespace.partition("default").ready))
    (replica,) = cluster.replicas_of(owner)
    owner.command("CONFIG", "SET", "min-replicas-to-write", 1)
    owner.command("CONFIG", "SET", "min-replicas-max-lag", 1)
    assert await (await producer.enqueue("task", queue="default")).status() is State.QUEUED
    replica.freeze()
    await run_sync(
        wait_for, lambda: owner.info("replication")["min_slaves_good_slaves"] == "0", "the lag to be noticed"
    )
    producer.gateway.patience = 0.0
    with pytest.raises(Unavailable, match="NOREPLICAS"):
        await producer.enqueue("task", task_id="refused", queue="default")
    replica.thaw()
    await run_sync(wait_for, lambda: owner.info("replication")["min_slaves_good_slaves"] == "1", "the replica's return")
    assert await producer.find("refused") is None
    assert await (await producer.enqueue("task", task_id="refused", queue="default")).status() is State.QUEUED

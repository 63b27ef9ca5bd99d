"""The janitor: it removes the names of presumed dead workers once they hold no pending message."""

from __future__ import annotations

from functools import partial

from perdure.queues import Gateway, Namespace, Partition, Producer, WorkerInfo
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.paused_tasks import wake_paused
from perdure.queues.keys import GROUP
from perdure.queues.partitions.assignment import PartitionAssignment
from perdure.queues.pauses import Pauses
from perdure.queues.presence import announce
from perdure.worker.runtime.maintenance.janitor import Janitor

from tests.support.consumers import LONG_AGO, age, claim_all, consumers, pending, read_one, worker

IDLE_AT_ONCE = -1.0
"""Idle time after which the janitor removes a consumer: Redis' idle times of consumers cannot be set."""


async def announced(gateway: Gateway, namespace: Namespace, name: str, *, seen: float) -> None:
    """Announce a worker that sends a heartbeat each second and sent the last one `seen` seconds ago."""
    info = WorkerInfo(name, "x", "h", 7, "0.1", ("default",), concurrency=8, in_flight=3, started=0, interval=1.0)
    await announce(gateway, namespace, info, ttl=60)
    now = int((await gateway.command("TIME", node_of=namespace.workers))[0])
    await gateway.command("HSET", namespace.worker(name), "seen", round((now - seen) * 1000))


async def clean(gateway: Gateway, namespace: Namespace, partition: Partition, consumer: Consumer) -> None:
    assignment = PartitionAssignment(gateway, namespace, [partition.queue], "me", share=False)
    await assignment.refresh()
    await gateway.command("DEL", partition.clean_lock)
    janitor = Janitor(
        gateway,
        namespace,
        assignment,
        consumer,
        dead_letter_ttl=lambda: 60.0,
        worker="me",
        wake_paused=partial(wake_paused, gateway, pauses=Pauses()),
        idle_consumer=IDLE_AT_ONCE,
    )
    await janitor.clean()


async def test_only_names_of_presumed_dead_workers_are_removed(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    me = await worker(gateway, partition, name="me")
    for name in ("me", "alive", "silent", "forgotten"):
        for stream in (partition.ready, partition.nudge):
            await gateway.command("XGROUP", "CREATECONSUMER", stream, GROUP, name)
    await announced(gateway, namespace, "me", seen=0)
    await announced(gateway, namespace, "alive", seen=0)
    await announced(gateway, namespace, "silent", seen=5)
    await clean(gateway, namespace, partition, me)
    assert await consumers(gateway, partition.ready) == {"me", "alive"}
    assert await consumers(gateway, partition.nudge) == {"me", "alive"}


async def test_a_dead_workers_name_is_removed_after_its_messages_were_claimed(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition, name="dead"))
    me = await worker(gateway, partition, name="me")
    await announced(gateway, namespace, "me", seen=0)
    await announced(gateway, namespace, "dead", seen=3600)
    await clean(gateway, namespace, partition, me)
    assert [owner for _, owner, _, _ in await pending(gateway, partition)] == ["dead"]
    await age(gateway, delivery, LONG_AGO)
    assert [one.entry for one in await claim_all(me)] == [delivery.entry]
    await clean(gateway, namespace, partition, me)
    assert await consumers(gateway, partition.ready) == {"me"}
    assert [owner for _, owner, _, _ in await pending(gateway, partition)] == ["me"]


async def test_a_worker_presumed_dead_continues_under_its_name(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """Its next read adds it to the group again, and returns the waiting messages."""
    late, me = await worker(gateway, partition, name="late"), await worker(gateway, partition, name="me")
    await gateway.command("XGROUP", "CREATECONSUMER", partition.ready, GROUP, "late")
    await announced(gateway, namespace, "me", seen=0)
    await clean(gateway, namespace, partition, me)
    assert "late" not in await consumers(gateway, partition.ready)
    await producer.enqueue("t", task_id="x", queue="default")
    assert (await read_one(late)).worker == "late"
    assert [owner for _, owner, _, _ in await pending(gateway, partition)] == ["late"]

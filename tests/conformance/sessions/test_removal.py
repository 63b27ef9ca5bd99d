"""Removal of a task: whatever place it is in, nothing is left, and nothing that its worker writes later is stored."""

from __future__ import annotations

import pytest
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer
from perdure.queues.sessions.removal import forget_task

from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import FENCED
from tests.support.task_places import keys, places

RUNNING = "record"
PLACES = [RUNNING, "succeed", "cancelled", "reschedule", "park", "release", "bury"]


@pytest.mark.parametrize("act", ["enqueued", *PLACES])
async def test_a_task_is_deleted_in_whatever_place_it_is(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, act: str
) -> None:
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    await handle.send("a message")
    delivery = None
    if act != "enqueued":
        delivery = await read_one(await worker(gateway, partition))
        await FENCED[RUNNING](gateway, delivery, "x")
        if act != RUNNING:
            await FENCED[act](gateway, delivery, "x")
    for _ in range(2):
        await forget_task(gateway, partition, "x")
        assert [key for key in await keys(gateway, namespace) if key.endswith(b":x")] == []
        assert await places(gateway, partition, "x") == []
        assert await gateway.command("ZSCORE", partition.timeline, "x") is None
    if delivery is not None:
        for late in FENCED.values():
            with pytest.raises(LeaseLost):
                await late(gateway, delivery, "x")
    assert [key for key in await keys(gateway, namespace) if key.endswith(b":x")] == []
    assert await gateway.command("XLEN", partition.dead) == 0

"""What tasks have saved, found by the beginning of its name; and the id of a deployment."""

from __future__ import annotations

import asyncio

from perdure.queues import Gateway, Namespace, Partition
from perdure.queues.inspection.views import checkpoint_fields, checkpoint_fields_of_all
from perdure.queues.partitions.resharding import sync_route
from perdure.queues.presence import deployment_id


async def checkpoint(gateway: Gateway, partition: Partition, task_id: str, **fields: str) -> None:
    pairs = [part for name, value in fields.items() for part in (name.replace("_", ":", 1), value)]
    await gateway.command("HSET", partition.record(task_id), "state", "queued")
    await gateway.command("HSET", partition.steps(task_id), *pairs)


async def test_fields_of_one_task_and_of_all(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    await sync_route(gateway, namespace, partition.queue)
    many = {f"s_a:{number}": str(number) for number in range(1200)}  # more than a page, and no small hash
    await checkpoint(gateway, partition, "many", **many, **{f"d_{number}": "x" for number in range(100)})
    await checkpoint(gateway, partition, "one", s_a="whole", s_b="other", d_a="result", i_a="intent")
    await checkpoint(gateway, partition, "none", d_a="result")
    assert await checkpoint_fields(gateway, partition, "one", "a") == {"a": b"whole"}
    assert await checkpoint_fields(gateway, partition, "missing", "a") == {}
    found = {
        task_id: (where, saved) async for where, task_id, saved in checkpoint_fields_of_all(gateway, namespace, "a")
    }
    assert {where for where, _ in found.values()} == {partition}
    assert {task_id: len(saved) for task_id, (_, saved) in found.items()} == {"many": 1200, "one": 1, "none": 0}
    assert found["many"][1]["a:7"] == b"7"


async def test_a_deployment_has_one_id(gateway: Gateway, namespace: Namespace) -> None:
    ids = set(await asyncio.gather(*(deployment_id(gateway, namespace) for _ in range(8))))
    other = await deployment_id(gateway, Namespace(f"{namespace.name}x"))
    await gateway.command("DEL", Namespace(f"{namespace.name}x").deployment)
    assert len(ids) == 1
    assert len(other) == 32
    assert other not in ids

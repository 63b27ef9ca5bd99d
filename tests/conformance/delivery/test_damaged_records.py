"""Records with values that no version has written: the error names the key and the field."""

from __future__ import annotations

import re

import pytest
from perdure.queues import Gateway, Partition, Producer
from perdure.queues.errors import UnreadableRecord


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("attempts", "many", "attempts must be a number, got b'many'"),
        ("at", "inf", "at must be a number, got b'inf'"),
        ("run", "nan", "run must be a number, got b'nan'"),
        ("state", "lost", "'lost' is not a valid State"),
        ("state", b"\xff", "can't decode byte 0xff"),
    ],
)
async def test_a_damaged_field_is_named(
    gateway: Gateway, partition: Partition, producer: Producer, field: str, value: str | bytes, problem: str
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    await gateway.command("HSET", partition.record("x"), field, value)
    with pytest.raises(UnreadableRecord, match=re.escape(f"could not read {partition.record('x')}: ")) as found:
        await handle.record()
    assert problem in str(found.value)
    await gateway.command("HSET", partition.record("x"), "state", "queued")


async def test_a_damaged_inbox_is_named(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    await gateway.command("HSET", partition.inbox("x"), "sent", "many")
    with pytest.raises(UnreadableRecord, match=re.escape(partition.inbox("x"))):
        await handle.record()
    await gateway.command("DEL", partition.inbox("x"))

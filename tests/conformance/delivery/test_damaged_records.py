"""Records with values that no version has written: the error names the key and the field."""

from __future__ import annotations

import re

import pytest
from perdure.deadletter.letters import DAMAGED, Filter, find_letter, list_letters
from perdure.deadletter.replay import purge
from perdure.queues import Gateway, Partition, Producer
from perdure.queues.errors import UnreadableRecord
from perdure.queues.explanation.facts import read_facts


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("attempts", "many", "attempts must be a number, got 'many'"),
        ("at", "inf", "at must be a number, got 'inf'"),
        ("run", "nan", "run must be a number, got 'nan'"),
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


async def test_a_damaged_count_of_an_inbox_counts_as_none(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    await gateway.command("HSET", partition.inbox("x"), "sent", "many")
    assert (await handle.record()).unused == 0
    await gateway.command("DEL", partition.inbox("x"))


@pytest.mark.parametrize(
    ("letter", "problem"),
    [({"attempts": "many"}, "a field is damaged (invalid literal"), ({"task": None}, "field task is missing")],
)
async def test_a_damaged_dead_letter_is_named(
    gateway: Gateway, partition: Partition, letter: dict[str, str | None], problem: str
) -> None:
    fields = {"id": "x", "task": "t", "reason": "timeout", "evidence": "{}", "attempts": "1", "crashes": "0"}
    kept = {name: value for name, value in ({**fields, "worker": "w"} | letter).items() if value is not None}
    await gateway.command("XADD", partition.dead, "1-0", *(part for pair in kept.items() for part in pair))
    (unnamed,) = [letter async for letter in list_letters(gateway, [partition], Filter())]
    assert (unnamed.id, unnamed.reason) == ("entry-1-0", DAMAGED)
    assert unnamed.message.startswith(f"could not read entry 1-0 of {partition.dead}: {problem}")
    assert await find_letter(gateway, [partition], "entry-1-0") == unnamed
    await gateway.command("HSET", partition.record("x"), "state", "dead", "dead", "1-0")
    (listed,) = [letter async for letter in list_letters(gateway, [partition], Filter())]
    assert (listed.id, listed.reason) == ("x", DAMAGED)
    assert await find_letter(gateway, [partition], "x") == listed
    assert await purge(gateway, listed)
    assert await gateway.command("EXISTS", partition.dead, partition.record("x")) == 1  # the empty stream
    assert await find_letter(gateway, [partition], "entry-1-0") is None


@pytest.mark.parametrize("entry", [b"\xff", b"", b"-", b"+", b"1-1", b"9" * 30 + b"-1"])
async def test_a_record_that_names_no_letter_has_none(gateway: Gateway, partition: Partition, entry: bytes) -> None:
    await gateway.command("XADD", partition.dead, "5-0", "id", "another")
    await gateway.command("HSET", partition.record("x"), "dead", entry)
    assert await find_letter(gateway, [partition], "x") is None
    await gateway.command("DEL", partition.record("x"))
    await gateway.command("SET", partition.record("x"), "another type", "EX", 60)
    assert await find_letter(gateway, [partition], "x") is None
    await gateway.command("DEL", partition.dead)


async def test_the_explanation_names_a_damaged_field(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await gateway.command("HSET", partition.record("x"), "returned", "many")
    with pytest.raises(UnreadableRecord, match="returned must be a number, got 'many'"):
        await read_facts(gateway, partition, "x")
    await gateway.command("HDEL", partition.record("x"), "returned")

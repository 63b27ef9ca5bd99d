"""Records of calls for people: the prompts of model calls, and what calls have cost.

They are keyed items of streams whose names begin with `~`, which readers of the task's streams do not get. So they are
fenced, numbered and encrypted as the checkpoint is, are written with it in the background, and are kept as long as the
record of the task. No run reads them: a resumed run that makes the same record again stores it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import DecryptionError
from ...queues.keys import Partition
from ...queues.runtime import RUNTIME
from ...queues.stream_items import INTERNAL, decode_item, entry_id, key_digest, keyed_place, number_of_id
from ...queues.transport.gateway import Gateway
from .run import Run
from .spent import Charge, Spent

PROMPTS: Final = f"{INTERNAL}prompts"
"""Stream of the prompts of an agent: see worker/agents/context/recorded.py."""

CHARGES: Final = f"{INTERNAL}charges"
"""Stream of what calls have cost."""

MAX_CHARGES: Final = 1000
"""Charges that are kept, about; the latest."""


async def record_call(run: Run, stream: str, key: str, data: bytes, keep: int) -> None:
    """Record a call. key: equal for records that are stored once. keep: how many of the stream are kept, about."""
    place = keyed_place(stream, keep, key_digest(key))
    await run.recorder.put(Entry(Kind.EMITTED, place, data), wait=False)


class CallRecord(NamedTuple):
    """A stored record of a call.

    Attributes:
        number: Its place in the stream, from 1.
        at: Milliseconds of Redis' clock.
        data: Empty if it cannot be read.
        problem: Why it cannot be read.
    """

    number: int
    at: int
    data: bytes
    problem: str | None = None


async def read_calls(
    gateway: Gateway, partition: Partition, task_id: str, stream: str, *, before: int | None = None, limit: int = 1000
) -> list[CallRecord]:
    """Return the latest records of a stream, or the latest before a number, the newest first."""
    newest = "+" if before is None else f"({entry_id(before)}"
    key = partition.stream(task_id, stream)
    return _opened(gateway, partition, task_id, stream, await _entries(gateway, "XREVRANGE", key, newest, "-", limit))


async def read_call(
    gateway: Gateway, partition: Partition, task_id: str, stream: str, number: int
) -> CallRecord | None:
    """Return one record of a stream, or None."""
    place, key = entry_id(number), partition.stream(task_id, stream)
    found = _opened(gateway, partition, task_id, stream, await _entries(gateway, "XRANGE", key, place, place, 1))
    return found[0] if found else None


async def count_calls(gateway: Gateway, partition: Partition, task_id: str, stream: str) -> int:
    """Return how many records of a stream are kept."""
    return int(await gateway.command("XLEN", partition.stream(task_id, stream)))


async def _entries(gateway: Gateway, command: str, key: str, first: str, last: str, limit: int) -> Sequence[Any]:
    entries: Sequence[Any] = await gateway.command(command, key, first, last, "COUNT", limit)
    return entries


def _opened(
    gateway: Gateway, partition: Partition, task_id: str, stream: str, entries: Sequence[Any]
) -> list[CallRecord]:
    cipher = gateway.encryptor.of(partition, task_id)
    found: list[CallRecord] = []
    for place, fields in entries:
        number = 0
        try:
            number = number_of_id(place.partition(b"-")[0])
            stored = decode_item(place, fields)
            if stored.cut:
                continue
            found.append(CallRecord(number, stored.at, cipher.decrypt(stored.field(stream), stored.data)))
        except (DecryptionError, ValueError) as error:
            found.append(CallRecord(number, 0, b"", str(error)))
    return found


# charges


async def record_charge(run: Run, spent: Spent, amounts: Mapping[str, int], *, step: str = "", tries: int = 1) -> None:
    """Record what a call has cost.

    Args:
        amounts: What was charged, as budgets count it.
        step: Key of the step that made the call; empty outside of steps.
        tries: Number of the step's try.
    """
    usage = spent.usage
    charge = Charge(
        step,
        tries,
        run.history.counters.attempts + 1,
        amounts.get("tokens"),
        usage.input_tokens,
        usage.output_tokens,
        None if "usd" not in amounts else Decimal(amounts["usd"]) / 1_000_000_000,
        spent.model or "",
    )
    run.charged(charge)
    await record_call(run, CHARGES, RUNTIME.token(16), charge.encode(), MAX_CHARGES)


class StepCost(NamedTuple):
    """Cost of the calls of one step in one attempt. unpriced: calls whose dollars are not known."""

    step: str
    attempt: int
    tries: int
    calls: int
    tokens: int
    usd: Decimal
    unpriced: int
    models: tuple[str, ...]


def cost_by_step(charges: Sequence[Charge]) -> list[StepCost]:
    """Sum charges by step and attempt, in the order of their first ones."""
    groups: dict[tuple[str, int], list[Charge]] = {}
    for charge in charges:
        groups.setdefault((charge.step, charge.attempt), []).append(charge)
    return [
        StepCost(
            step,
            attempt,
            max(charge.tries for charge in group),
            len(group),
            sum(charge.tokens or 0 for charge in group),
            sum((charge.usd or Decimal(0) for charge in group), Decimal(0)),
            sum(charge.usd is None for charge in group),
            tuple(sorted({charge.model for charge in group if charge.model})),
        )
        for (step, attempt), group in groups.items()
    ]

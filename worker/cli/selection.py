"""Which dead letters a command is about: some by their ids, or all that match."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ...deadletter import DeadLetter, Filter, Reason, count_letters, find_letter, list_letters
from ...queues import Partition, Producer
from .failures import Failed, Misuse
from .lookup import known_partitions

__all__ = ["Selection", "select"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Dead letters, and how many they are; None where that takes reading them all."""

    letters: AsyncIterator[DeadLetter]
    count: int | None


async def select(
    producer: Producer,
    ids: Sequence[str],
    every: bool,
    *,
    queue: str | None,
    reason: Reason | None,
    task: str | None,
) -> Selection:
    """The letters meant, the oldest first. All ids are looked up before anything happens to one of them.

    Of `every` letter those are meant that are dead now: what dies again while it is replayed is not met twice.
    """
    narrowed = queue is not None or reason is not None or task is not None
    if ids and (every or narrowed):
        raise Misuse("give ids, or --all with --queue, --reason and --task: not both")
    if not ids and not every:
        raise Misuse("say which: ids, or --all (with --queue, --reason, --task for some of them)")
    partitions = await known_partitions(producer, queue)
    if ids:
        return Selection(_each(await _find(producer, partitions, list(dict.fromkeys(ids)))), len(set(ids)))
    wanted = Filter(reason, task)
    count = None if reason or task else await count_letters(producer.gateway, partitions)
    return Selection(_until_now(producer, await _last_entries(producer, partitions), wanted), count)


async def _find(producer: Producer, partitions: Sequence[Partition], ids: Sequence[str]) -> list[DeadLetter]:
    found = {task_id: await find_letter(producer.gateway, partitions, task_id) for task_id in ids}
    missing = [task_id for task_id, letter in found.items() if letter is None]
    if missing:
        where = f"namespace {producer.namespace.name!r} on {producer.address.shown}"
        raise Failed(f"no dead letter {', '.join(missing)} in {where}: nothing was done")
    return [letter for letter in found.values() if letter is not None]


async def _each(letters: Sequence[DeadLetter]) -> AsyncIterator[DeadLetter]:
    for letter in letters:
        yield letter


async def _last_entries(producer: Producer, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
    newest = await producer.gateway.pipeline(
        [("XREVRANGE", partition.dead, "+", "-", "COUNT", 1) for partition in partitions]
    )
    return {partition: _order(page[0][0].decode()) for partition, page in zip(partitions, newest, strict=True) if page}


async def _until_now(
    producer: Producer, last: dict[Partition, tuple[int, int]], wanted: Filter
) -> AsyncIterator[DeadLetter]:
    for partition, end in last.items():
        async for letter in list_letters(producer.gateway, [partition], wanted, oldest_first=True):
            if _order(letter.entry) > end:
                break
            yield letter


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)

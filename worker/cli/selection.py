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

    Of `every` letter those are meant that are dead by now: what dies again while it is replayed is not met twice.
    """
    narrowed = queue is not None or reason is not None or task is not None
    if ids and (every or narrowed):
        raise Misuse("give ids, or --all with --queue, --reason and --task: not both")
    if not ids and not every:
        raise Misuse("say which: ids, or --all (with --queue, --reason, --task for some of them)")
    partitions = await known_partitions(producer, queue)
    if ids:
        return Selection(_each(await _find(producer, partitions, ids)), len(set(ids)))
    count = None if reason or task else await count_letters(producer.gateway, partitions)
    return Selection(list_letters(producer.gateway, partitions, Filter(reason, task), oldest_first=True), count)


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

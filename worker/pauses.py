"""Pauses as operators make and end them, with what they hold: for commands and pages.

`queues/pauses.py` stores the rules; here are the checks before, and the tasks that are queued again after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..queues.argument_conditions import ArgumentCondition
from ..queues.catalog import Catalog
from ..queues.defaults import nearest
from ..queues.delivery.paused_tasks import count_held, wake_paused
from ..queues.errors import Refused, WrongType
from ..queues.inspection.views import queue_partitions
from ..queues.keys import Partition
from ..queues.pauses import MAX_CONDITIONS, PauseRule, Pauses, PauseStore, load_pauses
from ..queues.producer import Producer
from .defined_secrets import check_conditions

_PAGES: Final = 1_000_000
"""Pages of tasks of a partition that a resumption wakes at most: all of them."""

_CONCURRENT: Final = 16
"""Partitions whose tasks are woken at the same time."""


@dataclass(frozen=True, slots=True)
class PauseOutcome:
    """Outcome of a pause.

    Attributes:
        rule: As it is stored.
        stored: Whether this call has stored it; else it was paused already.
        notes: A sentence for each name that no worker and no producer knows, as a pause may come before it.
    """

    rule: PauseRule
    stored: bool
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class ResumeOutcome:
    """Outcome of the end of a pause.

    Attributes:
        rule: As it was stored.
        woken: Tasks that are queued again.
        still: Pauses that may hold some of the same tasks.
        notes: A sentence for each partition whose tasks were not woken.
    """

    rule: PauseRule
    woken: int
    still: Sequence[PauseRule]
    notes: Sequence[str]


class HeldTasks(NamedTuple):
    """A pause, and the number of tasks that it has parked; None for a pause of a whole queue, which parks none."""

    rule: PauseRule
    held: int | None


def checked_rule(
    queue: str | None, task: str | None, where: Sequence[ArgumentCondition], *, by: str = "", why: str = ""
) -> PauseRule:
    """Return a rule. Raises `ValueError` if it names neither a queue nor tasks, or has too many conditions."""
    rule = PauseRule(queue, task, tuple(where), by=by, why=why)
    if rule.queue is None and rule.whole_queue:
        raise ValueError("name a queue, or tasks by their name or by conditions on their arguments")
    if len(rule.where) > MAX_CONDITIONS:
        raise ValueError(f"give at most {MAX_CONDITIONS} conditions, got {len(rule.where)}")
    return rule


async def pause(producer: Producer, rule: PauseRule) -> PauseOutcome:
    """Store a rule. One that exists stays.

    Raises:
        ValueError: A condition is on a secret argument.
        PauseError: There are too many pauses.
    """
    notes = await _unknown(producer, rule)
    await check_conditions(producer, rule.where, rule.task)
    if not rule.whole_queue:
        with suppress(Refused):  # what this user may not read is not checked
            notes += _unknown_names(await producer.catalog(), rule)
    stored, new = await PauseStore(producer.gateway, producer.namespace).add(rule)
    return PauseOutcome(stored, new, notes)


async def resume(producer: Producer, rule: PauseRule) -> ResumeOutcome | None:
    """End the pause with the queue, task and conditions of a rule; return None without such a pause."""
    removed = await PauseStore(producer.gateway, producer.namespace).remove(rule)
    if removed is None:
        return None
    pauses = await load_pauses(producer.gateway, producer.namespace)
    notes: list[str] = []
    woken = 0 if removed.whole_queue else await _wake(producer, removed, pauses, notes)
    return ResumeOutcome(removed, woken, [one for one in pauses.rules if _overlap(one, removed)], notes)


async def held_tasks(producer: Producer, pauses: Pauses) -> list[HeldTasks]:
    """Return the pauses with the number of tasks that each has parked."""
    place = (producer.gateway, producer.namespace)
    held = await count_held(producer.gateway, await queue_partitions(*place), pauses.of_tasks)
    return [HeldTasks(rule, None if rule.whole_queue else held[rule.number]) for rule in pauses.rules]


async def _wake(producer: Producer, rule: PauseRule, pauses: Pauses, notes: list[str]) -> int:
    """Queue what a rule held, in all partitions; return the number of tasks. notes: gets what was not woken."""
    partitions = await queue_partitions(producer.gateway, producer.namespace, rule.queue)
    woken = 0
    for start in range(0, len(partitions), _CONCURRENT):
        some = partitions[start : start + _CONCURRENT]
        done = await asyncio.gather(*(_wake_in(producer, partition, pauses, notes) for partition in some))
        woken += sum(done)
    return woken


async def _wake_in(producer: Producer, partition: Partition, pauses: Pauses, notes: list[str]) -> int:
    try:
        return (await wake_paused(producer.gateway, partition, pauses, pages=_PAGES)).woken
    except WrongType as error:
        notes.append(
            f"queue {partition.queue}, partition {partition.index}: {error}; a worker mends it within a minute"
        )
        return 0


def _overlap(one: PauseRule, other: PauseRule) -> bool:
    """Return whether two rules may hold the same task."""
    queues, tasks = {one.queue, other.queue} - {None}, {one.task, other.task} - {None}
    return len(queues) <= 1 and len(tasks) <= 1


async def _unknown(producer: Producer, rule: PauseRule) -> list[str]:
    """Return a sentence if the queue of a rule does not exist yet; nothing if this user may not read the queues."""
    with suppress(Refused):
        known = {partition.queue for partition in await queue_partitions(producer.gateway, producer.namespace)}
        if rule.queue is not None and rule.queue not in known:
            names = ", ".join(sorted(known)) or "none"
            place = f"in namespace {producer.namespace.name!r} on {producer.address.shown}"
            hint = nearest(rule.queue, known)
            return [f"there is no queue {rule.queue!r} yet {place}; existing queues: {names}{hint}"]
    return []


def _unknown_names(catalog: Catalog, rule: PauseRule) -> Iterator[str]:
    """Yield a sentence for each name of a rule that no published task has."""
    tasks = [task for task in catalog.all_versions if rule.task in (None, task.name)]
    if not tasks:
        yield f"no worker has published a task {rule.task!r}{catalog.hint(rule.task or '')}"
        return
    for condition in rule.where:
        name, known = condition.path[0], set[str]()
        for task in tasks:
            known |= {*((task.arguments or {}).get("properties") or {name: None})}  # without a schema, any may exist
        if name not in known and rule.task is None:
            yield f"no published task has an argument {name!r}{nearest(name, known)}"
        elif name not in known:
            yield f"task {rule.task!r} has no argument {name!r}{nearest(name, known)}"

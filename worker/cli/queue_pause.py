"""`perdure queue pause` and `resume`: hold a queue, the tasks of a name, or tasks with certain arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import typer

from ...queues.argument_conditions import ArgumentCondition
from ...queues.catalog import Catalog
from ...queues.defaults import nearest
from ...queues.delivery.paused_tasks import count_held, wake_paused
from ...queues.errors import Refused, WrongType
from ...queues.inspection.views import queue_partitions
from ...queues.keys import Partition
from ...queues.pauses import MAX_CONDITIONS, PauseRule, Pauses, PauseStore, load_pauses
from ...queues.producer import Producer
from ...queues.wording import counted, listed
from .support.connection import connected, redis_now, where
from .support.errors import Failed, Misuse
from .support.jobs import public_conditions
from .support.options import By, TaskNameOption, Where, login, read_queue
from .support.output import Time, Value, note
from .support.runner import Output

_PAGES: Final = 1_000_000
"""Pages of tasks of a partition that a resumption wakes at most: all of them."""

_CONCURRENT: Final = 16
"""Partitions whose tasks are woken at the same time."""

_QueueName = Annotated[
    str | None,
    typer.Argument(metavar="[QUEUE]", parser=read_queue, help="Name of the queue. Default: tasks of all queues."),
]
_Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the pause.", show_default=False)]


@connected
async def pause(
    producer: Producer,
    queue_name: _QueueName = None,
    *,
    task: TaskNameOption = None,
    conditions: Where = None,
    by: By = None,
    why: _Why = "",
) -> Output:
    """Start no tasks of a queue, of a name, or with certain arguments, until they are resumed.

    Workers follow within a moment, also those that start later. Running
    tasks continue; new ones are stored and wait. QUEUE alone: workers read nothing
    from it. With --task or --where: workers park the tasks that match, when
    they would start or continue; that costs no attempt.

    Example: perdure queue pause audit --task report --where tenant=acme --why "their database is down"
    """
    given = _rule(queue_name, task, conditions, login() if by is None else by, why)
    await _check(producer, given)
    rule, stored = await PauseStore(producer.gateway, producer.namespace).add(given)
    now = await redis_now(producer)
    notes = [] if stored else [f"it was paused already {rule.origin(now)}: nothing was changed"]
    return Output(_data(rule), _fields(rule), notes=notes)


@connected
async def resume(
    producer: Producer,
    queue_name: _QueueName = None,
    *,
    task: TaskNameOption = None,
    conditions: Where = None,
) -> Output:
    """End a pause: give the same QUEUE, --task and --where as the pause had.

    'perdure queue list' shows the pauses with the command that ends each.
    Tasks that were parked are queued again, all at once. Prints the pause
    that was ended.

    Example: perdure queue resume audit --task report --where tenant=acme
    """
    given = _rule(queue_name, task, conditions)
    rule = await PauseStore(producer.gateway, producer.namespace).remove(given)
    pauses = await load_pauses(producer.gateway, producer.namespace)
    if rule is None:
        known = listed((one.command for one in pauses.rules), 5, "; ") or "none"
        raise Failed(f"there is no pause of {given.target} {where(producer)}; to end those that exist: {known}")
    woken = 0 if rule.whole_queue else await _wake(producer, rule, pauses)
    notes = [] if rule.whole_queue else [f"{counted(woken, 'task is', 'tasks are')} queued again"]
    still = [one for one in pauses.rules if _overlap(one, rule)]
    notes += [f"still paused: {one.target}; to end that: {one.command}" for one in still]
    return Output(_data(rule) | {"woken": woken}, _fields(rule, ended=True), notes=notes)


def _rule(
    queue: str | None, task: str | None, conditions: Sequence[ArgumentCondition] | None, by: str = "", why: str = ""
) -> PauseRule:
    rule = PauseRule(queue, task, tuple(conditions or ()), by=by, why=why)
    if rule.queue is None and rule.whole_queue:
        raise Misuse("name a QUEUE, or tasks with --task NAME or --where NAME=VALUE")
    if len(rule.where) > MAX_CONDITIONS:
        raise Misuse(f"give at most {MAX_CONDITIONS} conditions with --where, got {len(rule.where)}")
    return rule


async def _wake(producer: Producer, rule: PauseRule, pauses: Pauses) -> int:
    """Queue what a rule held, in all partitions; return the number of tasks."""
    partitions = await queue_partitions(producer.gateway, producer.namespace, rule.queue)
    woken = 0
    for start in range(0, len(partitions), _CONCURRENT):
        some = partitions[start : start + _CONCURRENT]
        done = await asyncio.gather(*(_wake_in(producer, partition, pauses) for partition in some))
        woken += sum(done)
    return woken


async def _wake_in(producer: Producer, partition: Partition, pauses: Pauses) -> int:
    try:
        return (await wake_paused(producer.gateway, partition, pauses, pages=_PAGES)).woken
    except WrongType as error:
        note(f"queue {partition.queue}, partition {partition.index}: {error}; a worker mends it within a minute")
        return 0


def _overlap(one: PauseRule, other: PauseRule) -> bool:
    """Return whether two rules may hold the same task."""
    queues, tasks = {one.queue, other.queue} - {None}, {one.task, other.task} - {None}
    return len(queues) <= 1 and len(tasks) <= 1


async def _check(producer: Producer, rule: PauseRule) -> None:
    """Refuse conditions on secrets; note what no worker and no producer knows, as a pause may come before it.

    What this user may not read is not checked.
    """
    with suppress(Refused):
        known = {partition.queue for partition in await queue_partitions(producer.gateway, producer.namespace)}
        if rule.queue is not None and rule.queue not in known:
            names = ", ".join(sorted(known)) or "none"
            hint = nearest(rule.queue, known)
            note(f"there is no queue {rule.queue!r} yet {where(producer)}; existing queues: {names}{hint}")
    await public_conditions(producer, rule.where, rule.task)
    if rule.whole_queue:
        return
    with suppress(Refused):
        for text in _unknown_names(await producer.catalog(), rule):
            note(text)


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


def _data(rule: PauseRule) -> dict[str, Any]:
    return rule.summary() | {"resume": rule.command}


def _fields(rule: PauseRule, *, ended: bool = False) -> dict[str, Value]:
    return {
        "resumed" if ended else "paused": rule.target,
        "by": rule.by or None,
        "why": rule.why or None,
        "since": Time(rule.at),
        "resume with": None if ended else rule.command,
    }


async def pause_notes(producer: Producer) -> list[str]:
    """Return a sentence for each pause, and for each unreadable field; nothing if this user may not read them."""
    place = (producer.gateway, producer.namespace)
    try:
        pauses = await load_pauses(*place)
    except Refused:
        return []
    if not pauses.rules and not pauses.problems:
        return []
    held = await count_held(producer.gateway, await queue_partitions(*place), pauses.of_tasks)
    now = await redis_now(producer)
    notes = []
    for rule in pauses.rules:
        count = "" if rule.whole_queue else f", of which {held[rule.number]:,} are parked"
        notes.append(f"paused {rule.origin(now)}: {rule.target}{count}; to end that: {rule.command}")
    key = producer.namespace.pauses
    return notes + [f"a pause is ignored: {key}, field {name}: {what}" for name, what in pauses.problems.items()]

"""`perdure queue pause` and `resume`: hold a queue, the tasks of a name, or tasks with certain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ...queues.argument_conditions import ArgumentCondition
from ...queues.errors import Refused
from ...queues.pauses import PauseRule, load_pauses
from ...queues.producer import Producer
from ...queues.wording import counted, listed
from .. import pauses
from .support.connection import connected, redis_now, where
from .support.errors import Failed, Misuse, misuse_of
from .support.options import By, TaskNameOption, Where, login, read_queue
from .support.output import Time, Value
from .support.runner import Output

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
    with misuse_of("--where"):
        done = await pauses.pause(producer, given)
    notes = list(done.notes)
    if not done.stored:
        notes.append(f"it was paused already {done.rule.origin(await redis_now(producer))}: nothing was changed")
    return Output(_data(done.rule), _fields(done.rule), notes=notes)


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
    done = await pauses.resume(producer, given)
    if done is None:
        found = await load_pauses(producer.gateway, producer.namespace)
        known = listed((one.command for one in found.rules), 5, "; ") or "none"
        raise Failed(f"there is no pause of {given.target} {where(producer)}; to end those that exist: {known}")
    rule = done.rule
    notes = [*done.notes]
    notes += [] if rule.whole_queue else [f"{counted(done.woken, 'task is', 'tasks are')} queued again"]
    notes += [f"still paused: {one.target}; to end that: {one.command}" for one in done.still]
    return Output(_data(rule) | {"woken": done.woken}, _fields(rule, ended=True), notes=notes)


def _rule(
    queue: str | None, task: str | None, conditions: Sequence[ArgumentCondition] | None, by: str = "", why: str = ""
) -> PauseRule:
    if queue is None and task is None and not conditions:
        raise Misuse("name a QUEUE, or tasks with --task NAME or --where NAME=VALUE")
    with misuse_of("--where"):
        return pauses.checked_rule(queue, task, conditions or (), by=by, why=why)


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
    try:
        found = await load_pauses(producer.gateway, producer.namespace)
    except Refused:
        return []
    if not found.rules and not found.problems:
        return []
    now = await redis_now(producer)
    notes = []
    for rule, held in await pauses.held_tasks(producer, found):
        count = "" if held is None else f", of which {held:,} are parked"
        notes.append(f"paused {rule.origin(now)}: {rule.target}{count}; to end that: {rule.command}")
    key = producer.namespace.pauses
    return notes + [f"a pause is ignored: {key}, field {name}: {what}" for name, what in found.problems.items()]

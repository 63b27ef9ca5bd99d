"""Queues: numbers, lanes and partitions, pauses, and junk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ....queues.argument_conditions import ArgumentCondition
from ....queues.inspection import views
from ....queues.inspection.junk_items import read_junk
from ....queues.inspection.views import QueueStats
from ....queues.keys import Namespace, Partition, SessionPartition
from ....queues.pauses import MAX_CONDITIONS, PauseRule, load_pauses
from ....queues.wording import iso_time
from ... import pauses
from ..filters import ConditionText, known_partitions
from ..operation import MAX_LIMIT, Call, Inputs, NoInputs, QueueText, ResultModel, TaskNameText, operation
from ..paging import PageInputs, page_of
from ..problems import Problem, invalid_field
from ..users import Role


class QueueNumbers(ResultModel):
    """Numbers of a queue, of one of its lanes, or of one of its partitions."""

    depth: int = Field(description="Tasks that wait for a worker.")
    in_flight: int = Field(description="Tasks that workers hold.")
    due: int = Field(description="Tasks that are scheduled for later.")
    limited: int = Field(description="Tasks that wait for limits.")
    held: int = Field(description="Tasks that pauses hold.")
    dead: int = Field(description="Dead letters.")
    oldest_age: float | None = Field(description="Seconds that the oldest waiting task has waited; null without one.")


class PartitionView(QueueNumbers):
    """A partition of a queue."""

    index: int


class PauseView(ResultModel):
    """A pause by an operator."""

    id: str = Field(description="Id of the pause: the same for the same queue, task and conditions.")
    target: str = Field(description="What it holds, in words.")
    queue: str | None = Field(description="Queue of the tasks; null for all queues.")
    task: str | None = Field(description="Name of the tasks; null for all names.")
    where: list[str] = Field(description="Conditions on arguments, such as `tenant=acme`.")
    at: str | None
    by: str = Field(description="Who paused it; may be empty.")
    why: str = Field(description="The reason; may be empty.")

    @classmethod
    def of(cls, rule: PauseRule) -> PauseView:
        """Return the view of a rule."""
        shown = rule.summary() | {"at": iso_time(rule.at)}
        return cls.model_validate(shown | {"id": rule.id, "target": rule.target})

    @classmethod
    def of_queue(cls, pause: Mapping[str, Any]) -> PauseView:
        """Return the view of the pause of a whole queue, as `QueueStats` has it."""
        return cls.of(PauseRule(pause["queue"], at=pause["at"], by=pause["by"], why=pause["why"]))


class QueueView(QueueNumbers):
    """A queue in numbers."""

    queue: str
    rate: float = Field(description="Deliveries that all workers settle per second, over the last 30 seconds.")
    workers: int = Field(description="Live workers of the queue.")
    drain_time: float | None = Field(
        description="Seconds until no task waits or runs, at the current rate; null if tasks wait and none is settled."
    )
    pause: PauseView | None = Field(description="The pause of the whole queue.")
    problem: str = Field(description="What cannot be read, such as a key that another program wrote; may be empty.")
    lanes: dict[str, QueueNumbers] = Field(description="Numbers by priority, the highest first.")
    partitions: list[PartitionView]

    @classmethod
    def of(cls, stats: QueueStats) -> QueueView:
        """Return the view of a queue."""
        return cls(
            queue=stats.queue,
            **_numbers(stats),
            rate=stats.rate or 0.0,
            workers=stats.workers or 0,
            drain_time=stats.drain_time,
            pause=None if stats.pause is None else PauseView.of_queue(stats.pause),
            problem=stats.problem,
            lanes={lane: QueueNumbers(**_numbers(found)) for lane, found in stats.lanes.items()},
            partitions=[PartitionView(index=one.index or 0, **_numbers(one)) for one in stats.partitions],
        )


def _numbers(stats: QueueStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in QueueNumbers.model_fields}


class QueuePage(ResultModel):
    """A page of queues by name."""

    items: list[QueueView]
    next: str | None = Field(description="Cursor of the next page; null for the last one.")
    read: int = Field(description="Queues that were read.")
    of: int = Field(description="Queues that there are.")


class OneQueue(Inputs):
    """A queue by its name."""

    queue: QueueText


@operation("GET", "/queues", roles=[Role.VIEWER])
async def list_queues(call: Call, given: PageInputs) -> QueuePage:
    """List queues by name, with the numbers of their lanes and partitions.

    What another program wrote among the queues is listed with its problem.
    """
    found = await views.list_queues(call.producer.gateway, call.producer.namespace)
    found.sort(key=lambda stats: stats.queue)
    items, following = page_of(found, lambda stats: stats.queue, given)
    return QueuePage(items=[QueueView.of(stats) for stats in items], next=following, read=len(found), of=len(found))


@operation("GET", "/queues/{queue}", roles=[Role.VIEWER])
async def show_queue(call: Call, given: OneQueue) -> QueueView:
    """Show a queue with the numbers of its lanes and partitions."""
    found = await views.list_queues(call.producer.gateway, call.producer.namespace, given.queue)
    if not found:
        await known_partitions(call, given.queue)  # raises the problem of a queue that does not exist
        raise Problem(404, "queue-not-found", f"queue {given.queue!r} has no partitions")
    return QueueView.of(found[0])


class HeldPauseView(ResultModel):
    """A pause with the tasks that it holds."""

    pause: PauseView
    parked: int | None = Field(
        description="Tasks that workers have parked for it; null for a pause of a whole queue, which parks none."
    )


class UnreadablePause(ResultModel):
    """A stored pause that cannot be read, and is ignored."""

    id: str
    problem: str


class PausesView(ResultModel):
    """The pauses of a deployment, the oldest first."""

    items: list[HeldPauseView]
    problems: list[UnreadablePause]


@operation("GET", "/pauses", roles=[Role.VIEWER])
async def list_pauses(call: Call, given: NoInputs) -> PausesView:
    """List the pauses of queues and of tasks, with who made each and why."""
    found = await load_pauses(call.producer.gateway, call.producer.namespace)
    held = await pauses.held_tasks(call.producer, found)
    return PausesView(
        items=[HeldPauseView(pause=PauseView.of(rule), parked=parked) for rule, parked in held],
        problems=[UnreadablePause(id=name, problem=problem) for name, problem in found.problems.items()],
    )


class PauseTasks(Inputs):
    """Inputs of a pause. At least one of queue, task and where is needed."""

    queue: QueueText | None = Field(None, description="Queue to pause; without it, tasks of all queues.")
    task: TaskNameText | None = Field(None, description="Only tasks of this name.")
    where: list[ConditionText] = Field(
        [], max_length=MAX_CONDITIONS, description="Conditions on arguments, such as `tenant=acme`."
    )
    why: str = Field("", max_length=2000, description="Reason, kept with the pause.")


class PausedView(ResultModel):
    """Outcome of a pause."""

    pause: PauseView
    stored: bool = Field(description="Whether this call has stored it; else it was paused already, and stays so.")
    notes: list[str] = Field(description="Names that no worker and no producer knows yet.")


@operation("POST", "/pauses", roles=[Role.OPERATOR], changes=True)
async def pause_tasks(call: Call, given: PauseTasks) -> PausedView:
    """Start no tasks of a queue, of a name, or with certain arguments, until they are resumed.

    Workers follow within a moment, also those that start later. Running tasks continue; new ones are stored and wait. A
    queue alone: workers read nothing from it. With a name or conditions: workers park the tasks that match, when they
    would start or continue; that costs no attempt.
    """
    where = [ArgumentCondition.parse(text) for text in given.where]
    try:
        rule = pauses.checked_rule(given.queue, given.task, where, by=call.user.name, why=given.why)
    except ValueError as error:
        raise invalid_field("queue", str(error)) from None
    try:
        done = await pauses.pause(call.producer, rule)
    except ValueError as error:
        raise invalid_field("where", str(error)) from None
    return PausedView(pause=PauseView.of(done.rule), stored=done.stored, notes=list(done.notes))


class OnePause(Inputs):
    """A pause by its id."""

    pause_id: str = Field(min_length=1, max_length=64, description="Id of the pause.")


class ResumedView(ResultModel):
    """Outcome of the end of a pause."""

    pause: PauseView = Field(description="The pause that was ended.")
    woken: int = Field(description="Parked tasks that are queued again.")
    still: list[PauseView] = Field(description="Other pauses that may hold some of the same tasks.")
    notes: list[str] = Field(description="Partitions whose tasks were not woken.")


@operation("POST", "/pauses/{pause_id}/resume", roles=[Role.OPERATOR], changes=True)
async def resume_tasks(call: Call, given: OnePause) -> ResumedView:
    """End a pause. Tasks that were parked are queued again, all at once."""
    rule = (await load_pauses(call.producer.gateway, call.producer.namespace)).find(given.pause_id)
    done = None if rule is None else await pauses.resume(call.producer, rule)
    if done is None:
        raise Problem(404, "pause-not-found", f"there is no pause {given.pause_id!r}: it was ended already")
    return ResumedView(
        pause=PauseView.of(done.rule),
        woken=done.woken,
        still=[PauseView.of(rule) for rule in done.still],
        notes=list(done.notes),
    )


class JunkView(ResultModel):
    """An item that another program wrote into a key of Perdure, and that a worker has moved out of the way."""

    at: str | None
    queue: str | None = Field(description="Queue; null for an item of the sessions, or of the whole namespace.")
    partition: int | None
    key: str = Field(description="Key that it was in. Bytes that are not printable are escapes.")
    item: str = Field(description="Member, field or entry id; the first 4,096 bytes.")
    content: str = Field(description="Value of the field, or fields of the entry; the first 4,096 bytes.")
    bytes: int = Field(description="Size of item and content.")
    reason: str = Field(description="Sign that another program wrote it.")


class JunkPage(ResultModel):
    """Junk, the newest first."""

    items: list[JunkView]
    problems: list[str] = Field(description="Lists that cannot be read.")


class ListJunk(Inputs):
    """Inputs of a list of junk."""

    queue: QueueText | None = Field(None, description="Only items of this queue.")
    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most items.")


@operation("GET", "/junk", roles=[Role.VIEWER])
async def list_junk(call: Call, given: ListJunk) -> JunkPage:
    """List what other programs wrote into keys of Perdure, the newest first.

    Workers move such items out of the way. An item here was no task: nothing is lost. Items are kept for 30 days, at
    most 1,000 of each partition.
    """
    names = call.producer.namespace
    places: list[Partition | SessionPartition | Namespace] = [*await known_partitions(call, given.queue)]
    if given.queue is None:
        places += [*names.session_partitions, names]
    found, problems = await read_junk(call.producer.gateway, places, given.limit)
    return JunkPage(items=[JunkView(**item.summary()) for item in found], problems=problems)

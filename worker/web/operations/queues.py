"""Queues: numbers, lanes and partitions, pauses, and junk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ....queues.inspection import views
from ....queues.inspection.views import QueueStats
from ....queues.pauses import PauseRule
from ....queues.wording import iso_time
from ..operation import Call, Inputs, QueueText, ResultModel, operation
from ..paging import PageInputs, page_of
from ..problems import Problem
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
        return cls(id=rule.id, target=rule.target, **shown)

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
        raise await queue_not_found(call, given.queue)
    return QueueView.of(found[0])


async def queue_not_found(call: Call, queue: str) -> Problem:
    """Return the problem of a queue that does not exist."""
    partitions = await views.queue_partitions(call.producer.gateway, call.producer.namespace)
    known = ", ".join(sorted({partition.queue for partition in partitions})) or "none"
    return Problem(404, "queue-not-found", f"there is no queue {queue!r}; existing queues: {known}")

"""Filters of tasks and of dead letters as inputs of operations: lists, exports, and jobs over all that match."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from ...deadletter.letters import FINGERPRINT, Filter
from ...deadletter.policy import Reason
from ...queues.argument_conditions import MAX_CONDITION, ArgumentCondition
from ...queues.durations import PointInTime
from ...queues.inspection.views import queue_partitions
from ...queues.keys import Partition, check_name
from ...queues.records import State
from ...queues.task_filter import TaskFilter
from ..defined_secrets import check_conditions
from .operation import ENQUEUED_BY, Call, Inputs, QueueText, TaskNameText
from .problems import Problem, refused_as

_MAX_TEXT: Final = 1_000
"""Most characters of a searched text."""

_MAX_LIST: Final = 20
"""Most tags and most conditions of a filter."""


def _time(text: str) -> str:
    PointInTime.parse(text, zoned=True)
    return text


def _condition(text: str) -> str:
    ArgumentCondition.parse(text)
    return text


def _app(text: str) -> str:
    return check_name("app", text)


AppText = Annotated[str, AfterValidator(_app)]
TimeText = Annotated[str, AfterValidator(_time), Field(max_length=64)]
"""A time before now, such as 15m or 2h, or an ISO time with a time zone."""

ConditionText = Annotated[str, AfterValidator(_condition), Field(max_length=MAX_CONDITION)]
"""A condition on an argument: `tenant=acme` or `options.depth=3`."""

SearchText = Annotated[str, Field(max_length=_MAX_TEXT)]


class TaskFilterInputs(Inputs):
    """Inputs that select tasks. Without any, all tasks match."""

    queue: QueueText | None = Field(None, description="Only tasks of this queue.")
    state: list[State] = Field([], description="Only tasks in one of these states.")
    task: TaskNameText | None = Field(None, description="Only tasks of this name.")
    app: AppText | None = Field(None, description="Only tasks of this app.")
    since: TimeText | None = Field(
        None, description="Only tasks enqueued since then: 15m or 2h before now, or an ISO time with a time zone."
    )
    until: TimeText | None = Field(None, description="Only tasks enqueued until then.")
    error: SearchText | None = Field(None, description="Only tasks with this text in their reason or last error.")
    key: SearchText | None = Field(None, description="Only tasks with this ordering key.")
    tag: list[SearchText] = Field([], max_length=_MAX_LIST, description="Only tasks with all of these tags.")
    where: list[ConditionText] = Field(
        [],
        max_length=_MAX_LIST,
        description="Only tasks with these arguments, such as `tenant=acme` or `options.depth=3`.",
    )
    enqueued_by: str | None = Field(None, max_length=128, description="Only tasks that this user of the API enqueued.")

    async def filter(self, call: Call) -> TaskFilter:
        """Return the filter, which the queue is no part of. A producer finds its own tasks only.

        Raises:
            Problem: A condition is on a secret argument.
        """
        since, until = await _bounds(call, self.since, self.until)
        by = self.enqueued_by if call.user.sees_all else call.user.name
        return TaskFilter(
            frozenset(self.state),
            self.task,
            since,
            until,
            self.error,
            self.key,
            tuple(self.tag),
            self.app,
            await _conditions(call, self.where, self.task),
            {} if by is None else {ENQUEUED_BY: by},
        )


class LetterFilterInputs(Inputs):
    """Inputs that select dead letters. Without any, all dead letters match."""

    queue: QueueText | None = Field(None, description="Only dead letters of this queue.")
    reason: Reason | None = Field(None, description="Only dead letters with this reason.")
    task: TaskNameText | None = Field(None, description="Only dead letters of tasks of this name.")
    app: AppText | None = Field(None, description="Only dead letters of this app.")
    since: TimeText | None = Field(
        None, description="Only those that died since then: 15m or 2h before now, or an ISO time with a time zone."
    )
    until: TimeText | None = Field(None, description="Only those that died until then.")
    error: SearchText | None = Field(None, description="Only those with this text in their reason or error.")
    search: SearchText | None = Field(
        None, description="Only those with this text anywhere, such as in an argument or the traceback."
    )
    group: str | None = Field(
        None,
        pattern=rf"^[0-9a-fA-F]{{4,{FINGERPRINT}}}$",
        description="Only those of this group, by its fingerprint or the first digits of it.",
    )
    key: SearchText | None = Field(None, description="Only those with this ordering key.")
    tag: list[SearchText] = Field([], max_length=_MAX_LIST, description="Only those with all of these tags.")
    where: list[ConditionText] = Field(
        [],
        max_length=_MAX_LIST,
        description="Only those with these arguments, such as `tenant=acme` or `options.depth=3`.",
    )

    async def filter(self, call: Call) -> Filter:
        """Return the filter, which the queue is no part of.

        Raises:
            Problem: A condition is on a secret argument.
        """
        since, until = await _bounds(call, self.since, self.until)
        return Filter(
            self.reason,
            self.task,
            since,
            until,
            self.error,
            self.key,
            tuple(self.tag),
            self.app,
            self.search,
            self.group,
            await _conditions(call, self.where, self.task),
            call.producer.namespace.tenant,
        )


async def _bounds(call: Call, since: str | None, until: str | None) -> tuple[int | None, int | None]:
    """Return the bounds of a time in milliseconds of Redis' clock."""
    times = [None if text is None else PointInTime.parse(text, zoned=True) for text in (since, until)]
    now = await call.now() if any(time is not None and time.ago is not None for time in times) else 0
    first, last = (None if time is None else time.at(now) for time in times)
    return first, last


async def _conditions(call: Call, where: list[str], task: str | None) -> tuple[ArgumentCondition, ...]:
    found = tuple(map(ArgumentCondition.parse, where))
    with refused_as("where"):
        await check_conditions(call.producer, found, task)
    return found


async def known_partitions(call: Call, queue: str | None) -> list[Partition]:
    """Return the partitions of one queue, or of all queues.

    Raises:
        Problem: The queue does not exist.
    """
    gateway, namespace = call.producer.gateway, call.producer.namespace
    partitions = await queue_partitions(gateway, namespace, queue)
    if queue is not None and not partitions:
        names = sorted({partition.queue for partition in await queue_partitions(gateway, namespace)})
        listed = ", ".join(names[:20]) or "none"
        raise Problem(
            404, "queue-not-found", f"there is no queue {queue!r} in namespace {namespace.name!r}; queues: {listed}"
        )
    return partitions

"""`perdure top`: queues, workers and running tasks on a live screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...queues.inspection.running import running_tasks
from ...queues.inspection.views import QueueStats, list_queues, observed_workers, queue_partitions
from ...queues.presence import WorkerInfo
from ...queues.producer import Producer
from ...queues.records import Record
from ...queues.wording import counted, iso_time
from ..defined_secrets import mask_defined
from .queue import QUEUE_COLUMNS
from .support.connection import connected, redis_now
from .support.output import Column, Styled, Table, Time
from .support.runner import Screen
from .worker import WORKER_COLUMNS

_MAX_TASKS: Final = 100
"""Running tasks that are read."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A deployment at one moment. now: milliseconds of Redis' clock."""

    now: int
    queues: Sequence[QueueStats]
    workers: Sequence[WorkerInfo]
    running: Sequence[Record]

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "at": iso_time(self.now),
            "queues": [stats.summary() for stats in self.queues],
            "workers": [info.summary() for info in self.workers],
            "running": [record.summary() for record in self.running],
        }


@connected
async def top(producer: Producer) -> Screen:
    """Show queues, workers and running tasks on a live screen, until Ctrl-C.

    The tasks that have been running longest come first. Without a terminal,
    or with --json, prints them once.

    Example: perdure top
    """
    return overview_screen(await _read(producer), f"namespace {producer.namespace.name} on {producer.address.shown}")


async def _read(producer: Producer) -> Overview:
    gateway, namespace = producer.gateway, producer.namespace
    masked = await mask_defined(producer)
    return Overview(
        await redis_now(producer),
        await list_queues(gateway, namespace),
        await observed_workers(gateway, namespace),
        list(map(masked, await running_tasks(gateway, await queue_partitions(gateway, namespace), _MAX_TASKS))),
    )


def overview_screen(found: Overview, place: str) -> Screen:
    """Return the screen: a title and three tables."""
    running = sum(stats.in_flight for stats in found.queues)
    live = sum(not info.presumed_dead for info in found.workers)
    return Screen(
        found.summary(),
        f"{iso_time(found.now)}  {place}",
        Styled(f"\n{counted(len(found.queues), 'queue')}", "bold"),
        Table(QUEUE_COLUMNS, found.queues),
        Styled(f"\n{counted(live, 'live worker')}", "bold"),
        Table(WORKER_COLUMNS, found.workers),
        Styled(f"\n{counted(running, 'running task')}", "bold"),
        Table(_RUNNING_COLUMNS, found.running),
    )


_RUNNING_COLUMNS: Final[Sequence[Column[Record]]] = (
    Column("task", lambda record: record.task or "?", least=8),
    Column("id", lambda record: record.id, least=36, fold=True),
    Column("queue", lambda record: record.queue, wide=True),
    Column("worker", lambda record: record.worker or "", least=8),
    Column("step", lambda record: record.step or "", least=4),
    Column("started", lambda record: Time(record.started_at or record.enqueued_at)),
)

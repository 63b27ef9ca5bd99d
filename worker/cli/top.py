"""`perdure top`: queues, workers and running tasks on a live screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...queues.inspection.running import running_tasks
from ...queues.inspection.views import QueueStats, list_queues, observed_workers, queue_partitions
from ...queues.presence import WorkerInfo
from ...queues.producer import Producer
from ...queues.records import Record
from ...queues.wording import counted, iso_time
from .queue import QUEUE_COLUMNS
from .support.connection import connected, redis_now
from .support.live import show_live
from .support.marked import mask_defined
from .support.output import AsJson, Column, Wide, ago, list_table, print_json
from .worker import worker_columns

if TYPE_CHECKING:  # rich is imported where a list is drawn
    from rich.console import RenderableType

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
async def top(producer: Producer, *, wide: Wide = False, json: AsJson = False) -> None:
    """Show queues, workers and running tasks on a live screen, until Ctrl-C.

    The tasks that have been running longest come first. Without a terminal,
    or with --json, prints them once.

    Example: perdure top
    """
    if json:
        print_json((await _read(producer)).summary())
        return
    place = f"namespace {producer.namespace.name} on {producer.address.shown}"

    async def screen(width: int) -> RenderableType:
        return overview_screen(await _read(producer), place, width=width, wide=wide)

    await show_live(screen)


async def _read(producer: Producer) -> Overview:
    gateway, namespace = producer.gateway, producer.namespace
    masked = await mask_defined(producer)
    return Overview(
        await redis_now(producer),
        await list_queues(gateway, namespace),
        await observed_workers(gateway, namespace),
        list(map(masked, await running_tasks(gateway, await queue_partitions(gateway, namespace), _MAX_TASKS))),
    )


def overview_screen(found: Overview, place: str, *, width: int, wide: bool = False) -> RenderableType:
    """Return the screen: a title and three tables."""
    from rich.console import Group
    from rich.text import Text

    running = sum(stats.in_flight for stats in found.queues)
    live = sum(not info.presumed_dead for info in found.workers)
    title = f"{iso_time(found.now)}  {place}"
    return Group(
        Text(title, no_wrap=True, overflow="ellipsis"),
        Text(f"\n{counted(len(found.queues), 'queue')}", style="bold"),
        list_table(QUEUE_COLUMNS, found.queues, width=width, wide=wide),
        Text(f"\n{counted(live, 'live worker')}", style="bold"),
        list_table(worker_columns(found.now), found.workers, width=width, wide=wide),
        Text(f"\n{counted(running, 'running task')}", style="bold"),
        list_table(_running_columns(found.now), found.running, width=width, wide=wide),
    )


def _running_columns(now: int) -> Sequence[Column[Record]]:
    since = ago(now, whole=True)
    return (
        Column("task", lambda record: record.task or "?", least=8),
        Column("id", lambda record: record.id, least=36, fold=True),
        Column("queue", lambda record: record.queue, wide=True),
        Column("worker", lambda record: record.worker or "", least=8),
        Column("step", lambda record: record.step or "", least=4),
        Column("started", lambda record: since(record.started_at or record.enqueued_at)),
    )

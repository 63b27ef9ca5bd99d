"""`perdure top`: queues, workers and running tasks on a live screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...queues.producer import Producer
from ...queues.records import Record
from ...queues.wording import counted, iso_time
from ..overview import Overview, read_overview
from .queue import QUEUE_COLUMNS
from .support.connection import connected
from .support.output import Column, Styled, Table, Time
from .support.runner import Screen
from .worker import WORKER_COLUMNS


@connected
async def top(producer: Producer) -> Screen:
    """Show queues, workers and running tasks on a live screen, until Ctrl-C.

    The tasks that have been running longest come first. Without a terminal,
    or with --json, prints them once.

    Example: perdure top
    """
    place = f"namespace {producer.namespace.name} on {producer.address.shown}"
    return overview_screen(await read_overview(producer), place)


def overview_screen(found: Overview, place: str) -> Screen:
    """Return the screen: a title and three tables."""
    return Screen(
        found.summary(),
        f"{iso_time(found.now)}  {place}",
        Styled(f"\n{counted(len(found.queues), 'queue')}", "bold"),
        Table(QUEUE_COLUMNS, found.queues),
        Styled(f"\n{counted(found.live, 'live worker')}", "bold"),
        Table(WORKER_COLUMNS, found.workers),
        Styled(f"\n{counted(found.in_flight, 'running task')}", "bold"),
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

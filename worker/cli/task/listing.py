"""`perdure task list`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

from ....queues.inspection.timeline import TaskPage, page_tasks
from ....queues.producer import Producer
from ....queues.records import Record
from ....queues.runtime import RUNTIME
from ....queues.task_filter import TaskFilter
from ...defined_secrets import mask_defined
from ..support.connection import connected_as_tenant, where
from ..support.errors import misuse_of
from ..support.jobs import TaskFilterOptions
from ..support.output import Column, Time, note, state_text
from ..support.runner import LongListing, Watch

_SEARCH: Final = 60.0
"""Seconds for which a list looks for its first task."""

_PATIENCE: Final = 2.0
"""Seconds between two lines that say how far it is."""


@connected_as_tenant
async def list_(
    producer: Producer,
    chosen: TaskFilterOptions,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N tasks.")] = 100,
    cursor: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Continue the list after the page that ended with this cursor.")
    ] = None,
    watch: Watch = False,
) -> LongListing:
    """List tasks, the newest first.

    If there are more, the last line on stderr has the cursor of the next
    page. Tasks that are enqueued meanwhile do not move the pages.

    Example: perdure task list --state dead --since 2h --error timeout
    """
    wanted, queue = await chosen.filter(producer), chosen.queue
    asked = min(limit, _PAGE)
    with misuse_of("--cursor"):
        first = await _first_page(producer, wanted, queue, asked, cursor, _quiet if watch else note)
    masked, notes = await mask_defined(producer), list[str]()

    async def rows() -> AsyncIterator[Record]:
        """Yield the tasks of the pages, as long as each is full."""
        page, wish, left = first, asked, limit
        while True:
            notes.extend(f"task {record.id} is left out: {problem}" for record, problem in page.unreadable)
            for record in page.tasks:
                yield masked(record)
            left -= len(page.tasks)
            if page.cursor is None or left == 0 or len(page.tasks) < wish:
                break
            wish = min(left, _PAGE)
            page = await page_tasks(
                producer.gateway, producer.namespace, wanted, queue=queue, limit=wish, cursor=page.cursor
            )
        if page.cursor is not None:
            missed = "" if first.tasks else f"no matching tasks among the first {first.read:,}; "
            notes.append(f"{missed}there may be more tasks: continue with --cursor {page.cursor}")

    empty = f"no matching tasks {where(producer)}" if first.cursor is None else None
    return LongListing(TASK_COLUMNS, rows(), empty=empty, ended=lambda: notes)


_PAGE: Final = 1_000
"""Tasks that are read at once."""


def _quiet(text: str) -> None:
    """Print nothing: a message would be written into a live view."""


async def _first_page(
    producer: Producer,
    wanted: TaskFilter,
    queue: str | None,
    limit: int,
    cursor: str | None,
    tell: Callable[[str], None],
) -> TaskPage:
    """Return the first page with a task, within a time limit; the last one if none has any."""
    read, began = 0, RUNTIME.monotonic()
    told = began
    while True:
        page = await page_tasks(producer.gateway, producer.namespace, wanted, queue=queue, limit=limit, cursor=cursor)
        read, cursor, now = read + page.read, page.cursor, RUNTIME.monotonic()
        if page.tasks or cursor is None or now - began >= _SEARCH:
            return replace(page, read=read)
        if now - told >= _PATIENCE:
            tell(f"no matching tasks among the first {read:,} yet; reading on")
            told = now


def _detail(record: Record) -> str:
    """Return the reason of a dead letter, what a parked task waits for, or the step of a long-running run."""
    return record.problem or record.reason or (f"waiting for {record.waits}" if record.waits else record.step) or ""


TASK_COLUMNS: Final[Sequence[Column[Record]]] = (
    Column("id", lambda record: record.id, least=36, fold=True),
    Column("task", lambda record: record.task or "?", least=8),
    Column("app", lambda record: record.app or "", wide=True),
    Column("state", lambda record: state_text(record.state)),
    Column("queue", lambda record: record.queue, wide=True),
    Column("attempts", lambda record: record.attempts, right=True, wide=True),
    Column("crashes", lambda record: record.crashes, right=True, wide=True),
    Column("enqueued", lambda record: Time(record.enqueued_at)),
    Column("worker", lambda record: record.worker or "", wide=True),
    Column("detail", _detail, least=8),
)

"""`perdure task list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ....queues import Producer, Record, State, list_tasks
from ..support.connection import connected, known_partitions, redis_now
from ..support.options import QueueOption, TaskNameOption
from ..support.output import AsJson, ago, note, print_json, state_text
from ..support.tables import Column, Wide, print_list

__all__ = ["list_", "task_columns"]


@connected
async def list_(
    producer: Producer,
    *,
    queue: QueueOption = None,
    state: Annotated[list[State] | None, typer.Option(help="Only tasks in this state. Repeatable.")] = None,
    task_name: TaskNameOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N tasks.")] = 100,
    wide: Wide = False,
    json: AsJson = False,
) -> None:
    """List tasks, the newest first.

    If more than --limit tasks match, the list is a sample of them.

    Example: perdure task list --state running --state queued
    """
    await known_partitions(producer, queue)
    found: list[Record] = []
    more = False
    tasks = list_tasks(producer.gateway, producer.namespace, queue=queue, states=state or (), task=task_name)
    async for record in tasks:
        if len(found) == limit:
            more = True
            break
        found.append(record)
    found.sort(key=lambda record: record.enqueued_at or 0, reverse=True)
    if json:
        print_json([record.summary() for record in found])
    elif found:
        print_list(task_columns(await redis_now(producer)), found, wide=wide)
    else:
        note(f"no matching tasks in namespace {producer.namespace.name!r} on {producer.address.shown}")
    if more:
        note(f"more than {limit} tasks match: raise --limit to see them")


def task_columns(now: int) -> Sequence[Column[Record]]:
    """Return the columns of tasks. now: milliseconds of Redis' clock."""
    since = ago(now, whole=True)
    return (
        Column("id", lambda record: record.id, least=36, fold=True),
        Column("task", lambda record: record.task or "?", least=8),
        Column("state", lambda record: state_text(record.state)),
        Column("queue", lambda record: record.queue, wide=True),
        Column("attempts", lambda record: str(record.attempts), right=True, wide=True),
        Column("crashes", lambda record: str(record.crashes), right=True, wide=True),
        Column("enqueued", lambda record: since(record.enqueued_at)),
        Column("worker", lambda record: record.worker or "", wide=True),
        Column("detail", _detail, least=8),
    )


def _detail(record: Record) -> str:
    """Return the reason of a dead letter, what a parked task waits for, or the step of a long-running run."""
    return record.reason or (f"waiting for {record.waits}" if record.waits else record.step) or ""

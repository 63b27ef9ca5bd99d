"""`perdure task values` and `perdure task update`: named values of a task."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import orjson
import typer

from ....queues.keys import check_name
from ....queues.producer import Producer
from ....queues.records import State
from ....queues.values import NamedValue, read_task_values
from ....queues.wording import short
from ..support.connection import TaskOptions, connected_as_tenant
from ..support.errors import misuse_of
from ..support.options import login, read_json
from ..support.output import Column, Time
from ..support.runner import Listing, Output


@connected_as_tenant
async def values(producer: Producer, task: TaskOptions) -> Listing:
    """Print the named values of a task, in the order of their last changes.

    They are those of the task that continues its work, if there is one.
    With --json: one object per line.

    Example: perdure task values 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await task.find(producer)
    found = await read_task_values(producer.gateway, handle.partition, handle.id)
    return Listing(_COLUMNS, found, empty=f"task {handle.id} has no values", lines=True)


@connected_as_tenant
async def update(
    producer: Producer,
    task: TaskOptions,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the value.")],
    value: Annotated[str, typer.Argument(metavar="JSON", help="The value; - for stdin.")],
    *,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the sender. Default: your login.")] = None,
) -> Output:
    """Set a named value of a task, and print the id of the task that has it.

    The task reads it with ctx.values.get(NAME). The later change counts.

    Example: perdure task update 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f speed 2
    """
    with misuse_of("JSON"):
        content = read_json(sys.stdin.read() if value == "-" else value)
    with misuse_of("NAME"):
        check_name("name of a value", name)
    sender = login() if by is None else by
    handle = await task.find(producer)
    receipt = await handle.update(name, content, by=sender)
    note = f"set value {name!r} of task {receipt.task_id} as {sender!r}"
    if receipt.state is State.DEAD:
        note += "; it is a dead letter and reads the value after a replay"
    return Output({"id": receipt.task_id, "name": name, "state": receipt.state}, receipt.task_id, notes=[note])


def _shown(value: NamedValue) -> str:
    return f"({value.problem})" if value.problem is not None else short(orjson.dumps(value.value).decode())


_COLUMNS: Final[Sequence[Column[NamedValue]]] = (
    Column("name", lambda value: value.name),
    Column("changed", lambda value: Time(value.at)),
    Column("by", lambda value: value.by or "-"),
    Column("value", _shown, least=12, fold=True),
)

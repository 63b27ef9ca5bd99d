"""Messages from and for people: `perdure task send` and `perdure task inbox`, and what `task show` says of a wait."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from typing import Annotated, Any

import orjson
import typer
from pydantic_core import from_json

from ...queues import LONGEST, InboxMessage, Producer, Record, Sent, State, drop_message, list_workers, read_last_events
from .support.connection import connected, find_handle, redis_now
from .support.errors import Failed, Misuse
from .support.options import TaskId
from .support.output import AsJson, ago, note, print_data, print_json, print_json_lines, print_table, timestamp

__all__ = ["inbox", "send", "shown_due", "shown_inbox", "shown_wait"]

_LOOKED_AT = 200
"""Events of the log among which the last wait is sought."""


@connected
async def send(
    producer: Producer,
    task_id: TaskId,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="What to send; - for stdin.", show_default=False)
    ] = None,
    *,
    data: Annotated[
        str | None, typer.Option(metavar="JSON", help="JSON in place of a text.", show_default=False)
    ] = None,
    sender: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Who it is from. Else your login.", show_default=False)
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Sent again under the same id, it is there once.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """Send a message to a task, which it reads with ctx.inbox() or awaits with ctx.ask().

    A task that waits is woken. Prints the id of the task that has it, which is another
    one where the task was handed on.

    Example: perdure task send 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f yes --from ada
    """
    content = _content(text, data)
    sender = _login() if sender is None else sender
    sent = await producer.send_message(task_id, content, sender=sender, message_id=message_id)
    if json:
        print_json({"id": sent.task_id, "number": sent.number, "state": sent.state})
    else:
        print_data(sent.task_id)
    note(
        f"message {sent.number} from {sender!r} is in the inbox of task {sent.task_id}{await _outlook(producer, sent)}"
    )


def _content(text: str | None, data: str | None) -> Any:
    if (text is None) == (data is None):
        raise Misuse("give either a TEXT or --data JSON")
    if data is None:
        return sys.stdin.read().rstrip("\n") if text == "-" else text
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Misuse(f"--data: not JSON: {error}") from None


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return ""


async def _outlook(producer: Producer, sent: Sent) -> str:
    """What becomes of the message, where that is not obvious."""
    if sent.state is State.DEAD:
        return "; it is a dead letter, and reads it when it is replayed"
    handle = await find_handle(producer, sent.task_id)
    workers = await list_workers(producer.gateway, producer.namespace)
    if not any(handle.partition.queue in worker.queues for worker in workers):
        return f"; no worker takes tasks of queue {handle.partition.queue!r} now: it is read when one does"
    record = await handle.record()
    if record.state is State.SCHEDULED and record.waits is None:
        return "; the task is scheduled, and can read it when its time has come"
    return ""


@connected
async def inbox(
    producer: Producer,
    task_id: TaskId,
    *,
    drop: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take message N out, unused.", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """Print the messages that a task has not read yet, the oldest first. With --json: one object per line.

    What it has read is in its log: perdure task events ID.

    Example: perdure task inbox 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await find_handle(producer, task_id)
    if drop is not None:
        if not await drop_message(producer.gateway, handle.partition, task_id, drop):
            raise Failed(f"no message {drop} in the inbox of task {task_id}: it was read, dropped, or never sent")
        note(f"message {drop} was taken out of the inbox of task {task_id}")
        return
    found = await handle.pending_messages()
    if json:
        print_json_lines([message.summary() for message in found])
    elif found:
        since = ago(await redis_now(producer))
        rows = [(str(one.number), since(one.at), one.sender or "-", _shown(one)) for one in found]
        print_table(("number#", "sent", "from", "content"), rows)
    else:
        note(f"no messages wait in the inbox of task {task_id}")


def _shown(message: InboxMessage) -> str:
    if message.problem is not None:
        return f"({message.problem})"
    return message.content if isinstance(message.content, str) else orjson.dumps(message.content).decode()


def shown_inbox(record: Record) -> str | None:
    """How many messages wait, for `task show`."""
    return f"{record.unused} not read" if record.unused else None


def shown_due(record: Record, when: Callable[[int | None], str | None]) -> str | None:
    """When it is due; not told of what waits for as long as it takes."""
    endless = record.waits is not None and (record.due_at or 0) > LONGEST * 500
    return None if endless else when(record.due_at)


async def shown_wait(producer: Producer, record: Record, since: Callable[[int | None], str]) -> str | None:
    """What a task waits for, from whom, since when and why, as its log has it."""
    if record.waits is None:
        return None
    said = f"for {'an' if record.waits[0] in 'aeiou' else 'a'} {record.waits}"
    partition = producer.namespace.partition(record.queue, record.partition)
    events = await read_last_events(producer.gateway, partition, record.id, _LOOKED_AT)
    event = next((one for one in events if one.type == "waiting"), None)
    if event is None:
        return said
    told = event.data if isinstance(event.data, dict) else {}
    whom = f" {'of' if record.waits == 'approval' else 'from'} {told['on']}" if told.get("on") else ""
    why = f": {told['why']}" if told.get("why") else ""
    return f"{said}{whom} since {timestamp(event.at)} ({since(event.at)}){why}"

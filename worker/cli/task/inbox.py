"""`perdure task send` and `perdure task inbox`: messages to a task."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import orjson
import typer

from ....queues.errors import Refused
from ....queues.handle import TaskHandle
from ....queues.inbox import InboxMessage, Sent, drop_message
from ....queues.presence import list_workers
from ....queues.producer import Producer
from ....queues.records import State
from ..support.connection import TaskOptions, connected_as_tenant
from ..support.errors import Failed, Misuse, misuse_of
from ..support.options import login, read_json
from ..support.output import Column, Time, note
from ..support.runner import Listing, Output


@connected_as_tenant
async def send(
    producer: Producer,
    task: TaskOptions,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Text to send; - for stdin.")] = None,
    *,
    data: Annotated[str | None, typer.Option(metavar="JSON", help="Send JSON instead of text.")] = None,
    sender: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Name of the sender. Default: your login.")
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the message. A second message with this id is ignored."),
    ] = None,
) -> Output:
    """Send a message to a task, and print the id of the task that received it.

    The task reads it with ctx.inbox(), and wakes up if it waits for one. If
    another task continues its work, that one receives the message. To answer
    a question, use 'perdure task answer'.

    Example: perdure task send 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f yes --from ada
    """
    content = _content(text, data)
    sender = login() if sender is None else sender
    handle = await task.find(producer)
    sent = await handle.send(content, sender=sender, message_id=message_id)
    delay = await _delay_reason(producer, handle, sent)
    waits_on = {} if sent.waits_on is None else {"waits_on": sent.waits_on}
    return Output(
        {"id": sent.task_id, "number": sent.number, "state": sent.state} | waits_on,
        sent.task_id,
        notes=[f"sent message {sent.number} from {sender!r} to task {sent.task_id}{delay}"],
    )


def _content(text: str | None, data: str | None) -> Any:
    if (text is None) == (data is None):
        raise Misuse("give either a TEXT or --data JSON")
    if data is None:
        return sys.stdin.read().rstrip("\n") if text == "-" else text
    with misuse_of("--data"):
        return read_json(data)


async def _delay_reason(producer: Producer, handle: TaskHandle[Any], sent: Sent) -> str:
    """Return why the task that has the message does not read it soon, or an empty text. handle: where it was sent."""
    if sent.waits_on is not None:
        return (
            f"; the task waits for a message from {sent.waits_on!r}, and this one is not what it waits for: "
            f"to answer it, send with --from {sent.waits_on}"
        )
    if sent.state is State.DEAD:
        return "; it is a dead letter and reads the message after a replay"
    while handle.id != sent.task_id and (successor := await handle.successor()) is not None:
        handle = successor
    try:
        workers = await list_workers(producer.gateway, producer.namespace)
    except Refused:  # a producer may not read the registry of workers
        return ""
    if not any(handle.partition.queue in worker.queues for worker in workers if not worker.presumed_dead):
        queue = handle.partition.queue
        return f"; no worker serves queue {queue!r} now; start one: perdure worker run APP --queues {queue}"
    record = await handle.record()
    if record.state is State.SCHEDULED:
        return "; the task is scheduled and reads the message when it is due"
    return ""


@connected_as_tenant
async def inbox(
    producer: Producer,
    task: TaskOptions,
    *,
    drop: Annotated[int | None, typer.Option(min=1, metavar="N", help="Remove message N without reading it.")] = None,
) -> Listing | None:
    """Print the messages that a task has not read yet, the oldest first.

    'perdure task events ID' shows the messages that it has read. With
    --json: one object per line.

    Example: perdure task inbox 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await task.find(producer)
    if drop is not None:
        if not await drop_message(producer.gateway, handle.partition, handle.id, drop):
            raise Failed(f"no message {drop} in the inbox of task {handle.id}: it was read, removed, or never sent")
        note(f"removed message {drop} from the inbox of task {handle.id}")
        return None
    found = await handle.pending_messages()
    return Listing(_COLUMNS, found, empty=f"no unread messages in the inbox of task {handle.id}", lines=True)


def _shown(message: InboxMessage) -> str:
    if message.problem is not None:
        return f"({message.problem})"
    return message.content if isinstance(message.content, str) else orjson.dumps(message.content).decode()


_COLUMNS: Final[Sequence[Column[InboxMessage]]] = (
    Column("number", lambda message: message.number, right=True),
    Column("sent", lambda message: Time(message.at)),
    Column("from", lambda message: message.sender or "-"),
    Column("content", _shown, least=12, fold=True),
)

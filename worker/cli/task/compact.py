"""`perdure task compact`: make the state of a parked agent or of a dead letter smaller."""

from __future__ import annotations

from typing import Annotated

import typer

from ....queues.producer import Producer
from ....queues.records import State
from ...journal.compaction import compact_state
from ..support.connection import connected, find_handle
from ..support.errors import Failed, Misuse
from ..support.options import InQueue, TaskId
from ..support.output import AsJson, note, print_json, print_table


@connected
async def compact(
    producer: Producer,
    task_id: TaskId,
    *,
    keep_steps: Annotated[
        int, typer.Option("--keep-steps", min=0, metavar="N", help="Closed steps that stay, with their results.")
    ] = 10,
    keep_messages: Annotated[
        int, typer.Option("--keep-messages", min=0, metavar="N", help="Messages of the conversation that stay.")
    ] = 50,
    drop_context: Annotated[
        list[str] | None,
        typer.Option("--drop-context", metavar="KEY", help="Delete this key of the state's context; repeatable."),
    ] = None,
    queue: InQueue = None,
    json: AsJson = False,
) -> None:
    """Move closed steps and old messages out of the state of an agent.

    Use it if an agent waits for a compaction, because its state exceeds
    PERDURE_PAYLOAD_LIMIT: it resumes. A dead letter with StateTooLarge can be
    replayed afterwards. Nothing is lost: the event log keeps it all, and
    'perdure task events ID' shows it. If a field of your own is what is too
    large, raise PERDURE_PAYLOAD_LIMIT of the workers, then run this command.

    Example: perdure task compact 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --keep-steps 20
    """
    handle = await find_handle(producer, task_id, queue)
    try:
        found = await compact_state(
            producer.gateway,
            handle.partition,
            task_id,
            keep_steps=keep_steps,
            keep_messages=keep_messages,
            drop_context=tuple(dict.fromkeys(drop_context or ())),
            payload_limit=producer.payload_limit,
        )
    except KeyError as error:
        raise Misuse(f"--drop-context: the state has no context key {error.args[0]!r}") from None
    before, after = sum(found.before.values()), sum(found.after.values())
    if json:
        print_json(
            {
                "id": task_id,
                "before": before,
                "after": after,
                "fields": found.after,
                "steps": found.steps,
                "messages": found.messages,
                "woken": found.woken,
            }
        )
    else:
        changed = sorted(found.before, key=lambda name: -found.before[name])
        rows = [
            (name, f"{found.before[name]:,}", f"{found.after[name]:,}")
            for name in changed
            if found.before[name] != found.after[name] or name in changed[:3]
        ]
        print_table(("field", "before#", "after#"), [*rows, ("all", f"{before:,}", f"{after:,}")])
    note(f"archived {found.steps} steps and {found.messages} messages of task {task_id}")
    if found.woken:
        note("the task is due now")
    elif found.state is State.DEAD:
        note(f"it is a dead letter; to resume it: perdure dlq replay {task_id}")
    elif before == after:
        raise Failed("nothing left the state")

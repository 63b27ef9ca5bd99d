"""`perdure task dismiss`: a finding of a coherence check that is a false alarm."""

from __future__ import annotations

from typing import Annotated

import typer

from ....queues.producer import Producer
from ...agent.coherence.findings import stored_findings
from ..support.connection import connected, find_handle
from ..support.errors import Failed
from ..support.options import InQueue, TaskId
from ..support.output import AsJson, note, print_data, print_json


@connected
async def dismiss(
    producer: Producer,
    task_id: TaskId,
    finding: Annotated[str, typer.Argument(metavar="FINDING", help="Number of its event, or name of its check.")],
    *,
    queue: InQueue = None,
    json: AsJson = False,
) -> None:
    """Dismiss a finding of a coherence check, and print the task's id.

    Use it for a false alarm: equal findings of this task do not return.
    'perdure task show' lists the findings that hold, with the numbers of
    their events. A parked task then needs a message, a dead letter a replay.

    Example: perdure task dismiss 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f 12
    """
    handle = await find_handle(producer, task_id, queue)
    if finding.isdecimal():
        numbers = [int(finding)]
    else:
        held = await stored_findings(producer.gateway, handle.partition, task_id)
        numbers = [one.n for one in held if one.check == finding]
    if not numbers:
        raise Failed(f"could not dismiss {finding!r}: no such finding holds; 'perdure task show {task_id}' lists them")
    for number in numbers:
        try:
            await handle.dismiss(number)
        except ValueError as error:
            raise Failed(str(error)) from None
    if json:
        print_json({"id": task_id, "dismissed": numbers})
    else:
        print_data(task_id)
    note(f"dismissed {len(numbers)} findings of task {task_id}")

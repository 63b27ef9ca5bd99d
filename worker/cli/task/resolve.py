"""`perdure task resolve`: a person's decision about a risky step that was cut off."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic_core import from_json

from ....queues.errors import CannotResolve, PayloadTooLarge
from ....queues.producer import Producer
from ....queues.records import State
from ..support.connection import connected, find_handle
from ..support.errors import Failed, Misuse
from ..support.options import InQueue, TaskId
from ..support.output import AsJson, note, print_data, print_json
from .inbox import login


@connected
async def resolve(
    producer: Producer,
    task_id: TaskId,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Key of the step, as the error names it.")],
    *,
    result: Annotated[
        str | None, typer.Option("--result", metavar="JSON", help="It happened: the step returns this value.")
    ] = None,
    failed: Annotated[
        str | None, typer.Option("--failed", metavar="TEXT", help="It failed: the step raises StepResolvedAsFailed.")
    ] = None,
    run_again: Annotated[bool, typer.Option("--run-again", help="It did not happen: call the step again.")] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Your name. Default: your login.")] = None,
    queue: InQueue = None,
    json: AsJson = False,
) -> None:
    """Decide about a risky step in doubt, and print the task's id.

    A risky step that was cut off may have acted. Find out whether it did,
    with its idempotency key ('perdure task show ID' has it), and give one of
    --result, --failed and --run-again. The next run takes the decision in
    place of calling the step. A later decision replaces this one until a run
    has read it. The task must not run; a dead letter then needs a replay.

    Example: perdure task resolve 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f pay --result '"receipt 17"'
    """
    if (result is not None) + (failed is not None) + run_again != 1:
        raise Misuse("give one of --result JSON, --failed TEXT and --run-again")
    if failed == "":
        raise Misuse("--failed must be a text, got ''")
    decision: dict[str, Any] = {"run_again": True} if run_again else {"failed": failed}
    if result is not None:
        decision = {"result": _read(result)}
    handle = await find_handle(producer, task_id, queue)
    try:
        state = await handle.resolve_step(step, **decision, by=login() if by is None else by)
    except (CannotResolve, PayloadTooLarge) as error:
        raise Failed(str(error)) from None
    if json:
        print_json({"id": handle.id, "step": step, "decision": next(iter(decision)), "state": state})
    else:
        print_data(handle.id)
    note(f"resolved step {step!r} of task {handle.id}; {_next(handle.id, state)}")


def _read(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise Misuse(f"--result must be JSON, got {text!r}: {error}") from None


def _next(task_id: str, state: State) -> str:
    if state is State.DEAD:
        return f"it is a dead letter; to resume it: perdure dlq replay {task_id}"
    return "its next run reads the decision"

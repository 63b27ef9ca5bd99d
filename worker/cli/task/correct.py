"""`perdure task correct`: other values for fields of an agent's state, from a person."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic_core import from_json

from ....queues.handle import TaskHandle
from ....queues.inbox import Sent
from ....queues.producer import Producer
from ....queues.records import State
from ...errors import BadHistory
from ...journal.correction import CannotCorrect, corrected
from ...journal.history import state_at
from ..support.connection import connected, find_handle
from ..support.errors import Failed, Misuse
from ..support.options import InQueue, TaskId
from ..support.output import AsJson, note, print_data, print_json
from .inbox import login

Fields = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="PATH=VALUE", help="New value of a field, as JSON, else as text; repeatable."),
]


@connected
async def correct(
    producer: Producer,
    task_id: TaskId,
    *,
    field: Fields = None,
    proceed: Annotated[
        bool, typer.Option("--continue", help="Confirm that the agent may continue, also without --field.")
    ] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Your name. Default: your login.")] = None,
    queue: InQueue = None,
    json: AsJson = False,
) -> None:
    """Correct the state of an agent, and print the task's id.

    The agent applies all values, or none, before its next step. The event
    'corrected' or 'correction_refused' says which; 'perdure task events ID'
    prints it. An agent that waits for a message wakes up; a dead letter
    applies the values after a replay, and does not ask whether it may continue.
    An agent that waits for a confirmation (on_resume="ask") continues. PATH has dots between names and
    indexes; for a name with a dot write a JSON pointer: /context/a.b

    Example: perdure task correct 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --field context.city=Paris
    """
    if not field and not proceed:
        raise Misuse("give at least one --field PATH=VALUE, or --continue")
    changes = read_fields(field)
    handle = await find_handle(producer, task_id, queue)
    await _check(producer, handle, changes)
    by = login() if by is None else by
    sent = await handle.correct(changes, by=by, confirm=proceed)
    if json:
        print_json({"id": sent.task_id, "number": sent.number, "state": sent.state, "changes": changes})
    else:
        print_data(sent.task_id)
    note(f"sent {'correction' if changes else 'confirmation'} {sent.number} to task {sent.task_id}; {_when(sent)}")


def read_fields(given: list[str] | None) -> dict[str, Any]:
    """Return the values of --field by path. Raises `Misuse`."""
    return dict(map(_field, given or ()))


def _field(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not path or not equals:
        raise Misuse(f"--field must be PATH=VALUE, got {text!r}")
    try:
        return path, from_json(value, allow_inf_nan=False)
    except ValueError:
        return path, value


async def _check(producer: Producer, handle: TaskHandle[Any], changes: dict[str, Any]) -> None:
    """Refuse what does not fit the state in the log. A task that has not started has none: its agent checks."""
    try:
        past = await state_at(producer.gateway, handle.partition, handle.id)
    except BadHistory:
        return
    if past.agent is None:
        record = await handle.record()
        if record.attempts or record.state is State.DEAD:
            raise Failed(f"task {handle.id} has no state to correct: it is not an agent")
        return
    try:
        corrected(past.state, changes)
    except CannotCorrect as error:
        raise Misuse(f"--field {error}") from None


def _when(sent: Sent) -> str:
    if sent.state is State.DEAD:
        return f"it is a dead letter; to resume it: perdure dlq replay {sent.task_id}"
    return "the agent reads it before its next step"

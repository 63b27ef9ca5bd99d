"""`perdure task fork`: a new task that goes on from a point of another one's past."""

from __future__ import annotations

import re
from typing import Annotated, Any

import orjson
import typer

from ...queues import Producer
from ..journal import BadEdit, Point
from ..journal import fork as fork_task
from .connection import connected
from .failures import Misuse
from .lookup import find_handle
from .output import AsJson, print_data, print_json, tell
from .parameters import TaskId, read_object, read_task_id

__all__ = ["fork"]

_PAIR = re.compile(r"([^=\s{][^=]*)=(.*)", re.DOTALL)


def read_point(text: str) -> Point:
    """An event's number as a number; else what it is: an entry's id, or a step's key."""
    return int(text) if re.fullmatch("[0-9]{1,15}", str(text)) else str(text)


@connected
async def fork(
    producer: Producer,
    task_id: TaskId,
    *,
    at: Annotated[
        Any,
        typer.Option(
            metavar="N",
            parser=read_point,
            help="As it stood after event N, or after the step of this key. Else as it stands now.",
            show_default=False,
        ),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Change it: NAME=VALUE or a JSON object.", show_default=False),
    ] = None,
    new_id: Annotated[
        str | None,
        typer.Option("--task-id", metavar="NEW", parser=read_task_id, help="Its id.", show_default=False),
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out events that cannot be read, or are missing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Start a new task from a point of another one's past; prints its id.

    It has the same name, arguments and headers. An agent has the state as of
    event N, a function the steps that were recorded by then. The former task
    stays as it is. What is done again has the new task's idempotency keys.

    --edit changes the state of an agent, or the arguments of a function. A
    value is JSON, else text; a name may lead inside: context.mood=calm.

    Example: perdure task fork 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --at 12 --edit 'goal=be brief'
    """
    await find_handle(producer, task_id)
    try:
        forked = await fork_task(
            producer, task_id, at=at, edit=_edits(edit or []), new_id=new_id, lenient=skip_unreadable
        )
    except BadEdit as error:
        raise Misuse(f"--edit: {error}") from None
    if json:
        print_json(
            {
                "id": forked.handle.id,
                "source": task_id,
                "event": forked.event,
                "agent": forked.agent,
                "steps": forked.steps,
                "within": forked.within,
            }
        )
    else:
        print_data(forked.handle.id)
    of = "" if forked.agent is None else f" of agent {forked.agent}"
    tell(f"a new task{of} goes on from event {forked.event} of task {task_id}, with {forked.steps} recorded steps")
    if forked.within is not None:
        tell(f"step {forked.within!r} was under way then: it begins anew, and may tell again what it had told")


def _edits(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        if pair := _PAIR.fullmatch(text):
            found[pair[1].strip()] = _value(pair[2])
            continue
        try:
            found |= read_object(text)
        except ValueError as error:
            raise Misuse(f"--edit takes NAME=VALUE or a JSON object, and {text!r} is neither: {error}") from None
    return found


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text

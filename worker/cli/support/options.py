"""What several commands take, and how its text is read. Each reader refuses what it cannot mean with the rule."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import typer
from pydantic_core import from_json

from ....deadletter import Reason
from ....queues import check_name

__all__ = [
    "QueueOption",
    "ReasonOption",
    "TaskId",
    "TaskIds",
    "TaskNameOption",
    "in_duration",
    "in_seconds",
    "read_object",
    "read_queue",
    "read_task_id",
]

_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def read_task_id(text: str) -> str:
    if not _TASK_ID.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a task id: letters, digits, '.', '_' and '-', at most 128")
    return text


def read_queue(text: str) -> str:
    try:
        return check_name("queue", text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def read_seconds(text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def in_seconds(help_text: str) -> Any:
    """An option that takes seconds."""
    return typer.Option(metavar="SECONDS", parser=read_seconds, help=help_text, show_default=False)


_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}


def read_duration(text: str | float) -> float:
    """Seconds: 90, 90s, 30min, 24h, 7d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|)", str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time: give seconds, or a number with s, min, h or d, such as 24h")
    return float(found[1]) * _UNITS[found[2]]


def in_duration(help_text: str, default: str) -> Any:
    """An option that takes a time with its unit. default: as the help shows it."""
    return typer.Option(metavar="TIME", parser=read_duration, help=help_text, show_default=default)


def read_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object; `ValueError` says where it is not one. Unlike Python's own, NaN and Infinity are no JSON."""
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'a JSON object is wanted, such as {{"root": "src"}}, not {_kind(found)}')
    return found


def _kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


TaskId = Annotated[str, typer.Argument(metavar="ID", parser=read_task_id, help="The task's id.", show_default=False)]

TaskIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", parser=read_task_id, help="Tasks, by their ids.", show_default=False),
]

QueueOption = Annotated[
    str | None, typer.Option("--queue", metavar="QUEUE", parser=read_queue, help="Only this queue.")
]
TaskNameOption = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only tasks of this name.")]


def read_reason(text: str) -> Reason:
    """Parse a reason, in the words of earlier versions, too."""
    try:
        return Reason(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, map(str, Reason)))}") from None


ReasonOption = Annotated[
    Reason | None,
    typer.Option(
        "--reason",
        metavar=f"[{'|'.join(Reason)}]",
        parser=read_reason,
        help="Only those given up for this reason.",
    ),
]

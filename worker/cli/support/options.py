"""Options that several commands share, their parsers, and the file that `--output` names."""

from __future__ import annotations

import functools
import getpass
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Final, ParamSpec, TextIO, TypeVar

import typer
from pydantic import ValidationError
from pydantic_core import from_json

from ....queues.argument_conditions import ArgumentCondition
from ....queues.durations import FutureTime, PointInTime, parse_duration
from ....queues.envelope import is_task_id
from ....queues.errors import PayloadTooLarge
from ....queues.keys import check_name, check_tenant
from ....queues.private_files import replaced_file
from ....queues.regular_files import open_regular, read_bounded, read_regular
from ...errors import first_problem
from .errors import Failed, Misuse
from .output import confirm

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def parser(read: Callable[P, R]) -> Callable[P, R]:
    """Make a parser of an option or argument of a function that raises `ValueError`."""

    @functools.wraps(read)
    def parsed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


@parser
def read_task_id(text: str) -> str:
    if not is_task_id(text):
        raise ValueError(f"must be a task id: at most 128 letters, digits, '.', '_' and '-'; got {text!r}")
    return text


@parser
def read_tenant(text: str) -> str:
    return check_tenant(text)


@parser
def read_queue(text: str) -> str:
    return check_name("queue", text)


@parser
def read_batch(text: str) -> str:
    return check_name("batch", text)


@parser
def read_app(text: str) -> str:
    return check_name("app", text)


read_duration = parser(parse_duration)


def in_duration(help_text: str, *, default: str | bool = False, positive: bool = False) -> Any:
    """Return an option for a duration.

    Args:
        default: As shown in the help.
        positive: Refuse 0.
    """
    parser = functools.partial(read_duration, positive=positive)
    return typer.Option(metavar="DURATION", parser=parser, help=help_text, show_default=default)


@parser
def read_future(text: str | FutureTime) -> FutureTime:
    return text if isinstance(text, FutureTime) else FutureTime.parse(text)


@parser
def read_time(text: str | PointInTime) -> PointInTime:
    return text if isinstance(text, PointInTime) else PointInTime.parse(text)


Since = Annotated[
    PointInTime | None,
    typer.Option(
        metavar="TIME", parser=read_time, help="Only tasks enqueued since then: 15m or 2h before now, or an ISO time."
    ),
]
Until = Annotated[
    PointInTime | None, typer.Option(metavar="TIME", parser=read_time, help="Only tasks enqueued until then.")
]


def read_json(text: str | bytes) -> Any:
    """Parse JSON. NaN and Infinity are refused, which Python's own parser accepts. Raises `ValueError`."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


def read_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError`."""
    found = read_json(text)
    if not isinstance(found, dict):
        raise ValueError(f'must be a JSON object, such as {{"root": "src"}}, got {_kind(found)}')
    return found


def _kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


@parser
def read_condition(text: str | ArgumentCondition) -> ArgumentCondition:
    """Parse a condition on an argument."""
    return text if isinstance(text, ArgumentCondition) else ArgumentCondition.parse(text)


Where = Annotated[
    list[ArgumentCondition] | None,
    typer.Option(
        "--where",
        metavar="NAME=VALUE",
        parser=read_condition,
        help="Only tasks with this argument, such as tenant=acme or options.depth=3. Repeatable.",
    ),
]

_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:/\s*s)?")


@parser
def read_rate(text: str | float) -> float:
    """Parse a rate per second."""
    found = _RATE.fullmatch(str(text).strip())
    if not found or not float(found[1]):
        raise ValueError(f"must be a number per second, such as 5 or 5/s; got {text!r}")
    return float(found[1])


RateOption = Annotated[
    float | None, typer.Option("--rate", metavar="N/s", parser=read_rate, help="At most N per second.")
]

TaskId = Annotated[str, typer.Argument(metavar="ID", parser=read_task_id, help="Id of the task.")]

InQueue = Annotated[
    str | None,
    typer.Option("--queue", metavar="QUEUE", parser=read_queue, help="Queue of the task, if several have the id."),
]

OneTaskId = Annotated[
    str | None, typer.Argument(metavar="[ID]", parser=read_task_id, help="Id of the task.", show_default=False)
]

TaskIds = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", parser=read_task_id, help="Ids of the tasks.")]

QueueOption = Annotated[
    str | None, typer.Option("--queue", metavar="QUEUE", parser=read_queue, help="Only tasks of this queue.")
]
TaskNameOption = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only tasks with this name.")]
AppOption = Annotated[
    str | None, typer.Option("--app", metavar="NAME", parser=read_app, help="Only tasks of this app.")
]


OutputFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Path of the file. Default: stdout.")
]


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO | None]:
    """Open the file to write to, which only its owner can read; None for stdout.

    It has its name once it is complete; an interrupted command leaves the file that was there.
    """
    if path is None:
        yield None
        return
    try:
        with replaced_file(path) as data:
            file = io.TextIOWrapper(data, encoding="utf-8")
            yield file
            file.detach()
    except OSError as error:
        raise Failed(f"could not write {path}: {error.strerror or error}") from None


By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Your name. Default: your login.")]


def login() -> str:
    """Return the name of the user who runs the command."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return ""


DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")]

Assured = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def is_terminal() -> bool:
    """Return whether stdin is a terminal."""
    return sys.stdin.isatty()


def confirm_deletion(what: str, warning: str) -> None:
    """Ask before something is deleted. warning: see `confirm_act`."""
    confirm_act(f"Permanently delete {what}?", warning, "nothing was deleted")


def confirm_act(question: str, warning: str, refused: str) -> None:
    """Ask before an act that cannot be taken back.

    Args:
        warning: Action of the command, for the error.
        refused: What the answer "no" means.

    Raises:
        Misuse: Stdin is no terminal.
        Failed: The answer is no.
    """
    if not is_terminal():
        raise Misuse(f"{warning}: add --yes, because stdin is no terminal")
    if not confirm(question):
        raise Failed(refused)


MAX_LINE: Final = 1 << 28
"""Largest size of a line in bytes."""


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open a regular file, or a copy of stdin for `-`: both can be read twice. Raises `Misuse`."""
    file: IO[bytes]
    try:
        if path == "-":
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; only its opening is misuse
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.seek(0)
        else:
            file = open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    with file:
        yield file


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, without white space around them and without empty ones.

    Raises `Misuse` for a line that is too long.
    """
    file.seek(0)
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise Misuse(f"line {number}: it has more than {MAX_LINE:,} bytes")
        if text := line.strip():
            yield number, text


_MAX_LISTED: Final = 10
"""Invalid lines that a message lists."""


def check_lines(
    file: IO[bytes],
    check: Callable[[int, bytes], object],
    undone: str,
    *,
    repeated: Callable[[], Iterable[str]] = tuple,
) -> int:
    """Check all lines of a file; return their number.

    Args:
        check: Called with number and text of each line; raises `ValueError` for an invalid one.
        undone: First words of the error, such as "nothing was sent".
        repeated: Returns further problems after the last line.

    Raises:
        Misuse: Lines are invalid; the text lists them.
    """
    problems: list[str] = []
    count = wrong = 0
    for number, text in numbered_lines(file):
        count += 1
        try:
            check(number, text)
        except ValueError as error:
            wrong += 1
            if wrong <= _MAX_LISTED:
                problems.append(f"line {number}: {problem(error).replace('at line 1 column', 'at column')}")
    for repetition in repeated():
        wrong += 1
        problems.append(repetition)
    if wrong:
        more = f"\n  and {wrong - _MAX_LISTED} more lines" if wrong > _MAX_LISTED else ""
        listed = "".join(f"\n  {text}" for text in problems[:_MAX_LISTED])
        raise Misuse(f"{undone}, {wrong} of {count} lines are invalid:{listed}{more}")
    return count


def read_lines(file: IO[bytes], read: Callable[[int, bytes], R]) -> Iterator[R]:
    """Yield what `read` returns for number and text of each line of a checked file."""
    for number, text in numbered_lines(file):
        try:
            yield read(number, text)
        except ValueError as error:
            raise Failed(f"line {number} changed while the file was read: {problem(error)}") from None


def problem(error: ValueError) -> str:
    """Return the text of an error as one line, without the invalid value."""
    if isinstance(error, ValidationError):
        return first_problem(error)
    return str(error) if isinstance(error, PayloadTooLarge) else str(error).partition("\n")[0]


def read_text(path: str, limit: int) -> str:
    """Return the text of a regular file of at most so many bytes, or of stdin for `-`. Raises `Misuse`."""
    try:
        data = read_bounded(sys.stdin.buffer, limit, path) if path == "-" else read_regular(path, limit)
        return data.decode()
    except UnicodeDecodeError:
        raise Misuse(f"could not read {path}: it must be UTF-8") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: OSError) -> Misuse:
    return Misuse(f"could not read {path}: {error.strerror or error}")

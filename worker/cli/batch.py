"""Tasks from a file of JSON lines: all lines are checked before the first task is sent.

    {"task": "audit", "args": {"root": "src"}, "queue": "default", "delay": 60, "id": "audit-src",
     "key": "src", "headers": {}}

`args` must be there; what else is missing is the command line's to say. The file is read twice, line by line, so its
size does not matter.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from ...queues import Form, Marks, Message, Options, PayloadTooLarge, check_name, check_size, spread
from .failures import Failed, Misuse
from .parameters import read_object

__all__ = ["Defaults", "Item", "check", "items", "make_message", "opened", "problem"]

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for the lines that do not say otherwise, and the options, size limit and secret arguments of all."""

    task: str | None
    queue: str
    delay: float
    key: str | None
    options: Options
    payload_limit: int
    secrets: Marks = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One task to send, where and when."""

    queue: str
    delay: float
    message: Message


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    args: dict[str, Any]
    task: str | None = None
    queue: Annotated[str, AfterValidator(lambda name: check_name("queue", name))] | None = None
    delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    id: str | None = None
    key: str | None = None
    headers: dict[str, str] = {}


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """The file, or a copy of stdin for `-`: something that can be read twice."""
    try:
        if path == "-":
            with tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
                yield copy
        else:
            with Path(path).open("rb") as file:
                yield file
    except OSError as error:
        raise Failed(f"cannot read {path}: {error.strerror or error}") from None


def check(file: IO[bytes], defaults: Defaults) -> int:
    """Read all lines once. Returns how many tasks there are; `Misuse` names the lines that are none."""
    problems: list[str] = []
    named = array("Q")  # eight bytes for each id that a line gives: files may be long
    count = wrong = 0
    for number, text in _numbered(file):
        count += 1
        try:
            message = _item(text, defaults).message
            if message.own_id:
                named.append(spread(message.id))
        except ValueError as error:
            wrong += 1
            if len(problems) < _SHOWN:
                problems.append(f"line {number}: {problem(error).replace('at line 1 column', 'at column')}")
    twice = {one for one, other in pairwise(sorted(named)) if one == other}
    for line in _named_twice(file, defaults, twice) if twice else ():
        wrong += 1
        problems.append(line)
    if wrong:
        more = f"\n  and {wrong - _SHOWN} more lines" if wrong > _SHOWN else ""
        listed = "".join(f"\n  {line}" for line in problems[:_SHOWN])
        raise Misuse(f"nothing was sent, {wrong} of {count} lines cannot be read:{listed}{more}")
    return count


def _named_twice(file: IO[bytes], defaults: Defaults, twice: Set[int]) -> Iterator[str]:
    """The lines that give an id again."""
    first_lines: dict[str, int] = {}
    for number, text in _numbered(file):
        with suppress(ValueError):  # that line was named already
            message = _item(text, defaults).message
            if message.own_id and spread(message.id) in twice:
                first = first_lines.setdefault(message.id, number)
                if first != number:
                    yield f"line {number}: id {message.id!r} is also that of line {first}"


def items(file: IO[bytes], defaults: Defaults) -> Iterator[Item]:
    """The tasks of a file that was checked."""
    for number, text in _numbered(file):
        try:
            yield _item(text, defaults)
        except ValueError as error:
            raise Failed(f"line {number} was changed while it was read: {problem(error)}") from None


def make_message(
    task: str,
    args: dict[str, Any],
    defaults: Defaults,
    *,
    task_id: str | None,
    key: str | None,
    headers: dict[str, str] | None = None,
) -> Message:
    """A task ready to be sent. Raises `ValueError` of several kinds: `problem` has their text."""
    message = Form(task, headers, defaults.options).message(to_json(args), defaults.secrets, key=key, task_id=task_id)
    size = len(message.envelope) + len(message.arguments)
    check_size("the task's envelope and arguments", size, defaults.payload_limit)
    return message


def problem(error: ValueError) -> str:
    """What is wrong, in one line, without the value itself."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        return f"{where}: {what}" if where else what
    return str(error) if isinstance(error, PayloadTooLarge) else str(error).partition("\n")[0]


def _numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    file.seek(0)
    for number, line in enumerate(file, 1):
        if text := line.strip():
            yield number, text


def _item(text: bytes, defaults: Defaults) -> Item:
    line = _Line.model_validate(read_object(text))
    task = defaults.task if line.task is None else line.task
    if task is None:
        raise ValueError("it names no task, and neither does the command line")
    key = defaults.key if line.key is None else line.key
    message = make_message(task, line.args, defaults, task_id=line.id, key=key, headers=line.headers)
    queue = line.queue or defaults.queue
    return Item(queue, defaults.delay if line.delay is None else line.delay, message)

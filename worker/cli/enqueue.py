"""`perdure enqueue`: one task, or a file of them.

Tasks from a file of JSON lines: all lines are checked before the first task is sent.

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
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from ...queues import (
    EnvelopeTemplate,
    Options,
    PayloadTooLarge,
    Producer,
    Replicated,
    SecretPaths,
    TaskHandle,
    TaskMessage,
    check_name,
    check_size,
    spread,
)
from .support.connection import connected
from .support.errors import Failed, Misuse
from .support.options import in_seconds, read_object, read_queue, read_task_id
from .support.output import AsJson, Bar, note, print_data, print_json, print_json_lines

__all__ = ["Defaults", "Item", "check", "enqueue", "items", "make_message", "opened", "problem"]

_SHOWN_LINES = 10


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for the lines that do not say otherwise, and the options, size limit and secret arguments of all."""

    task: str | None
    queue: str
    delay: float
    key: str | None
    options: Options
    payload_limit: int
    secrets: SecretPaths = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One task to send, where and when."""

    queue: str
    delay: float
    message: TaskMessage


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
            if len(problems) < _SHOWN_LINES:
                problems.append(f"line {number}: {problem(error).replace('at line 1 column', 'at column')}")
    twice = {one for one, other in pairwise(sorted(named)) if one == other}
    for line in _named_twice(file, defaults, twice) if twice else ():
        wrong += 1
        problems.append(line)
    if wrong:
        more = f"\n  and {wrong - _SHOWN_LINES} more lines" if wrong > _SHOWN_LINES else ""
        listed = "".join(f"\n  {line}" for line in problems[:_SHOWN_LINES])
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
) -> TaskMessage:
    """A task ready to be sent. Raises `ValueError` of several kinds: `problem` has their text."""
    message = EnvelopeTemplate(task, headers, defaults.options).message(
        to_json(args), defaults.secrets, key=key, task_id=task_id
    )
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


class Durability(StrEnum):
    """What `--durability` can be."""

    REPLICATED = "replicated"


_SHOWN = 500
"""Ids that are printed together."""


@connected
async def enqueue(
    producer: Producer,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="The task's name.", show_default=False)] = None,
    *,
    args: Annotated[
        str | None, typer.Option(metavar="JSON", help="Its arguments by name, as a JSON object.", show_default=False)
    ] = None,
    queue: Annotated[str, typer.Option(metavar="QUEUE", parser=read_queue, help="Where to put it.")] = "default",
    delay: Annotated[float, in_seconds("How long it waits before it may run.")] = 0.0,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Tasks as JSON lines; - for stdin.", show_default=False),
    ] = None,
    task_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            parser=read_task_id,
            help="An id of your own: a task that is known by it already is left alone.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Tasks of one key are taken up in the order they came in.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        in_seconds("How long one run may take."),
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs before it is given up.", show_default=False)
    ] = None,
    result_ttl: Annotated[
        float | None,
        in_seconds("How long its outcome is kept."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="An argument that is never to be shown; a.b for a member of one. May be given again.",
            show_default=False,
        ),
    ] = None,
    durability: Annotated[
        Durability | None,
        typer.Option(
            help="Wait until replicas have it too: PERDURE_REPLICAS of them, else one.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Put a task on a queue; prints its id. Once it is printed, the task is never lost.

    Example: perdure enqueue audit --args '{"root": "src"}' --delay 60

    With --file, every line is one task, and all are checked before any is
    sent: {"args": {...}, "task"?, "queue"?, "delay"?, "id"?, "key"?,
    "headers"?}
    What a line does not say, the command line says for all.

    Example: perdure enqueue audit --file tasks.jsonl
    """
    try:
        options = Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl)
    except ValueError as error:
        raise Misuse(problem(error)) from None
    secrets = tuple(tuple(name.split(".")) for name in secret or ())
    defaults = Defaults(task, queue, delay, key, options, producer.payload_limit, secrets)
    replicated: Replicated | None = None if durability is None else "replicated"
    if file is None:
        await _send_one(producer, defaults, args, task_id, replicated, json)
    elif args is not None or task_id is not None:
        raise Misuse("--args and --id are for one task: in a file, every line says its own")
    else:
        await _send_file(producer, defaults, file, replicated, json)


async def _send_one(
    producer: Producer,
    defaults: Defaults,
    args: str | None,
    task_id: str | None,
    durability: Replicated | None,
    json: bool,
) -> None:
    if defaults.task is None:
        raise Misuse("name a task, or a file of them with --file")
    try:
        arguments = {} if args is None else read_object(args)
    except ValueError as error:
        raise Misuse(f"--args: {problem(error)}") from None
    try:
        message = make_message(defaults.task, arguments, defaults, task_id=task_id, key=defaults.key)
    except ValueError as error:
        raise Misuse(problem(error)) from None
    await producer.send([message], queue=defaults.queue, delay=defaults.delay, durability=durability)
    if json:
        print_json({"id": message.id, "queue": defaults.queue})
    else:
        print_data(message.id)
        note(f"{defaults.task} is on queue {defaults.queue} of {producer.address.shown}")


async def _send_file(
    producer: Producer, defaults: Defaults, path: str, durability: Replicated | None, json: bool
) -> None:
    """In the order of the lines; each id is printed once its task is stored."""
    with opened(path) as file:
        count = check(file, defaults)
        with Bar("enqueuing", count) as bar:
            for (queue, delay), run in groupby(items(file, defaults), key=attrgetter("queue", "delay")):
                sent: list[str] = []
                messages = (item.message for item in run)
                handles: AsyncIterator[TaskHandle[Any]] = producer.send_stream(
                    messages, queue=queue, delay=delay, durability=durability
                )
                async for handle in handles:
                    sent.append(handle.id)
                    if len(sent) == _SHOWN:
                        sent = _show(sent, queue, bar, json)
                _show(sent, queue, bar, json)
    note(f"tasks enqueued on {producer.address.shown}: {count}")


def _show(sent: Sequence[str], queue: str, bar: Bar, json: bool) -> list[str]:
    """Print the ids of tasks that are stored; returns an empty list, for the next ones."""
    if sent and json:
        print_json_lines({"id": task_id, "queue": queue} for task_id in sent)
    elif sent:
        print_data("\n".join(sent))
    bar.advance(len(sent))
    return []

"""`perdure enqueue`: one task, or a file of tasks.

Each line of a file is a JSON object:

    {"task": "audit", "args": {"root": "src"}, "queue": "audit", "app": "audit", "delay": 60, "id": "audit-src",
     "key": "src", "headers": {}, "tags": []}

`args` is required; the command line has the defaults for the other fields. The file is read twice, line by line, to
check all lines before the first task is sent, without holding the file in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise
from operator import attrgetter
from typing import IO, Annotated, Any

import typer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from ...queues.catalog import Catalog
from ...queues.envelope import EnvelopeTemplate, Options, TaskMessage
from ...queues.errors import PayloadTooLarge
from ...queues.handle import TaskHandle
from ...queues.junk import report_once
from ...queues.keys import check_name
from ...queues.partitions.route import spread
from ...queues.producer import Producer
from ...queues.security.secret_arguments import SecretPaths, names_beside, path_exists
from ...queues.transport.replication import Replicated
from ..errors import first_problem
from .support.connection import connected, seconds_of_delay, warn_unserved
from .support.errors import Failed, Misuse
from .support.options import (
    Delay,
    in_duration,
    numbered_lines,
    opened,
    read_app,
    read_delay,
    read_object,
    read_queue,
    read_task_id,
)
from .support.output import AsJson, Bar, note, print_data, print_json, print_json_lines

_SHOWN_LINES = 10


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for the fields of a line, and the options, size limit and secret arguments of all tasks."""

    task: str | None
    queue: str | None
    delay: Delay
    key: str | None
    options: Options
    payload_limit: int
    large_limit: int
    catalog: Catalog
    secrets: SecretPaths = ()
    tags: Sequence[str] = ()
    app: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One task with its queue and delay."""

    task: str
    queue: str
    delay: Delay
    message: TaskMessage


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    args: dict[str, Any]
    task: str | None = None
    queue: Annotated[str, AfterValidator(lambda name: check_name("queue", name))] | None = None
    app: Annotated[str, AfterValidator(lambda name: check_name("app", name))] | None = None
    delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    id: str | None = None
    key: str | None = None
    headers: dict[str, str] = {}
    tags: list[str] | None = None


def check(file: IO[bytes], defaults: Defaults) -> int:
    """Check all lines; return the number of tasks.

    Raises:
        Misuse: Lines are invalid; the text lists them.
    """
    problems: list[str] = []
    hashes = array("Q")  # of the given ids, eight bytes each: files may be long
    unseen = defaults.secrets
    count = wrong = 0
    for number, text in numbered_lines(file):
        count += 1
        try:
            message = _item(text, defaults).message
            if unseen:
                unseen = _missing(unseen, from_json(message.arguments))
            if message.own_id:
                hashes.append(spread(message.id))
        except ValueError as error:
            wrong += 1
            if len(problems) < _SHOWN_LINES:
                problems.append(f"line {number}: {problem(error).replace('at line 1 column', 'at column')}")
    duplicates = {one for one, other in pairwise(sorted(hashes)) if one == other}
    for line in _duplicate_ids(file, defaults, duplicates) if duplicates else ():
        wrong += 1
        problems.append(line)
    if wrong:
        more = f"\n  and {wrong - _SHOWN_LINES} more lines" if wrong > _SHOWN_LINES else ""
        listed = "".join(f"\n  {line}" for line in problems[:_SHOWN_LINES])
        raise Misuse(f"nothing was sent, {wrong} of {count} lines are invalid:{listed}{more}")
    if unseen and count:
        raise Misuse(f"--secret: no line has an argument called {'.'.join(unseen[0])!r}; nothing was sent")
    return count


def _missing(paths: SecretPaths, arguments: Any) -> SecretPaths:
    return tuple(path for path in paths if not path_exists(arguments, path))


def _duplicate_ids(file: IO[bytes], defaults: Defaults, duplicates: Set[int]) -> Iterator[str]:
    """Yield a problem for each line that repeats an id."""
    first_lines: dict[str, int] = {}
    for number, text in numbered_lines(file):
        with suppress(ValueError):  # reported already
            message = _item(text, defaults).message
            if message.own_id and spread(message.id) in duplicates:
                first = first_lines.setdefault(message.id, number)
                if first != number:
                    yield f"line {number}: id {message.id!r} must be unique, line {first} has it too"


def items(file: IO[bytes], defaults: Defaults) -> Iterator[Item]:
    """Yield the tasks of a checked file."""
    for number, text in numbered_lines(file):
        try:
            yield _item(text, defaults)
        except ValueError as error:
            raise Failed(f"line {number} changed while the file was read: {problem(error)}") from None


def make_message(
    task: str,
    args: dict[str, Any],
    defaults: Defaults,
    *,
    task_id: str | None,
    key: str | None,
    headers: dict[str, str] | None = None,
    tags: Sequence[str] | None = None,
    app: str | None = None,
) -> TaskMessage:
    """Return a task ready to be sent.

    Raises:
        ValueError: The task is invalid; see `problem` for the text.
    """
    form = EnvelopeTemplate(task, headers, defaults.options, defaults.tags if tags is None else tags, app=app)
    message = form.message(to_json(args), defaults.secrets, key=key, task_id=task_id)
    message.check(defaults.payload_limit, defaults.large_limit)
    return message


def resolve_queue(task: str, queue: str | None, app: str | None, arguments: bytes, catalog: Catalog) -> str:
    """Return the queue of a task: the one that is named, else the catalog's.

    If the queue is named, a schema that cannot be used is reported and not used.

    Raises:
        CatalogError: The catalog does not know the queue, several apps have the task there and none is named, or the
            arguments do not fit the task that it lists.
    """
    if queue is None or any(listed.queue == queue for listed in catalog.named(task, app)):
        listed = catalog.find(task, app=app, queue=queue)
        if queue is None or listed.problem is None:
            listed.check(arguments)
        else:
            report_once(f"the arguments of task {task!r} were not checked: {listed.problem}")
        return listed.queue
    return queue


def problem(error: ValueError) -> str:
    """Return the text of an error as one line, without the invalid value."""
    if isinstance(error, ValidationError):
        return first_problem(error)
    return str(error) if isinstance(error, PayloadTooLarge) else str(error).partition("\n")[0]


def _item(text: bytes, defaults: Defaults) -> Item:
    line = _Line.model_validate(read_object(text))
    task = defaults.task if line.task is None else line.task
    if task is None:
        raise ValueError("task is missing, and the command line has no default for it")
    key = defaults.key if line.key is None else line.key
    app = line.app or defaults.app
    message = make_message(
        task, line.args, defaults, task_id=line.id, key=key, headers=line.headers, tags=line.tags, app=app
    )
    queue = resolve_queue(task, line.queue or defaults.queue, app, message.arguments, defaults.catalog)
    return Item(task, queue, defaults.delay if line.delay is None else Delay(line.delay), message)


class Durability(StrEnum):
    """Values of `--durability`."""

    REPLICATED = "replicated"


_PRINTED_TOGETHER = 500
"""Ids per write to stdout."""


@connected
async def enqueue(
    producer: Producer,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Name of the task.")] = None,
    *,
    args: Annotated[str | None, typer.Option(metavar="JSON", help="Arguments by name, as a JSON object.")] = None,
    queue: Annotated[
        str | None,
        typer.Option(metavar="QUEUE", parser=read_queue, help="Queue of the task; by default the catalog's."),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", parser=read_app, help="App whose workers run the task; by default any that has the task."
        ),
    ] = None,
    delay: Annotated[
        Delay | None,
        typer.Option(
            metavar="TIME", parser=read_delay, help="Time before the task may run: 90, 15m, 2h; or 2026-11-22T18:00Z."
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Enqueue the tasks of this file of JSON lines; - for stdin.")
    ] = None,
    task_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            parser=read_task_id,
            help="Id of the task. If the same task with this id exists, nothing is enqueued.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Ordering key: tasks with the same key start in the order of enqueuing."),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Word by which lists find the task. Repeatable.")
    ] = None,
    timeout: Annotated[
        float | None,
        in_duration("Time limit of one attempt.", positive=True),
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Attempts before the task becomes a dead letter.")
    ] = None,
    result_ttl: Annotated[
        float | None,
        in_duration("Time for which the outcome is kept.", positive=True),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Argument that is never shown; a.b for a member of an argument. Repeatable."),
    ] = None,
    durability: Annotated[
        Durability | None,
        typer.Option(help="Wait until Redis replicas have the task too: PERDURE_REPLICAS of them, or one."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Enqueue a task, and print its id.

    When the id is printed, Redis has stored the task.

    Example: perdure enqueue audit --args '{"root": "src"}' --delay 60

    With --file, each line is one task: {"args": {...}, "task"?, "queue"?,
    "app"?, "delay"?, "id"?, "key"?, "headers"?, "tags"?}. The command line has
    the defaults for missing fields. All lines are checked before the first is sent.

    Workers publish the queue and the arguments of their tasks (perdure task
    catalog), so arguments are checked, and --queue is needed only before the
    first worker has started. If several apps have a task of this name, --app
    names one: workers of the others leave the task alone.

    Example: perdure enqueue audit --file tasks.jsonl
    """
    try:
        options = Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl)
    except ValueError as error:
        raise Misuse(problem(error)) from None
    secrets = tuple(tuple(name.split(".")) for name in secret or ())
    limits = producer.payload_limit, producer.large_limit
    catalog, starts = await producer.catalog(), delay or Delay()
    defaults = Defaults(task, queue, starts, key, options, *limits, catalog, secrets, tag or (), app)
    replicated: Replicated | None = None if durability is None else "replicated"
    if file is None:
        await _send_one(producer, defaults, args, task_id, replicated, json)
    elif args is not None or task_id is not None:
        raise Misuse("--args and --id are for one task: with --file, give them in each line")
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
        raise Misuse("give a TASK, or a file of tasks with --file")
    try:
        arguments = {} if args is None else read_object(args)
    except ValueError as error:
        raise Misuse(f"--args: {problem(error)}") from None
    for path in _missing(defaults.secrets, arguments):
        names = ", ".join(names_beside(arguments, path)) or "none"
        raise Misuse(f"--secret: no argument is called {'.'.join(path)!r}; there are {names}")
    try:
        message = make_message(defaults.task, arguments, defaults, task_id=task_id, key=defaults.key, app=defaults.app)
    except ValueError as error:
        raise Misuse(problem(error)) from None
    queue = resolve_queue(defaults.task, defaults.queue, defaults.app, message.arguments, defaults.catalog)
    handles: list[TaskHandle[Any]] = await producer.send(
        [message], queue=queue, delay=await seconds_of_delay(producer, defaults.delay), durability=durability
    )
    (handle,) = handles
    if json:
        print_json(_shown(handle))
    else:
        print_data(message.id)
    if handle.existed:
        state = (await handle.record()).state
        note(f"task {message.id} exists already on queue {queue}, and is {state}: nothing was enqueued")
    elif not json:
        note(f"enqueued {defaults.task} on queue {queue} of {producer.address.shown}")
    await warn_unserved(producer, {queue: {defaults.task}}, defaults.catalog, app=defaults.app)


async def _send_file(
    producer: Producer, defaults: Defaults, path: str, durability: Replicated | None, json: bool
) -> None:
    """Send tasks in the order of the lines; print each id after its task is stored."""
    sent_to: dict[str, set[str]] = {}
    existed = 0
    with opened(path) as file:
        count = check(file, defaults)
        with Bar("enqueuing", count) as bar:
            for (queue, delay), run in groupby(items(file, defaults), key=attrgetter("queue", "delay")):
                names = sent_to.setdefault(queue, set())
                sent: list[TaskHandle[Any]] = []
                messages = (_noted(item, names) for item in run)
                handles: AsyncIterator[TaskHandle[Any]] = producer.send_stream(
                    messages, queue=queue, delay=await seconds_of_delay(producer, delay), durability=durability
                )
                try:
                    async for handle in handles:
                        sent.append(handle)
                        existed += handle.existed
                        if len(sent) == _PRINTED_TOGETHER:
                            sent = _print_ids(sent, bar, json)
                finally:
                    _print_ids(sent, bar, json)
    before = f"; existed already: {existed}" if existed else ""
    note(f"tasks enqueued on {producer.address.shown}: {count - existed}{before}")
    await warn_unserved(producer, sent_to, defaults.catalog, app=defaults.app)


def _noted(item: Item, names: set[str]) -> TaskMessage:
    names.add(item.task)
    return item.message


def _shown(handle: TaskHandle[Any]) -> dict[str, Any]:
    return {"id": handle.id, "queue": handle.partition.queue, "existed": handle.existed}


def _print_ids(sent: Sequence[TaskHandle[Any]], bar: Bar, json: bool) -> list[TaskHandle[Any]]:
    """Print the ids of stored tasks; return an empty list for the next ones."""
    if sent and json:
        print_json_lines(map(_shown, sent))
    elif sent:
        print_data("\n".join(handle.id for handle in sent))
    bar.advance(len(sent))
    return []

"""`perdure enqueue`: one task, or a file of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any

import typer

from ...queues import Options, Producer, Replicated, TaskHandle
from .batch import Defaults, check, items, make_message, opened, problem
from .connection import connected
from .failures import Misuse
from .output import AsJson, print_data, print_json, print_json_lines, tell
from .parameters import in_seconds, read_object, read_queue, read_task_id
from .progress import Bar

__all__ = ["enqueue"]


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
        tell(f"{defaults.task} is on queue {defaults.queue} of {producer.address.shown}")


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
    tell(f"tasks enqueued on {producer.address.shown}: {count}")


def _show(sent: Sequence[str], queue: str, bar: Bar, json: bool) -> list[str]:
    """Print the ids of tasks that are stored; returns an empty list, for the next ones."""
    if sent and json:
        print_json_lines({"id": task_id, "queue": queue} for task_id in sent)
    elif sent:
        print_data("\n".join(sent))
    bar.advance(len(sent))
    return []

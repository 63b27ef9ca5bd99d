"""`perdure dlq`: dead letters, seen and exported; acts.py has what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from ...deadletter import DeadLetter, Filter, find_letter, list_letters
from ...queues import Producer, recorded_steps
from .acts import purge, replay
from .connection import connected, redis_now
from .failures import Failed
from .lookup import known_partitions
from .output import (
    AsJson,
    ago,
    print_fields,
    print_json,
    print_json_lines,
    print_table,
    print_text,
    tell,
    timestamp,
)
from .parameters import QueueOption, ReasonOption, TaskId, TaskNameOption
from .progress import Bar
from .selection import select

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def dlq() -> None:
    """See, replay, purge and export dead letters: tasks given up, with reason, error and checkpoint."""


@app.command("list")
@connected
async def list_(
    producer: Producer,
    *,
    queue: QueueOption = None,
    reason: ReasonOption = None,
    task: TaskNameOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="No more than so many.")] = 100,
    json: AsJson = False,
) -> None:
    """List dead letters, the newest first.

    Example: perdure dlq list --reason crash_loop
    """
    found: list[DeadLetter] = []
    more = False
    partitions = await known_partitions(producer, queue)
    async for letter in list_letters(producer.gateway, partitions, Filter(reason, task)):
        if len(found) == limit:
            more = True
            break
        found.append(letter)
    if json:
        print_json([letter.summary() for letter in found])
    elif found:
        since = ago(await redis_now(producer))
        print_table(
            ("id", "task", "reason", "queue", "died", "attempts#", "crashes#", "error"),
            [
                (
                    letter.id,
                    letter.task,
                    letter.reason,
                    letter.partition.queue,
                    since(letter.died_at),
                    str(letter.attempts),
                    str(letter.crashes),
                    f"{letter.error}: {letter.message.partition(chr(10))[0]}",
                )
                for letter in found
            ],
        )
    else:
        tell(f"no such dead letters in namespace {producer.namespace.name!r} on {producer.address.shown}")
    if more:
        tell(f"there are more than {limit}: raise --limit to see them")


@app.command()
@connected
async def show(producer: Producer, task_id: TaskId, *, json: AsJson = False) -> None:
    """Show a dead letter: why it died, where, and what of its work is kept.

    Example: perdure dlq show 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    letter = await find_letter(producer.gateway, await known_partitions(producer, None), task_id)
    if letter is None:
        raise Failed(f"no dead letter {task_id} in namespace {producer.namespace.name!r} on {producer.address.shown}")
    steps = await recorded_steps(producer.gateway, letter.partition, letter.id)
    if json:
        print_json(letter.summary() | {"steps": steps})
        return
    since = ago(await redis_now(producer))
    summary: dict[str, Any] = letter.summary()
    shown = letter.shown_arguments()
    headers = ", ".join(f"{name}: {value}" for name, value in summary["headers"].items())
    print_fields(
        {
            "id": letter.id,
            "task": letter.task,
            "queue": letter.partition.queue,
            "partition": str(letter.partition.index),
            "reason": letter.reason,
            "error": f"{letter.error}: {letter.message}",
            "died": f"{timestamp(letter.died_at)} ({since(letter.died_at)})",
            "enqueued": f"{timestamp(letter.enqueued_at)} ({since(letter.enqueued_at)})",
            "attempts": f"{letter.attempts}, crashes: {letter.crashes}",
            "worker": letter.worker,
            "arguments": None if shown is None else shown.decode("utf-8", "replace"),
            "headers": headers or None,
            "steps kept": ", ".join(steps) or "none",
            **{f"raw {name}": value for name, value in summary["raw"].items()},
        }
    )
    if letter.traceback:
        print_text(f"\n{letter.traceback.rstrip()}")


@app.command()
@connected
async def export(
    producer: Producer,
    *,
    queue: QueueOption = None,
    reason: ReasonOption = None,
    task: TaskNameOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Else stdout.", show_default=False)
    ] = None,
) -> None:
    """Write dead letters as JSON lines, the oldest first; they stay where they are.

    Example: perdure dlq export -o letters.jsonl
    """
    selected = await select(producer, (), True, queue=queue, reason=reason, task=task)
    with Bar("exporting", selected.count) as bar, _opened(output) as file:
        async for letter in selected.letters:
            print_json_lines([letter.summary()], file)
            bar.advance()
    tell(f"dead letters exported: {bar.done}")


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """The file to write to; None for stdout."""
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}") from None


app.command()(replay)
app.command()(purge)

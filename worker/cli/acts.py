"""What is done to dead letters: `perdure dlq replay` and `perdure dlq purge`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Annotated

import typer

from ...deadletter import DeadLetter, Replay, purge_all, replay_all
from ...queues import PayloadTooLarge, Producer, check_size
from .connection import connected
from .failures import Failed, Misuse
from .output import AsJson, print_data, print_json_lines, tell
from .parameters import QueueOption, ReasonOption, TaskIds, TaskNameOption, read_object
from .progress import Bar
from .selection import Selection, select

__all__ = ["purge", "replay"]

All = Annotated[bool, typer.Option("--all", help="All dead letters, or those that match the options.")]

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:/\s*s)?")


def read_rate(text: str) -> float:
    found = _RATE.fullmatch(str(text).strip())
    if not found or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is not a rate: how many per second, such as 5 or 5/s")
    return float(found[1])


@connected
async def replay(
    producer: Producer,
    ids: TaskIds = None,
    *,
    every: All = False,
    reason: ReasonOption = None,
    task: TaskNameOption = None,
    queue: QueueOption = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="N/s", parser=read_rate, help="No more than N per second.", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Without the checkpoint: from the first step.")] = False,
    edit_args: Annotated[
        str | None, typer.Option(metavar="JSON", help="New arguments, a JSON object.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be replayed.")] = False,
    json: AsJson = False,
) -> None:
    """Put dead letters back on their queues, with new attempts; prints the ids.

    Recorded steps are not run again, unless --fresh asks for it.

    Example: perdure dlq replay --all --reason timeout --rate 5/s
    """
    how = Replay(fresh=fresh, args=_new_arguments(producer, edit_args), rate=rate)
    selected = await select(producer, ids or (), every, queue=queue, reason=reason, task=task)
    if dry_run:
        await _rehearse(selected, json)
        return
    gone = []
    with Bar("replaying", selected.count) as bar:
        async for letter, replayed in replay_all(producer.gateway, selected.letters, how):
            _report(letter, "replayed" if replayed else "gone", json)
            if not replayed:
                gone.append(letter.id)
            bar.advance()
    _sum_up("replayed", bar.done, gone)


def _new_arguments(producer: Producer, text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        read_object(text)
        check_size("--edit-args", len(text.encode()), producer.payload_limit)
    except PayloadTooLarge:
        raise
    except ValueError as error:
        raise Misuse(f"--edit-args: {error}") from None
    return text.strip().encode()


async def _rehearse(selected: Selection, json: bool) -> None:
    reasons: Counter[str] = Counter()
    async for letter in selected.letters:
        reasons[letter.reason] += 1
        _report(letter, "would be replayed", json)
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    tell(f"would be replayed: {reasons.total()}{f' ({listed})' if listed else ''}; nothing was changed")


@connected
async def purge(
    producer: Producer,
    ids: TaskIds = None,
    *,
    every: All = False,
    reason: ReasonOption = None,
    task: TaskNameOption = None,
    queue: QueueOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Delete dead letters for good, with their records and checkpoints; prints the ids.

    Example: perdure dlq purge --all --reason unreadable
    """
    selected = await select(producer, ids or (), every, queue=queue, reason=reason, task=task)
    if every and not yes:
        _ask(selected.count)
    gone = []
    with Bar("purging", selected.count) as bar:
        async for letter, purged in purge_all(producer.gateway, selected.letters):
            _report(letter, "purged" if purged else "gone", json)
            if not purged:
                gone.append(letter.id)
            bar.advance()
    _sum_up("purged", bar.done, gone)


def _ask(count: int | None) -> None:
    if not _is_terminal():
        raise Misuse("--all deletes dead letters for good: where nobody can be asked, say --yes")
    what = "all that match" if count is None else f"all {count}"
    if not typer.confirm(f"Delete {what} dead letters, with their checkpoints, for good?", err=True):
        raise Failed("nothing was purged")


def _is_terminal() -> bool:
    """Whether somebody is there who can be asked."""
    return sys.stdin.isatty()


def _report(letter: DeadLetter, what: str, json: bool) -> None:
    """One letter, as it was dealt with."""
    if json:
        print_json_lines([{"id": letter.id, "outcome": what, "reason": letter.reason, "task": letter.task}])
    elif what != "gone":
        print_data(letter.id)


def _sum_up(what: str, done: int, gone: list[str]) -> None:
    tell(f"{what}: {done - len(gone)}")
    if gone:
        raise Failed(f"{len(gone)} were gone already, replayed or purged by others: {', '.join(gone[:5])}")

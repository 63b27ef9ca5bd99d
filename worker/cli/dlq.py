"""`perdure dlq`: list, group, show, replay, purge and export dead letters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from pydantic_core import from_json

from ...deadletter.groups import LetterGroup, group_letters
from ...deadletter.letters import DAMAGED, FINGERPRINT, DeadLetter, Filter, count_letters, find_letter, list_letters
from ...deadletter.policy import Reason
from ...deadletter.replay import Replay, purge_all, replay_all
from ...queues.delivery.checkpoint import recorded_steps
from ...queues.doubts import Doubt, read_doubts
from ...queues.durations import PointInTime
from ...queues.errors import DecryptionError, QueueError, Unavailable
from ...queues.explanation.sentences import remedy_for
from ...queues.jobs import Act, JobPlan
from ...queues.keys import Partition
from ...queues.producer import Producer
from ...queues.wording import short
from ..defined_secrets import mask_defined
from ..recorded_answers import recorded_answers
from .support.connection import connected_as_tenant, known_partitions, redis_now, where
from .support.errors import Failed, Misuse, misuse_of
from .support.jobs import JobOptions, public_conditions, run_as_job
from .support.options import (
    AppOption,
    Assured,
    OutputFile,
    QueueOption,
    TaskId,
    TaskIds,
    TaskNameOption,
    Where,
    confirm_deletion,
    open_output,
    parser,
    read_object,
    read_time,
)
from .support.output import Bar, Column, Time, note, print_json_lines
from .support.runner import LiveListing, LongListing, OptionGroup, Output, line


@parser
def read_reason(text: str) -> Reason:
    """Parse a reason; names of earlier versions are accepted."""
    try:
        return Reason(text)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(map(repr, map(str, Reason)))}; got {text!r}") from None


@parser
def read_group(text: str) -> str:
    """Parse a fingerprint, or its first digits."""
    if not _GROUP.fullmatch(text):
        raise ValueError(
            f"must be 4 to {FINGERPRINT} hexadecimal digits, which 'perdure dlq groups' prints; got {short(repr(text))}"
        )
    return text.lower()


_GROUP: Final = re.compile(rf"[0-9a-fA-F]{{4,{FINGERPRINT}}}")


@dataclass(frozen=True, slots=True)
class LetterOptions(OptionGroup):
    """Options that select dead letters."""

    queue: QueueOption = None
    reason: Annotated[
        Reason | None,
        typer.Option(metavar=f"[{'|'.join(Reason)}]", parser=read_reason, help="Only dead letters with this reason."),
    ] = None
    task: TaskNameOption = None
    app: AppOption = None
    since: Annotated[
        PointInTime | None,
        typer.Option(metavar="TIME", parser=read_time, help="Only those that died since then: 2h ago, or an ISO time."),
    ] = None
    until: Annotated[
        PointInTime | None, typer.Option(metavar="TIME", parser=read_time, help="Only those that died until then.")
    ] = None
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only those with this text in their reason or error.")
    ] = None
    search: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Only those with this text anywhere, such as in an argument or the traceback."
        ),
    ] = None
    group: Annotated[
        str | None,
        typer.Option(metavar="GROUP", parser=read_group, help="Only those of this group of 'perdure dlq groups'."),
    ] = None
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only those with this ordering key.")] = None
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Only those with this tag. Repeatable.")] = None
    where: Where = None

    async def filter(self, producer: Producer) -> Filter:
        """Return the filter, which the queue is no part of."""
        now = 0 if self.since is self.until is None else await redis_now(producer)
        return Filter(
            self.reason,
            self.task,
            since=None if self.since is None else self.since.at(now),
            until=None if self.until is None else self.until.at(now),
            error=self.error,
            key=self.key,
            tags=tuple(self.tag or ()),
            app=self.app,
            search=self.search,
            group=self.group,
            where=await public_conditions(producer, self.where, self.task),
            tenant=producer.namespace.tenant,
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected dead letters, and their number; None if counting would mean reading them all."""

    letters: AsyncIterator[DeadLetter]
    count: int | None


async def select(producer: Producer, wanted: LetterOptions, ids: Sequence[str], every: bool) -> Selection:
    """Select dead letters, the oldest first.

    All ids are looked up before anything is changed. `every` selects those that are dead now, so a task that dies again
    during a replay is not replayed twice.
    """
    matching = await wanted.filter(producer)
    if ids and (every or wanted.queue is not None or matching != Filter(tenant=matching.tenant)):
        raise Misuse("give either IDs, or --all with options that limit it, such as --queue, --reason and --task")
    if not ids and not every:
        raise Misuse("give IDs, or --all, which options such as --queue, --reason and --task can limit")
    partitions = await known_partitions(producer, wanted.queue)
    masked = await mask_defined(producer)
    if ids:
        return Selection(_each([masked(letter) for letter in await _find(producer, partitions, ids)]), len(set(ids)))
    count = await count_letters(producer.gateway, partitions) if matching == Filter() else None
    return Selection(list_letters(producer.gateway, partitions, matching, oldest_first=True, shown=masked), count)


async def _find(producer: Producer, partitions: Sequence[Partition], ids: Sequence[str]) -> list[DeadLetter]:
    found = {task_id: await find_letter(producer.gateway, partitions, task_id) for task_id in ids}
    missing = [task_id for task_id, letter in found.items() if letter is None]
    if missing:
        raise Failed(f"no dead letter {', '.join(missing)} {where(producer)}: nothing was changed")
    return [letter for letter in found.values() if letter is not None]


async def _each(letters: Sequence[DeadLetter]) -> AsyncIterator[DeadLetter]:
    for letter in letters:
        yield letter


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def dlq() -> None:
    """List, group, show, replay, purge and export dead letters.

    A dead letter is a task that was given up. It keeps its reason, error and
    checkpoint.
    """


@app.command("list")
@connected_as_tenant
async def list_(
    producer: Producer,
    wanted: LetterOptions,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N dead letters.")] = 100,
) -> LongListing:
    """List dead letters, the newest first.

    Example: perdure dlq list --reason crash_loop
    """
    letters, more = await _shown(producer, wanted), list[str]()

    async def first() -> AsyncIterator[DeadLetter]:
        count = 0
        async for letter in letters:
            if count == limit:
                more.append(f"more than {limit} dead letters match: raise --limit to see them")
                return
            count += 1
            yield letter

    return LongListing(_COLUMNS, first(), empty=f"no matching dead letters {where(producer)}", ended=lambda: more)


async def _shown(producer: Producer, wanted: LetterOptions) -> AsyncIterator[DeadLetter]:
    """Return the matching dead letters with masked secrets, the newest first."""
    partitions = await known_partitions(producer, wanted.queue)
    matching, masked = await wanted.filter(producer), await mask_defined(producer)
    return list_letters(producer.gateway, partitions, matching, shown=masked)


@app.command()
@connected_as_tenant
async def groups(
    producer: Producer,
    wanted: LetterOptions,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N groups.")] = 100,
) -> LiveListing:
    """Group dead letters by their cause, the largest group first.

    A group has the dead letters of one task with the same reason, type of
    error, message and function that raised it. Numbers, ids and times in the
    message make no difference. list, export, replay and purge have --group.

    Example: perdure dlq groups --since 1d

    Example: perdure dlq replay --all --group 3f9c1a --rate 5/s
    """
    found = await group_letters(await _shown(producer, wanted))
    more = f"{len(found):,} groups match: raise --limit to see more than {limit}" if len(found) > limit else None
    return LiveListing(_GROUP_COLUMNS, found[:limit], empty=f"no matching dead letters {where(producer)}", notes=[more])


_GROUP_COLUMNS: Final[Sequence[Column[LetterGroup]]] = (
    Column("group", lambda group: group.fingerprint),
    Column("letters", lambda group: f"{group.count:,}", right=True),
    Column("task", lambda group: group.newest.task, least=8),
    Column("reason", lambda group: group.newest.reason, least=8),
    Column("queues", lambda group: ", ".join(sorted(group.queues)), wide=True),
    Column("first", lambda group: Time(group.first), wide=True),
    Column("last", lambda group: Time(group.last)),
    Column("newest", lambda group: group.newest.id, wide=True),
    Column("error", lambda group: _error(group.newest), least=8),
)


def _error(letter: DeadLetter) -> str:
    return f"{letter.error.rpartition('.')[2]}: {letter.message}"


_COLUMNS: Final[Sequence[Column[DeadLetter]]] = (
    Column("id", lambda letter: letter.id, least=36, fold=True),
    Column("task", lambda letter: letter.task, least=8),
    Column("app", lambda letter: letter.app or "", wide=True),
    Column("reason", lambda letter: letter.reason, least=8),
    Column("queue", lambda letter: letter.partition.queue, wide=True),
    Column("died", lambda letter: Time(letter.died_at)),
    Column("attempts", lambda letter: letter.attempts, right=True, wide=True),
    Column("crashes", lambda letter: letter.crashes, right=True, wide=True),
    Column("error", _error, least=8),
)


@app.command()
@connected_as_tenant
async def show(producer: Producer, task_id: TaskId) -> Output:
    """Show a dead letter: its reason, error, arguments and recorded steps.

    Example: perdure dlq show 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    letter = await find_letter(producer.gateway, await known_partitions(producer, None), task_id)
    if letter is None:
        raise Failed(f"no dead letter {task_id} {where(producer)}")
    letter = (await mask_defined(producer))(letter)
    steps, doubts = await _recorded(producer, letter)
    if letter.reason == DAMAGED:
        remedy = f"another program has written or changed it; run: perdure dlq purge {letter.id}"
    else:
        remedy = remedy_for(letter.reason, letter.id, letter.error, letter.app, doubts)
    summary, arguments = letter.summary(), letter.shown_arguments()
    return Output(
        summary | {"steps": steps, "remedy": remedy, "doubts": [doubt.summary() for doubt in doubts]},
        {
            "id": letter.id,
            "task": letter.task,
            "app": letter.app,
            "queue": letter.partition.queue,
            "partition": letter.partition.index,
            "reason": letter.reason,
            "group": letter.fingerprint,
            "error": f"{letter.error}: {letter.message}",
            "remedy": remedy,
            "in doubt": [str(doubt) for doubt in doubts],
            "died": Time(letter.died_at),
            "enqueued": Time(letter.enqueued_at),
            "attempts": letter.attempts,
            "crashes": letter.crashes,
            "worker": letter.worker,
            "arguments": None if arguments is None else arguments.decode("utf-8", "replace"),
            "headers": ", ".join(f"{name}: {value}" for name, value in summary["headers"].items()) or None,
            "steps kept": ", ".join(steps) or "none",
            **{f"raw {name}": value for name, value in summary["raw"].items()},
        },
        f"\n{letter.traceback.rstrip()}" if letter.traceback else None,
    )


async def _recorded(producer: Producer, letter: DeadLetter) -> tuple[list[str], list[Doubt]]:
    """Return the recorded steps and the steps in doubt; none, with a note, if the checkpoint cannot be read."""
    try:
        steps = await recorded_steps(producer.gateway, letter.partition, letter.id)
        return steps, await read_doubts(producer.gateway, letter.partition, letter.id)
    except Unavailable:
        raise
    except QueueError as error:
        note(f"could not read the checkpoint of {letter.id}: {error}")
        return [], []


All = Annotated[bool, typer.Option("--all", help="Select all dead letters that match the other options.")]


@app.command()
@connected_as_tenant
async def replay(
    producer: Producer,
    wanted: LetterOptions,
    options: JobOptions,
    ids: TaskIds = None,
    *,
    every: All = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard the checkpoint: start again with the first step.")
    ] = False,
    rerun_failed: Annotated[
        bool, typer.Option("--rerun-failed", help="Call the steps again that failed or were cut off.")
    ] = False,
    edit_args: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Set these arguments, a JSON object, and keep the others; null removes one."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be replayed, and change nothing.")
    ] = False,
) -> AsyncIterator[Output]:
    """Put dead letters back on their queues, and print the ids.

    Use it after you have fixed the cause. Attempts and crashes are counted
    from zero. Recorded steps do not run again, except with --fresh. Nor do
    steps whose failure the handler has caught and continued after, except
    with --rerun-failed. With --edit-args, the recorded answers of persons are
    printed as warnings.

    --all makes a job of the letters that died before now. Ctrl-C leaves it
    to a worker: see 'perdure job'.

    Example: perdure dlq replay --all --reason timeout --rate 5/s
    """
    edit = _new_arguments(producer, edit_args)
    how = Replay(
        fresh=fresh,
        rerun_failed=rerun_failed,
        args=edit,
        merge=True,
        merged_limit=producer.payload_limit,
        rate=options.rate,
    )
    _check_job(options, ids, dry_run=dry_run)
    selected = await select(producer, wanted, ids or (), every)
    warns = edit is not None and not fresh
    if every and not dry_run and selected.count != 0:

        async def warn(letter: DeadLetter) -> None:
            async for _ in warn_of_answers(producer, _each([letter])):
                pass

        given = {"fresh": fresh, "rerun_failed": rerun_failed} | ({} if edit is None else {"edit": from_json(edit)})
        async for output in _as_job(producer, "dlq-replay", wanted, given, options, before=warn if warns else None):
            yield output
        return
    damaged: list[str] = []
    letters = _undamaged(selected.letters, damaged)
    if warns:
        letters = warn_of_answers(producer, letters)
    if dry_run:
        reasons: Counter[str] = Counter()
        async for letter in letters:
            reasons[letter.reason] += 1
            yield _outcome(letter, "would be replayed")
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        note(f"would be replayed: {reasons.total()}{f' ({listed})' if listed else ''}; nothing was changed")
    else:
        changes = replay_all(producer.gateway, letters, how)
        async for output in _changed(changes, "replaying", "replayed", selected.count):
            yield output
    if ids and damaged:
        raise Failed(f"could not replay {', '.join(damaged[:5])}: damaged; 'perdure dlq purge ID' deletes it")


async def _undamaged(letters: AsyncIterable[DeadLetter], damaged: list[str]) -> AsyncIterator[DeadLetter]:
    """Yield the letters that can be read; name the others, and add their ids to `damaged`."""
    async for letter in letters:
        if letter.reason == DAMAGED:
            note(f"dead letter {letter.id} is left out: {letter.message}")
            damaged.append(letter.id)
        else:
            yield letter


def _check_job(options: JobOptions, ids: Sequence[str] | None, *, dry_run: bool = False) -> None:
    """Raise `Misuse` if options of a job are given for letters that are named."""
    if (ids or dry_run) and options != JobOptions(options.rate):
        raise Misuse("--detach, --job, --by and --why are for a job: give them with --all, and without --dry-run")


async def _as_job(
    producer: Producer,
    act: Act,
    wanted: LetterOptions,
    given: Mapping[str, Any],
    options: JobOptions,
    *,
    before: Callable[[Any], Awaitable[None]] | None = None,
) -> AsyncIterator[Output]:
    """Act on all letters that match, as a job. given: options of the act."""
    matching = await wanted.filter(producer)

    def plan(now: int) -> JobPlan:
        return JobPlan(wanted.queue, matching.at_most(now).form(), given)

    async for output in run_as_job(producer, act, plan, options, before=before):
        yield output


def _new_arguments(producer: Producer, text: str | None) -> bytes | None:
    if text is None:
        return None
    with misuse_of("--edit-args"):
        read_object(text)
    data = text.strip().encode()
    if len(data) > (most := producer.payload_limit):
        raise Misuse(
            f"--edit-args must have at most {most:,} bytes (PERDURE_PAYLOAD_LIMIT), got {len(data):,}; "
            "start a copy with 'perdure task fork ID --edit NAME=VALUE', which keeps the recorded steps, then purge "
            "the dead letter"
        )
    return data


@app.command()
@connected_as_tenant
async def purge(
    producer: Producer,
    wanted: LetterOptions,
    options: JobOptions,
    ids: TaskIds = None,
    *,
    every: All = False,
    yes: Assured = False,
) -> AsyncIterator[Output]:
    """Delete dead letters with their records and checkpoints, and print the ids.

    Use it for tasks that you will not replay; 'perdure dlq export' saves
    them first. --all asks for confirmation, and makes a job of the letters
    that died before now: see 'perdure job'.

    Example: perdure dlq purge --all --reason unreadable
    """
    _check_job(options, ids)
    selected = await select(producer, wanted, ids or (), every)
    if every and not yes:
        what = "all that match" if selected.count is None else f"all {selected.count}"
        confirm_deletion(f"{what} dead letters with their checkpoints", "--all deletes dead letters permanently")
    if every and selected.count != 0:
        async for output in _as_job(producer, "dlq-purge", wanted, {}, options):
            yield output
        return
    changes = purge_all(producer.gateway, selected.letters)
    async for output in _changed(changes, "purging", "purged", selected.count):
        yield output


async def _changed(
    changes: AsyncIterator[tuple[DeadLetter, bool]], doing: str, done: str, count: int | None
) -> AsyncIterator[Output]:
    """Yield each dead letter with its outcome. Raise `Failed` if another command was faster with some."""
    gone: list[str] = []
    with Bar(doing, count, rest=f"the ids that are printed are {done}, the others are still dead letters") as bar:
        async for letter, changed in changes:
            if not changed:
                gone.append(letter.id)
            yield _outcome(letter, done if changed else "gone")
            bar.advance()
    note(f"{done}: {bar.done - len(gone)}")
    if gone:
        raise Failed(f"{len(gone)} had been replayed or purged by another command: {', '.join(gone[:5])}")


def _outcome(letter: DeadLetter, what: str) -> Output:
    data = {"id": letter.id, "outcome": what, "reason": letter.reason, "task": letter.task}
    return line(data, None if what == "gone" else letter.id)


@app.command()
@connected_as_tenant
async def export(producer: Producer, wanted: LetterOptions, *, output: OutputFile = None) -> None:
    """Write dead letters as JSON lines, the oldest first.

    The dead letters are not changed.

    Example: perdure dlq export -o letters.jsonl
    """
    selected = await select(producer, wanted, (), True)
    with Bar("exporting", selected.count, rest=_AGAIN) as bar, open_output(output) as file:
        async for letter in selected.letters:
            print_json_lines([letter.summary()], file)
            bar.advance()
    note(f"dead letters exported: {bar.done}")


_AGAIN: Final = "give the command again for a complete file"


async def warn_of_answers(producer: Producer, letters: AsyncIterator[DeadLetter]) -> AsyncIterator[DeadLetter]:
    """Yield dead letters. Print which answers each has recorded, and to which questions, before it is yielded."""
    async for letter in letters:
        try:
            found = await recorded_answers(producer, letter)
        except (DecryptionError, ValueError) as error:
            note(f"warning: could not read the recorded answers of task {letter.id}: {error}")
        else:
            for answer in found:
                note(f"warning: task {letter.id} has recorded {answer}")
            if found:
                note(
                    "a recorded answer holds if the question stays the same; with another text or person it is a "
                    "StepMismatch, unless the handler asks again (on_mismatch='rerun')"
                )
        yield letter

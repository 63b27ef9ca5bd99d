"""Dead letters: list, groups by cause, one letter, replay, purge, export, and jobs over many.

Two users may replay or purge the same letter: one act has an effect, and the other gets a problem that says what became
of the task. Edited arguments must fit what workers have published about the task.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Self

from pydantic import Field, model_validator
from pydantic_core import to_json

from ....deadletter.groups import LetterGroup, group_letters
from ....deadletter.letters import (
    DAMAGED,
    DeadLetter,
    count_letters,
    find_letter,
    list_letters,
    page_letters,
)
from ....deadletter.replay import Replay, purge, replay
from ....queues.delivery.checkpoint import recorded_steps
from ....queues.doubts import Doubt, read_doubts
from ....queues.envelope import is_task_id
from ....queues.errors import QueueError, Unavailable
from ....queues.explanation.sentences import remedy_for
from ....queues.inspection.views import find_tasks
from ....queues.json_form import as_json
from ....queues.keys import Partition
from ....queues.wording import iso_time
from ...defined_secrets import mask_defined
from ...job_runner import check_by
from ...recorded_answers import recorded_answers
from ..filters import LetterFilterInputs, known_partitions
from ..operation import MAX_LIMIT, Call, Download, Inputs, QueueText, ResultModel, TaskIdText, operation
from ..problems import Problem
from ..users import Role
from .jobs import JobInputs, JobView, PreviewView, preview, start_job

_MAX_READ: Final = 5_000
"""Dead letters that a page of the list reads at most."""

_MAX_GROUPED: Final = 100_000
"""Dead letters that are grouped at most."""

_CHUNK: Final = 64 << 10
"""Bytes of an export that are sent at once, about."""


class ListLetters(LetterFilterInputs):
    """Page of dead letters."""

    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most dead letters of one page.")
    cursor: str | None = Field(None, max_length=600, description="Cursor of the page before, its `next`.")


class GroupLetters(LetterFilterInputs):
    """Dead letters that are grouped by their cause."""

    newest: int = Field(10_000, ge=1, le=_MAX_GROUPED, description="Dead letters that are read at most.")
    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most groups.")


class OneLetter(Inputs):
    """A dead letter by the id of its task."""

    task_id: TaskIdText
    queue: QueueText | None = Field(None, description="Queue of the task, if several queues have one of this id.")


class LetterRow(ResultModel):
    """A dead letter in a list. Times are ISO 8601."""

    id: str
    queue: str
    partition: int
    task: str = Field(description="Name of the task.")
    app: str | None
    reason: str
    group: str = Field(description="Fingerprint of the error: the same for letters with the same cause.")
    error: str = Field(description="Type of the error.")
    message: str
    attempts: int
    crashes: int
    worker: str
    enqueued_at: str | None
    died_at: str | None
    key: str | None = Field(description="Ordering key of the task.")
    tags: list[str]

    @classmethod
    def of(cls, letter: DeadLetter) -> LetterRow:
        """Return the row of a letter."""
        envelope = letter.envelope
        return cls(
            id=letter.id,
            queue=letter.partition.queue,
            partition=letter.partition.index,
            task=letter.task,
            app=letter.app,
            reason=str(letter.reason),
            group=letter.fingerprint,
            error=letter.error,
            message=letter.message[:_MESSAGE],
            attempts=letter.attempts,
            crashes=letter.crashes,
            worker=letter.worker,
            enqueued_at=iso_time(letter.enqueued_at),
            died_at=iso_time(letter.died_at),
            key=envelope.key if envelope else None,
            tags=list(envelope.tags) if envelope else [],
        )


_MESSAGE: Final = 1_000
"""Characters of a message in a list."""


class LetterPageView(ResultModel):
    """Dead letters, the newest first."""

    items: list[LetterRow]
    next: str | None = Field(description="Cursor of the next page.")
    read: int = Field(description="Dead letters that were compared for this page.")
    of: int = Field(description="Dead letters of the queues.")
    unreadable: list[str] = Field(description="Ids of letters whose arguments could not be compared.")


class LetterGroupView(ResultModel):
    """Dead letters with the same cause. Times are ISO 8601."""

    group: str = Field(description="Fingerprint of the error.")
    count: int
    task: str
    reason: str
    error: str
    message: str = Field(description="Message of the newest letter.")
    queues: list[str]
    first: str | None = Field(description="Time of the oldest death.")
    last: str | None = Field(description="Time of the newest death.")
    newest: str = Field(description="Id of the newest letter.")

    @classmethod
    def of(cls, found: LetterGroup) -> LetterGroupView:
        """Return the view of a group."""
        summary = found.summary()
        return cls.model_validate(summary | {"message": str(summary["message"])[:_MESSAGE]})


class LetterGroups(ResultModel):
    """Groups of dead letters, the largest first."""

    items: list[LetterGroupView]
    groups: int = Field(description="Number of groups.")
    read: int = Field(description="Dead letters that were read, the newest first.")
    of: int = Field(description="Dead letters of the queues.")


class LetterView(LetterRow):
    """A dead letter with all that is known of it."""

    message: str
    traceback: str
    args: Any = Field(description="Arguments with masked secrets; a text if they are not JSON or cannot be decrypted.")
    headers: dict[str, Any]
    raw: dict[str, str] = Field(description="Fields of a message that is no task, as stored.")
    steps: list[str] = Field(description="Recorded steps, which a replay does not run again.")
    doubts: list[str] = Field(description="Steps in doubt, as sentences.")
    answers: list[str] = Field(description="Recorded answers of persons, each with its question.")
    remedy: str = Field(description="What an operator can do.")
    problem: str | None = Field(description="Why its checkpoint cannot be read.")


class LetterOutcome(ResultModel):
    """Outcome of an act on a dead letter."""

    id: str
    queue: str
    task: str
    outcome: str = Field(description="replayed or purged.")


class Edit(Inputs):
    """Options of a replay."""

    fresh: bool = Field(False, description="Discard the checkpoint: start again with the first step.")
    rerun_failed: bool = Field(False, description="Call the steps again that failed or were cut off.")
    edit: dict[str, Any] | None = Field(
        None, description="Set these arguments and keep the others, a JSON merge patch: null removes one."
    )
    check: bool = Field(
        True, description="Refuse edited arguments that do not fit what workers have published about the task."
    )

    def options(self) -> dict[str, Any]:
        """Return the options of a job."""
        found: dict[str, Any] = {"fresh": self.fresh, "rerun_failed": self.rerun_failed}
        return found if self.edit is None else found | {"edit": self.edit, "checked": self.check}


class ReplayLetter(OneLetter, Edit):
    """A dead letter that is replayed."""

    args: dict[str, Any] | None = Field(
        None, description="All arguments, in the place of the stored ones. A masked secret keeps its stored value."
    )

    @model_validator(mode="after")
    def _one_edit(self) -> Self:
        if self.args is not None and self.edit is not None:
            raise ValueError("give args, all arguments, or edit, the changed ones, and not both")
        return self


class PreviewLetters(LetterFilterInputs, Edit):
    """Dead letters that a job would replay or purge."""

    purge: bool = Field(False, description="Purge them in place of a replay.")


class ReplayLetters(LetterFilterInputs, Edit, JobInputs):
    """Dead letters that a job replays."""


class PurgeLetters(LetterFilterInputs, JobInputs):
    """Dead letters that a job purges."""


@operation("GET", "/dead-letters", roles=[Role.VIEWER])
async def list_dead_letters(call: Call, given: ListLetters) -> LetterPageView:
    """List dead letters, the newest first.

    A page reads at most 5,000 letters, so it may have fewer than `limit` before the list ends.
    """
    gateway = call.producer.gateway
    partitions = await known_partitions(call, given.queue)
    wanted, masked = await given.filter(call), await mask_defined(call.producer)
    try:
        page = await page_letters(
            gateway, partitions, wanted, limit=given.limit, max_read=_MAX_READ, cursor=given.cursor, shown=masked
        )
    except ValueError as error:
        raise Problem(422, "invalid-cursor", str(error)) from None
    return LetterPageView(
        items=[LetterRow.of(letter) for letter in page.letters],
        next=page.cursor,
        read=page.read,
        of=await _count(call, partitions, page.read),
        unreadable=[letter.id for letter, _ in page.unreadable],
    )


@operation("GET", "/dead-letter-groups", roles=[Role.VIEWER])
async def group_dead_letters(call: Call, given: GroupLetters) -> LetterGroups:
    """Group dead letters by their cause, the largest group first.

    A group has the letters of one task with the same reason, type of error, message and function that raised it.
    Numbers, ids and times in the message make no difference. Lists, exports and jobs take a group as a filter.
    """
    gateway = call.producer.gateway
    partitions = await known_partitions(call, given.queue)
    wanted, masked = await given.filter(call), await mask_defined(call.producer)
    read = 0

    async def newest() -> AsyncGenerator[DeadLetter]:
        nonlocal read
        cursor: str | None = None
        while read < given.newest:
            page = await page_letters(
                gateway,
                partitions,
                wanted,
                limit=MAX_LIMIT,
                max_read=min(_MAX_READ, given.newest - read),
                cursor=cursor,
                shown=masked,
            )
            read += page.read
            for letter in page.letters:
                yield letter
            cursor = page.cursor
            if cursor is None:
                return

    found = await group_letters(newest())
    return LetterGroups(
        items=[LetterGroupView.of(group) for group in found[: given.limit]],
        groups=len(found),
        read=read,
        of=await _count(call, partitions, read),
    )


@operation("GET", "/dead-letter-export", roles=[Role.VIEWER])
async def export_dead_letters(call: Call, given: LetterFilterInputs) -> Download:
    """Export dead letters as JSON lines, the oldest first.

    Secrets are masked. Letters that die during the export are left out, so that it ends.
    """
    gateway = call.producer.gateway
    partitions = await known_partitions(call, given.queue)
    wanted = (await given.filter(call)).at_most(await call.now())
    masked = await mask_defined(call.producer)

    async def lines() -> AsyncGenerator[bytes]:
        chunk = bytearray()
        async for letter in list_letters(gateway, partitions, wanted, oldest_first=True, shown=masked):
            chunk += as_json(letter.summary()) + b"\n"
            if len(chunk) >= _CHUNK:
                yield bytes(chunk)
                chunk.clear()
        if chunk:
            yield bytes(chunk)

    return Download("dead-letters.jsonl", lines(), "application/jsonl")


@operation("POST", "/dead-letters/preview", roles=[Role.VIEWER])
async def preview_dead_letters(call: Call, given: PreviewLetters) -> PreviewView:
    """Return what a job would do to dead letters now.

    Nothing is changed. It looks at a bounded number of letters, the oldest first, and says whether it has looked at
    all. Edited arguments are compared with what workers have published; `problems` counts the letters that would stay.
    """
    await known_partitions(call, given.queue)
    wanted = await given.filter(call)
    if given.purge:
        return await preview(call, "dlq-purge", given.queue, wanted)
    return await preview(call, "dlq-replay", given.queue, wanted, **given.options())


@operation("POST", "/dead-letters/replay", roles=[Role.OPERATOR], changes=True, status=202)
async def replay_dead_letters(call: Call, given: ReplayLetters) -> JobView:
    """Replay all dead letters that match, as a job.

    Only letters that died before now are meant, so that a task that dies again is not replayed twice. Without a filter,
    all are replayed.
    """
    await known_partitions(call, given.queue)
    return await start_job(call, "dlq-replay", given.queue, await given.filter(call), given, **given.options())


@operation("POST", "/dead-letters/purge", roles=[Role.OPERATOR], changes=True, status=202)
async def purge_dead_letters(call: Call, given: PurgeLetters) -> JobView:
    """Delete all dead letters that match, as a job.

    Their records and checkpoints are deleted too. Only letters that died before now are meant. Without a filter, all
    are purged. Export them before.
    """
    await known_partitions(call, given.queue)
    return await start_job(call, "dlq-purge", given.queue, await given.filter(call), given)


@operation("GET", "/dead-letters/{task_id}", roles=[Role.VIEWER])
async def show_dead_letter(call: Call, given: OneLetter) -> LetterView:
    """Return a dead letter with its error, arguments, recorded steps and the remedy."""
    letter = await _find(call, given)
    steps, doubts, answers, problem = await _checkpoint(call, letter)
    if letter.reason == DAMAGED:
        remedy = f"another program has written or changed it; run: perdure dlq purge {letter.id}"
    else:
        remedy = remedy_for(letter.reason, letter.id, letter.error, letter.app, doubts)
    return LetterView(
        **letter.summary(),
        steps=steps,
        doubts=[str(doubt) for doubt in doubts],
        answers=answers,
        remedy=remedy,
        problem=problem,
    )


async def _checkpoint(call: Call, letter: DeadLetter) -> tuple[list[str], list[Doubt], list[str], str | None]:
    """Return the recorded steps, the steps in doubt, the recorded answers, and why they cannot be read."""
    gateway = call.producer.gateway
    try:
        steps = await recorded_steps(gateway, letter.partition, letter.id)
        doubts = await read_doubts(gateway, letter.partition, letter.id)
        return steps, doubts, await recorded_answers(call.producer, letter), None
    except Unavailable:
        raise
    except (QueueError, ValueError, LookupError) as error:
        return [], [], [], f"its checkpoint cannot be read: {error}"


@operation("POST", "/dead-letters/{task_id}/replay", roles=[Role.OPERATOR], changes=True)
async def replay_dead_letter(call: Call, given: ReplayLetter) -> LetterOutcome:
    """Put a dead letter back on its queue.

    Attempts and crashes are counted from zero. Recorded steps do not run again, unless `fresh` discards them. If
    another user has replayed or purged it, nothing is changed.
    """
    letter = await _find(call, given)
    if letter.reason == DAMAGED:
        raise Problem(
            409, "damaged-letter", f"dead letter {letter.id} cannot be replayed, but purged: {letter.message}"
        )
    edit = given.edit if given.args is None else given.args
    limit = call.producer.payload_limit
    how = Replay(
        fresh=given.fresh,
        rerun_failed=given.rerun_failed,
        args=None if edit is None else to_json(edit),
        merge=given.args is None,
        merged_limit=limit,
        check=check_by(await call.producer.catalog()) if given.check and edit is not None else None,
    )
    if not await replay(call.producer.gateway, letter, how):
        raise await _gone(call, given)
    return _outcome(letter, "replayed")


@operation("DELETE", "/dead-letters/{task_id}", roles=[Role.OPERATOR], changes=True)
async def purge_dead_letter(call: Call, given: OneLetter) -> LetterOutcome:
    """Delete a dead letter with its record and checkpoint."""
    letter = await _find(call, given)
    if not await purge(call.producer.gateway, letter):
        raise await _gone(call, given)
    return _outcome(letter, "purged")


def _outcome(letter: DeadLetter, outcome: str) -> LetterOutcome:
    return LetterOutcome(id=letter.id, queue=letter.partition.queue, task=letter.task, outcome=outcome)


async def _count(call: Call, partitions: Sequence[Partition], read: int) -> int:
    """Return the number of dead letters; for a tenant the number that was read, as others are not its own."""
    if call.producer.namespace.tenant is not None:
        return read
    return await count_letters(call.producer.gateway, partitions)


async def _find(call: Call, given: OneLetter) -> DeadLetter:
    """Find a dead letter; more of its arguments are masked, as the definition of its task says.

    Raises:
        Problem: It is missing, or several queues have one of this id.
    """
    gateway = call.producer.gateway
    partitions = await known_partitions(call, given.queue)
    letter = await find_letter(gateway, partitions, given.task_id) if is_task_id(given.task_id) else None
    if letter is None:
        raise await _gone(call, given)
    others = [partition for partition in partitions if partition.queue != letter.partition.queue]
    if (other := await find_letter(gateway, others, given.task_id)) is not None:
        raise Problem(
            409,
            "ambiguous-id",
            f"id {given.task_id!r} must name one dead letter, but the queues {letter.partition.queue!r} and "
            f"{other.partition.queue!r} have one: name the queue",
        )
    masked = await mask_defined(call.producer)
    return masked(letter)


async def _gone(call: Call, given: OneLetter) -> Problem:
    """Return the problem of a task that is no dead letter, with its state if there is such a task."""
    where = f"in namespace {call.producer.namespace.name!r}"
    try:
        found = await find_tasks(call.producer.gateway, call.producer.namespace, given.task_id, given.queue)
    except ValueError:  # no id of a task
        found = []
    handle = await call.producer.find(given.task_id, found[0].queue) if found else None
    if handle is None:
        return Problem(
            404,
            "letter-not-found",
            f"there is no dead letter {given.task_id!r} {where}: it was purged, has expired, or never was",
        )
    state = await handle.status()
    return Problem(
        409,
        "not-dead",
        f"task {given.task_id!r} is no dead letter, its state is {state}: another user or command may have replayed "
        "it; nothing was changed",
    )

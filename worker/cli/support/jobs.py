"""Options of commands that act on many tasks, and the job that such a command makes and follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import anyio
import typer

from ....queues.argument_conditions import ArgumentCondition
from ....queues.jobs import Act, JobPlan, JobStore, StoredJob
from ....queues.keys import check_name
from ....queues.producer import Producer
from ....queues.records import State
from ....queues.runtime import RUNTIME
from ....queues.task_filter import TaskFilter
from ...defined_secrets import check_conditions
from ...job_runner import CancelAct, JobResult, JobRunner, has_live_worker, who_continues
from .connection import known_partitions, redis_now
from .errors import Failed, misuse_of
from .options import (
    AppOption,
    By,
    QueueOption,
    RateOption,
    Since,
    TaskNameOption,
    Until,
    Where,
    confirm_act,
    login,
    parser,
)
from .output import Bar, note
from .runner import OptionGroup, Output, line

_SHOWN: Final = 10
"""Ids of a preview."""

_NAMED: Final = 5
"""Failures that the last message of a command names."""


@parser
def read_job(text: str) -> str:
    """Parse the name of a job."""
    return check_name("job", text)


JobName = Annotated[str, typer.Argument(metavar="NAME", parser=read_job, help="Name of the job.", show_default=False)]


@dataclass(frozen=True, slots=True)
class JobOptions(OptionGroup):
    """Options of a command that makes a job."""

    rate: RateOption = None
    detach: Annotated[
        bool, typer.Option("--detach", help="Store the job, print its name, and let a worker run it.")
    ] = False
    job: Annotated[
        str | None, typer.Option(metavar="NAME", parser=read_job, help="Name of the job. Default: a new one.")
    ] = None
    by: By = None
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the job.")] = ""


@dataclass(frozen=True, slots=True)
class TaskFilterOptions(OptionGroup):
    """Options that select tasks."""

    queue: QueueOption = None
    state: Annotated[list[State] | None, typer.Option(help="Only tasks in this state. Repeatable.")] = None
    task: TaskNameOption = None
    app: AppOption = None
    since: Since = None
    until: Until = None
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only tasks with this text in their reason or last error.")
    ] = None
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only tasks with this ordering key.")] = None
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Only tasks with this tag. Repeatable.")] = None
    where: Where = None

    async def filter(self, producer: Producer) -> TaskFilter:
        """Return the filter, which the queue is no part of. Raises `Failed`, `Misuse`."""
        await known_partitions(producer, self.queue)
        now = 0 if self.since is self.until is None else await redis_now(producer)
        return TaskFilter(
            frozenset(self.state or ()),
            self.task,
            None if self.since is None else self.since.at(now),
            None if self.until is None else self.until.at(now),
            self.error,
            self.key,
            tuple(self.tag or ()),
            self.app,
            await public_conditions(producer, self.where, self.task),
            tenant=producer.namespace.tenant,
        )


async def public_conditions(
    producer: Producer, where: Sequence[ArgumentCondition] | None, task: str | None
) -> tuple[ArgumentCondition, ...]:
    """Return conditions on arguments. Raises `Misuse` for one on an argument that the catalog marks as secret."""
    conditions = tuple(where or ())
    with misuse_of("--where"):
        await check_conditions(producer, conditions, task)
    return conditions


class Words(NamedTuple):
    """Words for what a job does: "cancel", "cancelling", "cancelled"."""

    do: str
    doing: str
    done: str


WORDS: Final[Mapping[str, Words]] = {
    "cancel": Words("cancel", "cancelling", "cancelled"),
    "purge": Words("cancel", "cancelling", "cancelled"),
    "dlq-replay": Words("replay", "replaying", "replayed"),
    "dlq-purge": Words("purge", "purging", "purged"),
}
"""Words by act."""


async def preview_tasks(producer: Producer, queue: str | None, wanted: TaskFilter, *, unstarted: bool) -> Output:
    """Return how many tasks would be cancelled, and the ids of the first ones."""
    states: Counter[str] = Counter()
    ids: list[str] = []
    with Bar("looking", rest="nothing was changed") as bar:
        async for record in CancelAct(producer, queue, wanted, unstarted=unstarted).preview():
            states[str(record.state)] += 1
            if len(ids) < _SHOWN:
                ids.append(record.id)
            bar.advance()
    parts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    first = f"; the first {_SHOWN} are printed" if states.total() > _SHOWN else ""
    text = f"would be cancelled: {states.total()}{f' ({parts})' if parts else ''}{first}; nothing was changed"
    data = {"count": states.total(), "states": dict(states), "first": ids}
    return Output(data, *ids, notes=[text])


async def cancel_many(
    producer: Producer, act: Act, queue: str | None, wanted: TaskFilter, options: JobOptions, *, yes: bool
) -> AsyncIterator[Output]:
    """Cancel all tasks that a filter means, as a job, after a question."""
    if not yes:
        unstarted = act == "purge"
        total = await CancelAct(producer, queue, wanted, unstarted=unstarted).total()
        of = (
            f"all {total:,} tasks"
            if wanted == TaskFilter(tenant=wanted.tenant)
            else f"those of {total:,} tasks that match"
        )
        place = "" if queue is None else f" of queue {queue!r}"
        which = " that have not started" if unstarted else ""
        confirm_act(f"Cancel {of}{place}{which}?", "this cancels many tasks", "nothing was cancelled")

    def plan(now: int) -> JobPlan:
        return JobPlan(queue, wanted.at_most(now).form())

    async for output in run_as_job(producer, act, plan, options):
        yield output


async def run_as_job(
    producer: Producer,
    act: Act,
    plan: Callable[[int], JobPlan],
    options: JobOptions,
    *,
    before: Callable[[Any], Awaitable[None]] | None = None,
) -> AsyncIterator[Output]:
    """Store a job, and run it, or let a worker do so.

    Args:
        plan: Returns what it is about, for the time of its creation.
        before: Called with each task before the act.
    """
    store = JobStore(producer.gateway, producer.namespace)
    name = options.job or f"{act}-{RUNTIME.token(4)}"
    by = login() if options.by is None else options.by
    runner = None if options.detach else JobRunner(producer, _owner(), before=before)
    given = {"rate": options.rate, "by": by, "why": options.why}
    job = await store.create(name, act, plan, runner=None if runner is None else runner.id, **given)  # type: ignore[arg-type]
    if runner is None:
        yield Output([job.summary()], name, notes=[await whose_turn(producer, name)], lines=True)
        return
    async for output in follow(producer, runner, job):
        yield output


def _owner() -> str:
    """Return the start of the name of a runner that is a command."""
    return f"command-{RUNTIME.host()}-{RUNTIME.pid()}"


def command_runner(producer: Producer) -> JobRunner:
    """Return a runner that belongs to this command."""
    return JobRunner(producer, _owner())


async def whose_turn(producer: Producer, name: str) -> str:
    """Return who continues a job that no process runs now, and how to follow it."""
    alive = await has_live_worker(producer)
    watch = f"; 'perdure job watch {name}' follows it" if alive else ""
    return f"job {name}: {who_continues(name, alive=alive)}{watch}"


async def follow(producer: Producer, runner: JobRunner, job: StoredJob) -> AsyncIterator[Output]:
    """Run a job, and yield what becomes of each task. Raises `Failed` if there were tasks that it could not handle."""
    words = WORDS.get(job.act, Words(job.act, job.act, "done"))
    with Bar(words.doing, job.total, rest=None) as bar:
        seen = done = 0

        def advance(noted: StoredJob) -> None:
            nonlocal seen
            bar.total = noted.total
            bar.advance(noted.counts.read - seen)
            seen = noted.counts.read

        runner.on_page = advance
        try:
            async for outcome in runner.run(job.name):
                yield _outcome(outcome, words)
                done += outcome.kind == "done"
        except anyio.get_cancelled_exc_class():
            note(f"interrupted: {words.done} by this command: {done:,}")
            with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE):
                note(await whose_turn(producer, job.name))
            raise
    ended = runner.job
    if ended is None or ended.running:
        raise Failed(f"another process runs job {job.name}; 'perdure job watch {job.name}' follows it")
    for text in describe_counts(ended):
        note(text)
    if failure := failure_of(ended):
        raise failure


_GOODBYE: Final = 2.0
"""Seconds for the last message of a command that is interrupted."""


def describe_counts(job: StoredJob) -> list[str]:
    """Return what became of the tasks of a job, a sentence each."""
    words, counts = WORDS.get(job.act, Words(job.act, job.act, "done")), job.counts
    found = [f"{words.done}: {counts.done}"]
    if counts.skipped:
        found.append(f"left alone: {counts.skipped}, which had changed before")
    if job.state == "aborted":
        found.append(f"job {job.name} was aborted: the rest stays as it is")
    return found


def failure_of(job: StoredJob) -> Failed | None:
    """Return the error of a job that could not handle some tasks, or was aborted."""
    words, counts = WORDS.get(job.act, Words(job.act, job.act, "done")), job.counts
    if counts.failed:
        named = "; ".join(f"{one.task_id}: {one.reason}" for one in counts.errors[:_NAMED])
        more = f"; 'perdure job show {job.name}' names more" if counts.failed > _NAMED else ""
        return Failed(f"could not {words.do} {counts.failed} of them: {named}{more}")
    return Failed(f"job {job.name} did not end") if job.state == "aborted" else None


def _outcome(outcome: JobResult, words: Words) -> Output:
    kinds = {"done": words.done, "skipped": "left alone", "failed": "failed"}
    data = {"id": outcome.task_id, "outcome": kinds[outcome.kind], "task": outcome.task, "queue": outcome.queue}
    if outcome.kind != "done":
        data["reason"] = outcome.what
    return line(data, outcome.task_id if outcome.kind == "done" else None)

"""Jobs: acts over many tasks or dead letters, their progress and failures, and the cancellation of many tasks.

An operation stores a job and returns at once; a worker runs it. `turn` says so if none is there.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from ....queues.jobs import Act, JobPlan, JobStore, StoredJob
from ....queues.keys import check_name
from ....queues.runtime import RUNTIME
from ...job_runner import JobAct, JobPreview, has_live_worker, job_act, preview_job, who_continues
from ..filters import TaskFilterInputs, known_partitions
from ..operation import Call, Inputs, ResultModel, operation
from ..paging import PageInputs, page_of
from ..problems import Problem
from ..users import Role

_MAX_READ: Final = 20_000
"""Tasks or dead letters that a preview looks at."""


def _job_name(text: str) -> str:
    return check_name("job", text)


JobNameText = Annotated[str, AfterValidator(_job_name)]


class OneJob(Inputs):
    """A job by its name."""

    name: JobNameText = Field(description="Name of the job.")


class JobInputs(Inputs):
    """Inputs of an operation that makes a job."""

    rate: float | None = Field(None, gt=0, le=1_000_000, description="Most tasks per second. Default: no limit.")
    why: str = Field("", max_length=2_000, description="Reason, kept with the job.")
    name: JobNameText | None = Field(None, description="Name of the job. Default: a new one.")


class JobFailureView(ResultModel):
    """A task that a job could not handle, or of a preview, would not."""

    task_id: str
    queue: str
    reason: str


class JobView(ResultModel):
    """A job: what it does, and what it has done. Times are ISO 8601."""

    name: str
    act: str = Field(
        description="cancel; purge (cancel tasks that have not started); dlq-replay or dlq-purge (of dead letters)."
    )
    state: str = Field(description="running until it is done or aborted.")
    queue: str | None = Field(description="Queue of its tasks; null for all queues.")
    filter: dict[str, Any] | None = Field(description="What selects its tasks; null if it cannot be read.")
    options: dict[str, Any] | None = Field(description="Options of the act; of edited arguments the names only.")
    rate: float | None = Field(description="Most tasks per second.")
    by: str | None = Field(description="Who created it.")
    why: str | None = Field(description="The reason.")
    created: str | None
    ended: str | None
    aborted_by: str | None
    total: int | None = Field(description="Tasks to look at, as they were counted at the start; null before it.")
    read: int = Field(description="Tasks that it has looked at.")
    done: int = Field(description="Tasks that it has acted on.")
    skipped: int = Field(description="Tasks that had changed before it could act.")
    failed: int = Field(description="Tasks that it could not handle.")
    share: float | None = Field(description="Share of the tasks that it has looked at, 0 to 1; null before it starts.")
    errors: list[JobFailureView] = Field(description="The first failures.")
    runner: str | None = Field(description="Process that runs it now.")
    problem: str | None = Field(description="Why a process could not run it, or why it cannot be read.")
    turn: str | None = Field(description="Who runs it next, if no process does now.")

    @classmethod
    def of(cls, job: StoredJob, turn: str | None = None) -> JobView:
        """Return the view of a job."""
        total, read = job.total, job.counts.read
        share = None if not total else min(1.0, read / total)
        return cls(
            **job.summary(),
            aborted_by=job.text("aborted_by") or None,
            share=1.0 if job.state == "done" else share,
            turn=turn,
        )


class JobPage(ResultModel):
    """Jobs, the newest first."""

    items: list[JobView]
    next: str | None = Field(description="Cursor of the next page.")
    read: int = Field(description="Jobs that were read.")
    of: int = Field(description="Jobs of the namespace.")


class PreviewView(ResultModel):
    """Preview of a job: the tasks that it would act on. Nothing was changed."""

    count: int = Field(description="Tasks or dead letters that match.")
    kinds: dict[str, int] = Field(description="Their number by state, or of dead letters by reason.")
    tasks: dict[str, int] = Field(description="Their number by name of the task; the names that occur most.")
    first: list[str] = Field(description="Ids of the first ones.")
    problems: int = Field(description="Number of those for which it would fail.")
    failures: list[JobFailureView] = Field(description="The first of those.")
    read: int = Field(description="Tasks or dead letters that were looked at.")
    of: int = Field(description="Tasks or dead letters to look at.")
    complete: bool = Field(description="Whether all were looked at. If not, the numbers are of the first ones.")
    workers: bool = Field(description="Whether a worker is there that would run the job.")

    @classmethod
    def of_job(cls, found: JobPreview, *, workers: bool) -> PreviewView:
        """Return the view of a preview."""
        return cls(
            count=found.count,
            kinds=dict(found.kinds.most_common()),
            tasks=dict(found.tasks.most_common(20)),
            first=found.first,
            problems=found.problems,
            failures=[JobFailureView(**failure._asdict()) for failure in found.failures],
            read=found.read,
            of=max(found.total, found.read),
            complete=found.complete,
            workers=workers,
        )


class PreviewCancel(TaskFilterInputs):
    """Tasks that a job would cancel."""

    unstarted: bool = Field(False, description="Only those that no worker has started.")


class CancelTasks(PreviewCancel, JobInputs):
    """Tasks that a job cancels."""


def _store(call: Call) -> JobStore:
    return JobStore(call.producer.gateway, call.producer.namespace)


async def _find(call: Call, name: str) -> StoredJob:
    found = await _store(call).read(name)
    if not found.exists:
        raise Problem(404, "job-not-found", f"there is no job {name!r} in namespace {call.producer.namespace.name!r}")
    return found


async def _view(call: Call, job: StoredJob) -> JobView:
    waits = job.running and job.runner is None
    return JobView.of(job, who_continues(job.name, alive=await has_live_worker(call.producer)) if waits else None)


async def start_job(call: Call, act: Act, queue: str | None, wanted: Any, given: JobInputs, **options: Any) -> JobView:
    """Store a job over all that a filter matches now, and let workers run it.

    Args:
        wanted: Filter of tasks or of dead letters.
        options: Options of the act.
    """

    def plan(now: int) -> JobPlan:
        return JobPlan(queue, wanted.at_most(now).form(), options)

    name = given.name or f"{act}-{RUNTIME.token(4)}"
    job = await _store(call).create(name, act, plan, rate=given.rate, by=call.user.name, why=given.why)
    return await _view(call, job)


async def preview(call: Call, act: Act, queue: str | None, wanted: Any, **options: Any) -> PreviewView:
    """Return what a job would do."""
    found: JobAct[Any] = job_act(call.producer, act, JobPlan(queue, wanted.form(), options))
    workers = await has_live_worker(call.producer)
    return PreviewView.of_job(await preview_job(found, _MAX_READ), workers=workers)


@operation("GET", "/jobs", roles=[Role.VIEWER])
async def list_jobs(call: Call, given: PageInputs) -> JobPage:
    """List jobs, the newest first.

    A job that has ended is kept for 30 days.
    """

    def order(job: StoredJob) -> str:
        return f"{(1 << 53) - job.number('at'):017d} {job.name}"

    found = sorted(await _store(call).read_all(), key=order)
    shown, following = page_of(found, order, given)
    waiting = {job.name for job in shown if job.running and job.runner is None}
    alive = bool(waiting) and await has_live_worker(call.producer)
    items = [JobView.of(job, who_continues(job.name, alive=alive) if job.name in waiting else None) for job in shown]
    return JobPage(items=items, next=following, read=len(found), of=len(found))


@operation("GET", "/jobs/{name}", roles=[Role.VIEWER])
async def show_job(call: Call, given: OneJob) -> JobView:
    """Return a job: its filter, what it has done, and the tasks that failed."""
    return await _view(call, await _find(call, given.name))


@operation("POST", "/jobs/{name}/abort", roles=[Role.OPERATOR], changes=True)
async def abort_job(call: Call, given: OneJob) -> JobView:
    """End a job before it is complete.

    What it has done stays. Its runner stops after the tasks in hand, at most some hundred.
    """
    await _find(call, given.name)
    return await _view(call, await _store(call).abort(given.name, by=call.user.name))


@operation("DELETE", "/jobs/{name}", roles=[Role.OPERATOR], changes=True, status=204)
async def remove_job(call: Call, given: OneJob) -> None:
    """Remove a job that has ended from the list."""
    await _find(call, given.name)
    await _store(call).remove(given.name)


@operation("POST", "/tasks/cancel", roles=[Role.OPERATOR], changes=True, status=202)
async def cancel_tasks(call: Call, given: CancelTasks) -> JobView:
    """Cancel all tasks that match, as a job.

    Only tasks that were enqueued before now are meant, so that the job ends. Without inputs, it cancels all tasks that
    have not ended.
    """
    await known_partitions(call, given.queue)
    act: Act = "purge" if given.unstarted else "cancel"
    return await start_job(call, act, given.queue, await given.filter(call), given)


@operation("POST", "/tasks/cancel/preview", roles=[Role.VIEWER])
async def preview_cancel(call: Call, given: PreviewCancel) -> PreviewView:
    """Return how many tasks a job would cancel now, by state.

    Nothing is changed. It looks at a bounded number of tasks, and says whether it has looked at all.
    """
    await known_partitions(call, given.queue)
    act: Act = "purge" if given.unstarted else "cancel"
    return await preview(call, act, given.queue, await given.filter(call))

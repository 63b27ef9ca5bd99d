"""Jobs: the list, one job with its progress, and forms that make a job over all that filters select.

A form of a job shows what matches before it is confirmed, and the job acts on that: what is enqueued or dies after the
form was opened is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from ....queues.durations import PointInTime
from ....queues.wording import counted, iso_time
from ...web.filters import LetterFilterInputs, TaskFilterInputs
from ...web.operations.jobs import (
    JobView,
    OneJob,
    PreviewCancel,
    PreviewView,
    abort_job,
    cancel_tasks,
    list_jobs,
    preview_cancel,
    remove_job,
    show_job,
)
from ...web.paging import PageInputs
from ...web.problems import Problem
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page

_ROWS: Final = 100

F = TypeVar("F", bound=TaskFilterInputs | LetterFilterInputs)

ACTS: Final[Mapping[str, str]] = {
    "cancel": "cancel tasks",
    "purge": "cancel tasks that have not started",
    "dlq-replay": "replay dead letters",
    "dlq-purge": "purge dead letters",
}
"""Words by act."""


@page("/jobs", title="Jobs", nav="Jobs")
async def jobs(request: PageRequest) -> Html:
    """Show jobs, the newest first, with their progress."""
    found = await list_jobs(request.call, request.inputs(PageInputs, limit=_ROWS))
    return request.render("jobs.html", found=found, acts=ACTS, filters=[_filter_text(job) for job in found.items])


@page("/jobs/{name}", title="Job", nav="Jobs")
async def job(request: PageRequest) -> Html:
    """Show a job: its progress, what selects its tasks, and the tasks that failed."""
    found = await show_job(request.call, OneJob(name=request.path["name"]))
    left = None
    if found.state == "running" and found.rate and found.total is not None:
        left = max(0, found.total - found.read) / found.rate
    return request.render("job.html", job=found, acts=ACTS, filter_text=_filter_text(found), left=left)


@action("/jobs/{name}/abort", abort_job, title="Abort a job", nav="Jobs")
async def job_abort(request: PageRequest) -> Action:
    """Say what an abort leaves undone."""
    found = await show_job(request.call, OneJob(name=request.path["name"]))
    if found.state != "running":
        raise Problem(409, "job-ended", f"job {found.name!r} has ended, it is {found.state}: nothing was changed")
    of = "" if found.total is None else f" of {found.total:,}"
    return Action(
        f"Job {found.name} ends now. It has looked at {found.read:,}{of} and acted on {found.done:,}; that stays.",
        button="Abort the job",
        inputs=request.path,
        then=request.url("job", name=found.name),
        done=f"Job {found.name} is aborted.",
        destructive=True,
    )


@action("/jobs/{name}/remove", remove_job, title="Remove a job", nav="Jobs")
async def job_remove(request: PageRequest) -> Action:
    """Say that the record of a job is deleted."""
    found = await show_job(request.call, OneJob(name=request.path["name"]))
    return Action(
        f"The record of job {found.name} and of its failures is deleted. What it has done stays.",
        button="Remove",
        inputs=request.path,
        then=request.url("jobs"),
        done=f"Job {found.name} is removed.",
        back=request.url("job", name=found.name),
        destructive=True,
    )


@action("/task-jobs/cancel", cancel_tasks, title="Cancel all tasks that match", nav="Tasks")
async def tasks_cancel(request: PageRequest) -> Action:
    """Show which tasks a job would cancel."""
    given = selection(request, PreviewCancel)
    found = await preview_cancel(request.call, given)
    return job_action(
        request,
        given,
        found,
        text=f"A job cancels {shown_count(found, 'task')}"
        + (", if no worker has started them." if given.unstarted else ". Running tasks stop at their next step."),
        button="Cancel them",
        noun="task",
        back=request.url("tasks", request.query),
    )


def selection(request: PageRequest, model: type[F], /, *others: str, **fixed: Any) -> F:
    """Return the filter of a job from the query. One that is not valid would widen the selection, so it is refused.

    Args:
        others: Parameters of the query that are not inputs of the model.

    Raises:
        Problem: A parameter is unknown or not valid.
    """
    known = {*model.model_fields, *others, "limit", "cursor"}
    if unknown := sorted(set(request.query) - known):
        raise Problem(422, "invalid-input", f"filter {unknown[0]!r} is unknown: nothing was changed")
    given = request.inputs(model, **fixed)
    if request.problems:
        listed = "; ".join(f"{problem.where}: {problem.message}" for problem in request.problems)
        raise Problem(422, "invalid-input", f"{listed}: nothing was changed", fields=request.problems)
    return given


def shown_count(found: PreviewView, noun: str) -> str:
    """Return how many tasks or dead letters match, in words."""
    parts = ", ".join(f"{count:,} {kind}" for kind, count in found.kinds.items())
    of = f" ({parts})" if parts else ""
    if found.complete:
        return f"{counted(found.count, noun)}{of}"
    return f"at least {counted(found.count, noun)}{of}, of the first {found.read:,} of {found.of:,} that were looked at"


def job_action(
    request: PageRequest,
    given: TaskFilterInputs | LetterFilterInputs,
    found: PreviewView,
    *,
    text: str,
    button: str,
    noun: str,
    back: str,
    template: str = "job_form.html",
    inputs: Mapping[str, Any] | None = None,
    destructive: bool = True,
    values: Mapping[str, Any] | None = None,
) -> Action:
    """Return the action that makes a job over what a preview has found.

    Args:
        noun: "task" or "dead letter".
        inputs: Inputs of the operation besides the filter.
    """
    fixed = given.model_dump(mode="json", exclude_defaults=True, exclude={"since", "until"})
    return Action(
        text,
        button=button,
        inputs=fixed | dict(inputs or {}),
        fields=[
            *_bounds(request, given),
            FormField("rate", "Rate", "number", help=f"Most {noun}s per second. Empty: no limit."),
            FormField("why", "Reason", help="Kept with the job."),
        ],
        then=lambda made: request.url("job", name=made.name),
        done=lambda made: f"Job {made.name} is made.",
        back=back,
        destructive=destructive,
        template=template,
        values={"found": found, "noun": noun, **(values or {})},
    )


def _bounds(request: PageRequest, given: TaskFilterInputs | LetterFilterInputs) -> list[FormField]:
    """Return the bounds of time as they are when the form is shown, so that the job acts on what the form shows."""
    now = request.now or 0
    until = now if given.until is None else min(now, PointInTime.parse(given.until, zoned=True).at(now))
    found = [FormField("until", "Until", "hidden", iso_time(until))]
    if given.since is not None:
        found.append(
            FormField("since", "Since", "hidden", iso_time(PointInTime.parse(given.since, zoned=True).at(now)))
        )
    return found


def _filter_text(found: JobView) -> str:
    """Return what selects the tasks of a job, in words."""
    if found.filter is None:
        return "(cannot be read)"
    parts = [] if found.queue is None else [f"queue {found.queue}"]
    for name, value in found.filter.items():
        if name not in ("since", "until"):
            given = value if isinstance(value, list) else [value]
            given = [f"{key}: {text}" for key, text in value.items()] if isinstance(value, dict) else given
            parts += [f"{_NAMES.get(name, name)} {one}" for one in given]
    return ", ".join(parts) or "all"


_NAMES: Final = {"states": "state", "tags": "tag", "where": "argument", "headers": "header"}

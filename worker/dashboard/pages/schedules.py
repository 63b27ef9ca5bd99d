"""Schedules: their last and next runs, changes, pauses, and runs by hand."""

from __future__ import annotations

from typing import Any, Final

import orjson

from ...web.operations.schedules import (
    ScheduleDetailsView,
    ScheduleView,
    ShowSchedule,
    add_schedule,
    edit_schedule,
    list_schedules,
    pause_schedule,
    remove_schedule,
    reset_schedule,
    resume_schedule,
    run_schedule,
    show_schedule,
)
from ...web.paging import PageInputs
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page
from ..rendering import json_text

_COMING: Final = 10
"""Planned runs that are shown."""

_MISSED: Final = (("", "As it is"), ("once", "One task"), ("all", "One for each"), ("skip", "None"))


@page("/schedules", title="Schedules", nav="Schedules")
async def schedules(request: PageRequest) -> Html:
    """List schedules with their last and next runs."""
    return request.render("schedules.html", found=await list_schedules(request.call, request.inputs(PageInputs)))


@page("/schedules/{schedule}", title="Schedule", nav="Schedules")
async def schedule(request: PageRequest) -> Html:
    """Show a schedule with its last runs and the states of their tasks, and its next runs."""
    return request.render("schedule.html", found=await _read(request, _COMING))


async def _read(request: PageRequest, coming: int = 1) -> ScheduleDetailsView:
    given = {"schedule": request.path["schedule"], "coming": coming}
    return await show_schedule(request.call, ShowSchedule.model_validate(given))


async def _stored(request: PageRequest) -> ScheduleView:
    return (await _read(request)).schedule


def _of(request: PageRequest, found: ScheduleView) -> dict[str, Any]:
    """Return what the actions on one schedule share."""
    return {"inputs": {"schedule": found.name}, "then": request.url("schedule", schedule=found.name)}


@action("/schedules/{schedule}/pause", pause_schedule, title="Pause a schedule", nav="Schedules")
async def pause_one_schedule(request: PageRequest) -> Action:
    """Let a schedule fire nothing until it is resumed."""
    found = await _stored(request)
    return Action(
        f"Schedule {found.name} ({found.when}: {found.task}) fires nothing until it is resumed, also after a deploy.",
        button="Pause",
        fields=[FormField("why", "Reason", help="Kept with the pause.")],
        done=f"Schedule {found.name} is paused.",
        **_of(request, found),
    )


@action("/schedules/{schedule}/resume", resume_schedule, title="Resume a schedule", nav="Schedules")
async def resume_one_schedule(request: PageRequest) -> Action:
    """Let a paused schedule fire from now on."""
    found = await _stored(request)
    return Action(
        f"Schedule {found.name} ({found.when}: {found.task}) fires from now on. Planned times of the pause are left "
        "out.",
        button="Resume",
        done=f"Schedule {found.name} is resumed.",
        **_of(request, found),
    )


@action("/schedules/{schedule}/run", run_schedule, title="Run a schedule now", nav="Schedules")
async def run_schedule_now(request: PageRequest) -> Action:
    """Enqueue the task of a schedule now."""
    found = await _stored(request)
    return Action(
        f"Task {found.task} is enqueued now on queue {found.queue}, with the arguments of schedule {found.name}. "
        "The planned times stay as they are.",
        button="Run now",
        done=lambda run: f"Task {run.id} {'was there already' if run.existed else 'is enqueued'}.",
        **_of(request, found),
    )


@action("/schedules/{schedule}/remove", remove_schedule, title="Remove a schedule", nav="Schedules")
async def remove_one_schedule(request: PageRequest) -> Action:
    """Remove a schedule that an operator has added."""
    found = await _stored(request)
    return Action(
        f"Schedule {found.name} ({found.when}: {found.task}) is removed. Tasks that were enqueued stay.",
        button="Remove",
        inputs={"schedule": found.name},
        then=request.url("schedules"),
        back=request.url("schedule", schedule=found.name),
        done=f"Schedule {found.name} is removed.",
        destructive=True,
    )


@action("/schedules/{schedule}/reset", reset_schedule, title="Reset a schedule", nav="Schedules")
async def reset_one_schedule(request: PageRequest) -> Action:
    """Return a schedule to its definition."""
    found = await _stored(request)
    return Action(
        f"Schedule {found.name} returns to its definition. Set by operators now: "
        f"{', '.join(found.edited) or 'nothing'}. Its times now: {found.when}.",
        button="Reset",
        fields=[FormField("revision", "Revision", "hidden", found.revision)],
        done=f"Schedule {found.name} is as it was defined.",
        **_of(request, found),
    )


@action("/schedules/{schedule}/edit", edit_schedule, title="Edit a schedule", nav="Schedules")
async def edit_one_schedule(request: PageRequest) -> Action:
    """Change a schedule."""
    found = await _stored(request)
    arguments = json_text(found.arguments)
    same = orjson.loads(arguments)

    def read(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if (name, value) != ("arguments", same)}

    return Action(
        f"What is set here replaces the definition of schedule {found.name} until it is reset, also when workers start "
        f"with other code. Its times now: {found.when}. An empty field keeps what is stored.",
        button="Change",
        fields=[
            *_times(),
            FormField("arguments", "Arguments of the task", "json", arguments),
            *_rules(),
            FormField("revision", "Revision", "hidden", found.revision),
        ],
        read=read,
        done=f"Schedule {found.name} is changed.",
        **_of(request, found),
    )


def _times() -> list[FormField]:
    return [
        FormField("cron", "Cron expression", help="Five fields, or six with seconds first, such as 0 6 * * MON."),
        FormField("tz", "Time zone", help="Of the cron expression, such as Europe/Berlin."),
        FormField("every", "Interval", help="In place of a cron expression, such as 90s or 6h."),
    ]


def _rules() -> list[FormField]:
    return [
        FormField("missed", "Tasks for times that passed while no worker ran", "choice", options=_MISSED),
        FormField("jitter", "Largest delay of a firing", help="Such as 5m; less than the time between two."),
        FormField("expires", "Deadline", help="Such as 2h: a task that has not started then becomes a dead letter."),
    ]


@action("/add-schedule", add_schedule, title="Add a schedule", nav="Schedules")
async def add_one_schedule(request: PageRequest) -> Action:
    """Add a schedule that no code defines."""
    return Action(
        "Any worker of the namespace fires the schedule, each planned time once. The task must be one that workers "
        "have published, and the arguments must fit it.",
        button="Add",
        fields=[
            FormField("name", "Name", required=True),
            FormField("task", "Task", required=True),
            FormField("app", "App", help="If several have a task of this name."),
            *_times(),
            FormField("arguments", "Arguments of the task", "json", "{}"),
            *_rules(),
            FormField(
                "priority",
                "Priority",
                "choice",
                options=[("", "That of the task"), ("high", "High"), ("normal", "Normal"), ("low", "Low")],
            ),
        ],
        then=lambda added: request.url("schedule", schedule=added.schedule.name),
        back=request.url("schedules"),
        done=lambda added: f"Schedule {added.schedule.name} is added.",
    )

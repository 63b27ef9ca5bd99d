"""Queues: numbers, lanes and partitions, pauses, and junk."""

from __future__ import annotations

from typing import Any

from ...web.operation import NoInputs
from ...web.operations.queues import (
    ListJunk,
    OneQueue,
    PausedView,
    PauseView,
    ResumedView,
    list_junk,
    list_pauses,
    list_queues,
    pause_tasks,
    resume_tasks,
    show_queue,
)
from ...web.paging import PageInputs
from ...web.problems import Problem
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page


@page("/queues", title="Queues", nav="Queues")
async def queues(request: PageRequest) -> Html:
    """List queues with their numbers, and the pauses of operators."""
    found = await list_queues(request.call, request.inputs(PageInputs))
    return request.render("queues.html", found=found, pauses=await _pauses(request))


@page("/queues/{queue}", title="Queue", nav="Queues")
async def queue(request: PageRequest) -> Html:
    """Show a queue with its lanes, its partitions, and the pauses that concern it."""
    found = await show_queue(request.call, OneQueue.model_validate(request.path))
    held = await _pauses(request)
    concerned = [row for row in held["items"] if row.pause.queue in (None, found.queue)]
    return request.render("queue.html", found=found, pauses=held | {"items": concerned})


async def _pauses(request: PageRequest) -> dict[str, Any]:
    """Return the pauses, or why they cannot be read: that hides no queue."""
    try:
        found = await list_pauses(request.call, NoInputs())
    except Problem as problem:
        if problem.source != "redis":
            raise
        return {"items": [], "problems": [], "unreadable": problem.detail}
    return {"items": found.items, "problems": found.problems, "unreadable": ""}


@page("/junk", title="Junk", nav="Queues")
async def junk(request: PageRequest) -> Html:
    """List what other programs wrote into keys of Perdure."""
    return request.render("junk.html", found=await list_junk(request.call, request.inputs(ListJunk)))


@action("/pauses/add", pause_tasks, title="Pause a queue or tasks", nav="Queues")
async def pause(request: PageRequest) -> Action:
    """Pause a queue, the tasks of a name, or tasks with certain arguments."""
    given = request.query.get("queue", [""])[-1]
    back = request.url("queue", queue=given) if given else request.url("queues")
    return Action(
        "Workers start none of these tasks until they are resumed. Running tasks continue; new ones are stored and "
        "wait. A queue alone is paused as a whole; with a task name or conditions, the tasks that match are parked.",
        button="Pause",
        fields=[
            FormField("queue", "Queue", value=given, help="Empty for tasks of all queues."),
            FormField("task", "Task name"),
            FormField("where", "Conditions on arguments", "area", help="One a line, such as tenant=acme."),
            FormField("why", "Reason", help="Kept with the pause."),
        ],
        read=_read_pause,
        then=back,
        done=_paused,
    )


def _read_pause(given: dict[str, Any]) -> dict[str, Any]:
    lines = [line.strip() for line in str(given.get("where", "")).splitlines()]
    return given | {"where": [line for line in lines if line]}


def _paused(result: PausedView) -> str:
    notes = "".join(f" Note: {note}." for note in result.notes)
    if not result.stored:
        return f"Nothing was changed: {_origin(result.pause)} paused {result.pause.target} before.{notes}"
    return f"Paused {result.pause.target}.{notes}"


def _origin(pause: PauseView) -> str:
    return pause.by or "an operator"


@action("/pauses/{pause_id}/resume", resume_tasks, title="Resume", nav="Queues")
async def resume(request: PageRequest) -> Action:
    """End a pause."""
    found = await list_pauses(request.call, NoInputs())
    row = next((row for row in found.items if row.pause.id == request.path["pause_id"]), None)
    if row is None:
        detail = f"there is no pause {request.path['pause_id']!r}: it was ended already"
        raise Problem(404, "pause-not-found", detail)
    parked = "" if row.parked is None else f" {row.parked:,} parked tasks are queued again, all at once."
    why = f": {row.pause.why}" if row.pause.why else ""
    return Action(
        f"Workers start {row.pause.target} again. {_origin(row.pause).capitalize()} paused it{why}.{parked}",
        button="Resume",
        inputs=request.path,
        then=request.url("queues"),
        done=_resumed,
    )


def _resumed(result: ResumedView) -> str:
    woken = "" if result.pause.task is None and not result.pause.where else f" {result.woken:,} tasks are queued again."
    still = "".join(f" Still paused: {pause.target}." for pause in result.still)
    notes = "".join(f" {note}." for note in result.notes)
    return f"Resumed {result.pause.target}.{woken}{still}{notes}"

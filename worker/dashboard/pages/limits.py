"""Limits: what holds them, what waits, and changes while they are in use."""

from __future__ import annotations

from typing import Any, Final

from ...web.operations.limits import (
    LimitNumbers,
    ShowLimit,
    hold_limit,
    list_limits,
    release_holder,
    release_limit,
    reset_limit,
    set_limit,
    show_limit,
)
from ...web.paging import PageInputs
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page

_ROWS: Final = 100
"""Holders and waiting keys of one page."""

_OTHER: Final = (
    ("burst", "Burst", "Starts at once before the rate holds."),
    ("errors", "Breaker: share of errors", "More than 0 and at most 1."),
    ("window", "Breaker: window", "Such as 1m."),
    ("open", "Breaker: open for", "Such as 30s."),
)
"""Settings whose numbers in force the page does not show: name, label and help."""


@page("/limits", title="Limits", nav="Limits")
async def limits(request: PageRequest) -> Html:
    """List limits with what holds them and what waits."""
    return request.render("limits.html", found=await list_limits(request.call, request.inputs(PageInputs)))


@page("/limits/{limit}", title="Limit", nav="Limits")
async def limit(request: PageRequest) -> Html:
    """Show a limit: the tasks that hold it, the keys that wait, and the last changes."""
    found = await show_limit(request.call, ShowLimit.model_validate(request.path | {"most": _ROWS}))
    return request.render("limit.html", found=found, rows=_ROWS)


async def _numbers(request: PageRequest) -> LimitNumbers:
    return (await show_limit(request.call, ShowLimit.model_validate({"limit": request.path["limit"], "most": 1}))).limit


def _why() -> FormField:
    return FormField("why", "Reason", help="Kept with the change.")


def _summary(found: LimitNumbers) -> str:
    """Return the numbers in force as the end of a sentence."""
    numbers = {"total": found.total, "running": found.running, "rate": found.rate, "cost": found.cost}
    return ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None) or "no numbers"


@action("/limits/{limit}/set", set_limit, title="Change a limit", nav="Limits")
async def change_limit(request: PageRequest) -> Action:
    """Change numbers of a limit for all workers."""
    found = await _numbers(request)
    now = {"total": found.total, "running": found.running, "rate": found.rate, "cost": found.cost}
    labels = {"total": "Total", "running": "Running at once, by key", "rate": "Rate", "cost": "Cost in a period"}
    known = {name: f"Now: {'none' if value is None else value}." for name, value in now.items()}
    fields = [FormField(name, labels[name], help=known[name]) for name in now]
    fields += [FormField(name, label, help=text) for name, label, text in _OTHER]
    return Action(
        f"The numbers of limit {found.name} are replaced for all workers, at once, until they are reset. In force now: "
        f"{_summary(found)}. An empty field keeps its number; none: no such number; code: as in the code.",
        button="Change",
        inputs={"limit": found.name},
        fields=[*fields, _why(), FormField("revision", "Revision", "hidden", found.revision)],
        read=_read_settings,
        then=request.url("limit", limit=found.name),
        done=f"Limit {found.name} is changed.",
    )


def _read_settings(given: dict[str, Any]) -> dict[str, Any]:
    others = {name: given[name] for name in ("why", "revision") if name in given}
    settings = {name: "" if value == "code" else value for name, value in given.items() if name not in others}
    return others | {"settings": settings}


@action("/limits/{limit}/reset", reset_limit, title="Reset a limit", nav="Limits")
async def reset_limit_to_code(request: PageRequest) -> Action:
    """Return a limit to its definition in the code."""
    found = await _numbers(request)
    changed = ", ".join(found.changed) or "nothing"
    return Action(
        f"Limit {found.name} returns to the numbers of its code. Set by operators now: {changed}. "
        f"In force now: {_summary(found)}.",
        button="Reset",
        inputs={"limit": found.name},
        fields=[_why(), FormField("revision", "Revision", "hidden", found.revision)],
        then=request.url("limit", limit=found.name),
        done=f"Limit {found.name} is as in the code.",
    )


@action("/limits/{limit}/hold", hold_limit, title="Hold a limit", nav="Limits")
async def hold(request: PageRequest) -> Action:
    """Let nothing start for some time."""
    found = await _numbers(request)
    return Action(
        f"No task of limit {found.name} starts for some time, on any worker. Running tasks are not touched. "
        f"{found.waiting:,} tasks wait for it now.",
        button="Hold",
        inputs={"limit": found.name},
        fields=[FormField("seconds", "For how long", help="Such as 90s, 15m or 2h.", required=True), _why()],
        then=request.url("limit", limit=found.name),
        done=f"Limit {found.name} is held.",
    )


@action("/limits/{limit}/release", release_limit, title="Release a limit", nav="Limits")
async def release(request: PageRequest) -> Action:
    """End a hold, and close the breaker."""
    found = await _numbers(request)
    state = f" It is now: {found.state}." if found.state else ""
    return Action(
        f"The hold of limit {found.name} ends and its breaker closes, so that tasks start again.{state}",
        button="Release",
        inputs={"limit": found.name},
        fields=[_why()],
        then=request.url("limit", limit=found.name),
        done=f"Limit {found.name} is released.",
    )


@action("/limits/{limit}/holders/{task_id}/release", release_holder, title="Release one holder", nav="Limits")
async def release_one_holder(request: PageRequest) -> Action:
    """Take a limit from one task."""
    found, task_id = await _numbers(request), request.path["task_id"]
    return Action(
        f"Limit {found.name} is taken from task {task_id}, so that another one starts at once. If the task still runs, "
        "both overlap until its worker notices, which stops the run, unless there is room for it.",
        button="Release",
        inputs={"limit": found.name, "task_id": task_id},
        fields=[_why()],
        then=request.url("limit", limit=found.name),
        done=f"Limit {found.name} was taken from task {task_id}.",
        destructive=True,
    )

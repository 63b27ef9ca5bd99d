"""Pages of a task about its agent: the handoff document, plan, decisions, states, prompts, costs and corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.responses import Response

from ...web.binding import download_response
from ...web.operations.agents import (
    OneArtifact,
    OneFinding,
    OnePrompt,
    PromptMessages,
    WantedHandoff,
    WantedPlanStep,
    WantedPrompts,
    WantedState,
    WantedTimeline,
    correct_state,
    dismiss_finding,
    download_artifact,
    list_artifacts,
    list_findings,
    list_prompts,
    list_used_memories,
    show_agent_identity,
    show_costs,
    show_handoff,
    show_plan,
    show_plan_step,
    show_prompt,
    show_state,
    show_timeline,
)
from ...web.operations.task_details import TaskDetails
from ...web.operations.tasks import OneTask
from ...web.problems import Problem
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page
from ..task_tabs import render_task, task_tab

M = TypeVar("M", bound=BaseModel)

_MAX_SHOWN: Final = 1 << 20
"""Characters of a value on a page of its own."""

_ROWS: Final = 100
"""Rows of a table."""


def _is_agent(shown: TaskDetails) -> bool:
    return shown.agent


def _own(request: PageRequest, model: type[M], **fixed: Any) -> M:
    """Return inputs about the task that the path names."""
    return request.inputs(model, **request.path, **fixed)


def _place(request: PageRequest) -> dict[str, Any]:
    """Return the task that the path names, for links in templates."""
    return {"task_id": request.path["task_id"], "queue": request.query.get("queue", [None])[-1]}


def _render(request: PageRequest, template: str, **values: Any) -> Html:
    """Return a page that is no tab."""
    return request.render(template, **_place(request), **values)


def _tab(request: PageRequest, template: str, shown: TaskDetails, **values: Any) -> Html:
    return render_task(request, template, shown, **_place(request), **values)


@task_tab("/tasks/{task_id}/handoff", "Handoff", order=40)
async def agent_handoff(request: PageRequest, shown: TaskDetails) -> Html:
    """Show the handoff document of a task."""
    found = await show_handoff(request.call, _own(request, WantedHandoff))
    return _tab(request, "agent_handoff.html", shown, found=found)


@task_tab("/tasks/{task_id}/plan", "Plan", order=41)
async def agent_plan(request: PageRequest, shown: TaskDetails) -> Html:
    """Show the plan of a task with its progress."""
    found = await show_plan(request.call, _own(request, OneTask))
    listed = found.steps[-_ROWS:]
    return _tab(request, "agent_plan.html", shown, found=found, listed=listed)


@page("/tasks/{task_id}/plan/step", title="Step of the plan", nav="Tasks", live=False)
async def agent_plan_step(request: PageRequest) -> Html:
    """Show a step of the plan with its result."""
    found = await show_plan_step(request.call, _own(request, WantedPlanStep))
    return _render(request, "agent_plan_step.html", found=found, longest=_MAX_SHOWN)


@task_tab("/tasks/{task_id}/timeline", "Decisions", order=42, when=_is_agent)
async def agent_timeline(request: PageRequest, shown: TaskDetails) -> Html:
    """Show what an agent planned, decided, called and received, with the reasons."""
    found = await show_timeline(request.call, _own(request, WantedTimeline))
    return _tab(request, "agent_timeline.html", shown, found=found)


@task_tab("/tasks/{task_id}/state", "State", order=43, when=_is_agent)
async def agent_state(request: PageRequest, shown: TaskDetails) -> Html:
    """Show what an agent knew after an event, or what changed between two, beside what was decided and why."""
    given = _own(request, WantedState)
    try:
        found = await show_state(request.call, given)
    except Problem as problem:
        if problem.kind != "no-such-state" or given.skip_unreadable:
            raise
        return _tab(request, "agent_state.html", shown, found=None, given=given, problem=problem.detail)
    return _tab(request, "agent_state.html", shown, found=found, given=given, problem=None)


@page("/tasks/{task_id}/state/field", title="Field of the state", nav="Tasks", live=False)
async def agent_state_field(request: PageRequest) -> Html:
    """Show one field of a state in full."""
    name = request.query.get("name", [""])[-1]
    found = await show_state(request.call, _own(request, WantedState, against=None))
    state = found.state or {}
    if name not in state:
        raise Problem(404, "no-field", f"the state after event {found.event} has no field {name!r}")
    return _render(request, "agent_state_field.html", found=found, name=name, value=state[name], longest=_MAX_SHOWN)


@task_tab("/tasks/{task_id}/prompts", "Prompts", order=44, when=_is_agent)
async def agent_prompts(request: PageRequest, shown: TaskDetails) -> Html:
    """List the prompts of model calls as they were built."""
    found = await list_prompts(request.call, _own(request, WantedPrompts))
    return _tab(request, "agent_prompts.html", shown, found=found)


@page("/tasks/{task_id}/prompts/{number}", title="Prompt", nav="Tasks", live=False)
async def agent_prompt(request: PageRequest) -> Html:
    """Show a prompt, message by message."""
    found = await show_prompt(request.call, _own(request, OnePrompt))
    wanted = request.query.get("message", [""])[-1]
    only = int(wanted) if wanted.isdecimal() and len(wanted) < 7 else None
    shown = _messages(found, only, _first(request))
    values = {"only": only, "shown": shown, "longest": _MAX_SHOWN, "first": _first(request), "rows": _ROWS}
    return _render(request, "agent_prompt.html", found=found, **values)


def _first(request: PageRequest) -> int:
    wanted = request.query.get("first", ["0"])[-1]
    return int(wanted) if wanted.isdecimal() and len(wanted) < 7 else 0


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message of a recorded prompt. number: from 0. calls: name and arguments of each requested call of a tool."""

    number: int
    role: str
    name: str
    content: str
    calls: Sequence[tuple[str, Any]]
    reasoning: Any


def _messages(found: PromptMessages, only: int | None, first: int) -> list[ShownMessage]:
    last = first + _ROWS if only is None else only + 1
    start = first if only is None else only
    return [_shown_message(number, one) for number, one in enumerate(found.messages[start:last], start)]


def _shown_message(number: int, message: Mapping[str, Any]) -> ShownMessage:
    calls = message.get("tool_calls")
    listed = [one for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    return ShownMessage(
        number,
        str(message.get("role", "")),
        str(message.get("name") or ""),
        str(message.get("content", "")),
        [(str(one.get("name", "")), one.get("arguments", {})) for one in listed],
        message.get("reasoning"),
    )


@task_tab("/tasks/{task_id}/costs", "Cost", order=45)
async def agent_costs(request: PageRequest, shown: TaskDetails) -> Html:
    """Show what a task has spent, by step and attempt."""
    found = await show_costs(request.call, _own(request, OneTask))
    return _tab(request, "agent_costs.html", shown, found=found, listed=found.steps[-_ROWS:])


@task_tab("/tasks/{task_id}/findings", "Coherence", order=46, when=_is_agent)
async def agent_findings(request: PageRequest, shown: TaskDetails) -> Html:
    """Show what the coherence checks have found."""
    found = await list_findings(request.call, _own(request, OneTask))
    return _tab(request, "agent_findings.html", shown, found=found, listed=found.items[:_ROWS])


@task_tab("/tasks/{task_id}/identity", "Identity", order=47, when=_is_agent)
async def agent_identity(request: PageRequest, shown: TaskDetails) -> Html:
    """Show the identity of an agent, its resumes, and the memories that it used."""
    given = _own(request, OneTask)
    found, memories = await show_agent_identity(request.call, given), await list_used_memories(request.call, given)
    return _tab(request, "agent_identity.html", shown, found=found, memories=memories, rows=_ROWS)


@task_tab("/tasks/{task_id}/artifacts", "Artifacts", order=48)
async def agent_artifacts(request: PageRequest, shown: TaskDetails) -> Html:
    """List the artifacts of a task."""
    found = await list_artifacts(request.call, _own(request, OneTask))
    return _tab(request, "agent_artifacts.html", shown, found=found, listed=found.items[:_ROWS])


@page("/tasks/{task_id}/artifact", title="Artifact", nav="Tasks", live=False)
async def agent_artifact(request: PageRequest) -> Response:
    """Send an artifact as a file, which browsers store and do not show."""
    return download_response(await download_artifact(request.call, _own(request, OneArtifact)))


# actions


@action("/tasks/{task_id}/findings/{event}/dismiss", dismiss_finding, title="Dismiss a finding", nav="Tasks")
async def agent_dismiss(request: PageRequest) -> Action:
    """Dismiss a finding of a coherence check."""
    given = _own(request, OneFinding)
    found = await list_findings(request.call, OneTask(task_id=given.task_id, queue=given.queue))
    finding = next((one for one in found.items if one.event == given.event), None)
    what = f"event {given.event}" if finding is None else f"{finding.check}: {finding.detail}"
    return Action(
        f"The finding of task {given.task_id} is dismissed, and equal ones of this task do not return: {what}",
        button="Dismiss",
        inputs=given.model_dump(),
        then=request.url("agent_findings", {"queue": given.queue}, task_id=given.task_id),
        done=f"The finding of event {given.event} is dismissed.",
    )


@action("/tasks/{task_id}/correct", correct_state, title="Correct the state", nav="Tasks")
async def agent_correct(request: PageRequest) -> Action:
    """Correct fields of an agent's state."""
    given = _own(request, OneTask)
    path = request.query.get("path", [""])[-1]
    wanted = WantedState.model_validate(given.model_dump() | {"skip_unreadable": True})
    found = await show_state(request.call, wanted)
    return Action(
        f"Task {given.task_id}: the agent applies the value, or refuses it, before its next step; a dead letter does "
        "so after a replay. The event log says which, with your name.",
        button="Send the correction",
        inputs=given.model_dump(),
        fields=[
            FormField("path", "Field", value=path, required=True, help="Path such as context.city or plan.0.title."),
            FormField("value", "Value", "area", help="JSON, or else text."),
            FormField("confirm", "The agent may continue, if it asks whether it may", "checkbox"),
        ],
        then=request.url("agent_state", {"queue": given.queue}, task_id=given.task_id),
        done="The correction was sent: the agent reads it before its next step.",
        template="agent_correct.html",
        values={"state": found.state or {}, "event": found.event},
        read=_correction,
    )


def _correction(given: dict[str, Any]) -> Mapping[str, Any]:
    """Return the inputs of a correction from the fields of its form."""
    path, text = given.get("path"), given.get("value")
    changes = {path: _json_or_text(text)} if path else {}
    return {"changes": changes, "confirm": given.get("confirm", False)}


def _json_or_text(text: Any) -> Any:
    try:
        return from_json(str(text).encode("utf-8", "replace"), allow_inf_nan=False)
    except ValueError:
        return text

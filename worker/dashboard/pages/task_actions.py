"""Actions on a task: cancel, send a message, fork, decide about a step in doubt, and reveal secret arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response

from ....queues.envelope import new_task_id
from ....queues.wording import counted
from ...web.operations.task_details import fork_task, resolve_step, reveal_arguments, show_task_details
from ...web.operations.tasks import cancel_task, send_message, show_task
from ..actions import Action, FormField, action
from ..page import Html, Page, PageRequest, register
from ..rendering import json_text
from ..task_tabs import one_task
from .task import MAX_SHOWN

_MAX_EDITED: Final = 256 << 10
"""Bytes of arguments that a form has for editing; larger ones are edited by name."""


def _place(request: PageRequest) -> tuple[dict[str, Any], str]:
    """Return the inputs that name the task, and the path of its page."""
    given = one_task(request)
    return given.model_dump(), request.url("task", {"queue": given.queue}, task_id=given.task_id)


@action("/tasks/{task_id}/cancel", cancel_task, title="Cancel a task", nav="Tasks")
async def task_cancel(request: PageRequest) -> Action:
    """Cancel a task."""
    inputs, back = _place(request)
    found = await show_task(request.call, one_task(request))
    how = "A worker runs it: it stops at its next step." if found.state == "running" else f"It is {found.state} now."
    return Action(
        f"Task {found.task or '?'} {found.id} is cancelled. {how} A cancelled task cannot be resumed.",
        button="Cancel the task",
        inputs=inputs,
        then=back,
        done=lambda after: (
            f"Task {found.id} is {after.state}."
            if after.state == "cancelled"
            else f"Task {found.id} was asked to stop."
        ),
        destructive=True,
    )


@action("/tasks/{task_id}/send", send_message, title="Send a message", nav="Tasks")
async def task_send(request: PageRequest) -> Action:
    """Send a message to the inbox of a task."""
    inputs, back = _place(request)
    found = await show_task(request.call, one_task(request))
    waits = f" It waits for {found.waits}." if found.waits else ""

    def read(given: dict[str, Any]) -> Mapping[str, Any]:
        content = {"content": given.get("data", given.get("text"))} if {"data", "text"} & given.keys() else {}
        return content | {"idempotency_key": given.get("idempotency_key")}

    return Action(
        f"Task {found.task or '?'} {found.id} gets a message in its inbox, from {request.user.name}.{waits}",
        button="Send",
        inputs=inputs,
        fields=[
            FormField("text", "Text", "area"),
            FormField("data", "JSON in place of the text", "json"),
            FormField("idempotency_key", "", "hidden", new_task_id()),
        ],
        then=back,
        done=lambda sent: f"Message {sent.number} was sent to task {sent.task_id}.",
        read=read,
    )


@action("/tasks/{task_id}/fork", fork_task, title="Fork a task", nav="Tasks")
async def task_fork(request: PageRequest) -> Action:
    """Start a new task from a point of this one, with edited arguments."""
    inputs, back = _place(request)
    shown = await show_task_details(request.call, one_task(request))
    name, before = shown.task.task or "?", request.query.get("before", [None])[-1]
    arguments = shown.task.args if isinstance(shown.task.args, dict) else {}
    if shown.agent or len(to_json(arguments)) > _MAX_EDITED:
        arguments = {}
    what = "the state" if shown.agent else "the steps"
    point = f"that it had before step {before!r}" if before is not None else "that it has now"

    def read(given: dict[str, Any]) -> Mapping[str, Any]:
        edited = given.pop("edit", {})
        if isinstance(edited, dict):  # what is unchanged stays as it is stored, masked secrets too
            edited = {
                key: value
                for key, value in edited.items()
                if key not in arguments or to_json(value) != to_json(arguments[key])
            }
        return given | {"edit": edited}

    help = "Secret values stay as they are while they are masked." if shown.masked else ""
    if shown.agent:
        help = "New values of fields of the state by name or path, such as context.mood. None are needed."
    elif not arguments:
        help = "New values of arguments by name. None are needed."
    return Action(
        f"A new task {name} starts with {what} {point}. Task {shown.task.id} does not change.",
        button="Start the new task",
        inputs=inputs | ({} if before is None else {"before": before}),
        fields=[
            FormField("edit", "Changes" if shown.agent else "Arguments", "json", json_text(arguments), help=help),
            *([] if before is not None else [_POINT]),
            FormField("new_id", "", "hidden", new_task_id()),
        ],
        then=lambda forked: request.url("task", task_id=forked.id),
        done=lambda forked: f"Task {forked.id} was started; it has {counted(forked.steps, 'recorded step')}.",
        back=back,
        read=read,
    )


_POINT: Final = FormField(
    "at",
    "After event",
    help="Number of an event, id of an entry of the log, or key of a step. Empty: the end of the log.",
)


@action("/tasks/{task_id}/resolve", resolve_step, title="Decide about a step in doubt", nav="Tasks")
async def task_resolve(request: PageRequest) -> Action:
    """Decide whether a step that was cut off has acted."""
    inputs, back = _place(request)
    step = request.query.get("step", [""])[-1]
    details = await show_task_details(request.call, one_task(request))
    doubts = [doubt for doubt in details.explanation.doubts if doubt.step == step]
    decided = f" {doubts[0].by} has decided: {doubts[0].decision}." if doubts and doubts[0].decision else ""
    called = f"{step}({doubts[0].arguments})" if doubts else step

    def read(given: dict[str, Any]) -> Mapping[str, Any]:
        seen = {"replaces": given.get("replaces")}
        match given.get("decision"):
            case "result":
                return seen | {"result": given.get("result")}
            case "failed":
                return seen | {"failed": given.get("failed", "")}
            case _:
                return seen | {"run_again": True}

    return Action(
        f"Step {called[:1000]} of task {details.task.id} was cut off, and may have acted. Find out whether it did. "
        f"The next run takes the decision in place of calling the step.{decided}",
        button="Decide",
        inputs=inputs | {"step": step},
        fields=[
            FormField("decision", "Decision", "choice", "result", _DECISIONS, required=True),
            FormField("result", "Result as JSON", "json", help="If it happened: the value that the step returns."),
            FormField("failed", "Text of the failure", help="If it failed."),
            FormField("replaces", "", "hidden", (doubts[0].decision if doubts else None) or "none"),
        ],
        then=back,
        done=f"The decision about step {step} is stored.",
        read=read,
    )


_DECISIONS: Final = (
    ("result", "It happened: the step returns this result"),
    ("failed", "It failed: the step raises an error"),
    ("run_again", "It did not happen: call the step again"),
)


async def _reveal(request: PageRequest) -> Html | Response:
    """Ask, then show the secret arguments of a task. The response is not stored anywhere."""
    _, back = _place(request)
    task_id = request.path["task_id"]
    if request.request.method == "POST":
        found = await reveal_arguments(request.call, one_task(request))
        return request.render("task_arguments.html", found=found, task_id=task_id, most=MAX_SHOWN)
    made = Action(
        f"The secret arguments of task {task_id} are shown to {request.user.name}. The log of the dashboard names "
        "the user, the task and the time.",
        button="Show them",
        then=back,
        done="",
    )
    return request.render("action.html", action=made, fields=[], errors={}, other_errors=[])


register(
    Page(
        "task_reveal",
        "/tasks/{task_id}/reveal",
        "Reveal secret arguments",
        "Tasks",
        reveal_arguments.roles,
        False,
        True,
        _reveal,
    )
)

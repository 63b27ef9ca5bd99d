"""Dead letters: the list, groups by cause, one letter, and acts on one or on all that filters select."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json, to_json
from starlette.responses import Response

from ....deadletter.policy import Reason
from ....queues.wording import counted
from ...web.binding import download_response
from ...web.filters import LetterFilterInputs
from ...web.operations.dead_letters import (
    GroupLetters,
    LetterView,
    ListLetters,
    OneLetter,
    PreviewLetters,
    export_dead_letters,
    group_dead_letters,
    list_dead_letters,
    preview_dead_letters,
    purge_dead_letter,
    purge_dead_letters,
    replay_dead_letter,
    replay_dead_letters,
    show_dead_letter,
)
from ...web.problems import Problem
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page
from .jobs import job_action, selection, shown_count

_ROWS: Final = 100

_EDITED: Final = 64 << 10
"""Characters of arguments that a form shows for an edit; longer ones are changed by a patch."""

_FRESH: Final = "Discard the checkpoint: start again with the first step."
_RERUN: Final = "Call the steps again that failed or were cut off."


@page("/dead-letters", title="Dead letters", nav="Dead letters")
async def dead_letters(request: PageRequest) -> Html:
    """Show dead letters, the newest first."""
    found, problem = None, None
    try:
        found = await list_dead_letters(request.call, request.inputs(ListLetters, limit=_ROWS))
    except Problem as refused:
        problem = _shown(refused)
    return _render_list(request, "dead_letters.html", found, problem)


@page("/dead-letter-groups", title="Dead letters by cause", nav="Dead letters")
async def dead_letter_groups(request: PageRequest) -> Html:
    """Show groups of dead letters with the same cause, the largest first."""
    found, problem = None, None
    try:
        found = await group_dead_letters(request.call, request.inputs(GroupLetters, limit=_ROWS))
    except Problem as refused:
        problem = _shown(refused)
    return _render_list(request, "dead_letter_groups.html", found, problem)


def _shown(refused: Problem) -> str:
    """Return the problem of a filter, which the page shows beside its form. Raises any other."""
    if refused.status not in (404, 422):
        raise refused
    return refused.detail


def _render_list(request: PageRequest, template: str, found: Any, problem: str | None) -> Html:
    query = {name: value for name, value in request.query.items() if name in LetterFilterInputs.model_fields}
    reasons = [(str(reason), str(reason)) for reason in Reason]
    status = 200 if problem is None else 422
    return request.render(template, status, found=found, problem=problem, query=query, reasons=reasons)


@page("/dead-letter-export", title="Export", nav="Dead letters", live=False)
async def dead_letter_export(request: PageRequest) -> Response:
    """Send all letters that match as JSON lines."""
    return download_response(await export_dead_letters(request.call, selection(request, LetterFilterInputs)))


@page("/dead-letters/{task_id}", title="Dead letter", nav="Dead letters")
async def dead_letter(request: PageRequest) -> Html:
    """Show a dead letter: why it was given up, with what, and what to do."""
    return request.render("dead_letter.html", letter=await show_dead_letter(request.call, _one(request)))


@page("/dead-letters/{task_id}/arguments", title="Arguments of a dead letter", nav="Dead letters", live=False)
async def dead_letter_arguments(request: PageRequest) -> Html:
    """Show the whole arguments and traceback of a dead letter."""
    return request.render("dead_letter_arguments.html", letter=await show_dead_letter(request.call, _one(request)))


@action("/dead-letters/{task_id}/replay", replay_dead_letter, title="Replay a dead letter", nav="Dead letters")
async def letter_replay(request: PageRequest) -> Action:
    """Say what a replay does; its arguments can be edited."""
    found = await show_dead_letter(request.call, _one(request))
    shown = _editable(found)
    fields = [] if shown is None else [_arguments_field(found, shown)]
    fields += [
        FormField("fresh", "Start fresh", "checkbox", help=_FRESH),
        FormField("rerun_failed", "Rerun failed steps", "checkbox", help=_RERUN),
    ]
    steps = f"{len(found.steps):,} recorded step{'s do' if len(found.steps) != 1 else ' does'} not run again."
    return Action(
        f"Task {found.id} ({found.task}) goes back to queue {found.queue}. Attempts and crashes are counted from zero. "
        + (steps if found.steps else "It starts with the first step."),
        button="Replay",
        inputs={"task_id": found.id, "queue": found.queue},
        fields=fields,
        then=request.url("task", {"queue": found.queue}, task_id=found.id),
        done=f"Task {found.id} is replayed.",
        back=request.url("dead_letter", {"queue": found.queue}, task_id=found.id),
        template="letter_replay.html",
        values={"letter": found},
        read=lambda given: _changed(given, shown),
    )


def _editable(found: LetterView) -> str | None:
    """Return the arguments as the text of a field; None if they are no JSON object."""
    return to_json(found.args, indent=2).decode() if isinstance(found.args, dict) and not found.raw else None


def _arguments_field(found: LetterView, shown: str) -> FormField:
    mask = " Asterisks in the place of a secret keep its value." if "***" in shown else ""
    if len(shown) > _EDITED:
        return FormField(
            "edit", "Changed arguments", "json", help="They are set, and the others kept. null removes one."
        )
    return FormField(
        "args", "Arguments", "json", shown, help=f"A change is checked by what workers published about the task.{mask}"
    )


def _changed(given: dict[str, Any], shown: str | None) -> dict[str, Any]:
    """Return the inputs without arguments that were not changed."""
    if shown is not None and "args" in given and given["args"] == from_json(shown):
        given = {name: value for name, value in given.items() if name != "args"}
    return given


@action("/dead-letters/{task_id}/purge", purge_dead_letter, title="Purge a dead letter", nav="Dead letters")
async def letter_purge(request: PageRequest) -> Action:
    """Say what a purge deletes."""
    found = await show_dead_letter(request.call, _one(request))
    return Action(
        f"Dead letter {found.id} ({found.task}) is deleted with its record, its {counted(len(found.steps), 'step')} "
        "and its log. It cannot be restored.",
        button="Purge",
        inputs={"task_id": found.id, "queue": found.queue},
        then=request.url("dead_letters"),
        done=f"Dead letter {found.id} is purged.",
        back=request.url("dead_letter", {"queue": found.queue}, task_id=found.id),
        destructive=True,
    )


@action("/dead-letter-jobs/replay", replay_dead_letters, title="Replay all dead letters that match", nav="Dead letters")
async def letters_replay(request: PageRequest) -> Action:
    """Show which letters a job would replay, and whether edited arguments fit."""
    text = request.query.get("edit", [""])[-1]
    given = selection(request, PreviewLetters, edit=_patch(text), purge=False)
    found = await preview_dead_letters(request.call, given)
    rerun = given.rerun_failed
    acts = [_FRESH] if given.fresh else []
    acts += [_RERUN] if rerun else []
    acts += [] if given.edit is None else [f"Changed arguments: {', '.join(sorted(given.edit))}."]
    how = f" {' '.join(acts)}" if acts else ""
    return job_action(
        request,
        given,
        found,
        text=f"A job replays {shown_count(found, 'dead letter')}.{how}",
        button="Replay them",
        noun="dead letter",
        back=request.url("dead_letters", _filters(request)),
        template="letters_replay.html",
        destructive=False,
        values={
            "edit": FormField("edit", "Changed arguments", "json", text, help=_EDIT),
            "fresh": FormField("fresh", "Start fresh", "checkbox", given.fresh, help=_FRESH),
            "rerun_failed": FormField("rerun_failed", "Rerun failed steps", "checkbox", rerun, help=_RERUN),
            "query": _filters(request),
        },
    )


_EDIT: Final = (
    "A JSON object: these arguments are set, and the others kept; null removes one. They become part of the address of "
    "the preview, so give secrets by the API or the command line."
)


def _patch(text: str) -> dict[str, Any] | None:
    """Return edited arguments. Raises `Problem` for a text that is no JSON object."""
    if not text.strip():
        return None
    try:
        found = from_json(text.encode("utf-8", "replace"), allow_inf_nan=False)
    except ValueError as error:
        raise Problem(422, "invalid-input", f"changed arguments must be JSON: {error}; nothing was changed") from None
    if not isinstance(found, dict):
        raise Problem(422, "invalid-input", "changed arguments must be a JSON object; nothing was changed")
    return found


def _filters(request: PageRequest) -> dict[str, list[str]]:
    return {name: value for name, value in request.query.items() if name in LetterFilterInputs.model_fields}


@action("/dead-letter-jobs/purge", purge_dead_letters, title="Purge all dead letters that match", nav="Dead letters")
async def letters_purge(request: PageRequest) -> Action:
    """Show which letters a job would purge."""
    given = selection(request, LetterFilterInputs)
    found = await preview_dead_letters(request.call, PreviewLetters(**given.model_dump(), purge=True))
    return job_action(
        request,
        given,
        found,
        text=f"A job deletes {shown_count(found, 'dead letter')} with their records and checkpoints. They cannot be "
        "restored: export them before.",
        button="Purge them",
        noun="dead letter",
        back=request.url("dead_letters", _filters(request)),
    )


def _one(request: PageRequest) -> OneLetter:
    """Return the letter of the path, of a queue if the query names one."""
    queue = request.query.get("queue", [None])[-1]
    return OneLetter(task_id=request.path["task_id"], queue=queue)

"""Open questions of tasks, their answers, and links by which people without an account answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError
from starlette.responses import Response

from ....queues.waits import answer_digest
from ...web.answer_forms import AnswerForm, InvalidForm, make_form, read_answer
from ...web.answer_page import form_with, render_fields, render_question, submitted_fields
from ...web.binding import read_bytes
from ...web.operations.answer_links import MakeAnswerLink, make_answer_link
from ...web.operations.questions import (
    AnswerQuestion,
    ListQuestions,
    QuestionView,
    TaskOfQuestions,
    TaskQuestions,
    answer_question,
    answered_problem,
    list_questions,
    task_questions,
)
from ...web.operations.task_details import TaskDetails
from ...web.problems import Problem
from ...web.users import Role
from ..actions import FormField, redirect
from ..page import Html, Notice, Page, PageRequest, page, register
from ..task_tabs import task_part

_MAX_FORM: Final = 1 << 20
_DAY: Final = 86_400


@page("/questions", title="Questions", nav="Questions")
async def questions(request: PageRequest) -> Html:
    """List the open questions."""
    found = await list_questions(request.call, request.inputs(ListQuestions))
    return request.render("questions.html", found=found)


@page("/questions/{task_id}", title="Questions of a task", nav="Questions")
async def questions_of_task(request: PageRequest) -> Html:
    """Show the open questions of a task, with what they show."""
    found = await task_questions(request.call, request.inputs(TaskOfQuestions, **request.path))
    return request.render("questions_of_task.html", found=found, part=_part(found), task_id=request.path["task_id"])


@task_part("task_questions.html")
async def open_questions(request: PageRequest, shown: TaskDetails) -> Mapping[str, Any] | None:
    """Show the open questions of a task on its page."""
    task = shown.task
    if task.state in ("succeeded", "dead", "cancelled"):
        return None
    found = await task_questions(request.call, TaskOfQuestions(task_id=task.id, queue=task.queue))
    return _part(found) if found.items else None


def _part(found: TaskQuestions) -> Mapping[str, Any]:
    return {"questions": [(question, render_question(question)) for question in found.items]}


async def answer(request: PageRequest) -> Html | Response:
    """Show one question with a form, and answer it."""
    question = await _question(request)
    form = make_form(question.json_schema)
    if request.request.method != "POST":
        return _answer_page(request, question, form, secrets.token_urlsafe(9))
    submitted = submitted_fields(await read_bytes(request.request, _MAX_FORM))
    click = submitted.get("click", "")[:100]
    try:
        value = read_answer(form, submitted)
        given = AnswerQuestion(
            task_id=question.task_id,
            queue=question.queue,
            wait=question.wait,
            value=value,
            question=submitted.get("question", "")[:64],
            shows=None,
            answer_id=f"click-{click}-{answer_digest(repr(value))}",
        )
        stored = await answer_question(request.call, given)
    except InvalidForm as error:
        return _answer_page(request, question, error.form, click, status=422)
    except Problem as problem:
        if problem.status == 422:
            return _answer_page(request, question, form_with(form, submitted, problem), click, status=422)
        if problem.status not in (404, 409):
            raise
        question = await _question(request)
        form = make_form(question.json_schema)
        return _answer_page(request, question, form, click, status=problem.status, refused=problem.detail)
    notice = Notice(f"Your answer to {stored.wait} of task {stored.task_id} is stored.")
    return redirect(request, request.url("questions"), notice)


def _answer_page(
    request: PageRequest, question: QuestionView, form: AnswerForm, click: str, *, status: int = 200, refused: str = ""
) -> Html:
    """Return the page of a question. refused: why an answer was not stored."""
    fields = render_fields(form, hidden={"question": question.question, "click": click})
    shown = render_question(question)
    return request.render("answer.html", status, question=question, shown=shown, fields=fields, refused=refused)


register(
    Page(
        "answer", "/questions/{task_id}/answer", "Answer a question", "Questions", (Role.APPROVER,), False, True, answer
    )
)


async def make_link(request: PageRequest) -> Html:
    """Show a form for an answer link, and the link that was made. It is shown once."""
    question = await _question(request)
    fields = [
        FormField("person", "Person", required=True, help="The sender of the answer. Who has the link can answer."),
        FormField("days", "Days", "number", value="3", required=True, help="Days for which the link can be used."),
    ]
    errors: dict[str, str] = {}
    made = None
    if request.request.method == "POST":
        submitted = submitted_fields(await read_bytes(request.request, _MAX_FORM))
        fields = [replace(known, value=submitted.get(known.name, "")) for known in fields]
        try:
            made = await make_answer_link(
                request.call,
                MakeAnswerLink(
                    task_id=question.task_id,
                    queue=question.queue,
                    wait=question.wait,
                    person=submitted.get("person", "").strip(),
                    seconds=_seconds(submitted.get("days", "")),
                ),
            )
        except ValidationError as error:
            names = {"seconds": "days"}
            errors = {
                names.get(str(found["loc"][0]), str(found["loc"][0])): str(found["msg"]) for found in error.errors()
            }
    status = 422 if errors else 200
    return request.render("answer_link.html", status, question=question, fields=fields, errors=errors, made=made)


register(
    Page(
        "make_link",
        "/questions/{task_id}/link",
        "Make an answer link",
        "Questions",
        (Role.APPROVER,),
        False,
        True,
        make_link,
    )
)


def _seconds(days: str) -> int:
    """Return the seconds of a number of days; 0, which the operation refuses, for another text."""
    try:
        return round(float(days) * _DAY)
    except (ValueError, OverflowError):
        return 0


async def _question(request: PageRequest) -> QuestionView:
    """Return the open question that path and query name.

    Raises:
        Problem: It is not open. If it was answered, the problem says by whom.
    """
    task_id, wait = request.path["task_id"], request.query.get("wait", [""])[-1]
    queue = request.query.get("queue", [None])[-1]
    found = await task_questions(request.call, TaskOfQuestions(task_id=task_id, queue=queue))
    question = next((known for known in found.items if known.wait == wait), None)
    if question is None or question.answered:
        handle = await request.call.find(task_id, queue)
        answered = await answered_problem(request.call, handle.partition, task_id, wait[:1024])
        raise answered or Problem(
            404, "wait-not-found", f"wait {wait[:100]!r} of task {task_id} is not open: there is nothing to answer"
        )
    return question

"""The page of an answer link, for people without an account, and the parts that it shares with pages of questions.

A GET shows the question and a form, and answers nothing: mail scanners follow links. The form is sent to the same
address. The page loads no script and works without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...queues.errors import PerdureError
from ...queues.wording import iso_time, shown_time
from ..log import logger
from ..shown_text import clean, clean_json, encode
from .answer_forms import CHOSEN, AnswerForm, InvalidForm, make_form, read_answer, with_problems
from .binding import parse_form, read_bytes
from .guards import check_origin
from .operation import Call
from .operations.answer_links import AnswerByLink, LinkedQuestion, OneLink, answer_by_link, show_answer_link
from .operations.questions import QuestionView
from .problems import Problem, problem_of
from .service import Service
from .users import User

_FOLDER: Final = Path(__file__).parent / "templates"

_MAX_FORM: Final = 1 << 20
"""Bytes of a form at most."""

_FILES: Final = {"answer.css": "text/css", "answer.svg": "image/svg+xml"}
"""Media types of the files that the page loads, by name."""

_LONGEST: Final = 4_000
"""Characters of a reason that are shown."""

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-Robots-Tag": "noindex, nofollow",
}

_ANONYMOUS: Final = User("anonymous", ())


def answer_routes(service: Service) -> list[Route]:
    """Return the routes of the pages of answer links."""

    async def answer(request: Request) -> Response:
        try:
            return await _page(service, request)
        except Problem as problem:
            return _problem_page(problem)
        except PerdureError as error:
            return _problem_page(problem_of(error))
        except Exception as error:  # noqa: BLE001 - its text may hold data, so it goes to the log only
            logger.exception("the page of an answer link failed: {}", type(error).__name__)
            return _problem_page(
                Problem(500, "server-error", "the server failed; its log has the traceback", source="server")
            )

    async def file(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        headers = {"Cache-Control": "public, max-age=3600", "X-Content-Type-Options": "nosniff"}
        return Response((_FOLDER / name).read_bytes(), 200, headers, _FILES[name])

    return [
        Route("/answer/{link}", answer, methods=["GET", "POST"], name="answer_page"),
        *(Route(f"/{name}", file, name=name) for name in _FILES),
    ]


async def _page(service: Service, request: Request) -> Response:
    call, link = service.call(_ANONYMOUS), request.path_params["link"]
    if len(link) > 4096:
        raise Problem(404, "link-not-valid", "the link is not valid: it is too long; ask for another one")
    linked = await show_answer_link(call, OneLink(link=link))
    form = make_form(linked.question.json_schema)
    if request.method != "POST":
        return _form_page(linked, form)
    check_origin(request)
    submitted = submitted_fields(await read_bytes(request, _MAX_FORM))
    try:
        return await _answer(call, link, form, submitted)
    except InvalidForm as error:
        return _form_page(linked, error.form, 422)


async def _answer(call: Call, link: str, form: AnswerForm, submitted: Mapping[str, str]) -> Response:
    value = read_answer(form, submitted)
    try:
        stored = await answer_by_link(call, AnswerByLink(link=link, value=value))
    except Problem as problem:
        if problem.status != 422:
            raise
        raise InvalidForm(form_with(form, submitted, problem)) from None
    return _html("Thank you", text=f"Your answer is stored, {stored.by}. You can close this page.", done=True)


def submitted_fields(body: bytes) -> dict[str, str]:
    """Return the last value of each field of a submitted form. Raises `Problem` if it has too many."""
    return {name: values[-1] for name, values in parse_form(body).items()}


def form_with(form: AnswerForm, submitted: Mapping[str, str], problem: Problem) -> AnswerForm:
    """Return a submitted form with what an operation found wrong with its answer."""
    filled = replace(form, fields=tuple(replace(one, value=submitted.get(one.name, "")) for one in form.fields))
    texts = [f"{error.where.replace('value', 'answer', 1)}: {error.message}" for error in problem.fields]
    return with_problems(filled, texts or [problem.detail])


class ShownCall(NamedTuple):
    """A call that a question shows: `shows={"tool": ..., "arguments": {...}}`. others: further members."""

    tool: str
    arguments: Mapping[str, Any]
    others: Mapping[str, Any]


def shown_call(shown: Any) -> ShownCall | None:
    """Return the call that a question shows; None if it shows something else."""
    if not isinstance(shown, dict):
        return None
    tool, arguments = shown.get("tool"), shown.get("arguments")
    if not isinstance(tool, str) or not isinstance(arguments, dict):
        return None
    others = {name: value for name, value in shown.items() if name not in ("tool", "arguments")}
    return ShownCall(tool, arguments, others)


def render_question(question: QuestionView) -> Markup:
    """Return what people see of a question before they answer, as HTML."""
    return _render("answer_question.html", question=question, called=shown_call(question.shown), longest=_LONGEST)


def render_fields(form: AnswerForm, action: str = "", hidden: Mapping[str, str] | None = None) -> Markup:
    """Return the form of an answer as HTML. action: address that takes it, if another. hidden: further inputs."""
    return _render("answer_fields.html", form=form, action=action, hidden=hidden or {}, chosen=CHOSEN)


def _form_page(linked: LinkedQuestion, form: AnswerForm, status: int = 200) -> Response:
    return _html(
        "Question for you",
        status,
        linked=linked,
        question=render_question(linked.question),
        fields=render_fields(form),
    )


def _problem_page(problem: Problem) -> Response:
    detail = problem.detail[:1].upper() + problem.detail[1:] + "."
    return _html("No answer was stored", problem.status, text=detail)


def _html(title: str, status: int = 200, **values: Any) -> Response:
    known = {"linked": None, "text": "", "done": False}
    text = _render("answer.html", title=title, **known | values)
    return Response(text, status, HEADERS, "text/html")


def _finalize(value: Any) -> Any:
    """Return what a template shows of a value: nothing for None, and clean text."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else clean(str(value))


def _exact(value: str) -> Markup:
    """Return text for the value of a field or an address: escaped for HTML only."""
    return escape(value.encode("utf-8", "replace").decode())


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        exact=_exact,
        iso=iso_time,
        time=shown_time,
        json_line=lambda value: clean_json(encode(value)),
        json_text=lambda value: clean_json(encode(value, orjson.OPT_INDENT_2)),
    )
    return found


_TEMPLATES: Final = _environment()


def _render(template: str, **values: Any) -> Markup:
    return Markup(_TEMPLATES.get_template(template).render(values))  # noqa: S704 - the templates escape what they show

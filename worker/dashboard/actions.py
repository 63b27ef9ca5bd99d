"""Actions: a page that shows exactly what will happen, and a request that does it by an operation.

    @action("/queues/{queue}/purge", purge_queue, title="Purge a queue", nav="Queues")
    async def purge(request: PageRequest) -> Action:
        found = await show_queue(request.call, OneQueue(**request.path))
        return Action(
            f"{found.depth} waiting tasks of queue {found.queue} are removed. They cannot be restored.",
            button="Purge",
            inputs=request.path,
            fields=[FormField("why", "Reason", help="Audit lines and the queue show it.")],
            then=request.url("queue", **request.path),
            done=f"Queue {found.queue} is purged.",
        )

The function runs for the page (GET) and before the act (POST). A POST validates the fields by the operation's model of
inputs: what is not valid is shown beside its field, and nothing is done. After the act, the browser is redirected to
`then`, which shows `done`. Actions exist only where the dashboard was started with actions, and need a role of their
operation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.responses import RedirectResponse, Response

from ..web.binding import parse_form, read_bytes
from ..web.operation import Operation
from ..web.problems import Problem, ProblemError, invalid
from .page import Html, Notice, Page, PageRequest, register

_MAX_FORM: Final = 8 << 20
"""Bytes of a form at most: a value of the largest size is longer as a form."""

Kind = Literal["text", "area", "json", "number", "checkbox", "choice", "several", "hidden"]


@dataclass(frozen=True, slots=True)
class FormField:
    """Field of a form.

    Args:
        name: Name of the input of the operation.
        label: Text beside it.
        kind: text; area (several lines); json (several lines, read as JSON); number; checkbox; choice of one of
            `options`; several of `options`; hidden.
        value: Value at first. Of `json` the text.
        options: Value and text of each choice.
        help: Sentence below it.
        required: Whether the browser refuses an empty one. An empty field that is not required is not sent on.
    """

    name: str
    label: str
    kind: Kind = "text"
    value: Any = ""
    options: Sequence[tuple[str, str]] = ()
    help: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """The act of an action, as its page shows it.

    Args:
        text: What will happen, in one or two sentences with the names of what changes.
        button: The act as one or two words.
        inputs: Inputs of the operation that the form cannot change.
        fields: Inputs that the user gives.
        then: Path that is opened afterwards, or a function of the result that returns it.
        done: What has happened, or a function of the result that returns it.
        back: Path of the link that leaves without acting. Default: `then`.
        destructive: Whether the act cannot be undone; the button is marked.
        template: Template of the page; one of its own extends `action.html` and shows more in its block `details`.
        values: Values for the template.
        read: Makes inputs of the operation of the fields' values, if they are not the same.
    """

    text: str
    button: str
    then: str | Callable[[Any], str]
    done: str | Callable[[Any], str]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    fields: Sequence[FormField] = ()
    back: str = ""
    destructive: bool = False
    template: str = "action.html"
    values: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    @property
    def left(self) -> str:
        """Path of the link that leaves without acting."""
        return self.back or (self.then if isinstance(self.then, str) else "")


Prepare = Callable[[PageRequest], Awaitable[Action]]


def action(path: str, operation: Operation[Any, Any], *, title: str, nav: str = "") -> Callable[[Prepare], Prepare]:
    """Make an action of an operation and of a function that says what will happen."""

    def make(prepare: Prepare) -> Prepare:
        async def run(request: PageRequest) -> Html | Response:
            made = await prepare(request)
            if request.request.method != "POST":
                return _form(request, made, made.fields, [])
            return await _act(request, operation, made)

        register(Page(prepare.__name__, path, title, nav, operation.roles, False, True, run))
        return prepare

    return make


def _form(request: PageRequest, made: Action, fields: Sequence[FormField], errors: Sequence[ProblemError]) -> Html:
    names = {known.name for known in fields}

    def field_of(error: ProblemError) -> str:
        parts = error.where.split(".")
        return parts[-1] if parts[0] not in names else parts[0]  # of `settings.total`, the field is `total`

    by_field = {field_of(error): error.message for error in reversed(errors)}
    others = [error for error in errors if field_of(error) not in names]
    values = {"action": made, "fields": fields, "errors": by_field, "other_errors": others}
    return request.render(made.template, 422 if errors else 200, **made.values, **values)


async def _act(request: PageRequest, operation: Operation[Any, Any], made: Action) -> Html | Response:
    given = parse_form(await read_bytes(request.request, _MAX_FORM))
    filled = [_filled(known, given.get(known.name, [])) for known in made.fields]
    try:
        read = {known.name: value for known in filled if (value := _value(known)) is not None}
        inputs = dict(read if made.read is None else made.read(read)) | dict(made.inputs)
        found = operation.inputs.model_validate(inputs)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        return _form(request, made, filled, invalid(errors).fields)
    except _InvalidField as error:
        return _form(request, made, filled, [error.problem])
    try:
        result = await operation(request.call, found)
    except Problem as problem:
        if problem.status not in (409, 410, 413, 422, 429):
            raise
        return replace(
            _form(request, made, filled, problem.fields or [ProblemError(where="", message=problem.detail)]),
            status=problem.status,
        )
    done = made.done if isinstance(made.done, str) else made.done(result)
    return redirect(request, made.then if isinstance(made.then, str) else made.then(result), Notice(done))


def redirect(request: PageRequest, path: str, notice: Notice) -> Response:
    """Return a redirect to a page of the dashboard, which shows the notice."""
    response = RedirectResponse(path, 303)
    request.request.state.notices.put(response, request, notice)
    return response


class _InvalidField(Exception):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.problem = ProblemError(where=name, message=message)


def _filled(known: FormField, sent: Sequence[str]) -> FormField:
    """Return a field with what the user has given."""
    match known.kind:
        case "several":
            return replace(known, value=list(sent))
        case "checkbox":
            return replace(known, value=bool(sent))
        case _:
            return replace(known, value=sent[-1] if sent else "")


def _value(known: FormField) -> Any:
    """Return the input of a filled field; None for an empty one.

    Raises:
        _InvalidField: It is no JSON.
    """
    if known.kind in ("several", "checkbox"):
        return known.value
    if not known.value.strip():
        return None
    if known.kind != "json":
        return known.value
    try:
        return from_json(known.value.encode("utf-8", "replace"), allow_inf_nan=False)
    except ValueError as error:
        raise _InvalidField(known.name, f"must be JSON: {error}") from None

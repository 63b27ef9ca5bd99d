"""Questions of tasks as elicitations of MCP, and the answers of clients.

An elicitation asks for an object whose properties are texts, numbers, booleans or choices. A question whose schema is
such an object is passed on as it is. Another one becomes a form with a field for each property, or one field `answer`
for the whole (see web/answer_forms.py); what fits no field is given as JSON text.

A question of an MCP task has its digest as its key: an answer to an earlier question, or to one that shows something
else, has a key that is not known any more. In a call the key is the name of the wait, and the state of the request has
the digests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic_core import to_json

from ....queues.waits import OpenWait, answer_problems
from ...web.answer_forms import AnswerField, InvalidForm, make_form, read_answer

WHOLE: Final = "answer"
"""Property of the form of an answer that is no object."""

_SEPARATOR: Final = ":"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

_PRIMITIVES: Final = frozenset({"string", "number", "integer", "boolean"})

_MAX_SHOWN: Final = 4000
"""Most characters of what is shown with a question."""


class InvalidElicitation(ValueError):
    """The content of a client does not fit its question."""


def input_requests(waits: Iterable[OpenWait]) -> dict[str, dict[str, Any]]:
    """Return questions as requests of MCP, by their digests."""
    return {wait.digest: _request(wait) for wait in waits}


def requests_in_call(waits: Iterable[OpenWait]) -> dict[str, dict[str, Any]]:
    """Return questions as requests of MCP, by the ids of their waits."""
    return {wait.id: _request(wait) for wait in waits}


def request_state(task_id: str, waits: Iterable[OpenWait]) -> str:
    """Return the state of a call that asks questions, for `read_request_state`.

    It is no secret, and needs no signature: the server looks the task up as one of the user, and an answer whose
    question has another digest now is not taken.
    """
    return _SEPARATOR.join((task_id, *(wait.digest for wait in waits)))


def read_request_state(state: str) -> tuple[str, frozenset[str]]:
    """Return the id of the task, and the digests of the questions. Raises `ValueError`."""
    task_id, *digests = state.split(_SEPARATOR)
    if not digests or not all(map(_DIGEST.fullmatch, digests)):
        raise ValueError("it has not the form of a state that this server made")
    return task_id, frozenset(digests)


def _request(wait: OpenWait) -> dict[str, Any]:
    return {"method": "elicitation/create", "params": elicitation_of(wait)}


def elicitation_of(wait: OpenWait) -> dict[str, Any]:
    """Return the parameters of an elicitation."""
    text = wait.why or f"The task waits for {wait.name!r}."
    if wait.who:
        text += f" (for {wait.who})"
    if wait.shown is not None:
        shown = wait.shown if isinstance(wait.shown, str) else to_json(wait.shown, indent=2).decode()
        text += f"\n\n{shown[:_MAX_SHOWN]}"
    return {"mode": "form", "message": text, "requestedSchema": _requested(wait.schema)}


def read_content(wait: OpenWait, content: Mapping[str, Any] | None) -> Any:
    """Return the answer of a client that has accepted.

    Raises:
        InvalidElicitation: It does not fit the question; the text says why.
    """
    given = dict(content or {})
    if _is_plain_form(wait.schema):
        found = answer_problems(dict(wait.schema or {}), to_json(given))
        if found:
            raise InvalidElicitation(f"answer to {wait.name!r} does not fit: {'; '.join(found[:3])}")
        return given
    form = make_form(wait.schema)
    submitted = {"chosen": _text(given[WHOLE])} if form.buttons and WHOLE in given else {}
    for known in form.fields:
        if (value := given.get(known.property or WHOLE)) is not None:
            submitted[known.name] = _submitted(known, value)
    try:
        return read_answer(form, submitted)
    except InvalidForm as error:
        problems = [*error.form.problems, *(f"{known.label}: {known.problem}" for known in error.form.fields)]
        found = [text for text in problems if not text.endswith(": ")]
        raise InvalidElicitation(f"answer to {wait.name!r} does not fit: {'; '.join(found[:3])}") from None


def declines(wait: OpenWait) -> Any:
    """Return the answer that says no to a question: `approved: false` where its schema has that; None without one."""
    properties = (wait.schema or {}).get("properties")
    if isinstance(properties, dict) and isinstance(properties.get("approved"), dict):
        answer = {"approved": False}
        if not answer_problems(dict(wait.schema or {}), to_json(answer)):
            return answer
    return None


def _requested(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    if schema is not None and _is_plain_form(schema):
        return {name: schema[name] for name in ("type", "properties", "required") if name in schema}
    form = make_form(schema)
    properties: dict[str, Any] = {known.property or WHOLE: _property(known) for known in form.fields}
    required = [known.property or WHOLE for known in form.fields if known.required and not form.buttons]
    if form.buttons:
        properties[WHOLE] = {"type": "string", "enum": [option.value for option in form.buttons]}
        if not form.fields:
            required = [WHOLE]
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return {**found, "required": required} if required else found


def _property(known: AnswerField) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": known.label}
    if described := " ".join(text for text in (known.help, known.hint) if text):
        shown["description"] = described
    match known.kind:
        case "integer" | "number" | "boolean":
            shown["type"] = known.kind
        case "choice":
            shown |= {"type": "string", "enum": [option.value for option in known.options]}
        case "date":
            shown |= {"type": "string", "format": "date"}
        case _:
            shown["type"] = "string"
    return shown


def _is_plain_form(schema: Mapping[str, Any] | None) -> bool:
    """Return whether a schema is one that an elicitation may have."""
    if schema is None or schema.get("type") != "object" or not isinstance(schema.get("properties"), dict):
        return False
    return bool(schema["properties"]) and all(map(_is_primitive, schema["properties"].values()))


def _is_primitive(schema: Any) -> bool:
    if not isinstance(schema, dict) or "$ref" in schema:
        return False
    if schema.get("type") in _PRIMITIVES:
        return True
    items = schema.get("items")
    choices = isinstance(items, dict) and "$ref" not in items and ("enum" in items or "anyOf" in items)
    return schema.get("type") == "array" and choices


def _submitted(known: AnswerField, value: Any) -> str:
    """Return a value of a client as the text of a field of a form."""
    return value if known.kind in ("text", "long_text", "date", "json", "choice") else _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value).decode()

"""Forms of answers: fields made from the JSON schema of a question, and the answer read from a submitted form.

A field is made for each property of an object whose properties are texts, numbers, booleans, choices or dates, as flat
pydantic models have them. Another value is given as JSON. A union with constants, such as amounts or `"deny"`, gets a
button for each constant, and so do yes and no. Names of fields are positions: a name that a task chose is shown only.

The schema of the question decides about the answer as a whole; a field says what is wrong with its own part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from math import isinf
from typing import Any, Final, Literal

from pydantic_core import from_json

from ...queues.json_form import as_json
from ...queues.waits import answer_problems
from ...queues.wording import shortened

AnswerKind = Literal["text", "long_text", "integer", "number", "boolean", "choice", "date", "json"]

CHOSEN: Final = "chosen"
"""Name of the buttons of constants."""

_MAX_FIELDS: Final = 40
_MAX_CHOICES: Final = 200
_MAX_BUTTONS: Final = 6
_MAX_LABEL: Final = 120
_MAX_HELP: Final = 500

_LINE: Final = 200
"""Most characters of a text whose field has one line."""

_DEPTH: Final = 8
"""References that are followed to find the type of a field."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,1000}")
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,4})?")

_HINTS: Final[Mapping[AnswerKind, str]] = {
    "integer": "A whole number.",
    "number": "A number, with a point before decimals.",
    "json": 'JSON, such as 12, "text" or {"name": [1, 2]}.',
}
_LIMITS: Final = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "more than"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "less than"),
    ("minLength", "characters, at least"),
    ("maxLength", "characters, at most"),
)


@dataclass(frozen=True, slots=True)
class AnswerOption:
    """A value that can be chosen. value: its JSON text. label: its text for people."""

    value: str
    label: str


_YES_NO: Final = (AnswerOption("true", "Yes"), AnswerOption("false", "No"))


@dataclass(frozen=True, slots=True)
class AnswerField:
    """A field of a form.

    Attributes:
        name: Name in the form, such as `f0`.
        property: Name of the property of the answer; None if the field is the whole answer.
        required: Whether the answer needs it.
        nullable: Whether an empty field means null.
        help: Description of the property.
        hint: Its form and its limits.
        options: Values of a choice.
        value: Text that is shown: the default, or what was submitted.
        problem: What is wrong with it.
        schema: Schema of the property.
    """

    name: str
    property: str | None
    label: str
    kind: AnswerKind
    required: bool
    nullable: bool = False
    help: str = ""
    hint: str = ""
    options: tuple[AnswerOption, ...] = ()
    value: str = ""
    problem: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """A form of an answer.

    Attributes:
        fields: Empty if the answer is one of the buttons.
        buttons: Constants that are an answer as they are.
        problems: What is wrong with the answer as a whole.
        schema: Schema of the answer; None for any JSON.
    """

    fields: tuple[AnswerField, ...]
    buttons: tuple[AnswerOption, ...] = ()
    problems: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def invalid(self) -> bool:
        """Whether something is wrong with the submitted answer."""
        return bool(self.problems) or any(known.problem for known in self.fields)


class InvalidForm(ValueError):
    """A submitted form whose answer does not fit. `form` has its values and what is wrong with them."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__("the answer does not fit its question")
        self.form = form


def make_form(schema: Mapping[str, Any] | None) -> AnswerForm:
    """Return the form of answers that fit a schema; one field for JSON without a schema."""
    if schema is None:
        return AnswerForm((_whole({}, "json"),))
    definitions = schema.get("$defs")
    known = definitions if isinstance(definitions, dict) else {}
    top = _resolved(schema, known)
    constants, others = _split(top, known)
    if constants and len(others) <= 1 and len(constants) <= _MAX_BUTTONS:
        fields = _fields(others[0], known) if others else ()
        return AnswerForm(fields, tuple(constants), schema=schema)
    return AnswerForm(_fields(top, known), schema=schema)


def with_problems(form: AnswerForm, texts: Sequence[str]) -> AnswerForm:
    """Return a form with what is wrong with its answer: each text has the path of its value, from `answer`."""
    fields, problems = list(form.fields), list(form.problems)
    for text in texts:
        where, _, message = text.partition(": ")
        for at, known in enumerate(fields):
            path = "answer" if known.property is None else f"answer.{known.property}"
            if where == path or where.startswith(f"{path}."):
                inside = where.removeprefix(path).removeprefix(".")
                fields[at] = replace(known, problem=known.problem or (f"{inside}: {message}" if inside else message))
                break
        else:
            problems.append(text.removeprefix("answer: "))
    return replace(form, fields=tuple(fields), problems=tuple(problems))


def read_answer(form: AnswerForm, submitted: Mapping[str, str]) -> Any:
    """Return the answer of a submitted form.

    Raises:
        InvalidForm: It does not fit.
    """
    if (chosen := submitted.get(CHOSEN)) is not None and any(chosen == option.value for option in form.buttons):
        return from_json(chosen)
    values: dict[str | None, Any] = {}
    fields: list[AnswerField] = []
    for known in form.fields:
        text = submitted.get(known.name, "")
        filled = replace(known, value=text, problem="")
        try:
            if (value := _value(known, text)) is not _LEFT_OUT:
                values[known.property] = value
                filled = replace(filled, problem=_problem(form, known, value))
        except ValueError as error:
            filled = replace(filled, problem=str(error))
        fields.append(filled)
    filled_form = replace(form, fields=tuple(fields), problems=())
    if not form.fields:
        labels = " or ".join(option.label for option in form.buttons)
        raise InvalidForm(replace(filled_form, problems=(f"choose {labels}",)))
    if filled_form.invalid:
        raise InvalidForm(filled_form)
    answer = values[None] if form.fields[0].property is None else values
    if form.schema is not None:
        checked = with_problems(filled_form, answer_problems(dict(form.schema), as_json(answer)))
        if checked.invalid:
            raise InvalidForm(checked)
    return answer


def _problem(form: AnswerForm, known: AnswerField, value: Any) -> str:
    """Return what is wrong with the value of a field; empty if it fits."""
    definitions = (form.schema or {}).get("$defs")
    schema = dict(known.schema) if definitions is None else {**known.schema, "$defs": definitions}
    found = answer_problems(schema, as_json(value))
    return found[0].removeprefix("answer: ").removeprefix("answer.") if found else ""


class _LeftOut:
    """Value of a field that is left out of the answer."""


_LEFT_OUT: Final = _LeftOut()


def _value(known: AnswerField, text: str) -> Any:
    """Return the value of a field. Raises `ValueError` with what is wrong."""
    absent = _LEFT_OUT if not known.required else None
    if known.kind in ("text", "long_text"):
        may_be_absent = known.nullable or (not known.required and known.schema.get("default") in (None, ""))
        return text if text or not may_be_absent else absent
    text = text.strip()
    if text:
        return _READERS.get(known.kind, _read_option)(known, text)
    if known.required and not known.nullable:
        raise ValueError("choose one" if known.options else "give a value")
    return absent


def _read_integer(_: AnswerField, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"must be a whole number, got {shortened(text, 40)!r}")
    return int(text)


def _read_number(known: AnswerField, text: str) -> int | float:
    if _INTEGER.fullmatch(text):
        return _read_integer(known, text)
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"must be a number such as 1.50, got {shortened(text, 40)!r}")
    value = float(text)
    if isinf(value):
        raise ValueError(f"must be a number below 1e308, got {shortened(text, 40)!r}")
    return value


def _read_date(_: AnswerField, text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"must be a date such as 2026-11-27, got {shortened(text, 40)!r}") from None


def _read_json(_: AnswerField, text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from None


def _read_option(known: AnswerField, text: str) -> Any:
    if all(text != option.value for option in known.options):
        raise ValueError("must be one of the values of the list")
    return from_json(text)


_READERS: Final[Mapping[AnswerKind, Callable[[AnswerField, str], Any]]] = {
    "integer": _read_integer,
    "number": _read_number,
    "date": _read_date,
    "json": _read_json,
}


def _fields(schema: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[AnswerField, ...]:
    """Return the fields of a type: one per property of an object, or one for the whole."""
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, dict) or not 0 < len(properties) <= _MAX_FIELDS:
        made = _field("f0", None, schema, known, required=True)
        return (replace(made, label=made.label or "Answer"),)
    needed = schema.get("required")
    required = set(needed) if isinstance(needed, list) else set()
    return tuple(
        _field(f"f{number}", name, inner if isinstance(inner, dict) else {}, known, required=name in required)
        for number, (name, inner) in enumerate(properties.items())
    )


def _whole(schema: Mapping[str, Any], kind: AnswerKind) -> AnswerField:
    return AnswerField("f0", None, "Answer", kind, required=True, hint=_HINTS.get(kind, ""), schema=schema)


def _field(
    name: str, prop: str | None, declared: Mapping[str, Any], known: Mapping[str, Any], *, required: bool
) -> AnswerField:
    """Return the field of a property. prop: None for the whole answer."""
    inner, nullable = _without_null(_resolved(declared, known), known)
    kind, options = _kind(inner, known)
    title = declared.get("title", inner.get("title") if prop is None else None)
    label = title if isinstance(title, str) and title else (prop or "").replace("_", " ").capitalize()
    described = declared.get("description", inner.get("description"))
    default = declared.get("default", inner.get("default"))
    return AnswerField(
        name,
        prop,
        shortened(label, _MAX_LABEL),
        kind,
        required,
        nullable,
        shortened(described, _MAX_HELP) if isinstance(described, str) else "",
        _hint(kind, inner),
        options,
        _shown(kind, default),
        schema=dict(declared),
    )


def _kind(schema: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[AnswerKind, tuple[AnswerOption, ...]]:
    """Return the kind of field for a type, and the values of a choice."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and 0 < len(values) <= _MAX_CHOICES:
        return "choice", tuple(map(_option, values))
    kind = schema.get("type")
    if kind == "boolean":
        return "boolean", _YES_NO
    if kind == "string":
        return _text_kind(schema), ()
    if kind in ("integer", "number"):
        return ("integer" if kind == "integer" else "number"), ()
    kinds = [_resolved(one, known).get("type") for one in _alternatives(schema) if isinstance(one, dict)]
    is_decimal = "string" in kinds and all(one in ("string", "number", "integer") for one in kinds)
    return ("text" if is_decimal else "json"), ()


def _text_kind(schema: Mapping[str, Any]) -> AnswerKind:
    if schema.get("format") == "date":
        return "date"
    length = schema.get("maxLength")
    return "text" if "format" in schema or (isinstance(length, int) and length <= _LINE) else "long_text"


def _option(value: Any) -> AnswerOption:
    text = as_json(value).decode()
    label = (
        value if isinstance(value, str) and value else {"true": "Yes", "false": "No", "null": "None"}.get(text, text)
    )
    return AnswerOption(text, shortened(label, _MAX_LABEL))


_LABELS: Final = {"true": "Yes", "false": "No", "null": "None"}


def _hint(kind: AnswerKind, schema: Mapping[str, Any]) -> str:
    """Return a text about the form of a value and its limits."""
    limits = [f"{words} {schema[name]:g}" for name, words in _LIMITS if isinstance(schema.get(name), int | float)]
    limited = f"{', '.join(limits)}.".capitalize() if limits else ""
    return " ".join(text for text in (_HINTS.get(kind, ""), limited) if text)


def _shown(kind: AnswerKind, default: Any) -> str:
    if default is None:
        return ""
    if kind in ("text", "long_text", "date") and isinstance(default, str):
        return default
    return as_json(default).decode()


def _resolved(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in place of a reference to one of the definitions. What cannot be followed stays as it is."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/$defs/"):
            break
        found = known.get(reference.removeprefix("#/$defs/"))
        if not isinstance(found, dict):
            break
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("anyOf", schema.get("oneOf"))
    return found if isinstance(found, list) else []


def _without_null(schema: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the schema of a value that is not null, and whether null fits."""
    alternatives = [_resolved(one, known) for one in _alternatives(schema) if isinstance(one, dict)]
    others = [one for one in alternatives if one.get("type") != "null"]
    if len(others) == len(alternatives):
        return schema, False
    return (others[0] if len(others) == 1 else {**schema, "anyOf": others}), True


def _split(schema: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[list[AnswerOption], list[Mapping[str, Any]]]:
    """Return the constants that fit a schema, and what else does."""
    constants: list[AnswerOption] = []
    others: list[Mapping[str, Any]] = []
    for one in _alternatives(schema) or [schema]:
        inner = _resolved(one, known) if isinstance(one, dict) else {}
        values = inner.get("enum", [inner["const"]] if "const" in inner else None)
        if isinstance(values, list):
            constants += map(_option, values)
        elif inner.get("type") == "boolean":
            constants += _YES_NO
        elif inner.get("type") == "null":
            constants.append(_option(None))
        else:
            others.append(inner)
    return constants, others

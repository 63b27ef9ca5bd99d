"""Types whose values JSON keeps as they are, and types whose values cannot be read back. Pure functions of a schema.

What a run stores, a later run reads. So what the first run continues with must be what the stored bytes decode to: a
`Decimal` in a `dict[str, Any]` is text after a resume, and a subclass is its base. Of a closed type the bytes decode to
an equal value, so that nothing needs to be decoded.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import CoreSchema, from_json

__all__ = ["has_functions", "has_models", "is_closed", "is_same", "large_integer", "losses", "unreadable_part"]

_PLAIN: Final = frozenset({"str", "int", "float", "bool", "none"})
"""Schemas of plain values. NaN and infinities are stored by name, and a declared float reads them back."""

_NEUTRAL: Final = frozenset({"type", "metadata", "ref", "strict"})
"""Keys of a schema that change no value and refuse none that was stored."""

_NO_KEY: Final = {
    "tuple": "a tuple",
    "list": "a list",
    "set": "a set",
    "frozenset": "a frozenset",
    "dict": "a dict",
    "model": "a model",
    "dataclass": "a dataclass",
    "typed-dict": "a TypedDict",
}
"""Types of keys that are text in JSON, and that their validators do not read from text."""

_FUNCTIONS: Final = ("function-before", "function-wrap", "function-plain")


def is_closed(schema: CoreSchema) -> bool:
    """Return whether each value of a type is equal to what its JSON decodes to, and whether that always fits the type.

    Models are not closed: a value of a subclass is read back as the declared class. Neither is a type with constraints:
    the fields of a state are not checked when they are set.
    """
    return _is_closed(schema)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    kind = schema["type"]
    if kind in _PLAIN:
        return schema.keys() <= _NEUTRAL
    if kind in ("nullable", "default"):
        return "serialization" not in schema and not schema.get("validate_default") and _is_closed(schema["schema"])
    if kind == "list":
        return schema.keys() <= _NEUTRAL | {"items_schema"} and _is_closed(schema.get("items_schema", _ANY))
    if kind == "dict":
        return (
            schema.keys() <= _NEUTRAL | {"keys_schema", "values_schema"}
            and schema.get("keys_schema", _ANY)["type"] == "str"
            and _is_closed(schema["keys_schema"])
            and _is_closed(schema.get("values_schema", _ANY))
        )
    if kind == "literal":
        return schema.keys() <= _NEUTRAL | {"expected"} and all(
            type(value) in (str, int, bool) for value in schema["expected"]
        )
    return False


_ANY: Final[Mapping[str, Any]] = {"type": "any"}


def has_functions(schema: CoreSchema) -> bool:
    """Return whether functions of the program check or change values of a type, or parts of them."""
    return any(part["type"].startswith("function-") for part in _parts(schema, of_functions=True))


def has_models(schema: CoreSchema) -> bool:
    """Return whether values of a type have models or dataclasses in them."""
    return any(part["type"] in ("model", "dataclass") for part in _parts(schema, of_functions=True))


def unreadable_part(schema: CoreSchema) -> str | None:
    """Return which part of a type is certainly not read back from its JSON, and the remedy; None if none is known."""
    return next((problem for part in _parts(schema) if (problem := _problem(part)) is not None), None)


def _problem(schema: Mapping[str, Any]) -> str | None:
    kind = schema["type"]
    if kind == "dict":
        key = _inner(schema.get("keys_schema", _ANY))["type"]
        return (
            None if key not in _NO_KEY else f"a key of a JSON object is text, and not {_NO_KEY[key]}; use text as keys"
        )
    fields: Mapping[str, Any] | list[Any] = schema.get("fields", ())
    if kind == "model-fields" and isinstance(fields, Mapping):
        excluded = [name for name, field in fields.items() if _is_lost(field)]
        owner = schema.get("model_name", "")
    elif kind == "dataclass-args" and isinstance(fields, list):
        excluded = [field["name"] for field in fields if _is_lost(field)]
        owner = schema.get("dataclass_name", "")
    else:
        return None
    if not excluded:
        return None
    return f"field {excluded[0]!r} of {owner} is excluded from what is stored and has no default; give it one"


def _is_lost(field: Mapping[str, Any]) -> bool:
    """Return whether a field is never written, and cannot be missing."""
    return bool(field.get("serialization_exclude")) and field.get("init", True) and field["schema"]["type"] != "default"


def _inner(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema below wrappers."""
    while schema["type"] in ("nullable", "default"):
        schema = schema["schema"]
    return schema


def _parts(schema: object, *, of_functions: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it.

    of_functions: also those of values that a function of the program serialises or reads.
    """
    if isinstance(schema, Mapping):
        if isinstance(schema.get("type"), str):
            if not of_functions and ("serialization" in schema or schema["type"] in _FUNCTIONS):
                return
            yield schema
        for name, part in schema.items():
            if name not in ("metadata", "serialization", "default", "expected"):
                yield from _parts(part, of_functions=of_functions)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _parts(part, of_functions=of_functions)


def losses(value: Any, read: Any) -> Iterator[str]:
    """Yield what a value has that its JSON does not: fields of a subclass, private attributes, excluded fields."""
    if isinstance(value, BaseModel) and isinstance(read, BaseModel):
        fields = type(value).model_fields
        lost = [name for name in fields if name not in type(read).model_fields]
        lost += [name for name, field in fields.items() if field.exclude and not _is_same_part(value, read, name)]
        private, other = value.__pydantic_private__ or {}, read.__pydantic_private__ or {}
        lost += [name for name, part in private.items() if name not in other or not is_same(part, other[name])]
        yield from _lost(value, read, lost)
        for name in fields.keys() & type(read).model_fields.keys():
            yield from losses(getattr(value, name, None), getattr(read, name, None))
    elif _is_dataclass(value) and _is_dataclass(read):
        known = {field.name for field in dataclasses.fields(read)}
        names = [(field.name, field.init) for field in dataclasses.fields(value)]
        lost = [name for name, init in names if name not in known or not (init or _is_same_part(value, read, name))]
        yield from _lost(value, read, lost)
        for name in [name for name, _ in names if name in known]:
            yield from losses(getattr(value, name, None), getattr(read, name, None))
    elif isinstance(value, Mapping) and isinstance(read, Mapping):
        for part, other in zip(value.values(), read.values(), strict=False):
            yield from losses(part, other)
    elif isinstance(value, list | tuple) and isinstance(read, list | tuple):
        for part, other in zip(value, read, strict=False):
            yield from losses(part, other)


def _lost(value: object, read: object, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{type(value).__name__} is read as {type(read).__name__}, without {', '.join(sorted(names))}"


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_same_part(value: object, read: object, name: str) -> bool:
    """Return whether two objects have the same value under a name."""
    return is_same(getattr(value, name, None), getattr(read, name, None))


def is_same(value: Any, read: Any) -> bool:
    """Return whether two values are of the same types and equal, where NaN is equal to itself."""
    return type(value) is type(read) and _is_same(value, read)


def _is_same(value: Any, read: Any) -> bool:  # noqa: PLR0911 - one for each kind of value
    if isinstance(value, BaseModel):
        return is_same(value.__dict__, read.__dict__) and is_same(value.__pydantic_extra__, read.__pydantic_extra__)
    if isinstance(value, Mapping):
        return value.keys() == read.keys() and all(is_same(part, read[key]) for key, part in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(read) and all(map(is_same, value, read))
    if _is_dataclass(value):
        return all(_is_same_part(value, read, field.name) for field in dataclasses.fields(value))
    if isinstance(value, datetime):  # equal times may be in different zones
        return bool(value == read and value.tzinfo == read.tzinfo)
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(read)
    return bool(value == read)


_DIGITS: Final = re.compile(rb"\d{19}")
"""Digits that an integer of more than 64 bits has at least."""


def large_integer(data: bytes) -> str | None:
    """Return the beginning of an integer of more than 64 bits in JSON, None if there is none.

    Such a number is read as a float, and one of more than 4,300 digits not at all.
    """
    if _DIGITS.search(data) is None:
        return None
    try:
        found = _first_large(from_json(data))
    except ValueError as error:  # of more digits than Python reads
        return str(error)
    return None if found is None else f"{str(found)[:30]}..."


def _first_large(value: Any) -> int | None:
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for part in parts if (found := _first_large(part)) is not None), None)

"""JSON form of values that are stored: what JSON or UTF-8 cannot express.

| value | stored as | read as |
|---|---|---|
| NaN, Infinity, -Infinity | the string of this name | the number where the declared type is float, else the string |
| half of a surrogate pair, such as `\\ud83d` | U+FFFD | U+FFFD |
| a part that is nested deeper than 200 levels, if all of it cannot be encoded | its JSON as text | text |

Models of languages return all of these. What they returned is paid for, so it is stored in this form and not refused.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

__all__ = ["as_json", "encodable", "is_encodable_otherwise"]

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_DEEPEST: Final = 200
"""Levels that stay of a value that cannot be encoded. Encoders take some 250, and some functions of Python need several
frames for each."""


def as_json(value: Any) -> bytes:
    """Return a value as JSON. Raises `PydanticSerializationError`, `ValueError` and `RecursionError`."""
    try:
        return to_json(value, inf_nan_mode="strings")
    except PydanticSerializationError as error:
        if not is_encodable_otherwise(error):
            raise
        return to_json(encodable(value), inf_nan_mode="strings")


def is_encodable_otherwise(error: Exception) -> bool:
    """Return whether a value that could not be serialised can be as `encodable` returns it."""
    text = str(error)
    return "surrogates not allowed" in text or "serialization depth" in text


def encodable(value: Any, *, depth: int = _DEEPEST) -> Any:  # noqa: PLR0911 - one for each kind of value
    """Return a value without half surrogate pairs, and without parts that are nested too deeply.

    The same object if it has none. depth: levels that stay.
    """
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if not value.isascii() and _SURROGATE.search(value) else value
    if isinstance(value, BaseModel):
        changed = _changed(dict(value), depth)
        return value.model_copy(update=changed) if changed else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = _changed({field.name: getattr(value, field.name) for field in fields(value)}, depth)
        return _with(value, changed) if changed else value
    if not isinstance(value, Mapping | list | tuple | Set):
        return value
    if depth == 0:
        return _text(value)
    if isinstance(value, Mapping):
        keys = [encodable(key) for key in value]
        parts = [encodable(part, depth=depth - 1) for part in value.values()]
        is_same = all(key is other for key, other in zip(value, keys, strict=True))
        is_same = is_same and all(part is other for part, other in zip(value.values(), parts, strict=True))
        return value if is_same else dict(zip(keys, parts, strict=True))
    parts = [encodable(part, depth=depth - 1) for part in value]
    if all(part is other for part, other in zip(value, parts, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # type: ignore[call-arg]


def _changed(parts: dict[str, Any], depth: int) -> dict[str, Any]:
    found = {name: encodable(part, depth=max(0, depth - 1)) for name, part in parts.items()}
    return {name: part for name, part in found.items() if part is not parts[name]}


def _with(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with other values, also of a frozen one."""
    other = copy.copy(value)
    for name, part in changed.items():
        object.__setattr__(other, name, part)
    return other


def _text(value: Any) -> str:
    """Return a part that is nested too deeply as text."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    except (RecursionError, ValueError):
        return "(nested too deeply)"
    return _SURROGATE.sub("\ufffd", text)

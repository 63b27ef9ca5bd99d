"""JSON form of values that are stored: numbers and characters that JSON or UTF-8 do not have.

| value | stored as | read as |
|---|---|---|
| NaN, Infinity, -Infinity | the string of this name | the number where the declared type is float, else the string |
| half of a surrogate pair, such as `\\ud83d` | U+FFFD | U+FFFD |

Models of languages return both. What they returned is paid for, so it is stored in this form and not refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

__all__ = ["as_json", "has_surrogates", "without_surrogates"]

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def as_json(value: Any) -> bytes:
    """Return a value as JSON. Raises `PydanticSerializationError`, `ValueError` and `RecursionError`."""
    try:
        return to_json(value, inf_nan_mode="strings")
    except PydanticSerializationError as error:
        if not has_surrogates(error):
            raise
        return to_json(without_surrogates(value), inf_nan_mode="strings")


def has_surrogates(error: Exception) -> bool:
    """Return whether a value could not be serialised because of half a surrogate pair."""
    return "surrogates not allowed" in str(error)


def without_surrogates(value: Any) -> Any:
    """Return a value with U+FFFD in place of each half of a surrogate pair; the same object if it has none."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if not value.isascii() and _SURROGATE.search(value) else value
    if isinstance(value, Mapping):
        found = {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
        is_same = all(key is other and value[key] is found[key] for key, other in zip(value, found, strict=False))
        return value if is_same and len(found) == len(value) else found
    if isinstance(value, list | tuple | Set):
        parts = [without_surrogates(part) for part in value]
        if all(part is other for part, other in zip(value, parts, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, BaseModel):
        changed = _changed(dict(value))
        return value.model_copy(update=changed) if changed else value
    if is_dataclass(value) and not isinstance(value, type):
        if not (changed := _changed({field.name: getattr(value, field.name) for field in fields(value)})):
            return value
        other = copy.copy(value)
        for name, part in changed.items():
            object.__setattr__(other, name, part)
        return other
    return value


def _changed(parts: dict[str, Any]) -> dict[str, Any]:
    clean = {name: without_surrogates(part) for name, part in parts.items()}
    return {name: part for name, part in clean.items() if part is not parts[name]}

"""JSON of values without a declared type, and what of them JSON cannot carry.

JSON has no NaN, no infinities, and no text with lone surrogates, which the half of an emoji is. A number becomes its
name (`"NaN"`, `"Infinity"`, `"-Infinity"`), which a declared `float` reads as the number again. A lone surrogate
becomes U+FFFD. Arguments, results, steps, messages, states and events follow this rule.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from typing import Any, Final

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

__all__ = ["encodable", "is_exact", "plain_json"]

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_REPLACEMENT: Final = "\ufffd"
_REPLACED: Final = _REPLACEMENT.encode()

_NAMES: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

_MAX_DIGITS: Final = 4_300
"""Digits of the largest integer that is read back: `sys.int_info.default_max_str_digits`."""


def plain_json(value: Any) -> bytes:
    """Return a value as JSON.

    Raises `PydanticSerializationError`, `ValueError`, `RecursionError`.
    """
    try:
        return to_json(value, inf_nan_mode="strings")
    except PydanticSerializationError:
        return to_json(encodable(to_jsonable_python(value)), inf_nan_mode="strings")


def encodable(value: Any) -> Any:
    """Return plain data with U+FFFD in place of lone surrogates, and the names of numbers that JSON does not have."""
    if isinstance(value, str):
        return value if value.isascii() else _LONE_SURROGATE.sub(_REPLACEMENT, value)
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES[str(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encodable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(item) for item in value]
    return value


def is_exact(data: bytes) -> bool:
    """Return whether texts, whole numbers and finite floats are read back from their JSON as they were written."""
    return len(data) <= _MAX_DIGITS and _REPLACED not in data

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
import math
import re
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, from_json, to_json

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_REPLACED: Final = "\ufffd".encode()

_NAMES: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

_MAX_DIGITS: Final = 4_300
"""Digits of the largest integer that is read back: `sys.int_info.default_max_str_digits`."""

_DEEPEST: Final = 200
"""Levels that stay of a value that cannot be encoded. Encoders take some 250, and some functions of Python need several
frames for each."""


def finite_json(value: Any, what: str) -> bytes:
    """Return decoded JSON as JSON. what: its name, for the error.

    Raises:
        ValueError: A number was too large for a float, such as 1e999.
    """
    data = to_json(value)
    if b"Infinity" in data:
        try:
            from_json(data, allow_inf_nan=False)
        except ValueError:
            raise ValueError(f"{what} must have no numbers beyond 1.8e308, such as 1e999") from None
    return data


def as_json(value: Any) -> bytes:
    """Return a value as JSON. Raises `PydanticSerializationError`, `ValueError` and `RecursionError`."""
    try:
        return to_json(value, inf_nan_mode="strings")
    except PydanticSerializationError as error:
        if not is_encodable_otherwise(error):
            raise
        return to_json(encodable(value), inf_nan_mode="strings")


def is_exact(data: bytes) -> bool:
    """Return whether texts, whole numbers and finite floats are read back from their JSON as they were written."""
    return len(data) <= _MAX_DIGITS and _REPLACED not in data


def is_too_deep(error: ValueError) -> bool:
    """Return whether JSON could not be read because it is nested too deeply: it is written more deeply than read."""
    return "recursion limit" in str(error)


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


def named_numbers(value: Any) -> Any:
    """Return plain data with the names of NaN and infinities in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES[str(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: named_numbers(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: named_numbers(part) for key, part in value.items()}
    return [named_numbers(part) for part in value] if isinstance(value, list | tuple) else value


def lost_number(arguments: Mapping[str, Any], data: bytes) -> str | None:
    """Return the path of a NaN or an infinity that became null in JSON, which has no such number."""
    return _lost_number(arguments, from_json(data)) if b"null" in data else None


_FINITE: Final = json.JSONEncoder(allow_nan=False, check_circular=False)
"""Raises `ValueError` for a NaN or an infinity, and `TypeError` for what is no plain data."""


def _is_finite(value: object) -> bool:
    """Return whether a value is plain data without a NaN or an infinity, far faster than a walk through it."""
    try:
        _FINITE.encode(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _lost_number(value: object, stored: object) -> str | None:
    if isinstance(value, float):
        return "" if stored is None and not math.isfinite(value) else None
    if isinstance(value, BaseModel):
        value = dict(value)
    elif not isinstance(value, (dict, list)) and is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, (dict, list)) and _is_finite(value):
        return None
    if isinstance(value, Mapping) and isinstance(stored, dict):
        members = [(str(key), item, stored.get(str(key))) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and isinstance(stored, list):
        members = [(str(at), item, kept) for at, (item, kept) in enumerate(zip(value, stored, strict=False))]
    else:
        return None
    found = ((key, _lost_number(item, kept)) for key, item, kept in members)
    return next((f"{key}.{rest}".rstrip(".") for key, rest in found if rest is not None), None)


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


_LONG: Final = re.compile(rb"\d{19}")
"""Digits that an integer of more than 64 bits has at least."""


def large_integer(data: bytes) -> str | None:
    """Return the beginning of an integer of more than 64 bits in JSON; None without one.

    Such a number is read as a float, and one of more than 4,300 digits not at all.
    """
    if _LONG.search(data) is None:
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


def merged(data: bytes, patch: bytes) -> bytes:
    """Return a JSON document with a JSON merge patch applied (RFC 7396). Raises `ValueError`.

    Large integers stay exact.
    """
    return to_json(_merged(from_json(data), from_json(patch)))


def _merged(data: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    found = dict(data) if isinstance(data, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = _merged(found.get(name), value)
    return found

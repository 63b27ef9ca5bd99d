"""Secrets of pydantic (`SecretStr`, `SecretBytes`, `Secret`) as JSON: whole, and with the marks of where they are.

pydantic writes a secret as asterisks into JSON, so that it is not shown by mistake. A handler needs the value itself:
it is put in its place again, found by going through the value and its JSON form side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from pydantic import BaseModel, RootModel, Secret, SecretBytes, SecretStr
from pydantic_core import to_jsonable_python

from .marks import ANY, MASK, Mark, Marks, bounded

__all__ = ["SECRET", "has_secret", "reveal", "shows_mask"]

SECRET: Final = (SecretStr, SecretBytes, Secret)


def has_secret(schema: Any) -> bool:
    """Whether a core schema of pydantic has a secret anywhere in it."""
    left, seen = [schema], set()
    while left:
        part = left.pop()
        if isinstance(part, type):
            if issubclass(part, SECRET):
                return True
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            left += part.values() if isinstance(part, dict) else part
    return False


def reveal(value: Any, shown: Any) -> tuple[Any, Marks]:
    """The JSON form of a value with its secrets in place, and where they are. shown: the form with asterisks.

    Raises `ValueError` for secret bytes that are not UTF-8, which JSON cannot carry.
    """
    marks: dict[Mark, None] = {}
    data = _reveal(value, shown, (), marks)
    return data, bounded(list(marks))


def _reveal(value: Any, shown: Any, path: Mark, marks: dict[Mark, None]) -> Any:
    if isinstance(value, SECRET):
        inner = value.get_secret_value()
        if inner is not None:
            marks[path] = None
        return _reveal(inner, to_jsonable_python(inner), path, marks)
    if isinstance(value, RootModel):
        return _reveal(value.root, shown, path, marks)
    if isinstance(shown, dict):
        return _members(value, shown, path, marks)
    if isinstance(shown, list) and isinstance(value, Sequence | AbstractSet) and len(shown) == len(value):
        return [_reveal(one, seen, (*path, ANY), marks) for one, seen in zip(value, shown, strict=True)]
    return shown


def _members(value: Any, shown: dict[str, Any], path: Mark, marks: dict[Mark, None]) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        aliases = {name: field.serialization_alias or field.alias or name for name, field in fields.items()}
        members = {name: getattr(value, name) for name in fields} | (value.model_extra or {})
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        aliases = {}
        members = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    elif isinstance(value, Mapping) and len(value) == len(shown):
        whole = isinstance(value, dict) and not path  # the arguments themselves, which are known by their names
        return {
            name: _reveal(one, seen, (*path, name if whole else ANY), marks)
            for (name, seen), one in zip(shown.items(), value.values(), strict=True)
        }
    else:
        return shown
    revealed = dict(shown)
    for name, one in members.items():
        key = name if name in shown else aliases.get(name, name)
        if key in shown:
            revealed[key] = _reveal(one, shown[key], (*path, key), marks)
    return revealed


def shows_mask(data: bytes) -> bool:
    """Whether JSON may hold a secret as asterisks."""
    return _MASKED in data


_MASKED: Final = MASK.encode()

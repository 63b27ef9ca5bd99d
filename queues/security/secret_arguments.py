"""Where the secrets are within a task's arguments, and what is shown in their place.

The envelope says so (`secrets`), since whoever looks at a task from outside has no handler code and cannot know. A mark
is a path of names from the arguments' object down; `*` stands for every item of an array or member of an object.

Secrets of pydantic (`SecretStr`, `SecretBytes`, `Secret`) as JSON: whole, and with the marks of where they are.

pydantic writes a secret as asterisks into JSON, so that it is not shown by mistake. A handler needs the value itself:
it is put in its place again, found by going through the value and its JSON form side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import orjson
from pydantic import BaseModel, RootModel, Secret, SecretBytes, SecretStr
from pydantic_core import from_json, to_json, to_jsonable_python

__all__ = [
    "ANY",
    "DEEPEST",
    "EVERYTHING",
    "MASK",
    "MOST_MARKS",
    "SECRET",
    "Mark",
    "SecretPaths",
    "bounded",
    "contains_mask",
    "has_secret",
    "marked_values",
    "mask",
    "read_secret_paths",
    "restore_masked",
    "unwrap_secrets",
]

Mark = tuple[str, ...]
SecretPaths = tuple[Mark, ...]

MASK: Final = "**********"
"""As pydantic shows a secret."""

ANY: Final = "*"

EVERYTHING: Final[SecretPaths] = ((),)
"""The whole of the arguments."""

MOST_MARKS: Final = 100
DEEPEST: Final = 30
"""Names in a mark: what lies deeper is hidden with what it is in."""


def read_secret_paths(envelope: bytes) -> SecretPaths:
    """The marks in an envelope that may be of a version that cannot be read otherwise."""
    try:
        found = orjson.loads(envelope).get("secrets", ())
        return bounded([tuple(str(name) for name in mark) for mark in found])
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return ()


def bounded(marks: Sequence[Mark]) -> SecretPaths:
    """Marks that an envelope can carry, which hide as much or more."""
    if len(marks) > MOST_MARKS:
        return EVERYTHING
    return tuple(dict.fromkeys(mark[:DEEPEST] for mark in marks))


def mask(arguments: bytes, marks: SecretPaths) -> bytes:
    """The arguments as they may be shown. What is no JSON, or is nested too deeply, is hidden as a whole."""
    if not marks:
        return arguments
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return orjson.dumps(MASK)
    for mark in marks:
        data = _replace(data, mark, lambda value: value if value is None else MASK)
    try:
        return orjson.dumps(data)
    except TypeError:  # JSON is read deeper than it is written
        return orjson.dumps(MASK)


def restore_masked(edited: bytes, former: Callable[[], bytes], marks: SecretPaths) -> bytes:
    """Edited arguments, in which what is hidden stands for the former value: who edits sees no more than that.

    former: the arguments before, asked for where they are needed.
    """
    if not marks or MASK.encode() not in edited:
        return edited
    try:  # large numbers stay what they are
        data, before = from_json(edited), from_json(former())
        for mark in marks:
            data = _fill(data, before, mark)
        return to_json(data)
    except ValueError:
        return edited


def marked_values(arguments: bytes, marks: SecretPaths) -> list[str]:
    """The secrets among the arguments, as text."""
    found: list[str] = []
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return found
    for mark in marks:
        for value in _at(data, mark):
            found += _texts(value)
    return found


def _replace(data: Any, mark: Sequence[str], change: Callable[[Any], Any]) -> Any:
    if not mark:
        return change(data)
    name, rest = mark[0], mark[1:]
    if isinstance(data, dict):
        return {key: _replace(value, rest, change) if name in (ANY, key) else value for key, value in data.items()}
    if isinstance(data, list) and name == ANY:
        return [_replace(value, rest, change) for value in data]
    return data


def _fill(data: Any, before: Any, mark: Sequence[str]) -> Any:
    if not mark:
        return before if data == MASK else data
    name, rest = mark[0], mark[1:]
    if isinstance(data, dict) and isinstance(before, dict):
        return {
            key: _fill(value, before[key], rest) if name in (ANY, key) and key in before else value
            for key, value in data.items()
        }
    if isinstance(data, list) and isinstance(before, list) and name == ANY:
        kept = [_fill(value, former, rest) for value, former in zip(data, before, strict=False)]
        return kept + data[len(kept) :]
    return data


def _at(data: Any, mark: Sequence[str]) -> Iterator[Any]:
    if not mark:
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            if mark[0] in (ANY, key):
                yield from _at(value, mark[1:])
    elif isinstance(data, list) and mark[0] == ANY:
        for value in data:
            yield from _at(value, mark[1:])


def _texts(value: Any) -> Iterator[str]:
    """Every text and number within a secret value, however deep it is."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += reversed(one.values())
        elif isinstance(one, list):
            left += reversed(one)
        elif one is not None and not isinstance(one, bool):
            yield str(one)


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


def unwrap_secrets(value: Any, shown: Any) -> tuple[Any, SecretPaths]:
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


def contains_mask(data: bytes) -> bool:
    """Whether JSON may hold a secret as asterisks."""
    return _MASKED in data


_MASKED: Final = MASK.encode()

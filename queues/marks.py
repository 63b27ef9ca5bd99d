"""Where the secrets are within a task's arguments, and what is shown in their place.

The envelope says so (`secrets`), since whoever looks at a task from outside has no handler code and cannot know. A mark
is a path of names from the arguments' object down; `*` stands for every item of an array or member of an object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import orjson
from pydantic_core import from_json, to_json

__all__ = [
    "ANY",
    "DEEPEST",
    "EVERYTHING",
    "MASK",
    "MOST_MARKS",
    "Mark",
    "Marks",
    "bounded",
    "hide",
    "keep_hidden",
    "marked_values",
    "read_marks",
]

Mark = tuple[str, ...]
Marks = tuple[Mark, ...]

MASK: Final = "**********"
"""As pydantic shows a secret."""

ANY: Final = "*"

EVERYTHING: Final[Marks] = ((),)
"""The whole of the arguments."""

MOST_MARKS: Final = 100
DEEPEST: Final = 30
"""Names in a mark: what lies deeper is hidden with what it is in."""


def read_marks(envelope: bytes) -> Marks:
    """The marks in an envelope that may be of a version that cannot be read otherwise."""
    try:
        found = orjson.loads(envelope).get("secrets", ())
        return bounded([tuple(str(name) for name in mark) for mark in found])
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return ()


def bounded(marks: Sequence[Mark]) -> Marks:
    """Marks that an envelope can carry, which hide as much or more."""
    if len(marks) > MOST_MARKS:
        return EVERYTHING
    return tuple(dict.fromkeys(mark[:DEEPEST] for mark in marks))


def hide(arguments: bytes, marks: Marks) -> bytes:
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


def keep_hidden(edited: bytes, former: Callable[[], bytes], marks: Marks) -> bytes:
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


def marked_values(arguments: bytes, marks: Marks) -> list[str]:
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

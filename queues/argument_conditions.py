"""Conditions on the arguments of tasks, as operators give them: `tenant=acme`, `options.depth=3`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

MAX_CONDITION: Final = 1024
"""Most characters of a condition."""

_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class ArgumentCondition:
    """A condition on one argument.

    Attributes:
        path: Name of the argument, then names of fields of its value.
        text: What the argument must be: that text, or the JSON value that the text stands for.
    """

    path: tuple[str, ...]
    text: str

    @classmethod
    def parse(cls, given: str) -> ArgumentCondition:
        """Parse `NAME=VALUE` or `NAME.FIELD=VALUE`. Raises `ValueError`."""
        name, equals, text = given.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise ValueError(f"must be NAME=VALUE, such as tenant=acme or options.depth=3, got {given!r}")
        if len(given) > MAX_CONDITION:
            raise ValueError(f"must have at most {MAX_CONDITION:,} characters, got {len(given):,}")
        return cls(path, text)

    def matches(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether a task with these arguments, JSON data by name, fulfils the condition."""
        found: Any = arguments
        for name in self.path:
            found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
        if found is _MISSING:
            return False
        if isinstance(found, str) and found == self.text:
            return True
        try:
            value = from_json(self.text)
        except ValueError:
            return False
        return isinstance(found, bool) == isinstance(value, bool) and bool(found == value)

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}={self.text}"


def all_match(conditions: Iterable[ArgumentCondition], arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments fulfil all conditions."""
    return all(condition.matches(arguments) for condition in conditions)

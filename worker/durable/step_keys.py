"""Keys of a run's steps: their numbering and nesting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...queues import Entry, History, Kind

__all__ = ["StepKeys", "forget_steps"]


class StepKeys:
    """Keys that one run has given out. scope: prefix of the keys of nested steps."""

    __slots__ = ("_names", "scope")

    def __init__(self) -> None:
        self.scope = ""
        self._names: dict[str, int] = {}

    @property
    def within(self) -> str | None:
        """Key of the step that encloses the steps called now; None at the top level."""
        return self.scope.rstrip("/") or None

    def next(self, name: str) -> str:
        """Return the key of the next step of this name: `read`, `read#2`, `read#3`, in the order of the calls."""
        name = self.scope + name
        number = self._names[name] = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    @contextmanager
    def inside(self, scope: str) -> Iterator[None]:
        """Nest the steps that are called in the block: their keys begin with the scope and are numbered from 1."""
        outer, self.scope = self.scope, scope
        self._names = {name: count for name, count in self._names.items() if not name.startswith(scope)}
        try:
            yield
        finally:
            self.scope = outer

    def under(self, scope: str, history: History) -> list[str]:
        """Return the keys of all steps in a scope that this run has called or that earlier runs have recorded."""
        called = [
            name if number == 1 else f"{name}#{number}"
            for name, count in self._names.items()
            if name.startswith(scope)
            for number in range(1, count + 1)
        ]
        found = [
            key
            for records in (history.done, history.intents, history.saved)
            for key in records
            if key.startswith(scope)
        ]
        return list(dict.fromkeys(found + called))


def forget_steps(keys: Iterable[str], history: History) -> list[Entry]:
    """Remove the records of steps from the history, and return the entries that drop them from the checkpoint."""
    dropped = list(keys)
    for key in dropped:
        for records in (history.done, history.intents, history.saved):
            records.pop(key, None)
    return [Entry(Kind.DROP, key, b"") for key in dropped]

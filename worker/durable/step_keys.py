"""The keys of a run's steps: which comes next, and which are parts of another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...queues import Entry, History, Kind

__all__ = ["StepKeys", "forgotten"]


class StepKeys:
    """The keys that one run has given out. scope: what those of steps within a step begin with."""

    __slots__ = ("_names", "scope")

    def __init__(self) -> None:
        self.scope = ""
        self._names: dict[str, int] = {}

    @property
    def within(self) -> str | None:
        """The key of the step that steps called now are parts of; None where they stand by themselves."""
        return self.scope.rstrip("/") or None

    def next(self, name: str) -> str:
        """The key of the next step of this name: `read`, `read#2`, `read#3`, in the order of the calls."""
        name = self.scope + name
        number = self._names[name] = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    @contextmanager
    def inside(self, scope: str) -> Iterator[None]:
        """Steps that are called in the block are parts of another: their keys begin with the scope, counted anew."""
        outer, self.scope = self.scope, scope
        self._names = {name: count for name, count in self._names.items() if not name.startswith(scope)}
        try:
            yield
        finally:
            self.scope = outer

    def under(self, scope: str, left: History) -> list[str]:
        """The keys of all steps in a scope that this run has asked for, or that earlier ones have left records of."""
        asked = [
            name if number == 1 else f"{name}#{number}"
            for name, count in self._names.items()
            if name.startswith(scope)
            for number in range(1, count + 1)
        ]
        found = [key for shelf in (left.done, left.intents, left.saved) for key in shelf if key.startswith(scope)]
        return list(dict.fromkeys(found + asked))


def forgotten(keys: Iterable[str], left: History) -> list[Entry]:
    """Entries that drop the records of steps, which are taken out of what earlier runs left as well."""
    dropped = list(keys)
    for key in dropped:
        for shelf in (left.done, left.intents, left.saved):
            shelf.pop(key, None)
    return [Entry(Kind.DROP, key, b"") for key in dropped]

"""The totals of a supervisor: sums of what its workers have counted, those that have ended included.

A worker sends whole numbers. What a number has grown by since the worker's last message is added to the total, so
totals never fall, whichever worker ends or starts. User code shares the pipe of its worker and may write anything, so
rows of another form are dropped, and so is what would make the totals grow without bounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final

from typing_extensions import TypeIs

from .families import FAMILIES, MAX_SERIES, OTHER, UNLABELLED, Key, Together

_MAX_LABEL: Final = 256
"""Largest number of characters of a label value."""

_TOGETHER: Final[Mapping[Together, Callable[[float, float], float]]] = {"sum": operator.add, "max": max, "min": min}

_BOUNDED: Final = ("task", "step")
"""Labels that become `other` beyond the limit; the others have few values."""


class Totals:
    """Sums of counts. Filled in one thread; `copied` may be called from any, see meter.py."""

    def __init__(self) -> None:
        self._totals: dict[Key, list[float]] = {}
        self._known: dict[Hashable, dict[Key, list[float]]] = {}

    def add(self, worker: Hashable, rows: object) -> None:
        """Add what a worker has counted since its last message. rows: as it sent them."""
        known = self._known.setdefault(worker, {})
        for row in rows if isinstance(rows, list) else ():
            if (checked := _checked(row)) is None:
                continue
            key, numbers = checked
            before = known.get(key)
            if before is None and len(known) >= 2 * MAX_SERIES:
                continue
            known[key] = numbers
            grown = numbers if before is None else [max(0.0, b - a) for a, b in zip(before, numbers, strict=True)]
            if (total := self._total(key, len(numbers))) is not None:
                for place, number in enumerate(grown):
                    total[place] += number

    def count(self, *key: str) -> None:
        """Count an event of the supervisor itself."""
        total = self._total(key, 1)
        if total is not None:
            total[0] += 1

    def forget(self, worker: Hashable) -> None:
        """Note that a worker has ended: its counts stay in the totals."""
        self._known.pop(worker, None)

    def copied(self) -> dict[Key, list[float]]:
        """Return a copy of all totals."""
        return {key: list(numbers) for key, numbers in self._totals.copy().items()}

    def _total(self, key: Key, numbers: int) -> list[float] | None:
        total = self._totals.get(key)
        if total is not None:
            return total
        if len(self._totals) >= MAX_SERIES:
            labels = FAMILIES[key[0]].labels
            bounded = {label for label in labels if label in _BOUNDED}
            key = (
                key[0],
                *(OTHER if label in bounded else value for label, value in zip(labels, key[1:], strict=True)),
            )
            for label in bounded:
                self._totals.setdefault((UNLABELLED, label), [0.0])[0] += 1
            if key not in self._totals and len(self._totals) >= 2 * MAX_SERIES:
                return None
        return self._totals.setdefault(key, [0.0] * numbers)


def together(gauges: Iterable[Mapping[str, object]]) -> dict[Key, float]:
    """Return the gauges of all workers as one set: see `Together`. gauges: as each worker sent them."""
    found: dict[Key, float] = {}
    for of_worker in gauges:
        for name, value in of_worker.items():
            family = FAMILIES.get(name)
            if family is None or family.kind != "gauge" or family.labels or not _is_number(value):
                continue
            before = found.get((name,))
            found[name,] = value if before is None else _TOGETHER[family.together](before, value)
    return found


def _is_number(value: object) -> TypeIs[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _checked(row: Any) -> tuple[Key, list[float]] | None:
    """Return the key and the numbers of a row; None if it has another form."""
    try:
        (name, *labels), numbers = row
        family = FAMILIES[name]
        sound = (
            family.kind != "gauge"
            and len(labels) == len(family.labels)
            and all(isinstance(label, str) and len(label) <= _MAX_LABEL for label in labels)
            and len(numbers) == family.numbers
            and all(map(_is_number, numbers))
        )
    except (KeyError, TypeError, ValueError):
        return None
    return ((name, *labels), [float(number) for number in numbers]) if sound else None

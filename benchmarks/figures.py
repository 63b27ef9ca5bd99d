"""What is measured, and how several rounds become one row of the report."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from .place import Place
from .size import Size

__all__ = ["Figure", "Line", "Measure", "Row", "Spread", "rows_of"]


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is measured. limit: what the raw client does in its place."""

    key: str
    what: str
    unit: str
    limit: str


@dataclass(frozen=True, slots=True)
class Figure:
    """What one round found for a line: Perdure's value and the raw client's, in the line's unit."""

    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A round measures some lines on a place of its own; it is repeated.

    at_once: its rounds mostly wait, so all of them are run at the same time. repeated: False where one round takes
    many samples by itself and long.
    """

    name: str
    lines: Sequence[Line]
    round: Callable[[Place, Size], Awaitable[Mapping[str, Figure]]]
    at_once: bool = False
    repeated: bool = True


@dataclass(frozen=True, slots=True)
class Spread:
    """Several values of the same thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """A line with what all rounds found."""

    line: Line
    value: Spread
    limit: Spread

    @property
    def ratio(self) -> float:
        """Perdure's median as a multiple of the raw client's."""
        return self.value.median / self.limit.median


def rows_of(measure: Measure, rounds: Sequence[Mapping[str, Figure]]) -> list[Row]:
    """The rows of a measure."""
    return [
        Row(
            line,
            Spread.of([found[line.key].value for found in rounds]),
            Spread.of([found[line.key].limit for found in rounds]),
        )
        for line in measure.lines
    ]

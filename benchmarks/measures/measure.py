"""Benchmarks, their figures, and the rows of the report."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ..sizes import Size
from ..support.deployment import Deployment

__all__ = ["Figure", "Line", "Measure", "Row", "Spread", "rows_of"]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report. limit: what the raw client does instead."""

    key: str
    what: str
    unit: str
    limit: str


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of one round for a line: Perdure's value and the raw client's, in the line's unit."""

    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A benchmark: a round that measures some lines in its own namespace, repeated.

    at_once: rounds mostly wait, so all of them run concurrently. repeated: False if one round is long and takes many
    samples.
    """

    name: str
    lines: Sequence[Line]
    round: Callable[[Deployment, Size], Awaitable[Mapping[str, Figure]]]
    at_once: bool = False
    repeated: bool = True


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of several values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """A line with the results of all rounds."""

    line: Line
    value: Spread
    limit: Spread

    @property
    def ratio(self) -> float:
        """Perdure's median as a multiple of the raw client's median."""
        return self.value.median / self.limit.median


def rows_of(measure: Measure, rounds: Sequence[Mapping[str, Figure]]) -> list[Row]:
    """Return the rows of a benchmark."""
    return [
        Row(
            line,
            Spread.of([found[line.key].value for found in rounds]),
            Spread.of([found[line.key].limit for found in rounds]),
        )
        for line in measure.lines
    ]

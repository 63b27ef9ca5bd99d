"""All that is measured, in the order of the report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from .figures import Row, Size
from .ground import Ground
from .latency import latency, round_trip
from .queueing import processes, tasks
from .stepping import steps

__all__ = ["MEASURES"]

Measure = Callable[[Ground, Size], Awaitable[list[Row]]]

MEASURES: Final[Mapping[str, Measure]] = {
    "round trip": round_trip,
    "tasks": tasks,
    "processes": processes,
    "steps": steps,
    "latency": latency,
}

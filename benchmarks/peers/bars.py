"""The bars of a chart."""

from __future__ import annotations

from ..report import number
from .chart import Bar
from .results import Data

__all__ = ["bars_of", "short"]

_REASON = 74
"""Length of a reason that fits beside the names."""


def bars_of(line: Data, data: Data) -> list[Bar]:
    """Return one bar per setup, in the order of the tables."""
    names = {peer["key"]: peer["name"] for peer in data["peers"]}
    return [_bar(cell, names[cell["peer"]]) for cell in line["cells"]]


def short(reason: str | None, length: int) -> str:
    """Return the first line of a reason, cut to `length` characters."""
    first = (reason or "not measured").strip().splitlines()[0]
    return first if len(first) <= length else f"{first[: length - 1]}…"


def _bar(cell: Data, name: str) -> Bar:
    own = cell["peer"].startswith("perdure")
    values = cell["values"]
    if not values:
        return Bar(name, None, None, None, short(cell["reason"], _REASON), own)
    return Bar(name, cell["median"], min(values), max(values), number(cell["median"]), own)

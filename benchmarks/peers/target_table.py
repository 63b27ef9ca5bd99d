"""The table of Perdure's targets and the figures reached."""

from __future__ import annotations

from collections.abc import Mapping

from ..report import number
from ..targets import TARGETS, Target
from .results import Data
from .tables import row, rule, spread

__all__ = ["reached"]


def reached(runs: Mapping[str, Data]) -> list[str]:
    """Return the table, a row per target. runs: `own`, `fsync` and `peers`, as far as they exist."""
    found = [
        "From `python -m benchmarks` on the same machine, with Perdure and its client in one process. The raw client",
        "is hiredis on one connection that sends the same commands.\n",
        row("benchmark", "unit", "target", "reached", "", "raw client"),
        rule(*"llrrlr"),
    ]
    for target in TARGETS:
        figure, limit, met = _figure(target, runs.get(target.run))
        found.append(row(target.what, target.unit, _bound(target), figure, met, limit))
    conditions = [line for name in ("own", "fsync") if name in runs for line in runs[name]["conditions"]]
    return [*found, "", *(part for line in dict.fromkeys(conditions) for part in (line, ""))]


def _figure(target: Target, run: Data | None) -> tuple[str, str, str]:
    """Return the figure reached, the raw client's figure, and whether the target is met."""
    if run is None:
        return "not measured", "-", ""
    if target.run == "peers":
        times = _best_peer(target.key, run)
        return ("not measured", "-", "") if times is None else (f"{number(times)} x", "-", _met(target, times))
    for line in run["rows"]:
        if line["key"] == target.key:
            if target.ratio:
                return f"{number(line['ratio'])} x", "-", _met(target, line["ratio"])
            value, limit = line["value"], line["limit"]
            reached = spread([value["low"], value["high"]], value["median"])
            return reached, number(limit["median"]), _met(target, value["median"])
    return "not measured", "-", ""


def _best_peer(key: str, run: Data) -> float | None:
    """Return how many times better Perdure is than the best peer."""
    times = [
        cell["times"]
        for line in run["lines"]
        if line["key"] == key
        for cell in line["cells"]
        if cell["times"] is not None and not cell["peer"].startswith("perdure")
    ]
    return min(times, default=None)


def _met(target: Target, value: float) -> str:
    if target.at_least is not None:
        return "met" if value >= target.at_least else "missed"
    return "met" if target.at_most is not None and value <= target.at_most else "missed"


def _bound(target: Target) -> str:
    if target.at_least is not None:
        return f"≥ {number(target.at_least)}"
    return f"≤ {number(target.at_most or 0)}"

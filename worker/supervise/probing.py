"""How all children are, from what each says of itself every second."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from ..runtime.health import ALIVE, CONNECTED, Combined, Level, Report
from .child import Child

__all__ = ["health_of"]

_SILENT: Final = 5.0
"""Seconds without a word, of one every second, after which a child does not count as alive."""


def health_of(children: Iterable[Child]) -> Combined:
    """The children that are to work: not those that were told to stop. May be asked from any thread."""
    return Combined(_report(child) for child in children if not child.stops and not child.gone.is_set())


def _report(child: Child) -> Report:
    name = child.worker or f"process {child.pid}"
    if child.heard is None or not child.health:
        return Report(name, (Level(CONNECTED, False, "it is only starting"),))
    silent = time.monotonic() - child.heard
    if silent > _SILENT:
        remedy = "its interpreter is stuck; the supervisor replaces it after the stall limit"
        return Report(name, (Level(ALIVE, False, f"it has not been heard of for {silent:.0f} s", remedy),))
    try:
        return Report.of(child.health)
    except (KeyError, TypeError):
        return Report(name, (Level(ALIVE, True, "it tells no more"),))

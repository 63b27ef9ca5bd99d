"""Guard of tracing: no exception of a tracer, a sampler or an exporter reaches a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ....queues.runtime import RUNTIME
from ...log import logger

R = TypeVar("R")

INTERVAL: Final = 60.0
"""Seconds between two lines of the log about failures."""


class Guard:
    """Logs failures of tracing, at most once per `INTERVAL`. Its methods may be called from any thread."""

    __slots__ = ("_due", "_left_out")

    def __init__(self) -> None:
        self._due = 0.0
        self._left_out = 0

    def call(self, function: Callable[..., R], *args: object) -> R | None:
        """Return what a function of tracing returns; None if it raises an exception."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - a tracer may raise anything
            self.failed(error)
            return None

    def failed(self, error: Exception) -> None:
        """Log that a span could not be made or ended, or count it if a line was logged lately."""
        now = RUNTIME.monotonic()
        if now < self._due:
            self._left_out += 1
            return
        left_out, self._left_out, self._due = self._left_out, 0, now + INTERVAL
        before = f"; {left_out} failures since the last line were not logged" if left_out else ""
        logger.warning(
            "a span could not be made or ended, and tasks continue without it: {}: {}{}; check the tracer provider of "
            "this program",
            type(error).__name__,
            error,
            before,
        )

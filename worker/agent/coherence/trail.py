"""What an agent did lately, as its events tell."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ...journal import Event
from ...journal.events import ToolCalled
from .view import Call

__all__ = ["Trail"]

_PROGRESS: Final = frozenset(
    {
        "started",
        "planned",
        "step_completed",
        "decided",
        "discovered",
        "artifact_saved",
        "received",
        "compacted",
        "finished",
    }
)
"""Events that tell of something done. Talking is none, nor is a tool that is called as it was before."""


class Trail:
    """The last calls of tools, and when anything got done."""

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        """window: calls that are kept."""
        self._clock = clock
        self.calls: deque[Call] = deque(maxlen=window)
        self.progressed = clock()

    @property
    def idle(self) -> float:
        """Seconds since anything got done."""
        return self._clock() - self.progressed

    def hear(self, event: Event, *, former: bool = False) -> None:
        """former: it happened in a former run, at a time that this clock does not know."""
        done = event.type in _PROGRESS
        if isinstance(event, ToolCalled):
            call = Call.of(event.tool, event.arguments)
            done = call not in self.calls
            self.calls.append(call)
        if done and not former:
            self.progressed = self._clock()

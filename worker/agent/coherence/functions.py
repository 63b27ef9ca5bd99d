"""Coherence checks of a function: a monitor for the duration of its handler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ...durable.context import Context
from ...durable.goal import goal_of
from ...durable.steps.current import CURRENT_RUN
from ...journal.event import Event
from ...journal.json_patch import BadPatch
from ...journal.reducer import empty_state, reduce
from ..background import in_background
from .monitor import CoherenceMonitor
from .settings import Coherence

Handler = Callable[..., Coroutine[Any, Any, Any]]


class _FunctionMonitor(CoherenceMonitor):
    """Monitor of a function, whose state has what it logged. Its steps have no events, so each stored one counts."""

    def __init__(self, run: Any, coherence: Coherence) -> None:
        goal = goal_of(run)
        self._reduced = {**empty_state(), "goal": goal}
        self._by_event = False
        super().__init__(run, goal, coherence, state=lambda: self._reduced, tokens=lambda: 0)

    def on_event(self, event: Event, number: int) -> None:
        if event.type != "message_added":  # the list of all messages would grow without end
            with suppress(BadPatch):
                self._reduced = reduce(self._reduced, event, number)
        self._by_event = event.type == "tool_called"
        super().on_event(event, number)

    def on_recorded(self) -> None:
        if self._by_event:  # the record of a tool call, which may be a repetition
            self._by_event = False
            return
        self.note_work()

    def on_step(self, key: str) -> None:
        self.request_check()


def watched(handler: Handler, coherence: Coherence) -> Handler:
    """Return a handler that is checked while it runs as a task. Called as a plain function it is not."""

    @functools.wraps(handler)
    async def checked(ctx: Context, /, *args: Any, **kwargs: Any) -> Any:
        run = CURRENT_RUN.get()
        if run is None or run.context is not ctx or run.observer(CoherenceMonitor) is not None:
            return await handler(ctx, *args, **kwargs)
        monitor = _FunctionMonitor(run, coherence)
        await monitor.open()
        run.observe(monitor)
        try:
            async with in_background(monitor.run()):
                return await handler(ctx, *args, **kwargs)
        finally:
            run.unobserve(monitor)

    return checked

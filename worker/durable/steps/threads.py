"""Threads of sync steps and handlers, and those of them that cannot be stopped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, Protocol

import anyio
import anyio.to_thread

from .step_thread import LateCalls, StepThread


class ThreadCaller(Protocol):
    """The thread of a sync handler, which calls functions of its steps itself."""

    async def call(self, function: StepThread) -> Any: ...


CURRENT_SESSION: ContextVar[ThreadCaller | None] = ContextVar("perdure_session", default=None)


class _Call:
    """One call in a thread, with the knowledge whether its result is still awaited."""

    __slots__ = ("_function", "_lost", "_on_return", "_running")

    def __init__(self, function: Callable[[], Any], lost: set[_Call], on_return: Callable[[], None]) -> None:
        """on_return: called when a lost call has returned, in any thread."""
        self._function = function
        self._lost = lost
        self._on_return = on_return
        self._running = False

    def __call__(self) -> Any:
        self._running = True
        try:
            return self._function()
        finally:
            self._running = False
            self._returned()

    def abandon(self) -> None:
        """Count the call as lost. If it ends at the same moment, either side removes it again."""
        self._lost.add(self)
        if not self._running:
            self._returned()

    def _returned(self) -> None:
        try:
            self._lost.remove(self)
        except KeyError:
            return
        self._on_return()


class Threads:
    """Threads for sync functions, with a limit of how many steps run at once.

    A thread cannot be stopped from outside. If its step timed out or was cancelled, the thread runs on until its
    function returns; it no longer counts against the limit, but is counted as lost. Handlers have no limit here: each
    has a slot of the worker, which a lost one occupies until its thread ends.

    Attributes:
        late: calls of step functions that run on.
    """

    def __init__(
        self, most: int, on_leak: Callable[[int], None] = lambda change: None, held: Callable[[], int] = lambda: 1
    ) -> None:
        """Create the limiters.

        Args:
            most: number of steps that run at once.
            on_leak: called in the event loop with the slots of a handler whose thread is lost, and with their negative
                number when it has ended.
            held: returns the slots of the execution that calls it.
        """
        self.most: Final = most
        self._on_leak = on_leak
        self.held = held
        self._steps = anyio.CapacityLimiter(most)
        self._handlers = anyio.CapacityLimiter(math.inf)
        self._lost: set[_Call] = set()
        self.late = LateCalls()

    @property
    def lost(self) -> int:
        """Number of threads whose results are no longer awaited."""
        return len(self._lost)

    async def run(self, call: StepThread) -> Any:
        """Call the function of a step in a thread; return or raise its result. A cancelled call returns at once."""
        session = CURRENT_SESSION.get()
        try:
            return await (self.run_step(call) if session is None else session.call(call))
        except anyio.get_cancelled_exc_class():
            self.late.add(call)
            raise

    async def run_step(self, function: Callable[[], Any]) -> Any:
        """Call the function in a thread of its own. A cancelled call returns at once."""
        call = _Call(function, self._lost, _do_nothing)
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._steps)
        except anyio.get_cancelled_exc_class():
            call.abandon()
            raise

    async def run_handler(self, function: Callable[[], Any], slots: int = 1) -> Any:
        """Call the function of a handler in a thread. A cancelled call returns at once, and leaks its slots."""
        loop = asyncio.get_running_loop()

        def return_slots() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_leak, -slots)

        call = _Call(function, self._lost, return_slots)
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._handlers)
        except anyio.get_cancelled_exc_class():
            self._on_leak(slots)
            call.abandon()
            raise


def _do_nothing() -> None:
    return None

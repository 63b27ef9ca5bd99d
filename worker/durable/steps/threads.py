"""Threads of sync steps, and the count of those that cannot be stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import anyio
import anyio.to_thread

__all__ = ["Threads"]


class _Call:
    """One call in a thread, with the knowledge whether its result is still awaited."""

    __slots__ = ("_function", "_lost", "_running")

    def __init__(self, function: Callable[[], Any], lost: set[_Call]) -> None:
        self._function = function
        self._lost = lost
        self._running = False

    def __call__(self) -> Any:
        self._running = True
        try:
            return self._function()
        finally:
            self._running = False
            self._lost.discard(self)

    def abandon(self) -> None:
        """Count the call as lost. If it ends at the same moment, either side removes it again."""
        self._lost.add(self)
        if not self._running:
            self._lost.discard(self)


class Threads:
    """Threads for sync functions, with a limit of how many run at once.

    A thread cannot be stopped from outside. If its step timed out or was cancelled, the thread runs on until its
    function returns; it no longer counts against the limit, but is counted as lost.
    """

    def __init__(self, most: int) -> None:
        """Create the limiter. most: number of threads that run at once."""
        self.most: Final = most
        self._limiter = anyio.CapacityLimiter(most)
        self._lost: set[_Call] = set()

    @property
    def lost(self) -> int:
        """Number of threads whose results are no longer awaited."""
        return len(self._lost)

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function in a thread; return or raise its result. A cancelled call returns at once."""
        call = _Call(functools.partial(function, *args, **kwargs), self._lost)
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except anyio.get_cancelled_exc_class():
            call.abandon()
            raise

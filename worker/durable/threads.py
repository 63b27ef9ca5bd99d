"""The threads that sync steps run in, and those of them that nobody can stop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import anyio
import anyio.to_thread

__all__ = ["Threads"]


class _Call:
    """One call in a thread, which knows whether anybody still waits for it."""

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
        """Nobody waits for it any more. Where it ends in the same instant, either side takes it off."""
        self._lost.add(self)
        if not self._running:
            self._lost.discard(self)


class Threads:
    """Runs sync functions in threads, a bounded number at once.

    A thread cannot be stopped from outside. One whose step has timed out or was cancelled runs on until its function
    returns, outside the bound, and is counted as lost as long as it does.
    """

    def __init__(self, most: int) -> None:
        """most: how many run at once."""
        self.most: Final = most
        self._limiter = anyio.CapacityLimiter(most)
        self._lost: set[_Call] = set()

    @property
    def lost(self) -> int:
        """How many threads run functions for which nobody waits any more."""
        return len(self._lost)

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function in a thread; what it returns or raises. Cancelled, it returns at once."""
        call = _Call(functools.partial(function, *args, **kwargs), self._lost)
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except anyio.get_cancelled_exc_class():
            call.abandon()
            raise

"""The asyncio task of a handler, and its cancellation."""

from __future__ import annotations

import asyncio
from typing import ClassVar

__all__ = ["HandlerTask"]


class HandlerTask:
    """Base of a run: cancels the asyncio task in which the handler runs.

    The handler may clean up for a while (`finally`, `except CancelledError`). Then it is cancelled again and again.
    """

    cleanup_limit: ClassVar[float] = 4.0
    """Seconds that a cancelled handler has to clean up before it is cancelled again."""

    cancel_interval: ClassVar[float] = 0.5
    """Seconds between the cancellations of a handler that has not ended by then."""

    __slots__ = ("_cancels", "_loop", "_retry_cancel", "_task")

    _cancels: int
    _loop: asyncio.AbstractEventLoop
    _retry_cancel: asyncio.TimerHandle | None
    _task: asyncio.Task[object] | None

    async def drain_cancellation(self) -> None:
        """Absorb a cancellation that arrived after the handler had ended, so that it cancels nothing else.

        Raises `CancelledError` where the worker itself is being cancelled.
        """
        task = asyncio.current_task()
        if self._cancels:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if task is not None and task.cancelling():
                    raise
        if task is not None and task.cancelling():
            raise asyncio.CancelledError

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancels += 1
            self._task.cancel()
            delay = self.cleanup_limit if self._cancels == 1 else self.cancel_interval
            self._retry_cancel = self._loop.call_later(delay, self._cancel)

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The asyncio task of the handler; None before the handler begins and after it ends."""
        return self._task

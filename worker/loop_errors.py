"""Errors of loops that end with their worker only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from ..queues.errors import QueueError, Refused
from ..queues.transport.backoff import Backoff
from .log import FirstOfEach, logger

_RESTART: Final = Backoff(first=0.5, longest=30.0)
"""Delays before a loop that ended by an error is run again."""


class LoopErrors:
    """The errors of one duty, each logged once.

    What an unavailable Redis refuses is for DEBUG: the intake logs that. A refused command, such as one on a key of
    another type, needs an operator. Any other error is a fault of this library, or of a program that wrote into its
    keys.
    """

    def __init__(self, duty: str) -> None:
        """duty: what could not be done, such as 'promote due tasks'."""
        self._duty = duty
        self._known = FirstOfEach()

    async def attempt(self, work: Callable[[], Awaitable[object]], item: str = "") -> bool:
        """Do the work on one item. Return False, and log the error, if it fails."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - an item's error must not end the loop, nor stop the other items
            self.note(error, item)
            return False
        return True

    def note(self, error: Exception, item: str = "") -> None:
        """Log an error. item: what it belongs to, if the duty has several items."""
        text = f"could not {self._duty}{item and f', {item}'}"
        known = not self._known.is_first(item, type(error).__name__, str(error)[:200])
        if isinstance(error, QueueError):
            log = logger.debug if known or not isinstance(error, Refused) else logger.warning
            log("{}: {}", text, error)
        elif known:
            logger.debug("{}: {!r}", text, error)
        else:
            logger.opt(exception=error).error("{}; the worker continues", text)


async def keep_running(run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop, and run it again after a delay if it ends by an error. Return when it returns."""
    errors, delays = LoopErrors(f"continue {getattr(run, '__qualname__', 'a loop')}"), _RESTART.delays()
    while True:
        try:
            return await run()
        except Exception as error:  # noqa: BLE001 - the other loops, and the tasks that run, need the process
            errors.note(error)
        await anyio.sleep(next(delays))

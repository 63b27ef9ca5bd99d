"""Delays between attempts, and the one loop that repeats an act while Redis is unavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import anyio

from ..errors import NotOpen, Unavailable
from ..runtime import RUNTIME

__all__ = ["Backoff", "jittered", "retry_while_unavailable"]

T = TypeVar("T")


def jittered(seconds: float, jitter: float = 0.5) -> float:
    """Return the duration less a random part of it, which is at most `jitter` of the whole."""
    return seconds * RUNTIME.uniform(1.0 - jitter, 1.0)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential delays between attempts.

    Args:
        first: seconds before the second attempt.
        longest: seconds that no delay exceeds.
        factor: ratio of a delay to the one before it.
        jitter: largest part of a delay that is left out at random, so that clients do not retry in step.
    """

    first: float = 0.05
    longest: float = 2.0
    factor: float = 2.0
    jitter: float = 0.5

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait before each further attempt, without end."""
        delay = self.first
        while True:
            yield jittered(delay, self.jitter)
            delay = min(delay * self.factor, self.longest)


async def retry_while_unavailable(
    act: Callable[[], Awaitable[T]],
    *,
    on_wait: Callable[[Unavailable], None] | None = None,
    backoff: Backoff = Backoff(),
) -> T:
    """Repeat an act while Redis is unavailable, and return its result; the caller's cancellation ends the loop.

    A connection that this process has closed ends it, too (`NotOpen`).

    The act must be repeatable. A fenced write is: once another worker has the task, the fence refuses it.

    Args:
        on_wait: called with the error before each wait, such as to log it.
    """
    delays: Iterator[float] | None = None
    while True:
        try:
            return await act()
        except NotOpen:
            raise
        except Unavailable as error:
            if on_wait is not None:
                on_wait(error)
        delays = delays or backoff.delays()
        await anyio.sleep(next(delays))

"""Delays between attempts, and the one loop that repeats an act while Redis is unavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio
from redis.exceptions import AuthenticationError

from ..errors import NotOpen, Refused, Unavailable
from ..runtime import RUNTIME

T = TypeVar("T")

CREDENTIALS_PATIENCE: Final = 30.0
"""Seconds for which an act is repeated while Redis refuses the user or password: they may just be being rotated."""


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

    A connection that this process has closed ends it, too (`NotOpen`). A Redis that refuses the credentials counts as
    unavailable for `CREDENTIALS_PATIENCE` seconds; then `Refused` is raised.

    The act must be repeatable. A fenced write is: once another worker has the task, the fence refuses it.

    Args:
        on_wait: called with the error before each wait, such as to log it.
    """
    delays: Iterator[float] | None = None
    refused_since: float | None = None
    while True:
        try:
            return await act()
        except NotOpen:
            raise
        except Unavailable as error:
            refused_since, reason = None, error
        except Refused as error:
            if not _refuses_credentials(error):
                raise
            refused_since = RUNTIME.monotonic() if refused_since is None else refused_since
            if RUNTIME.monotonic() - refused_since >= CREDENTIALS_PATIENCE:
                raise
            reason = Unavailable(str(error))
        if on_wait is not None:
            on_wait(reason)
        delays = delays or backoff.delays()
        await anyio.sleep(next(delays))


def _refuses_credentials(error: Refused) -> bool:
    """Return whether the user or password was refused, in the handshake or later, and not only one command of it."""
    cause = error.__cause__
    return any(isinstance(found, AuthenticationError) for found in (cause, cause and cause.__cause__))

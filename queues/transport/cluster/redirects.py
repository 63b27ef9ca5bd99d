"""Retry policy for commands that a cluster node redirected or refused for the moment."""

from __future__ import annotations

from typing import Final

from redis.exceptions import AskError, ClusterDownError

from ..backoff import Backoff
from ..clients import was_not_executed

_TRIES: Final = 12
"""Redirections and transient refusals after which a command fails."""

_AT_ONCE: Final = 2
"""Redirections that are followed without a delay; more of them mean that two nodes disagree for the moment."""

_BACKOFF: Final = Backoff(first=0.01, longest=0.5)
"""Delays before a command is sent again, about 3 s in all."""


class RedirectPolicy:
    """The attempts of one command, with the delay before each."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot
        self._tries = 0
        self._delays = _BACKOFF.delays()

    def pause(self, error: BaseException) -> float:
        """Return the seconds to wait. Raises an error that is not transient, and after too many attempts."""
        if not is_transient(error):
            raise error
        self._tries += 1
        if self._tries > _TRIES:
            raise ClusterDownError(f"slot {self._slot} was not found in {_TRIES} attempts: {error}") from error
        if isinstance(error, AskError) and self._tries <= _AT_ONCE:
            return 0.0
        return next(self._delays)


def is_transient(error: BaseException) -> bool:
    """Whether a command was not executed, and may succeed later or on another node."""
    return isinstance(error, AskError) or was_not_executed(error)

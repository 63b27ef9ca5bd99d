"""How long a command is pursued that was redirected, or refused for now."""

from __future__ import annotations

from typing import Final

from redis.exceptions import AskError, ClusterDownError

from ..backoff import Backoff
from ..clients import was_not_executed

__all__ = ["RedirectPolicy", "will_pass"]

_TRIES: Final = 12
"""Redirections and passing refusals that one command may meet."""

_AT_ONCE: Final = 2
"""Redirections that are followed without a pause: more of them are two nodes that have not yet agreed."""

_BACKOFF: Final = Backoff(first=0.01, longest=0.5)
"""Delays before a command is sent again, about 3 s in all."""


class RedirectPolicy:
    """The tries of one command. Each is told what the last one met, and says how long to wait before the next."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot
        self._tries = 0
        self._delays = _BACKOFF.delays()

    def pause(self, error: BaseException) -> float:
        """Seconds to wait. Raises what the caller shall hear where the error will not pass, or enough was tried."""
        if not will_pass(error):
            raise error
        self._tries += 1
        if self._tries > _TRIES:
            raise ClusterDownError(f"slot {self._slot} was not found in {_TRIES} tries: {error}") from error
        if isinstance(error, AskError) and self._tries <= _AT_ONCE:
            return 0.0
        return next(self._delays)


def will_pass(error: BaseException) -> bool:
    """Whether a command was not carried out, and may be now or elsewhere."""
    return isinstance(error, AskError) or was_not_executed(error)

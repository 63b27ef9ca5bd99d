"""When to try again and when to stop: pure decisions, no Redis.

Why a task was given up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from ..queues import Counters

__all__ = ["Bury", "Reason", "Retry", "TryAgain", "after_crash", "after_failure", "backoff"]


class Reason(StrEnum):
    """Every dead letter has one of these."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    """Its handler failed as often as it may."""
    NOT_RETRYABLE = "not_retryable"
    """Its handler raised an error that no further attempt can mend."""
    CRASH_LOOP = "crash_loop"
    """Its deliveries ended without any outcome more often than they may: it is suspected of killing workers."""
    TIMEOUT = "timeout"
    """Its last attempt ran out of time."""
    UNREADABLE = "unreadable"
    """The message is not an envelope, or one of a future version. Its raw fields are kept."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """Its arguments do not fit its handler."""
    UNKNOWN_TASK = "unknown_task"
    """No worker that looked at it knew its name."""
    UNSERIALISABLE_RESULT = "unserialisable_result"
    """A result that cannot be stored as JSON, or is over the size limit."""
    UNDECRYPTABLE = "undecryptable"
    """Its arguments or its checkpoint are encrypted, and no worker that took it could decrypt them."""
    INCOHERENT = "incoherent"
    """A check found that its agent no longer knew what it was doing."""
    IN_DOUBT = "in_doubt"
    """A risky step was cut off, and whether its effect happened is for a person to find out."""

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        return cls.UNDECRYPTABLE if value == "sealed" else None  # the word of earlier versions


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a task, or a step, may fail, and how long to wait in between.

    max_attempts: runs that may fail before the task is given up. max_crashes: deliveries that may end without any
    outcome (a worker that died) and still be resumed; one more buries. Before attempt n + 1 it waits `base` x
    `factor`^(n-1) seconds, at most `cap`, of which a random share up to `jitter` (0 to 1) is taken off, so that what
    failed together does not come back together. on: exceptions worth another attempt. never: exceptions that are not,
    even where `on` names a base of theirs.
    """

    max_attempts: int = 3
    max_crashes: int = 3
    base: float = 1.0
    factor: float = 2.0
    cap: float = 300.0
    jitter: float = 0.5
    on: tuple[type[BaseException], ...] = (Exception,)
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"Retry.max_attempts must be 1 or more, not {self.max_attempts}: 1 means no retry")
        if self.max_crashes < 0:
            raise ValueError(f"Retry.max_crashes must be 0 or more, not {self.max_crashes}")
        if not (self.base >= 0 and self.cap >= 0 and self.factor >= 1):
            raise ValueError("Retry needs base >= 0, cap >= 0 and factor >= 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"Retry.jitter is a share from 0 to 1, not {self.jitter}")

    def allows(self, error: BaseException) -> bool:
        """Whether the error is worth another attempt."""
        return isinstance(error, self.on) and not isinstance(error, self.never)


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Run it again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Bury:
    """Give it up."""

    reason: Reason


def backoff(retry: Retry, failures: int, chance: float | None = None) -> float:
    """Seconds to wait after the `failures`-th failure (from 1). chance: 0 to 1, random where not given.

    Exponential backoff with proportional jitter; see "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    share = random.random() if chance is None else chance  # noqa: S311 - jitter, not a secret
    try:
        full = min(retry.cap, retry.base * retry.factor ** (max(failures, 1) - 1))
    except OverflowError:
        full = retry.cap
    return full * (1 - retry.jitter * share)


def after_failure(retry: Retry, counters: Counters, error: BaseException, max_attempts: int | None) -> TryAgain | Bury:
    """What follows an attempt that failed. counters: with this attempt counted. max_attempts: the producer's word."""
    if not retry.allows(error):
        return Bury(Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.NOT_RETRYABLE)
    if counters.attempts >= (max_attempts or retry.max_attempts):
        return Bury(Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.ATTEMPTS_EXHAUSTED)
    return TryAgain(backoff(retry, counters.attempts))


def after_crash(retry: Retry, counters: Counters) -> Bury | None:
    """Whether a task that was taken over may be resumed (None) or is given up."""
    return Bury(Reason.CRASH_LOOP) if counters.crashes > retry.max_crashes else None

"""Retry policy: backoff, when a task is given up, and the reasons. Pure functions, no Redis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

from ..queues.defaults import unknown_option
from ..queues.delivery.settlement import Counters
from ..queues.durations import Duration, to_seconds
from ..queues.runtime import RUNTIME


class Reason(StrEnum):
    """Reason of a dead letter."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    """Its handler failed on every attempt that it has."""
    NOT_RETRYABLE = "not_retryable"
    """Its handler raised an error that must not be retried."""
    CRASH_LOOP = "crash_loop"
    """Too many of its deliveries ended without an outcome: it is suspected of killing workers."""
    TIMEOUT = "timeout"
    """Its last attempt timed out."""
    UNREADABLE = "unreadable"
    """Its message is not an envelope, or one of a later version: the raw fields are kept. Or no version can read its
    checkpoint.
    """
    NEWER_VERSION = "newer_version"
    """It needs a worker of a later version, and none came in time. Its checkpoint is kept."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """Its arguments do not match its handler."""
    UNKNOWN_TASK = "unknown_task"
    """No worker that took it has a handler of its name."""
    WRONG_APP = "wrong_app"
    """It belongs to an app of which no worker took it, and workers of another app serve its queue."""
    UNSERIALISABLE_RESULT = "unserialisable_result"
    """Its result cannot be stored as JSON, or is over the size limit."""
    UNDECRYPTABLE = "undecryptable"
    """Its arguments or its checkpoint are encrypted, and no worker that took it could decrypt them."""
    INCOHERENT = "incoherent"
    """A check of its agent's coherence failed."""
    BUDGET = "budget"
    """A budget of it is used up."""
    IN_DOUBT = "in_doubt"
    """A risky step was cut off, and an operator must find out whether its effect happened."""

    EXPIRED = "expired"
    """No worker had started it by its deadline."""
    ORPHANED_STEPS = "orphaned_steps"
    """Its handler returned without asking for recorded steps."""

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        return cls.UNDECRYPTABLE if value == "sealed" else None  # the word of earlier versions


T = TypeVar("T")

_WORDS: Final[Mapping[str, str]] = {
    "attempts": "max_attempts",
    "backoff": "base and factor",
    "delay": "base",
    "exceptions": "on",
    "ignore": "never",
    "interval": "base",
    "max_delay": "cap",
    "max_retries": "max_attempts, which counts the first attempt too",
    "multiplier": "factor",
    "retries": "max_attempts, which counts the first attempt too",
    "retry_on": "on",
    "tries": "max_attempts",
    "wait": "base",
}
"""Names of the fields of `Retry` elsewhere."""


def _explained(kind: type[T]) -> type[T]:
    """Return a dataclass whose error about an unknown field names the field that was meant."""
    construct: Callable[..., None] = kind.__init__

    @functools.wraps(construct)
    def explained(self: T, *args: Any, **given: Any) -> None:
        try:
            construct(self, *args, **given)
        except TypeError:
            known = list(kind.__annotations__)
            if unknown := [name for name in given if name not in known]:
                raise TypeError(unknown_option(f"field of {kind.__name__}", unknown, known, _WORDS)) from None
            raise

    type.__setattr__(kind, "__init__", explained)
    return kind


def _exception_classes(name: str, given: object) -> tuple[type[BaseException], ...]:
    """Return one exception class, or a collection of them, as a tuple."""
    kinds: list[object] = list(given) if isinstance(given, (list, set, tuple)) else [given]
    classes = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException))
    if len(classes) != len(kinds):
        raise TypeError(
            f"Retry.{name} must be exception classes, such as (ConnectionError, TimeoutError), got {given!r}"
        )
    return classes


@_explained
@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy of a task or a step.

    The delay before attempt n + 1 is `base` x `factor`^(n-1), at most `cap`, minus a random share up to `jitter`
    (0 to 1), so that tasks that failed together are not retried together. `base` and `cap` are seconds or a timedelta.

    Attributes:
        max_attempts: Attempts before the task is given up.
        max_crashes: Deliveries in a row that may end without an outcome and without progress; one more buries the
            task. If it is not 0, the first two never bury, because another task of the same process may be the cause.
        on: Exceptions that are retried.
        never: Exceptions that are not retried, even if `on` has a base class of theirs.
    """

    max_attempts: int = 3
    max_crashes: int = 3
    base: Duration = 1.0
    factor: float = 2.0
    cap: Duration = 300.0
    jitter: float = 0.5
    on: tuple[type[BaseException], ...] = (Exception,)
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name, duration in (("base", self.base), ("cap", self.cap)):
            object.__setattr__(self, name, to_seconds(duration, f"Retry.{name}"))
        for name, count in (("max_attempts", self.max_attempts), ("max_crashes", self.max_crashes)):
            if type(count) is not int:
                raise TypeError(f"Retry.{name} must be a whole number, got {count!r}")
        for name, number in (("factor", self.factor), ("jitter", self.jitter)):
            if not isinstance(number, (int, float)):
                raise TypeError(f"Retry.{name} must be a number, got {number!r}")
        for name, kinds in (("on", self.on), ("never", self.never)):
            object.__setattr__(self, name, _exception_classes(name, kinds))
        base, cap = to_seconds(self.base), to_seconds(self.cap)
        if self.max_attempts < 1:
            raise ValueError(f"Retry.max_attempts must be 1 or more, got {self.max_attempts}; 1 means no retry")
        if self.max_crashes < 0:
            raise ValueError(f"Retry.max_crashes must be 0 or more, got {self.max_crashes}")
        if not (base >= 0 and cap >= 0 and self.factor >= 1):
            raise ValueError(
                f"Retry must have base >= 0, cap >= 0 and factor >= 1, got {base}, {cap} and {self.factor}"
            )
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"Retry.jitter must be 0 to 1, got {self.jitter}")

    def allows(self, error: BaseException) -> bool:
        """Return whether the error is retried; an exception group is if each of its errors is (see `refused_by`)."""
        return refused_by(self, error) is None


def members_of(error: BaseException) -> list[BaseException]:
    """Return the errors of an exception group and of the groups in it, in their order; of another error, itself."""
    left, found = [error], list[BaseException]()
    while left:
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left += reversed(one.exceptions)
        else:
            found.append(one)
    return found


def refused_by(
    retry: Retry, error: BaseException, apart_from: tuple[type[BaseException], ...] = ()
) -> BaseException | None:
    """Return the error that is not retried: of an exception group, the first one. None if all are retried.

    `on` may name the group or its errors. A group of one error counts as that error.

    Args:
        apart_from: Errors that do not count.
    """
    if isinstance(error, retry.never):
        return error
    members = members_of(error)
    on = (BaseException,) if len(members) > 1 and isinstance(error, retry.on) else retry.on
    for member in members:
        if not isinstance(member, apart_from) and (isinstance(member, retry.never) or not isinstance(member, on)):
            return member
    return None


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Decision to run the task again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Bury:
    """Decision to give the task up."""

    reason: Reason


def backoff(retry: Retry, failures: int, chance: float | None = None) -> float:
    """Return the seconds to wait after the `failures`-th failure (from 1). chance: 0 to 1, random by default.

    Exponential backoff with proportional jitter; see "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    share = RUNTIME.uniform(0, 1) if chance is None else chance
    base, cap = to_seconds(retry.base), to_seconds(retry.cap)
    try:
        full = min(cap, base * retry.factor ** (max(failures, 1) - 1))
    except OverflowError:
        full = cap
    return full * (1 - retry.jitter * share)


def after_failure(retry: Retry, counters: Counters, error: BaseException, max_attempts: int | None) -> TryAgain | Bury:
    """Decide after a failed attempt. counters: with this attempt. max_attempts: the producer's limit."""
    reason = reason_to_bury(retry, counters, error, max_attempts)
    return TryAgain(backoff(retry, counters.attempts)) if reason is None else Bury(reason)


def reason_to_bury(retry: Retry, counters: Counters, error: BaseException, max_attempts: int | None) -> Reason | None:
    """Return why no attempt follows a failed one; None if another one follows. Arguments: see `after_failure`."""
    if not retry.allows(error):
        return Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.NOT_RETRYABLE
    if counters.attempts >= (max_attempts or retry.max_attempts):
        return Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.ATTEMPTS_EXHAUSTED
    return None


_IN_COMPANY: Final = 2
"""Crashes in a row after which a task runs in a process of its own. Until then, any task of the process may be the
cause."""

_TO_QUARANTINE: Final = 3
"""Crashes within the window after which a task is quarantined although it made progress between them."""

_TO_BURY: Final = 10
"""Crashes within the window that a task survives if it makes progress between them, or `max_crashes` if that is more.
"""


def after_crash(retry: Retry, in_a_row: int, in_window: int) -> Bury | None:
    """Decide whether a claimed task is resumed (None) or given up.

    Args:
        in_a_row: Crashes since the task's last progress.
        in_window: Crashes within the window, whether the task made progress between them or not.
    """
    limit = max(retry.max_crashes, _IN_COMPANY) if retry.max_crashes else 0
    if in_a_row > limit or in_window > max(retry.max_crashes, _TO_BURY):
        return Bury(Reason.CRASH_LOOP)
    return None


def must_quarantine(in_a_row: int, in_window: int) -> bool:
    """Return whether a task runs in a process of its own after its crashes. See `after_crash`."""
    return in_a_row >= _IN_COMPANY or in_window >= _TO_QUARANTINE

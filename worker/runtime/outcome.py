"""From the way a run ended to what is to be done: pure, no Redis."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...deadletter import Bury, Reason, Retry, TryAgain, after_failure
from ...queues import Counters, PayloadTooLarge
from ..durable import ParkReason
from ..errors import (
    ArtifactTooLarge,
    Incoherent,
    Reschedule,
    RetryLater,
    Snooze,
    StateError,
    StepInDoubt,
    StepMismatch,
    UnserialisableResult,
)

__all__ = ["Burial", "Cancelled", "Outcome", "Park", "Quarantined", "Release", "Rerun", "Success", "after_error"]


@dataclass(frozen=True, slots=True)
class Success:
    """The handler returned; `result` as JSON. handed_to: the task that goes on, where it did not, but handed on."""

    result: bytes
    counters: Counters
    handed_to: str | None = None


@dataclass(frozen=True, slots=True)
class Rerun:
    """Run it again after `delay` seconds; `event` names why in the log. suspect: it stays one."""

    delay: float
    event: str
    counters: Counters
    error: BaseException
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Burial:
    """Give it up."""

    reason: Reason
    counters: Counters
    error: BaseException


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Somebody asked for its end."""

    counters: Counters


@dataclass(frozen=True, slots=True)
class Release:
    """The worker is stopping: give it back at no cost."""

    counters: Counters


@dataclass(frozen=True, slots=True)
class Park:
    """It waits for something: run it again when that has come, or its time has passed. Costs no attempt."""

    parked: ParkReason
    counters: Counters


@dataclass(frozen=True, slots=True)
class Quarantined:
    """It is a suspect that may not run here and now: leave it to a worker that runs it alone."""


Outcome = Success | Rerun | Burial | Cancelled | Release | Park | Quarantined

_PERMANENT: dict[type[BaseException], Reason] = {
    StepInDoubt: Reason.IN_DOUBT,
    UnserialisableResult: Reason.UNSERIALISABLE_RESULT,
    StepMismatch: Reason.NOT_RETRYABLE,
    Incoherent: Reason.INCOHERENT,
    StateError: Reason.NOT_RETRYABLE,
    PayloadTooLarge: Reason.NOT_RETRYABLE,
    ArtifactTooLarge: Reason.NOT_RETRYABLE,
}
"""Errors that would come again, however often the task is run."""


def _unwrap_group(error: BaseException) -> BaseException:
    """What a group of errors, as a task group raises it, comes to: its one member, or the one that decides alone."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        for member in map(_unwrap_group, error.exceptions):
            if isinstance(member, (*_PERMANENT, Reschedule)):
                return member
    return error


def after_error(error: BaseException, retry: Retry, counters: Counters, max_attempts: int | None) -> Rerun | Burial:
    """What follows a run that raised. counters: without this attempt. max_attempts: the producer's word."""
    error = _unwrap_group(error)
    if isinstance(error, Snooze):
        return Rerun(error.after, "snoozed", counters, error)
    counted = counters.attempted()
    for kind, reason in _PERMANENT.items():
        if isinstance(error, kind):
            return Burial(reason, counted, error)
    asked = replace(retry, on=(RetryLater,), never=()) if isinstance(error, RetryLater) else retry
    decision = after_failure(asked, counted, error, max_attempts)
    match decision:
        case Bury(reason):
            return Burial(reason, counted, error)
        case TryAgain(delay):
            after = error.after if isinstance(error, RetryLater) else delay
            return Rerun(after, "attempt_failed", counted, error)

"""Outcomes: what is stored for a delivery, and the pure decision that follows an error. No Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...deadletter.policy import Bury, Reason, Retry, TryAgain, after_failure, members_of, refused_by
from ...queues.delivery.settlement import Counters
from ...queues.errors import (
    InvalidBudgetUse,
    LargeValueLost,
    NotEncrypted,
    PayloadTooLarge,
    TamperedData,
    TurnRefused,
    UnreadableCheckpoint,
)
from ...queues.records import State
from ..durable.run import Run
from ..durable.stop_reasons import STOP_RULES, ParkReason, StopReason, counters_after
from ..errors import (
    ArtifactTooLarge,
    BudgetExceeded,
    Incoherent,
    OrphanedSteps,
    Reschedule,
    ResultMismatch,
    RetryLater,
    Snooze,
    SpawnRefused,
    StateError,
    StepDefinitionError,
    StepExited,
    StepInDoubt,
    StepMismatch,
    StepOutsideTask,
    StepResolvedAsFailed,
    TaskDefinitionError,
    UnserialisableResult,
    WorkspaceTooLarge,
    WrongApp,
)
from ..middleware import Settlement


class Success(NamedTuple):
    """The handler returned `result`, as JSON, or a successor continues its work. handed_to: id of the successor."""

    result: bytes
    counters: Counters
    handed_to: str | None = None

    @property
    def stop(self) -> StopReason:
        return StopReason.COMPLETED if self.handed_to is None else StopReason.CONTINUED


@dataclass(frozen=True, slots=True)
class Rerun:
    """The task runs again after `delay` seconds. max_returns: how often it may be returned, where it was returned."""

    delay: float
    stop: StopReason
    counters: Counters
    error: BaseException
    max_returns: int | None = None

    @property
    def event(self) -> str:
        """The event type that says why, in the log."""
        return STOP_RULES[self.stop].event or self.stop.value

    @property
    def expected(self) -> bool:
        """Whether it is no sign of trouble: the handler asked for it, or the task waits for a worker of its own app."""
        return self.stop is StopReason.SNOOZED or isinstance(self.error, WrongApp)


@dataclass(frozen=True, slots=True)
class Burial:
    """The task becomes a dead letter."""

    reason: Reason
    counters: Counters
    error: BaseException
    stop = StopReason.BURIED


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A caller cancelled the task."""

    counters: Counters
    stop = StopReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Release:
    """The task returns to its queue at no cost, such as because the worker is shutting down."""

    counters: Counters
    stop: StopReason = StopReason.RELEASED


@dataclass(frozen=True, slots=True)
class Park:
    """The task waits, and runs again when what it waits for has happened or its time has passed."""

    parked: ParkReason
    counters: Counters
    stop = StopReason.PARKED


@dataclass(frozen=True, slots=True)
class Limited:
    """The task waits until its limits have room. limit: the one that has none. retry: seconds until the next look."""

    limit: str
    retry: float
    counters: Counters
    stop: StopReason = StopReason.LIMITED


@dataclass(frozen=True, slots=True)
class AwaitVersion:
    """The task needs a newer worker, and waits for one, at most `limit` seconds.

    needed: the data format; or the version of the code of the task with the name `task`.
    """

    needed: int
    limit: float
    counters: Counters
    error: BaseException
    task: str | None = None
    stop = StopReason.TOO_NEW


@dataclass(frozen=True, slots=True)
class Paused:
    """A pause of an operator holds the task. number, target: of its rule, see `queues.pauses.PauseRule`."""

    number: int
    target: str
    counters: Counters
    stop = StopReason.PAUSED


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The task may run only in quarantine, not here and now."""

    counters: Counters
    stop = StopReason.QUARANTINED


def ends_attempt(outcome: Outcome) -> bool:
    """Return whether the next run of the task, if there is one, is another attempt."""
    if isinstance(outcome, Rerun):
        return outcome.max_returns is None and outcome.stop is not StopReason.CRASHED
    return isinstance(outcome, (Success, Burial, Cancelled))


Outcome = Success | Rerun | Burial | Cancelled | Release | Park | Limited | AwaitVersion | Paused | Quarantined

_PERMANENT: Final[dict[type[BaseException], Reason]] = {
    StepInDoubt: Reason.IN_DOUBT,
    TamperedData: Reason.UNDECRYPTABLE,
    NotEncrypted: Reason.UNDECRYPTABLE,
    UnreadableCheckpoint: Reason.UNREADABLE,
    LargeValueLost: Reason.UNREADABLE,
    UnserialisableResult: Reason.UNSERIALISABLE_RESULT,
    TaskDefinitionError: Reason.NOT_RETRYABLE,
    StepDefinitionError: Reason.NOT_RETRYABLE,
    StepExited: Reason.NOT_RETRYABLE,
    StepOutsideTask: Reason.NOT_RETRYABLE,
    OrphanedSteps: Reason.ORPHANED_STEPS,
    StepMismatch: Reason.NOT_RETRYABLE,
    ResultMismatch: Reason.NOT_RETRYABLE,
    StepResolvedAsFailed: Reason.NOT_RETRYABLE,
    Incoherent: Reason.INCOHERENT,
    BudgetExceeded: Reason.BUDGET,
    InvalidBudgetUse: Reason.INVALID_ARGUMENTS,
    StateError: Reason.NOT_RETRYABLE,
    WorkspaceTooLarge: Reason.NOT_RETRYABLE,
    TurnRefused: Reason.NOT_RETRYABLE,
    PayloadTooLarge: Reason.NOT_RETRYABLE,
    SpawnRefused: Reason.NOT_RETRYABLE,
    ArtifactTooLarge: Reason.NOT_RETRYABLE,
}
"""Errors that another attempt would only repeat."""


def _unwrap_group(error: BaseException, retry: Retry) -> BaseException:
    """Return the error of a task group that decides: its only member, or the first that must not be retried.

    Without such a member: the first that asks for another run, else the group. `on` may name the group or its members.
    """
    members = members_of(error)
    if len(members) == 1:
        return members[0]
    for member in members:
        if isinstance(member, tuple(_PERMANENT)):
            return member
    refused = refused_by(retry, error, apart_from=(Reschedule,))
    if refused is not None:
        return refused
    return next((member for member in members if isinstance(member, Reschedule)), error)


def after_error(
    error: BaseException,
    retry: Retry,
    counters: Counters,
    max_attempts: int | None,
    stop: StopReason = StopReason.FAILED,
) -> Rerun | Burial:
    """Return what follows a run that raised.

    Args:
        error: what the handler raised, or what stopped it.
        retry: the task's.
        counters: without this attempt.
        max_attempts: the producer's limit, which replaces the task's.
        stop: why the run stopped.
    """
    error = _unwrap_group(error, retry)
    if isinstance(error, Snooze):
        return Rerun(error.after, StopReason.SNOOZED, counters_after(StopReason.SNOOZED, counters), error)
    counted = counters_after(stop, counters)
    for kind, reason in _PERMANENT.items():
        if isinstance(error, kind):
            return Burial(reason, counted, error)
    policy = retry
    if isinstance(error, RetryLater):
        policy = replace(retry, on=(RetryLater,), never=())
    match after_failure(policy, counted, error, max_attempts):
        case Bury(reason):
            return Burial(reason, counted, error)
        case TryAgain(delay):
            after = error.after if isinstance(error, RetryLater) else delay
            return Rerun(after, stop, counted, error)


_STATES: Final[Mapping[str, State]] = {
    "succeed": State.SUCCEEDED,
    "cancel": State.CANCELLED,
    "release": State.QUEUED,
    "quarantine": State.QUEUED,
    "limit": State.LIMITED,
}
"""State of the task after each settling act; those with an error or a delay go by their outcome."""


@dataclass(slots=True, kw_only=True)
class RunSettlement(Settlement):
    """run, outcome: what is settled. on_wait: called when Redis is unavailable."""

    run: Run
    outcome: Outcome
    on_wait: Callable[[], None]

    def replace_outcome(self, outcome: Outcome) -> None:
        """Show hooks another outcome, which was stored in place of the first one."""
        self.outcome, self.stop = outcome, outcome.stop.value
        self.state, self.error, self.reason = _STATES[STOP_RULES[outcome.stop].act or ""], None, None


def settlement_of(run: Run, outcome: Outcome, on_wait: Callable[[], None]) -> RunSettlement:
    """Return the settlement of a run, as middleware sees it."""
    state, error, reason, delay = _STATES.get(STOP_RULES[outcome.stop].act or "", State.SCHEDULED), None, None, None
    match outcome:
        case Burial():
            state, error, reason = State.DEAD, outcome.error, str(outcome.reason)
        case Rerun():
            state, error, delay = State.SCHEDULED, outcome.error, outcome.delay
        case Park():
            state, delay = State.WAITING, outcome.parked.delay
        case AwaitVersion():
            state = State.WAITING
        case Limited():
            delay = outcome.retry
        case Release():
            state = State.QUEUED
    return RunSettlement(
        state=state,
        stop=outcome.stop.value,
        attempt=run.history.counters.attempts + 1,
        error=error,
        reason=reason,
        delay=delay,
        run=run,
        outcome=outcome,
        on_wait=on_wait,
    )

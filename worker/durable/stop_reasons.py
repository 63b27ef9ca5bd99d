"""Stop reasons: why a run stopped, and one table of what follows from each.

The executor, the settler, the handoff document and the next run's resumption read the table. Event types, handoff
reasons and resumption words are stored strings: a changed one is not understood by workers of the previous version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from ...queues.delivery.settlement import Counters, WakeCondition
from .journal.handoff.document import Why
from .journal.resumption import After


class StopReason(Enum):
    """Why a run stopped. The value is the word in the worker's log."""

    __hash__ = object.__hash__  # members are singletons, and every run looks one up

    LOST = "lost"
    """Another worker holds the lease."""
    DATA_LOST = "data_lost"
    """Redis has lost entries of this run that are not kept any more."""
    CANCELLED = "cancelled"
    """A caller cancelled the task."""
    RELEASED = "released"
    """The worker is shutting down."""
    TIMED_OUT = "timed_out"
    """The run exceeded its time limit."""
    IDLE = "idle"
    """No step began or ended, and nothing was saved, for longer than the idle limit."""
    INCOHERENT = "incoherent"
    """A coherence check with the policy `bury` failed."""
    EXHAUSTED = "exhausted"
    """A budget of the task is used up, and says `bury`; or a person refused to raise it."""
    CONTINUED = "continued"
    """A successor continues the work (`ctx.continue_as`)."""
    PARKED = "parked"
    """The task waits without a slot and without a lease."""
    COMPLETED = "completed"
    """The handler returned."""
    FAILED = "failed"
    """The handler raised, and another attempt follows."""
    SNOOZED = "snoozed"
    """The handler asked to run again later."""
    BURIED = "buried"
    """The task became a dead letter."""
    CRASHED = "crashed"
    """The task crashed more than once in a row: its next run is delayed."""
    QUARANTINED = "quarantined"
    """The task may run only in quarantine."""
    RETURNED = "returned"
    """This worker cannot run the task; another one may."""
    LIMITED = "limited"
    """A limit of the task has no room for it."""
    LIMIT_LOST = "limit_lost"
    """A token of a limit expired or was taken away, and the limit has no room for another one."""
    TOO_NEW = "too_new"
    """The task needs a worker of a newer version."""
    PAUSED = "paused"
    """A pause of an operator holds the task."""
    REPLAYED = "replayed"
    """An operator replayed the dead letter."""
    FORKED = "forked"
    """The task is a fork of another one."""


@dataclass(frozen=True, slots=True)
class ParkReason:
    """The conditions that a parked run waits for.

    delay: seconds until it runs again anyway. waits: what it waits for, such as "message". conditions: what wakes it,
    see `queues.delivery.settlement.WakeCondition`.
    """

    delay: float
    waits: str
    conditions: tuple[WakeCondition, ...]


@dataclass(frozen=True, slots=True)
class LimitReason:
    """The limit that has no room for a run. retry: seconds until the next look. of_task: whether the task is limited by
    it, and does not use it by a call only.
    """

    limit: str
    retry: float
    of_task: bool


StopWord = Literal["park", "shutdown", "cancel", "timeout", "lost", "limit", "continue", "incoherent", "budget"]


@dataclass(frozen=True, slots=True)
class Stop:
    """The stop of a run, as its handler sees it: `ctx.stopping`.

    Attributes:
        reason: `park`: the task waits (`ctx.ask`, `ctx.inbox(wait=...)`). `shutdown`: its worker stops, and another one
            continues. `cancel`: a caller cancelled it. `timeout`: its time limit or its idle limit has passed. `lost`:
            another worker may have it. `limit`: its token of a limit is gone, and the task waits for another one.
            `continue`: a successor continues the work (`ctx.continue_as`). `incoherent`: a coherence check failed.
            `budget`: a budget is used up, and the task becomes a dead letter.
        ends_task: whether no later run continues the work: at `cancel`, `incoherent` and `budget`, and at a `timeout`
            after which the task's `Retry` allows no further attempt. It is what is known now: if the worker dies before
            it has stored the outcome of a time-out, the task runs again, and an operator may replay a dead letter.
    """

    reason: StopWord
    ends_task: bool


SettleAct = Literal["succeed", "fail", "retry", "bury", "release", "park", "limit", "cancel", "quarantine"]


@dataclass(frozen=True, slots=True)
class StopRule:
    """The consequences of one stop reason.

    act: how the delivery is settled; `fail` retries or buries by the task's `Retry`; None where this run settles
    nothing. event: the event that the settlement writes. why: the word in the handoff document. after: the word in the
    next run's `Resumption`. handoff: whether the run stores a handoff document before it settles. attempt: whether the
    run counts as an attempt. new_message: whether the task's next delivery is a new stream entry, so that a lost
    delivery of it proves a crash since. word: the reason in `ctx.stopping`; None where no handler is stopped.
    """

    act: SettleAct | None
    event: str | None = None
    why: Why | None = None
    after: After | None = None
    handoff: bool = False
    attempt: bool = False
    new_message: bool = False
    word: StopWord | None = None


STOP_RULES: Final[Mapping[StopReason, StopRule]] = {
    StopReason.LOST: StopRule(None, "crashed", "crash", "crash", word="lost"),
    StopReason.DATA_LOST: StopRule("release", "data_lost", "crash", "crash", word="lost"),
    StopReason.CANCELLED: StopRule("cancel", "cancelled", word="cancel"),
    StopReason.RELEASED: StopRule("release", "handed_off", "shutdown", "hand_off", handoff=True, word="shutdown"),
    StopReason.FAILED: StopRule("fail", "attempt_failed", "failure", "failure", attempt=True, new_message=True),
    StopReason.TIMED_OUT: StopRule(
        "fail", "attempt_failed", "budget", "failure", handoff=True, attempt=True, new_message=True, word="timeout"
    ),
    StopReason.IDLE: StopRule(
        "fail", "attempt_failed", "budget", "failure", handoff=True, attempt=True, new_message=True, word="timeout"
    ),
    StopReason.INCOHERENT: StopRule("fail", "buried", "burial", attempt=True, word="incoherent"),
    StopReason.EXHAUSTED: StopRule("fail", "buried", "burial", attempt=True, word="budget"),
    StopReason.CONTINUED: StopRule("succeed", "succeeded", "hand_off", attempt=True, word="continue"),
    StopReason.PARKED: StopRule("park", "waiting", "waiting", "wait", handoff=True, new_message=True, word="park"),
    StopReason.LIMITED: StopRule("limit"),
    StopReason.LIMIT_LOST: StopRule(
        "limit", "limit_lost", "waiting", "wait", handoff=True, new_message=True, word="limit"
    ),
    StopReason.COMPLETED: StopRule("succeed", "succeeded", attempt=True),
    StopReason.SNOOZED: StopRule("retry", "snoozed", "waiting", "wait", handoff=True, new_message=True),
    StopReason.BURIED: StopRule("bury", "buried", "burial", handoff=True),
    StopReason.CRASHED: StopRule("retry", "crash_backoff", "crash", "crash"),
    StopReason.QUARANTINED: StopRule("quarantine"),
    StopReason.RETURNED: StopRule("retry", "returned"),
    StopReason.TOO_NEW: StopRule("park"),
    StopReason.PAUSED: StopRule("park"),
    StopReason.REPLAYED: StopRule(None, "replayed", "burial", "replay", new_message=True),
    StopReason.FORKED: StopRule(None, "forked", "asked", "fork", new_message=True),
}

_BY_EVENT: Final[Mapping[str, StopReason]] = {
    rule.event: reason for reason, rule in reversed(list(STOP_RULES.items())) if rule.event is not None and rule.after
}
"""The first row of an event type wins: the log does not distinguish a time-out from another failure."""


def stop_of_event(event: str) -> StopReason | None:
    """Return why the previous run stopped, if an event of this type says so."""
    return _BY_EVENT.get(event)


def counters_after(reason: StopReason, counters: Counters) -> Counters:
    """Return the counters after a run that stopped for this reason."""
    return counters.attempted() if STOP_RULES[reason].attempt else counters

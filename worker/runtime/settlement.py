"""The settlement of a run: an outcome with its run, as the settle hooks of Perdure's own middleware see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ...queues.records import State
from ..durable.middleware import Settlement
from ..durable.run import Run
from ..durable.stop_reasons import STOP_RULES
from .outcome import AwaitVersion, Burial, Outcome, Park, Rerun

_STATES: Final[Mapping[str, State]] = {
    "succeed": State.SUCCEEDED,
    "cancel": State.CANCELLED,
    "release": State.QUEUED,
    "quarantine": State.QUEUED,
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

"""Summary of what a resumed run continues from: why the previous run stopped, how long ago, and what was restored."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from ...queues.wording import shown_time
from .handoff.budget import HANDOFF_TOKENS, Counter, clipped, estimated_tokens, fitted_text
from .handoff.document import Handoff
from .quoting import quoted_line

After = Literal["crash", "hand_off", "failure", "wait", "replay", "fork"]


class Resumption(BaseModel):
    """Reason for the stop of the previous run, and what this one continues from.

    Attributes:
        at: Time of the stop in milliseconds, by the Redis clock: that of the last sign of the previous run.
        gap: Seconds without a worker, by the Redis clock: from the last sign of the previous run to the reading of its
            checkpoint; None if nothing is known of the previous run.
        restored: Number of restored records by kind (steps, events, decisions, discoveries, messages, progress). Of
            an agent, the steps of its plan that are done and the messages in its state; `nested steps` are the
            recorded steps within the running one. For a function whose checkpoint has more than 512 fields, the kind
            `records` replaces all but events: it is their number.
        handoff: Handoff document of the previous run, or one drafted from the event log if it left none.
        received: Handoff document of the task that this one continues, however long ago it was received.
    """

    model_config = ConfigDict(frozen=True)

    after: After
    at: int | None = None
    gap: float | None = None
    restored: dict[str, int] = {}
    handoff: Handoff | None = None
    received: Handoff | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the previous run was interrupted or continues here, which a user should see."""
        return self.after in ("crash", "hand_off", "replay", "fork")

    @property
    def continues(self) -> bool:
        """Whether this is the first run of a successor: another task was continued as this one."""
        return self.after == "hand_off" and self.handoff is not None and self.handoff.why == "hand_off"

    def summary(self) -> str:
        """Return the summary as one line."""
        found = ", ".join(
            f"{count} {_ONE.get(kind, kind) if count == 1 else kind}" for kind, count in self.restored.items() if count
        )
        at = "" if self.at is None else f" at {shown_time(self.at)}"
        gap = "" if self.gap is None else f" ({self.gap:.1f} s without a worker)"
        last = (
            "" if self.handoff is None or not self.handoff.last_completed else quoted_line(self.handoff.last_completed)
        )
        calls = () if self.handoff is None else self.handoff.dependencies.in_flight
        noted = ", ".join(quoted_line(one.call) for one in calls[:_MAX_CALLS])
        done, in_flight = "" if not last else f"; last step: {quoted_line(last)}", noted and f"; in flight: {noted}"
        stopped = (_CONTINUED if self.continues else _STOPPED[self.after]).format(at=at)
        return f"{stopped}{gap}; restored: {found or 'nothing'}{done}{in_flight}"

    def text(self, budget: int = HANDOFF_TOKENS, *, count: Counter = estimated_tokens) -> str:
        """Return the text for a model: the summary, then the handoff as Markdown, within a budget of tokens."""
        text = self.summary()
        if self.handoff is not None:
            text += "\n\n"
            text += fitted_text(self.handoff, max(0, budget - count(text)), count=count)
        return clipped(text, budget, count)


_MAX_CALLS: Final = 3
"""Calls in flight that the summary names."""

_ONE: Final = {
    "steps": "step",
    "nested steps": "nested step",
    "events": "event",
    "decisions": "decision",
    "discoveries": "discovery",
    "messages": "message",
}

_STOPPED: Final[dict[str, str]] = {
    "crash": "the previous run crashed{at}",
    "hand_off": "the previous run was stopped and released the task{at}",
    "failure": "the previous run failed{at}",
    "wait": "the previous run stopped to wait{at}",
    "replay": "the task became a dead letter{at} and was replayed",
    "fork": "the task was forked from another one{at}",
}

_CONTINUED: Final = "another task continued as this one{at}"

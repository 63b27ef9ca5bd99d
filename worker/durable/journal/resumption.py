"""Summary of what a resumed run continues from: why the previous run stopped, how long ago, and what was restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from ....queues.wording import counted, shown_time
from .handoff.budget import HANDOFF_TOKENS, Counter, clipped, estimated_tokens, fitted_text
from .handoff.document import Handoff
from .quoting import quoted_line

After = Literal["crash", "hand_off", "failure", "wait", "replay", "fork"]

PHRASES: Final[Mapping[After, str]] = {
    "crash": "a crash",
    "hand_off": "a shutdown of its worker",
    "failure": "a failure",
    "wait": "a wait",
    "replay": "a replay",
    "fork": "a fork of another task",
}
"""Phrase for each reason, after which a run resumes. Logs, notices and prompts have no other words for it."""


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

    @property
    def reason(self) -> str:
        """Phrase for the reason of the stop: "a crash"."""
        return "a handoff from another task" if self.continues else PHRASES[self.after]

    @property
    def dated_reason(self) -> str:
        """The reason with the time of the stop, which of a replay is that of the dead letter."""
        if self.at is None:
            return self.reason
        return f"{self.reason} {'of its dead letter of' if self.after == 'replay' else 'at'} {shown_time(self.at)}"

    def summary(self) -> str:
        """Return the summary as one line."""
        found = ", ".join(
            counted(count, _SINGULAR.get(kind) or kind.removesuffix("s"), kind)
            for kind, count in self.restored.items()
            if count
        )
        gap = "" if self.gap is None else f" ({self.gap:.1f} s without a worker)"
        last = (
            "" if self.handoff is None or not self.handoff.last_completed else quoted_line(self.handoff.last_completed)
        )
        calls = () if self.handoff is None else self.handoff.dependencies.in_flight
        noted = ", ".join(quoted_line(one.call) for one in calls[:_MAX_CALLS])
        done, in_flight = "" if not last else f"; last step: {quoted_line(last)}", noted and f"; in flight: {noted}"
        return f"resumed after {self.dated_reason}{gap}; restored: {found or 'nothing'}{done}{in_flight}"

    def text(self, budget: int = HANDOFF_TOKENS, *, count: Counter = estimated_tokens) -> str:
        """Return the text for a model: the summary, then the handoff as Markdown, within a budget of tokens."""
        text = self.summary()
        if self.handoff is not None:
            text += "\n\n"
            text += fitted_text(self.handoff, max(0, budget - count(text)), count=count)
        return clipped(text, budget, count)


_MAX_CALLS: Final = 3
"""Calls in flight that the summary names."""

_SINGULAR: Final = {"discoveries": "discovery", "progress": "progress"}
"""Nouns of kinds of records that are no plural in -s."""

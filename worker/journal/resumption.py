"""What a run that goes on where another had stopped is told of that: why, how long ago, what was found again."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from .handoff import HANDOFF_TOKENS, Counter, Handoff, clipped, estimated_tokens, fitted_text

__all__ = ["After", "Resumption"]

After = Literal["crash", "hand_off", "failure", "wait", "replay", "fork"]


class Resumption(BaseModel):
    """Why the former run stopped, and what this one goes on from.

    gap: seconds in which nobody worked on the task, by Redis' clock: from the last that is known of the former run to
    the reading of its checkpoint by this one; None where nothing is known of the former. restored: what was found,
    counted by kind (steps, events, decisions, discoveries, messages, progress). handoff: as the former run left it, or
    as the event log tells it where it left none. received: the one with which another task has handed on, whenever that
    was.
    """

    model_config = ConfigDict(frozen=True)

    after: After
    gap: float | None = None
    restored: dict[str, int] = {}
    handoff: Handoff | None = None
    received: Handoff | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the former run was cut off or handed on, so that somebody may want to hear of it."""
        return self.after in ("crash", "hand_off", "replay", "fork")

    def summary(self) -> str:
        """All of it in one line."""
        found = ", ".join(
            f"{count} {_ONE.get(kind, kind) if count == 1 else kind}" for kind, count in self.restored.items() if count
        )
        ago = "" if self.gap is None else f" {self.gap:.1f} s ago"
        last = "" if self.handoff is None or not self.handoff.last_completed else self.handoff.last_completed
        return f"{_STOPPED[self.after]}{ago}; restored: {found or 'nothing'}{last and f', the last step {last}'}"

    def text(self, budget: int = HANDOFF_TOKENS, *, count: Counter = estimated_tokens) -> str:
        """What to tell a model: the summary, then the handoff as Markdown; no more tokens than the budget."""
        text = self.summary()
        if self.handoff is not None:
            text += "\n\n"
            text += fitted_text(self.handoff, max(0, budget - count(text)), count=count)
        return clipped(text, budget, count)


_ONE: Final = {
    "steps": "step",
    "events": "event",
    "decisions": "decision",
    "discoveries": "discovery",
    "messages": "message",
}

_STOPPED: Final[dict[str, str]] = {
    "crash": "the former run was cut off by a crash",
    "hand_off": "the former run handed on",
    "failure": "the former run failed",
    "wait": "the former run stopped to wait",
    "replay": "the task was given up, and put back by a person",
    "fork": "the task began as a copy of another",
}

"""What counts as incoherent, and what follows: an agent's `coherence`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

__all__ = ["Coherence", "Policy"]

Policy = Literal["off", "warn", "hand_off", "bury"]
"""What follows a finding. warn: an event and a line in the log. hand_off: the same, and the task is parked, with its
handoff, until somebody sends it a message. bury: the same, and it becomes a dead letter `incoherent`."""

_POLICIES: Final = ("off", "warn", "hand_off", "bury")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence:
    """The checks of one agent, each with its policy.

    goal: its goal is that which was enqueued. plan: plan and results are consistent. progress: something got done
    within `stuck_minutes`. repetition: no tool was called `repeats` times with the same arguments among the last
    `window` calls. context: its messages have no more than `context_tokens`. waiting: it does not wait for a message
    that has come.
    """

    goal: Policy = "warn"
    plan: Policy = "warn"
    progress: Policy = "warn"
    repetition: Policy = "warn"
    context: Policy = "warn"
    waiting: Policy = "warn"
    stuck_minutes: float = 30.0
    repeats: int = 5
    window: int = 20
    context_tokens: int = 128_000

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "Policy" and value not in _POLICIES:
                raise ValueError(f"coherence: {one.name} must be one of {', '.join(_POLICIES)}, not {value!r}")
            if one.type != "Policy" and not value > 0:
                raise ValueError(f"coherence: {one.name} must be more than 0, not {value!r}")
        if not 2 <= self.repeats <= self.window:
            raise ValueError(f"coherence: repeats must be 2 or more and at most the window of {self.window} calls")

    def policy(self, check: str) -> Policy:
        """What follows a finding of this check."""
        policy: Policy = getattr(self, check)
        return policy

"""Settings of an agent's coherence checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

__all__ = ["Coherence", "Policy"]

Policy = Literal["off", "warn", "hand_off", "bury"]
"""Consequence of a finding. `warn` logs an event and a warning. `hand_off` also parks the task, with its handoff
document, until it receives a message. `bury` also makes it a dead letter with reason `incoherent`."""

_POLICIES: Final = ("off", "warn", "hand_off", "bury")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence:
    """The checks of one agent, each with its policy.

    Attributes:
        goal: the goal of the state is the one that was enqueued.
        plan: plan and results are consistent.
        progress: the agent made progress within `stuck_minutes`.
        repetition: no tool was called `repeats` times with the same arguments in the last `window` calls.
        context: the messages have at most `context_tokens` tokens.
        waiting: the agent does not wait for a message that is in its inbox.
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
                raise ValueError(f"coherence: {one.name} must be one of {', '.join(_POLICIES)}, got {value!r}")
            if one.type != "Policy" and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"coherence: {one.name} must be more than 0, got {value!r}")
        if not 2 <= self.repeats <= self.window:
            raise ValueError(f"coherence: repeats must be from 2 to window ({self.window}), got {self.repeats}")

    def policy(self, check: str) -> Policy:
        """Return the policy of a check."""
        policy: Policy = getattr(self, check)
        return policy

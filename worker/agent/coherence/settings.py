"""Settings of the coherence checks of an agent or a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

from ...errors import TaskDefinitionError

Policy = Literal["off", "warn", "hand_off", "bury"]
"""Consequence of a finding. `warn` logs an event and a warning. `hand_off` also parks the task, with its handoff
document, until it receives a message. `bury` also makes it a dead letter with reason `incoherent`."""

_POLICIES: Final = ("off", "warn", "hand_off", "bury")


class Finding(NamedTuple):
    """A finding of a check. `detail` is for people, `about` identifies the finding for as long as it holds."""

    check: str
    detail: str
    about: str = ""


def check_name(check: Callable[..., Any]) -> str:
    """Return the name of a check of the application: that of its function."""
    return str(getattr(check, "__name__", type(check).__name__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence:
    """The checks of one agent or function, each with its policy.

    Attributes:
        goal: the goal of the state is the one that was enqueued.
        plan: plan and results are consistent.
        progress: the agent made progress within `stuck_minutes`.
        repetition: no tool was called `repeats` times with the same arguments in the last `window` calls, no message of
            the assistant was repeated so often, and no 2 to 5 calls followed each other `loops` times. Calls and
            messages that differ in white space, case or numbering only are the same.
        context: the messages have at most `context_tokens` tokens.
        waiting: the agent does not wait for a message that is in its inbox.
        checks: checks of the application: functions of a `View` that return a `Finding`, a text, or None.
        custom: policy of their findings.
        judge: async function of a `View` that returns an objection as text, or None. It runs beside the agent after
            each `judge_every` tool calls and completed steps; its verdict is recorded, and holds until the next one.
        judged: policy of an objection.
    """

    goal: Policy = "warn"
    plan: Policy = "warn"
    progress: Policy = "warn"
    repetition: Policy = "warn"
    context: Policy = "warn"
    waiting: Policy = "warn"
    custom: Policy = "warn"
    judged: Policy = "warn"
    stuck_minutes: float = 30.0
    repeats: int = 5
    loops: int = 3
    window: int = 20
    context_tokens: int = 128_000
    checks: tuple[Callable[[Any], Any], ...] = ()
    judge: Callable[[Any], Awaitable[str | None]] | None = None
    judge_every: int = 10

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "Policy" and value not in _POLICIES:
                raise ValueError(f"coherence: {one.name} must be one of {', '.join(_POLICIES)}, got {value!r}")
            if one.type in ("int", "float") and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"coherence: {one.name} must be more than 0, got {value!r}")
        if not 2 <= self.repeats <= self.window:
            raise ValueError(f"coherence: repeats must be from 2 to window ({self.window}), got {self.repeats}")
        if self.loops < 2:
            raise ValueError(f"coherence: loops must be 2 or more, got {self.loops}")
        names = [check_name(check) for check in self.checks]
        if taken := [name for name in names if name in _BUILT_IN or names.count(name) > 1]:
            raise ValueError(f"coherence: checks must have names of their own, got {taken[0]!r}")

    def policy(self, check: str) -> Policy:
        """Return the policy of a check."""
        name = _BUILT_IN.get(check, "custom")
        policy: Policy = getattr(self, name)
        return policy


_BUILT_IN: Final = {
    **{name: name for name in ("goal", "plan", "progress", "repetition", "context", "waiting")},
    "judge": "judged",
}
"""Field with the policy of each check of Perdure."""


def check_coherence(what: str, coherence: object) -> None:
    """Raise `TaskDefinitionError` if the coherence of a task or an agent is not a `Coherence`. what: its name."""
    if not isinstance(coherence, Coherence):
        raise TaskDefinitionError(
            f"{what}: coherence must be a Coherence, such as Coherence(repetition='bury'), got {coherence!r}"
        )

"""What is handed to a model: provider-neutral messages, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...journal import Message

__all__ = ["Budgets", "Prompt"]


@dataclass(frozen=True, slots=True)
class Budgets:
    """How much of the window each layer may take, as shares of it. The turns take what the others leave.

    identity: identity and rules; more is an error, for nothing of them may be left out. memory, task, inbox: what is
    over it is left out; the goal, what is open in the plan and what is waited for never are. reserve: for the answer
    and for the descriptions of the tools. summary: what a summary may take.
    """

    identity: float = 0.10
    memory: float = 0.10
    task: float = 0.15
    inbox: float = 0.10
    reserve: float = 0.15
    summary: float = 0.05

    def __post_init__(self) -> None:
        shares = (self.identity, self.memory, self.task, self.inbox, self.reserve)
        if min(*shares, self.summary) < 0 or sum(shares) >= 1:
            raise ValueError(f"budgets are shares of the window, together less than 1 so that turns have room: {self}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A model's context. cacheable: how many messages at the beginning are the same every time.

    tokens: by layer (identity, memory, task, turns, inbox). left_out: how many of what did not fit (memories, turns,
    messages of the inbox, decisions and so on). wanted: the tokens it would have had with everything.
    """

    messages: tuple[Message, ...]
    cacheable: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    wanted: int = 0

    @property
    def total(self) -> int:
        """Tokens of all layers."""
        return sum(self.tokens.values())

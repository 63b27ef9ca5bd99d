"""A prompt: provider-neutral messages with their token counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...journal import Message

__all__ = ["Budgets", "Prompt"]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Shares of the window that layers may take. The turns take the rest.

    Attributes:
        identity: identity and rules. Exceeding it is an error, because nothing of them is left out.
        memory: the excess is left out.
        task: the excess is left out, except for the goal, open steps and what the task waits for.
        inbox: the excess is left out.
        reserve: for the answer and the descriptions of tools.
        summary: for the summary of a compaction.
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
            raise ValueError(f"budgets must be shares of the window, 0 or more and together less than 1, got {self}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The context of a call of a model.

    Attributes:
        cacheable: how many messages at the start are the same in every prompt.
        tokens: tokens by layer (identity, memory, task, turns, inbox).
        left_out: number of items that did not fit, by kind (memories, turns, inbox, decisions and so on).
        wanted: the tokens that the prompt would have with nothing left out.
    """

    messages: tuple[Message, ...]
    cacheable: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    wanted: int = 0

    @property
    def total(self) -> int:
        """Return the tokens of all layers."""
        return sum(self.tokens.values())

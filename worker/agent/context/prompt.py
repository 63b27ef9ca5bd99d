"""A prompt: provider-neutral messages with their token counts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...journal.chat import Message


@dataclass(frozen=True, slots=True)
class Budgets:
    """Shares of the window that layers may take. The turns take the rest.

    Attributes:
        identity: identity and rules. Exceeding it is an error, because nothing of them is left out.
        memory: profile and the memories for the goal; the excess is left out.
        pinned: what the user said, word for word, when older messages are left out or summarized: the first
            instructions, the excess of which is cut, then the latest messages.
        brief: the excess is left out, and counted; the first line and what is waited for always stay.
        inbox: the excess is left out.
        reserve: for the answer and the descriptions of tools.
        summary: for the summary of a compaction.
    """

    identity: float = 0.10
    memory: float = 0.10
    pinned: float = 0.05
    brief: float = 0.15
    inbox: float = 0.10
    reserve: float = 0.15
    summary: float = 0.05

    def __post_init__(self) -> None:
        shares = (self.identity, self.memory, self.pinned, self.brief, self.inbox, self.reserve)
        if min(*shares, self.summary) < 0 or sum(shares) >= 1:
            raise ValueError(f"budgets must be shares of the window, 0 or more and together less than 1, got {self}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The context of a call of a model.

    Attributes:
        stable: how many messages at the start are the same in every prompt of the task.
        cacheable: how many messages at the start are the same in the next prompt, unless turns are left out or
            summarized for it: all but the brief and the inbox.
        tokens: tokens by layer (identity, memory, goal, turns, brief, inbox).
        left_out: number of items that did not fit, by kind (memories, turns, inbox, decisions and so on).
        wanted: the tokens that the prompt would have with all turns and inbox messages.
    """

    messages: tuple[Message, ...]
    cacheable: int = 0
    stable: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    wanted: int = 0

    @property
    def total(self) -> int:
        """Return the tokens of all layers."""
        return sum(self.tokens.values())

    @property
    def cache_key(self) -> str:
        """Return a name for the stable part, the same for all prompts that start with it.

        OpenAI takes it as `prompt_cache_key`, which sends requests with the same key to the same cache.
        """
        text = "\0".join(one.content for one in self.messages[: self.stable])
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()

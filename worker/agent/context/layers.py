"""Assembly of a prompt from its layers, each within its token budget. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...errors import ContextTooLarge
from ...journal import AgentState, Message
from .conversation import SUMMARY, completed, exchanges
from .prompt import Budgets, Prompt
from .task_section import task_text
from .tokens import PER_MESSAGE, Estimate, TokenCounter, message_tokens

__all__ = ["Layers", "assemble"]

_LEAST: Final = 24
"""Tokens of a text that is not cut further: the note about the cut takes nearly as many."""

_NOTE: Final = 24
"""Most tokens of a note that says how many messages are not shown."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The parts of a context.

    Only identity and rules have the role `system`. Everything else is data that others may have written.

    Attributes:
        state: goal, plan, decisions and messages.
        identity: the start of every prompt, the same in each, so that providers can cache it.
        rules: follow the identity, also the same in each prompt.
        memories: memories for the goal, the best first.
        resumption: text about an interruption.
        in_flight: work that has not ended, such as child tasks.
        inbox: messages that arrived in the meantime, the oldest first.
    """

    state: AgentState
    identity: str = ""
    rules: Sequence[str] = ()
    memories: Sequence[str] = ()
    resumption: str = ""
    in_flight: Sequence[str] = ()
    inbox: Sequence[str] = ()


@dataclass(slots=True)
class _Draft:
    counter: TokenCounter
    tokens: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    wanted: int = 0

    def add(self, layer: str, *messages: Message) -> None:
        self.messages += messages
        self.tokens[layer] = sum(message_tokens(one, self.counter) for one in messages)

    def leave_out(self, what: str, number: int) -> None:
        if number:
            self.left_out[what] = number


def assemble(
    layers: Layers,
    window: int,
    *,
    budgets: Budgets | None = None,
    counter: TokenCounter | None = None,
    last: int | None = None,
) -> Prompt:
    """Assemble a prompt from its layers.

    Over a budget, the oldest messages, the memories of the lowest rank, and long or late inbox messages are left out.
    Exchanges are dropped whole, and the goal is never dropped. Raises `ContextTooLarge`, with the layer, if a required
    part does not fit.

    Args:
        window: tokens that the model accepts.
        last: most messages of the conversation.
    """
    budgets = budgets or Budgets()
    draft = _Draft(counter or Estimate())
    _identity(draft, layers, int(window * budgets.identity))
    inbox = _inbox(draft, layers.inbox, int(window * budgets.inbox))
    memories, memory_wanted = _fitting(layers.memories, draft, int(window * budgets.memory))
    draft.leave_out("memories", len(layers.memories) - len(memories))
    if memories:
        draft.add("memory", _user("# Memories\n\n" + "\n".join(f"- {one}" for one in memories)))
    task = task_text(
        layers.state,
        draft.counter,
        int(window * budgets.task),
        resumption=layers.resumption,
        in_flight=layers.in_flight,
    )
    draft.left_out.update(task.left_out)
    if task.text:
        draft.add("task", _user(f"# Task\n\n{task.text}"))
    draft.wanted += memory_wanted + task.wanted
    room = int(window * (1 - budgets.reserve)) - sum(draft.tokens.values())
    room -= sum(message_tokens(one, draft.counter) for one in inbox)
    if room < 0:
        task_tokens = draft.tokens.get("task", 0)
        raise ContextTooLarge(
            "task", task_tokens, max(0, task_tokens + room), "goal and open steps leave no room for the conversation"
        )
    _turns(draft, layers.state.messages, room, last)
    if inbox:
        draft.add("inbox", *inbox)
    cacheable = 1 if "identity" in draft.tokens else 0
    return Prompt(tuple(draft.messages), cacheable, draft.tokens, draft.left_out, draft.wanted)


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _identity(draft: _Draft, layers: Layers, budget: int) -> None:
    text = layers.identity.strip()
    if layers.rules:
        text += "\n\n# Rules\n\n" + "\n".join(f"- {rule}" for rule in layers.rules)
    if not text.strip():
        return
    draft.add("identity", Message(role="system", content=text.strip()))
    draft.wanted += draft.tokens["identity"]
    if draft.tokens["identity"] > budget:
        raise ContextTooLarge(
            "identity",
            draft.tokens["identity"],
            budget,
            "shorten identity and rules, or raise Budgets.identity",
        )


def _fitting(items: Iterable[str], draft: _Draft, budget: int) -> tuple[list[str], int]:
    """Return the first items that fit, and the tokens of all items."""
    kept: list[str] = []
    wanted, full = 0, False
    for item in items:
        wanted += message_tokens(_user(item), draft.counter)
        full = full or wanted > budget
        if not full:
            kept.append(item)
    return kept, wanted


def _inbox(draft: _Draft, texts: Sequence[str], budget: int) -> list[Message]:
    """Return inbox messages, long ones cut to their share; if not all fit, the first ones and a note about the rest."""
    wanted = sum(message_tokens(_user(text), draft.counter) for text in texts)
    draft.wanted += wanted
    if wanted <= budget:
        return [_user(text) for text in texts]
    share = max(_LEAST, budget // len(texts) - PER_MESSAGE)
    kept, _ = _fitting([_cut(text, share, draft.counter) for text in texts], draft, budget - _NOTE)
    hidden = len(texts) - len(kept)
    draft.leave_out("inbox", hidden)
    return [*map(_user, kept), *([_user(f"[{hidden} more messages are not shown.]")] if hidden else [])]


def _turns(draft: _Draft, messages: Sequence[Message], room: int, last: int | None) -> None:
    """Add the summary, if any, and the latest exchanges. If the last exchange alone is too large, cut its texts."""
    repaired = completed(messages)
    pinned = repaired[:1] if repaired and repaired[0].name == SUMMARY else []
    pieces = exchanges(repaired[len(pinned) :])
    costs = [sum(message_tokens(one, draft.counter) for one in piece) for piece in pieces]
    pinned_cost = sum(message_tokens(one, draft.counter) for one in pinned)
    draft.wanted += pinned_cost + sum(costs)
    room -= pinned_cost + (_NOTE if pinned_cost + sum(costs) > room else 0)
    kept: list[Message] = []
    for piece, cost in zip(reversed(pieces), reversed(costs), strict=True):
        if last is not None and len(kept) + len(piece) > last and kept:
            break
        if cost > room:
            if not kept:
                kept = _clipped(piece, room, draft.counter)
            break
        room -= cost
        kept[:0] = piece
    hidden = len(repaired) - len(pinned) - len(kept)
    draft.leave_out("turns", hidden)
    note = [_user(f"[{hidden} earlier messages are not shown.]")] if hidden else []
    if repaired:
        draft.add("turns", *pinned, *note, *kept)


def _clipped(piece: Sequence[Message], room: int, counter: TokenCounter) -> list[Message]:
    """Return the exchange with its longest texts cut until it fits."""
    clipped = list(piece)
    while (over := sum(message_tokens(one, counter) for one in clipped) - room) > 0:
        tokens, at = max((counter.count(one.content), at) for at, one in enumerate(clipped))
        if tokens <= _LEAST:
            raise ContextTooLarge("turns", room + over, max(room, 0), "the last exchange with tools does not fit")
        text = _cut(clipped[at].content, max(_LEAST, tokens - over), counter)
        clipped[at] = clipped[at].model_copy(update={"content": text})
    return clipped


def _cut(text: str, room: int, counter: TokenCounter) -> str:
    """Return a text, cut to its start with a note of the rest if it takes more than `room` tokens."""
    tokens = counter.count(text)
    keep = len(text) * max(0, room - _LEAST // 2) // max(tokens, 1)
    while tokens > room:
        cut = f"{text[:keep]}\n[{len(text) - keep} more characters]"
        if counter.count(cut) <= room or not keep:
            return cut
        keep = keep * 3 // 4
    return text

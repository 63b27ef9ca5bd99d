"""The turns of a prompt: which messages of a conversation it shows. Pure functions.

A provider caches the start of a prompt, so the first shown message must not change with each prompt. When the turns do
not fit, half of the room for them is freed at once: the next messages fit until that half is full again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from ...errors import ContextTooLarge
from ...journal import Message
from .conversation import SUMMARY, completed, exchanges
from .tokens import TokenCounter, cut, message_tokens

__all__ = ["NOTE", "Turns", "first_instructions", "pinned_within", "turns_within"]

NOTE: Final = 32
"""Most tokens of a note that says how many messages are not shown."""

_LEAST: Final = 24
"""Tokens of a text that is not cut further: the note about the cut takes nearly as many."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The shown messages, how many are not shown, and the tokens of all."""

    messages: tuple[Message, ...]
    hidden: int
    wanted: int


def first_instructions(messages: Sequence[Message]) -> int:
    """Return how many messages at the start are the user's first instructions: those before any answer or summary."""
    for at, message in enumerate(messages):
        if message.role != "user" or message.name:
            return at
    return len(messages)


def pinned_within(messages: Sequence[Message], budget: int, counter: TokenCounter) -> list[Message]:
    """Return the user's first instructions, the last one cut where the budget ends."""
    found: list[Message] = []
    for message in messages[: first_instructions(messages)]:
        tokens = message_tokens(message, counter)
        if tokens > budget:
            text = cut(message.content, budget - (tokens - counter.count(message.content)), counter)
            return [*found, message.model_copy(update={"content": text})] if budget > 2 * _LEAST else found
        budget -= tokens
        found.append(message)
    return found


def turns_within(
    messages: Sequence[Message],
    room: int,
    counter: TokenCounter,
    *,
    steady: int,
    instructions: int,
    last: int | None = None,
    archived: int = 0,
) -> Turns:
    """Return the turns that fit: the first instructions, the summary, and the latest exchanges.

    If the last exchange alone is too large, its texts are cut. Raises `ContextTooLarge` if that is not enough.

    Args:
        room: tokens of the turns in this prompt.
        steady: tokens that are there in every prompt, by which the first shown message is chosen.
        instructions: tokens of the user's first instructions when messages are hidden.
        last: most messages.
        archived: messages that have left the conversation.
    """
    whole = completed(messages)
    tokens = [message_tokens(one, counter) for one in whole]
    wanted = sum(tokens)
    spare = NOTE if archived else 0
    if wanted <= room - spare and (last is None or len(whole) <= last):
        head = _head(whole)
        return Turns((*whole[:head], *_note(archived), *whole[head:]), 0, wanted)
    first = first_instructions(whole)
    start = pinned_within(whole, instructions, counter)
    if first < len(whole) and whole[first].name == SUMMARY:
        start.append(whole[first])
        first += 1
    elif first == len(whole):  # nothing but instructions: the last ones count
        first, start = 0, []
    fixed = NOTE + sum(message_tokens(one, counter) for one in start)
    pieces = exchanges(whole[first:])
    costs = [sum(message_tokens(one, counter) for one in piece) for piece in pieces]
    at = _first_shown(costs, [len(piece) for piece in pieces], min(room, steady) - fixed, last)
    kept = [one for piece in pieces[at:] for one in piece]
    if sum(costs[at:]) > room - fixed:
        kept = _clipped(pieces[at], room - fixed, counter)
    hidden = len(whole) - len(start) - len(kept)
    return Turns((*start, *_note(hidden + archived), *kept), hidden, wanted)


def _head(messages: Sequence[Message]) -> int:
    """Return how many messages at the start stay when others leave: instructions and a summary."""
    at = first_instructions(messages)
    return at + (at < len(messages) and messages[at].name == SUMMARY)


def _note(hidden: int) -> list[Message]:
    text = f"[{hidden} earlier messages are not shown; search_history finds them.]"
    return [Message(role="user", content=text)] if hidden else []


def _first_shown(costs: Sequence[int], lengths: Sequence[int], room: int, last: int | None) -> int:
    """Return the index of the first shown exchange. The last one is shown in any case."""
    at = _after(costs, sum(costs) - room, max(1, room // 2))
    if last is not None:
        at = max(at, _after(lengths, sum(lengths) - last, max(1, last // 2)))
    return at


def _after(sizes: Sequence[int], surplus: int, block: int) -> int:
    """Return how many of the first items to leave out, so that the surplus is gone: whole blocks of it."""
    if surplus <= 0:
        return 0
    gone = -(-surplus // block) * block
    at = next((at for at, total in enumerate(accumulate(sizes), 1) if total >= gone), len(sizes))
    return min(at, len(sizes) - 1)


def _clipped(piece: Sequence[Message], room: int, counter: TokenCounter) -> list[Message]:
    """Return the exchange with its longest texts cut until it fits."""
    clipped = list(piece)
    while (over := sum(message_tokens(one, counter) for one in clipped) - room) > 0:
        tokens, at = max((counter.count(one.content), at) for at, one in enumerate(clipped))
        if tokens <= _LEAST:
            raise ContextTooLarge("turns", room + over, max(room, 0), "the last exchange with tools does not fit")
        text = cut(clipped[at].content, max(_LEAST, tokens - over), counter)
        clipped[at] = clipped[at].model_copy(update={"content": text})
    return clipped

"""The turns of a prompt: which messages of a conversation it shows. Pure functions.

A provider caches the start of a prompt, so the first shown message must not change with each prompt. When the turns do
not fit, half of the room for them is freed at once: the next messages fit until that half is full again.

What the user said stays word for word when the messages around it leave, as far as a budget reaches: first the
instructions before the first answer, which name the task; then the latest messages, because a later instruction may
change an earlier one, and never the other way round. Nothing marks a message as an instruction: a person who writes
"no, in dollars" marks nothing, and a model that had to choose could be wrong. So each message of the user is kept, and
the budget decides. A long one is cut to a part of the budget: a pasted file must not displace the others. A message
from the inbox is data of others, and is not kept. The copies change only when messages leave, so that the start of the
prompt stays the same in between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Final

from ...errors import ContextTooLarge
from ...journal.chat import FROM_INBOX, Message
from ...journal.quoting import quoted_name
from .conversation import SAID, SUMMARY, completed, exchanges
from .tokens import TokenCounter, cut, message_tokens

NOTE: Final = 32
"""Most tokens of a note that says how many messages are not shown."""

_LEAST: Final = 24
"""Tokens of a text that is not cut further: the note about the cut takes nearly as many."""

_SHARE: Final = 4
"""Part of the budget that a message after the first instructions may take: one in so many."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The shown messages, how many are not shown, and the tokens of all."""

    messages: tuple[Message, ...]
    hidden: int
    wanted: int


def first_instructions(messages: Sequence[Message]) -> int:
    """Return how many messages at the start are the user's first instructions: those before any answer or summary."""
    for at, message in enumerate(messages):
        if not _is_said(message):
            return at
    return len(messages)


def _is_said(message: Message) -> bool:
    """Return whether the user said it: it is no summary, no copy, and no message of others."""
    return message.role == "user" and message.name not in (SUMMARY, SAID, FROM_INBOX)


def pinned_within(messages: Sequence[Message], budget: int, counter: TokenCounter) -> list[Message]:
    """Return what stays of messages that leave: the first instructions, and copies of the user's latest messages.

    The instructions are cut where the budget ends. The copies have what is left of it, at least half of the budget.
    """
    first = first_instructions(messages)
    found = _within(messages[:first], budget, counter)
    room = max(budget - sum(message_tokens(one, counter) for one in found), budget // 2)
    copies: list[Message] = []
    for message in reversed(messages[first:]):
        if message.name == SAID or (_is_said(message) and message.content.strip()):
            copy = message if message.name == SAID else _copy(message, budget // _SHARE, counter)
            room -= message_tokens(copy, counter)
            if room < 0:
                break
            copies.append(copy)
    return [*found, *reversed(copies)]


def _within(messages: Sequence[Message], budget: int, counter: TokenCounter) -> list[Message]:
    """Return the first messages that fit, the last one cut."""
    found: list[Message] = []
    for message in messages:
        tokens = message_tokens(message, counter)
        if tokens > budget:
            text = cut(message.content, budget - (tokens - counter.count(message.content)), counter)
            return [*found, message.model_copy(update={"content": text})] if budget > 2 * _LEAST else found
        budget -= tokens
        found.append(message)
    return found


def _copy(message: Message, most: int, counter: TokenCounter) -> Message:
    sender = f" from {quoted_name(message.name)}" if message.name else ""
    event = f", event {message.n}" if message.n else ""
    text = f"[earlier message of the user{sender}{event}]\n{cut(message.content, max(_LEAST, most), counter)}"
    return Message(role="user", content=text, name=SAID, n=message.n)


def turns_within(
    messages: Sequence[Message],
    room: int,
    counter: TokenCounter,
    *,
    steady: int,
    instructions: int,
    last: int | None = None,
    archived: int = 0,
    tools: Collection[str] = (),
) -> Turns:
    """Return the turns that fit: what the user said before, the summary, and the latest exchanges.

    If the last exchange alone is too large, its texts are cut. Raises `ContextTooLarge` if that is not enough.

    Args:
        room: tokens of the turns in this prompt.
        steady: tokens that are there in every prompt, by which the first shown message is chosen.
        instructions: tokens of what the user said in messages that are hidden.
        last: most messages.
        archived: messages that have left the conversation.
        tools: names of the ready-made tools that the model has.
    """
    whole = completed(messages)
    tokens = [message_tokens(one, counter) for one in whole]
    wanted = sum(tokens)
    spare = NOTE if archived else 0
    if wanted <= room - spare and (last is None or len(whole) <= last):
        head = _head(whole)
        return Turns((*whole[:head], *_note(archived, tools), *whole[head:]), 0, wanted)
    head, first = _head(whole), first_instructions(whole)
    if first == len(whole):  # nothing but instructions: the last ones count
        head = first = instructions = 0
    summary = [one for one in whole[:head] if one.name == SUMMARY]
    pieces = exchanges(whole[head:])
    costs = [sum(message_tokens(one, counter) for one in piece) for piece in pieces]
    pinned = sum(message_tokens(one, counter) for one in _within(whole[:first], instructions, counter))
    if any(one.name == SAID or _is_said(one) for one in whole[first:]):
        pinned = max(instructions, pinned + instructions // 2)
    fixed = NOTE + pinned + sum(message_tokens(one, counter) for one in summary)
    at = _first_shown(costs, [len(piece) for piece in pieces], min(room, steady) - fixed, last)
    kept = [one for piece in pieces[at:] for one in piece]
    gone = [*whole[:head], *(one for piece in pieces[:at] for one in piece)]
    start = list(summary)
    if instructions:
        stays = pinned_within(gone, instructions, counter)
        before = {id(one) for one in whole[:head]}
        later = [one for one in stays if one.name == SAID and id(one) not in before]  # than the summary
        start = [*stays[: len(stays) - len(later)], *summary, *later]
    if sum(costs[at:]) > room - fixed:
        kept = _clipped(pieces[at], room - fixed, counter)
    hidden = len(whole) - len(kept) - sum(one.name != SAID for one in start)
    return Turns((*start, *_note(hidden + archived, tools), *kept), hidden, wanted)


def _head(messages: Sequence[Message]) -> int:
    """Return how many messages at the start stay when others leave: instructions, copies and a summary."""
    at = first_instructions(messages)
    while at < len(messages) and messages[at].name == SAID:
        at += 1
    return at + (at < len(messages) and messages[at].name == SUMMARY)


def _note(hidden: int, tools: Collection[str]) -> list[Message]:
    way = "; search_history finds them" if "search_history" in tools else ""
    text = f"[{hidden} earlier messages are not shown{way}.]"
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
    over = sum(message_tokens(message, counter) for message in clipped) - room
    longest = [(-counter.count(message.content), -at) for at, message in enumerate(clipped)]
    heapify(longest)
    while over > 0:
        tokens, at = -longest[0][0], -longest[0][1]
        if tokens <= _LEAST:
            raise ContextTooLarge("turns", room + over, max(room, 0), "the last exchange with tools does not fit")
        text = cut(clipped[at].content, max(_LEAST, tokens - over), counter)
        clipped[at] = clipped[at].model_copy(update={"content": text})
        left = counter.count(text)
        over -= tokens - left
        heapreplace(longest, (-left, -at))
    return clipped

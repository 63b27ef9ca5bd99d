"""Assembly of a prompt from its layers, each within its token budget. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...durable.journal.chat import Message
from ...durable.journal.resumption import Resumption
from ...errors import ContextTooLarge
from ..journal.state import AgentState
from .background import NO_BACKGROUND, Background
from .brief import BriefText, brief_text
from .conversation import SUMMARY, Turns, turns_within
from .prompt import PER_MESSAGE, Budgets, Estimate, Prompt, TokenCounter, cut, message_tokens

_LEAST: Final = 24
"""Tokens of an inbox message that is not cut further."""

_NOTE: Final = 24
"""Most tokens of a note that says how many inbox messages are not shown."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The parts of a context.

    Only identity and rules have the role `system`. Everything else is data that others may have written.

    Attributes:
        state: goal, plan, decisions, messages and so on.
        identity: the start of every prompt, the same in each, so that providers can cache it.
        rules: follow the identity, also the same in each prompt.
        background: profile and memories for the goal, the same in each prompt of the task.
        received: note of the task that this one continues.
        previous: the previous run, if no step was recorded since.
        step_memories: quoted lines of memories for the current step.
        in_flight: work that has not ended, such as child tasks.
        inbox: messages that arrived in the meantime, the oldest first.
        tools: names of the ready-made tools that the model has: the prompt names no other.
        capacity: sentences about what the task has left.
    """

    state: AgentState
    identity: str = ""
    rules: Sequence[str] = ()
    background: Background = NO_BACKGROUND
    received: str = ""
    previous: Resumption | None = None
    step_memories: Sequence[str] = ()
    in_flight: Sequence[str] = ()
    inbox: Sequence[str] = ()
    tools: Collection[str] = ()
    capacity: Sequence[str] = ()


@dataclass(slots=True)
class _Draft:
    counter: TokenCounter
    tokens: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    wanted: int = 0

    def add(self, layer: str, *messages: Message) -> None:
        self.messages += messages
        self.tokens[layer] = self.cost(messages)

    def cost(self, messages: Iterable[Message]) -> int:
        return sum(message_tokens(one, self.counter) for one in messages)

    def leave_out(self, what: str, number: int) -> None:
        if number:
            self.left_out[what] = self.left_out.get(what, 0) + number


def assemble(
    layers: Layers,
    window: int,
    *,
    budgets: Budgets | None = None,
    counter: TokenCounter | None = None,
    last: int | None = None,
) -> Prompt:
    """Assemble a prompt from its layers.

    Over a budget, the oldest messages, entries of the brief, and long or late inbox messages are left out. Exchanges
    are dropped whole, and the goal is never dropped. Raises `ContextTooLarge`, with the layer, if a required part does
    not fit.

    Args:
        window: tokens that the model accepts.
        last: most messages of the conversation.
    """
    budgets = budgets or Budgets()
    draft = _Draft(counter or Estimate())
    _identity(draft, layers, int(window * budgets.identity))
    _background(draft, layers)
    stable = len(draft.messages)
    inbox = _inbox(draft, layers.inbox, int(window * budgets.inbox), layers.tools)
    room = int(window * (1 - budgets.reserve)) - sum(draft.tokens.values()) - draft.cost(inbox)
    goal = [_goal(layers.state)] if _is_message(layers.state) else []
    brief, turns = _brief_and_turns(draft, layers, window, budgets, room - draft.cost(goal), last)
    if turns.messages:
        draft.add("turns", *turns.messages)
    cacheable = len(draft.messages)
    if goal and not any(one.content == layers.state.goal for one in turns.messages):
        draft.add("goal", *goal)
    if brief.text:
        draft.add("brief", _user(brief.text))
    if inbox:
        draft.add("inbox", *inbox)
    for kind, number in brief.left_out.items():
        draft.leave_out(kind, number)
    draft.leave_out("turns", turns.hidden)
    draft.wanted += draft.tokens.get("brief", 0) + turns.wanted
    return Prompt(tuple(draft.messages), cacheable, stable, draft.tokens, draft.left_out, draft.wanted)


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


def _background(draft: _Draft, layers: Layers) -> None:
    """Add what is known from the start, and the goal, which ends the message: nothing can follow it."""
    found = layers.background
    parts = []
    if found.profile:
        parts.append("# Profile\n\n" + "\n".join(found.profile))
    if found.memories and not _is_message(layers.state):
        way = ": `search_memory` finds them" if "search_memory" in layers.tools else ""
        note = [f"- {found.left_out} more not shown{way}."] if found.left_out else []
        parts.append("# Memories\n\n" + "\n".join([*found.memories, *note]))
    if layers.received:
        parts.append(f"# From the task that this one continues\n\n{layers.received}")
    if parts:
        draft.add("memory", _user("\n\n".join(parts)))
    draft.leave_out("memories", found.left_out)
    if layers.state.goal and not _is_message(layers.state):
        draft.add("goal", _goal(layers.state))
    draft.wanted += draft.tokens.get("memory", 0) + draft.tokens.get("goal", 0)


def _goal(state: AgentState) -> Message:
    return _user(f"# Goal\n\n{state.goal}")


def _is_message(state: AgentState) -> bool:
    """Return whether the goal is a message of the conversation too, as in a turn of a session: it is shown there."""
    return any(one.role == "user" and one.content == state.goal for one in state.messages)


def _brief_and_turns(
    draft: _Draft, layers: Layers, window: int, budgets: Budgets, room: int, last: int | None
) -> tuple[BriefText, Turns]:
    """Return the brief, and the turns that fit beside it. Results that these turns do not hold are shown at length."""
    state, count = layers.state, draft.counter.count
    short = int(window * budgets.brief)

    def made(held: Collection[str], *, full: bool) -> tuple[BriefText, Turns]:
        brief = brief_text(
            state,
            count,
            min(short, room - PER_MESSAGE),
            previous=layers.previous,
            full=full,
            held=held,
            memories=(*(layers.background.memories if _is_message(state) else ()), *layers.step_memories),
            in_flight=layers.in_flight,
            tools=layers.tools,
            capacity=layers.capacity,
        )
        left = room - (PER_MESSAGE + count(brief.text) if brief.text else 0)
        if left < 0:
            tokens = sum(draft.tokens.get(layer, 0) for layer in ("memory", "goal")) + count(brief.text)
            raise ContextTooLarge(
                "brief", tokens, max(0, tokens + left), "goal and brief leave no room for the conversation"
            )
        turns = turns_within(
            state.messages,
            left,
            draft.counter,
            steady=room - short,
            instructions=int(window * budgets.pinned),
            last=last,
            archived=state.archive.messages,
            tools=layers.tools,
        )
        return brief, turns

    answered = any(one.role == "assistant" for one in state.messages)
    summarized = any(one.name == SUMMARY for one in state.messages)
    full = layers.previous is not None or summarized or not answered or state.archive.messages > 0
    held = frozenset() if full else _held(state, state.messages)
    brief, turns = made(held, full=full)
    if not full and (turns.hidden or held - _held(state, turns.messages)):
        brief, turns = made((), full=True)
    return brief, turns


def _held(state: AgentState, messages: Sequence[Message]) -> frozenset[str]:
    """Return the keys of the steps whose results stand in a message: a text as it is, other JSON in any spacing."""
    texts = [message.content for message in messages]
    condensed: list[str] = []
    found: set[str] = set()
    for key, result in state.results.items():
        if isinstance(result, str):
            is_held = any(result in text for text in texts)
        else:
            condensed = condensed or [_condensed(text) for text in texts]
            part = _condensed(json.dumps(result, ensure_ascii=False, default=str))
            is_held = any(part in text for text in condensed)
        if is_held:
            found.add(key)
    return frozenset(found)


def _condensed(text: str) -> str:
    """Return a text without space, and with one kind of quotation marks."""
    return "".join(text.split()).replace("'", '"')


def _inbox(draft: _Draft, texts: Sequence[str], budget: int, tools: Collection[str]) -> list[Message]:
    """Return inbox messages, long ones cut to their share; if not all fit, the first ones and a note about the rest."""
    wanted = draft.cost(map(_user, texts))
    draft.wanted += wanted
    if wanted <= budget:
        return [_user(text) for text in texts]
    share = max(_LEAST, budget // len(texts) - PER_MESSAGE)
    kept: list[Message] = []
    room = budget - _NOTE
    for text in texts:
        message = _user(cut(text, share, draft.counter))
        room -= message_tokens(message, draft.counter)
        if room < 0:
            break
        kept.append(message)
    hidden = len(texts) - len(kept)
    draft.leave_out("inbox", hidden)
    way = "; read_inbox returns them" if "read_inbox" in tools else ""
    note = f"[{hidden} more messages are not shown{way}.]"
    return [*kept, *([_user(note)] if hidden else [])]

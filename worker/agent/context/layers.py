"""A model's context put together from its layers, each within its budget. Pure: the same in, the same out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...errors import ContextTooLarge
from ...journal import AgentState, Message
from .conversation import SUMMARY, completed, exchanges
from .prompt import Budgets, Prompt
from .task_section import task_text
from .tokens import PER_MESSAGE, Estimate, TokenCounter, message_tokens

__all__ = ["Layers", "assemble"]


@dataclass(frozen=True, slots=True)
class Layers:
    """What a context is made of, in this order.

    identity, rules: who the agent is and what it must keep to; the same at every call, so providers can cache them.
    memories: what is remembered that bears on the goal, the best first. resumption: how it stands after an
    interruption. in_flight: what was begun and has not ended, such as children. state: its goal, plan, decisions and
    messages. inbox: what came meanwhile, the oldest first.

    Only identity and rules speak as the system: everything else is data, which somebody else may have written.
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
    """Put the layers together. window: tokens. last: how many messages of the conversation at most.

    Over a budget go the oldest turns, the memories of the lowest rank, and what is long or came last in the inbox;
    never half of an exchange with tools, never the goal. Raises `ContextTooLarge`, naming the layer, where what must
    stay does not fit.
    """
    budgets = budgets or Budgets()
    draft = _Draft(counter or Estimate())
    _identity(draft, layers, int(window * budgets.identity))
    arrived = _inbox(draft, layers.inbox, int(window * budgets.inbox))
    memories, memory_wanted = _fitting(layers.memories, draft, int(window * budgets.memory))
    draft.leave_out("memories", len(layers.memories) - len(memories))
    if memories:
        draft.add("memory", _user("# What is remembered\n\n" + "\n".join(f"- {one}" for one in memories)))
    task = task_text(
        layers.state,
        draft.counter,
        int(window * budgets.task),
        resumption=layers.resumption,
        in_flight=layers.in_flight,
    )
    draft.left_out.update(task.left_out)
    if task.text:
        draft.add("task", _user(f"# The task\n\n{task.text}"))
    draft.wanted += memory_wanted + task.wanted
    room = int(window * (1 - budgets.reserve)) - sum(draft.tokens.values())
    room -= sum(message_tokens(one, draft.counter) for one in arrived)
    if room < 0:
        task_tokens = draft.tokens.get("task", 0)
        raise ContextTooLarge("task", task_tokens, max(0, task_tokens + room), "goal and open steps leave no room")
    _turns(draft, layers.state.messages, room, last)
    if arrived:
        draft.add("inbox", *arrived)
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
            "nothing of identity and rules is left out: shorten them, or give the layer more (Budgets.identity)",
        )


def _fitting(items: Iterable[str], draft: _Draft, budget: int) -> tuple[list[str], int]:
    """The first items that fit, and what all of them take."""
    kept: list[str] = []
    wanted, full = 0, False
    for item in items:
        wanted += message_tokens(_user(item), draft.counter)
        full = full or wanted > budget
        if not full:
            kept.append(item)
    return kept, wanted


def _inbox(draft: _Draft, texts: Sequence[str], budget: int) -> list[Message]:
    """The messages that came, the long ones cut to their share; of more than fit the first, and how many there are."""
    wanted = sum(message_tokens(_user(text), draft.counter) for text in texts)
    draft.wanted += wanted
    if wanted <= budget:
        return [_user(text) for text in texts]
    share = max(_LEAST, budget // len(texts) - PER_MESSAGE)
    kept, _ = _fitting([_cut(text, share, draft.counter) for text in texts], draft, budget - _NOTE)
    gone = len(texts) - len(kept)
    draft.leave_out("inbox", gone)
    return [*map(_user, kept), *([_user(f"[{gone} more messages came, which are not shown.]")] if gone else [])]


def _turns(draft: _Draft, messages: Sequence[Message], room: int, last: int | None) -> None:
    """The summary, if there is one, and the latest exchanges; of one that is too large by itself, its beginning."""
    whole = completed(messages)
    pinned = whole[:1] if whole and whole[0].name == SUMMARY else []
    pieces = exchanges(whole[len(pinned) :])
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
    gone = len(whole) - len(pinned) - len(kept)
    draft.leave_out("turns", gone)
    note = [_user(f"[{gone} earlier messages are not shown.]")] if gone else []
    if whole:
        draft.add("turns", *pinned, *note, *kept)


def _clipped(piece: Sequence[Message], room: int, counter: TokenCounter) -> list[Message]:
    """The exchange with its longest texts cut until it fits."""
    clipped = list(piece)
    while (over := sum(message_tokens(one, counter) for one in clipped) - room) > 0:
        tokens, at = max((counter.count(one.content), at) for at, one in enumerate(clipped))
        if tokens <= _LEAST:
            raise ContextTooLarge("turns", room + over, max(room, 0), "the last exchange with tools does not fit")
        text = _cut(clipped[at].content, max(_LEAST, tokens - over), counter)
        clipped[at] = clipped[at].model_copy(update={"content": text})
    return clipped


def _cut(text: str, room: int, counter: TokenCounter) -> str:
    """The beginning of a text, and how much more there was, where it takes more tokens than there is room for."""
    tokens = counter.count(text)
    keep = len(text) * max(0, room - _LEAST // 2) // max(tokens, 1)
    while tokens > room:
        cut = f"{text[:keep]}\n[{len(text) - keep} more characters]"
        if counter.count(cut) <= room or not keep:
            return cut
        keep = keep * 3 // 4
    return text


_LEAST = 24
"""Tokens of a text that is not cut any further: the note that it was cut takes nearly as much."""

_NOTE = 24
"""Tokens that a note takes which says how much is not shown, at most."""

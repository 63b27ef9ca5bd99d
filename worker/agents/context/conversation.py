"""Conversations that every provider accepts: exchanges, turns, and results for interrupted tool calls.

The rules are those of both providers' documents and error replies, the stricter one if they differ:
- a conversation starts and ends with the user, roles alternate, no text is blank;
- all tool calls of an assistant are answered in the next turn, each once, before any text;
- ids of calls are unique, 1 to 40 characters of A-Z a-z 0-9 _ -; names of tools 1 to 64 of the same.

Providers reject a call without a result, which a crash leaves, and a result without a call, which a cut history leaves.

Anthropic: Messages API reference ("messages", "system"), and "Tool use: handling tool use and tool result blocks".
OpenAI: Chat Completions API reference ("messages"), and "Function calling".

The turns of a prompt: which messages of a conversation it shows. Pure functions.

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

import hashlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Any, Final, Literal

from ....queues.delivery.checkpoint import Entry, Kind
from ...durable.journal.chat import FROM_INBOX, Message, ToolCall
from ...durable.journal.quoting import quoted_block, quoted_line, quoted_name
from ...durable.journal.step_record import StepRecord
from ...durable.run import Run
from ...errors import ContextTooLarge
from ...log import logger
from ..journal.agent_events import Repaired
from ..journal.json_patch import Patch
from ..journal.state import AgentState
from .prompt import TokenCounter, cut, message_tokens

INTERRUPTED: Final = "[interrupted before this call returned a result; it may or may not have taken effect]"
"""Result of a call that was interrupted."""


def exchanges(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Return the exchanges of a conversation: a call with all messages up to its last result, or a single message."""
    found: list[Sequence[Message]] = []
    at = 0
    while at < len(messages):
        end = _end(messages, at)
        found.append(messages[at:end])
        at = end
    return found


def _end(messages: Sequence[Message], at: int) -> int:
    """Return the end of the exchange that starts at `at`. Results count up to the assistant's next message."""
    ids = {call.id for call in messages[at].tool_calls} if messages[at].role == "assistant" else set()
    end = at + 1
    for place in range(at + 1, len(messages) if ids else at):
        if messages[place].role == "assistant":
            break
        if messages[place].role == "tool" and messages[place].tool_call_id in ids:
            end = place + 1
    return end


def dangling(exchange: Sequence[Message]) -> list[ToolCall]:
    """Return the calls of an exchange without a result. Results of calls with equal ids belong to them in order."""
    results = Counter(one.tool_call_id for one in exchange[1:] if one.role == "tool")
    missing = []
    for call in exchange[0].tool_calls if exchange[0].role == "assistant" else ():
        if results[call.id]:
            results[call.id] -= 1
        else:
            missing.append(call)
    return missing


def interruption(call: ToolCall) -> Message:
    """Return the result of a call that was interrupted."""
    return Message(role="tool", content=INTERRUPTED, tool_call_id=call.id)


def insertions(messages: Sequence[Message]) -> list[tuple[int, ToolCall]]:
    """Return calls without a result, each with the index at which to insert one, in order."""
    found, end = [], 0
    for exchange in exchanges(messages):
        end += len(exchange)
        found += [(end, call) for call in dangling(exchange)]
    return found


def completed(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with a result for every call."""
    found: list[Message] = []
    for exchange in exchanges(messages):
        found += exchange
        found += map(interruption, dangling(exchange))
    return found


def repair_of(messages: Sequence[Message]) -> Patch:
    """Return the patch that does to the messages of a state what `completed` does."""
    return tuple(
        {"op": "add", "path": f"/messages/{place + before}", "value": interruption(call).model_dump(mode="json")}
        for before, (place, call) in enumerate(insertions(messages))
    )


CONTINUE: Final = "Continue."
"""User message after a conversation that ends with the assistant."""

NOT_SHOWN: Final = "[Earlier messages are not shown.]"
"""User message before a conversation that starts with the assistant."""

NO_OUTPUT: Final = "[no output]"
"""Result of a call that returned an empty text."""

SUMMARY: Final = "summary"
"""Name of the message that replaces earlier ones."""

SAID: Final = "said"
"""Name of copies of what the user said in messages that are not shown: each starts with the number of its event."""


@dataclass(slots=True)
class Turn:
    """Consecutive messages of one role as one. `results` are pairs of call id and text, in the order of the calls.

    Among the texts of an assistant are its blocks of reasoning, as its provider returned them.
    """

    role: Literal["user", "assistant"]
    texts: list[str | dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[tuple[str, str]] = field(default_factory=list)


def split_system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the system messages at the start, and the rest."""
    for at, message in enumerate(messages):
        if message.role != "system":
            return messages[:at], messages[at:]
    return messages, ()


def turns_of(messages: Sequence[Message], *, bare: bool = False) -> list[Turn]:
    """Return the conversation as turns that providers accept. Messages that fit no rule become text of the user.

    Args:
        bare: without what is added so that the conversation starts and ends with the user.
    """
    turns: list[Turn] = []
    ids = _Ids()
    for exchange in exchanges(messages):
        head = exchange[0]
        if head.role != "assistant":
            _add(turns, Turn("user", [*_as_text(head)]))
            continue
        names = [ids.unique(call.id) for call in head.tool_calls]
        calls = [
            ToolCall(id=name, name=_tool_name(call.name), arguments=call.arguments)
            for name, call in zip(names, head.tool_calls, strict=True)
        ]
        texts: list[str | dict[str, Any]] = [head.content] if head.content.strip() else []
        _add(turns, Turn("assistant", [*head.reasoning, *texts] if texts or calls else [], calls))
        if calls:
            _add(turns, _answer(head, names, exchange[1:]))
    if bare:
        return turns
    if not turns or turns[0].role == "assistant":
        turns.insert(0, Turn("user", [NOT_SHOWN]))
    if turns[-1].role == "assistant":
        turns.append(Turn("user", [CONTINUE]))
    return turns


def _add(turns: list[Turn], turn: Turn) -> None:
    """Append a turn, or merge it into the last one of the same role. Results precede texts: they follow their calls."""
    if not (turn.texts or turn.calls or turn.results):
        return
    if turns and turns[-1].role == turn.role:
        last = turns[-1]
        last.texts += turn.texts
        last.calls += turn.calls
        last.results += turn.results
    else:
        turns.append(turn)


def _answer(head: Message, names: list[str], rest: Sequence[Message]) -> Turn:
    """Return the user's turn after calls: a result for each call, then all other messages as text."""
    results: list[str | None] = [None] * len(names)
    texts: list[str] = []
    unanswered: dict[str | None, deque[int]] = defaultdict(deque)
    for at, call in enumerate(head.tool_calls):
        unanswered[call.id].append(at)
    for message in rest:
        places = unanswered.get(message.tool_call_id) if message.role == "tool" else None
        if places:
            results[places.popleft()] = _result_text(message)
        else:
            texts += _as_text(message)
    found = [INTERRUPTED if result is None else result for result in results]
    return Turn("user", [*texts], [], list(zip(names, found, strict=True)))


def _result_text(message: Message) -> str:
    """Return the result of a tool, after the reason for its call if there is one."""
    return f"{_because(message)}{message.content if message.content.strip() else NO_OUTPUT}"


def _because(message: Message) -> str:
    reason = next((block.get("text") for block in message.reasoning), None)
    return f"[called because: {quoted_line(reason)}]\n" if reason else ""


def _as_text(message: Message) -> list[str]:
    """Return a message as text of the user, marked with its real role or name."""
    if not message.content.strip():
        return []
    match message.role:
        case "tool":
            result = quoted_block(message.content, len(message.content))  # among the user's words, and none of them
            which = quoted_name(message.tool_call_id)
            return [f"[result of an earlier tool call, {which}]\n{_because(message)}{result}"]
        case "system":
            return [f"[system]\n{message.content}"]
        case _ if message.name not in (None, "", SUMMARY, SAID, FROM_INBOX):
            return [f"{quoted_line(message.name, 100)}: {message.content}"]
    return [message.content]


class _Ids:
    """Unique ids of calls in the form that providers accept. Equal conversations get equal ids."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._attempts: Counter[str] = Counter()

    def unique(self, wanted: str) -> str:
        name = wanted
        while name in self._used or not _ID.fullmatch(name):
            self._attempts[wanted] += 1
            name = f"call_{hashlib.sha256(f'{wanted}/{self._attempts[wanted]}'.encode()).hexdigest()[:24]}"
        self._used.add(name)
        return name


_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")


def _tool_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "_"


async def repair(run: Run, state: AgentState) -> tuple[str, ...]:
    """Add a result to every call without one; return the ids of these calls.

    Each set of calls is logged once, also if an earlier run of the same handler repaired it. Raises `LeaseLost`.
    """
    missing = insertions(state.messages)
    if not missing:
        return ()
    calls = tuple(call.id for _, call in missing)
    place = f"{len(state.messages)}:{calls}"
    key = f"{run.keys.scope}#repaired:{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}"
    if await run.history.read_record(key) is None:
        record = StepRecord(b"null").encode()
        event = Repaired(calls=calls, changes=repair_of(state.messages), step=run.keys.within)
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), run.next_entry(event), wait=True)
        run.history.done[key] = record
        logger.bind(task=run.envelope.task, id=run.id).warning(
            "repaired {} interrupted tool calls: {}", len(calls), ", ".join(calls)
        )
    if insertions(state.messages):  # a function task; a live state has applied the event
        state.messages[:] = completed(state.messages)
    return calls


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

"""A conversation as every provider takes it: the system's words first, then user and assistant by turns.

The rules that both providers' documents and refusals give, the stricter one where they differ:
- it begins and ends with the user, roles alternate, no text is blank;
- an assistant's calls are answered in the turn right after, all of them, each once, before any text;
- ids of calls are unique, 1 to 40 of A-Z a-z 0-9 _ -; names of tools 1 to 64 of the same.

Anthropic: Messages API reference ("messages", "system"), and "Tool use: handling tool use and tool result blocks".
OpenAI: Chat Completions API reference ("messages"), and "Function calling".

What in a conversation belongs together: a call of tools and its results are never told apart.

Providers refuse a conversation with a call that has no result, or a result that has no call. A crash leaves the one, a
history that is cut leaves the other.

Calls of tools that a crash left without a result get one, in the state and in the log.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ....queues import Entry, Kind
from ...durable import Run
from ...journal import AgentState, Message, Patch, ToolCall
from ...journal.agent_events import Repaired
from ...log import logger

__all__ = [
    "GO_ON",
    "INTERRUPTED",
    "Turn",
    "completed",
    "dangling",
    "exchanges",
    "insertions",
    "repair",
    "split_system",
    "turns_of",
]

INTERRUPTED: Final = "[interrupted: the run was cut off before this call had a result; it may or may not have acted]"
"""The result of a call that never got one."""


def exchanges(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """The conversation in pieces that must not be cut: a call with everything up to its last result, or one message."""
    found: list[Sequence[Message]] = []
    at = 0
    while at < len(messages):
        end = _end(messages, at)
        found.append(messages[at:end])
        at = end
    return found


def _end(messages: Sequence[Message], at: int) -> int:
    """Where the exchange that begins here ends: results are looked for up to the assistant's next message."""
    ids = {call.id for call in messages[at].tool_calls} if messages[at].role == "assistant" else set()
    end = at + 1
    for place in range(at + 1, len(messages) if ids else at):
        if messages[place].role == "assistant":
            break
        if messages[place].role == "tool" and messages[place].tool_call_id in ids:
            end = place + 1
    return end


def dangling(exchange: Sequence[Message]) -> list[ToolCall]:
    """The calls of an exchange that have no result. Of two calls with one id, the first result is the first one's."""
    results = [one.tool_call_id for one in exchange[1:] if one.role == "tool"]
    without = []
    for call in exchange[0].tool_calls if exchange[0].role == "assistant" else ():
        if call.id in results:
            results.remove(call.id)
        else:
            without.append(call)
    return without


def interruption(call: ToolCall) -> Message:
    """The result of a call that never got one."""
    return Message(role="tool", content=INTERRUPTED, tool_call_id=call.id)


def insertions(messages: Sequence[Message]) -> list[tuple[int, ToolCall]]:
    """Calls without a result, each with the place in the list where its result is to be inserted, in order."""
    found, end = [], 0
    for exchange in exchanges(messages):
        end += len(exchange)
        found += [(end, call) for call in dangling(exchange)]
    return found


def completed(messages: Sequence[Message]) -> list[Message]:
    """The conversation in which every call has a result."""
    whole: list[Message] = []
    for exchange in exchanges(messages):
        whole += exchange
        whole += map(interruption, dangling(exchange))
    return whole


def repair_of(messages: Sequence[Message]) -> Patch:
    """What `completed` does to the messages of a state, as changes to the state."""
    return tuple(
        {"op": "add", "path": f"/messages/{place + before}", "value": interruption(call).model_dump(mode="json")}
        for before, (place, call) in enumerate(insertions(messages))
    )


GO_ON: Final = "Go on."
"""What the user says where the assistant had the last word."""

NOT_SHOWN: Final = "[What came before is not shown.]"
"""What the user says where the assistant had the first word."""

NO_OUTPUT: Final = "[no output]"
"""The result of a call that returned nothing."""

SUMMARY: Final = "summary"
"""The name of the message that stands for earlier ones."""


@dataclass(slots=True)
class Turn:
    """Everything that one side says before the other one does. results: by the id of the call, in the calls' order."""

    role: Literal["user", "assistant"]
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[tuple[str, str]] = field(default_factory=list)


def split_system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """What the system says at the beginning, and the rest."""
    for at, message in enumerate(messages):
        if message.role != "system":
            return messages[:at], messages[at:]
    return messages, ()


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The conversation as turns. Takes any messages; what cannot be said as it is, is said as text."""
    turns: list[Turn] = []
    ids = _Ids()
    for exchange in exchanges(messages):
        head = exchange[0]
        if head.role != "assistant":
            _add(turns, Turn("user", _as_text(head)))
            continue
        names = [ids.fresh(call.id) for call in head.tool_calls]
        calls = [
            ToolCall(id=name, name=_tool_name(call.name), arguments=call.arguments)
            for name, call in zip(names, head.tool_calls, strict=True)
        ]
        _add(turns, Turn("assistant", _said(head.content), calls))
        if calls:
            _add(turns, _answer(head, names, exchange[1:]))
    if not turns or turns[0].role == "assistant":
        turns.insert(0, Turn("user", [NOT_SHOWN]))
    if turns[-1].role == "assistant":
        turns.append(Turn("user", [GO_ON]))
    return turns


def _add(turns: list[Turn], turn: Turn) -> None:
    """Add a turn, to the last one if that is of the same side. No results come after texts: they follow their calls."""
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
    """The user's turn after calls: a result for each of them, then whatever else was said meanwhile."""
    results: list[str | None] = [None] * len(names)
    texts: list[str] = []
    for message in rest:
        place = next(
            (
                at
                for at, call in enumerate(head.tool_calls)
                if message.role == "tool" and call.id == message.tool_call_id and results[at] is None
            ),
            None,
        )
        if place is None:
            texts += _as_text(message)
        else:
            results[place] = message.content if message.content.strip() else NO_OUTPUT
    found = [INTERRUPTED if result is None else result for result in results]
    return Turn("user", texts, [], list(zip(names, found, strict=True)))


def _as_text(message: Message) -> list[str]:
    """What a message says, where it is the user who says it: with the name of whoever it really was."""
    if not message.content.strip():
        return []
    match message.role:
        case "tool":
            return [f"[result of an earlier tool call, {message.tool_call_id}]\n{message.content}"]
        case "system":
            return [f"[system]\n{message.content}"]
        case _ if message.name not in (None, "", SUMMARY):
            return [f"{message.name}: {message.content}"]
    return [message.content]


def _said(text: str) -> list[str]:
    return [text] if text.strip() else []


class _Ids:
    """Ids of calls as providers take them, each once. The same conversation gets the same ids every time."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def fresh(self, wanted: str) -> str:
        name, again = wanted, 0
        while name in self._used or not _ID.fullmatch(name):
            again += 1
            name = f"call_{hashlib.sha256(f'{wanted}/{again}'.encode()).hexdigest()[:24]}"
        self._used.add(name)
        return name


_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")


def _tool_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "_"


_RECORD: Final = b"{}\nnull"


async def repair(run: Run, state: AgentState) -> tuple[str, ...]:
    """Give every call of the conversation a result; returns the ids of those that had none.

    The log is told once of each set of calls: a former run of the same handler may have told it. Raises `LeaseLost`.
    """
    missing = insertions(state.messages)
    if not missing:
        return ()
    calls = tuple(call.id for _, call in missing)
    place = f"{len(state.messages)}:{calls}"
    key = f"{run.keys.scope}#repaired:{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}"
    if key not in run.history.done:
        event = Repaired(calls=calls, changes=repair_of(state.messages), step=run.keys.within)
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, _RECORD), run.next_entry(event), wait=True)
        run.history.done[key] = _RECORD
        logger.warning("Task {}: no result is known of {} calls of tools: {}", run.id, len(calls), ", ".join(calls))
    if insertions(state.messages):  # no session keeps this state, which would have heard of the event
        state.messages[:] = completed(state.messages)
    return calls

"""Conversations that every provider accepts: exchanges, turns, and results for interrupted tool calls.

The rules are those of both providers' documents and error replies, the stricter one if they differ:
- a conversation starts and ends with the user, roles alternate, no text is blank;
- all tool calls of an assistant are answered in the next turn, each once, before any text;
- ids of calls are unique, 1 to 40 characters of A-Z a-z 0-9 _ -; names of tools 1 to 64 of the same.

Providers reject a call without a result, which a crash leaves, and a result without a call, which a cut history leaves.

Anthropic: Messages API reference ("messages", "system"), and "Tool use: handling tool use and tool result blocks".
OpenAI: Chat Completions API reference ("messages"), and "Function calling".
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ....queues.delivery.checkpoint import Entry, Kind
from ...durable.run import Run
from ...journal.agent_events import Repaired
from ...journal.chat import FROM_INBOX, Message, ToolCall
from ...journal.json_patch import Patch
from ...journal.quoting import quoted_block, quoted_line, quoted_name
from ...journal.state import AgentState
from ...journal.step_record import StepRecord
from ...log import logger

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

"""A conversation as every provider takes it: the system's words first, then user and assistant by turns.

The rules that both providers' documents and refusals give, the stricter one where they differ:
- it begins and ends with the user, roles alternate, no text is blank;
- an assistant's calls are answered in the turn right after, all of them, each once, before any text;
- ids of calls are unique, 1 to 40 of A-Z a-z 0-9 _ -; names of tools 1 to 64 of the same.

Anthropic: Messages API reference ("messages", "system"), and "Tool use: handling tool use and tool result blocks".
OpenAI: Chat Completions API reference ("messages"), and "Function calling".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...journal import Message, ToolCall
from .exchanges import INTERRUPTED, exchanges

__all__ = ["GO_ON", "Turn", "split_system", "turns_of"]

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

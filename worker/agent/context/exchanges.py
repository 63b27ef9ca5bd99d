"""What in a conversation belongs together: a call of tools and its results are never told apart.

Providers refuse a conversation with a call that has no result, or a result that has no call. A crash leaves the one, a
history that is cut leaves the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...journal import Message, Patch, ToolCall

__all__ = ["INTERRUPTED", "completed", "dangling", "exchanges", "insertions"]

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

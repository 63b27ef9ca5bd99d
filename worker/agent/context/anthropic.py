"""The shape of Anthropic's Messages API.

https://docs.anthropic.com/en/api/messages, .../build-with-claude/prompt-caching and
.../agents-and-tools/tool-use/implement-tool-use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from ...journal import Message, ToolCall
from .exchanges import INTERRUPTED
from .prompt import Prompt
from .tokens import arguments_json
from .turns import Turn, split_system, turns_of

__all__ = ["from_anthropic", "to_anthropic"]


def to_anthropic(prompt: Prompt | Sequence[Message]) -> dict[str, Any]:
    """`system` (where there is any) and `messages` of a request. Any conversation comes out valid, see `turns.py`.

    The last block of the static beginning is marked for the cache, with everything before it.
    """
    messages = prompt.messages if isinstance(prompt, Prompt) else prompt
    cacheable = prompt.cacheable if isinstance(prompt, Prompt) else 0
    system, rest = split_system(messages)
    blocks: list[dict[str, Any]] = []
    marked: dict[str, Any] | None = None
    for at, message in enumerate(system):
        if message.content.strip():
            blocks.append({"type": "text", "text": message.content})
            marked = blocks[-1] if at < cacheable else marked
    if marked is not None:
        marked["cache_control"] = {"type": "ephemeral"}
    out: dict[str, Any] = {"messages": [{"role": turn.role, "content": _blocks(turn)} for turn in turns_of(rest)]}
    return {"system": blocks, **out} if blocks else out


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for name, result in turn.results:
        block: dict[str, Any] = {"type": "tool_result", "tool_use_id": name, "content": result}
        blocks.append({**block, "is_error": True} if result == INTERRUPTED else block)
    blocks += [{"type": "text", "text": text} for text in turn.texts]
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": from_json(arguments_json(call.arguments))}
        for call in turn.calls
    ]
    return blocks


def from_anthropic(answer: Mapping[str, Any] | Any) -> Message:
    """The message of an answer, as JSON data or as a client's object. What it thought is not kept."""
    found = answer if isinstance(answer, Mapping) else answer.model_dump()
    content = found.get("content") or []
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    calls = tuple(
        ToolCall(id=block["id"], name=block["name"], arguments=block.get("input") or {})
        for block in content
        if block["type"] == "tool_use"
    )
    text = "".join(block["text"] for block in content if block["type"] == "text")
    return Message(role="assistant", content=text, tool_calls=calls)

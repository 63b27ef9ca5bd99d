"""The shape of Anthropic's Messages API.

https://docs.anthropic.com/en/api/messages, .../build-with-claude/prompt-caching and
.../agents-and-tools/tool-use/implement-tool-use

The shape of OpenAI's Chat Completions, which many other endpoints take.

https://platform.openai.com/docs/api-reference/chat/create and https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from ...journal import Message, ToolCall
from .conversation import INTERRUPTED, Turn, split_system, turns_of
from .prompt import Prompt
from .tokens import arguments_json

__all__ = ["MALFORMED", "from_anthropic", "from_openai", "to_anthropic", "to_openai"]


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


MALFORMED: Final = "$malformed"
"""The one argument of a call whose arguments were no JSON object: what the model wrote in place of it."""


def to_openai(prompt: Prompt | Sequence[Message]) -> list[dict[str, Any]]:
    """The `messages` of a request. Any conversation comes out valid, see `turns.py`."""
    messages = prompt.messages if isinstance(prompt, Prompt) else prompt
    system, rest = split_system(messages)
    words = [one.content for one in system if one.content.strip()]
    out: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(words)}] if words else []
    for turn in turns_of(rest):
        out += [{"role": "tool", "tool_call_id": name, "content": result} for name, result in turn.results]
        text = "\n\n".join(turn.texts)
        if turn.role == "user":
            out += [{"role": "user", "content": text}] if turn.texts else []
            continue
        said: dict[str, Any] = {"role": "assistant", "content": text if turn.texts else None}
        if turn.calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_json(call.arguments)},
                }
                for call in turn.calls
            ]
        out.append(said)
    return out


def from_openai(answer: Mapping[str, Any] | Any) -> Message:
    """The message of an answer: of a whole completion, or of the message in it, as JSON data or as a client's object.

    Arguments that are no JSON object are kept, under `MALFORMED`. Raises `ValueError` where there is no message.
    """
    found = answer if isinstance(answer, Mapping) else answer.model_dump()
    if "choices" in found:
        if not found["choices"]:
            raise ValueError("a completion without choices has no message")
        found = found["choices"][0]["message"]
    calls = tuple(
        ToolCall(
            id=str(call.get("id") or ""),
            name=call["function"]["name"],
            arguments=parse_arguments(call["function"].get("arguments")),
        )
        for call in found.get("tool_calls") or ()
    )
    return Message(role="assistant", content=_text(found), tool_calls=calls)


def parse_arguments(written: Any) -> dict[str, Any]:
    """What a model wrote as a call's arguments."""
    if isinstance(written, dict):  # as some endpoints have them
        return written
    if not written:
        return {}
    try:
        found = from_json(written)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {MALFORMED: str(written)}


def _text(found: Mapping[str, Any]) -> str:
    content = found.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or part.get("refusal") or "" for part in content)
    return content or found.get("refusal") or ""

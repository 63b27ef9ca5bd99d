"""The shape of OpenAI's Chat Completions, which many other endpoints take.

https://platform.openai.com/docs/api-reference/chat/create and https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from ...journal import Message, ToolCall
from .prompt import Prompt
from .tokens import arguments_json
from .turns import split_system, turns_of

__all__ = ["MALFORMED", "from_openai", "to_openai"]

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

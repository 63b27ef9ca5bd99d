"""Message formats of providers: Anthropic's Messages API, and OpenAI's Chat Completions, which many endpoints accept.

Anthropic: https://docs.anthropic.com/en/api/messages, .../build-with-claude/prompt-caching and
.../agents-and-tools/tool-use/implement-tool-use. OpenAI: https://platform.openai.com/docs/api-reference/chat/create,
https://platform.openai.com/docs/guides/function-calling and https://developers.openai.com/api/docs/guides/prompt-caching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from ...durable.journal.chat import Message, ToolCall
from .conversation import INTERRUPTED, NOT_SHOWN, Turn, split_system, turns_of
from .prompt import Prompt, arguments_json

MALFORMED: Final = "$malformed"
"""Name of the only argument of a call whose arguments are not a JSON object; its value is the model's text."""


def to_anthropic(prompt: Prompt | Sequence[Message]) -> dict[str, Any]:
    """Return `messages` of a request, and `system` if there is any. Any conversation becomes valid, see `turns_of`.

    Blocks of reasoning are sent back unchanged, as tools require. The ends of `system`, of the stable part and of the
    turns are marked for the prompt cache: three of the four marks that a request may have.
    """
    messages = prompt.messages if isinstance(prompt, Prompt) else prompt
    stable, cacheable = (prompt.stable, prompt.cacheable) if isinstance(prompt, Prompt) else (0, 0)
    system, rest = split_system(messages)
    blocks: list[dict[str, Any]] = []
    marked: dict[str, Any] | None = None
    for at, message in enumerate(system):
        if message.content.strip():
            blocks.append({"type": "text", "text": message.content})
            marked = blocks[-1] if at < cacheable else marked
    if marked is not None:
        marked["cache_control"] = {"type": "ephemeral"}
    turns = [{"role": turn.role, "content": _blocks(turn)} for turn in turns_of(rest)]
    for end in {stable, cacheable}:
        _mark(turns, rest, end - len(system))
    return {"system": blocks, "messages": turns} if blocks else {"messages": turns}


def _mark(turns: Sequence[dict[str, Any]], messages: Sequence[Message], end: int) -> None:
    """Mark the last block that comes from the first `end` messages."""
    before = turns_of(messages[: max(0, end)], bare=True)
    if not before:
        return
    first = turns_of(messages)[:1]
    number = sum(len(_blocks(turn)) for turn in before) + (first[0].texts[:1] == [NOT_SHOWN])
    blocks = [block for turn in turns for block in turn["content"]][:number]
    for block in reversed(blocks):
        if block["type"] not in _REASONING:  # which takes no mark
            block["cache_control"] = {"type": "ephemeral"}
            return


_REASONING: Final = ("thinking", "redacted_thinking")
"""Types of Anthropic's blocks of reasoning."""


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for name, result in turn.results:
        block: dict[str, Any] = {"type": "tool_result", "tool_use_id": name, "content": result}
        blocks.append({**block, "is_error": True} if result == INTERRUPTED else block)
    for text in turn.texts:
        if isinstance(text, str):
            blocks.append({"type": "text", "text": text})
        elif text.get("type") in _REASONING:
            blocks.append(dict(text))
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": from_json(arguments_json(call.arguments))}
        for call in turn.calls
    ]
    return blocks


def from_anthropic(answer: Mapping[str, Any] | Any) -> Message:
    """Return the message of an answer, given as JSON data or as the client's object, with its blocks of reasoning."""
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
    reasoning = tuple(dict(block) for block in content if block["type"] in _REASONING)
    return Message(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def to_openai(
    prompt: Prompt | Sequence[Message], *, merge: bool = False, breakpoints: bool = False
) -> list[dict[str, Any]]:
    """Return `messages` of a request. Any conversation becomes valid, see `turns_of`.

    OpenAI caches equal starts of requests by itself. Pass `Prompt.cache_key` as `prompt_cache_key`, so that the
    requests of a task reach the same cache.

    Args:
        merge: whether messages of one role in a row become one, for endpoints that demand alternating roles.
        breakpoints: whether the ends of the messages up to the brief are marked with `prompt_cache_breakpoint`. Models
            from gpt-5.6 on cache exactly up to such a mark; earlier models and other endpoints may refuse it.
    """
    messages = prompt.messages if isinstance(prompt, Prompt) else prompt
    cacheable = prompt.cacheable if isinstance(prompt, Prompt) and breakpoints else 0
    system, rest = split_system(messages)
    texts = [one.content for one in system if one.content.strip()]
    out: list[dict[str, Any]] = []
    if texts:
        whole = 0 < len(system) <= cacheable
        out.append({"role": "system", "content": _openai_content(["\n\n".join(texts)], [whole])})
    left = _parts_before(rest, cacheable - len(system))
    for turn in turns_of(rest):
        for name, result in turn.results:
            out.append({"role": "tool", "tool_call_id": name, "content": _openai_content([result], [left > 0])})
            left -= 1
        parts, marks = list[str](), list[bool]()
        for text in turn.texts:
            if isinstance(text, str):
                parts.append(text)
                marks.append(left > 0)
            left -= 1
        left -= len(turn.calls)
        if turn.role == "user":
            step = max(1, len(parts)) if merge else 1
            for at in range(0, len(parts), step):
                content = _openai_content(parts[at : at + step], marks[at : at + step])
                out.append({"role": "user", "content": content})
            continue
        parts = ["\n\n".join(parts)] if merge and parts else parts
        out += [{"role": "assistant", "content": text} for text in parts[:-1]]
        entry: dict[str, Any] = {"role": "assistant", "content": parts[-1] if parts else None}
        if turn.calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_json(call.arguments)},
                }
                for call in turn.calls
            ]
        out.append(entry)
    return _with_latest_marks(out)


_BREAKPOINT: Final = "prompt_cache_breakpoint"

_MAX_BREAKPOINTS: Final = 79
"""Most marks in a request: the API compares the latest 80, and sets one itself."""


def _parts_before(messages: Sequence[Message], end: int) -> int:
    """Return how many results, texts and calls of all turns come from the first `end` messages."""
    before = turns_of(messages[: max(0, end)], bare=True)
    if not before:
        return 0
    first = turns_of(messages)[:1]
    count = sum(len(turn.results) + len(turn.texts) + len(turn.calls) for turn in before)
    return count + (first[0].texts[:1] == [NOT_SHOWN])


def _openai_content(texts: Sequence[str], marks: Sequence[bool]) -> str | list[dict[str, Any]]:
    """Return texts as the content of one message: as parts if one of them is marked."""
    if not any(marks):
        return "\n\n".join(texts)
    return [
        {"type": "text", "text": text, **({_BREAKPOINT: {"mode": "explicit"}} if mark else {})}
        for text, mark in zip(texts, marks, strict=True)
    ]


def _with_latest_marks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the oldest marks if there are too many."""
    parts = [part for one in messages if isinstance(one["content"], list) for part in one["content"]]
    marked = [part for part in parts if _BREAKPOINT in part]
    for part in marked[: max(0, len(marked) - _MAX_BREAKPOINTS)]:
        del part[_BREAKPOINT]
    return messages


def from_openai(answer: Mapping[str, Any] | Any) -> Message:
    """Return the message of a completion or of a message in it, given as JSON data or as the client's object.

    Arguments that are not a JSON object are kept under `MALFORMED`. Raises `ValueError` if there is no message.
    """
    found = answer if isinstance(answer, Mapping) else answer.model_dump()
    if "choices" in found:
        if not found["choices"]:
            raise ValueError("a completion must have choices, got none")
        found = found["choices"][0]["message"]
    calls = tuple(
        ToolCall(
            id=str(call.get("id") or ""),
            name=call["function"]["name"],
            arguments=parse_arguments(call["function"].get("arguments")),
        )
        for call in found.get("tool_calls") or ()
    )
    thought = found.get("reasoning_content") or found.get("reasoning")  # of endpoints other than OpenAI's
    reasoning = ({"type": "reasoning", "text": thought},) if isinstance(thought, str) else ()
    return Message(role="assistant", content=_text(found), tool_calls=calls, reasoning=reasoning)


def parse_arguments(written: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object."""
    if isinstance(written, dict):  # some endpoints send an object
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

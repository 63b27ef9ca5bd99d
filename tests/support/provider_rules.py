"""Validation rules of the model providers, from their documentation and error messages, to check the converters.

OpenAI, Chat Completions: API reference of POST /v1/chat/completions ("messages", "tool_calls", "tool_call_id"), and
the refusals "An assistant message with 'tool_calls' must be followed by tool messages responding to each
'tool_call_id'", "messages with role 'tool' must be a response to a preceding message with 'tool_calls'", "[] is too
short - 'messages.N.tool_calls'", "Invalid 'messages[N].tool_calls[0].id': string too long ... maximum length 40",
"Invalid 'messages[N].tool_calls[0].function.name': ... '^[a-zA-Z0-9_-]+$'".

OpenAI, https://developers.openai.com/api/docs/guides/prompt-caching: `prompt_cache_breakpoint` on a content part of
type text, of messages of the system, the user and tools; not on those of the assistant.

Anthropic, Messages: API reference of POST /v1/messages ("messages", "system"), "Handling tool use and tool result
content blocks" (results immediately after their calls, and first in the content), "Prompt caching" (at most four marks,
none on an empty text), and the refusals "messages: text content blocks must be non-empty", "text content blocks must
contain non-whitespace text", "`tool_use` ids were found without `tool_result` blocks immediately after", "unexpected
`tool_use_id` found in `tool_result` blocks", "`tool_use` ids must be unique", "each tool_use must have a single
result", "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'", "first message must use the \"user\" role",
"roles must alternate", "The conversation must end with a user message"; "Extended thinking" (blocks are passed back
unmodified, all of an answer or none), and the refusals "Invalid `signature` in `thinking` block" and "`thinking` or
`redacted_thinking` blocks in the latest assistant message cannot be modified".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = re.compile(r"[a-zA-Z0-9_-]+")


def openai_problems(messages: list[dict[str, Any]]) -> list[str]:
    """Why a request with these messages would be refused."""
    problems: list[str] = []
    if not messages:
        return ["messages: [] is too short"]
    json.dumps(messages, allow_nan=False)
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            name = message["tool_call_id"]
            if name not in open_calls:
                problems.append(f"messages[{at}]: role 'tool' must be a response to a preceding tool call, not {name}")
            open_calls.discard(name)
            if not _is_text(message["content"]):
                problems.append(f"messages[{at}]: content of a tool's result must be text")
            continue
        if open_calls:
            problems.append(f"messages[{at}]: {open_calls} did not have response messages")
            open_calls = set()
        if role == "assistant":
            open_calls, found = _openai_calls(at, message)
            problems += found
        elif role in ("system", "user"):
            if not _is_text(message["content"]) or not message["content"]:
                problems.append(f"messages[{at}]: content of role {role} must be text")
        else:
            problems.append(f"messages[{at}]: no role {role!r}")
    if open_calls:
        problems.append(f"the last calls {open_calls} did not have response messages")
    return problems


def _is_text(content: Any) -> bool:
    """Whether content of role system, user or tool is a text, or text parts of which each may have a breakpoint."""
    if isinstance(content, str):
        return True
    return bool(content) and all(
        part["type"] == "text"
        and isinstance(part["text"], str)
        and part.keys() - {"type", "text"} <= {"prompt_cache_breakpoint"}
        and part.get("prompt_cache_breakpoint", {"mode": "explicit"}) == {"mode": "explicit"}
        for part in content
    )


def _openai_calls(at: int, message: dict[str, Any]) -> tuple[set[str], list[str]]:
    problems = []
    calls = message.get("tool_calls")
    if calls is not None and not calls:
        problems.append(f"messages[{at}].tool_calls: [] is too short")
    if not isinstance(message.get("content"), str | None):
        problems.append(f"messages[{at}]: content of an assistant takes no breakpoint")
    if message.get("content") is None and not calls:
        problems.append(f"messages[{at}]: content is required where there are no tool_calls")
    ids = [call["id"] for call in calls or ()]
    if len(ids) != len(set(ids)):
        problems.append(f"messages[{at}]: duplicate ids {ids}")
    for call in calls or ():
        if not 1 <= len(call["id"]) <= 40:
            problems.append(f"messages[{at}]: id {call['id']!r} is not 1 to 40 characters")
        if call["type"] != "function" or not _NAME.fullmatch(call["function"]["name"]):
            problems.append(f"messages[{at}]: function name {call['function']['name']!r}")
        if not isinstance(json.loads(call["function"]["arguments"], parse_constant=_no_json), dict):
            problems.append(f"messages[{at}]: arguments {call['function']['arguments']!r}")
    return set(ids), problems


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def anthropic_problems(request: dict[str, Any], thoughts: Sequence[Sequence[dict[str, Any]]] = ()) -> list[str]:
    """Why a request with this system and these messages would be refused. thoughts: of each answer, as returned."""
    problems: list[str] = []
    for message in request["messages"] if thoughts else ():
        sent = [block for block in message["content"] if block["type"] in ("thinking", "redacted_thinking")]
        if sent and sent not in [list(one) for one in thoughts]:
            problems.append("`thinking` or `redacted_thinking` blocks cannot be modified")
    json.dumps(request, allow_nan=False)
    system, messages = request.get("system", []), request["messages"]
    if "system" in request and not system:
        problems.append("system: empty")
    marks = sum("cache_control" in block for block in system)
    problems += [f"system: {block!r}" for block in system if block["type"] != "text" or not block["text"].strip()]
    if not messages:
        return [*problems, "messages: at least one message is required"]
    if messages[0]["role"] != "user":
        problems.append('messages: first message must use the "user" role')
    if messages[-1]["role"] != "user":
        problems.append("The conversation must end with a user message")
    seen: set[str] = set()
    calls: list[str] = []
    for at, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if at and messages[at - 1]["role"] == role:
            problems.append(f"messages.{at}: roles must alternate")
        if not content:
            problems.append(f"messages.{at}: content must be non-empty")
        marks += sum("cache_control" in block for block in content)
        problems += [f"messages.{at}: {one}" for one in _anthropic_answers(role, content, calls)]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        problems += [f"messages.{at}: `tool_use` ids must be unique: {name}" for name in calls if name in seen]
        problems += [f"messages.{at}: `tool_use` ids must be unique"] if len(set(calls)) < len(calls) else []
        seen |= set(calls)
        problems += [f"messages.{at}: {one}" for block in content for one in _anthropic_block(role, block)]
    if calls:
        problems.append(f"`tool_use` ids were found without `tool_result` blocks: {calls}")
    if marks > 4:
        problems.append("cache_control: at most 4")
    return problems


def _anthropic_answers(role: str, content: list[dict[str, Any]], calls: list[str]) -> list[str]:
    kinds = [block["type"] for block in content]
    answered = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
    problems = []
    if kinds[: len(answered)] != ["tool_result"] * len(answered):
        problems.append("tool_result blocks must come first")
    if missing := set(calls) - set(answered):
        problems.append(f"`tool_use` ids were found without `tool_result` blocks immediately after: {missing}")
    if unexpected := set(answered) - set(calls):
        problems.append(f"unexpected `tool_use_id` found in `tool_result` blocks: {unexpected}")
    if len(answered) != len(set(answered)):
        problems.append("each tool_use must have a single result")
    if answered and role != "user":
        problems.append("tool_result blocks are the user's")
    return problems


def _anthropic_block(role: str, block: dict[str, Any]) -> list[str]:
    problems: list[str]
    match block["type"]:
        case "text":
            return [] if block["text"].strip() else ["text content blocks must contain non-whitespace text"]
        case "tool_result":
            return [] if isinstance(block["content"], str) and block["content"] else ["tool_result content"]
        case "tool_use":
            problems = [] if role == "assistant" else ["tool_use blocks are the assistant's"]
            problems += [] if _ID.fullmatch(block["id"]) else [f"tool_use.id {block['id']!r}"]
            problems += [] if _NAME.fullmatch(block["name"]) else [f"tool_use.name {block['name']!r}"]
            return problems if isinstance(block["input"], dict) else [*problems, "tool_use.input"]
        case "thinking" | "redacted_thinking":
            problems = [] if role == "assistant" else [f"{block['type']} blocks are the assistant's"]
            return [*problems, "cache_control is not permitted"] if "cache_control" in block else problems
    return [f"no block of type {block['type']!r}"]

"""Compaction: a recorded summary replaces the oldest messages of a conversation; the event log keeps them.

The user's first instructions stay before the summary, and copies of the user's later messages, word for word, as far
as a budget reaches; see turns.py. A summary starts with the numbers of the events that it covers, and with the number
of their messages; a later one includes the messages of an earlier one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import anyio
import orjson

from ....deadletter.error_text import error_text
from ....deadletter.policy import Retry, backoff
from ....queues.delivery.checkpoint import Entry, Kind
from ...durable.journal.chat import Message
from ...durable.journal.quoting import quoted_line, quoted_name
from ...durable.journal.step_record import StepRecord
from ...durable.run import Run
from ...durable.steps.calls import call_in_step
from ...durable.steps.codec import is_async
from ...errors import ContextError
from ...log import logger
from ..journal.agent_events import Compacted
from ..journal.state import AgentState
from .conversation import SAID, SUMMARY, completed, exchanges, pinned_within
from .prompt import TokenCounter, message_tokens


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    """The input of a summarizer.

    Attributes:
        messages: whole exchanges, the oldest first; the first message may be an earlier summary. The user's first
            instructions are not among them: they stay in the conversation. Later messages of the user are among them,
            also those of which the conversation keeps a copy.
        first: the number of the first event that the messages come from; 0 if no event has one of them.
        last: the number of the last such event.
        goal: the goal of the task.
        budget: tokens that the summary may take.
    """

    messages: tuple[Message, ...]
    first: int
    last: int
    goal: str
    budget: int


Summarizer = Callable[[CompactionRequest], Awaitable[str] | str]
"""Function that returns a summary of old messages. A sync function runs in a thread."""

_GAIN: Final = 2
"""Least ratio of the replaced tokens to the budget of the summary."""

_CLIPPED: Final = 160
"""Characters of a message in a digest."""

_COMPACTED: Final = "#compacted:"
"""Prefix of the step keys of compactions; a hash of the messages follows."""


def cut_at(messages: Sequence[Message], keep: int) -> int:
    """Return how many of the oldest messages to replace. Whole exchanges go; at least the last `keep` messages stay."""
    at = 0
    for exchange in exchanges(messages):
        if at + len(exchange) > len(messages) - keep:
            break
        at += len(exchange)
    return at


async def compact(
    run: Run,
    state: AgentState,
    summarizer: Summarizer,
    *,
    keep: int,
    budget: int,
    pinned: int,
    counter: TokenCounter,
    retry: Retry | None = None,
    on_failure: Literal["error", "digest"] = "error",
    tools: Collection[str] = (),
    fits: bool = False,
) -> bool:
    """Replace the oldest messages with their summary. Return False if that would not free enough tokens.

    The record of the summary and the event that replaces the messages are one atomic write, so a recorded summary is
    never requested again.

    Args:
        budget: tokens of the summary.
        pinned: tokens of what the user said, which stays.
        retry: how often and how far apart the summarizer is called.
        on_failure: if no summary is usable, raise `ContextError`, or use a digest: the start of each message, as
            many of the latest as fit the budget.
        fits: the messages still fit the window: in place of an error, a warning is logged, and they stay.
        tools: names of the ready-made tools that the model has.
    """
    if await apply_recorded_summary(run, state, keep):
        return True
    messages = tuple(state.messages)
    cut = cut_at(messages, keep)
    kept = tuple(pinned_within(messages[:cut], pinned, counter))
    whole = sum(one == other for one, other in zip(kept, messages, strict=False))  # the last one may be cut
    old = [one for one in messages[whole:cut] if one.name != SAID]
    fresh = [one for one in old if one.name != SUMMARY]
    copied = sum(message_tokens(one, counter) for one in kept if one.name == SAID)
    if not fresh or sum(message_tokens(one, counter) for one in old) < _GAIN * budget + copied:
        return False
    first, last = _range(old)
    request = CompactionRequest(tuple(completed(old)), first, last, state.goal, budget)
    key = _key(run, messages[:cut])
    run.step_began(key)
    try:
        summary = await _summary(run, summarizer, request, counter, retry or Retry(), on_failure, fits=fits)
        if summary is None:
            return False
        text = f"{_heading(old, first, last, tools)}\n{summary}"
        event = Compacted(first=first, last=last, messages=cut, summary=text, kept=kept, step=run.keys.within)
        data = {"first": first, "summary": text, "kept": [one.model_dump(mode="json") for one in kept]}
        record = StepRecord(orjson.dumps(data)).encode()
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), run.next_entry(event), wait=True)
    finally:
        run.step_ended(key)
    run.history.done[key] = record
    _replace(state, messages, cut, first, text, kept)
    logger.bind(task=run.envelope.task, id=run.id).info("compacted {} messages, events {} to {}", len(old), first, last)
    return True


async def apply_recorded_summary(run: Run, state: AgentState, keep: int) -> bool:
    """Replace the oldest messages with the summary that an earlier run recorded for exactly these, if there is one."""
    if run.history.pages is None and not any(_COMPACTED in key for key in run.history.done):
        return False
    messages = tuple(state.messages)
    cut = cut_at(messages, keep)
    record = await run.history.read_record(_key(run, messages[:cut]))
    if record is None:
        return False
    found = orjson.loads(StepRecord.decode(record).result)
    kept = [Message.model_validate(one) for one in found.get("kept", ())]
    _replace(state, messages, cut, found["first"], found["summary"], kept)
    return True


def _replace(
    state: AgentState, messages: tuple[Message, ...], cut: int, first: int, text: str, kept: Sequence[Message]
) -> None:
    """Replace messages in the state of a function task. An agent's live state has applied the event already."""
    if tuple(state.messages) == messages:
        state.messages[:cut] = [*kept, Message(role="user", content=text, name=SUMMARY, n=first or None)]


_COVERED: Final = re.compile(r"\[Summary of (?:events \d+ to (\d+): )?(\d+) messages")
"""The start of a summary: the last event and the number of messages that it covers."""


def _heading(old: Sequence[Message], first: int, last: int, tools: Collection[str]) -> str:
    """Return the line above a summary, which says what it covers, earlier summaries included."""
    numbered = count = 0
    for one in old:
        earlier = _COVERED.match(one.content) if one.name == SUMMARY else None
        count += int(earlier[2]) if earlier else 1
        numbered += earlier is not None or one.n is not None
    if not last:
        return f"[Summary of {count} messages, of which no event has a copy.]"
    kept = "kept in full in the task's event log" if numbered == len(old) else "those of events are kept in its log"
    way = "; search_history finds them" if "search_history" in tools else ""
    return f"[Summary of events {first} to {last}: {count} messages, {kept}{way}.]"


def _range(old: Sequence[Message]) -> tuple[int, int]:
    """Return the first and last event of the messages that have one, 0 if none has. A summary has those it covers."""
    found: list[int] = []
    for one in old:
        earlier = _COVERED.match(one.content) if one.name == SUMMARY else None
        found += [int(earlier[1])] if earlier and earlier[1] else []
        found += [one.n] if one.n else []
    return (min(found), max(found)) if found else (0, 0)


def _key(run: Run, old: Sequence[Message]) -> str:
    """Return the step key, which depends on the messages: other messages need another summary."""
    return f"{run.keys.scope}{_COMPACTED}{_digest(old)}"


def _digest(messages: Sequence[Message]) -> str:
    data = orjson.dumps([one.model_dump(mode="json") for one in messages])
    return hashlib.blake2b(data, digest_size=8).hexdigest()


async def _summary(
    run: Run,
    summarizer: Summarizer,
    request: CompactionRequest,
    counter: TokenCounter,
    retry: Retry,
    on_failure: str,
    *,
    fits: bool,
) -> str | None:
    problem = ""
    for attempt in range(1, retry.max_attempts + 1):
        if attempt > 1:
            await anyio.sleep(backoff(retry, attempt - 1))
        run.touch()
        try:
            found = await _ask(run, summarizer, request)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            problem = f"the summarizer raised {type(error).__name__}: {error_text(error)}"
            if not retry.allows(error):
                break
            continue
        problem = _problem_of(found, request.budget, counter)
        if not problem:
            return str(found).strip()
    if on_failure == "error" and fits:
        logger.bind(task=run.envelope.task, id=run.id).warning(
            "events {} to {} could not be summarized, and still fit the window: {}; the next prompt tries again",
            request.first,
            request.last,
            problem,
        )
        return None
    if on_failure == "error":
        raise ContextError(
            f"task {run.id}: events {request.first} to {request.last} could not be summarized and were kept: {problem}"
        )
    logger.bind(task=run.envelope.task, id=run.id).warning(
        "compaction used a digest of events {} to {}: {}", request.first, request.last, problem
    )
    return _digest_of(request, counter)


async def _ask(run: Run, summarizer: Summarizer, request: CompactionRequest) -> Any:
    if not is_async(summarizer):
        return await call_in_step(run, summarizer, request)
    found = summarizer(request)
    return await found if isinstance(found, Awaitable) else found


def _problem_of(found: Any, budget: int, counter: TokenCounter) -> str:
    if not isinstance(found, str):
        return f"the summarizer must return a string, got {type(found).__name__}"
    if not found.strip():
        return "the summarizer returned an empty text"
    try:
        found.encode()
    except UnicodeEncodeError:
        return "the summary is not valid UTF-8"
    tokens = counter.count(found)
    return f"the summary must have at most {budget} tokens, got {tokens}" if tokens > budget else ""


def _digest_of(request: CompactionRequest, counter: TokenCounter) -> str:
    """Return the start of each message, as many of the latest as fit the budget."""
    lines: list[str] = []
    room = request.budget
    for message in reversed(request.messages):
        tools = ", ".join(quoted_name(call.name) for call in message.tool_calls)
        line = f"{message.role}: {quoted_line(message.content, _CLIPPED, brief=True) if message.content else ''}"
        line += f" (called {tools})" if tools else ""
        room -= counter.count(line + "\n")
        if room < 0:
            break
        lines.append(line)
    return "\n".join(reversed(lines)) or "(no room for a digest)"

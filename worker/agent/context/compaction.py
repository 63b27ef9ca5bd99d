"""The oldest turns of a conversation are replaced by a summary of them, once, and the log keeps them as they were."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import anyio
import orjson

from ....deadletter import Retry, backoff
from ....queues import Entry, Kind
from ...durable import Run
from ...durable.codec import is_async
from ...errors import CompactionFailed
from ...journal import AgentState, Message, StepRecord
from ...journal.agent_events import Compacted
from ...log import logger
from .conversation import SUMMARY, completed, exchanges
from .tokens import TokenCounter, message_tokens

__all__ = ["CompactionRequest", "Summarizer", "compact", "cut_at", "recall"]


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    """What a summarizer is given. messages: whole exchanges, the oldest first; the first may be a former summary.

    first, last: numbers of the events that they came with. goal: of the task. budget: tokens that the summary may take.
    """

    messages: tuple[Message, ...]
    first: int
    last: int
    goal: str
    budget: int


Summarizer = Callable[[CompactionRequest], Awaitable[str] | str]
"""Makes a summary of old turns; async, or sync (it is run in a thread)."""

_GAIN: Final = 2
"""A summary must make room: what it replaces has so many times its budget."""

_CLIPPED: Final = 160
"""Characters of a turn in a digest."""

_COMPACTED: Final = "#compacted:"
"""What the keys of these steps begin with; a digest of the turns follows."""


def cut_at(messages: Sequence[Message], keep: int) -> int:
    """How many of the oldest messages can go so that at least the last `keep` stay, and no exchange is cut."""
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
    counter: TokenCounter,
    retry: Retry | None = None,
    on_failure: Literal["error", "digest"] = "error",
) -> bool:
    """Replace the oldest turns by their summary; whether there was anything to gain by it.

    The summary's record and the event that replaces the turns are one write: either both are there or neither, and a
    summary that is there is never asked for again. budget: tokens of the summary. retry: how often the summarizer is
    asked, and how long apart. on_failure: where none of its answers can be used, raise `CompactionFailed`, or have a
    digest of the turns instead: the beginning of each, as many of the latest as the budget takes.
    """
    if recall(run, state, keep):
        return True
    messages = tuple(state.messages)
    old = messages[: cut_at(messages, keep)]
    fresh = [one for one in old if one.name != SUMMARY]
    if not fresh or sum(message_tokens(one, counter) for one in old) < _GAIN * budget:
        return False
    first, last = _range(run, old)
    asked = CompactionRequest(tuple(completed(old)), first, last, state.goal, budget)
    key = _key(run, old)
    run.step_began(key)
    try:
        summary = await _summary(run, summarizer, asked, counter, retry or Retry(), on_failure)
        text = f"[Summary of events {first} to {last}: {len(old)} messages, which the log of the task has whole.]"
        text += f"\n{summary}"
        event = Compacted(first=first, last=last, messages=len(old), summary=text, step=run.keys.within)
        record = StepRecord(orjson.dumps({"first": first, "summary": text})).encode()
        await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), run.next_entry(event), wait=True)
    finally:
        run.step_ended(key)
    run.history.done[key] = record
    _replace(state, messages, len(old), first, text)
    logger.info("Task {} compacted {} messages, events {} to {}", run.id, len(old), first, last)
    return True


def recall(run: Run, state: AgentState, keep: int) -> bool:
    """Replace the oldest turns by the summary that a former run of the same handler had of just them, if it had."""
    if not any(_COMPACTED in key for key in run.history.done):
        return False
    messages = tuple(state.messages)
    cut = cut_at(messages, keep)
    record = run.history.done.get(_key(run, messages[:cut]))
    if record is None:
        return False
    found = orjson.loads(StepRecord.decode(record).result)
    _replace(state, messages, cut, found["first"], found["summary"])
    return True


def _replace(state: AgentState, messages: tuple[Message, ...], cut: int, first: int, text: str) -> None:
    """What the event does to a state, done to one that no session keeps: a session has heard of the event already."""
    if tuple(state.messages) == messages:
        state.messages[:cut] = [Message(role="user", content=text, name=SUMMARY, n=first)]


def _key(run: Run, old: Sequence[Message]) -> str:
    """Names the step by what is summarized: a run that begins again behind a summary asks for another one."""
    return f"{run.keys.scope}{_COMPACTED}{_digest(old)}"


def _digest(messages: Sequence[Message]) -> str:
    data = orjson.dumps([one.model_dump(mode="json") for one in messages])
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _range(run: Run, old: Sequence[Message]) -> tuple[int, int]:
    """The events that the turns came with. Of turns that came with none it is known only that they were before now."""
    numbers = [one.n for one in old if one.n is not None]
    last = max(numbers) if len(numbers) == len(old) else max(run.events, run.history.events)
    return min(numbers, default=1), last


async def _summary(
    run: Run, summarizer: Summarizer, asked: CompactionRequest, counter: TokenCounter, retry: Retry, on_failure: str
) -> str:
    problem = ""
    for attempt in range(1, retry.max_attempts + 1):
        if attempt > 1:
            await anyio.sleep(backoff(retry, attempt - 1))
        run.touch()
        try:
            found = await _ask(run, summarizer, asked)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a user's function
            problem = f"the summarizer raised {type(error).__name__}: {error}"
            if not retry.allows(error):
                break
            continue
        problem = _problem(found, asked.budget, counter)
        if not problem:
            return str(found).strip()
    if on_failure == "error":
        raise CompactionFailed(run.id, asked.first, asked.last, problem)
    logger.warning("Task {}: {}; a digest of events {} to {} takes its place", run.id, problem, asked.first, asked.last)
    return _digest_of(asked, counter)


async def _ask(run: Run, summarizer: Summarizer, asked: CompactionRequest) -> Any:
    found = summarizer(asked) if is_async(summarizer) else await run.threads.run(summarizer, (asked,), {})
    return await found if isinstance(found, Awaitable) else found


def _problem(found: Any, budget: int, counter: TokenCounter) -> str:
    if not isinstance(found, str):
        return f"the summarizer returned {type(found).__name__}, not text"
    if not found.strip():
        return "the summarizer returned nothing"
    tokens = counter.count(found)
    return f"the summary takes {tokens} tokens and may take {budget}" if tokens > budget else ""


def _digest_of(asked: CompactionRequest, counter: TokenCounter) -> str:
    """The beginning of each turn, as many of the latest as the budget takes."""
    lines: list[str] = []
    room = asked.budget
    for message in reversed(asked.messages):
        said = " ".join(message.content.split())
        tools = ", ".join(call.name for call in message.tool_calls)
        line = f"{message.role}: {said[:_CLIPPED]}{'...' if len(said) > _CLIPPED else ''}"
        line += f" (called {tools})" if tools else ""
        room -= counter.count(line + "\n")
        if room < 0:
            break
        lines.append(line)
    return "\n".join(reversed(lines)) or "(no room for a digest)"

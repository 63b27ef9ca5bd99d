"""Reads of the tools: bounded text in which foreign text is quoted."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....queues.event_log import TaskEvent, read_last_events
from ....queues.inbox import InboxMessage
from ....queues.sessions.record import parse_turn_id
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.wording import shown_time
from ...context import Context
from ...durable.journal.quoting import quoted_block, quoted_line, quoted_name
from ...durable.journal.resumption import Resumption
from ...durable.run import Run
from ...durable.steps.current import CURRENT_RUN
from ...errors import ArtifactDamaged, ArtifactMissing, describe_problem
from ...log import log_wait
from ...memory.memory import RELATIONS
from ..context.providers import MALFORMED
from ..journal.state import AgentState, Artifact, StepStatus

_PAGE: Final = 200
_MAX_SEARCHED: Final = 2_000
"""Events that one search reads."""

_MAX_FOUND: Final = 20
_EXCERPT: Final = 300
_BINARY: Final = 0.1
"""Share of undecodable characters from which an artifact is not text."""

_FAILED: Final = (StepStatus.FAILED, StepStatus.DROPPED)
_OPEN: Final = (StepStatus.PENDING, StepStatus.RUNNING)


class Reader:
    """The tools of a running task."""

    def __init__(self, ctx: Context, state: AgentState, subjects: Collection[str], limit: int) -> None:
        self._ctx = ctx
        self._state = state
        self._subjects = subjects
        self._limit = limit

    async def recall_step(self, key: str, offset: int) -> str:
        found = await self._ctx.recall_step(key)
        if found is None:
            known = ", ".join(quoted_name(step.key, 60) for step in self._state.plan[-20:])
            former = parse_turn_id(self._ctx.task_id) is not None
            left = "; steps of earlier turns are not kept, but the answers that they led to" if former else ""
            return f"error: your plan has no step {quoted_name(key)}; its latest steps are {known or 'none'}{left}"
        if found.retired:
            return f"step {quoted_name(found.key)} ({found.status}) is so old that its result is not kept any more"
        lines = [f"step {quoted_name(found.key)}: {quoted_line(found.title)} ({found.status})"]
        if found.error:
            lines.append(f"error: {quoted_line(found.error, 1_000)}")
        if found.result is None:
            return "\n".join([*lines, "It has no result."])
        text = found.result if isinstance(found.result, str) else json.dumps(found.result, ensure_ascii=False, indent=1)
        return "\n".join([*lines, *_window("result", text, offset, self._limit, "recall_step")])

    async def search_history(self, query: str, before: str, event: str, section: str, offset: int) -> str:
        if section:
            return self._section(section, offset)
        run = _run_of(self._ctx)
        await run.flush()
        words = [] if query == "*" else query.casefold().split()
        if named := event or before:
            start = await _find_event(run, named)
            if start is None:
                return f"error: the log of your task has no event {named}"
            if event:
                return "\n".join(_window(_label(start), _text_of(start), offset, self._limit, "search_history"))
            before = start.id
        found: list[str] = []
        searched, last, complete = 0, before, False
        while searched < _MAX_SEARCHED and len(found) < _MAX_FOUND and not complete:
            page = await _log_page(run, last or None)
            complete = len(page) < _PAGE
            for one in page:
                if one.restarts:  # earlier events no longer count
                    complete = True
                    break
                searched, last = searched + 1, one.id
                if (line := _matching(one, words)) is not None:
                    found.append(line)
                    if len(found) == _MAX_FOUND:
                        complete = False
                        break
        lines = found or ["No event matches."]
        kept = _fitting(lines, self._limit - 300)
        if len(kept) < len(lines):
            last, complete = kept[-1].split()[1], False
        rest = "the log has no earlier ones" if complete else f"for earlier ones use before {last!r}"
        return "\n".join([*kept, f"{searched} events were searched; {rest}; event returns one of them in full."])

    def _section(self, section: str, offset: int) -> str:
        """Return a section of the brief from the state, with whole texts."""
        state = self._state
        found: list[Any]
        if section == "former":
            found = _left_by(self._ctx.resumption)
        elif section in ("failed", "open"):
            kinds = _FAILED if section == "failed" else _OPEN
            found = [step.model_dump(mode="json") for step in state.plan if step.status in kinds]
        else:
            held: Sequence[BaseModel] = getattr(state, "commitments" if section == "promises" else section)
            found = [one.model_dump(mode="json") for one in held if not getattr(one, "done", False)]
            if section == "questions" and state.waiting_for is not None:
                found.insert(0, {"waiting_for": state.waiting_for.model_dump(mode="json")})
        if not found:
            return f"There are no entries under {section!r}."
        text = json.dumps(found, ensure_ascii=False, indent=1)
        return "\n".join(_window(f"all {len(found)} under {section!r}", text, offset, self._limit, "search_history"))

    async def search_memory(self, query: str, limit: int) -> str:
        found = await self._ctx.memory.search(query, limit=limit, subject=["", *self._subjects])
        if not found:
            return "No memory matches."
        lines = []
        for one in found:
            memory = one.memory
            about = f", about {quoted_name(memory.subject)}" if memory.subject else ""
            lines.append(f"- {quoted_line(memory.text, 1_000)} ({_origin(memory.source, memory.updated)}{about})")
            lines += [
                f"  - {RELATIONS[other.relation]}: {quoted_line(other.text)} ({_origin(other.source, other.updated)})"
                for other in one.related
            ]
        kept = _fitting(lines, self._limit - 100)
        left = len(lines) - len(kept)
        return "\n".join([*kept, *([f"{left} more lines were cut; ask with a smaller limit"] if left else [])])

    async def read_artifact(self, name: str, offset: int, limit: int) -> str:
        artifacts = [*await self._ctx.artifacts.list(), *self._state.artifacts]
        found = next((one for one in artifacts if name in (one.name, one.hash)), None)
        if found is None:
            names = ", ".join(dict.fromkeys(quoted_name(one.name, 100) for one in artifacts[:20]))
            return f"error: your task has no artifact {quoted_name(name)}; its artifacts are {names or 'none'}"
        limit = min(limit, self._limit)
        try:
            data = await self._bytes(found, offset, limit)
        except (ArtifactMissing, ArtifactDamaged):
            return f"error: the content of artifact {quoted_name(found.name)} is lost or damaged"
        text = data.decode("utf-8", "replace")
        if "\0" in text or text.count("\ufffd") > 6 + len(text) * _BINARY:
            kind = quoted_name(found.media_type)
            return f"error: artifact {quoted_name(found.name)} is not text ({kind}, {found.size:,} bytes)"
        first, last = min(offset, found.size), offset + len(data)
        more = f"; for the rest call read_artifact with offset {last}" if last < found.size else ""
        head = f"artifact {quoted_name(found.name)}, bytes {first:,} to {last:,} of {found.size:,}{more}"
        return f"{head}\n{quoted_block(text, 2 * limit)}"

    async def _bytes(self, artifact: Artifact, offset: int, limit: int) -> bytes:
        """Return a part of an artifact; it is read whole, so that its hash is verified."""
        found, place = bytearray(), 0
        async for chunk in self._ctx.artifacts.chunks(artifact):
            found += chunk[max(0, offset - place) : max(0, offset + limit - place)]
            place += len(chunk)
        return bytes(found)


def _left_by(resumption: Resumption | None) -> list[Any]:
    """Return what the former run left beside the state."""
    left = None if resumption is None else resumption.handoff
    if left is None:
        return []
    doubtful = [{"in_doubt": one.model_dump()} for one in left.dependencies.in_doubt]
    waiting = [{"was_waiting_for": one.call} for one in left.dependencies.in_flight]
    return [*doubtful, *waiting, *([{"note": left.message}] if left.message else []), *left.attention]


def inbox_text(messages: Sequence[InboxMessage], limit: int, tools: Collection[str]) -> str:
    """Return messages as text, each with its sender."""
    if not messages:
        return "There are no unread messages."
    share = max(200, limit // len(messages) - 200)
    parts = []
    for one in messages:
        text = one.content if isinstance(one.content, str) else json.dumps(one.content, ensure_ascii=False)
        cut = "; it is cut" if len(text) > share else ""
        cut += ", search_history finds the whole message" if cut and "search_history" in tools else ""
        parts.append(f"message from {quoted_name(one.sender or 'unknown')}, {shown_time(one.at)}{cut}:")
        parts.append(quoted_block(text, share))
    return "\n".join(parts)


def _run_of(ctx: Context) -> Run:
    run = CURRENT_RUN.get()
    if run is None or run.id != ctx.task_id:
        raise RuntimeError(f"a tool of task {ctx.task_id} was called outside its handler")
    return run


async def _find_event(run: Run, named: str) -> TaskEvent | None:
    """Return the event with this id, or with this number since the log was restarted."""
    time, dash, place = named.partition("-")
    last: str | None = f"{time}-{int(place) + 1}" if dash else None
    while page := await _log_page(run, last, 1 if dash else None):
        for one in page:
            if named in (one.id, str(one.number)):
                return one
            if dash or one.restarts or (one.number is not None and one.number < int(time)):
                return None
        last = page[-1].id
    return None


async def _log_page(run: Run, before: str | None, limit: int | None = None) -> list[TaskEvent]:
    return await _waiting(
        run, partial(read_last_events, run.gateway, run.delivery.partition, run.id, limit or _PAGE, before=before)
    )


async def _waiting(run: Run, reading: Any) -> list[TaskEvent]:
    found: list[TaskEvent] = await retry_while_unavailable(
        reading, on_wait=log_wait(f"log of task {run.id}", run.touch)
    )
    return found


def _matching(event: TaskEvent, words: Sequence[str]) -> str | None:
    """Return the line of an event that has all words, around the first of them; None if it has not."""
    if _is_own(event):
        return None
    text = _text_of(event)
    folded = text.casefold()
    label = f"{event.type} {event.step or ''}".casefold()
    if not all(word in folded or word in label for word in words):
        return None
    at = max(0, min((folded.find(word) for word in words if word in folded), default=0) - _EXCERPT // 3)
    return f"{_label(event)}: {quoted_line(('...' if at else '') + text[at:], _EXCERPT)}"


def _is_own(event: TaskEvent) -> bool:
    """Whether the event is a result of these tools, which would be found by its own query."""
    data = event.data if isinstance(event.data, dict) else {}
    message = data.get("message")
    return data.get("tool") in TOOLS or (isinstance(message, dict) and message.get("name") in TOOLS)


def _text_of(event: TaskEvent) -> str:
    data = event.data
    if event.type == "message_added" and isinstance(data, dict) and isinstance(data.get("message"), dict):
        data = {name: data["message"].get(name) for name in ("role", "content")}
    return "" if data is None else json.dumps(data, ensure_ascii=False)


def _label(event: TaskEvent) -> str:
    step = f" in step {quoted_name(event.step)}" if event.step else ""
    number = "" if event.number is None else f" (number {event.number})"
    return f"event {event.id}{number} {quoted_line(event.type, 100)}{step}, {shown_time(event.at)}"


def _origin(source: str, updated: float) -> str:
    return f"{'source ' + quoted_name(source) if source else 'no source'}, {shown_time(updated * 1000)}"


def _window(label: str, text: str, offset: int, limit: int, tool: str) -> list[str]:
    """Return a part of a text as a block, with a note of what is missing."""
    part = text[offset : offset + limit]
    whole = len(part) == len(text)
    end = offset + len(part)
    more = f"; for the rest call {tool} with offset {end}" if end < len(text) else ""
    where = "" if whole else f" (characters {min(offset, len(text)):,} to {end:,} of {len(text):,}{more})"
    return [f"{label}{where}:", quoted_block(part, limit)]


def _fitting(lines: Sequence[str], limit: int) -> list[str]:
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > limit:
            break
        kept.append(line)
    return kept


_Offset = Annotated[int, Field(ge=0, le=2**40, description="Where to start, for the rest of a long result.")]
_Event = Annotated[str, Field(pattern=r"^(\d{1,15}(-\d{1,15})?)?$")]
_Section = Literal[
    "", "former", "failed", "open", "decisions", "discoveries", "promises", "questions", "artifacts", "files"
]
_Query = Annotated[str, Field(min_length=1, max_length=1_000)]


class ArgumentsRefused(ValueError):
    """The arguments of a model do not fit a tool; the text is for the model."""


class ToolArguments(BaseModel):
    """Base of the arguments; the docstring of a class is the description of its tool."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    tool: ClassVar[str]


class RecallStep(ToolArguments):
    """Return a step of your plan with its whole result, also one that no longer stands in the prompt."""

    tool = "recall_step"
    key: Annotated[str, Field(min_length=1, max_length=200, description="Key of the step, as in the plan.")]
    offset: _Offset = 0


class SearchHistory(ToolArguments):
    """Search the log of your task (steps, tool calls, decisions, messages) for words, the newest events first.

    It also returns one event in full, or a whole section of the brief.
    """

    tool = "search_history"
    query: Annotated[_Query, Field(description="Words that an event must have, all of them.")] = "*"
    before: Annotated[_Event, Field(description="Search only events before this event: its number or id.")] = ""
    event: Annotated[_Event, Field(description="Number or id of an event to return in full instead of searching.")] = ""
    section: Annotated[
        Literal[
            "", "former", "failed", "open", "decisions", "discoveries", "promises", "questions", "artifacts", "files"
        ],
        Field(description="Return all entries of this section of the brief, in full, instead of searching."),
    ] = ""
    offset: _Offset = 0


class SearchMemory(ToolArguments):
    """Search what you remember from earlier tasks."""

    tool = "search_memory"
    query: Annotated[_Query, Field(description="A question, or words.")]
    limit: Annotated[int, Field(ge=1, le=20, description="Most memories to return.")] = 5


class ReadArtifact(ToolArguments):
    """Read a text file that your task has saved."""

    tool = "read_artifact"
    name: Annotated[str, Field(min_length=1, max_length=1_000, description="Name or SHA-256 of the artifact.")]
    offset: _Offset = 0
    limit: Annotated[int, Field(ge=1, le=100_000, description="Most bytes to return.")] = 8_000


class ReadInbox(ToolArguments):
    """Read the unread messages that others sent to you. They count as read afterwards."""

    tool = "read_inbox"
    limit: Annotated[int, Field(ge=1, le=20, description="Most messages to return.")] = 10


TOOLS: Final[dict[str, type[ToolArguments]]] = {
    kind.tool: kind for kind in (RecallStep, SearchHistory, SearchMemory, ReadArtifact, ReadInbox)
}


def schema_of(kind: type[ToolArguments]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    found = kind.model_json_schema()
    properties = {
        name: {key: value for key, value in one.items() if key not in ("title", "pattern")}
        for name, one in found["properties"].items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": found.get("required", []),
        "additionalProperties": False,
    }


def check_arguments(kind: type[ToolArguments], arguments: dict[str, Any]) -> ToolArguments:
    """Return the checked arguments of a call. Raises `ArgumentsRefused`."""
    if MALFORMED in arguments:
        raise ArgumentsRefused("the arguments must be a JSON object")
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)[:3]
        known = ", ".join(kind.model_fields)
        raise ArgumentsRefused("; ".join(_problem(one, known) for one in problems)) from None


def _problem(problem: Any, known: str) -> str:
    if problem["type"] == "extra_forbidden":
        return f"unknown argument; the arguments are {known}"
    return describe_problem(problem)

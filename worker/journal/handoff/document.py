"""The handoff: the short document that a run leaves when it stops, for the one that goes on and for a reader.

The machine's form is its JSON, kept in the checkpoint under `#handoff`; the reader's is Markdown. Neither is a dump:
`fitted` (compression.py) brings either below a number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from ...errors import BadHandoff

__all__ = [
    "HANDOFF",
    "RECEIVED",
    "AwaitedAnswer",
    "Dependencies",
    "DoubtfulStep",
    "FoundFact",
    "Handoff",
    "MadeDecision",
    "OpenStep",
    "ToolUse",
    "Why",
]

HANDOFF: Final = "#handoff"
"""The key in the checkpoint of the handoff that the task's own last run has left."""

RECEIVED: Final = "#received"
"""The key of the one with which another task has handed on."""

Why = Literal["shutdown", "waiting", "budget", "burial", "hand_off", "crash", "failure", "asked", "finished"]
"""Why a run stopped. asked: it did not, somebody asked how things stand. crash, failure: told later, from the log."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class OpenStep(_Part):
    """A step that is not done. risky: it acts on the world."""

    key: str
    title: str = ""
    attempts: int = 0
    risky: bool = False
    error: str | None = None


class MadeDecision(_Part):
    """A decision. n: the number of its event, 0 where it is not known."""

    n: int = 0
    choice: str
    reasoning: str = ""
    alternatives: tuple[str, ...] = ()


class FoundFact(_Part):
    """A discovery. n: the number of its event, 0 where it is not known."""

    n: int = 0
    fact: str
    source: str = ""


class AwaitedAnswer(_Part):
    """what: such as "message" or "approval". on: whom."""

    what: str = ""
    on: str = ""
    why: str = ""


class ToolUse(_Part):
    """A tool that was called, and how often."""

    tool: str
    calls: int = 1


class DoubtfulStep(_Part):
    """A risky step that was begun and has no result. idempotency_key: by which its effect is found out."""

    key: str
    idempotency_key: str


class Dependencies(_Part):
    """What the work hangs on outside of itself: tools it called, steps in doubt, messages that nobody has read."""

    tools: tuple[ToolUse, ...] = ()
    in_doubt: tuple[DoubtfulStep, ...] = ()
    unread: int = 0


class Handoff(_Part):
    """Where a run stood when it stopped.

    session: the task's id. at: milliseconds of Redis' clock. events: the number of the last event it tells of; it is
    out of date once there are later ones. to: the task that goes on, where it is another. message: what its author
    wants the next one to know. left_out: what compression has left out, by kind.
    """

    version: ClassVar[int] = 1
    """The latest version of the form that this class reads, and the one that it writes."""

    v: int = 1
    task: str
    agent: str | None = None
    session: str
    why: Why
    detail: str = ""
    at: int | None = None
    events: int = 0
    to: str | None = None
    goal: str = ""
    message: str = ""
    summary: str = ""
    steps: int = 0
    last_completed: str | None = None
    in_progress: tuple[OpenStep, ...] = ()
    pending: tuple[OpenStep, ...] = ()
    decisions: tuple[MadeDecision, ...] = ()
    discoveries: tuple[FoundFact, ...] = ()
    attention: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    waiting_on: tuple[AwaitedAnswer, ...] = ()
    artifacts: tuple[str, ...] = ()
    dependencies: Dependencies = Dependencies()
    left_out: dict[str, int] = {}

    def to_json(self) -> bytes:
        """The machine's form."""
        return orjson.dumps(self.model_dump(mode="json", exclude_defaults=True) | {"v": self.v, "why": self.why})

    @classmethod
    def from_json(cls, task_id: str, data: bytes) -> Handoff:
        """Read what `to_json` made. Raises `BadHandoff` for what is broken or of a later version; it names the task."""
        try:
            found = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise BadHandoff(task_id, f"it is not JSON: {error}") from None
        version = found.get("v") if isinstance(found, dict) else None
        if not isinstance(version, int) or version < 1:
            raise BadHandoff(task_id, "it has no version")
        if version > cls.version:
            raise BadHandoff(
                task_id, f"it has version {version}, and this version of perdure reads up to {cls.version}"
            )
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise BadHandoff(task_id, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def to_markdown(self) -> str:
        """The reader's form."""
        sections = (
            ("In progress", self._progress()),
            ("Decided and why", [_decision(made) for made in self.decisions]),
            ("Found out", [_line(f"{one.fact}{_from(one.source)}") for one in self.discoveries]),
            ("Needs attention next", self._attention()),
            ("Can wait", [f"- {_step(one)}" for one in self.pending[_NEXT:]] + [_line(one) for one in self.later]),
            ("Waiting on whom", [_waiting(one) for one in self.waiting_on]),
        )
        parts = [self._head()]
        parts += [f"## {title}\n\n" + "\n".join(lines or ["- nothing"]) for title, lines in sections]
        if self.left_out:
            told = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(self.left_out.items()))
            parts.append(f"Left out for length: {told}.")
        return "\n\n".join(parts) + "\n"

    def _head(self) -> str:
        who = f", agent {_flat(self.agent)}" if self.agent else ""
        when = "" if self.at is None else f" at {datetime.fromtimestamp(self.at / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
        goes_on = f" Goes on as task {self.to}." if self.to else ""
        lines = [f"# Handoff of {_flat(self.task)} {self.session}"]
        lines.append(f"{_STOPPED[self.why]}{when}{who}{_colon(self.detail)}.{goes_on}".replace("..", "."))
        lines += [f"Goal: {_flat(self.goal)}"] if self.goal else []
        lines += [_flat(self.summary)] if self.summary else []
        return "\n\n".join(lines)

    def _progress(self) -> list[str]:
        lines = [f"- {_step(one)}" for one in self.in_progress]
        if self.last_completed is not None:
            lines.append(f"- steps done: {self.steps or 'some'}, the last one `{_flat(self.last_completed)}`")
        if self.artifacts:
            lines.append(f"- artifacts: {_flat(', '.join(self.artifacts))}")
        if self.dependencies.tools:
            used = ", ".join(f"{one.tool} ({one.calls})" for one in self.dependencies.tools)
            lines.append(f"- tools called: {_flat(used)}")
        return lines

    def _attention(self) -> list[str]:
        lines = [_line(self.message)] if self.message else []
        lines += [
            f"- in doubt: `{_flat(one.key)}` was begun and has no result; ask for `{_flat(one.idempotency_key)}`"
            for one in self.dependencies.in_doubt
        ]
        if self.dependencies.unread:
            lines.append(f"- messages unread: {self.dependencies.unread}")
        lines += [_line(one) for one in self.attention]
        lines += [f"- next: {_step(one)}" for one in self.pending[:_NEXT]]
        return lines


_NEXT: Final = 2
"""Steps of a plan that need attention next; those after them can wait."""

_STOPPED: Final[dict[str, str]] = {
    "shutdown": "Stopped by a shutdown",
    "waiting": "Stopped to wait",
    "budget": "Stopped at the end of its budget",
    "burial": "Given up",
    "hand_off": "Handed on",
    "crash": "Cut off by a crash",
    "failure": "Stopped by an error",
    "asked": "As it stood",
    "finished": "Finished",
}


def _flat(text: Any) -> str:
    """Text as one line: what a section says must not open another."""
    return " ".join(str(text).split())


def _line(text: Any) -> str:
    return f"- {_flat(text)}"


def _colon(text: str) -> str:
    return f": {_flat(text)}" if text else ""


def _from(source: str) -> str:
    return f" ({source})" if source else ""


def _listed(items: Iterable[str]) -> str:
    return "; ".join(map(_flat, items))


def _decision(made: MadeDecision) -> str:
    why = f": {made.reasoning}" if made.reasoning else ""
    left_open = f" (left open: {_listed(made.alternatives)})" if made.alternatives else ""
    return _line(f"{made.choice}{why}{left_open}")


def _step(step: OpenStep) -> str:
    title = f" {_flat(step.title)}" if step.title and step.title != step.key else ""
    notes = [f"attempt {step.attempts}"] if step.attempts > 1 else []
    notes += ["acts on the world"] if step.risky else []
    notes += [f"failed: {_flat(step.error)}"] if step.error else []
    return f"`{_flat(step.key)}`{title}{f' ({_listed(notes)})' if notes else ''}"


def _waiting(one: AwaitedAnswer) -> str:
    whom = f"{one.on}: " if one.on else ""
    return _line(f"{whom}{one.what or 'something'}{f', {one.why}' if one.why else ''}")

"""Handoff document: the short report that a run leaves when it stops, for the next run and for people.

Its JSON is stored in the checkpoint under `#handoff`; its Markdown is for readers. It is a report and not a dump:
`fitted` (budget.py) shortens either form to a number of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from .....queues.doubts import resolve_command
from .....queues.wording import counted, shown_time
from ....errors import BadHandoff, first_problem
from ..quoting import quoted_line, quoted_name

HANDOFF: Final = "#handoff"
"""Checkpoint key of the handoff document of the task's last run."""

RECEIVED: Final = "#received"
"""Checkpoint key of the handoff document of the task that this one continues."""

REMEDY: Final = "to continue: "
"""Beginning of what an operator can do about a dead letter, in `Handoff.attention`."""

Why = Literal["shutdown", "waiting", "budget", "burial", "hand_off", "crash", "failure", "asked", "finished"]
"""Reason why a run stopped. asked: it did not, a person asked for the document. crash, failure: drafted later."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class OpenStep(_Part):
    """Step that is not done.

    Attributes:
        number: Its place in the plan, from 1; 0 if it is in no plan.
        risky: It acts on the world.
    """

    key: str
    number: int = 0
    title: str = ""
    attempts: int = 0
    risky: bool = False
    error: str | None = None

    @property
    def planned(self) -> bool:
        """Whether it is a step of the plan."""
        return self.number > 0


class DroppedStep(_Part):
    """Open step that another plan replaced. why: reason of that plan."""

    key: str
    title: str = ""
    why: str = ""


class CompletedStep(_Part):
    """Step that is done. result: the beginning of its result as JSON; empty if only a run of the task knows it."""

    key: str
    title: str = ""
    result: str = ""


class MadeDecision(_Part):
    """Decision. n: number of its event, 0 if unknown."""

    n: int = 0
    choice: str
    reasoning: str = ""
    alternatives: tuple[str, ...] = ()


class FoundFact(_Part):
    """Discovery. n: number of its event, 0 if unknown."""

    n: int = 0
    fact: str
    source: str = ""


class AwaitedAnswer(_Part):
    """Thing that the task waits for.

    Attributes:
        what: Kind, such as "message" or "answer".
        on: Sender that is expected.
        wait: Id by which it is answered: of a wait for an answer.
    """

    what: str = ""
    on: str = ""
    why: str = ""
    wait: str = ""


class OpenQuestion(_Part):
    """Question without an answer. to: name of the party that can answer it; empty if that is not known."""

    text: str
    to: str = ""


class UnreadMessage(_Part):
    """Message that came while no run read the inbox. sender: its name, empty if it has none."""

    sender: str = ""
    text: str = ""


class OpenPromise(_Part):
    """Thing that one party has promised another, and that is not done.

    Attributes:
        by: Name of the party that promised it; "me" is the task.
        to: Name of the party that it was promised to; "me" is the task.
        due: Time until which it is to be done; None if no time was agreed.
        wait: Id of the open wait by which it is owed; empty otherwise.
    """

    what: str
    by: str = "me"
    to: str = "me"
    due: AwareDatetime | None = None
    wait: str = ""


class ToolUse(_Part):
    """Tool and the number of its calls."""

    tool: str
    calls: int = 1


class DoubtfulStep(_Part):
    """Risky step that started and has no result.

    Attributes:
        idempotency_key: Key with which its effect can be looked up.
        arguments: Their text.
    """

    key: str
    idempotency_key: str
    arguments: str = ""

    @property
    def command(self) -> str:
        """The command by which a person decides whether it took effect, while the task does not run."""
        return resolve_command(self.idempotency_key.removesuffix(f":{self.key}"), self.key)

    @property
    def call(self) -> str:
        """The step with its arguments, as one line."""
        return f"{quoted_name(self.key)}{f'({_flat(self.arguments)})' if self.arguments else ''}"


class CallInFlight(_Part):
    """Tool call that started and has no result. key: its step. call: the tool with its arguments."""

    key: str
    call: str


class Dependencies(_Part):
    """External things that the work depends on: tools called, calls in flight, steps in doubt, unread messages."""

    tools: tuple[ToolUse, ...] = ()
    in_flight: tuple[CallInFlight, ...] = ()
    in_doubt: tuple[DoubtfulStep, ...] = ()
    unread: int = 0

    def without(self, answered: Collection[str]) -> Dependencies:
        """Return the same without the calls and doubts about these steps."""
        return self.model_copy(
            update={
                "in_flight": tuple(call for call in self.in_flight if call.key not in answered),
                "in_doubt": tuple(doubt for doubt in self.in_doubt if doubt.key not in answered),
            }
        )


class Handoff(_Part):
    """State of the work when a run stopped.

    Attributes:
        session: Id of the task.
        at: Time in milliseconds, by the Redis clock.
        events: Number of the last event that the document covers; it is out of date if there are later ones.
        to: Id of the successor, if another task continues the work.
        message: Note of the handler for the next run.
        steps: Number of recorded steps; with a plan, of its steps that are done.
        total: Number of steps of the plan, 0 without one.
        completed: Latest completed steps, in the order of their completion.
        constraints: What the user of an agent has said, word for word, besides the goal. A function has none.
        files: Files of the workspace that changed last.
        inbox: Messages that came meanwhile; a stored document has their number only.
        messages: Number of messages in the conversation of an agent.
        promises: What the task has promised and what it is owed, the earliest time first and those without one last.
        left_out: Number of items that were removed for length, by kind.
    """

    version: ClassVar[int] = 1
    """Format version that this class writes, and the latest that it reads."""

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
    total: int = 0
    messages: int = 0
    completed: tuple[CompletedStep, ...] = ()
    last_completed: str | None = None
    in_progress: tuple[OpenStep, ...] = ()
    pending: tuple[OpenStep, ...] = ()
    replaced: tuple[DroppedStep, ...] = ()
    decisions: tuple[MadeDecision, ...] = ()
    discoveries: tuple[FoundFact, ...] = ()
    attention: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    waiting_on: tuple[AwaitedAnswer, ...] = ()
    promises: tuple[OpenPromise, ...] = ()
    questions: tuple[OpenQuestion, ...] = ()
    constraints: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    inbox: tuple[UnreadMessage, ...] = ()
    dependencies: Dependencies = Dependencies()
    left_out: dict[str, int] = {}

    def to_json(self) -> bytes:
        """Return the stored form."""
        return orjson.dumps(self.model_dump(mode="json", exclude_defaults=True) | {"v": self.v, "why": self.why})

    @classmethod
    def from_json(cls, task_id: str, data: bytes) -> Handoff:
        """Read what `to_json` returned.

        Raises `BadHandoff`, which names the task, if the document is broken or of a later version.
        """
        try:
            found = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise BadHandoff(task_id, f"it is not JSON: {error}") from None
        version = found.get("v") if isinstance(found, dict) else None
        if not isinstance(version, int) or version < 1:
            raise BadHandoff(task_id, "it has no version")
        if version > cls.version:
            raise BadHandoff(task_id, f"it has version {version}; this version of Perdure reads up to {cls.version}")
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            raise BadHandoff(task_id, first_problem(error)) from None

    def to_markdown(self) -> str:
        """Return the form for readers."""
        parts = [self._head()]
        parts += [f"## {title}\n\n" + "\n".join(lines or ["- nothing"]) for title, lines in self.sections(brief=False)]
        return "\n\n".join([*parts, *self.omissions()]) + "\n"

    def to_prompt(self) -> str:
        """Return the form for a model that continues the work: what is done and next, then sections that say something.

        A successor gets what the former task has done, and begins with steps of its own.
        """
        succeeds = self.why == "hand_off"
        parts = [_flat(self.summary)] if self.summary else []
        parts += [f"Plan: {self.plan_text()}."] if self.total and not succeeds else []
        if completed := self.completed_lines():
            parts.append("\n".join(["Completed by the former task:" if succeeds else "Completed:", *completed]))
        parts += [self._stood()] if succeeds else [self.continue_text()]
        if self.inbox:
            parts.append("\n".join(["Messages that came meanwhile:", *map(_message, self.inbox)]))
        titles = {"Waiting for": "Was waiting for"} if self.why == "waiting" else {}
        for title, lines in self.sections(brief=True):
            parts += [f"## {titles.get(title, title)}\n\n" + "\n".join(lines)] if lines else []
        return "\n\n".join(part for part in [*parts, *self.omissions()] if part)

    def sections(self, *, brief: bool) -> list[tuple[str, list[str]]]:
        """Return the titles and lines of the sections. brief: without what `to_prompt` says before them."""
        always = [
            ("In progress", self._progress(brief=brief)),
            ("Decided and why", [_decision(made) for made in self.decisions]),
            ("Needs attention next", self._attention(brief=brief)),
            (
                "Can wait",
                [f"- {_step(step)}" for step in self._later(brief=brief)] + [_line(one) for one in self.later],
            ),
            ("Waiting for", [_waiting(one) for one in self.waiting_on]),
        ]
        others = [
            ("Discovered", [_line(f"{found.fact}{_from(found.source)}") for found in self.discoveries]),
            ("Said by the user", [_line(text) for text in self.constraints]),
            ("Promises", [_promise(promise, "you" if brief else "") for promise in self.promises]),
            ("Open questions", [_line(f"{asked.text}{_to(asked.to)}") for asked in self.questions]),
            ("Changed files", [f"- {quoted_name(path)}" for path in self.files]),
        ]
        return [*always, *(section for section in others if section[1])]

    def omissions(self) -> list[str]:
        """Return the line that counts what was removed for length, if anything was."""
        counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(self.left_out.items()))
        return [f"Left out for length: {_flat(counts)}."] if counts else []

    def _head(self) -> str:
        agent = f", agent {_flat(self.agent)}" if self.agent else ""
        when = "" if self.at is None else f" at {shown_time(self.at)}"
        successor = f" Continued as task {_flat(self.to)}." if self.to else ""
        lines = [f"# Handoff of {_flat(self.task)} {_flat(self.session)}"]
        lines.append(f"{_STOPPED[self.why]}{when}{agent}{_colon(self.detail)}.{successor}".replace("..", "."))
        lines += [f"Goal: {_flat(self.goal)}"] if self.goal else []
        lines += [_flat(self.summary)] if self.summary else []
        return "\n\n".join(lines)

    def plan_text(self) -> str:
        """Return how far the plan is: "3 of 9 steps are done"."""
        return f"{self.steps} of {counted(self.total, 'step')} {'is' if self.steps == 1 else 'are'} done"

    @property
    def next_step(self) -> OpenStep | None:
        """The step of the plan with which the work continues: the running one, else the next one."""
        running = [step for step in self.in_progress if step.planned]
        return next(iter([*running, *self.pending]), None) if self.total else None

    def completed_lines(self) -> list[str]:
        """Return a line for each completed step that is listed, after one that counts the others."""
        others = self.steps - len(self.completed)
        lines = [f"- {counted(others, 'earlier step')}"] if others > 0 else []
        return lines + [_done(step) for step in self.completed]

    def _stood(self) -> str:
        """Return where the plan of the former task stood; nothing without a plan."""
        step = self.next_step
        return "" if step is None else f"It stood at step {step.number} of {self.total}: {_step(step)}."

    def continue_text(self) -> str:
        """Return with which step the work continues."""
        ends = " Do not repeat completed steps." if self.steps else ""
        if (step := self.next_step) is not None:
            return f"Continue from step {step.number} of {self.total}: {_step(step)}.{ends}"
        if self.total and self.left_out.keys() & {"pending", "in_progress"}:
            return f"Continue with the plan.{ends}"
        if self.total:
            return f"All {counted(self.total, 'step')} are closed: finish.{ends}"
        if self.last_completed is not None:
            return f"Continue after {quoted_name(self.last_completed)}.{ends}"
        return "Continue where the work stopped: no step was completed."

    def _progress(self, *, brief: bool) -> list[str]:
        running = [step for step in self.in_progress if not (brief and step.planned and step == self.next_step)]
        lines = [f"- {_step(step)}" for step in running]
        if self.last_completed is not None and not brief:
            done = f"{self.steps} of {self.total}" if self.total else self.steps or "some"
            lines.append(f"- steps done: {done}, last: {quoted_name(self.last_completed)}")
            lines += [_done(step) for step in self.completed if step.result]
        if self.artifacts:
            lines.append(f"- artifacts: {_flat(', '.join(self.artifacts))}")
        if self.dependencies.tools:
            used = ", ".join(f"{one.tool} ({one.calls})" for one in self.dependencies.tools)
            lines.append(f"- tools called: {_flat(used)}")
        return lines

    def _attention(self, *, brief: bool) -> list[str]:
        lines = [_line(self.message)] if self.message else []
        lines += [
            f"- in doubt: {one.call} started and has no result; look up {quoted_name(one.idempotency_key)}; a person "
            f"decides: {_flat(one.command)}"
            for one in self.dependencies.in_doubt
        ]
        lines += [
            f"- was in flight: {_flat(one.call)}; check whether it took effect first"
            for one in self.dependencies.in_flight
        ]
        if self.dependencies.unread and not self.inbox:
            lines.append(f"- unread messages: {self.dependencies.unread}")
        if not brief:
            lines += [_message(one) for one in self.inbox]
        lines += [_replaced(step) for step in self.replaced]
        lines += [_line(one) for one in self.attention]
        return lines + [f"- next: {_step(step)}" for step in self.pending[:_NEXT] if not brief]

    def _later(self, *, brief: bool) -> Iterable[OpenStep]:
        """Return the steps of the plan that can wait. brief: all but the next one."""
        return self.pending[_NEXT:] if not brief else [step for step in self.pending if step != self.next_step]


_NEXT: Final = 2
"""Number of planned steps that are listed as next; the others can wait."""

_STOPPED: Final[dict[str, str]] = {
    "shutdown": "Stopped by a shutdown of its worker",
    "waiting": "Stopped to wait",
    "budget": "Stopped at the end of its budget",
    "burial": "Buried as a dead letter",
    "hand_off": "Stopped for a successor",
    "crash": "Stopped by a crash",
    "failure": "Stopped by a failure",
    "asked": "Report on request",
    "finished": "Finished",
}


_MAX_LENGTH: Final = 4000
"""Characters of a text that are shown. The budget of a document is what shortens texts (budget.py)."""


def _flat(text: Any) -> str:
    """Return a text as one line that starts no structure."""
    return quoted_line(str(text), _MAX_LENGTH)


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
    not_chosen = f" (not chosen: {_listed(made.alternatives)})" if made.alternatives else ""
    return _line(f"{made.choice}{why}{not_chosen}")


def _step(step: OpenStep) -> str:
    title = f" {_flat(step.title)}" if step.title and step.title != step.key else ""
    notes = [f"attempt {step.attempts}"] if step.attempts > 1 else []
    notes += ["acts on the world"] if step.risky else []
    notes += [f"failed: {_flat(step.error)}"] if step.error else []
    return f"{quoted_name(step.key)}{title}{f' ({_listed(notes)})' if notes else ''}"


def _done(step: CompletedStep) -> str:
    title = f" {_flat(step.title)}" if step.title and step.title != step.key else ""
    return f"- {quoted_name(step.key)}{title}{_colon(step.result)}"


def _replaced(step: DroppedStep) -> str:
    title = f" {_flat(step.title)}" if step.title and step.title != step.key else ""
    return f"- {quoted_name(step.key)}{title} was replaced by another plan{_colon(step.why)}"


def _message(message: UnreadMessage) -> str:
    return (
        f"- message {f'from {_flat(message.sender)}' if message.sender else 'without a sender'}: {_flat(message.text)}"
    )


def _promise(promise: OpenPromise, me: str) -> str:
    """Return a promise as a line. me: name of the task, empty to leave it out for other readers."""
    by, to = (me if name == "me" else name and _flat(name) for name in (promise.by, promise.to))
    parties = f"{f' by {by}' if by else ''}{f' to {to}' if to else ''}"
    due = "" if promise.due is None else f" (due {shown_time(promise.due.timestamp() * 1000)})"
    return f"- promised{parties}{due}: {_flat(promise.what)}"


def _to(name: str) -> str:
    return f" (to {name})" if name else ""


def _waiting(one: AwaitedAnswer) -> str:
    sender = f"{one.on}: " if one.on else ""
    wait = f" ({one.wait})" if one.wait else ""
    return _line(f"{sender}{one.what or 'something'}{wait}{f', {one.why}' if one.why else ''}")

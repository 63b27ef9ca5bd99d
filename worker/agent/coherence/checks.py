"""The coherence checks: pure functions of a `View` of an agent or a function."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from ....queues.runtime import RUNTIME
from ...journal.agent_events import MessageAdded, ToolCalled
from ...journal.event import Event
from ...log import logger
from .findings import Coherence, Finding, check_name

_SHOWN: Final = 120
"""Characters of a call's arguments that are kept."""

_SPACE: Final = re.compile(r"\s+")
_NUMBERED: Final = re.compile(
    r"""
    ^[(\[]?\d{1,4}[.):\]]\s                                                             # "1. ", "(2) "
    | \b(?:step|attempt|try|retry|round|iteration|turn|item|number|no\.|nr\.)\s?\#?\d{1,4}(?:\s?(?:of|/)\s?\d{1,4})?
    | \s?(?:\#\d{1,4}|\(\d{1,4}\)|\[\d{1,4}\])$                                         # " #3", " (2)"
    """,
    re.VERBOSE,
)
"""Numbers that count how often something is said or called. The text has single spaces; other numbers belong to it."""

MAX_LOOP: Final = 5
"""Calls of the longest loop that is recognised."""


def normal_form(text: str) -> str:
    """Return a text without differences of white space, case and numbering."""
    return _NUMBERED.sub("", _SPACE.sub(" ", text).strip().casefold()).strip()


def _normal(value: Any) -> Any:
    match value:
        case str():
            return normal_form(value)
        case Mapping():
            return {str(key): _normal(one) for key, one in value.items()}
        case list() | tuple():
            return [_normal(one) for one in value]
    return value


class Call(NamedTuple):
    """A tool call, or a sentence, which has no tool.

    Attributes:
        arguments: Canonical JSON of the arguments, or the sentence; the beginning of a long one.
        digest: Hash of the normal form, in which equal calls are equal.
    """

    tool: str
    arguments: str
    digest: str = ""

    @classmethod
    def of(cls, tool: str, arguments: Mapping[str, Any]) -> Call:
        """Return a call of bounded size, equal for arguments in another order."""
        text = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()
        normal = orjson.dumps(_normal(arguments), option=orjson.OPT_SORT_KEYS)
        return cls(tool, text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...", _digest(normal))

    @classmethod
    def said(cls, sentence: str) -> Call:
        """Return a sentence of bounded size."""
        flat = _SPACE.sub(" ", sentence).strip()
        return cls("", flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]}...", _digest(normal_form(sentence).encode()))

    @property
    def identity(self) -> str:
        """Text that is the same for calls that differ in white space, case and numbering only."""
        return f"{self.tool} {self.digest or self.arguments}"

    def __str__(self) -> str:
        return f"{self.tool}({self.arguments})" if self.tool else repr(self.arguments)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def find_repeated(calls: Sequence[Call], repeats: int) -> tuple[Call, int] | None:
    """Return the most frequent call in its latest form, and how often it was made, if that is often enough."""
    if not calls:
        return None
    identity, times = Counter(call.identity for call in calls).most_common(1)[0]
    if times < repeats:
        return None
    return next(call for call in reversed(calls) if call.identity == identity), times


def find_loop(calls: Sequence[Call], loops: int) -> tuple[Sequence[Call], int] | None:
    """Return 2 to 5 calls that were made in turn until now, and how often, if that is often enough."""
    keys = [call.identity for call in calls]
    for length in range(2, MAX_LOOP + 1):
        cycle = keys[-length:]
        if len(cycle) < length or len(set(cycle)) < 2:
            continue
        times = 1
        while keys[-length * (times + 1) : -length * times] == cycle:
            times += 1
        if times >= loops:
            return calls[-length:], times
    return None


_PROGRESS: Final = frozenset(
    {
        "started",
        "planned",
        "step_completed",
        "decided",
        "discovered",
        "artifact_saved",
        "received",
        "compacted",
        "finished",
    }
)
"""Types of events that count as progress. Messages and repeated tool calls do not."""


class RecentCalls:
    """The last tool calls, sentences and events, and the time of the last progress."""

    def __init__(self, window: int, clock: Callable[[], float] | None = None) -> None:
        """window: number of the latest calls, sentences and events that are kept."""
        self._clock = clock or RUNTIME.monotonic
        self.calls: deque[Call] = deque(maxlen=window)
        self.sentences: deque[Call] = deque(maxlen=window)
        self.events: deque[Event] = deque(maxlen=window)
        self.progressed = self._clock()

    @property
    def idle(self) -> float:
        """Return the seconds since the last progress."""
        return self._clock() - self.progressed

    def note_progress(self) -> None:
        """Restart the time without progress."""
        self.progressed = self._clock()

    def record(self, event: Event, *, from_earlier_run: bool = False) -> bool:
        """Record an event, and return whether it is progress. One of an earlier run is not: its time is another's."""
        self.events.append(event)
        progress = event.type in _PROGRESS
        if isinstance(event, ToolCalled):
            call = Call.of(event.tool, event.arguments)
            progress = all(call.identity != one.identity for one in self.calls)
            self.calls.append(call)
        elif isinstance(event, MessageAdded) and event.message.role == "assistant" and event.message.content:
            self.sentences.append(Call.said(event.message.content))
        if progress and not from_earlier_run:
            self.note_progress()
        return progress


@dataclass(frozen=True, slots=True)
class View:
    """An agent or a function at one moment.

    Attributes:
        state: the reduction of the event log, as JSON, with the fields of `AgentState`; of a function, its decisions,
            discoveries and artifacts.
        goal: the goal that was enqueued; of a function, its call.
        calls: recent tool calls, the latest last.
        sentences: recent messages of the assistant, the latest last.
        events: recent events, the latest last.
        prompt: the last prompt that a `ContextBuilder` built in this run, if any.
        verdict: the objection in the last verdict of the judge, empty without one.
        idle: seconds since the last progress.
        tokens: tokens of its messages.
        ignored: steps done while the awaited message was in the inbox.
    """

    state: Mapping[str, Any]
    goal: str
    calls: Sequence[Call] = ()
    sentences: Sequence[Call] = ()
    events: Sequence[Event] = ()
    prompt: Any = None
    verdict: str = ""
    idle: float = 0.0
    tokens: int = 0
    ignored: int = 0


_SHOWN_GOAL: Final = 80
"""Characters of a goal in a finding."""


def check_goal(view: View, coherence: Coherence) -> tuple[str, str] | None:
    goal = view.state.get("goal", "")
    if goal == view.goal:
        return None
    return f"the goal is {_short(goal)}, but {_short(view.goal)} was enqueued", str(goal)


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_GOAL else f"{shown[:_SHOWN_GOAL]}..."


def check_plan(view: View, coherence: Coherence) -> tuple[str, str] | None:
    problems = "; ".join(_plan_problems(view.state))
    return (problems, problems) if problems else None


def _plan_problems(state: Mapping[str, Any]) -> Iterator[str]:
    plan, results, current = state.get("plan", ()), state.get("results", {}), state.get("current")
    status = {step["key"]: step["status"] for step in plan}
    for key, times in Counter(step["key"] for step in plan).items():
        if times > 1:
            yield f"{times} steps of the plan have the key {key!r}"
    if missing := [key for key, one in status.items() if one == "done" and key not in results]:
        yield f"steps done without a result: {_listed(missing)}"
    if unknown := [key for key in results if key not in status]:
        yield f"results without a step in the plan: {_listed(unknown)}"
    running = [key for key, one in status.items() if one == "running"]
    if len(running) > 1:
        yield f"{len(running)} steps are running at once: {_listed(running)}"
    if current is not None and current not in status:
        yield f"the current step {current!r} is not in the plan"
    elif current is not None and status[current] != "running":
        yield f"the current step {current!r} is {status[current]}"


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:5]))
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"


def check_progress(view: View, coherence: Coherence) -> tuple[str, str] | None:
    if view.idle <= coherence.stuck_minutes * 60:
        return None
    where = f" in step {view.state['current']!r}" if view.state.get("current") else ""
    return f"no progress{where} for more than {coherence.stuck_minutes:g} minutes", ""


def check_context(view: View, coherence: Coherence) -> tuple[str, str] | None:
    if view.tokens <= coherence.context_tokens:
        return None
    return f"the messages have {view.tokens:,} tokens, {coherence.context_tokens:,} is the limit", ""


def check_waiting(view: View, coherence: Coherence) -> tuple[str, str] | None:
    awaited = view.state.get("waiting_for")
    if not awaited or not view.ignored:
        return None
    sender = f" from {awaited['on']!r}" if awaited.get("on") else ""
    what = awaited.get("what") or "something"
    steps = f"{view.ignored} step{'s' if view.ignored > 1 else ''}"
    return f"waiting for {what}{sender} while a message is in the inbox, unread for {steps}", ""


def check_repetition(view: View, coherence: Coherence) -> tuple[str, str] | None:
    for items, kind in ((view.calls, "calls"), (view.sentences, "messages")):
        latest = items[-coherence.window :]
        if loop := find_loop(latest, coherence.loops):
            cycle, times = loop
            order = [call.identity for call in cycle]
            first = min(order[start:] + order[:start] for start in range(len(order)))
            listed = ", ".join(map(str, cycle))
            return f"{listed} followed each other {times} times", f"loop {' '.join(first)}"
        if repeated := find_repeated(latest, coherence.repeats):
            call, times = repeated
            verb = "called" if call.tool else "said"
            return f"{call} was {verb} {times} times in the last {len(latest)} {kind}", call.identity
    return None


def check_verdict(view: View, coherence: Coherence) -> tuple[str, str] | None:
    return (view.verdict, normal_form(view.verdict)) if view.verdict else None


CHECKS: Final[dict[str, Callable[[View, Coherence], tuple[str, str] | None]]] = {
    "goal": check_goal,
    "plan": check_plan,
    "progress": check_progress,
    "repetition": check_repetition,
    "context": check_context,
    "waiting": check_waiting,
    "judge": check_verdict,
}
"""The checks by name. A check returns `detail` and `about` of its finding, or None."""


def run_checks(view: View, coherence: Coherence) -> list[Finding]:
    """Return the findings of all checks that are not off."""
    found = []
    for name, check in CHECKS.items():
        if coherence.policy(name) != "off" and (wrong := check(view, coherence)) is not None:
            found.append(Finding(name, *wrong))
    if coherence.custom != "off":
        found += [finding for own in coherence.checks if (finding := _run_own(own, view)) is not None]
    return found


def _run_own(check: Callable[[Any], Any], view: View) -> Finding | None:
    """Run a check of the application. One that raises is logged and finds nothing: a check must not end a run."""
    name = check_name(check)
    try:
        found = check(view)
    except Exception:  # noqa: BLE001 - it may raise anything
        logger.exception("coherence check {!r} failed", name)
        return None
    if found is None or isinstance(found, Finding):
        return None if found is None else found._replace(check=name)
    return Finding(name, str(found), str(found))

"""The six coherence checks: pure functions of a `View` of an agent."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from ...journal import Event
from ...journal.agent_events import ToolCalled
from .settings import Coherence

__all__ = [
    "CHECKS",
    "Call",
    "Finding",
    "RecentCalls",
    "View",
    "check_context",
    "check_goal",
    "check_plan",
    "check_progress",
    "check_repetition",
    "check_waiting",
    "run_checks",
]

_SHOWN: Final = 120
"""Characters of a call's arguments that are kept."""


class Call(NamedTuple):
    """A tool call. `arguments` is canonical JSON; if it is cut, `digest` is the hash of all of it."""

    tool: str
    arguments: str
    digest: str = ""

    @classmethod
    def of(cls, tool: str, arguments: Mapping[str, Any]) -> Call:
        """Return a call of bounded size, equal for arguments in another order."""
        data = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
        text = data.decode()
        if len(text) <= _SHOWN:
            return cls(tool, text)
        return cls(tool, f"{text[:_SHOWN]}...", hashlib.blake2b(data, digest_size=12).hexdigest())


@dataclass(frozen=True, slots=True)
class View:
    """An agent at one moment.

    Attributes:
        state: the reduction of its event log, as JSON.
        goal: the goal that was enqueued.
        calls: recent tool calls, the latest last.
        idle: seconds since the last progress.
        tokens: tokens of its messages.
        ignored: steps done while the awaited message was in the inbox.
    """

    state: Mapping[str, Any]
    goal: str
    calls: Sequence[Call] = ()
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
    calls = view.calls[-coherence.window :]
    if not calls:
        return None
    call, times = Counter(calls).most_common(1)[0]
    if times < coherence.repeats:
        return None
    text = f"{call.tool}({call.arguments})"
    return f"{text} was called {times} times in the last {len(calls)} calls", f"{text} {call.digest}".rstrip()


class Finding(NamedTuple):
    """A finding of a check. `detail` is for people, `about` identifies the finding for as long as it holds."""

    check: str
    detail: str
    about: str = ""


CHECKS: Final[dict[str, Callable[[View, Coherence], tuple[str, str] | None]]] = {
    "goal": check_goal,
    "plan": check_plan,
    "progress": check_progress,
    "repetition": check_repetition,
    "context": check_context,
    "waiting": check_waiting,
}
"""The checks by name. A check returns `detail` and `about` of its finding, or None."""


def run_checks(view: View, coherence: Coherence) -> list[Finding]:
    """Return the findings of all checks that are not off."""
    found = []
    for name, check in CHECKS.items():
        if coherence.policy(name) != "off" and (wrong := check(view, coherence)) is not None:
            found.append(Finding(name, *wrong))
    return found


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
    """The last tool calls, and the time of the last progress."""

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        """window: number of the latest calls that are kept."""
        self._clock = clock
        self.calls: deque[Call] = deque(maxlen=window)
        self.progressed = clock()

    @property
    def idle(self) -> float:
        """Return the seconds since the last progress."""
        return self._clock() - self.progressed

    def record(self, event: Event, *, from_earlier_run: bool = False) -> None:
        """Record an event. One of an earlier run does not count as progress: its time is not on this clock."""
        progress = event.type in _PROGRESS
        if isinstance(event, ToolCalled):
            call = Call.of(event.tool, event.arguments)
            progress = call not in self.calls
            self.calls.append(call)
        if progress and not from_earlier_run:
            self.progressed = self._clock()

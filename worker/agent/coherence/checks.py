"""The checks, by name. Each is a function from what there is to what is wrong with it, if anything.

Whether the agent still works for what it was asked for.

Whether the plan and the results fit each other.

Whether anything gets done: within its time, within its context, and with the messages that have come.

Whether the agent does the same thing again and again.

What the checks look at.

What an agent did lately, as its events tell.
"""

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
    """A call of a tool. arguments: canonical JSON, or its beginning. digest: of all of it, where that is not all."""

    tool: str
    arguments: str
    digest: str = ""

    @classmethod
    def of(cls, tool: str, arguments: Mapping[str, Any]) -> Call:
        """The call: the same for arguments in another order, and small, however large they are."""
        data = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
        text = data.decode()
        if len(text) <= _SHOWN:
            return cls(tool, text)
        return cls(tool, f"{text[:_SHOWN]}...", hashlib.blake2b(data, digest_size=12).hexdigest())


@dataclass(frozen=True, slots=True)
class View:
    """An agent, at one moment. state: the reduction of its log, as JSON. goal: that of the envelope.

    calls: the last ones, the latest last. idle: seconds since anything got done. tokens: of its messages. ignored:
    steps that were done while it waited for a message, and one was there.
    """

    state: Mapping[str, Any]
    goal: str
    calls: Sequence[Call] = ()
    idle: float = 0.0
    tokens: int = 0
    ignored: int = 0


_SHOWN_GOAL = 80


def check_goal(view: View, coherence: Coherence) -> tuple[str, str] | None:
    held = view.state.get("goal", "")
    if held == view.goal:
        return None
    return f"its goal is {_short(held)}, and {_short(view.goal)} was enqueued", str(held)


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_GOAL else f"{shown[:_SHOWN_GOAL]}..."


def check_plan(view: View, coherence: Coherence) -> tuple[str, str] | None:
    wrong = list(_wrong(view.state))
    return ("; ".join(wrong), "; ".join(wrong)) if wrong else None


def _wrong(state: Mapping[str, Any]) -> Iterator[str]:
    plan, results, current = state.get("plan", ()), state.get("results", {}), state.get("current")
    status = {step["key"]: step["status"] for step in plan}
    for key, times in Counter(step["key"] for step in plan).items():
        if times > 1:
            yield f"{times} steps of the plan are called {key!r}"
    if missing := [key for key, one in status.items() if one == "done" and key not in results]:
        yield f"done without a result: {_listed(missing)}"
    if unknown := [key for key in results if key not in status]:
        yield f"a result of no step of the plan: {_listed(unknown)}"
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
    return f"nothing got done{where} for more than {coherence.stuck_minutes:g} minutes", ""


def check_context(view: View, coherence: Coherence) -> tuple[str, str] | None:
    if view.tokens <= coherence.context_tokens:
        return None
    return f"its messages have {view.tokens:,} tokens, and {coherence.context_tokens:,} is its budget", ""


def check_waiting(view: View, coherence: Coherence) -> tuple[str, str] | None:
    awaited = view.state.get("waiting_for")
    if not awaited or not view.ignored:
        return None
    whom = f" from {awaited['on']!r}" if awaited.get("on") else ""
    what = awaited.get("what") or "something"
    steps = f"{view.ignored} step{'s' if view.ignored > 1 else ''}"
    return f"it waits for {what}{whom} while a message is in its inbox, unread for {steps}", ""


def check_repetition(view: View, coherence: Coherence) -> tuple[str, str] | None:
    calls = view.calls[-coherence.window :]
    if not calls:
        return None
    call, times = Counter(calls).most_common(1)[0]
    if times < coherence.repeats:
        return None
    told = f"{call.tool}({call.arguments})"
    return f"{told} was called {times} times among the last {len(calls)} calls", f"{told} {call.digest}".rstrip()


class Finding(NamedTuple):
    """What a check found. detail: for a person. about: what stays the same while the same thing is wrong."""

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
"""A check gives what is wrong, and what tells that apart from anything else that it may find."""


def run_checks(view: View, coherence: Coherence) -> list[Finding]:
    """What is wrong, by all checks that are not off."""
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
"""Events that tell of something done. Talking is none, nor is a tool that is called as it was before."""


class RecentCalls:
    """The last calls of tools, and when anything got done."""

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        """window: calls that are kept."""
        self._clock = clock
        self.calls: deque[Call] = deque(maxlen=window)
        self.progressed = clock()

    @property
    def idle(self) -> float:
        """Seconds since anything got done."""
        return self._clock() - self.progressed

    def hear(self, event: Event, *, former: bool = False) -> None:
        """former: it happened in a former run, at a time that this clock does not know."""
        done = event.type in _PROGRESS
        if isinstance(event, ToolCalled):
            call = Call.of(event.tool, event.arguments)
            done = call not in self.calls
            self.calls.append(call)
        if done and not former:
            self.progressed = self._clock()

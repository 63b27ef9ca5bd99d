"""The coherence checks: pure functions of a `View` of an agent or a function."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from ....queues.runtime import RUNTIME
from ...durable.journal.event import Event
from ...durable.journal.run_events import ToolCalled
from ...log import logger
from ..journal.agent_events import MessageAdded
from .findings import Coherence, Finding, check_name

_SHOWN: Final = 120
"""Characters of a call's arguments that are kept."""

_SPACE: Final = re.compile(r"\s+")


class RecentCall(NamedTuple):
    """A tool call, or a sentence, which has no tool.

    Attributes:
        arguments: Canonical JSON of the arguments, or the sentence; the beginning of a long one.
        digest: Hash of the whole arguments or sentence.
    """

    tool: str
    arguments: str
    digest: str = ""

    @classmethod
    def of(cls, tool: str, arguments: Mapping[str, Any]) -> RecentCall:
        """Return a call of bounded size, equal for arguments in another order."""
        data = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
        return cls(tool, _shown(data.decode()), _digest(data))

    @classmethod
    def said(cls, sentence: str) -> RecentCall:
        """Return a sentence of bounded size."""
        return cls("", _shown(_SPACE.sub(" ", sentence).strip()), _digest(sentence.encode()))

    @property
    def identity(self) -> str:
        """Text by which equal calls are found."""
        return f"{self.tool} {self.digest or self.arguments}"

    def __str__(self) -> str:
        return f"{self.tool}({self.arguments})" if self.tool else repr(self.arguments)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


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
        self.calls: deque[RecentCall] = deque(maxlen=window)
        self.sentences: deque[RecentCall] = deque(maxlen=window)
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
            call = RecentCall.of(event.tool, event.arguments)
            progress = all(call.identity != one.identity for one in self.calls)
            self.calls.append(call)
        elif isinstance(event, MessageAdded) and event.message.role == "assistant" and event.message.content:
            self.sentences.append(RecentCall.said(event.message.content))
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
    """

    state: Mapping[str, Any]
    goal: str
    calls: Sequence[RecentCall] = ()
    sentences: Sequence[RecentCall] = ()
    events: Sequence[Event] = ()
    prompt: Any = None
    verdict: str = ""
    idle: float = 0.0


def check_progress(view: View, coherence: Coherence) -> tuple[str, str] | None:
    if view.idle <= coherence.stuck_minutes * 60:
        return None
    where = f" in step {view.state['current']!r}" if view.state.get("current") else ""
    return f"no progress{where} for more than {coherence.stuck_minutes:g} minutes", ""


def check_repetition(view: View, coherence: Coherence) -> tuple[str, str] | None:
    for items, verb, kind in ((view.calls, "called", "calls"), (view.sentences, "said", "messages")):
        latest = items[-coherence.window :]
        for identity, times in Counter(call.identity for call in latest).most_common(1):
            if times >= coherence.repeats:
                call = next(call for call in latest if call.identity == identity)
                return f"{call} was {verb} {times} times in the last {len(latest)} {kind}", identity
    return None


def check_verdict(view: View, coherence: Coherence) -> tuple[str, str] | None:
    return (view.verdict, view.verdict) if view.verdict else None


CHECKS: Final[dict[str, Callable[[View, Coherence], tuple[str, str] | None]]] = {
    "progress": check_progress,
    "repetition": check_repetition,
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

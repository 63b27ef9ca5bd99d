"""Recent tool calls, sentences and events of a run, and the time of its last progress."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ....queues.runtime import RUNTIME
from ...journal.agent_events import MessageAdded, ToolCalled
from ...journal.event import Event

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

LONGEST_LOOP: Final = 5
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
    for length in range(2, LONGEST_LOOP + 1):
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

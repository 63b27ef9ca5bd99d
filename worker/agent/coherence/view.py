"""What the checks look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Call", "View"]


class Call(NamedTuple):
    """A call of a tool. arguments: canonical JSON."""

    tool: str
    arguments: str


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

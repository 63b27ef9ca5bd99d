"""What the checks look at."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

__all__ = ["Call", "View"]

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

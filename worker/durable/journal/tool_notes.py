"""Calls as a handoff shows them: the task's own call, the tool calls in flight, and the counts of tool calls.

A tool call leaves a note in the checkpoint before it starts: an intent (`i:` field) with the name of the tool. So does
any other step, without that name, once it has been running for a second. Unlike the intent of a risky step a note puts
nothing in doubt; it is for readers. The record of the call deletes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from ....queues.wording import shortened

TOOLS: Final = "#tools"
"""Checkpoint key of the account of tool calls: a large checkpoint is not searched for notes."""

MAX_OPEN: Final = 32
"""Latest calls that are known to have started; of further ones, the notes in a large checkpoint are not found."""

_MAX_VALUE_LENGTH: Final = 80
_MAX_LENGTH: Final = 300
"""Characters of an argument, and of a call, that are shown."""


def call_text(name: str, arguments: Mapping[str, Any] | bytes) -> str:
    """Return a call as one short line: `fetch(url="https://...", page=2)`. arguments: by name, or as JSON."""
    if isinstance(arguments, bytes):
        try:
            found = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            return name
        arguments = found
    return f"{name}({shortened(', '.join(f'{key}={_short(value)}' for key, value in arguments.items()), _MAX_LENGTH)})"


def _short(value: Any) -> str:
    if isinstance(value, str):
        value = shortened(value, _MAX_VALUE_LENGTH)
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # numbers that JSON does not have
        text = repr(value)
    return shortened(text, 2 * _MAX_VALUE_LENGTH)


def encode_note(digest: str, tool: str, call: str) -> bytes:
    """Return the stored form of a note. digest: hash of the arguments, as in an intent. tool: empty without one."""
    return orjson.dumps({"h": digest, "a": call, "t": tool})


def is_note(intent: bytes) -> bool:
    """Return whether an intent is the note of a call in flight, which leaves no doubt."""
    return noted_call(intent) is not None


def noted_call(intent: bytes) -> str | None:
    """Return the call in a note, None for the intent of a risky step, also for one that cannot be read."""
    try:
        found = orjson.loads(intent)
    except orjson.JSONDecodeError:
        return None
    return str(found.get("a") or found["t"]) if isinstance(found, dict) and "t" in found else None


class ToolCalls(NamedTuple):
    """Stored account of calls: the number of tool calls by tool, and the steps of the latest calls that started."""

    counts: dict[str, int]
    open: list[str]

    def with_open(self, key: str) -> ToolCalls:
        """Return the account with a call in flight."""
        return self._replace(open=[*(known for known in self.open if known != key), key][-MAX_OPEN:])

    def without_open(self, key: str) -> ToolCalls:
        """Return the account with a call that is not in flight any more."""
        return self._replace(open=[known for known in self.open if known != key])

    @classmethod
    def decode(cls, data: bytes | None) -> ToolCalls:
        """Read what `encode` returned; nothing if it cannot be read."""
        try:
            found = orjson.loads(data) if data else {}
            counts = {str(name): int(count) for name, count in found["calls"].items()} if found else {}
            return cls(counts, [str(key) for key in found["open"]] if found else [])
        except (LookupError, TypeError, ValueError, AttributeError):
            return cls({}, [])

    def encode(self) -> bytes:
        return orjson.dumps({"calls": self.counts, "open": self.open})


def tool_counts(data: bytes | None) -> dict[str, int]:
    """Return the stored number of calls by tool."""
    return ToolCalls.decode(data).counts


def open_calls(data: bytes | None) -> list[str]:
    """Return the steps of stored calls that may be in flight: those of them that are have a note."""
    return ToolCalls.decode(data).open

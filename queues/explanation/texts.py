"""Durations, times and counts in sentences."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_MAX_LENGTH: Final = 200
"""Characters of an error or a reason."""


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_LENGTH else f"{line[: _MAX_LENGTH - 3]}..."


def times(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def span(milliseconds: int) -> str:
    """Return a duration in the largest unit of which it has at least two."""
    seconds = max(0, milliseconds) / 1000
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"


def clock(at: int | None, now: int) -> str:
    """Return a time of day in the local time zone, with the date unless it is today."""
    if at is None:
        return "an unknown time"
    local, today = (datetime.fromtimestamp(one / 1000, UTC).astimezone() for one in (at, now))
    return local.strftime("%H:%M" if local.date() == today.date() else "%Y-%m-%d %H:%M")


def since_text(at: int | None, now: int) -> str:
    return "" if at is None else f" since {clock(at, now)} ({span(now - at)})"


def ago_text(at: int | None, now: int) -> str:
    return "at an unknown time" if at is None else f"{span(now - at)} ago"


def in_text(at: int | None, now: int) -> str:
    return "at an unknown time" if at is None else f"in {span(at - now)}"


def at_text(at: int | None, now: int) -> str:
    return "at an unknown time" if at is None else f"at {clock(at, now)} (in {span(at - now)})"

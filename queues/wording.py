"""Wording: times, durations, counts and lists as texts show them to people, models and programs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

_LATEST: Final = 253_402_300_799_000
"""Milliseconds since the epoch of the last second that a datetime can hold."""

_MAX_LENGTH: Final = 200
"""Characters of an error or a reason."""

_UNITS: Final = (("days", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def shown_time(at: float) -> str:
    """Return a time in milliseconds since the epoch as texts show it to people and models, in UTC."""
    return f"{_datetime(at):%Y-%m-%d %H:%M:%S} UTC"


def iso_time(at: int | None) -> str | None:
    """Return a time in milliseconds since the epoch as ISO 8601 in UTC, for programs."""
    return None if at is None else _datetime(at).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _datetime(at: float) -> datetime:
    """Return a time in milliseconds since the epoch; the nearest that a datetime can hold."""
    return datetime.fromtimestamp(min(max(at, 0), _LATEST) / 1000, UTC)


def clock(at: int | None, now: int) -> str:
    """Return a time of day in the local time zone, with the date unless it is today."""
    if at is None:
        return "an unknown time"
    local, today = _datetime(at).astimezone(), _datetime(now).astimezone()
    return local.strftime("%H:%M" if local.date() == today.date() else "%Y-%m-%d %H:%M")


def since_text(at: int | None, now: int) -> str:
    return "" if at is None else f" since {clock(at, now)} ({span(now - at)})"


def ago_text(at: int | None, now: int) -> str:
    return "at an unknown time" if at is None else f"{span(now - at)} ago"


def in_text(at: int | None, now: int) -> str:
    return "at an unknown time" if at is None else f"in {span(at - now)}"


def at_text(at: int | None, now: int) -> str:
    return "at an unknown time" if at is None else f"at {clock(at, now)} (in {span(at - now)})"


def span(milliseconds: int) -> str:
    """Return a duration in the largest unit of which it has at least two, for sentences."""
    return duration(milliseconds / 1000, whole=True) if milliseconds >= 1000 else "less than 1 s"


def duration(seconds: float, *, whole: bool = False) -> str:
    """Return a duration with at least two digits in the largest unit of which it has one, or in milliseconds.

    Args:
        whole: Return a whole number of the largest unit of which it has at least two, and of seconds at least.
    """
    least = 2 if whole else 1
    unit, size = next((found for found in _UNITS if seconds >= least * found[1]), _UNITS[-1])
    if whole:
        return f"{max(0.0, seconds) / size:.0f} {unit}"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"


_WAITED_FOR: Final = {
    "children": "its children",
    "result": "the result of another task",
    "time": "its time",
}


def waited_for(what: str) -> str:
    """Return what a parked task waits for as a phrase: "a message or its time" for `message or time`."""
    if what.startswith(("limit ", "budget ")):
        return what
    things = what.split(" or ")
    return " or ".join(_WAITED_FOR.get(thing, f"{'an' if thing[:1] in 'aeiou' else 'a'} {thing}") for thing in things)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun. plural: that of the noun, by default with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def listed(texts: Iterable[str], limit: int, separator: str = ", ", *, total: int = 0) -> str:
    """Return texts as a list of at most `limit`, and the number of the others. total: if `texts` are not all."""
    found = list(texts)
    left = max(total, len(found)) - limit
    more = f" and {left:,} more" if left > 0 else ""
    return separator.join(found[:limit]) + more


def short(text: str, limit: int = _MAX_LENGTH) -> str:
    """Return a text on one line, cut to a length."""
    return shortened(" ".join(text.split()), limit)


def shortened(text: str, limit: int) -> str:
    """Return a text that is cut to a length, and then ends with three dots."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

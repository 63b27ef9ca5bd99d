"""Durations and points in time as callers give them: seconds, a timedelta, a text, or a datetime."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from .runtime import RUNTIME

Duration = float | timedelta
"""A duration: seconds or a timedelta."""

Moment = Duration | datetime
"""A point in time: a duration from now, or a datetime with a time zone."""

_LEAST: Final = 0.001
"""Seconds until a datetime that has passed: it stays a wait, and ends at once."""


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_NUMBER: Final = r"(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
_PART: Final = re.compile(rf"({_NUMBER})\s{{0,9}}(ms|min|s|m|h|d|w)\s{{0,9}}", re.ASCII)
_DURATION: Final = re.compile(rf"{_NUMBER}|(?:{_NUMBER}\s{{0,9}}(?:ms|min|s|m|h|d|w)\s{{0,9}}){{1,9}}", re.ASCII)


def parse_duration(text: str | float, *, positive: bool = False) -> float:
    """Return the seconds of 90, 90s, 15m, 30min, 1h30m, 7d or 2w. Raises `ValueError`. positive: refuse 0."""
    given = str(text).strip()
    seconds = math.nan
    if _DURATION.fullmatch(given):
        parts = _PART.findall(given)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(given)
    if not seconds < math.inf or (positive and not seconds):
        range_text = "greater than 0" if positive else "0 or more"
        raise ValueError(f"must be a number of seconds, {range_text}; got {text!r}; with a unit: 90s, 15m, 1h30m, 7d")
    return seconds


_SUCH_AS: Final = "such as 90s, 15m, 1h30m or 7d"


@dataclass(frozen=True, slots=True)
class FutureTime:
    """A point in time that an operator plans: `ahead` seconds from now, or a time in milliseconds since the epoch."""

    ahead: float = 0.0
    ms: int | None = None

    @classmethod
    def parse(cls, text: str | float, *, zoned: bool = False) -> FutureTime:
        """Parse a duration from now, or an ISO date or time; see `PointInTime.parse`."""
        with suppress(ValueError):
            return cls(parse_duration(text))
        return cls(ms=parse_iso_time(str(text), zoned=zoned, expected=f"a time from now, {_SUCH_AS}"))

    def from_now(self, now_ms: int) -> float:
        """Return the seconds from a time in milliseconds; 0 for a time that has passed."""
        return self.ahead if self.ms is None else max(0.0, (self.ms - now_ms) / 1000)


def parse_iso_time(text: str, *, zoned: bool = False, expected: str = "") -> int:
    """Parse an ISO date or time into milliseconds since the epoch; it is local time if it has no offset.

    Args:
        zoned: Refuse a time without an offset.
        expected: Another form that the caller accepts, for the error.

    Raises:
        ValueError: The text has another form.
    """
    with suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(text.strip())
        if not zoned or found.utcoffset() is not None:
            return round(found.timestamp() * 1000)
    kind = "an ISO time with a time zone" if zoned else "an ISO time"
    example = f"{kind} such as 2026-11-22T18:00{'Z' if zoned else ''}"
    raise ValueError(f"must be {f'{expected}, or ' if expected else ''}{example}; got {text!r}")


@dataclass(frozen=True, slots=True)
class PointInTime:
    """A point in time that an operator names: `ago` seconds before now, or a time in milliseconds since the epoch."""

    ago: float | None = None
    ms: int = 0

    @classmethod
    def parse(cls, text: str, *, zoned: bool = False) -> PointInTime:
        """Parse a duration before now, such as 2h, or an ISO date or time, which is local time if it has no offset.

        Args:
            zoned: Refuse a time without an offset.

        Raises:
            ValueError: It is neither.
        """
        with suppress(ValueError):
            return cls(ago=parse_duration(text))
        return cls(ms=parse_iso_time(text, zoned=zoned, expected=f"a time before now, {_SUCH_AS}"))

    def at(self, now_ms: int) -> int:
        """Return the time in milliseconds."""
        return self.ms if self.ago is None else now_ms - round(self.ago * 1000)


def to_seconds(duration: Duration, what: str = "a duration") -> float:
    """Return a duration in seconds. Raises `TypeError` for anything that is not one. what: its name, for the error."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    given: object = duration
    if not isinstance(given, (int, float)):
        raise TypeError(f"{what} must be seconds or a timedelta, got {given!r}")
    return _number(duration, what)


def seconds_until(moment: Moment, what: str = "a time") -> float:
    """Return the seconds until a point in time, by the clock of this host.

    Raises `TypeError` for anything that is not one, `ValueError` if a datetime has no time zone. what: its name, for
    these errors.
    """
    if isinstance(moment, timedelta):
        return moment.total_seconds()
    given: object = moment
    if isinstance(given, (int, float)):
        return _number(given, what)
    if not isinstance(given, datetime):
        raise TypeError(f"{what} must be seconds, a timedelta or a datetime, got {given!r}")
    if given.utcoffset() is None:
        raise ValueError(f"{what} must have a time zone, got {given}: use datetime.now(UTC)")
    return max(_LEAST, (given - datetime.fromtimestamp(RUNTIME.wall_clock(), UTC)).total_seconds())


def _number(seconds: float, what: str) -> float:
    """Return the seconds. Raises `ValueError` for NaN, which no comparison refuses."""
    if math.isnan(seconds):
        raise ValueError(f"{what} must be a number of seconds, got {seconds}")
    return seconds

"""When a schedule fires: `Cron` and `Every`, and their planned times.

A planned time is in milliseconds of the Unix epoch, on a whole second. It follows from the definition alone, so that
all workers find the same ones. The clock of Redis decides when one has come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import pairwise
from typing import Any, Final, Literal, Protocol, get_args
from zoneinfo import ZoneInfo

from ..durations import Duration, to_seconds
from ..envelope import check_own_id
from ..errors import ConfigurationError
from ..keys import check_name
from ..runtime import RUNTIME

Missed = Literal["skip", "once", "all"]
"""Handling of planned times that no worker fired: no task, one task for the last of them, or one for each."""

MISSED_AFTER: Final = 60.0
"""Seconds after which a planned time that was not fired counts as missed."""

MAX_MISSED: Final = 100
"""Largest number of planned times that are fired at once; of more, the last ones."""

_MAX_EVERY: Final = 366 * 86_400
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))

_AMBIGUOUS: Final = timedelta(hours=3)
"""Longer than the hours that a clock repeats at a change."""

_YEAR_MS: Final = 366 * 86_400_000
_FIRST_SPAN_MS: Final = 120_000

_LAST_MS: Final = 253_370_000_000_000
"""The end of the year 9998: no planned time is later."""


def check_schedule_name(name: object) -> str:
    """Return a name that is valid for a schedule. Raises `ValueError`."""
    known = check_name("schedule", name)
    check_own_id(task_id_of(known, 0))
    return known


def task_id_of(name: str, planned: int) -> str:
    """Return the id of the task of a planned time: the name of its schedule, and the time in UTC."""
    return f"{name}-{datetime.fromtimestamp(planned / 1000, UTC):%Y%m%dT%H%M%SZ}"


class When(Protocol):
    """Protocol of what has planned times."""

    def times(self, after: int) -> Iterator[int]:
        """Yield the planned times after a time, in order."""
        ...

    def form(self) -> dict[str, Any]:
        """Return the definition as JSON data."""
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Every:
    """An interval: `Every(300)` or `Every(timedelta(hours=6))`, in whole seconds.

    Planned times are multiples of the interval since 1970-01-01 00:00 UTC, so that they are the same after each start:
    `Every(3600)` fires at each full hour.

    Raises:
        ValueError, TypeError: the interval is not a whole number of seconds from 1 to 366 days.
    """

    interval: Duration

    def __post_init__(self) -> None:
        if isinstance(self.interval, bool):
            raise TypeError(f"interval of Every must be seconds or a timedelta, got {self.interval!r}")
        seconds = to_seconds(self.interval, "interval of Every")
        if not (1 <= seconds <= _MAX_EVERY and seconds == int(seconds)):
            raise ValueError(
                f"interval of Every must be a whole number of seconds from 1 to {_MAX_EVERY:,}, got {seconds:g}"
            )
        object.__setattr__(self, "interval", int(seconds))

    @property
    def seconds(self) -> int:
        """Length of the interval in seconds."""
        return int(to_seconds(self.interval))

    def times(self, after: int) -> Iterator[int]:
        """Yield the planned times after a time, in order."""
        step = self.seconds * 1000
        planned = (after // step + 1) * step
        while planned < _LAST_MS:
            yield planned
            planned += step

    def form(self) -> dict[str, Any]:
        """Return the definition as JSON data."""
        return {"every": self.seconds}

    def __str__(self) -> str:
        unit, size = next((name, size) for name, size in _UNITS if self.seconds % size == 0)
        return f"every {self.seconds // size} {unit}"


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone: `Cron("0 2 * * *", tz="Europe/Berlin")`.

    Five fields are minute, hour, day of the month, month and day of the week, as in Debian's cron; `L`, `LW` and `#`
    name last days and numbered weekdays. Six fields begin with the second. At a change to daylight saving, a time that
    the clock leaves out fires right after the change, and one that the clock repeats fires once. With
    a star at the start of the field of minutes or of hours, the expression follows the clock as it runs: `0 * * * *`
    fires each hour, also in the repeated one.

    Args:
        tz: a time zone of the IANA database.

    Raises:
        ValueError: the expression or the zone is wrong, or the expression never fires, such as on 31 February.
        ConfigurationError: the package `cronsim` is missing, which the extra `cron` installs.
    """

    expression: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        given: object = self.expression
        if not isinstance(given, str):
            raise TypeError(f"a cron expression must be a text, got {given!r}")
        object.__setattr__(self, "expression", " ".join(given.split()))
        _zone(self.tz)
        if next(self.times(round(RUNTIME.wall_clock() * 1000)), None) is None:
            raise ValueError(f"a cron expression must fire at some time, got {self.expression!r}, which never does")

    def times(self, after: int) -> Iterator[int]:
        """Yield the planned times after a time, in order."""
        start, last = datetime.fromtimestamp(after // 1000, UTC), after
        for found in self._iterate(start):
            planned = round(found.timestamp() * 1000)
            if planned > last:
                last = planned
                yield planned

    def _iterate(self, start: datetime) -> Iterator[datetime]:
        """Yield the planned times from about a start on."""
        try:
            library = import_module("cronsim")
        except ImportError:
            raise ConfigurationError(
                "could not read a cron expression: the package cronsim is missing; install it with "
                "pip install 'perdure[cron]'"
            ) from None
        zone, fields = _zone(self.tz), self.expression.split()
        try:
            local = start.astimezone(zone)
            if any(field.startswith("*") for field in fields[-5:-3]):
                yield from (found.astimezone(UTC) for found in library.CronSim(self.expression, local))
                return
            # the library moves times of a day at a change of the clock for five fields only, and a start in an hour
            # that the clock repeats is ambiguous for it
            seconds = sorted(library.CronSim(self.expression, local).seconds)
            for minute in library.CronSim(" ".join(fields[-5:]), (start - _AMBIGUOUS).astimezone(zone)):
                yield from (minute.astimezone(UTC) + timedelta(seconds=second) for second in seconds)
        except library.CronSimError as error:
            if len(fields) in (5, 6) and _reads(library, [*fields[:-2], "*", fields[-1]]):
                return  # no month of the field has such a day
            problem = str(error).lower().removeprefix("bad ")
            raise ValueError(
                f"a cron expression must have five fields, or six with seconds, got {self.expression!r}: {problem}"
            ) from None
        except OverflowError:
            return  # the end of the calendar

    def form(self) -> dict[str, Any]:
        """Return the definition as JSON data."""
        return {"cron": self.expression, "tz": self.tz}

    def __str__(self) -> str:
        return f"{self.expression} {self.tz}"


def _reads(library: Any, fields: list[str]) -> bool:
    try:
        library.CronSim(" ".join(fields), datetime.fromtimestamp(0, UTC))
    except library.CronSimError:
        return False
    return True


def _zone(name: object) -> ZoneInfo:
    try:
        return ZoneInfo(name)  # type: ignore[arg-type]
    except (OSError, LookupError, ValueError, TypeError, AttributeError):
        raise ValueError(
            f"tz must be a time zone of the IANA database, such as 'Europe/Berlin', got {name!r}"
        ) from None


def check_when(when: object) -> Cron | Every:
    """Return what has planned times. Raises `TypeError` for anything else."""
    if not isinstance(when, (Cron, Every)):
        raise TypeError(f"a schedule must be a Cron or an Every, such as Cron('0 2 * * *'), got {when!r}")
    return when


def read_when(form: Mapping[str, Any]) -> Cron | Every:
    """Return a stored definition. Raises `ValueError`, `TypeError`, `LookupError`, `ConfigurationError`."""
    return Every(form["every"]) if "every" in form else Cron(form["cron"], form["tz"])


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of a schedule besides its planned times. jitter: largest delay of a firing, in seconds."""

    missed: Missed = "once"
    jitter: float = 0.0

    @classmethod
    def of(cls, when: Cron | Every, missed: object, jitter: object) -> Rules:
        """Return checked rules. Raises `ValueError`, `TypeError`."""
        if missed not in get_args(Missed):
            raise ValueError(f"missed must be one of {', '.join(get_args(Missed))}, got {missed!r}")
        if isinstance(jitter, bool):
            raise TypeError(f"jitter must be seconds or a timedelta, got {jitter!r}")
        seconds = to_seconds(jitter, "jitter")  # type: ignore[arg-type]
        if seconds:
            shortest = _shortest(when)
            if not 0 < seconds < shortest:
                raise ValueError(
                    f"jitter must be less than the {shortest:g} seconds between two planned times, got {seconds:g}"
                )
        return cls(missed, seconds)  # type: ignore[arg-type]

    def delay(self, name: str, planned: int) -> int:
        """Return the milliseconds by which a planned time is fired later; the same in all workers."""
        if not self.jitter:
            return 0
        digest = hashlib.blake2b(f"{name} {planned}".encode(), digest_size=8).digest()
        return int(int.from_bytes(digest) / 2**64 * self.jitter * 1000)


def _shortest(when: Cron | Every) -> float:
    """Return the seconds between two of the next planned times that are closest."""
    times = [planned for planned, _ in zip(when.times(round(RUNTIME.wall_clock() * 1000)), range(100), strict=False)]
    return min((later - earlier for earlier, later in pairwise(times)), default=_YEAR_MS) / 1000


def last_times(when: When, after: int, until: int, most: int) -> list[int]:
    """Return the last planned times after a time and until another one, at most so many, in order.

    The work is bounded however many there are: the search begins near the end, and goes back in growing spans.
    """
    span = _FIRST_SPAN_MS
    while True:
        start = max(after, until - span)
        found: list[int] = []
        for planned in when.times(start):
            if planned > until:
                break
            found.append(planned)
        if start == after or len(found) >= most:
            return found[-most:] if most else []
        span *= 8


@dataclass(frozen=True, slots=True)
class FiringPlan:
    """The planned times to be fired now. next: the one after these, None for none. dropped: some are left out."""

    fire: list[int]
    last: int
    next: int | None
    look: int | None
    dropped: bool = False


def make_plan(name: str, when: When, rules: Rules, last: int, now: int) -> FiringPlan:
    """Return the planned times after the last one that are to be fired now, and when to look again.

    Args:
        last: The last planned time that was fired or left out.
        now: The time of Redis.
    """
    due = last_times(when, last, now, MAX_MISSED + 1)
    while due and due[-1] + rules.delay(name, due[-1]) > now:
        due.pop()
    dropped = len(due) > MAX_MISSED
    fire = due[-MAX_MISSED:]
    seen = due[-1] if due else last
    if due and now - due[0] - rules.delay(name, due[0]) >= MISSED_AFTER * 1000 and rules.missed != "all":
        dropped = len(due) > 1
        fire = due[-1:]
        if rules.missed == "skip" and now - fire[0] - rules.delay(name, fire[0]) >= MISSED_AFTER * 1000:
            fire, dropped = [], True
    following = next(when.times(seen), None)
    look = None if following is None else following + rules.delay(name, following)
    return FiringPlan(fire, seen, following, look, dropped)

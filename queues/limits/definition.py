"""Definitions of limits: how many tasks run at once, how often they start, what they cost, and when they stop.

A limit belongs to the namespace: apps that define one of the same name share it. Workers publish the definition, and
scripts read it there, with what operators have set in its place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar, get_args

from ..argument_keys import By, KeyProblem, check_by, returned_values
from ..defaults import MAX_SECONDS
from ..durations import Duration, to_seconds
from ..envelope import MAX_COST, MAX_LIMITS, NO_KEY
from ..errors import InvalidLimitUse
from ..keys import check_name

T = TypeVar("T")

Over = Literal["wait", "drop", "replace"]
"""Handling of a task that would have to wait: it waits, is cancelled, or cancels the others that wait for the key."""

MAX_COUNT: Final = 1_000_000
"""Largest number of tokens of a limit, and of calls that a breaker counts."""

MAX_RATE: Final = 1_000_000
"""Largest rate per second: scripts count in parts of a microsecond."""

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_RATE: Final = re.compile(r"([0-9][0-9_]*)/([smhd])")


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate: so many in so many seconds, continuously (the generic cell rate algorithm, GCRA).

    Args:
        count: starts, or units of cost, in `per` seconds.
        per: seconds or a timedelta.
        burst: largest number at once, after a time without any. Default: `count`.

    Raises:
        ValueError, TypeError: an argument is not one of these.
    """

    count: int
    per: Duration = 60.0
    burst: int | None = None

    def __post_init__(self) -> None:
        _check_whole("count of a Rate", self.count, MAX_COST)
        seconds = _seconds("per of a Rate", self.per)
        if self.burst is not None:
            _check_whole("burst of a Rate", self.burst, MAX_COST)
        if self.count > seconds * MAX_RATE:
            raise ValueError(f"a rate must be at most {MAX_RATE:,} per second, got {self.count:,} in {seconds:g} s")
        object.__setattr__(self, "per", seconds)

    @property
    def interval_ms(self) -> float:
        """Milliseconds between two, at the rate."""
        return to_seconds(self.per) * 1000 / self.count

    @property
    def at_once(self) -> int:
        """The burst."""
        return self.count if self.burst is None else self.burst

    def __str__(self) -> str:
        per = to_seconds(self.per)
        unit = next((unit for unit, seconds in _UNITS.items() if seconds == per), f"{per:g} s")
        burst = "" if self.burst in (None, self.count) else f" (burst {self.burst:,})"
        return f"{self.count:,}/{unit}{burst}"


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker: a limit that lets no task start after too many errors, then one to see whether they are over.

    Args:
        errors: share of failed attempts, more than 0 and at most 1, from which on it opens.
        calls: attempts in the window before it may open.
        window: seconds or a timedelta.
        open: seconds or a timedelta for which no task starts. Then one does, the probe: its success closes the breaker,
            its error opens it again.

    Raises:
        ValueError, TypeError: an argument is not one of these.
    """

    errors: float = 0.5
    calls: int = 20
    window: Duration = 60.0
    open: Duration = 30.0

    def __post_init__(self) -> None:
        errors: object = self.errors
        if isinstance(errors, bool) or not isinstance(errors, (int, float)) or not 0 < errors <= 1:
            raise ValueError(f"errors of a Breaker must be a share, more than 0 and at most 1, got {errors!r}")
        _check_whole("calls of a Breaker", self.calls, MAX_COUNT)
        object.__setattr__(self, "window", _seconds("window of a Breaker", self.window))
        object.__setattr__(self, "open", _seconds("open of a Breaker", self.open))


class LimitOwner(Protocol):
    """Protocol of the app that a limit belongs to."""

    async def hold_limit(self, name: str, seconds: float) -> None:
        """Hold a limit, while the app is open."""
        ...

    def run_blocking(self, call: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
        """Run an asynchronous call from synchronous code. instead: what asynchronous code writes, for the error."""
        ...


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the namespace, from `app.limit(...)`.

    Args:
        name: of the limit; apps that use the same name share it.
        total: tasks that run at once, of all keys together.
        running: tasks that run at once of each key.
        by: names of the arguments that make the key, whose values are texts, numbers, true, false or null; or a
            function that gets all arguments by name, as JSON data, and returns such a value or a tuple of them.
        rate: starts of tasks of each key, such as `"500/m"` (units s, m, h, d), or a `Rate`.
        cost: units of cost of each key, likewise: what a task costs is reserved at its start.
        burst: of the rate, else of the cost, in place of its count.
        over: `wait`; or `drop`, which cancels a task that would have to wait; or `replace`, which cancels those that
            wait for the key when a new one comes.
        ordered: tasks of a key start in the order in which they were enqueued, and one that is parked or is retried
            keeps its place.
        while_parked: a parked task keeps its token.
        breaker: stops the starts after errors.

    Raises:
        ValueError, TypeError: an argument is not one of these.
    """

    name: str
    total: int | None = None
    running: int | None = None
    by: By = None
    rate: str | Rate | None = None
    cost: str | Rate | None = None
    burst: int | None = None
    over: Over = "wait"
    ordered: bool = False
    while_parked: bool = False
    breaker: Breaker | None = None
    owner: LimitOwner | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("the name of a limit", self.name)
        limit = f"limit {self.name!r}"
        object.__setattr__(self, "by", check_by(self.by, limit))
        for what in ("total", "running"):
            if getattr(self, what) is not None:
                _check_whole(f"{what} of {limit}", getattr(self, what), MAX_COUNT)
        if self.total is not None and self.running is not None:
            if self.by is None:
                raise ValueError(f"{limit}: total and running mean the same without by: give one of them")
            if self.running > self.total:
                raise ValueError(f"{limit}: running must be at most total, got running={self.running} of {self.total}")
        for what in ("rate", "cost"):
            object.__setattr__(self, what, _as_rate(f"{what} of {limit}", getattr(self, what)))
        self._set_burst(limit)
        if self.over not in get_args(Over):
            raise ValueError(f"over of {limit} must be 'wait', 'drop' or 'replace', got {self.over!r}")
        for what in ("ordered", "while_parked"):
            if not isinstance(getattr(self, what), bool):
                raise TypeError(f"{what} of {limit} must be True or False, got {getattr(self, what)!r}")
        if self.ordered and self.running is None and (self.by is not None or self.total is None):
            raise ValueError(f"{limit}: ordered must go with running, the number of tasks of a key that run at once")
        breaker: object = self.breaker
        if not (breaker is None or isinstance(breaker, Breaker)):
            raise TypeError(f"breaker of {limit} must be a Breaker, such as Breaker(errors=0.5), got {breaker!r}")

    def _set_burst(self, limit: str) -> None:
        if self.burst is None:
            return
        if (self.rate is None) == (self.cost is None):
            remedy = "give rate or cost" if self.rate is None else "give each as Rate(count, per=seconds, burst=...)"
            raise ValueError(f"burst of {limit} must go with either rate or cost: {remedy}")
        what = "cost" if self.rate is None else "rate"
        rate: Rate = getattr(self, what)
        if rate.burst is not None:
            raise ValueError(f"burst of {limit} must be given once, got {rate.burst} and {self.burst}")
        _check_whole(f"burst of {limit}", self.burst, MAX_COST)
        object.__setattr__(self, what, replace(rate, burst=self.burst))
        object.__setattr__(self, "burst", None)

    @property
    def slots(self) -> int | None:
        """Tokens of one key at once; None without such a number."""
        return self.total if self.running is None else self.running

    @property
    def rates(self) -> tuple[Rate | None, Rate | None]:
        """The rate and the cost."""
        found = (self.rate, self.cost)
        rate, cost = (None if isinstance(one, str) else one for one in found)  # texts were read at once
        return rate, cost

    @property
    def flags(self) -> str:
        """Letters of a `LimitUse`."""
        return (
            ("o" if self.ordered else "")
            + ("p" if self.while_parked else "")
            + {"wait": "", "drop": "d", "replace": "r"}[self.over]
        )

    def costs(self, cost: int) -> LimitCost:
        """Return the limit with what a task costs, for its list: `limits=[openai.costs(1200)]`.

        Raises `ValueError` for a cost that the limit never lets pass.
        """
        return LimitCost(self, check_cost(self.name, cost, self.rates[1]))

    async def hold(self, seconds: Duration) -> None:
        """Let no task of any app start for some seconds, such as after an answer "too many requests".

        A hold that ends later stays as it is, and tasks that run are not touched.
        """
        until = _seconds(f"the time of a hold of limit {self.name!r}", seconds)
        await self._owner("hold").hold_limit(self.name, until)

    def hold_sync(self, seconds: Duration) -> None:
        """Hold the limit from synchronous code. See `hold`."""
        self._owner("hold").run_blocking(lambda: self.hold(seconds), f"await {self.name}.hold(...)")

    def _owner(self, call: str) -> LimitOwner:
        if self.owner is None:
            raise ValueError(f"could not {call} limit {self.name!r}: it has no app; define it with app.limit(...)")
        return self.owner

    def published(self) -> dict[str, str]:
        """Return the fields of the hash from which scripts read the definition.

        total, running: tokens. interval, burst: ms per start and starts at once; cost_interval, cost_burst: likewise.
        errors, calls, window, open: those of the breaker, in ms. by: names of arguments, or `a function`, for people.
        """
        rate, cost = self.rates
        # Without keys both numbers mean the same, and one set of tokens is enough.
        total = self.slots if self.by is None else self.total
        given: dict[str, object] = {"total": total, "running": None if self.by is None else self.running}
        if rate is not None:
            given |= {"interval": rate.interval_ms, "burst": rate.at_once, "rate": str(rate)}
        if cost is not None:
            given |= {"cost_interval": cost.interval_ms, "cost_burst": cost.at_once, "cost": str(cost)}
        if (breaker := self.breaker) is not None:
            window, open_for = to_seconds(breaker.window), to_seconds(breaker.open)
            given |= {"errors": breaker.errors, "calls": breaker.calls}
            given |= {"window": round(window * 1000), "open": round(open_for * 1000)}
        by = "a function" if callable(self.by) else ", ".join(self.by or ())
        given |= {"by": by or None, "over": None if self.over == "wait" else self.over}
        given |= {"ordered": self.ordered or None, "while_parked": self.while_parked or None}
        return {name: _field(value) for name, value in given.items() if value is not None}

    @property
    def digest(self) -> str:
        """Digest of the definition, by which workers see that two apps differ."""
        return hashlib.blake2b(json.dumps(self.published(), sort_keys=True).encode(), digest_size=8).hexdigest()


class LimitCost(NamedTuple):
    """A limit and what a task costs there: `openai.costs(1200)`."""

    limit: Limit
    cost: int


def check_limits(limits: object) -> tuple[LimitCost, ...]:
    """Return the limits of a task with their costs, 1 if none is given. Raises `ValueError`, `TypeError`."""
    if isinstance(limits, (Limit, LimitCost)) or not isinstance(limits, (list, tuple)):
        raise TypeError(f"limits must be a list of limits, such as [app.limit('openai', total=20)], got {limits!r}")
    found: list[LimitCost] = []
    for limit in limits:
        if not isinstance(limit, (Limit, LimitCost)):
            raise TypeError(f"limits must be limits of app.limit(...), got {limit!r}")
        found.append(limit if isinstance(limit, LimitCost) else LimitCost(limit, 1))
    if len(found) > MAX_LIMITS:
        raise ValueError(f"a task must have at most {MAX_LIMITS} limits, got {len(found)}")
    names = [each.limit.name for each in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"a task must have each limit once, got {', '.join(sorted(twice))} twice")
    ordered = [each.limit.name for each in found if each.limit.ordered]
    if len(ordered) > 1:
        raise ValueError(f"a task must have at most one ordered limit, got {' and '.join(ordered)}")
    over = {each.limit.over for each in found} - {"wait"}
    if len(over) > 1:
        raise ValueError("the limits of a task must agree on over, got 'drop' and 'replace'")
    return tuple(sorted(found, key=lambda each: each.limit.name))


def check_cost(name: str, cost: object, rate: Rate | None) -> int:
    """Return a cost. rate: that of the limit. Raises `ValueError` for one that the limit never lets pass."""
    if type(cost) is not int or cost < 0:
        raise ValueError(f"a cost of limit {name!r} must be a whole number, 0 or more, got {cost!r}")
    if rate is None:
        raise ValueError(f"limit {name!r} has no cost: define it with app.limit({name!r}, cost='90_000/m')")
    if cost > rate.at_once:
        raise ValueError(
            f"a cost of limit {name!r} must be at most its burst, {rate.at_once:,} of {rate}, got {cost:,}"
        )
    return cost


def key_digest(limit: str, values: Sequence[Any] | None) -> str:
    """Return the key of a limit for the values that make it, JSON data; `-` for None, where a limit has no keys.

    The names of arguments are no part of it: an app may name the same tenant otherwise.
    """
    if values is None:
        return NO_KEY
    return hashlib.blake2b(json.dumps([limit, list(values)]).encode(), digest_size=8).hexdigest()


def given_values(limit: str, key: object) -> list[Any]:
    """Return the values of a key that a caller gives: a text, a number, true, false or null, or a tuple of them.

    Raises `InvalidLimitUse`.
    """
    try:
        return returned_values(lambda _: key, {})
    except KeyProblem:
        raise InvalidLimitUse(
            f"key of limit {limit!r} must be a text, a number, true, false or null, or a tuple of them, got {key!r}"
        ) from None


def parse_rate(text: str) -> Rate:
    """Return the rate of a text such as `500/m`. Raises `ValueError`."""
    found = _RATE.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ValueError(f"must be such as '500/m', with one of the units s, m, h, d, got {text!r}")
    return Rate(int(found[1]), _UNITS[found[2]])


def _as_rate(what: str, given: Any) -> Rate | None:
    if given is None or isinstance(given, Rate):
        return given
    if not isinstance(given, str):
        raise TypeError(f"{what} must be such as '500/m' or Rate(500, per=60), got {given!r}")
    try:
        return parse_rate(given)
    except ValueError as error:
        raise ValueError(f"{what} {error}" if str(error).startswith("must") else f"{what}: {error}") from None


def _check_whole(what: str, given: object, most: int) -> None:
    if type(given) is not int or not 1 <= given <= most:
        raise ValueError(f"{what} must be a whole number from 1 to {most:,}, got {given!r}")


def _seconds(what: str, given: Any) -> float:
    if isinstance(given, bool):
        raise TypeError(f"{what} must be seconds or a timedelta, got {given!r}")
    seconds = to_seconds(given, what)
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{what} must be more than 0 seconds and at most {MAX_SECONDS:.0e}, got {seconds:g}")
    return seconds


def _field(value: object) -> str:
    return "1" if value is True else f"{value:.17g}" if isinstance(value, float) else str(value)


def label_text(values: Sequence[Any]) -> str:
    """Return the text of a key for people, from the values that make it."""
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values)

"""Definitions of budgets: what a task, or all tasks of a name, may spend in all.

A budget without a name belongs to one task, and to everything that this task spawns. A named one belongs to the
namespace: all tasks that name it share it, or those of one value of `by`. What is spent stands in a ledger: store.py.

Redis counts in whole numbers: tokens, billionths of a dollar, steps, milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any, Final, Literal, get_args

from ..argument_keys import By, KeyProblem, check_by, named_values, returned_values
from ..durations import Duration, parse_duration, to_seconds
from ..envelope import MAX_AMOUNT, MAX_BUDGETS, NO_KEY, BudgetUse
from ..errors import InvalidBudgetUse
from ..keys import check_name
from ..wording import counted, duration

UNITS: Final = ("tokens", "usd", "steps", "seconds")
"""Units that a budget may limit, in the order of texts and scripts."""

Then = Literal["ask", "hand_off", "bury"]
"""Handling of a task whose budget is used up: it waits for a person, another one continues it, or it is buried."""

MAX_OWN: Final = 4
"""Budgets that one task may name."""

MAX_WINDOW: Final = 400 * 86_400.0
"""Seconds of the longest window."""

_SCALE: Final[Mapping[str, int]] = {"tokens": 1, "usd": 1_000_000_000, "steps": 1, "seconds": 1_000}
"""Numbers that Redis counts, in one of each unit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of a task: `@app.task(budget=Budget(tokens=200_000, usd=5))`.

    Args:
        tokens: tokens of models, charged by `ctx.spend`.
        usd: dollars, charged by `ctx.spend`; to a billionth.
        steps: steps that run, without those that are recorded already.
        seconds: time for which runs of the task hold a slot (a number or a timedelta); parked time is free.
        name: shares the budget with all tasks of the namespace that name it. Without one it is that of one task, with
            everything that the task spawns.
        by: names of the arguments whose values have a budget each, such as `"tenant"`, or a function of all arguments;
            goes with a name.
        per: window in which the amounts may be spent: seconds, a timedelta, or a text such as `"1d"`; goes with a name.
            It begins with the first charge. None: for ever, until an operator resets it.
        then: `ask`: the task waits for a person, who adds to the budget or denies. `hand_off`: the task `to` continues
            the work. `bury`: the task becomes a dead letter.
        to: a task, an agent, or the name of one, for `hand_off`.

    Raises:
        ValueError, TypeError: an argument is not one of these.
    """

    tokens: int | None = None
    usd: float | Decimal | None = None
    steps: int | None = None
    seconds: Duration | None = None
    name: str | None = field(default=None, kw_only=True)
    by: By = field(default=None, kw_only=True)
    per: Duration | str | None = field(default=None, kw_only=True)
    then: Then = field(default="ask", kw_only=True)
    to: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name("the name of a budget", self.name)
        budget = f"budget {self.name!r}" if self.name else "a budget"
        if not self.limits:
            raise ValueError(f"{budget} must have an amount: give tokens, usd, steps or seconds")
        for what in ("by", "per"):
            if getattr(self, what) is not None and self.name is None:
                raise ValueError(
                    f"{what} of a budget must go with a name, which tasks share: Budget(name='tenant', ...)"
                )
        object.__setattr__(self, "by", check_by(self.by, budget))
        if self.per is not None:
            object.__setattr__(self, "per", _window(budget, self.per))
        if self.then not in get_args(Then):
            raise ValueError(f"then of {budget} must be 'ask', 'hand_off' or 'bury', got {self.then!r}")
        object.__setattr__(self, "to", _task_name(budget, self.to))
        if (self.then == "hand_off") != (self.to is not None):
            raise ValueError(f"to of {budget}, the task that continues the work, must go with then='hand_off'")

    @property
    def limits(self) -> dict[str, int]:
        """The amounts as Redis counts them, by unit. Raises `ValueError`, `TypeError`."""
        budget = f"budget {self.name!r}" if self.name else "a budget"
        given = {unit: getattr(self, unit) for unit in UNITS}
        return {unit: to_amount(unit, value, budget) for unit, value in given.items() if value is not None}

    @property
    def window_ms(self) -> int | None:
        """Milliseconds of the window, None for ever."""
        return None if self.per is None else round(_window("a budget", self.per) * 1000)

    def published(self) -> dict[str, Any]:
        """Return the budget as JSON data, for the catalog of tasks."""
        by = "a function" if callable(self.by) else self.by
        return {"name": self.name, "limits": self.limits, "by": by, "window": self.window_ms} | {
            "then": self.then,
            "to": self.to,
        }


@dataclass(frozen=True, slots=True)
class TaskBudgets:
    """The budgets of one task. defaults: those of its arguments, as JSON data."""

    budgets: tuple[Budget, ...]
    task: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keyed(self) -> bool:
        """Whether the arguments of a call matter."""
        return any(budget.by is not None for budget in self.budgets)

    def published(self) -> list[dict[str, Any]]:
        """Return them as JSON data, for the catalog of tasks."""
        return [budget.published() for budget in self.budgets]


def check_budgets(budgets: object) -> tuple[Budget, ...]:
    """Return the budgets of a task: one, or a list of them. Raises `ValueError`, `TypeError`."""
    given = (budgets,) if isinstance(budgets, Budget) else budgets
    if not isinstance(given, (list, tuple)) or not all(isinstance(budget, Budget) for budget in given):
        raise TypeError(f"budget must be a Budget, such as Budget(usd=5), or a list of them, got {budgets!r}")
    if len(given) > MAX_OWN:
        raise ValueError(f"a task must have at most {MAX_OWN} budgets, got {len(given)}")
    names = [budget.name for budget in given]
    if twice := {name or "without a name" for name in names if names.count(name) > 1}:
        raise ValueError(f"a task must have each budget once, got {', '.join(sorted(twice))} twice")
    return tuple(given)


def task_budgets(
    budgets: TaskBudgets | None,
    task_id: str,
    arguments: Mapping[str, Any],
    *,
    secrets: Collection[str] = (),
    inherited: Sequence[BudgetUse] = (),
) -> tuple[BudgetUse, ...]:
    """Return the uses of a task: what its parent was charged to, then its own budgets.

    Args:
        arguments: as JSON data; those without a default are enough.
        secrets: names of the arguments that hold secrets.
        inherited: those of its envelope. A named budget that the task has as well counts with the amounts of the task.

    Raises:
        InvalidBudgetUse: the arguments make no key, or there are too many.
    """
    found = {use.ledger: use for use in inherited}
    for budget in () if budgets is None else budgets.budgets:
        use = _use(budget, task_id, budgets, arguments, secrets)  # type: ignore[arg-type]
        found[use.ledger] = use
    if len(found) > MAX_BUDGETS:
        raise InvalidBudgetUse(
            f"task {task_id} would be charged to {len(found)} budgets, and the most is {MAX_BUDGETS}: its parents have "
            "a budget each; share one by name, or spawn less deeply"
        )
    return tuple(found.values())


def _use(
    budget: Budget, task_id: str, of: TaskBudgets, arguments: Mapping[str, Any], secrets: Collection[str]
) -> BudgetUse:
    rest = (budget.limits, budget.window_ms, budget.then, budget.to)
    if budget.name is None:
        return BudgetUse(task_id, "", *rest)
    if budget.by is None:
        return BudgetUse(ledger_id(budget.name, None), budget.name, *rest)
    try:
        if callable(budget.by):
            values = returned_values(budget.by, {**of.defaults, **arguments})
        else:
            values = list(named_values(budget.by, {**of.defaults, **arguments}, secrets).values())
    except KeyProblem as problem:
        raise InvalidBudgetUse(f"task {of.task!r}: key of budget {budget.name!r}: {problem}") from None
    return BudgetUse(ledger_id(budget.name, values), budget.name, *rest, label=key_text(values))


def ledger_id(name: str, values: Sequence[Any] | None) -> str:
    """Return the id of the ledger of a named budget, for the values of its key; None where it has no keys.

    That of a budget without a name is the id of its task, which has no colon.
    """
    if values is None:
        return f"{name}:{NO_KEY}"
    digest = hashlib.blake2b(json.dumps([name, list(values)]).encode(), digest_size=8).hexdigest()
    return f"{name}:{digest}"


def budget_name(ledger: str) -> str:
    """Return the name of the budget of a ledger; empty for that of a task."""
    name, colon, _ = ledger.partition(":")
    return name if colon else ""


def key_text(values: Sequence[Any]) -> str:
    """Return the text of a key for people."""
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values)


def to_amount(unit: str, given: object, what: str = "a budget") -> int:
    """Return an amount as Redis counts it, more than 0; of money and of time the nearest, and at least 1.

    Args:
        unit: one of `UNITS`.
        given: whole tokens or steps; dollars as a number; seconds or a timedelta.
        what: whose amount it is, for the error.

    Raises:
        ValueError, TypeError: it is not one of these, or more than 9 million dollars, or 2**53 of another unit.
    """
    name = f"{unit} of {what}"
    if unit in ("tokens", "steps"):
        if type(given) is not int or not 1 <= given <= MAX_AMOUNT:
            raise ValueError(f"{name} must be a whole number, 1 or more, got {given!r}")
        return given
    if isinstance(given, bool) or (unit == "usd" and not isinstance(given, (int, float, Decimal))):
        raise TypeError(f"{name} must be a number, got {given!r}")
    number = Decimal(str(to_seconds(given, name) if unit == "seconds" else given))  # type: ignore[arg-type]
    most = MAX_AMOUNT // _SCALE[unit]
    if not number.is_finite() or not 0 < number <= most:
        raise ValueError(f"{name} must be more than 0 and at most {most:,}, got {given!r}")
    return max(1, int((number * _SCALE[unit]).quantize(Decimal(1), ROUND_HALF_UP)))


def from_amount(unit: str, amount: int) -> int | float:
    """Return an amount as people count it: whole tokens or steps, dollars, seconds."""
    return amount if _SCALE[unit] == 1 else amount / _SCALE[unit]


def parse_amount(unit: str, text: str) -> int:
    """Return an amount that a person wrote: `200_000`, `$1.50`, `90s`, `2h`. Raises `ValueError`."""
    bare = text.strip().replace("_", "").replace(",", "")
    if unit == "seconds":
        return to_amount(unit, parse_duration(bare, positive=True))
    if unit in ("tokens", "steps"):
        return to_amount(unit, int(bare) if bare.isascii() and bare.isdigit() else text)
    try:
        return to_amount(unit, Decimal(bare.removeprefix("$")))
    except (InvalidOperation, TypeError):
        raise ValueError(f"must be a number of dollars, such as 1.50, got {text!r}") from None


def amount_text(unit: str, amount: int, *, bare: bool = False) -> str:
    """Return an amount for people: `200,000 tokens`, `$1.25`, `1 step`, `1.5 min`. bare: without its noun."""
    if unit == "usd":
        dollars = Decimal(amount) / _SCALE["usd"]
        digits = 2 if amount % 10_000_000 == 0 or amount >= 1_000_000_000_000 else 4 if amount >= 100_000 else 9
        return f"${dollars:,.{digits}f}"
    if unit == "seconds":
        return duration(amount / 1000)
    if bare:
        return f"{amount:,}"
    return f"{amount:,} {counted(amount, unit.removesuffix('s')).split(' ', 1)[1]}"


def amounts_text(amounts: Mapping[str, int]) -> str:
    """Return amounts as a list for people."""
    return ", ".join(amount_text(unit, amounts[unit]) for unit in UNITS if unit in amounts) or "nothing"


def published_text(fields: Mapping[str, Any]) -> str:
    """Return a published budget for people: `tenant by tenant: $50.00 per 1.0 days`.

    Raises `ValueError`, `LookupError`, `TypeError`, `AttributeError` for what no worker has published.
    """
    name, by, window = fields["name"], fields["by"], fields["window"]
    keys = by if isinstance(by, str) else ", ".join(by or ())
    named = f"{name}{f' by {keys}' if keys else ''}: " if name else ""
    per = "" if window is None else f" per {duration(int(window) / 1000)}"
    return named + amounts_text(fields["limits"]) + per


def _window(budget: str, given: Any) -> float:
    """Return the seconds of a window. Raises `ValueError`, `TypeError`."""
    if isinstance(given, bool):
        raise TypeError(f"per of {budget} must be seconds, a timedelta or such as '1d', got {given!r}")
    try:
        seconds = parse_duration(given, positive=True) if isinstance(given, str) else to_seconds(given, "it")
    except ValueError as error:
        raise ValueError(f"per of {budget} {str(error).removeprefix('it ')}") from None
    except TypeError:
        raise TypeError(f"per of {budget} must be seconds, a timedelta or such as '1d', got {given!r}") from None
    if not 0.001 <= seconds <= MAX_WINDOW:
        raise ValueError(f"per of {budget} must be at least 1 ms and at most 400 days, got {given!r}")
    return seconds


def _task_name(budget: str, to: Any) -> str | None:
    """Return the name of a task that is given as such, or as a task or an agent."""
    name: object = to if to is None or isinstance(to, str) else getattr(to, "name", to)
    if name is not None and not (isinstance(name, str) and name):
        raise TypeError(f"to of {budget} must be a task, an agent, or the name of one, got {to!r}")
    return name

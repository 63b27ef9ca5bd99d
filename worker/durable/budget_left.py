"""Rest of the budgets of a task, and texts about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...queues.budgets.definition import UNITS, amount_text
from ...queues.budgets.store import Standing
from ...queues.envelope import BudgetUse

_MUCH = 0.8
"""Share of a budget from which on what is left is worth a sentence."""


@dataclass(frozen=True, slots=True)
class BudgetLeft:
    """Rest of the budgets of a task at one moment, the least of each unit; None where nothing limits it.

    Attributes:
        tokens: tokens of models.
        usd: dollars.
        steps: steps that are not recorded yet.
        seconds: time for which runs of the task may hold a slot.
        used: what is used, as texts, of the budgets of which most is used.
    """

    tokens: int | None = None
    usd: float | None = None
    steps: int | None = None
    seconds: float | None = None
    used: tuple[str, ...] = ()

    @property
    def used_up(self) -> bool:
        """Whether one of the budgets is used up: the next step does not start."""
        return 0 in (self.tokens, self.usd, self.steps, self.seconds)

    def sentences(self) -> list[str]:
        """Return what a model should know: the budgets of which at least 80 % is used."""
        return [f"Budget used: {used}." for used in self.used]

    @classmethod
    def of(cls, standings: Sequence[Standing]) -> BudgetLeft:
        """Return what is left of budgets together."""
        least: dict[str, int] = {}
        for standing in standings:
            for unit in standing.limits:
                left = max(0, standing.left(unit))
                least[unit] = min(left, least.get(unit, left))
        usd, milliseconds = least.get("usd"), least.get("seconds")
        return cls(
            least.get("tokens"),
            None if usd is None else usd / 1e9,
            least.get("steps"),
            None if milliseconds is None else milliseconds / 1000,
            tuple(used_text(standing) for standing in standings if share_used(standing) >= _MUCH),
        )


def share_used(standing: Standing) -> float:
    """Return the largest share of its limits that a budget has used."""
    return max((standing.spent.get(unit, 0) / limit for unit, limit in standing.limits.items()), default=0.0)


def budget_text(use: BudgetUse) -> str:
    """Return a budget as sentences name it."""
    if not use.name:
        return "the budget of the task"
    return f"budget {use.name} ({use.label})" if use.label else f"budget {use.name}"


def used_text(standing: Standing) -> str:
    """Return what is used of a budget, of the units that are used up, else of the one of which most is:
    `201,000 of 200,000 tokens`.
    """
    limits, spent = standing.limits, standing.spent
    units = standing.used_up or (max(limits, key=lambda unit: spent.get(unit, 0) / limits[unit]),)
    return " and ".join(
        f"{amount_text(unit, spent.get(unit, 0), bare=True)} of {amount_text(unit, limits[unit])}"
        for unit in UNITS
        if unit in units
    )

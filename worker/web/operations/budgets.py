"""Budgets: what tasks have spent, raises, and resets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ....queues.budgets.definition import UNITS, amounts_text, parse_amount
from ....queues.budgets.store import MAX_LISTED, BudgetStore, Ledger
from ....queues.errors import ChangedMeanwhile
from ..operation import Call, Inputs, ResultModel, operation
from ..paging import PageInputs, page_of
from ..problems import invalid_field
from ..users import Role

BudgetText = Annotated[
    str, Field(min_length=1, max_length=256, description="Id of the task, name of the budget, or `NAME:KEY`.")
]

Amounts = dict[str, int | float]


class BudgetView(ResultModel):
    """Amounts of a budget: tokens, dollars, steps, seconds."""

    ledger: str = Field(description="`NAME:KEY` of a named budget, or the id of the task.")
    name: str | None = Field(description="Name of the budget; null for the budget of one task.")
    key: str | None = Field(description="Text of its key; null without keys.")
    spent: Amounts
    limits: Amounts = Field(description="Limits with raises, as of the last charge.")
    raised: Amounts = Field(description="Amounts that operators have added.")
    total: Amounts = Field(description="Amounts that were spent before the last reset.")
    texts: dict[str, str] = Field(description="What was spent by unit, in words.")
    used_up: bool = Field(description="Whether nothing is left of a unit.")
    at: str | None = Field(description="Time of the last charge.")
    window_ends: str | None = Field(description="End of its window; null without a window.")
    asks: str | None = Field(description="Id of the task that asks a person; null if none does.")
    raised_by: str | None = Field(description="Who raised it last.")
    revision: int = Field(description="Number of its raises; a raise that names it is made once.")

    @classmethod
    def of(cls, ledger: Ledger) -> BudgetView:
        """Return the view of a ledger."""
        units = [unit for unit in UNITS if unit in ledger.limits or unit in ledger.spent or unit in ledger.total]
        texts = {unit: ledger.spent_text(unit) for unit in units}
        return cls(**ledger.summary(), texts=texts, used_up=ledger.used_up, revision=ledger.raises)


class BudgetPage(ResultModel):
    """A page of named budgets by name and key."""

    items: list[BudgetView]
    next: str | None = Field(description="Cursor of the next page; null for the last one.")
    read: int = Field(description="Budgets that were read.")
    of: int = Field(description="Budgets that there are, at most 10,000.")


class ListBudgets(PageInputs):
    """Inputs of a list of budgets."""

    name: str | None = Field(None, max_length=64, description="Only the keys of this budget.")


@operation("GET", "/budgets", roles=[Role.VIEWER])
async def list_budgets(call: Call, given: ListBudgets) -> BudgetPage:
    """List named budgets by name and key, with what was spent of each.

    A window that has ended is not listed; the next charge begins a new one. The budget of a single task is shown by the
    id of the task.
    """
    found = await _store(call).list_named(given.name, most=MAX_LISTED)
    found.sort(key=lambda ledger: ledger.ledger)
    items, following = page_of(found, lambda ledger: ledger.ledger, given)
    return BudgetPage(items=list(map(BudgetView.of, items)), next=following, read=len(found), of=len(found))


class OneBudget(Inputs):
    """A budget."""

    budget: BudgetText


@operation("GET", "/budgets/{budget}", roles=[Role.VIEWER])
async def show_budget(call: Call, given: OneBudget) -> BudgetView:
    """Show a budget: what was spent, what is left, and who raised it last.

    The budget of a task counts what its children and its successors spend.
    """
    return BudgetView.of(await _store(call).find(given.budget))


class RaiseBudget(OneBudget):
    """Inputs of a raise of a budget."""

    tokens: Annotated[int | str | None, Field(description="Tokens to add.")] = None
    usd: Annotated[float | str | None, Field(description="Dollars to add.")] = None
    steps: Annotated[int | str | None, Field(description="Steps to add.")] = None
    seconds: Annotated[float | str | None, Field(description="Time to add: seconds, or a text such as `10m`.")] = None
    revision: int | None = Field(
        None, ge=0, description="Revision that was read: a budget that was raised or reset since then stays as it is."
    )


@operation("POST", "/budgets/{budget}/raise", roles=[Role.OPERATOR], changes=True)
async def raise_budget(call: Call, given: RaiseBudget) -> BudgetView:
    """Add amounts to a budget, and wake the tasks that wait for it.

    In a budget with a window they are for the current one. A task that waits for an operator continues, as if
    its question had been answered.
    """
    amounts: dict[str, int] = {}
    for unit in UNITS:
        if (amount := getattr(given, unit)) is not None:
            try:
                amounts[unit] = parse_amount(unit, str(amount))
            except (TypeError, ValueError) as error:
                raise invalid_field(unit, str(error)) from None
    if not amounts:
        raise invalid_field("tokens", "give what to add: tokens, usd, steps or seconds")
    ledger = await _store(call).find(given.budget)
    for unit in amounts:
        if unit not in ledger.limits:
            limited = ", ".join(unit for unit in UNITS if unit in ledger.limits) or "nothing"
            raise invalid_field(unit, f"budget {ledger.ledger} does not limit {unit}; it limits {limited}")
    added = await _store(call).raise_(ledger.ledger, amounts, number=given.revision, by=call.user.name)
    if not added:
        raise await _changed(call, ledger, f"add {amounts_text(amounts)} to")
    return BudgetView.of(await _store(call).find(ledger.ledger))


class ResetBudget(OneBudget):
    """Inputs of the reset of a budget."""

    revision: int | None = Field(
        None, ge=0, description="Revision that was read: a budget that was raised or reset since then stays as it is."
    )


@operation("POST", "/budgets/{budget}/reset", roles=[Role.OPERATOR], changes=True)
async def reset_budget(call: Call, given: ResetBudget) -> BudgetView:
    """Let a budget begin again: nothing counts as spent, and raises are forgotten.

    What was spent is kept as a total. Tasks that wait for the budget continue.
    """
    ledger = await _store(call).find(given.budget)
    done = await _store(call).raise_(ledger.ledger, {}, number=given.revision, by=call.user.name, again=True)
    if not done:
        raise await _changed(call, ledger, "reset")
    return BudgetView.of(await _store(call).find(ledger.ledger))


async def _changed(call: Call, ledger: Ledger, what: str) -> ChangedMeanwhile:
    """Return the error of a revision that is not the stored one."""
    now = await _store(call).find(ledger.ledger)
    by = f" by {now.by}" if now.by else ""
    return ChangedMeanwhile(
        f"could not {what} budget {ledger.ledger}: it was raised or reset since you have read it{by}; look at it again"
    )


def _store(call: Call) -> BudgetStore:
    return BudgetStore(call.producer.gateway, call.producer.namespace)

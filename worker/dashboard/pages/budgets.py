"""Budgets: what tasks have spent, raises, and resets."""

from __future__ import annotations

from typing import Any, Final

from ...web.operations.budgets import (
    BudgetView,
    ListBudgets,
    OneBudget,
    list_budgets,
    raise_budget,
    reset_budget,
    show_budget,
)
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page

_LABELS: Final = {
    "tokens": ("Tokens to add", "Such as 50_000."),
    "usd": ("Dollars to add", "Such as 1.50."),
    "steps": ("Steps to add", ""),
    "seconds": ("Time to add", "Such as 90s or 10m."),
}


@page("/budgets", title="Budgets", nav="Budgets")
async def budgets(request: PageRequest) -> Html:
    """List named budgets with what was spent of each."""
    return request.render("budgets.html", found=await list_budgets(request.call, request.inputs(ListBudgets)))


@page("/budgets/{budget}", title="Budget", nav="Budgets")
async def budget(request: PageRequest) -> Html:
    """Show a budget."""
    return request.render("budget.html", found=await _read(request))


async def _read(request: PageRequest) -> BudgetView:
    return await show_budget(request.call, OneBudget.model_validate(request.path))


def _name(found: BudgetView) -> str:
    return f"{found.name} of {found.key}" if found.name and found.key else found.ledger


def _of(request: PageRequest, found: BudgetView) -> dict[str, Any]:
    return {"inputs": {"budget": found.ledger}, "then": request.url("budget", budget=found.ledger)}


def _spent(found: BudgetView) -> str:
    return "; ".join(f"{unit}: {text}" for unit, text in found.texts.items()) or "nothing"


@action("/budgets/{budget}/raise", raise_budget, title="Raise a budget", nav="Budgets")
async def raise_one_budget(request: PageRequest) -> Action:
    """Add amounts to a budget."""
    found = await _read(request)
    fields = [FormField(unit, _LABELS[unit][0], help=_LABELS[unit][1]) for unit in _LABELS if unit in found.limits]
    return Action(
        f"Amounts are added to budget {_name(found)}, and the tasks that wait for it continue. "
        f"Spent now: {_spent(found)}.",
        button="Raise",
        fields=[*fields, FormField("revision", "Revision", "hidden", found.revision)],
        done=f"Budget {_name(found)} is raised.",
        **_of(request, found),
    )


@action("/budgets/{budget}/reset", reset_budget, title="Reset a budget", nav="Budgets")
async def reset_one_budget(request: PageRequest) -> Action:
    """Let a budget begin again."""
    found = await _read(request)
    return Action(
        f"Budget {_name(found)} begins again: nothing counts as spent, raises are forgotten, and the tasks that wait "
        f"for it continue. Spent now: {_spent(found)}.",
        button="Reset",
        fields=[FormField("revision", "Revision", "hidden", found.revision)],
        done=f"Budget {_name(found)} begins again.",
        destructive=True,
        **_of(request, found),
    )

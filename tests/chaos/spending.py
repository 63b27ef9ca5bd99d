"""Tasks of the run with a budget that they share, and what is spent of it at the end.

A step logs when it begins to charge, and when the charge is confirmed.
"""

from __future__ import annotations

from typing import Final

import anyio
from perdure import App, Budget, Context, Producer, current_step
from perdure.queues.budgets.store import BudgetStore

from .instrumentation import JOURNAL, began, logged, made, options_of, stepped
from .journal import JournalWriter

__all__ = ["note_purses", "register_spending"]

_PURSE: Final = "purse"


def register_spending(app: App) -> None:
    """Register the tasks with an app."""
    budget = Budget(name=_PURSE, by="tenant", tokens=10**12)

    async def buy(inputs: list[str], pause: float, tenant: str) -> str:
        token, task = began(inputs), current_step().idempotency_key.partition(":")[0]
        JOURNAL.write("buys", task=task, tenant=tenant, token=token)
        await current_step().spend(tokens=1)
        JOURNAL.write("bought", task=task, tenant=tenant, token=token)
        await anyio.sleep(pause)
        return made(token)

    @app.task(**options_of("buys"), budget=budget)
    @logged
    async def buys(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Charges the budget of its tenant in each step."""
        found: list[str] = []
        for number in range(steps):
            found.append(await stepped(ctx, f"step-{number}", buy, list(found), pause / 2, tenant))
        return found


async def note_purses(producer: Producer, journal: JournalWriter) -> None:
    """Write one line per key of the budget."""
    for ledger in await BudgetStore(producer.gateway, producer.namespace).list_named(_PURSE):
        journal.write("purse", tenant=ledger.label, spent=ledger.spent["tokens"])

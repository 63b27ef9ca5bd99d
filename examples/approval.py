"""A payment that waits two days for an approval: the task takes no slot and no lease meanwhile.

    perdure worker run examples/approval.py:app &
    perdure enqueue pay --queue payments --args '{"order": 17, "amount": 900}' --id order-17
    perdure task waiting
    perdure task answer order-17 approval '{"approved": true}' --by ada
    perdure task result order-17

A web handler that knows the order and not the task answers by the token: `await app.answer("order:17", ...)`. Without
an answer in two days, the payment is refused. An answer to another amount than the one that is shown is void.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from perdure import App, Context, current_step
from pydantic import BaseModel

LEDGER = Path(os.environ.get("LEDGER", "payments.txt"))
"""The account of the payment provider: one line for each payment."""

app = App("payments")


class Approval(BaseModel):
    approved: bool
    note: str = ""


def charge(order: int, amount: int) -> str:
    """Charge an order. The provider knows a repeated payment by its key."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{current_step().idempotency_key} {order} {amount}\n")
    return f"order {order}: {amount} euros"


@app.task
async def pay(ctx: Context, order: int, amount: int) -> str:
    answer = await ctx.wait_for(
        "approval",
        Approval,
        who="finance",
        why=f"pays {amount} euros",
        shows={"order": order, "amount": amount},
        token=f"order:{order}",
        timeout=timedelta(days=2),
        default=Approval(approved=False, note="no answer in two days"),
    )
    if not answer.approved:
        return f"refused: {answer.note}"
    return await ctx.step("charge", charge, order, amount)

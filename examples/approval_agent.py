"""An agent that handles a complaint: a model chooses tools, a person approves a refund, and no kill repeats it.

    perdure worker run examples/approval_agent.py:app &
    perdure enqueue complaint --queue complaints --args '{"order": "A7", "text": "it arrived broken"}' --id case-1
    perdure task answer case-1 refund true --by finance
    perdure task result case-1

The model is a script, so that the example needs no network; examples/llm_agent.py calls a real one. Kill the worker
while it refunds: the next worker finds the refund by its idempotency key, and does not pay again. `--by` is what the
sender says: rights on Redis, or your own web service, decide who may answer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from perdure import AlreadyDone, App, Context, current_step
from perdure.context import Message, ToolCall

LEDGER = Path(os.environ.get("LEDGER", "refunds.txt"))
"""The account of the payment provider: one line for each refund."""

ORDERS = {"A7": ("one lamp", 30), "B9": ("two chairs", 120)}

app = App("complaints")


def model(messages: list[Message]) -> Message:
    """Return the next message of the scripted model: look the order up, refund its price, answer."""
    results = [message.content for message in messages if message.role == "tool"]
    if not results:
        return Message(role="assistant", tool_calls=(ToolCall(id="1", name="look_up", arguments={}),))
    if len(results) == 1 and results[0].endswith("euros"):
        arguments = {"amount": int(results[0].split()[-2])}
        return Message(role="assistant", tool_calls=(ToolCall(id="2", name="refund", arguments=arguments),))
    return Message(role="assistant", content=f"Your refund: {results[-1]}.")


def look_up(order: str) -> str:
    """Describe an order. An error is a result: it is recorded, so a resumed model reads it again."""
    if order not in ORDERS:
        return f"none, there is no order {order}"
    article, price = ORDERS[order]
    return f"order {order}: {article}, {price} euros"


def refund(order: str, amount: int) -> str:
    """Refund an order. The provider takes its time to confirm."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{current_step().idempotency_key} {order} {amount}\n")
    time.sleep(float(os.environ.get("CONFIRMED_AFTER", "3")))
    return f"{amount} euros"


def find_refund(order: str, amount: int) -> AlreadyDone[str] | None:
    """Return the result of the refund if a worker that was killed had made it."""
    made = LEDGER.exists() and f"{current_step().idempotency_key} " in LEDGER.read_text()
    return AlreadyDone(f"{amount} euros") if made else None


async def call_tool(ctx: Context, order: str, call: ToolCall) -> str:
    """Call a tool for the order of the task: the model does not choose whose order it reads or refunds."""
    if call.name == "look_up":
        return await ctx.options(call=call.id).tool("look_up", look_up, order)
    amount = int(call.arguments["amount"])
    shown = {"order": order, "amount": amount}  # an answer to another amount is void
    why = f"Refund {amount} euros for order {order}?"
    agreed = await ctx.wait_for(  # takes no slot
        "refund", bool, who="finance", why=why, shows=shown, timeout=86_400, default=False
    )
    if not agreed:
        return "refused by finance"
    return await ctx.options(call=call.id, risky=True, verify=find_refund).tool("refund", refund, order, amount)


@app.task
async def complaint(ctx: Context, order: str, text: str) -> str:
    messages = [await ctx.add_message("user", f"Order {order}: {text}")]
    while True:
        answer = await ctx.step("model", model, messages)
        messages.append(await ctx.add_message("assistant", answer.content, tool_calls=answer.tool_calls))
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            result = await call_tool(ctx, order, call)
            messages.append(await ctx.add_message("tool", result, tool_call_id=call.id))

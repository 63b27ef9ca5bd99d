"""A support agent of Pydantic AI as a durable task: it looks orders up, and refunds them when a person has approved.

    pip install "perdure[embedded,pydantic-ai]"
    perdure worker run examples/pydantic_ai_agent.py:app &
    perdure enqueue support --queue support --args '{"question": "Refund order 17."}' --id question-1
    perdure task waiting
    perdure task answer question-1 approve-refund '{"approved": true}' --by ada
    perdure task result question-1

Without a setting, a script stands for the model, so the program needs no network. With `MODEL=openai:gpt-5.2` and the
key of the provider, that model answers. If the worker dies, the next one continues: no request to the model and no
refund that is recorded is repeated.
"""

from __future__ import annotations

import os
from pathlib import Path

from perdure import App, Context, current_step
from perdure.integrations.pydantic_ai import PerdureDurability
from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel

LEDGER = Path(os.environ.get("LEDGER", "refunds.txt"))
"""The account of the payment provider: one line for each refund."""

ORDERS = {17: 49, 18: 900}
"""Prices of orders in euros."""

app = App("support")


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Answer by a script, in place of a model: look order 17 up, refund it, and say so."""
    asked = sum(isinstance(message, ModelResponse) for message in messages)
    script = [
        ToolCallPart("look_up", {"order": 17}),
        ToolCallPart("refund", {"order": 17, "euros": ORDERS[17]}),
        TextPart("Order 17 is refunded."),
    ]
    return ModelResponse(parts=[script[asked]])


agent = Agent(
    os.environ.get("MODEL") or FunctionModel(scripted),
    name="support",
    instructions="Answer questions about orders. Look an order up before you refund it.",
    capabilities=[PerdureDurability(require=True, who="finance")],
)


@agent.tool_plain
def look_up(order: int) -> str:
    """Return the price of an order."""
    return f"{ORDERS[order]} euros"


@agent.tool_plain(requires_approval=True)
def refund(order: int, euros: int) -> str:
    """Refund an order. The provider knows a repeated refund by its key."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{current_step().idempotency_key} {order} {euros}\n")
    return f"refunded {euros} euros"


@app.task
async def support(ctx: Context, question: str) -> str:
    answer: str = (await agent.run(question)).output
    return answer

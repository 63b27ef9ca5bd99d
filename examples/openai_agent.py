"""Two agents of the OpenAI Agents SDK as a durable task: the first hands off to the second, which refunds an order.

    pip install "perdure[embedded,openai-agents]"
    perdure worker run examples/openai_agent.py:app &
    perdure enqueue support --queue desk --args '{"question": "Refund order 17."}' --id question-1
    perdure task waiting
    perdure task answer question-1 approve-refund '{"approved": true}' --by ada
    perdure task result question-1

Without a setting, a script stands for the models, so the program needs no network. With `MODEL=gpt-5.2` and
OPENAI_API_KEY, that model answers. If the worker dies, the next one continues: no request to a model and no refund that
is recorded is repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, Usage, function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call
from perdure import App, Context, current_step
from perdure.integrations.openai_agents import PerdureRunner

LEDGER = Path(os.environ.get("LEDGER", "refunds.txt"))
"""The account of the payment provider: one line for each refund."""

MODEL = os.environ.get("MODEL")

app = App("desk")
runner = PerdureRunner(require=True, who="finance")
if MODEL is None:
    set_tracing_disabled(True)


class Script(Model):
    """A model that answers by a script: the n-th answer if the conversation has n calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        calls = [item for item in input if isinstance(item, dict) and item.get("type") == "function_call"]
        return ModelResponse(output=[self.answers[len(calls)]], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


SCRIPT = Script(
    function_call("transfer_to_refunds", "{}", call_id="call-1"),
    function_call("refund", json.dumps({"order": 17, "euros": 49}), call_id="call-2"),
    assistant_message("Order 17 is refunded."),
)


@function_tool(needs_approval=True)
def refund(order: int, euros: int) -> str:
    """Refund an order. The provider knows a repeated refund by its key."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{current_step().idempotency_key} {order} {euros}\n")
    return f"refunded {euros} euros"


refunds = Agent("refunds", instructions="Refund orders.", model=MODEL or SCRIPT, tools=[refund])
desk = Agent("desk", instructions="Hand questions to those who know.", model=MODEL or SCRIPT, handoffs=[refunds])


@app.task
async def support(ctx: Context, question: str) -> str:
    result = await runner.run(desk, question)
    return str(result.final_output)

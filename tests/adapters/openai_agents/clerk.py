"""An agent of the OpenAI Agents SDK, as a worker process runs it: it looks at two accounts, then pays."""

from __future__ import annotations

from typing import Any

from agents import Agent, function_tool, set_tracing_disabled
from perdure import App, Context
from perdure.integrations.openai_agents import PerdureRunner

from tests.adapters.openai_agents.scripted import Script
from tests.adapters.support.journal import note, note_async

set_tracing_disabled(True)
app = App("clerk")


class NotedScript(Script):
    def output(self, given: Any) -> list[Any]:
        note("model")
        return super().output(given)


@function_tool
async def look(account: str) -> int:
    """Return the balance of an account."""
    await note_async(f"look {account}")
    return 5


@function_tool(needs_approval=True)
async def pay(amount: int) -> str:
    """Pay."""
    await note_async("pay")
    return f"{amount} euros"


script = NotedScript([("look", {"account": "a"}), ("look", {"account": "b"})], [("pay", {"amount": 3})])
agent = Agent("clerk", model=script, tools=[look, pay])
runner = PerdureRunner(require=True)


@app.task
async def settle(ctx: Context, question: str) -> dict[str, Any]:
    result = await runner.run(agent, question)
    usage = result.context_wrapper.usage
    return {"output": result.final_output, "requests": usage.requests, "tokens": usage.total_tokens}

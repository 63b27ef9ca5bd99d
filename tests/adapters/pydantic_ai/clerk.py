"""An agent of Pydantic AI with a scripted model, as a worker process runs it: it looks at two accounts, then pays."""

from __future__ import annotations

from typing import Any

from perdure import App, Context
from perdure.integrations.pydantic_ai import PerdureDurability
from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from tests.adapters.support.journal import note, note_async

app = App("clerk")


def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Answer by what the conversation has: this process may be another one than that of the first answer."""
    del info
    asked = sum(isinstance(message, ModelResponse) for message in messages)
    note("model")
    parts: list[Any] = [
        [ToolCallPart("look", {"account": "a"}), ToolCallPart("look", {"account": "b"})],
        [ToolCallPart("pay", {"amount": 3})],
        [TextPart("Paid.")],
    ][asked]
    return ModelResponse(parts=parts, usage=RequestUsage(input_tokens=10, output_tokens=5))


agent = Agent(FunctionModel(respond), name="clerk", capabilities=[PerdureDurability(require=True)])


@agent.tool_plain
async def look(account: str) -> int:
    """Return the balance of an account."""
    await note_async(f"look {account}")
    return 5


@agent.tool_plain(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay."""
    await note_async("pay")
    return f"{amount} euros"


@app.task
async def settle(ctx: Context, question: str) -> dict[str, Any]:
    result = await agent.run(question)
    usage = result.usage
    return {"output": result.output, "requests": usage.requests, "tools": usage.tool_calls}

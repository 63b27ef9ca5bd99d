"""Agents of Pydantic AI in tasks, in one process: what their steps record, and what a later run makes of that."""

from __future__ import annotations

from collections import Counter
from typing import Any

from perdure import App, Context, Retry, current_step
from perdure.integrations.pydantic_ai import PerdureDurability
from perdure.testing import PerdureFixture
from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.toolsets import FunctionToolset
from pydantic_ai.usage import RequestUsage


class Script:
    """A model that calls tools, then answers with their results; it counts its requests.

    calls: for each request, the tools to call: name, and arguments.
    """

    def __init__(self, *calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.calls = calls
        self.counts: Counter[str] = Counter()

    @property
    def model(self) -> FunctionModel:
        return FunctionModel(self.respond)

    def respond(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        del info
        self.counts["model"] += 1
        asked = sum(isinstance(message, ModelResponse) for message in messages)
        usage = RequestUsage(input_tokens=10, output_tokens=5)
        if asked < len(self.calls):
            parts = [
                ToolCallPart(name, arguments, tool_call_id=f"call-{asked}-{number}")
                for number, (name, arguments) in enumerate(self.calls[asked])
            ]
            return ModelResponse(parts=parts, usage=usage)
        return ModelResponse(parts=[TextPart(" ".join(tool_results(messages)) or "done")], usage=usage)


def tool_results(messages: list[ModelMessage]) -> list[str]:
    return [
        str(part.content)
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    ]


class Broken(Exception):
    """Fails the first attempts of a handler, after its agent has run."""


async def test_a_second_attempt_repeats_no_request_and_no_tool_call(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"}), ("look", {"city": "Oslo"})], [("pay", {"amount": 3})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability(require=True)])

    @agent.tool_plain
    async def look(city: str) -> str:
        script.counts[f"look {city}"] += 1
        return f"{city} is sunny."

    @agent.tool_plain
    def pay(amount: int) -> dict[str, int]:
        script.counts["pay"] += 1
        return {"paid": amount}

    app = App("agents")

    @app.task(retry=Retry(max_attempts=3, base=0.01))
    async def run(ctx: Context, question: str) -> dict[str, Any]:
        result = await agent.run(question)
        if ctx.attempt < 3:
            raise Broken
        usage = result.usage
        return {"output": result.output, "requests": usage.requests, "tokens": usage.total_tokens, "id": result.run_id}

    async with app:
        handle = await run.enqueue("Pay.")
        await perdure.run_until_idle(app, wait_due=True)
        found = await handle.result()
    assert found["output"] == "Rome is sunny. Oslo is sunny. {'paid': 3}"
    assert (found["requests"], found["tokens"]) == (3, 45)
    assert found["id"] == f"{handle.id}:1"
    assert script.counts == {"model": 3, "look Rome": 1, "look Oslo": 1, "pay": 1}


async def test_the_steps_have_the_names_of_tools_and_ids_of_calls(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"})])
    tools: FunctionToolset[None] = FunctionToolset(id="maps")

    @tools.tool_plain
    def look(city: str) -> str:
        return f"{current_step().idempotency_key.partition(':')[2]} for {city}"

    agent = Agent(script.model, name="clerk", toolsets=[tools], capabilities=[PerdureDurability()])
    app = App("agents")

    @app.task
    async def run(ctx: Context) -> str:
        return (await agent.run("Look.")).output

    async with app:
        handle = await run.enqueue()
        await perdure.run_until_idle(app)
        assert await handle.result() == "clerk/look#:call-0-0 for Rome"
        events = [event async for event in handle.events(follow=False)]
    called = next(event for event in events if event.type == "tool_called")
    assert called.data["tool"] == "look"
    assert called.data["arguments"] == {"city": "Rome"}
    assert called.data["call"] == "call-0-0"

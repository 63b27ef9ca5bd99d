"""Agents of the OpenAI Agents SDK in tasks, in one process: what is recorded, and what a later run makes of that."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from agents import (
    Agent,
    CustomTool,
    FunctionTool,
    GuardrailFunctionOutput,
    ItemHelpers,
    LocalShellTool,
    MaxTurnsExceeded,
    Model,
    ModelProvider,
    RunConfig,
    RunContextWrapper,
    Runner,
    ToolOutputImage,
    function_tool,
    handoff,
    input_guardrail,
)
from agents.mcp import MCPServer
from agents.tool_context import ToolContext
from mcp.types import CallToolResult, TextContent, Tool
from perdure import App, Budget, Context, Retry, TaskHandle
from perdure.integrations.openai_agents import PerdureRunner, ToolApproval
from perdure.queues import State
from perdure.queues.errors import ConfigurationError
from perdure.testing import PerdureFixture
from perdure.worker.errors import StepOutsideTask
from pydantic import BaseModel

from tests.adapters.openai_agents.scripted import Script


class Broken(Exception):
    """Fails the first attempts of a handler, after its agent has run."""


def attempts_of(run: Callable[[Context], Awaitable[Any]], *, attempts: int = 2, **options: Any) -> tuple[App, Any]:
    """Return an app and its task, whose handler fails after `run` in all attempts but the last."""
    app = App("agents")

    @app.task(name="run", retry=Retry(max_attempts=attempts, base=0.01), **options)
    async def handler(ctx: Context) -> Any:
        result = await run(ctx)
        if ctx.attempt < attempts:
            raise Broken
        return result

    return app, handler


async def finish(perdure: PerdureFixture, app: App, task: Any) -> Any:
    """Enqueue the task, run it to its end, and return its result."""
    async with app:
        handle = await task.enqueue()
        await perdure.run_until_idle(app, wait_due=True)
        return await handle.result()


async def open_waits(perdure: PerdureFixture, app: App, handle: TaskHandle[Any]) -> dict[str, Any]:
    """Run until the task waits; return what its waits show, by their names."""
    await perdure.run_until_idle(app, wait_due=True)
    assert await handle.status() is State.WAITING
    return {wait.id if "#" in wait.id else f"{wait.id}#1": wait.shown for wait in await handle.waits()}


async def test_a_second_attempt_repeats_no_request_and_no_tool_call(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"}), ("look", {"city": "Oslo"})], [("pay", {"amount": 3})])

    @function_tool
    async def look(city: str) -> str:
        script.counts[f"look {city}"] += 1
        return f"{city} is sunny."

    @function_tool
    def pay(amount: int) -> dict[str, int]:
        script.counts["pay"] += 1
        return {"paid": amount}

    agent = Agent("clerk", model=script, tools=[look, pay])
    runner = PerdureRunner(require=True)

    async def run(ctx: Context) -> dict[str, Any]:
        result = await runner.run(agent, "Pay.")
        usage = result.context_wrapper.usage
        return {"output": result.final_output, "requests": usage.requests, "tokens": usage.total_tokens}

    found = await finish(perdure, *attempts_of(run, attempts=3))
    assert found == {"output": "Rome is sunny. Oslo is sunny. {'paid': 3}", "requests": 3, "tokens": 45}
    assert script.counts == {"model": 3, "look Rome": 1, "look Oslo": 1, "pay": 1}


async def test_the_log_has_the_tools_and_the_ids_of_their_calls(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"})])

    @function_tool
    def look(city: str) -> str:
        return city

    agent = Agent("clerk", model=script, tools=[look])

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Look.")).final_output)

    app, task = attempts_of(run, attempts=1)
    async with app:
        handle = await task.enqueue()
        await perdure.run_until_idle(app)
        events = [event async for event in handle.events(follow=False)]
    called = next(event for event in events if event.type == "tool_called")
    assert called.data["tool"] == "look"
    assert called.data["arguments"] == {"arguments": {"city": "Rome"}}
    assert called.data["call"] == "call-0-0"
    assert called.data["step"] == "clerk/look#:call-0-0"


# approvals


async def test_approvals_are_asked_at_once_and_their_answers_used_once(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 900}), ("pay", {"amount": 7})])

    @function_tool(needs_approval=True)
    def pay(amount: int) -> str:
        script.counts[f"pay {amount}"] += 1
        return f"paid {amount}"

    agent = Agent("clerk", model=script, tools=[pay])

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner(who="finance").run(agent, "Pay.")).final_output)

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        shown = await open_waits(perdure, app, handle)
        assert shown["approve-pay#1"] == {"agent": "clerk", "tool": "pay", "arguments": {"amount": 900}}
        await handle.answer("approve-pay#1", ToolApproval(approved=True), by="ada")
        await handle.answer("approve-pay#2", {"approved": False, "message": "too small"}, by="ada")
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "paid 900 too small"
    assert script.counts == {"model": 2, "pay 900": 1}


async def test_an_approval_that_does_not_come_in_time_is_refused(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 900})])

    @function_tool(needs_approval=True)
    def pay(amount: int) -> str:
        raise AssertionError(amount)

    agent = Agent("clerk", model=script, tools=[pay])

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner(wait_timeout=0.05).run(agent, "Pay.")).final_output)

    assert await finish(perdure, *attempts_of(run)) == "The call was not approved in time."


async def test_a_policy_decides_about_approvals_as_the_sdk_has_it(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 900}), ("pay", {"amount": 7}), ("pay", {})])

    async def is_large(context: Any, arguments: dict[str, Any], call_id: str) -> bool:
        return int(arguments.get("amount", 0)) > 100

    @function_tool(needs_approval=is_large, strict_mode=False)
    def pay(amount: int = 500) -> str:
        script.counts[f"pay {amount}"] += 1
        return f"paid {amount}"

    agent = Agent("clerk", model=script, tools=[pay])
    plain = await Runner.run(agent, "Pay.")
    script.counts.clear()

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Pay.")).final_output)

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        shown = await open_waits(perdure, app, handle)
        asked = [json.loads(item.raw_item.arguments) for item in plain.interruptions]
        assert [value["arguments"] for value in shown.values()] == asked == [{"amount": 900}, {}]
        for wait in shown:
            await handle.answer(wait, {"approved": True})
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "paid 7 paid 900 paid 500"


async def test_a_runner_without_waits_returns_the_interruptions(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 1})])

    @function_tool(needs_approval=True)
    def pay(amount: int) -> str:
        script.counts["pay"] += 1
        return f"paid {amount}"

    agent = Agent("clerk", model=script, tools=[pay])
    runner = PerdureRunner(waits=False)

    async def run(ctx: Context) -> str:
        result = await runner.run(agent, "Pay.")
        state = result.to_state()
        if await ctx.wait_for("payment", bool):
            state.approve(result.interruptions[0])
        return str((await runner.run(agent, state)).final_output)

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        await open_waits(perdure, app, handle)
        await handle.answer("payment", True)
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "paid 1"
    assert script.counts == {"model": 2, "pay": 1}


# tools


class Report(BaseModel):
    title: str


async def test_results_of_tools_reach_the_model_as_the_sdk_sends_them(perdure: PerdureFixture) -> None:
    calls = [(name, {}) for name in ("text", "number", "rows", "report", "image", "failing", "custom_object")]
    script = Script(calls)

    @function_tool
    def text() -> str:
        return "text"

    @function_tool
    def number() -> int:
        return 7

    @function_tool
    def rows() -> list[dict[str, int]]:
        return [{"a": 1}]

    @function_tool
    def report() -> Report:
        return Report(title="On fish")

    @function_tool
    def image() -> ToolOutputImage:
        return ToolOutputImage(image_url="data:image/png;base64,aGVq")

    @function_tool
    def failing() -> str:
        script.counts["failing"] += 1
        raise ValueError("no such file")

    @function_tool
    def custom_object() -> Any:
        return Thing()

    agent = Agent("clerk", model=script, tools=[text, number, rows, report, image, failing, custom_object])
    plain = await Runner.run(agent, "Go.")
    outputs = [item["output"] for item in script.inputs[-1] if item.get("type") == "function_call_output"]
    script.inputs.clear()
    script.counts.clear()

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Go.")).final_output)

    assert await finish(perdure, *attempts_of(run)) == plain.final_output
    sent = [item["output"] for item in script.inputs[-1] if item.get("type") == "function_call_output"]
    assert sent == outputs
    assert outputs[3] == "title='On fish'"
    assert script.counts == {"model": 2, "failing": 1}


class Thing:
    def __str__(self) -> str:
        return "a thing"


async def test_a_time_out_of_a_tool_is_recorded(perdure: PerdureFixture) -> None:
    script = Script([("slow", {})])

    @function_tool(timeout=0.05)
    async def slow() -> str:
        script.counts["slow"] += 1
        await asyncio.Event().wait()
        return ""

    agent = Agent("clerk", model=script, tools=[slow])

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Go.")).final_output)

    assert "timed out" in await finish(perdure, *attempts_of(run))
    assert script.counts == {"model": 2, "slow": 1}


async def test_a_tool_has_the_options_of_its_step(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])

    @function_tool(failure_error_function=None)
    def look() -> str:
        script.counts["look"] += 1
        if script.counts["look"] < 3:
            raise OSError("unreachable")
        return "sunny"

    agent = Agent("clerk", model=script, tools=[look])
    runner = PerdureRunner(tool_options={"look": {"retry": Retry(max_attempts=3, base=0.01)}})

    async def run(ctx: Context) -> str:
        return str((await runner.run(agent, "Go.")).final_output)

    assert await finish(perdure, *attempts_of(run)) == "sunny"
    assert script.counts == {"model": 2, "look": 3}


async def test_the_context_of_the_sdk_reaches_the_tool(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])

    @function_tool
    def look(wrapper: RunContextWrapper[dict[str, str]]) -> str:
        return wrapper.context["city"]

    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        return f"{context.tool_call_id}"

    raw = FunctionTool("raw", "", {"type": "object", "properties": {}}, invoke)
    agent = Agent("clerk", model=Script([("look", {}), ("raw", {})], counts=script.counts), tools=[look, raw])

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Go.", context={"city": "Rome"})).final_output)

    assert await finish(perdure, *attempts_of(run)) == "Rome call-0-1"


async def test_a_tool_that_acts_on_this_machine_is_refused(perdure: PerdureFixture) -> None:
    agent = Agent("clerk", model=Script(), tools=[LocalShellTool(executor=lambda request: "")])

    async def run(ctx: Context) -> str:
        with pytest.raises(ConfigurationError, match="is a LocalShellTool, which acts outside a step"):
            await PerdureRunner().run(agent, "Go.")
        return "refused"

    assert await finish(perdure, *attempts_of(run)) == "refused"


async def test_a_recorded_response_is_read_as_the_one_that_was_recorded(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])
    agent = Agent("clerk", model=script, tools=[function_tool(lambda: "sunny", name_override="look")])
    outputs: list[Any] = []

    async def run(ctx: Context) -> None:
        result = await PerdureRunner().run(agent, "Go.")
        outputs.append([item.model_dump(exclude_unset=True) for item in result.raw_responses[0].output])

    await finish(perdure, *attempts_of(run))
    plain = await Runner.run(agent, "Go.")
    outputs.append([item.model_dump(exclude_unset=True) for item in plain.raw_responses[0].output])
    assert outputs[0] == outputs[1] == outputs[2]


# several agents


async def test_handoffs_record_the_steps_of_each_agent(perdure: PerdureFixture) -> None:
    counts = Script().counts
    noted: list[str] = []

    @function_tool
    def look() -> str:
        counts["look"] += 1
        return "sunny"

    writer = Agent("writer", model=Script([("look", {})], counts=counts), tools=[look])
    noted_handoff = handoff(writer, on_handoff=lambda context: noted.append("handoff"))
    triage = Agent("triage", model=Script([("transfer_to_writer", {})], counts=counts), handoffs=[noted_handoff])
    writer.handoffs.append(triage)

    async def run(ctx: Context) -> str:
        result = await PerdureRunner().run(triage, "Go.")
        assert result.last_agent.name == "writer"
        return str(result.final_output)

    # the writer finds the call of the triage in the input, and answers with its output and nothing else
    output = await finish(perdure, *attempts_of(run))
    assert "writer" in output
    assert noted == ["handoff"]
    assert counts["model"] == 2


@pytest.mark.parametrize("durable", [True, False])
async def test_an_agent_as_a_tool(perdure: PerdureFixture, durable: bool) -> None:
    inner_script, outer_script = Script([("look", {})]), Script([("ask", {"input": "Look."})])
    runner = PerdureRunner()

    @function_tool
    def look() -> str:
        inner_script.counts["look"] += 1
        return "sunny"

    inner = Agent("inner", model=inner_script, tools=[look])
    asked = (runner.durable(inner) if durable else inner).as_tool("ask", "Ask.")
    outer = Agent("outer", model=outer_script, tools=[asked])

    async def run(ctx: Context) -> str:
        return str((await runner.run(outer, "Go.")).final_output)

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "sunny"
        events = [event async for event in handle.events(follow=False)]
    assert inner_script.counts == {"model": 2, "look": 1}
    assert outer_script.counts == {"model": 2}
    calls = {event.data["step"] for event in events if event.type == "tool_called"}
    assert calls == ({"inner/look#:call-0-0"} if durable else {"outer/ask#:call-0-0"})


async def test_models_by_name_come_from_the_provider_of_the_run(perdure: PerdureFixture) -> None:
    script = Script()

    class Provider(ModelProvider):
        def get_model(self, model_name: str | None) -> Model:
            script.counts[str(model_name)] += 1
            return script

    named, default = Agent("clerk", model="named"), Agent("other")

    async def run(ctx: Context) -> str:
        config = RunConfig(model_provider=Provider())
        await PerdureRunner().run(named, "Go.", run_config=config)
        await PerdureRunner().run(default, "Go.", run_config=config)
        config = RunConfig(model_provider=Provider(), model="another")
        return str((await PerdureRunner().run(named, "Go on.", run_config=config)).final_output)

    assert await finish(perdure, *attempts_of(run)) == "done"
    assert script.counts["model"] == 3
    assert {"named", "None", "another"} <= script.counts.keys()


async def test_a_guardrail_with_an_agent_asks_its_model_once(perdure: PerdureFixture) -> None:
    checking, script = Script(), Script()
    runner = PerdureRunner()
    checker = Agent("checker", model=checking)

    @input_guardrail
    async def check(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        await runner.run(checker, "Is this a question?")
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    agent = Agent("clerk", model=script, input_guardrails=[check])

    async def run(ctx: Context) -> str:
        return str((await runner.run(agent, "Go.")).final_output)

    assert await finish(perdure, *attempts_of(run)) == "done"
    assert (checking.counts["model"], script.counts["model"]) == (1, 1)


class Maps(MCPServer):
    """An MCP server in this process."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.calls = calls

    @property
    def name(self) -> str:
        return "maps"

    async def connect(self) -> None: ...

    async def cleanup(self) -> None: ...

    async def list_tools(self, *args: Any, **kwargs: Any) -> list[Tool]:
        self.calls["list"] += 1
        return [Tool(name="look", inputSchema={"type": "object", "properties": {"city": {"type": "string"}}})]

    async def call_tool(self, tool_name: str, arguments: Any, *args: Any, **kwargs: Any) -> CallToolResult:
        self.calls[tool_name] += 1
        return CallToolResult(content=[TextContent(type="text", text=f"{arguments['city']} is sunny")])

    async def list_prompts(self) -> Any: ...

    async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...


async def test_tools_of_an_mcp_server_are_discovered_and_called_in_steps(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"})])
    agent = Agent("clerk", model=script, mcp_servers=[Maps(script.counts)])

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Go.")).final_output)

    assert "Rome is sunny" in await finish(perdure, *attempts_of(run))
    assert script.counts == {"model": 2, "list": 2, "look": 1}


# events


async def test_the_stream_of_the_task_has_each_event_once(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"})])

    @function_tool
    def look(city: str) -> str:
        return f"{city} is sunny."

    agent = Agent("clerk", model=script, tools=[look])
    runner = PerdureRunner(emit_to="agent")

    async def run(ctx: Context) -> str:
        return str((await runner.run(agent, "Look.")).final_output)

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "Rome is sunny."
        values = [item.value async for item in handle.stream("agent") if item.kind == "item"]
    assert [value["name"] for value in values if value["type"] == "run_item"] == [
        "tool_called",
        "tool_output",
        "message_output_created",
    ]
    deltas = [value["delta"] for value in values if value["type"] == "response.output_text.delta"]
    assert deltas == ["Rome ", "is ", "sunny. "]
    assert script.counts == {"model": 2}


async def test_a_streamed_run_yields_deltas_once_and_its_end_always(perdure: PerdureFixture) -> None:
    script = Script()
    agent = Agent("clerk", model=script)
    seen: list[list[str]] = []

    async def run(ctx: Context) -> str:
        streamed = PerdureRunner().run_streamed(agent, "Hello.")
        kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
        seen.append(kinds)
        return ItemHelpers.text_message_outputs(streamed.new_items)

    assert await finish(perdure, *attempts_of(run)) == "done"
    assert seen == [["response.output_text.delta", "response.completed"], ["response.completed"]]
    assert script.counts == {"model": 1}


# outside a task, limits, changes


async def test_outside_a_task_it_is_warned_of_once_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent("lone", model=Script())
    with caplog.at_level(logging.WARNING, logger="perdure"):
        for _ in range(2):
            assert (await PerdureRunner().run(agent, "Hello.")).final_output == "done"
    assert [record.getMessage() for record in caplog.records] == [
        "agent 'lone' runs outside a task: it is not durable; run it in an async function with @app.task"
    ]
    with pytest.raises(StepOutsideTask, match="agent 'lone' was run outside a task, where nothing is recorded"):
        await PerdureRunner(require=True).run(agent, "Hello.")


async def test_instructions_that_differ_in_each_run_ask_the_model_once(perdure: PerdureFixture) -> None:
    script, number = Script(), iter(range(100))
    agent = Agent("clerk", model=script, instructions=lambda context, agent: f"run {next(number)}")

    async def run(ctx: Context) -> str:
        return str((await PerdureRunner().run(agent, "Hello.")).final_output)

    assert await finish(perdure, *attempts_of(run, attempts=3)) == "done"
    assert script.counts == {"model": 1}


async def test_concurrent_runs_of_one_agent_stay_apart(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])
    answers: dict[str, str] = {}
    number = itertools.count(1)

    @function_tool
    def look(wrapper: RunContextWrapper[str]) -> str:  # in a thread, so the runs come in any order
        letter = wrapper.context[-1]
        answers[letter] = f"{letter}{next(number)}"
        return answers[letter]

    agent = Agent("clerk", model=script, tools=[look])
    runner = PerdureRunner()

    async def run(ctx: Context) -> list[str]:
        prompts = [f"{'x' * 100}{letter}" for letter in "abc"]
        order = prompts if ctx.attempt == 1 else prompts[::-1]

        async def one(prompt: str) -> str:
            with ctx.scope(prompt[-1]):
                return str((await runner.run(agent, prompt, context=prompt)).final_output)

        results = dict(zip(order, await asyncio.gather(*map(one, order)), strict=True))
        return [results[prompt] for prompt in prompts]

    assert await finish(perdure, *attempts_of(run)) == [answers[letter] for letter in "abc"]
    assert next(number) == 4, "the tool was called again"
    assert script.counts == {"model": 6}


async def test_a_budget_counts_the_tokens_of_each_response_once(perdure: PerdureFixture) -> None:
    agent = Agent("clerk", model=Script())

    async def run(ctx: Context) -> int:
        await PerdureRunner().run(agent, "Hello.")
        await PerdureRunner(emit_to="agent").run(agent, "Hello again.")
        left = (await ctx.budget()).tokens
        assert left is not None
        return int(left)

    assert await finish(perdure, *attempts_of(run, attempts=3, budget=Budget(tokens=1000))) == 970


async def test_a_limit_of_turns_is_the_same_in_each_run(perdure: PerdureFixture) -> None:
    script = Script([("look", {})], [("look", {})])

    @function_tool
    def look() -> str:
        script.counts["look"] += 1
        return "sunny"

    agent = Agent("clerk", model=script, tools=[look])

    async def run(ctx: Context) -> str:
        with pytest.raises(MaxTurnsExceeded):
            await PerdureRunner().run(agent, "Go.", max_turns=2)
        return "limited"

    assert await finish(perdure, *attempts_of(run)) == "limited"
    assert script.counts == {"model": 2, "look": 2}


async def test_a_custom_tool_is_a_step(perdure: PerdureFixture) -> None:
    counts: list[str] = []

    async def invoke(context: ToolContext[Any], text: str) -> str:
        counts.append(text)
        return f"ran {text}"

    tool = CustomTool("shout", "Shout.", invoke)
    runner = PerdureRunner()
    agent = Agent("clerk", model=Script(), tools=[tool])

    async def run(ctx: Context) -> str:
        (copy,) = runner.durable(agent).tools
        assert isinstance(copy, CustomTool)
        context = ToolContext(None, tool_name="shout", tool_call_id="call-1", tool_arguments="hej")
        return str(await copy.on_invoke_tool(context, "hej"))

    assert await finish(perdure, *attempts_of(run)) == "ran hej"
    assert counts == ["hej"]

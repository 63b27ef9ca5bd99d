"""Agents of Pydantic AI in tasks, in one process: what their steps record, and what a later run makes of that."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from perdure import App, Budget, Context, Retry, TaskHandle, current_step
from perdure.integrations.pydantic_ai import PerdureDurability, ToolDecision
from perdure.queues import State
from perdure.testing import PerdureFixture
from perdure.worker.errors import StepOutsideTask
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext, UsageLimits
from pydantic_ai.capabilities import AbstractCapability, RequestInput, durable_operation
from pydantic_ai.exceptions import CallDeferred, ToolFailed, UsageLimitExceeded, UserError
from pydantic_ai.messages import AgentStreamEvent, ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import DeferredToolRequests, ToolDefinition
from pydantic_ai.toolsets import ExternalToolset, FunctionToolset

from tests.adapters.pydantic_ai.scripted import Script


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


def attempts_of(
    run: Callable[[Context], Awaitable[Any]], *, attempts: int = 2, app: App | None = None, **options: Any
) -> tuple[App, Any]:
    """Return an app and its task, whose handler fails after `run` in all attempts but the last."""
    app = app or App("agents")

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


# approvals and external tools


async def test_an_approval_is_asked_once_and_may_change_the_arguments(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 900}), ("pay", {"amount": 7})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability(who="finance")])

    @agent.tool_plain(requires_approval=True)
    def pay(amount: int) -> str:
        script.counts[f"pay {amount}"] += 1
        return f"paid {amount}"

    async def run(ctx: Context) -> str:
        return (await agent.run("Pay.")).output

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        shown = await open_waits(perdure, app, handle)
        assert sorted(shown) == ["approve-pay#1", "approve-pay#2"]
        by_amount = {value["arguments"]["amount"]: wait for wait, value in shown.items()}
        await handle.answer(by_amount[900], ToolDecision(approved=True, arguments={"amount": 90}), by="ada")
        await handle.answer(by_amount[7], {"approved": False, "message": "too small"}, by="ada")
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "paid 90 too small"
    assert script.counts == {"model": 2, "pay 90": 1}


async def test_an_approval_that_does_not_come_in_time_is_refused(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 1})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability(wait_timeout=0.05)])

    @agent.tool_plain(requires_approval=True)
    def pay(amount: int) -> str:
        raise AssertionError(amount)

    async def run(ctx: Context) -> str:
        return (await agent.run("Pay.")).output

    assert await finish(perdure, *attempts_of(run)) == "The call was not approved in time."


async def test_an_external_tool_and_a_deferred_call_wait_for_their_results(perdure: PerdureFixture) -> None:
    script = Script([("scan", {"page": 4}), ("ocr", {"page": 4})])
    external = ToolDefinition(name="scan", parameters_json_schema={"type": "object", "properties": {"page": {}}})
    agent = Agent(
        script.model,
        name="clerk",
        toolsets=[ExternalToolset([external], id="scanner")],
        capabilities=[PerdureDurability()],
    )

    @agent.tool_plain
    async def ocr(page: int) -> str:
        script.counts["ocr"] += 1
        raise CallDeferred(metadata={"job": page})

    async def run(ctx: Context) -> str:
        return (await agent.run("Scan.")).output

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        shown = await open_waits(perdure, app, handle)
        assert shown["ocr#1"] == {"tool": "ocr", "arguments": {"page": 4}, "metadata": {"job": 4}}
        await handle.answer("scan", "a scan")
        await handle.answer("ocr", {"text": "a text"})
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "a scan {'text': 'a text'}"
    assert script.counts == {"model": 2, "ocr": 1}


async def test_an_agent_without_waits_ends_with_the_deferred_calls(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 1})])
    agent = Agent(
        script.model,
        name="clerk",
        output_type=[str, DeferredToolRequests],
        capabilities=[PerdureDurability(waits=False)],
    )

    @agent.tool_plain(requires_approval=True)
    def pay(amount: int) -> str:
        script.counts["pay"] += 1
        return f"paid {amount}"

    async def run(ctx: Context) -> str:
        result = await agent.run("Pay.")
        assert isinstance(result.output, DeferredToolRequests)
        decision = await ctx.wait_for("payment", bool)
        answers = result.output.build_results(approvals={result.output.approvals[0].tool_call_id: decision})
        again = await agent.run(message_history=result.all_messages(), deferred_tool_results=answers)
        return str(again.output)

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        await open_waits(perdure, app, handle)
        await handle.answer("payment", True)
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "paid 1"
    assert script.counts == {"model": 2, "pay": 1}


@pytest.mark.parametrize("at_once", [True, False])
async def test_request_input_asks_once_and_its_token_takes_the_answer(perdure: PerdureFixture, at_once: bool) -> None:
    script = Script([("pay", {"amount": 1})])
    tokens: list[str] = []

    async def ask(ctx: RunContext[None], requests: DeferredToolRequests, token: str) -> Any:
        tokens.append(token)
        return requests.build_results(approve_all=True) if at_once else None

    agent = Agent(script.model, name="clerk", capabilities=[RequestInput(ask), PerdureDurability(waits=False)])

    @agent.tool_plain(requires_approval=True)
    def pay(amount: int) -> str:
        script.counts["pay"] += 1
        return f"paid {amount}"

    async def run(ctx: Context) -> str:
        output = (await agent.run("Pay.")).output
        await ctx.wait_for("more")
        return output

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        if not at_once:
            assert list(await open_waits(perdure, app, handle)) == ["deferred_tool_calls#1"]
            await app.answer(tokens[0], {"approvals": {"call-0-0": True}}, by="ada")
        assert list(await open_waits(perdure, app, handle)) == ["more#1"]
        await handle.answer("more", None)
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.result() == "paid 1"
    assert len(tokens) == 1
    assert script.counts == {"model": 2, "pay": 1}


async def test_request_input_without_an_answer_in_time_denies_the_call(perdure: PerdureFixture) -> None:
    script = Script([("pay", {"amount": 1})])
    capability = RequestInput(lambda ctx, requests, token: None, timeout=timedelta(seconds=0.05))
    agent = Agent(script.model, name="clerk", capabilities=[capability, PerdureDurability(waits=False)])

    @agent.tool_plain(requires_approval=True)
    def pay(amount: int) -> str:
        raise AssertionError(amount)

    async def run(ctx: Context) -> str:
        return (await agent.run("Pay.")).output

    assert "No decision on this tool call arrived" in await finish(perdure, *attempts_of(run))


# results and errors of tools


async def test_retries_and_failures_of_tools_are_recorded_as_the_model_sees_them(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rom"})], [("look", {"city": "Rome"}), ("close", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain
    def look(city: str) -> str:
        script.counts[f"look {city}"] += 1
        if city == "Rom":
            raise ModelRetry("no such city")
        return "sunny"

    @agent.tool_plain
    def close() -> str:
        script.counts["close"] += 1
        raise ToolFailed("closed already")

    async def run(ctx: Context) -> str:
        return (await agent.run("Look.")).output

    assert await finish(perdure, *attempts_of(run, attempts=3)) == "no such city sunny closed already"
    assert script.counts == {"model": 3, "look Rom": 1, "look Rome": 1, "close": 1}


async def test_a_tool_that_raises_fails_the_attempt_and_is_called_again_in_the_next(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain
    def look(city: str) -> str:
        script.counts["look"] += 1
        if script.counts["look"] < 3:
            raise OSError("unreachable")
        return "sunny"

    app = App("agents")

    @app.task(retry=Retry(max_attempts=3, base=0.01))
    async def run(ctx: Context) -> str:
        return (await agent.run("Look.")).output

    assert await finish(perdure, app, run) == "sunny"
    assert script.counts == {"model": 2, "look": 3}


async def test_a_tool_has_the_options_of_its_metadata(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"}), ("clock", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain(metadata={"perdure": {"retry": Retry(max_attempts=3, base=0.01)}})
    def look(city: str) -> str:
        script.counts["look"] += 1
        if script.counts["look"] < 3:
            raise OSError("unreachable")
        return f"try {current_step().attempt}"

    @agent.tool_plain(metadata={"perdure": False})
    def clock() -> str:
        script.counts["clock"] += 1
        return "noon"

    async def run(ctx: Context) -> str:
        return (await agent.run("Look.")).output

    assert await finish(perdure, *attempts_of(run)) == "try 3 noon"
    assert script.counts == {"model": 2, "look": 3, "clock": 2}


class Report(BaseModel):
    title: str
    pages: list[int]


@dataclass
class Deps:
    prefix: str


async def test_typed_results_output_and_dependencies_survive(perdure: PerdureFixture) -> None:
    script = Script([("draft", {"title": "Fish"})], [("final_result", {"title": "Fish", "pages": [1]})])
    agent = Agent(script.model, name="clerk", deps_type=Deps, output_type=Report, capabilities=[PerdureDurability()])

    @agent.tool
    def draft(ctx: RunContext[Deps], title: str) -> Report:
        script.counts["draft"] += 1
        return Report(title=f"{ctx.deps.prefix} {title}", pages=[1, 2])

    async def run(ctx: Context) -> dict[str, Any]:
        result = await agent.run("Draft.", deps=Deps("On"))
        assert isinstance(result.output, Report)
        return result.output.model_dump()

    assert await finish(perdure, *attempts_of(run)) == {"title": "Fish", "pages": [1]}
    assert script.counts == {"model": 2, "draft": 1}


async def test_a_result_without_a_json_form_is_not_retried(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain
    def look() -> Any:
        script.counts["look"] += 1
        return object()

    app = App("agents")

    @app.task(retry=Retry(max_attempts=3, base=0.01))
    async def run(ctx: Context) -> str:
        return (await agent.run("Look.")).output

    async with app:
        handle = await run.enqueue()
        await perdure.run_until_idle(app, wait_due=True, allow_failures=True)
        assert await handle.status() is State.DEAD
    assert script.counts == {"model": 1, "look": 1}


# concurrency


async def test_parallel_calls_keep_their_results_in_another_order(perdure: PerdureFixture) -> None:
    names = ["a", "b", "c", "d"]
    script = Script([("fetch", {"name": name}) for name in names] + [("fetch", {"name": "a"})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])
    started: list[str] = []
    turn = asyncio.Event()

    @agent.tool_plain
    async def fetch(name: str) -> str:
        started.append(name)
        number = len(started)
        if number == len(names) + 1:
            turn.set()
        await turn.wait()
        return f"{name}{number}"

    async def run(ctx: Context) -> str:
        return (await agent.run("Fetch.")).output

    assert await finish(perdure, *attempts_of(run)) == "a1 b2 c3 d4 a5"
    assert script.counts["model"] == 2


async def test_concurrent_runs_of_one_agent_stay_apart(perdure: PerdureFixture) -> None:
    answers: dict[str, str] = {}
    number = itertools.count(1)

    def respond(messages: list[ModelMessage], info: AgentInfo) -> Any:  # in a thread, so the runs come in any order
        from pydantic_ai import ModelResponse, TextPart

        letter = str(messages[0].parts[-1].content)[-1]  # type: ignore[union-attr]
        answers[letter] = f"{letter}{next(number)}"
        return ModelResponse(parts=[TextPart(answers[letter])])

    agent = Agent(FunctionModel(respond), name="clerk", capabilities=[PerdureDurability()])

    async def run(ctx: Context) -> list[str]:
        prompts = [f"{'x' * 100}{letter}" for letter in "abc"]
        order = prompts if ctx.attempt == 1 else prompts[::-1]
        results = dict(zip(order, await asyncio.gather(*map(agent.run, order)), strict=True))
        return [results[prompt].output for prompt in prompts]

    assert await finish(perdure, *attempts_of(run)) == [answers[letter] for letter in "abc"]
    assert next(number) == 4, "the model was asked again"


async def test_an_agent_as_a_tool_is_part_of_the_step_or_recorded_within_it(perdure: PerdureFixture) -> None:
    inner_script, outer_script = Script([("look", {})]), Script([("ask", {}), ("ask_again", {})])
    inner = Agent(inner_script.model, name="inner", capabilities=[PerdureDurability(require=True)])
    outer = Agent(outer_script.model, name="outer", capabilities=[PerdureDurability(require=True)])

    @inner.tool_plain
    def look() -> str:
        inner_script.counts["look"] += 1
        return "sunny"

    @outer.tool_plain(metadata={"perdure": {"nested": "record", "retry": Retry(max_attempts=2, base=0.01)}})
    async def ask() -> str:
        found = (await inner.run("Look.")).output
        outer_script.counts["ask"] += 1
        if outer_script.counts["ask"] == 1:
            raise OSError("after the inner agent")
        return found

    @outer.tool_plain
    async def ask_again() -> str:
        return (await inner.run("Look.")).output

    async def run(ctx: Context) -> str:
        return (await outer.run("Ask.")).output

    assert await finish(perdure, *attempts_of(run)) == "sunny sunny"
    assert outer_script.counts == {"model": 2, "ask": 2}
    assert inner_script.counts == {"model": 4, "look": 2}  # of two calls; the first one was tried twice


# what a resumed run may change


async def test_instructions_that_differ_in_each_run_ask_the_model_once(perdure: PerdureFixture) -> None:
    script, number = Script(), iter(range(100))
    agent = Agent(
        script.model, name="clerk", capabilities=[PerdureDurability()], instructions=lambda: f"run {next(number)}"
    )

    @agent.system_prompt
    def prompt() -> str:
        return f"prompt {next(number)}"

    async def run(ctx: Context) -> str:
        return (await agent.run("Hello.")).output

    assert await finish(perdure, *attempts_of(run, attempts=3)) == "done"
    assert script.counts == {"model": 1}


async def test_another_prompt_is_another_request(perdure: PerdureFixture) -> None:
    script = Script()
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    async def run(ctx: Context) -> str:
        return (await agent.run(f"Attempt {ctx.attempt}.")).output

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        await perdure.run_until_idle(app, wait_due=True, allow_failures=True)
        shown = await handle.status()
    assert (shown, script.counts["model"]) == (State.SUCCEEDED, 2)


# events


async def test_the_stream_of_the_task_has_each_event_once(perdure: PerdureFixture) -> None:
    script = Script([("look", {"city": "Rome"})])
    seen: list[str] = []

    async def handler(ctx: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
        seen.extend([event.event_kind async for event in events])

    for user_handler in (None, handler):
        script.counts.clear()
        capability = PerdureDurability(emit_to="agent", event_stream_handler=user_handler)
        agent = Agent(script.model, name="clerk", capabilities=[capability])

        @agent.tool_plain
        def look(city: str) -> str:
            return f"{city} is sunny."

        async def run(ctx: Context, agent: Agent[None, str] = agent) -> str:
            return (await agent.run("Look.")).output

        app, task = attempts_of(run)
        async with app:
            handle = await task.enqueue()
            await perdure.run_until_idle(app, wait_due=True)
            assert await handle.result() == "Rome is sunny. "
            items = [item async for item in handle.stream("agent")]
        kinds = [item.value["event_kind"] for item in items if item.kind == "item"]
        assert [kind for kind in kinds if kind.startswith("function_tool")] == [
            "function_tool_call",
            "function_tool_result",
        ]
        values = [item.value for item in items if item.kind == "item"]
        text = "".join(value["delta"]["content_delta"] for value in values if value["event_kind"] == "part_delta")
        assert text == "is sunny. "
        assert script.counts == {"model": 2}
    assert seen == kinds


@pytest.mark.filterwarnings("error::perdure.worker.resume_warning.ResumeWarning")
async def test_events_of_tools_that_end_in_another_order_are_in_the_stream_once(perdure: PerdureFixture) -> None:
    script = Script([("slow", {}), ("quick", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability(emit_to="agent")])
    ended = asyncio.Event()

    @agent.tool_plain
    async def slow() -> str:
        await ended.wait()
        return "slow"

    @agent.tool_plain
    async def quick() -> str:
        asyncio.get_running_loop().call_later(0.05, ended.set)
        return "quick"

    async def run(ctx: Context) -> str:
        return (await agent.run("Look.")).output

    app, task = attempts_of(run)
    async with app:
        handle = await task.enqueue()
        await perdure.run_until_idle(app, wait_due=True)
        values = [item.value async for item in handle.stream("agent") if item.kind == "item"]
    results = [value["part"]["content"] for value in values if value["event_kind"] == "function_tool_result"]
    assert sorted(results) == ["quick", "slow"]


# outside a task


async def test_outside_a_task_it_is_warned_of_once_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(Script().model, name="lone", capabilities=[PerdureDurability()])
    with caplog.at_level(logging.WARNING, logger="perdure"):
        assert (await agent.run("Hello.")).output == "done"
        assert (await agent.run("Hello.")).output == "done"
    assert [record.getMessage() for record in caplog.records] == [
        "agent 'lone' runs outside a task: it is not durable; run it in an async function with @app.task"
    ]
    strict = Agent(Script().model, name="strict", capabilities=[PerdureDurability(require=True)])
    with pytest.raises(StepOutsideTask, match="agent 'strict' was run outside a task, where nothing is recorded"):
        await strict.run("Hello.")


async def test_a_thread_of_a_task_is_refused(perdure: PerdureFixture) -> None:
    agent = Agent(Script().model, name="clerk", capabilities=[PerdureDurability(require=True)])
    app = App("agents")

    @app.task(retry=Retry(max_attempts=1))
    def run(ctx: Any) -> str:
        with pytest.raises(StepOutsideTask, match="in a plain function or a thread of a task"):
            agent.run_sync("Hello.")
        return "refused"

    assert await finish(perdure, app, run) == "refused"


# refused definitions


async def test_an_agent_needs_a_name() -> None:
    with pytest.raises(UserError, match="unique `name`"):
        Agent(TestModel(), capabilities=[PerdureDurability()])


async def test_a_toolset_needs_an_id() -> None:
    with pytest.raises(UserError, match="unique `id`"):
        Agent(TestModel(), name="clerk", toolsets=[FunctionToolset()], capabilities=[PerdureDurability()])


async def test_a_toolset_or_a_model_of_one_run_is_refused(perdure: PerdureFixture) -> None:
    agent = Agent(Script().model, name="clerk", capabilities=[PerdureDurability(models={"other": Script().model})])

    async def run(ctx: Context) -> str:
        with pytest.raises(UserError, match="Perdure"):
            await agent.run("Hello.", toolsets=[FunctionToolset([print], id="late")])
        with pytest.raises(UserError, match="was not registered"):
            await agent.run("Hello.", model=TestModel())
        return (await agent.run("Hello.", model="other")).output

    assert await finish(perdure, *attempts_of(run)) == "done"


# other operations


class Counted(AbstractCapability[None]):
    """Asks something in an operation of its own before each run."""

    id = "counted"

    def __init__(self) -> None:
        self.asked = 0

    @durable_operation(name="ask")
    async def ask(self, ctx: RunContext[None]) -> int:
        self.asked += 1
        return self.asked

    async def before_run(self, ctx: RunContext[None]) -> None:
        assert await self.ask(ctx) == 1


async def test_an_operation_of_another_capability_is_a_step(perdure: PerdureFixture) -> None:
    counted = Counted()
    agent = Agent(Script().model, name="clerk", capabilities=[counted, PerdureDurability()])

    async def run(ctx: Context) -> str:
        return (await agent.run("Hello.")).output

    assert await finish(perdure, *attempts_of(run)) == "done"
    assert counted.asked == 1


async def test_a_budget_counts_the_tokens_of_each_response_once(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain
    def look() -> str:
        return "sunny"

    async def run(ctx: Context) -> int:
        await agent.run("Look.")
        left = (await ctx.budget()).tokens
        assert left is not None
        return int(left)

    assert await finish(perdure, *attempts_of(run, attempts=3, budget=Budget(tokens=1000))) == 970


async def test_a_limit_of_usage_is_the_same_in_each_run(perdure: PerdureFixture) -> None:
    script = Script([("look", {})], [("look", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain
    def look() -> str:
        script.counts["look"] += 1
        return "sunny"

    async def run(ctx: Context) -> str:
        with pytest.raises(UsageLimitExceeded):
            await agent.run("Look.", usage_limits=UsageLimits(request_limit=2))
        return "limited"

    assert await finish(perdure, *attempts_of(run)) == "limited"
    assert script.counts == {"model": 2, "look": 2}


async def test_iterating_and_streaming_a_run_record_the_same_steps(perdure: PerdureFixture) -> None:
    script = Script([("look", {})])
    agent = Agent(script.model, name="clerk", capabilities=[PerdureDurability()])

    @agent.tool_plain
    def look() -> str:
        script.counts["look"] += 1
        return "sunny"

    async def run(ctx: Context) -> str:
        if ctx.attempt == 1:
            async with agent.iter("Look.") as nodes:
                async for _ in nodes:
                    pass
            assert nodes.result is not None
            return nodes.result.output
        async with agent.run_stream("Look.") as streamed:
            return str(await streamed.get_output()).strip()

    assert await finish(perdure, *attempts_of(run)) == "sunny"
    assert script.counts == {"model": 2, "look": 1}


async def test_the_time_out_of_a_run_counts_from_its_first_start(perdure: PerdureFixture) -> None:
    agent = Agent(Script().model, name="clerk", capabilities=[PerdureDurability()])
    starts: list[Any] = []

    async def run(ctx: Context) -> str:
        capability = PerdureDurability.from_agent(agent)
        assert capability is not None
        starts.append(await capability.get_run_start_time("run"))
        return (await agent.run("Hello.", timeout=60)).output

    assert await finish(perdure, *attempts_of(run)) == "done"
    assert len(starts) == 2
    assert starts[0] == starts[1]

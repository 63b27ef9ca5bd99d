"""Checks of the application, the judge, functions with coherence, and dismissed findings."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Coherence,
    Context,
    ContextBuilder,
    PlanStep,
    Retry,
    State,
    SyncContext,
    TaskHandle,
)
from perdure.worker.agents.coherence import monitor
from perdure.worker.agents.coherence.checks import View
from perdure.worker.agents.coherence.findings import VERDICT, Finding
from perdure.worker.agents.coherence.monitor import CoherenceMonitor

from tests.support.command_line import Answer, call
from tests.support.runs import current_run
from tests.support.workers import bounded, history, letter, recorded_steps, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("judged", grace=0.2)]

ONCE = Retry(max_attempts=1)


async def command(app: App, *args: str) -> Answer:
    where = ("--redis-url", app.settings.redis_url, "--namespace", app.settings.namespace)
    return await anyio.to_thread.run_sync(lambda: call(*args, *where))


async def found(handle: TaskHandle[Any]) -> list[str]:
    return [event.data["check"] for event in await history(handle) if event.type == "incoherent"]


async def until_found(handle: TaskHandle[Any], count: int = 1) -> None:
    async def logged() -> bool:
        return len(await found(handle)) >= count

    await wait_until(logged, "a finding")


# functions


async def test_a_function_that_repeats_a_call_is_parked_and_names_its_goal(app: App) -> None:
    goals: list[str] = []

    def look(view: View) -> None:
        goals.append(view.goal)

    @app.task(coherence=Coherence(repetition="hand_off", checks=(look,)))
    async def job(ctx: Context, root: str) -> str:
        for _ in range(5):
            await ctx.tool("search", len, "same")
        if ctx.resumption is None:
            await asyncio.sleep(60)
        return "done"

    handle = await job.enqueue("src")
    async with running_worker(app):

        async def parked() -> bool:
            return await handle.status() is State.WAITING

        await wait_until(parked, "it is parked")
        await handle.send("continue")
        assert await bounded(handle.result()) == "done"
    assert await found(handle) == ["repetition"]
    assert set(goals) == {'job(root="src")'}


async def test_a_function_without_progress_is_buried_and_steps_are_progress(app: App) -> None:
    @app.task(retry=ONCE, coherence=Coherence(progress="bury", stuck_minutes=0.01))
    async def job(ctx: Context, steps: int) -> None:
        for number in range(steps):
            await ctx.step("work", asyncio.sleep, 0.2)
            assert number < steps
        await asyncio.sleep(60 if steps == 1 else 0)

    stuck, busy = await job.enqueue(1), await job.enqueue(5)
    await work_off(app)
    assert (await letter(app, stuck)).reason == "incoherent"
    await bounded(busy.result())
    assert await found(busy) == []


async def test_a_plain_function_and_a_call_of_another_task_are_checked_once(app: App) -> None:
    @app.task(coherence=Coherence(repeats=2))
    async def inner(ctx: Context) -> str:
        return "inner"

    @app.task(retry=ONCE, coherence=Coherence(repeats=2))
    def job(ctx: Any) -> str:
        for _ in range(3):
            ctx.tool("search", len, "same")
        return "done"

    @app.task
    async def outer(ctx: Context) -> str:
        return await inner(ctx)

    handle, nested = await job.enqueue(), await outer.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert await bounded(nested.result()) == "inner"
    assert await found(handle) in ([], ["repetition"])  # it may end before the check


async def test_a_function_that_calls_tools_is_warned_unless_it_is_switched_off(app: App) -> None:
    """Calls of earlier runs count; what the last call shows is found before the run ends."""

    async def search(ctx: Context) -> None:
        for number in range(5):
            await ctx.tool("search", len, "same")
            if number == 3 and ctx.attempt == 1:
                raise ConnectionError

    again = Retry(max_attempts=2, base=0)
    warned = app.task(name="warned", retry=again)(search)
    silent = app.task(name="silent", retry=again, coherence=None)(search)

    @app.task
    def in_thread(ctx: SyncContext) -> None:
        for _ in range(5):
            ctx.tool("search", len, "same")

    @app.task
    async def steps(ctx: Context) -> None:
        for _ in range(5):
            await ctx.step("search", len, "same")
        assert current_run(ctx).observer(CoherenceMonitor) is None

    handles = [await task.enqueue() for task in (warned, silent, in_thread, steps)]
    await work_off(app)
    await asyncio.gather(*(bounded(handle.result()) for handle in handles))
    assert [await found(handle) for handle in handles] == [["repetition"], [], ["repetition"], []]
    (event,) = [event.data for event in await history(handles[0]) if event.type == "incoherent"]
    assert event["detail"] == 'search({"obj":"same"}) was called 5 times in the last 5 calls'


async def test_a_function_without_progress_after_a_tool_call_is_warned(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "WARNINGS", Coherence(stuck_minutes=0.002))

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.tool("search", len, "same")
        run = current_run(ctx)
        watching = run.observer(CoherenceMonitor)
        assert watching is not None
        while not watching.findings:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert await found(handle) == ["progress"]


# checks of the application


async def test_own_checks_have_the_policy_custom_and_a_broken_one_ends_nothing(app: App) -> None:
    def too_many_facts(view: View) -> str | None:
        return "more facts than it can use" if len(view.state["discoveries"]) > 2 else None

    def broken(view: View) -> str:
        raise LookupError(view.events[-1].type)

    @app.task(retry=ONCE, coherence=Coherence(custom="bury", checks=(broken, too_many_facts)))
    async def job(ctx: Context) -> None:
        for number in range(3):
            await ctx.discover(f"fact {number}")
        await ctx.step("wait", asyncio.sleep, 60)

    handle = await job.enqueue()
    await work_off(app)
    dead = await letter(app, handle)
    assert dead.reason == "incoherent"
    assert "too_many_facts: more facts than it can use" in dead.message


def test_own_checks_have_names_of_their_own() -> None:
    def progress(view: View) -> Finding | None:
        return None

    with pytest.raises(ValueError, match="checks must have names of their own, got 'progress'"):
        Coherence(checks=(progress,))


# the judge


class Plodding(Agent[AgentState]):
    """An agent of four steps; the judge is asked after every second one."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=f"s{number}", title="plod") for number in range(4)]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
        if step.key == "s3":
            await asyncio.sleep(0.3 if ctx.resumption is None else 0)
            if ctx.attempt == 1:
                raise ValueError("again")
        return 0

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "finished"


async def test_a_verdict_is_an_event_and_is_not_asked_for_again_by_a_resumed_run(app: App) -> None:
    seen: list[View] = []

    async def judge(view: View) -> str:
        seen.append(view)
        return "it plods"

    kind = type("Plod", (Plodding,), {"coherence": Coherence(judge=judge, judge_every=2)})
    handle = await app.agent(name="plod", retry=Retry(base=0.0))(kind).enqueue("arrive")
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    verdicts = [event.data for event in await history(handle) if event.type == "judged"]
    assert [one["objection"] for one in verdicts] == ["it plods"] * len(verdicts)
    assert len(seen) == len(verdicts) <= 2
    assert [one["status"] for one in seen[0].state["plan"]][:2] == ["done", "done"]
    assert await found(handle) == ["judge"]
    assert f"s:{VERDICT}" in await recorded_steps(app, handle)


async def test_a_long_objection_is_recorded_in_part(app: App) -> None:
    async def judge(view: View) -> str:
        return "too long " * 300_000

    kind = type("Wordy", (Plodding,), {"coherence": Coherence(judge=judge, judge_every=2)})
    handle = await app.agent(name="wordy", retry=Retry(base=0.0))(kind).enqueue("arrive")
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    verdicts = [event.data["objection"] for event in await history(handle) if event.type == "judged"]
    assert {len(one) for one in verdicts} == {2000}


async def test_the_judge_gets_the_last_prompt(app: App) -> None:
    prompts: list[object] = []

    async def judge(view: View) -> None:
        prompts.append(view.prompt)

    class Asking(Plodding):
        coherence = Coherence(judge=judge, judge_every=2)

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
            await ContextBuilder(window=4000, memory=False).build(ctx, state)
            await asyncio.sleep(0.05)  # the judge runs beside it
            return 0

    handle = await app.agent(name="asking", retry=ONCE)(Asking).enqueue("arrive")
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    assert prompts
    assert "arrive" in str(prompts[0])


async def test_a_judge_that_fails_or_hangs_does_not_delay_the_task(app: App) -> None:
    asked: list[int] = []

    async def judge(view: View) -> None:
        asked.append(1)
        if len(asked) == 1:
            raise ConnectionError("the model is away")
        await asyncio.sleep(60)

    @app.task(retry=ONCE, coherence=Coherence(judge=judge, judge_every=1))
    async def job(ctx: Context) -> str:
        for _ in range(3):
            await ctx.step("work", asyncio.sleep, 0.05)
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert len(asked) == 2
    assert await found(handle) == []


# dismissal


async def test_a_dismissed_finding_does_not_return_and_survives_a_replay(app: App) -> None:
    @app.task(retry=ONCE, coherence=Coherence(repetition="bury", repeats=2))
    async def job(ctx: Context) -> str:
        for _ in range(2):
            await ctx.tool("poll", len, "same")
        if ctx.attempt == 1 and ctx.resumption is None:
            await asyncio.sleep(60)
        for number in range(20):  # the finding no longer holds
            await ctx.tool("other", len, "x" * number)
            await asyncio.sleep(0)
        for _ in range(2):
            await ctx.tool("poll", len, "same")
        await ctx.step("wait", asyncio.sleep, 0.3)
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).reason == "incoherent"
    number = next(event.number for event in await history(handle) if event.type == "incoherent")
    assert (await command(app, "task", "dismiss", handle.id, "99")).code == 1
    assert (await command(app, "task", "dismiss", handle.id, "repetition")).ids == [handle.id]
    assert number is not None
    await handle.dismiss(number)
    assert (await command(app, "dlq", "replay", handle.id)).code == 0
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert await found(handle) == ["repetition"]


async def test_a_finding_is_dismissed_while_the_task_runs(app: App) -> None:
    go_on = asyncio.Event()

    @app.task(retry=ONCE, coherence=Coherence(repeats=2, window=4))
    async def job(ctx: Context) -> None:
        for _ in range(2):
            await ctx.tool("poll", len, "same")
        await go_on.wait()
        for number in range(4):
            await ctx.tool("other", len, "x" * number)
            await asyncio.sleep(0.02)
        for _ in range(2):
            await ctx.tool("poll", len, "same")
        await ctx.step("wait", asyncio.sleep, 0.2)

    handle = await job.enqueue()
    async with running_worker(app):
        await until_found(handle)
        number = next(event.number for event in await history(handle) if event.type == "incoherent")
        assert number is not None
        await handle.dismiss(number)
        go_on.set()
        await bounded(handle.result())
    assert await found(handle) == ["repetition"]

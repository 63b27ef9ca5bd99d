"""Plans of functions: recorded once, replaced as a whole, and known to later runs, handoffs and readers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
from perdure import (
    App,
    Context,
    PlanStep,
    Retry,
    Settings,
    SyncContext,
    TaskHandle,
)
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.worker.agents.journal.forks import fork
from perdure.worker.durable.journal.function_plan import MAX_STEPS, FunctionPlan
from pydantic import SecretStr

from tests.support.command_line import Answer, call
from tests.support.workers import bounded, history, letter, recorded_steps, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("planning")]


def value() -> int:
    return 1


def fail() -> int:
    raise RuntimeError("no price")


async def test_a_plan_is_recorded_once_and_known_to_the_next_attempt(app: App) -> None:
    found: list[Any] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def offer(ctx: Context) -> None:
        names = ["fetch", "compute", "send"] if ctx.attempt == 1 else ["other"]
        found.append(await ctx.plan(names))
        await ctx.step("fetch", value)
        await ctx.step("compute", fail if ctx.attempt == 1 else value)
        if ctx.resumption is not None and (handoff := ctx.resumption.handoff) is not None:
            found.append([step.key for step in (*handoff.in_progress, *handoff.pending)])

    handle = await offer.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert found == [["fetch", "compute", "send"], ["fetch", "compute", "send"], ["compute", "send"]]
    planned = [event.data for event in await history(handle) if event.type == "planned"]
    assert [[step["key"] for step in data["steps"]] for data in planned] == [["fetch", "compute", "send"]]


async def test_another_plan_replaces_the_open_steps(app: App) -> None:
    handoffs: list[Any] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def offer(ctx: Context) -> None:
        await ctx.plan(["fetch", PlanStep(key="compute", title="Compute the price"), "send"])
        await ctx.step("fetch", value)
        await ctx.plan(["call", "send"], why="the price list is old")
        if ctx.resumption is not None:
            handoffs.append(ctx.resumption.handoff)
        await ctx.step("call", fail if ctx.attempt == 1 else value)

    handle = await offer.enqueue()
    await work_off(app)
    await bounded(handle.result())
    (handoff,) = handoffs
    assert [step.key for step in (*handoff.in_progress, *handoff.pending)] == ["call", "send"]
    assert ("compute", "the price list is old") in [(step.key, step.why) for step in handoff.replaced]
    assert handoff.last_completed == "fetch"


async def test_scopes_waits_and_repeated_names_are_steps_of_a_plan(app: App) -> None:
    left: list[Any] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def read(ctx: Context) -> None:
        await ctx.plan(["page", "page", "page-1", "page-2"])
        await ctx.step("page", value)
        await ctx.step("page", value)
        for name in ("page-1", "page-2"):
            with ctx.scope(name):
                await ctx.step("open", value)
                if ctx.resumption is not None and (handoff := ctx.resumption.handoff) is not None:
                    left.append([step.key for step in (*handoff.in_progress, *handoff.pending)])
                await ctx.step("parse", fail if ctx.attempt == 1 and name == "page-2" else value)

    handle = await read.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert left == [["page-2"], ["page-2"]]


async def test_a_plain_handler_plans_too(app: App) -> None:
    left: list[Any] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    def read(ctx: SyncContext) -> list[str]:
        names = ctx.plan(["page-1", "send"])
        with ctx.scope("page-1"):
            ctx.step("open", value)
        if ctx.resumption is not None and (handoff := ctx.resumption.handoff) is not None:
            left.extend(step.key for step in (*handoff.in_progress, *handoff.pending))
        ctx.step("send", fail if ctx.attempt == 1 else value)
        return names

    handle = await read.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["page-1", "send"]
    assert left == ["send"]


async def test_show_names_the_step_that_comes_next(app: App) -> None:
    async def show(handle: TaskHandle[Any], *options: str) -> Answer:
        where = ("--redis-url", app.settings.redis_url, "--namespace", app.settings.namespace)
        return await anyio.to_thread.run_sync(lambda: call("task", "show", handle.id, *options, *where))

    @app.task(retry=Retry(max_attempts=1))
    async def offer(ctx: Context) -> None:
        await ctx.plan(["fetch", PlanStep(key="compute", title="Compute the price"), "send"])
        await ctx.step("fetch", value)
        await ctx.step("compute", value if (await ctx.inbox(wait=60))[0].content else fail)
        await ctx.step("send", value)

    handle = await offer.enqueue()
    await work_off(app)
    assert "step 2 of 3: compute Compute the price" in (await show(handle)).out
    assert [item["status"] for item in (await show(handle, "--json")).json["plan"]] == ["done", "pending", "pending"]
    await handle.send("")
    await work_off(app)
    assert "step 2 of 3: compute Compute the price" in (await show(handle)).out
    await replay(app.producer.gateway, await letter(app, handle), Replay(rerun_failed=True))
    assert [item["status"] for item in (await show(handle, "--json")).json["plan"]] == ["done", "pending", "pending"]


async def test_a_function_recalls_its_steps(settings: Settings) -> None:
    """Those of this run and of earlier ones, with large results, failures, and what the plan has."""
    found: list[dict[str, Any]] = []
    large = "x" * 3_000

    async def running(ctx: Context) -> None:
        step = await ctx.recall_step("running")
        assert step is not None
        found.append({"running": step.status})

    async with App("recalling", settings=settings.model_copy(update={"payload_limit": 1024})) as app:

        @app.task(retry=Retry(max_attempts=2, base=0))
        async def offer(ctx: Context) -> None:
            await ctx.plan([PlanStep(key="large", title="Read it"), "send"])
            await ctx.step("large", str, large)
            with ctx.scope("page-1"):
                await ctx.step("open", dict, seats=40)
            with suppress(RuntimeError):
                await ctx.step("failing", fail)
            await ctx.decide("go on")
            await ctx.step("running", running, ctx)
            keys = ("large", "page-1/open", "failing", "send", "unknown", "#decided")
            steps = {key: await ctx.recall_step(key) for key in keys}
            found.append(
                {key: step and (step.title, step.status, step.result, step.error) for key, step in steps.items()}
            )
            if ctx.attempt == 1:
                raise RuntimeError("again")

        handle = await offer.enqueue()
        await work_off(app)
        await bounded(handle.result())
    steps = {
        "large": ("Read it", "done", large, None),
        "page-1/open": ("page-1/open", "done", {"seats": 40}, None),
        "failing": ("failing", "failed", None, "no price"),
        "send": ("send", "pending", None, None),
        "unknown": None,
        "#decided": None,
    }
    assert found == [{"running": "running"}, steps, steps]


async def test_a_fork_has_the_plan_of_its_point(app: App) -> None:
    left: list[list[str]] = []

    @app.task(retry=Retry(max_attempts=1))
    async def offer(ctx: Context) -> None:
        if ctx.resumption is not None and (handoff := ctx.resumption.handoff) is not None:
            left.append([step.key for step in (*handoff.in_progress, *handoff.pending)])
        await ctx.plan(["fetch", "compute"])
        await ctx.step("fetch", value)
        await ctx.plan(["call", "send"], why="the price list is old")
        await ctx.step("call", value)

    handle = await offer.enqueue()
    await work_off(app)
    await bounded(handle.result())
    for at in ("fetch", None):
        await fork(app.producer, handle.id, at=at)
        await work_off(app)
    assert left == [["compute"], ["send"]]


async def test_the_stored_plan_stays_small_and_has_no_secret(app: App) -> None:
    @app.task
    async def offer(ctx: Context, token: SecretStr) -> None:
        secret = token.get_secret_value()
        for number in range(30):
            names = [f"step-{number}-{place}" for place in range(200)]
            title = f"{'x' * 192}{secret}{'x' * 10_000}"
            await ctx.plan([PlanStep(key=names[0], title=title), *names[1:]], why=title)

    handle = await offer.enqueue(SecretStr("open-sesame"))
    await work_off(app)
    await bounded(handle.result())
    plan = (await recorded_steps(app, handle))["s:#planned"]
    assert len(plan) < 300_000
    assert b"xopen" not in plan
    assert len(FunctionPlan.model_validate_json(plan).former) == MAX_STEPS


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (("a",), "why of a plan must be a text, got 3"),
        ("fetch", "plan must be a list of names or of PlanStep, got 'fetch'"),
        ([], "plan must have 1 to 1,000 steps, got 0"),
        (["a"] * 1001, "plan must have 1 to 1,000 steps, got 1,001"),
        ([3], "plan must be a list of names or of PlanStep, got an item 3"),
        (["page#2"], "step of a plan must be 1 to 200 characters without '#', got 'page#2'"),
    ],
)
async def test_what_is_no_plan_is_refused_in_one_sentence(app: App, steps: Sequence[Any], problem: str) -> None:
    @app.task
    async def read(ctx: Context) -> None:
        await ctx.plan(steps, why=3 if steps == ("a",) else "")  # type: ignore[arg-type]

    handle = await read.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.message) == (Reason.NOT_RETRYABLE, problem)

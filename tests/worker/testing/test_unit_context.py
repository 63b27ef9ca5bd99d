"""make_context: a real context for one call of a handler, without a server."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from perdure import (
    App,
    ChildFailed,
    Context,
    PerdureError,
    Retry,
    SyncContext,
    TaskFailed,
    current_context,
    current_step,
)
from perdure.testing import UnitContext, make_context
from perdure.worker.errors import StepDefinitionError, StepOutsideTask, UnserialisableResult, WaitTimedOut
from pydantic import ValidationError

app = App("shop")


@app.task
async def bill(ctx: Context, *, pages: int) -> list[str]:
    return [await ctx.step("page", render, number) for number in range(pages)]


def render(number: int) -> str:
    return f"page {number} of {current_context().task_id}"


async def test_steps_run_and_their_results_can_be_compared() -> None:
    ctx = make_context(task_id="bill-1")
    assert await bill(ctx, pages=2) == ["page 0 of bill-1", "page 1 of bill-1"]
    assert ctx.steps == {"page": "page 0 of bill-1", "page#2": "page 1 of bill-1"}
    assert not ctx.resumed


async def test_recorded_steps_are_not_run() -> None:
    ctx = make_context(task_id="bill-2", recorded={"page": "as before"})
    assert await bill(ctx, pages=2) == ["as before", "page 1 of bill-2"]
    assert ctx.resumed
    assert list(ctx.steps) == ["page", "page#2"]


async def test_tries_of_a_step_and_log_calls_are_events() -> None:
    async def flaky() -> str:
        if current_step().attempt == 1:
            raise ValueError("busy")
        return "done"

    async def handler(ctx: Context) -> str:
        await ctx.progress(1, 2, "half")  # not an event
        await ctx.decide("retry", reasoning="it is cheap")
        return await ctx.options(retry=Retry(max_attempts=2, base=0.001), call="c1").tool("call", flaky)

    ctx = make_context()
    assert await handler(ctx) == "done"
    assert [event.type for event in ctx.events] == ["decided", "step_failed", "tool_called"]


async def test_what_a_worker_refuses_is_refused() -> None:
    ctx = make_context()
    with pytest.raises(UnserialisableResult, match="step 'load'"):
        await ctx.step("load", object)
    with pytest.raises(StepDefinitionError, match="step 'page'"):
        await ctx.step("page", render)  # type: ignore[call-overload]  # the argument is missing


@pytest.mark.parametrize("name", ["memory", "artifacts"])
async def test_what_needs_a_store_names_the_remedy(name: str) -> None:
    with pytest.raises(PerdureError, match=r"make_context\(\) has none; run the task with the fixture 'perdure'"):
        getattr(make_context(), name)


async def test_what_needs_a_server_names_the_remedy() -> None:
    with pytest.raises(PerdureError, match=r"make_context\(\) has none; run the task with the fixture 'perdure'"):
        await make_context().continue_as("other")


async def test_given_messages_are_read_once() -> None:
    ctx = make_context(inbox=["first", {"second": 2}])
    assert [one.content for one in await ctx.inbox(limit=1)] == ["first"]
    assert [one.content for one in await ctx.inbox(60)] == [{"second": 2}]
    assert await ctx.inbox() == []
    assert await ctx.inbox(60) == []
    with pytest.raises(PerdureError, match=r"for ever for a message from 'finance': pass make_context\(inbox="):
        await ctx.inbox(math.inf, sender="finance")
    with pytest.raises(PerdureError, match="for ever for a message: "):
        await ctx.inbox(math.inf)


async def test_given_answers_are_used_by_name() -> None:
    ctx = make_context(answers={"approval": [True, False], "question": "yes", "amount": "many"})
    wait = await ctx.open_wait("approval", bool, shows={"amount": 9})
    assert [await wait, await ctx.wait_for("approval", bool), await ctx.ask("finance", "Pay?")] == [True, False, "yes"]
    assert wait.id == "approval"
    assert await ctx.options(on_mismatch="rerun").wait_for("approval", bool, timeout=60, default=None) is None
    with pytest.raises(WaitTimedOut):
        await ctx.wait_for("approval", bool, timeout=60)
    with pytest.raises(ValidationError):
        await ctx.wait_for("amount", int)
    with pytest.raises(PerdureError, match=r"for ever for an answer to 'approval#5': pass make_context\(answers="):
        await ctx.wait_for("approval", bool)
    with pytest.raises(ValueError, match="name of a wait must be"):
        await ctx.wait_for("pay out", bool)


async def test_a_handler_that_is_a_plain_function_runs_in_a_thread() -> None:
    @app.task
    def approve(ctx: SyncContext, pages: int) -> str:
        answer = ctx.ask("finance", "Pay?")
        return f"{answer}: {ctx.step('page', str, pages)}"

    ctx = make_context(answers={"question": "yes"})
    assert await approve(ctx, pages=2) == "yes: 2"
    assert ctx.steps == {"page": "2"}


async def test_sent_messages_are_listed() -> None:
    ctx = make_context()
    await ctx.send("other", {"text": "hello"})
    assert ctx.sent == [("other", {"text": "hello"})]


async def test_each_asyncio_task_may_have_a_context() -> None:
    async def one(task_id: str) -> list[str]:
        return await bill(make_context(task_id=task_id), pages=1)

    assert list(await asyncio.gather(one("a"), one("b"))) == [["page 0 of a"], ["page 0 of b"]]
    first, _second = make_context(), make_context()
    with pytest.raises(StepOutsideTask, match="use the ctx that this handler was given"):
        await first.step("page", render, 0)


async def test_the_context_says_what_the_test_gave() -> None:
    ctx: UnitContext = make_context(
        task="bill", queue="shop", attempt=3, crashes=1, version=2, headers={"trace": "1"}, resources={"db": 1}
    )
    assert (ctx.task, ctx.queue, ctx.attempt, ctx.crashes, ctx.version) == ("bill", "shop", 3, 1, 2)
    assert (dict(ctx.headers), ctx.resources) == ({"trace": "1"}, {"db": 1})


def test_an_event_loop_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"make_context\(\) must be called in an 'async def' test"):
        make_context()


async def test_a_sleep_passes_at_once() -> None:
    ctx = make_context()
    moment = datetime(2100, 1, 1, tzinfo=UTC)
    await ctx.sleep("2h")
    await ctx.sleep_until(moment)
    assert ctx.slept == ["2h", moment]
    with pytest.raises(ValueError, match="duration must be more than 0 seconds"):
        await ctx.sleep(-1)


async def test_the_handlers_of_children_are_called() -> None:
    app = App("reports")

    @app.task
    async def page(ctx: Context, number: int) -> dict[str, int]:
        if number == 13:
            raise LookupError("no such page")
        return {"page": await ctx.step("read", int, number)}

    @app.task
    async def report(ctx: Context) -> list[Any]:
        first = await ctx.join(await ctx.spawn(page, number=1))
        rest = await ctx.gather(page, [2, 13], errors="keep")
        arrived = [found async for found in ctx.as_completed(page, iter([3]))]
        return [first, *rest, *arrived]

    ctx = make_context()
    first, second, failed, third = await report(ctx)
    assert [first, second, third] == [{"page": 1}, {"page": 2}, {"page": 3}]
    assert isinstance(failed, ChildFailed)
    assert isinstance(failed.error, TaskFailed)
    assert (failed.number, failed.error.error["message"]) == (1, "no such page")
    assert ctx.spawned == [("page", {"number": number}) for number in (1, 2, 13, 3)]
    assert ctx.steps == {}, "the steps of children are their own"


async def test_the_first_of_several_branches_returns() -> None:
    ctx = make_context(inbox=["yes"])
    found = await ctx.first(mail=ctx.inbox(wait=60), late=ctx.sleep(60))
    assert (found.name, [message.content for message in found.value]) == ("mail", ["yes"])
    assert (await ctx.first(step=ctx.step("page", render, 1), late=asyncio.sleep(60))).value.startswith("page 1")

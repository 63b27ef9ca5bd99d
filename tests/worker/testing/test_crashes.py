"""crash_everywhere and crash_at: what they find, and what they must not find."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, TaskFailed
from perdure.testing import PerdureFixture, crash_at, crash_everywhere, record_effect
from perdure.worker.durable.steps.keys import StepKeys
from perdure.worker.testing.crashes import CrashComparison

pytestmark = pytest.mark.integration

app = App("crashes")

random_values = itertools.count()


def price_of(article: str) -> int:
    return {"book": 12, "pen": 2}[article]


def charge(total: int) -> str:
    record_effect("card")
    return f"paid {total}"


@app.task(retry=Retry(max_attempts=2, base=60))
async def invoice(ctx: Context, articles: list[str]) -> str:
    total = sum([await ctx.step("price", price_of, article) for article in articles])
    await ctx.ask("finance", f"Is {total} correct?")
    await ctx.sleep(86_400)
    return await ctx.step("charge", charge, total)


@app.task
async def mails_outside(ctx: Context) -> int:
    record_effect("mail")
    return await ctx.step("one", lambda: 1)


@app.task
async def goes_another_way(ctx: Context) -> str:
    choice = next(random_values)
    return await ctx.step(f"choice {choice % 2}", str, "done")


@app.task
async def has_a_clock(ctx: Context) -> int:
    return await ctx.step("now", lambda: next(random_values))


@app.task
async def fails(ctx: Context) -> None:
    await ctx.step("one", lambda: 1)
    raise ValueError("never")


@app.task
async def catches(ctx: Context) -> str:
    try:
        await ctx.options(retry=Retry(max_attempts=1)).step("bank", price_of, "boat")
    except KeyError:
        return await ctx.step("other bank", str, "paid")
    return "not reached"


class Reader(Agent[AgentState]):
    name = "reader"

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="read", title="read"), PlanStep(key="sum up", title="sum up")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return await ctx.step("model", lambda: f"{step.key} done")

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "finished"


async def test_a_task_that_continues_as_before_has_no_problems() -> None:
    done: list[tuple[int, int]] = []
    report = await crash_everywhere(
        app, invoice, [["book", "pen"]], answers={"question": "yes"}, on_crash=lambda *counts: done.append(counts)
    )
    report.check()
    assert report.outcome == 'succeeded: "paid 14"'
    assert report.writes.count("records step 'charge'") == 1
    assert report.crashes == 2 * len(report.writes) == len(done) == done[-1][1]
    assert dict(report.repeated) == {"price": 1, "price#2": 1, "charge": 1, "card": 1}
    assert report.varying == []


async def test_an_effect_outside_of_a_step_is_found() -> None:
    report = await crash_everywhere(app, "mails_outside")
    assert set(report.by_text()) == {"effect 'mail' happened 1 more time outside of a step, where each run repeats it"}
    with pytest.raises(
        AssertionError, match=r"'mails_outside' does not continue.*\n- crash before write 1 \(records step"
    ):
        report.check()


async def test_a_handler_that_goes_another_way_is_found() -> None:
    report = await crash_everywhere(app, goes_another_way, places=("after",))
    assert "step 'choice 0' was not called" in report.by_text() or "step 'choice 1' was not called" in report.by_text()


async def test_what_differs_without_a_crash_is_not_compared() -> None:
    report = await crash_everywhere(app, has_a_clock)
    report.check()
    assert report.varying == ["now", "result"]


async def test_a_dead_letter_is_an_outcome() -> None:
    report = await crash_everywhere(app, fails)
    report.check()
    assert report.outcome.startswith("dead: ")
    assert report.outcome.endswith("ValueError never")


async def test_a_failure_that_was_caught_is_stored_by_the_next_write() -> None:
    report = await crash_everywhere(app, catches)
    report.check()
    assert report.outcome == 'succeeded: "paid"'


async def test_an_agent_continues_at_its_step() -> None:
    own = App("agents")
    own.agent(Reader)
    report = await crash_everywhere(own, "reader", {"goal": "read"}, limit=9)
    report.check()
    assert report.crashes == 9


async def test_a_step_that_is_called_again_although_it_is_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensitivity: keys that differ between runs, as a defect of the matching would make them."""
    usual, numbers = StepKeys.next, itertools.count()

    def changing(keys: StepKeys, name: str, *args: Any, **kwargs: Any) -> Any:
        return usual(keys, f"{name}-{next(numbers)}" if name == "one" else name, *args, **kwargs)

    monkeypatch.setattr(StepKeys, "next", changing)
    report = await crash_everywhere(app, mails_outside)
    assert any("was not called" in text for text in report.by_text())


async def test_an_undisturbed_run_must_end() -> None:
    with pytest.raises(ValueError, match="task 'invoice' does not end: it waits for 'question': give answers="):
        await crash_everywhere(app, invoice, {"articles": ["pen"]})


async def test_crash_at_cuts_a_worker_off_before_the_record(perdure: PerdureFixture) -> None:
    charged: list[str] = []
    own = App("at")

    @own.task
    async def pay(ctx: Context) -> int:
        await ctx.step("charge", lambda: charged.append("paid"))
        return await ctx.step("receipt", lambda: len(charged))

    async with own:
        handle = await pay.enqueue()
        await crash_at(own, "charge")
        assert charged == ["paid"]
        await crash_at(own, "receipt", when="after")
        assert await perdure.run_until_idle(own) == {"succeeded": 1}
        assert await handle.result(timeout=10) == 2
        with pytest.raises(AssertionError, match="no task recorded step 'charge'; recorded: no step"):
            await crash_at(own, "charge")


async def test_crash_at_names_the_steps_that_were_recorded(perdure: PerdureFixture) -> None:
    async with app:
        await fails.enqueue()
        with pytest.raises(AssertionError, match="no task recorded step 'two'; recorded: 'one'"):
            await crash_at(app, "two")
        with pytest.raises(TaskFailed):
            await fails.options(task_id="again").enqueue()
            await perdure.run_until_idle(app)


def test_a_report_names_the_first_place_and_counts_the_others() -> None:
    from perdure.testing import CrashProblem

    found = [CrashProblem(f"before write {number}", "it differs") for number in (1, 2, 3)]
    report = CrashComparison("t", "succeeded: 1", ["a"] * 3, 3, found, {}, [])
    with pytest.raises(AssertionError, match="- crash before write 1 and at 2 other places: it differs"):
        report.check()

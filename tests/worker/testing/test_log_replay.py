"""Exported logs that are replayed with changed code: what it continues, and what it does in another way."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, Middleware, PlanStep, Retry, Settlement
from perdure.queues import ConfigurationError, TaskNotFound
from perdure.testing import ReplayedLog, replay_log, run_until_idle
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.errors import TransferError
from perdure.worker.middleware import CallNext
from perdure.worker.settings import Settings
from perdure.worker.transfer.export import export_task

pytestmark = pytest.mark.integration

Handler = Callable[..., Coroutine[Any, Any, Any]]


class Code:
    """Versions of one task, and the effects of all of them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.effects: list[str] = []

    def app(self, handler: Handler, *others: Handler, **options: Any) -> App:
        app = App("shop", settings=self.settings)
        app.task(name="order", retry=Retry(max_attempts=1), **options)(handler)
        for other in others:
            app.task(other)
        return app

    async def record(self, handler: Handler, *others: Handler, archived: bool = True) -> bytes:
        """Return the log of a run."""
        app, file = self.app(handler, *others), io.BytesIO()
        async with app:
            handle = await app.tasks["order"].enqueue(7)
            await run_until_idle(app, allow_failures=True)
            store = await artifact_store(app.producer.gateway, app.settings)
            await export_task(app.producer, handle, store, file, archived=archived)
        self.effects.clear()
        return file.getvalue()

    async def replay(self, log: bytes, handler: Handler, *others: Handler, **options: Any) -> ReplayedLog:
        replayed = await replay_log(self.app(handler, *others, **options), io.BytesIO(log))
        assert self.effects == []
        return replayed

    def effect(self, name: str, number: int) -> int:
        self.effects.append(name)
        return number + 1

    async def reserve_and_charge(self, ctx: Context, order: int) -> int:
        reserved = await ctx.step("reserve", self.effect, "reserve", order)
        return await ctx.step("charge", self.effect, "charge", reserved)


@pytest.fixture
def code(settings: Settings) -> Code:
    return Code(settings)


async def test_the_same_code_meets_all_records_and_runs_nothing(code: Code) -> None:
    log = await code.record(code.reserve_and_charge)
    replayed = await code.replay(log, code.reserve_and_charge)
    assert (replayed.end, replayed.recorded, replayed.met, replayed.differences) == ("finished", 2, 2, ())
    replayed.check()


async def test_other_arguments_of_a_step(code: Code) -> None:
    log = await code.record(code.reserve_and_charge)

    async def order(ctx: Context, order: int) -> int:
        reserved = await ctx.step("reserve", code.effect, "reserve", order)
        return await ctx.step("charge", code.effect, "charge", reserved + 1)

    replayed = await code.replay(log, order)
    assert replayed.end == "failed"
    [difference] = replayed.differences
    assert difference.startswith("step 'charge' was recorded with arguments")
    with pytest.raises(AssertionError, match=r"task 'order' [0-9a-f-]+: step 'charge' was recorded"):
        replayed.check()


async def test_a_new_step_before_recorded_ones_is_not_run(code: Code) -> None:
    log = await code.record(code.reserve_and_charge)

    async def order(ctx: Context, order: int) -> int:
        try:
            await ctx.step("check", code.effect, "check", order)
        except Exception:  # noqa: BLE001 - as careless code does
            code.effects.append("seen")
        return await code.reserve_and_charge(ctx, order)

    replayed = await code.replay(log, order)
    assert (replayed.end, replayed.at, replayed.met) == ("stopped", "check", 0)
    assert replayed.differences == ("step 'check' would run, which is not recorded, before 'charge', 'reserve'",)


async def test_a_step_that_is_not_asked_for_and_another_result(code: Code) -> None:
    log = await code.record(code.reserve_and_charge)

    async def order(ctx: Context, order: int) -> int:
        return await ctx.step("reserve", code.effect, "reserve", order)

    replayed = await code.replay(log, order)
    assert replayed.differences == ("1 recorded step is not asked for: 'charge'", "the result is 8; recorded is 9")


async def test_a_task_that_has_not_ended_stops_at_the_end_of_its_log(code: Code) -> None:
    async def fails(ctx: Context, order: int) -> int:
        await ctx.step("reserve", code.effect, "reserve", order)
        raise ValueError("no stock")

    log = await code.record(fails, archived=False)
    replayed = await code.replay(log, code.reserve_and_charge)
    assert (replayed.end, replayed.at, replayed.differences) == ("stopped", "charge", ())
    assert (await code.replay(log, fails)).at == "ValueError: no stock"


async def test_what_a_handler_waits_for_is_where_the_log_ends(code: Code) -> None:
    async def waits(ctx: Context, order: int) -> int:
        await ctx.step("reserve", code.effect, "reserve", order)
        await ctx.wait_for("approval")
        return 9

    replayed = await code.replay(await code.record(waits, archived=False), waits)
    assert (replayed.end, replayed.met, replayed.differences) == ("waiting", 1, ())
    replayed = await code.replay(await code.record(code.reserve_and_charge), waits)
    assert replayed.differences[0] == "1 recorded step is not asked for: 'charge'"
    assert "the recorded run ended without that" in replayed.differences[1]


async def test_children_are_replayed_and_new_ones_do_not_run(code: Code) -> None:
    async def child(ctx: Context, order: int) -> int:
        code.effects.append("child")
        return order + 1

    async def parent(ctx: Context, order: int) -> list[int]:
        other = code.current.tasks["child"]  # type: ignore[attr-defined]
        return [await ctx.join(await ctx.spawn(other, order)), *await ctx.gather(other, [1, 2])]

    async def more(ctx: Context, order: int) -> list[int]:
        found = await parent(ctx, order)
        try:
            await ctx.spawn(code.current.tasks["child"], 3)  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - as careless code does
            code.effects.append("seen")
        return found

    make = code.app

    def kept(*handlers: Handler, **options: Any) -> App:
        code.current = make(*handlers, **options)  # type: ignore[attr-defined]
        return code.current  # type: ignore[attr-defined, no-any-return]

    code.app = kept  # type: ignore[method-assign]
    log = await code.record(parent, child)
    replayed = await code.replay(log, parent, child)
    assert (replayed.end, replayed.differences) == ("finished", ())
    replayed = await code.replay(log, more, child)
    assert replayed.end == "stopped"
    assert "would run, which is not recorded, and the recorded run ended without it" in replayed.differences[0]


async def test_a_handler_stops_where_it_reads_a_task_that_the_log_does_not_have(code: Code) -> None:
    class Elsewhere:
        missing = False

        async def read(self) -> int:
            if self.missing:
                raise TaskNotFound("report-1", "queue 'shop'")  # as a handle does
            return 8

    other = Elsewhere()

    async def order(ctx: Context, order: int) -> int:
        await ctx.step("reserve", code.effect, "reserve", order)
        return await ctx.step("charge", code.effect, "charge", await other.read())

    log = await code.record(order)
    other.missing = True
    replayed = await code.replay(log, order)
    assert (replayed.end, replayed.met, replayed.differences) == ("stopped", 1, ())
    assert replayed.at.startswith("no task report-1 in queue 'shop'")


async def test_a_task_that_is_not_there_and_arguments_that_do_not_fit(code: Code) -> None:
    log = await code.record(code.reserve_and_charge)

    async def order(ctx: Context, number: int, currency: str) -> int:
        return number

    [difference] = (await code.replay(log, order)).differences
    assert "currency" in difference
    empty = App("shop", settings=code.settings)
    replayed = await replay_log(empty, io.BytesIO(log))
    assert replayed.differences == ("app 'shop' has no task 'order'; it has: none",)


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_follows_from_the_outcome_and_no_other_task_runs(code: Code, fails: bool) -> None:
    class Settles(Middleware):
        async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
            code.effects.append("settle")
            await call_next()

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[None]:
        await app.tasks["other"].enqueue()
        yield

    app = App("shop", settings=code.settings, middleware=[Settles()], lifespan=lifespan)

    @app.task
    async def other(ctx: Context) -> None:
        code.effects.append("other")

    @app.task(name="order", retry=Retry(max_attempts=3, base=0.0))
    async def order(ctx: Context, order: int) -> int:
        await ctx.step("reserve", code.effect, "reserve", order)
        code.effects.append("handler")
        if fails:
            raise ValueError("no stock")
        return 9

    async def reserve(ctx: Context, order: int) -> int:
        await ctx.step("reserve", code.effect, "reserve", order)
        return 9

    log = await code.record(reserve)
    replayed = await replay_log(app, io.BytesIO(log))
    assert replayed.end == ("failed" if fails else "finished")
    assert code.effects == ["handler"]


async def test_a_damaged_file_and_an_open_app_are_refused(code: Code) -> None:
    log = await code.record(code.reserve_and_charge)
    app = code.app(code.reserve_and_charge)
    with pytest.raises(TransferError, match="the file is truncated after line"):
        await replay_log(app, io.BytesIO(log[: log.rindex(b"\n", 0, -1) + 1]))
    async with app:
        with pytest.raises(ConfigurationError, match="app 'shop' must not be open while a log is replayed"):
            await replay_log(app, io.BytesIO(log))


class Notes(AgentState):
    left: int = 0


async def test_an_agent_continues_at_the_step_of_its_plan_that_was_cut_off(code: Code) -> None:
    def agent(asked: str, *, fails: bool) -> App:
        class Reader(Agent[Notes]):
            async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
                return [PlanStep(key="read", title="read"), PlanStep(key="write", title="write")]

            async def act(self, ctx: Context, state: Notes, step: PlanStep) -> int:
                found = await ctx.step("ask", code.effect, asked, len(step.key))
                if fails and step.key == "write":
                    raise ValueError("no disk")
                return found

            async def finish(self, ctx: Context, state: Notes) -> int:
                return await ctx.step("report", code.effect, "report", 1)

        app = App("shop", settings=code.settings)
        app.agent(Reader, name="order", retry=Retry(max_attempts=1))
        return app

    app, file = agent("model", fails=True), io.BytesIO()
    async with app:
        handle = await app.tasks["order"].enqueue("read all")
        await run_until_idle(app, allow_failures=True)
        await export_task(app.producer, handle, await artifact_store(app.producer.gateway, app.settings), file)
    code.effects.clear()
    replayed = await replay_log(agent("model", fails=False), io.BytesIO(file.getvalue()))
    assert (replayed.end, replayed.at, replayed.met, replayed.differences) == ("stopped", "#finish/report", 1, ())
    replayed = await replay_log(agent("another model", fails=False), io.BytesIO(file.getvalue()))
    assert replayed.differences[0].startswith("step 'write/ask' was recorded with arguments")
    assert code.effects == []

"""The first of several branches: one outcome in every run, and nothing is left of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from perdure import App, Context, Retry, SyncContext, TaskHandle
from perdure.worker.durable.waiting import WaitBoard
from perdure.worker.errors import StepDefinitionError, StepOutsideTask
from perdure.worker.settings import Settings

from tests.support.workers import bounded, history, pending, recorded_steps, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration

AT_ONCE = Retry(max_attempts=3, base=0.0)


@pytest.fixture(autouse=True)
def parks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Park for waits that are longer than 50 ms, so that tests need not wait for a second."""
    monkeypatch.setattr(WaitBoard, "park_after", 0.05)


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    app = App("first", settings=settings)
    async with app:
        yield app


async def parked(handle: TaskHandle[Any]) -> None:
    async def waits() -> bool:
        return (await handle.record()).waits is not None

    await wait_until(waits, "the task waits")


def value(name: str) -> str:
    return name


async def test_a_message_ends_the_sleep_beside_it(app: App) -> None:
    """The task is parked for both. Each later run has the same outcome, and does not run the other branch."""
    runs: list[str] = []

    @app.task(retry=AT_ONCE)
    async def waits(ctx: Context) -> list[Any]:
        async def remind() -> str:
            runs.append("remind")
            await ctx.sleep(3600)
            return await ctx.step("remind", value, "late")

        found = await ctx.first(mail=ctx.inbox(wait=7200), late=remind())
        runs.append(found.name)
        if runs.count("mail") == 1:
            raise ValueError("once more")
        return [found.name, [message.content for message in found.value]]

    async with running_worker(app):
        handle = await waits.enqueue()
        await parked(handle)
        assert (await handle.record()).waits == "message or time"
        assert await pending(app) == []
        await handle.send("now")
        assert await bounded(handle.result()) == ["mail", ["now"]]
    assert runs == ["remind", "remind", "mail", "mail"]
    events = [event for event in await history(handle) if event.type in ("waiting", "received", "waited")]
    assert [event.type for event in events] == ["waiting", "waiting", "received", "waited"]
    assert isinstance(events[-1].data, dict)
    assert events[-1].data["closed"] is True
    assert [name for name in await recorded_steps(app, handle) if "late" in name] == []


async def test_the_time_ends_the_wait_beside_it(app: App) -> None:
    """A message that comes later is unread: the wait for it is closed."""

    @app.task
    async def waits(ctx: Context) -> list[Any]:
        found = await ctx.first(late=ctx.sleep(0.3), mail=ctx.inbox(wait=3600))
        await ctx.inbox(wait=3600, sender="bob")
        return [*found, [message.content for message in await ctx.inbox()]]

    async with running_worker(app):
        handle = await waits.enqueue()
        await wait_until(lambda: _waits(handle, "message"), "the sleep has ended")
        await handle.send("for later", sender="ada")
        await handle.send("go on", sender="bob")
        assert await bounded(handle.result()) == ["late", None, ["for later"]]
    assert (await handle.record()).waits is None


async def test_a_message_reaches_a_wait_in_memory_while_a_step_runs(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitBoard, "look_every", 60.0)
    release = asyncio.Event()

    @app.task
    async def waits(ctx: Context) -> list[Any]:
        async def slow() -> str:
            started.set()
            await release.wait()
            return "slow"

        async def read() -> list[Any]:
            found = [message.content for message in await ctx.inbox(wait=3600)]
            release.set()
            return found

        return list(await asyncio.gather(ctx.step("slow", slow), read()))

    started = asyncio.Event()
    async with running_worker(app):
        handle = await waits.enqueue()
        await bounded(started.wait())
        await wait_until(lambda: _events(handle, "waiting", 1), "the branch waits")
        await handle.send("now")
        assert await bounded(handle.result()) == ["slow", ["now"]]


async def test_branches_are_cut_off_and_their_steps_are_not_recorded(app: App) -> None:
    cut: list[str] = []

    async def hangs() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cut.append("step")

    @app.task
    async def races(ctx: Context) -> list[Any]:
        async def slow() -> None:
            try:
                await ctx.step("hangs", hangs)
            finally:
                cut.append("branch")

        async def quick() -> str:
            await ctx.step("one", value, "one")
            return await ctx.step("two", value, "two")

        found = await ctx.first(slow=slow(), quick=quick())
        assert cut[:2] == ["step", "branch"]
        again = await ctx.first(quick=quick(), slow=slow())
        return [*found, *again]

    handle = await races.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["quick", "two", "quick", "two"]
    steps = sorted(await recorded_steps(app, handle))
    quick = [f"d:{scope}/quick/{name}" for scope in ("first#2", "first") for name in ("one", "two")]
    assert steps == ["d:#first", "d:#first#2", *quick]
    assert cut == ["step", "branch", "step", "branch"]


async def test_calls_of_the_other_branches_are_in_flight_no_more(app: App) -> None:
    """Neither a call of this run, nor one that an earlier run has left when its worker was lost."""
    in_flight: list[Any] = []

    @app.task(retry=Retry(max_attempts=3, base=0.0))
    async def races(ctx: Context) -> None:
        if (found := ctx.resumption) is not None and found.handoff is not None:
            in_flight.append([call.key for call in found.handoff.dependencies.in_flight])
        search = ctx.tool("search", anyio.sleep_forever)

        async def quick() -> None:
            await ctx.step("one", value, "one")
            if found is None:
                raise ValueError("once more")

        await ctx.first(slow=search, quick=quick())
        if ctx.attempt < 3:
            raise ValueError("and again")

    handle = await races.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert in_flight[-1] == []
    assert not [key for key in await recorded_steps(app, handle) if key.startswith("i:")]


async def test_recorded_steps_of_the_other_branches_are_no_orphans(app: App) -> None:
    runs: list[str] = []

    @app.task(retry=AT_ONCE)
    async def races(ctx: Context) -> str:
        runs.append("run")

        async def loser() -> None:
            await ctx.step("look", value, "x")
            await ctx.sleep(3600)

        async def winner() -> None:
            for number in range(4):
                await ctx.step(f"read-{number}", value, "x")

        await ctx.first(loser=loser(), winner=winner())
        if len(runs) == 1:
            raise ValueError("once more")
        return "done"

    handle = await races.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert "d:first/loser/look" in await recorded_steps(app, handle)
    assert "orphaned" not in [event.type for event in await history(handle)]


async def test_all_branches_run_again_after_an_attempt_that_ended_with_the_error_of_one(app: App) -> None:
    runs: list[str] = []

    def fails() -> str:
        runs.append("fails")
        if runs.count("fails") == 1:
            raise LookupError("nothing there")
        return "found"

    @app.task(retry=AT_ONCE)
    async def races(ctx: Context) -> list[str]:
        async def slow() -> None:
            runs.append("slow")
            await ctx.sleep(3600)

        return list(await ctx.first(look=ctx.step("look", fails), slow=slow()))

    handle = await races.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["look", "found"]
    assert runs == ["slow", "fails", "slow", "fails"]


async def test_the_error_of_the_branch_that_ends_first_is_raised(app: App) -> None:
    runs: list[str] = []

    @app.task(retry=AT_ONCE)
    async def races(ctx: Context) -> str:
        async def fails() -> None:
            runs.append("fails")
            await ctx.step("look", value, "x")
            raise LookupError("nothing there")

        async def waits() -> None:
            runs.append("waits")
            await ctx.sleep(3600)

        with pytest.raises(LookupError, match="nothing there"):
            await ctx.first(fails=fails(), waits=waits())
        if len(runs) == 2:
            raise ValueError("once more")
        return "done"

    handle = await races.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert runs == ["fails", "waits", "fails"]


async def test_the_first_branch_of_the_call_counts_if_several_have_ended(app: App) -> None:
    @app.task
    async def races(ctx: Context) -> list[Any]:
        async def at_once(name: str) -> str:
            return name

        found = await ctx.first(z=at_once("z"), a=at_once("a"))
        inner = await ctx.first(only=ctx.first(b=ctx.step("x", value, "inner"), c=ctx.sleep(60)))
        return [found.name, inner.name, *inner.value]

    handle = await races.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["z", "only", "b", "inner"]


async def test_concurrent_calls_keep_their_records(app: App) -> None:
    """Two branches race, and the order of their calls differs in the next run."""
    runs: list[str] = []
    called: list[str] = []

    def act(name: str) -> str:
        called.append(name)
        return name

    @app.task(retry=AT_ONCE)
    async def races(ctx: Context) -> list[str]:
        runs.append("run")

        async def one(name: str) -> str:
            async def steps() -> str:
                await ctx.step("act", act, name)
                if len(runs) == 1:
                    await anyio.sleep_forever()
                return name

            return (await ctx.first(**{name: steps(), f"{name}-late": ctx.sleep(0.3 if len(runs) == 1 else 3600)})).name

        names = ["left", "right"] if len(runs) == 1 else ["right", "left"]
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(one(name))
            await anyio.lowlevel.checkpoint()
        return called

    async with running_worker(app):
        handle = await races.enqueue()
        assert sorted(await bounded(handle.result())) == ["left", "right"]


async def test_branches_of_a_plain_function(app: App) -> None:
    """Each has a thread of its own. The one that lost is cut off in its next call."""
    runs: list[str] = []
    cut: list[str] = []

    @app.task(retry=AT_ONCE)
    def waits(ctx: SyncContext) -> list[Any]:
        runs.append("run")

        def late() -> None:
            try:
                ctx.sleep(3600)
            except BaseException as error:
                cut.append(type(error).__name__)
                raise

        def mail() -> str:
            [message] = ctx.inbox(wait=7200)
            return ctx.step("take", value, message.content)

        with pytest.raises(StepDefinitionError, match="branch 'late' must be a function"):
            ctx.first(late=5)  # type: ignore[arg-type]
        found = ctx.first(late=late, mail=mail)
        if len(runs) == 2:
            raise ValueError("once more")
        return [*found, ctx.step("end", value, "end")]

    async with running_worker(app):
        handle = await waits.enqueue()
        await parked(handle)
        await handle.send("now")
        assert await bounded(handle.result()) == ["mail", "now", "end"]
    assert len(runs) == 3
    assert cut == ["CancelledError", "CancelledError"]
    steps = [key for key in await recorded_steps(app, handle) if key != "s:#handoff"]
    assert sorted(steps) == ["d:#first", "d:end", "d:first/mail/#inbox", "d:first/mail/take"]


async def test_a_wrong_call_is_refused(app: App) -> None:
    """The branches of a refused call are closed: asyncio reports none that was never awaited."""

    @app.task(retry=None)
    async def races(ctx: Context) -> None:
        with pytest.raises(StepDefinitionError, match="must get at least one branch"):
            await ctx.first()
        with pytest.raises(StepDefinitionError, match="branch 'b' must be awaitable"):
            await ctx.first(a=ctx.sleep(60), b=5)  # type: ignore[arg-type]
        running = asyncio.ensure_future(ctx.step("x", value, "x"))
        with pytest.raises(StepDefinitionError, match="branch 'a' must be a coroutine"):
            await ctx.first(a=running, b=asyncio.wait_for(ctx.sleep(60), 1))
        await running
        with pytest.raises(StepDefinitionError, match="name of a branch must be 1 to 200 characters"):
            await ctx.first(**{"a#1": ctx.sleep(60)})

        async def step() -> None:
            with pytest.raises(StepOutsideTask, match=r"ctx\.first was called inside step 'step'"):
                await ctx.first(a=ctx.sleep(60))

        await ctx.step("step", step)

    handle = await races.enqueue()
    await work_off(app)
    await bounded(handle.result())


async def _events(handle: TaskHandle[Any], kind: str, number: int) -> bool:
    return [event.type for event in await history(handle)].count(kind) == number


async def _waits(handle: TaskHandle[Any], what: str) -> bool:
    return (await handle.record()).waits == what


async def test_a_sleep_whose_duration_changes_ends_when_it_first_should(app: App) -> None:
    """Such as the time that is left, which each run computes."""
    seconds = iter([1, 3600, 3600, 3600])

    @app.task(retry=Retry(max_attempts=1))
    async def waits(ctx: Context) -> str:
        return (await ctx.first(message=ctx.inbox(wait=3600), late=ctx.sleep(next(seconds)))).name

    async with app, running_worker(app):
        handle = await waits.enqueue()
        assert await bounded(handle.result()) == "late"


async def test_a_call_within_a_branch_is_not_run_again(app: App) -> None:
    """A later run closes the branches that it does not run, with those within them: Python would report them."""

    @app.task(retry=Retry(max_attempts=1))
    async def waits(ctx: Context) -> list[str]:
        inner = ctx.first(message=ctx.inbox(wait=3600), sleep=ctx.sleep(3600))
        found = await ctx.first(inner=inner, late=ctx.sleep(0.1))
        await ctx.sleep(0.5)
        return [found.name]

    async with app, running_worker(app):
        handle = await waits.enqueue()
        assert await bounded(handle.result()) == ["late"]


async def test_a_branch_that_loses_takes_no_message(app: App) -> None:
    """Of two branches that find theirs at the same time one ends, and the other one leaves the message in the inbox."""

    @app.task(retry=Retry(max_attempts=1))
    async def waits(ctx: Context) -> list[Any]:
        name, found = await ctx.first(answer=ctx.wait_for("answer", int), message=ctx.inbox(wait=3600))
        read = found if name == "message" else await ctx.inbox()
        return [name, [message.content for message in read]]

    async with app, running_worker(app):
        handles = [await waits.enqueue() for _ in range(10)]
        for handle in handles:
            await parked(handle)
            await asyncio.gather(handle.answer("answer", 1), handle.send("hello"))
        results = [await bounded(handle.result()) for handle in handles]
    assert {tuple(read) for _, read in results} == {("hello",)}

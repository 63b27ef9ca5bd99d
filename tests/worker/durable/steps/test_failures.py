"""Failures of steps as history: what is stored of them, for how long, and what makes them history."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Middleware,
    PlanStep,
    RecordedFailure,
    Retry,
    Settings,
    Snooze,
    StepCall,
)
from perdure.deadletter.replay import Replay, replay
from perdure.queues import State, Unavailable
from perdure.queues.security.keyring import generate_key
from perdure.worker.durable.journal.failure_record import FailureRecord, FailureState, is_failure
from perdure.worker.errors import StepDefinitionError
from perdure.worker.middleware import CallNext
from pydantic import SecretStr

from tests.support.workers import Gate, bounded, history, letter, recorded_steps, running_worker, work_off

pytestmark = pytest.mark.integration

calls: Counter[str] = Counter()


@pytest.fixture
def app(app: App) -> App:
    calls.clear()
    return app


async def fail(name: str) -> str:
    calls[name] += 1
    raise ConnectionError(f"{name} is down")


async def work(name: str) -> str:
    calls[name] += 1
    return name


def states(steps: dict[str, bytes]) -> dict[str, FailureState]:
    """Return the states of the recorded failures by step."""
    failures = {name.removeprefix("d:"): value for name, value in steps.items() if is_failure(value)}
    return {name: FailureRecord.decode(value).state for name, value in failures.items()}


async def test_a_handled_failure_stays_and_another_is_dropped_with_the_attempt(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step("A", fail, "A")
        except ConnectionError as error:
            assert isinstance(error, RecordedFailure) == (ctx.attempt > 1)
        try:
            return await ctx.step("B", fail, "B")
        finally:
            assert ctx.resumed == (ctx.attempt > 1)

    handle = await pay.enqueue()
    await letter_of(app, handle)
    assert calls == {"A": 1, "B": 2}
    assert states(await recorded_steps(app, handle)) == {"A": FailureState.HANDLED}


async def letter_of(app: App, handle: Any) -> Any:
    await work_off(app)
    return await letter(app, handle)


async def test_a_failure_is_confirmed_before_the_next_call_starts(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step("A", fail, "A")
        except ConnectionError:
            return await ctx.step("B", work, "B")

    gate = Gate(monkeypatch)
    handle = await pay.enqueue()
    async with running_worker(app):
        await bounded(gate.reached.wait())
        for _ in range(20):
            await asyncio.sleep(0)
        assert calls == {"A": 1}
        gate.open.set()
        assert await bounded(handle.result()) == "B"


async def test_a_second_task_waits_for_the_same_confirmation(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's own call stores the failure of a branch; the branch must not continue before that."""

    @app.task
    async def pay(ctx: Context) -> list[str]:
        failed, continues = asyncio.Event(), asyncio.Event()

        async def branch() -> str:
            try:
                return await ctx.step("A", fail, "A")
            except ConnectionError:
                failed.set()
                await continues.wait()
                return await ctx.step("B", work, "B")

        running = asyncio.create_task(branch())
        await failed.wait()
        asyncio.get_running_loop().call_soon(continues.set)
        own = await ctx.step("own", work, "own")
        return [own, await running]

    gate = Gate(monkeypatch)
    handle = await pay.enqueue()
    async with running_worker(app):
        await bounded(gate.reached.wait())
        for _ in range(20):
            await asyncio.sleep(0)
        assert calls == {"A": 1}
        gate.open.set()
        assert await bounded(handle.result()) == ["own", "B"]
    assert states(await recorded_steps(app, handle)) == {"A": FailureState.HANDLED}


@pytest.mark.parametrize("error", [Unavailable("redis"), Snooze(after=1), StepDefinitionError("bad")], ids=repr)
async def test_an_error_that_is_no_failure_of_the_step_is_never_recorded(app: App, error: Exception) -> None:
    async def refuse() -> str:
        calls["refuse"] += 1
        raise error

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> str:
        try:
            return await ctx.step("refuse", refuse)
        except Exception:  # noqa: BLE001 - of several kinds
            await ctx.step("next", work, "next")
        if ctx.attempt == 1:
            raise ConnectionResetError
        return "done"

    handle = await job.enqueue()
    await work_off(app)
    assert await handle.result() == "done"
    assert calls["refuse"] == 2
    assert not states(await recorded_steps(app, handle))


async def test_the_text_is_whole_in_the_record_and_masked_in_events(app: App) -> None:
    async def login(token: str) -> str:
        raise ConnectionError(f"{token} was refused")

    @app.task
    async def job(ctx: Context, token: SecretStr) -> str:
        try:
            return await ctx.step("login", login, token.get_secret_value())
        except ConnectionError as error:
            return await ctx.step("length", measure, len(str(error)))

    async def measure(length: int) -> str:
        return str(length)

    handle = await job.enqueue(SecretStr("hunter2-hunter2"))
    await work_off(app)
    assert await handle.result() == str(len("hunter2-hunter2 was refused"))
    record = (await recorded_steps(app, handle))["d:login"]
    assert FailureRecord.decode(record).text == "hunter2-hunter2 was refused"
    (failed,) = [event for event in await history(handle) if event.type == "step_failed"]
    assert "hunter2" not in str(failed.data)


async def test_a_replay_can_drop_the_failures(app: App) -> None:
    healed: list[str] = []

    async def heal(name: str) -> str:
        calls[name] += 1
        if healed:
            return name
        raise ConnectionError(name)

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> str:
        for name in ("A", "B"):
            try:
                return await ctx.step(name, heal, name)
            except ConnectionError:
                await ctx.step(f"after {name}", work, f"after {name}")
        raise TimeoutError

    handle = await pay.enqueue()
    found = await letter_of(app, handle)
    healed.append("now")
    assert await replay(app.producer.gateway, found, Replay())
    found = await letter_of(app, handle)
    assert calls["A"] == calls["B"] == 1
    assert await replay(app.producer.gateway, found, Replay(rerun_failed=True))
    await work_off(app)
    assert await handle.result() == "A"
    assert calls == {"A": 2, "B": 1, "after A": 1, "after B": 1}
    (dropped,) = [event for event in await history(handle) if event.type == "failures_dropped"]
    assert dropped.data == {"steps": ["A", "B"], "count": 2}


async def test_dropping_failures_of_a_task_that_is_no_dead_letter_changes_nothing(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> str:
        return await ctx.step("A", fail, "A")

    handle = await pay.enqueue()
    found = await letter_of(app, handle)
    assert await replay(app.producer.gateway, found, Replay())
    assert not await replay(app.producer.gateway, found, Replay(rerun_failed=True))
    assert await handle.status() is State.QUEUED


async def test_a_failed_act_is_not_handled_by_the_calls_of_replan(app: App) -> None:
    """Else `act` would meet the same failure in each attempt, and its step would never be called again."""

    class Keeper(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="shop", title="shop")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            return await ctx.step("buy", fail if ctx.attempt == 1 else work, "buy")

        async def replan(self, ctx: Context, state: AgentState) -> list[PlanStep] | None:
            if any(step.error for step in state.plan):
                await ctx.step("think", work, "think")
            return None

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return str(state.results["shop"])

    agent: Any = app.agent(name="keeper", retry=Retry(max_attempts=2, base=0.0))(Keeper)
    handle = await agent.enqueue("buy it")
    await work_off(app)
    assert await handle.result() == "buy"
    assert calls["buy"] == 2


async def test_a_step_that_is_cut_off_while_its_record_is_written_is_cut_off_in_each_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler has seen a time-out, although the result may be stored."""
    runs: list[str] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> str:
        try:
            async with asyncio.timeout(None if ctx.attempt > 1 else 3600) as limit:
                asyncio.get_running_loop().call_soon(lambda: None)
                if ctx.attempt == 1:
                    gate.reached.clear()
                    waiting = asyncio.create_task(gate.reached.wait())
                    waiting.add_done_callback(lambda _: limit.reschedule(0))
                else:
                    limit.reschedule(asyncio.get_running_loop().time() + 0.05)
                runs.append(await ctx.step("slow", work, "slow"))
        except TimeoutError:
            runs.append("timed out")
            gate.open.set()
        await ctx.step("report", work, runs[-1])
        if ctx.attempt == 1:
            raise ConnectionResetError
        return runs[-1]

    gate = Gate(monkeypatch)
    handle = await job.enqueue()
    async with running_worker(app):
        assert await bounded(handle.result()) == "timed out"
    assert runs == ["timed out", "timed out"]
    assert calls["slow"] == 1


async def test_an_act_that_a_message_has_cut_off_calls_its_step_again(app: App) -> None:
    """The message cut the step off, and not `act`: it has not continued."""
    begun = asyncio.Event()

    async def slow() -> str:
        calls["slow"] += 1
        begun.set()
        if calls["slow"] == 1:
            await asyncio.sleep(3600)
        return "slow"

    class Listener(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="wait", title="wait")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            await ctx.step("first", work, "first")
            found = await ctx.step("slow", slow)
            return await ctx.step("last", work, found)

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return str(state.results["wait"])

    agent: Any = app.agent(name="listener", on_message="interrupt")(Listener)
    async with running_worker(app):
        handle = await agent.enqueue("wait")
        await bounded(begun.wait())
        await handle.send("stop that", sender="ada")
        assert await bounded(handle.result()) == "slow"
    assert calls == {"first": 1, "slow": 3}  # the last step is given "slow", and counts for it


async def test_a_failure_is_encrypted_under_its_place(settings: Settings) -> None:
    keys = SecretStr(generate_key())
    app = App("sealed", settings=settings.model_copy(update={"encryption_keys": keys}))

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step("A", fail, "confidential")
        except ConnectionError as error:
            await ctx.step("B", work, "B")
            if ctx.attempt == 1:
                raise
            return str(error)

    calls.clear()
    async with app:
        handle = await pay.enqueue()
        await work_off(app)
        assert await handle.result() == "confidential is down"
        record = (await recorded_steps(app, handle))["d:A"]
        assert b"confidential" not in record
        cipher = app.producer.gateway.encryptor.of(handle.partition, handle.id)
        assert FailureRecord.decode(cipher.decrypt("d:A", record)).text == "confidential is down"
    assert calls["confidential"] == 1


async def test_failures_of_a_large_checkpoint_are_raised_again(app: App) -> None:
    count = 1_200

    async def item(number: int) -> int:
        calls["item"] += 1
        if number % 100 == 0:
            raise ValueError(number)
        return number

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def batch(ctx: Context) -> int:
        done = 0
        for number in range(count):
            try:
                done += await ctx.options(durability="async").step("item", item, number)
            except ValueError:
                done -= 1
        await ctx.step("report", work, "report")
        if ctx.attempt == 1:
            raise ConnectionResetError
        return done

    handle = await batch.enqueue()
    await work_off(app)
    assert await handle.result() == sum(number or -1 if number % 100 else -1 for number in range(count))
    assert calls["item"] == count


async def test_a_time_out_of_the_task_drops_the_failure_that_it_has_not_handled(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0), timeout=0.2)
    async def job(ctx: Context) -> str:
        try:
            return await ctx.step("A", fail if ctx.attempt == 1 else work, "A")
        except ConnectionError:
            await asyncio.sleep(3600)
            raise

    handle = await job.enqueue()
    await work_off(app)
    assert await handle.result() == "A"


async def test_a_failure_that_a_cancelled_step_raises_is_not_recorded(app: App) -> None:
    """A stop of the run ended the step: its error says nothing about what the step does."""

    async def stubborn() -> str:
        calls["stubborn"] += 1
        try:
            if calls["stubborn"] == 1:
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionError("cleaned up") from None
        return "done"

    @app.task(retry=Retry(max_attempts=2, base=0.0), timeout=0.2)
    async def job(ctx: Context) -> str:
        return await ctx.step("stubborn", stubborn)

    handle = await job.enqueue()
    await work_off(app)
    assert await handle.result() == "done"


async def test_a_hook_meets_the_failure_again(settings: Settings) -> None:
    class Watch(Middleware):
        async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
            try:
                return await call_next()
            except ConnectionError as error:
                seen.append((step.name, step.recorded, str(error)))
                raise

    seen: list[tuple[str, bool, str]] = []
    calls.clear()
    async with App("hooked", settings=settings, middleware=[Watch()]) as app:

        @app.task(retry=Retry(max_attempts=2, base=0.0))
        async def pay(ctx: Context) -> str:
            try:
                return await ctx.step("A", fail, "A")
            except ConnectionError:
                await ctx.step("B", work, "B")
            if ctx.attempt == 1:
                raise ConnectionResetError
            return "done"

        handle = await pay.enqueue()
        await work_off(app)
        assert await handle.result() == "done"
    assert seen == [("A", False, "A is down"), ("A", True, "A is down")]
    assert calls["A"] == 1

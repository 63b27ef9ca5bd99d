"""Runs that resume from a large checkpoint: it is read in pages, while the handler asks for its steps."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
from perdure import (
    Agent,
    AgentState,
    AlreadyDone,
    App,
    Context,
    Handoff,
    PlanStep,
    Retry,
    Settings,
    State,
    StepResolvedAsFailed,
    TaskHandle,
    current_step,
)
from perdure.deadletter.policy import Reason
from perdure.queues import Gateway
from perdure.queues.delivery.step_pages import PAGE
from perdure.queues.transport.pipelining import Command
from perdure.worker.durable.steps.current import CURRENT_RUN, StepCall
from perdure.worker.durable.steps.keys import StepKeys
from perdure.worker.middleware import CallNext, Middleware

from tests.support.workers import (
    bounded,
    history,
    letter,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration

STEPS = 3 * PAGE
AGAIN = Retry(max_attempts=2, base=0.0)


class Seen(Middleware):
    """A middleware that counts the steps whose result came from a record."""

    def __init__(self) -> None:
        self.recorded: Counter[bool] = Counter()

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        try:
            return await call_next()
        finally:
            self.recorded[step.recorded] += 1


@pytest.fixture(params=[False, True], ids=["plain", "middleware"])
def seen(request: pytest.FixtureRequest) -> Seen | None:
    return Seen() if request.param else None


@pytest.fixture
async def app(settings: Settings, seen: Seen | None) -> AsyncIterator[App]:
    async with App("steps", settings=settings, middleware=[] if seen is None else [seen]) as app:
        yield app


def counted(number: int) -> str:
    return "page"


def numbered(number: int) -> str:
    return f"page-{number}"


def without_order(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.mark.parametrize("at_once", [False, True], ids=["in order", "at once"])
@pytest.mark.parametrize("name", [counted, numbered, without_order])
async def test_steps_of_a_large_checkpoint_run_once(
    app: App, seen: Seen | None, name: Callable[[int], str], at_once: bool
) -> None:
    calls: Counter[int] = Counter()
    known: list[int] = []

    async def read(number: int) -> int:
        calls[number] += 1
        return number

    @app.task(retry=AGAIN, durability="async")
    async def walk(ctx: Context) -> int:
        run = CURRENT_RUN.get()
        assert run is not None
        known.append(len(run.history.done))
        more = [*range(STEPS)] if ctx.attempt == 1 else [*range(STEPS + PAGE)]
        if at_once:
            found = await asyncio.gather(*(ctx.step(name(number), read, number) for number in more))
        else:
            found = [await ctx.step(name(number), read, number) for number in more]
        assert found == more
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return len(found)

    handle = await walk.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == STEPS + PAGE
    assert calls == Counter(range(STEPS + PAGE))
    assert known[0] == 0
    assert 0 < known[1] < 2 * PAGE  # the handler does not wait for the other pages
    if seen is not None:
        assert seen.recorded == {True: STEPS, False: STEPS + PAGE}


class Traffic:
    """The commands of this process that read the checkpoint or the log of a task. size: of their replies in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[str] = []
        self.size = 0
        self._task_id = ""
        command, pipeline, submit_now = Gateway.command, Gateway.pipeline, Gateway.submit_now

        async def counted_command(gateway: Gateway, *given: Any, **options: Any) -> Any:
            reply = await command(gateway, *given, **options)
            self._count([given], [reply])
            return reply

        async def counted_pipeline(gateway: Gateway, given: Sequence[Command], **options: Any) -> list[Any]:
            replies = await pipeline(gateway, given, **options)
            self._count(given, replies)
            return replies

        def counted_now(gateway: Gateway, *given: Any) -> asyncio.Future[Any]:
            reply = submit_now(gateway, *given)
            reply.add_done_callback(lambda done: self._count([given], [done.result()]))
            return reply

        monkeypatch.setattr(Gateway, "submit_now", counted_now)
        monkeypatch.setattr(Gateway, "command", counted_command)
        monkeypatch.setattr(Gateway, "pipeline", counted_pipeline)

    def start(self, handle: TaskHandle[Any]) -> None:
        self.commands, self.size, self._task_id = [], 0, handle.id

    def _count(self, commands: Sequence[Command], replies: Sequence[Any]) -> None:
        for given, reply in zip(commands, replies, strict=True):
            if self._task_id and str(given[1] if len(given) > 1 else "").endswith(
                (f":steps:{self._task_id}", f":log:{self._task_id}")
            ):
                self.commands.append(str(given[0]))
                self.size += size_of(reply)


def size_of(reply: Any) -> int:
    return (
        sum(map(size_of, reply)) if isinstance(reply, list | tuple) else len(reply) if isinstance(reply, bytes) else 8
    )


async def add_records(app: App, handle: TaskHandle[Any], count: int) -> None:
    """Add recorded steps to the checkpoint of a task that waits for its next attempt, and make it due."""
    for first in range(0, count, 5000):
        many = [part for number in range(first, min(first + 5000, count)) for part in (f"d:page-{number}", "{}\n1")]
        await redis_command(app, "HSET", handle.partition.steps(handle.id), *many)
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)


async def failed_once(app: App, handle: TaskHandle[Any]) -> None:
    """Run a task until its first attempt has failed, and it waits for the next one."""
    async with running_worker(app):
        await wait_until(lambda: _is_scheduled(handle), "its first attempt has failed")


async def _is_scheduled(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.SCHEDULED


LATER = Retry(max_attempts=2, base=600.0, jitter=0.0)


async def test_the_handler_starts_after_as_many_reads_for_any_number_of_records(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(monkeypatch)
    before_start: list[tuple[list[str], int]] = []
    for_new_steps: list[list[str]] = []

    @app.task(retry=LATER, durability="async")
    async def walk(ctx: Context) -> None:
        before_start.append(([*traffic.commands], traffic.size))
        await ctx.step("first", int, 1)
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        traffic.commands = []
        for number in range(100):
            await ctx.step("new", int, number)
        for_new_steps.append([*traffic.commands])

    for count in (2 * PAGE, 40 * PAGE):
        handle = await walk.enqueue()
        await failed_once(app, handle)
        await add_records(app, handle, count)
        traffic.start(handle)
        await work_off(app)
        await bounded(handle.result())
        traffic.start(handle)
    (_, few, _, many), (new_after_few, new_after_many) = before_start, for_new_steps
    assert "HLEN" in few[0]
    assert max(len(few[0]), len(many[0])) < 10  # what the first page has, and need not be read, is chance
    assert many[1] < 1.3 * few[1]
    assert 0 < len(new_after_few) < 5
    assert 0 < len(new_after_many) < 5


async def test_the_cost_of_a_recorded_step_does_not_grow_with_their_number(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[str] = []
    unmatched = StepKeys._unmatched

    def counting(keys: StepKeys, name: str, fields: Mapping[str, bytes]) -> dict[str, bytes]:
        searches.append(name)
        return unmatched(keys, name, fields)

    monkeypatch.setattr(StepKeys, "_unmatched", counting)
    runs: list[int] = []

    @app.task(retry=AGAIN, durability="async")
    async def walk(ctx: Context) -> None:
        runs.append(ctx.attempt)
        for number in range(STEPS * ctx.attempt):
            await ctx.step("read", int, number)
        if ctx.attempt == 1:
            raise ConnectionError("cut off")

    handle = await walk.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert runs == [1, 2]
    assert len(searches) < 10


@pytest.mark.parametrize("in_doubt", ["retry", "fail"])
async def test_a_step_in_doubt_is_found_in_a_large_checkpoint(app: App, in_doubt: Literal["retry", "fail"]) -> None:
    verified: list[int] = []

    def pay(amount: int) -> str:
        raise ConnectionError("no reply")

    def paid(amount: int) -> AlreadyDone[str]:
        verified.append(amount)
        return AlreadyDone("receipt")

    @app.task(retry=LATER)
    async def order(ctx: Context) -> str:
        how: dict[str, Any] = {"in_doubt": "fail"} if in_doubt == "fail" else {"verify": paid}
        return str(await ctx.options(risky=True, **how).step("pay", pay, 30))

    handle = await order.enqueue()
    await failed_once(app, handle)
    await redis_command(app, "HDEL", handle.partition.steps(handle.id), "s:#handoff")  # as after a crash
    await add_records(app, handle, 3 * PAGE)
    async with running_worker(app):
        if in_doubt == "fail":
            assert (await bounded(letter(app, handle))).reason is Reason.IN_DOUBT
        else:
            assert await bounded(handle.result()) == "receipt"
            assert verified == [30]


@pytest.mark.parametrize("decision", ["result", "failed"])
async def test_a_decision_is_found_in_a_large_checkpoint(app: App, decision: str) -> None:
    calls: list[int] = []

    def pay(amount: int) -> str:
        calls.append(amount)
        raise ConnectionError("no reply")

    @app.task(retry=LATER)
    async def order(ctx: Context) -> str:
        try:
            return await ctx.options(risky=True, in_doubt="fail").step("pay", pay, 30)
        except StepResolvedAsFailed as error:
            return error.text

    handle = await order.enqueue()
    await failed_once(app, handle)
    await add_records(app, handle, 3 * PAGE)
    given: dict[str, Any] = {decision: "receipt 17"}
    assert await handle.resolve_step("pay", **given) is State.SCHEDULED
    async with running_worker(app):
        assert await bounded(handle.result()) == "receipt 17"
    assert calls == [30]


async def test_the_drafted_handoff_of_a_large_checkpoint_names_the_step_in_doubt(app: App) -> None:
    found: list[Handoff | None] = []

    def pay() -> None:
        raise ConnectionError("no reply")

    @app.task(retry=LATER)
    async def order(ctx: Context) -> None:
        found.append(None if ctx.resumption is None else ctx.resumption.handoff)
        if ctx.attempt == 1:
            await ctx.options(risky=True).step("pay", pay)

    handle = await order.enqueue()
    await failed_once(app, handle)
    await redis_command(app, "HDEL", handle.partition.steps(handle.id), "s:#handoff")
    await add_records(app, handle, 3 * PAGE)
    await work_off(app)
    assert found[0] is None
    assert found[1] is not None
    assert [step.key for step in found[1].dependencies.in_doubt] == ["pay"]
    assert found[1].steps == 3 * PAGE


async def test_other_records_are_found_in_a_large_checkpoint(app: App) -> None:
    saved: list[Any] = []

    async def save() -> None:
        saved.append(current_step().saved)
        await current_step().save(len(saved))
        if len(saved) == 1:
            raise ConnectionError("cut off")

    @app.task(retry=AGAIN, durability="async")
    async def walk(ctx: Context) -> dict[str, Any]:
        for number in range(PAGE):
            await ctx.step("page", int, number)
            await ctx.decide(f"choice {number}")
        await ctx.artifacts.save("report", b"text")
        messages = [one.content for one in await ctx.inbox()]
        await ctx.send(ctx.task_id, "more")
        restored = {} if ctx.resumption is None else ctx.resumption.restored
        completed = await ctx.resume_info().state()
        await ctx.step("part", save)
        return {
            "artifacts": [one.name for one in await ctx.artifacts.list()],
            "messages": messages,
            "records": restored.get("records"),
            "names": [step.key for step in completed] if isinstance(completed, tuple) else None,
        }

    handle = await walk.enqueue()
    await handle.send("first")
    await work_off(app)
    found = await bounded(handle.result())
    assert found["artifacts"] == ["report"]
    assert found["messages"] == ["first"]
    assert found["records"] == 2 * PAGE + 5  # and an artifact with its link, an inbox, a message, progress
    assert found["names"] == [f"page#{number}" for number in range(PAGE - 49, PAGE + 1)], "the latest ones"
    assert saved == [None, 1]
    events = await history(handle)
    assert [event.data["choice"] for event in events if event.type == "decided"] == [f"choice {n}" for n in range(PAGE)]
    assert sum(event.type == "message_sent" for event in events) == 1


async def test_an_agent_resumes_within_a_step_of_many_calls(app: App) -> None:
    calls: Counter[int] = Counter()

    async def read(number: int) -> int:
        calls[number] += 1
        return number

    class Reader(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="read", title="read"), PlanStep(key="write", title="write")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
            if step.key == "read":
                for number in range(STEPS):
                    await ctx.step("page", read, number)
                if ctx.attempt == 1:
                    raise ConnectionError("cut off")
            return 1

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return len(state.results)

    agent = app.agent(name="reader", retry=AGAIN, durability="async")(Reader)
    handle = await agent.enqueue(goal="read")
    await work_off(app)
    assert await bounded(handle.result()) == 2
    assert calls == Counter(range(STEPS))
    assert not [key for key in await recorded_steps(app, handle) if "page" in key]

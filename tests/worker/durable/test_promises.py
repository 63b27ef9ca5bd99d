"""Promises: recorded once, in the handoff, taken over by successors, and logged if they are open at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, SyncContext, TaskHandle
from perdure.context import Commitment
from perdure.queues.event_log import read_log_tail
from perdure.testing import make_context
from perdure.worker.agents.journal.forks import fork
from perdure.worker.durable.journal.handoff.document import RECEIVED, Handoff
from perdure.worker.durable.promises import MAX_PROMISES, PROMISES
from perdure.worker.errors import StepDefinitionError

from tests.support.command_line import call
from tests.support.stored_data import FIRST, everything, with_keys
from tests.support.workers import bounded, history, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("work")]

AT_ONCE = Retry(max_attempts=3, base=0.0)
NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)


@pytest.fixture
def warnings_of() -> Iterator[list[str]]:
    """The warnings that workers log."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}", level="WARNING")
    yield lines
    logger.remove(sink)


async def logged(handle: TaskHandle[Any], *types: str) -> list[Any]:
    types = types or ("promised", "promise_kept", "left_promises")
    return [(event.type, event.data) for event in await history(handle) if event.type in types]


def promises_in(handoff: Handoff | None) -> list[tuple[str, str, str]]:
    return [] if handoff is None else [(one.by, one.to, one.what) for one in handoff.promises]


async def test_a_promise_is_recorded_once_and_kept(app: App, warnings_of: list[str]) -> None:
    runs: list[list[tuple[str, str, str]]] = []

    @app.task(retry=AT_ONCE)
    async def job(ctx: Context) -> None:
        runs.append(promises_in(ctx.resumption.handoff if ctx.resumption else None))
        await ctx.promise("ada", "send the list", NOON)
        await ctx.promise("bob", "call back")
        if len(runs) == 1:
            raise ValueError("once more")
        await ctx.keep("ada", "send the list")
        if len(runs) == 2:
            raise ValueError("and again")
        await ctx.keep("bob", "call back")

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        await bounded(handle.result())
        assert await logged(handle) == [
            ("promised", {"what": "send the list", "to": "ada", "due": "2030-01-02T12:00:00Z"}),
            ("promised", {"what": "call back", "to": "bob"}),
            ("promise_kept", {"what": "send the list", "to": "ada"}),
            ("promise_kept", {"what": "call back", "to": "bob"}),
        ]
    assert runs == [[], [("me", "ada", "send the list"), ("me", "bob", "call back")], [("me", "bob", "call back")]]
    assert not [line for line in warnings_of if "open promise" in line]


async def test_a_promise_that_is_open_at_the_end_is_logged_warned_of_and_shown(
    app: App, settings: Settings, warnings_of: list[str], environment: None
) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context, fails: bool) -> None:
        await ctx.promise("ada", "send the list", NOON)
        if fails:
            raise ValueError("no")

    async with app:
        done, dead = await job.enqueue(False), await job.enqueue(True)
        await work_off(app)
        for handle in (done, dead):
            [left] = await logged(handle, "left_promises")
            what = {"what": "send the list", "to": "ada", "due": "2030-01-02T12:00:00Z"}
            assert left == ("left_promises", {"count": 1, "promises": [what]})
            text = "send the list (to ada), due 2030-01-02 12:00:00 UTC"
            assert f"task {handle.id} ends with 1 open promise: {text}\n" in warnings_of
        assert await dead.status() is State.DEAD
        for handle in (done, dead):
            shown = await asyncio.to_thread(call, "task", "show", handle.id)
            assert "send the list" in shown.out, shown.err
            found = (await asyncio.to_thread(call, "task", "show", handle.id, "--json")).json
            assert [(one["to"], one["what"]) for one in found["promises"]] == [("ada", "send the list")]
            text = (await asyncio.to_thread(call, "task", "handoff", handle.id, "--json")).json
            assert [one["what"] for one in text["promises"]] == ["send the list"]
            text = (await asyncio.to_thread(call, "task", "handoff", handle.id)).out
            assert "- promised to ada (due 2030-01-02 12:00:00 UTC): send the list\n" in text


async def test_a_promise_is_shown_in_one_line(app: App, environment: None) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        await ctx.promise("ada\nbob", "send\nstate  dead")

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        await bounded(handle.result())
        shown = (await asyncio.to_thread(call, "task", "show", handle.id)).out
    assert "promises   send state dead (to ada bob)" in shown


async def test_a_cancelled_task_logs_its_promises(app: App, warnings_of: list[str]) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        await ctx.promise("ada", "send the list")
        await ctx.step("stored", str, 1)
        await asyncio.Event().wait()

    async with app, running_worker(app):
        handle = await job.enqueue()

        async def promised() -> bool:
            return bool(await logged(handle))

        await wait_until(promised, "it has promised")
        await handle.cancel()

        async def ended() -> bool:
            return await handle.status() is State.CANCELLED

        await wait_until(ended, "it is cancelled")
        assert len(await logged(handle, "left_promises")) == 1
    assert any("ends with 1 open promise" in line for line in warnings_of)


async def test_a_message_and_its_promise_are_stored_once(app: App) -> None:
    runs: list[int] = []

    @app.task
    async def other(ctx: Context) -> None: ...

    @app.task(retry=AT_ONCE)
    async def job(ctx: Context, to: str) -> None:
        runs.append(1)
        await ctx.send(to, "I will", promise="the figures", due=NOON)
        if len(runs) == 1:
            raise ValueError("once more")
        await ctx.keep(to, "the figures")

    async with app:
        receiver = await other.options(delay=3600).enqueue()
        handle = await job.enqueue(receiver.id)
        await work_off(app)
        await bounded(handle.result())
        due = {"due": "2030-01-02T12:00:00Z"}
        assert await logged(handle) == [
            ("promised", {"what": "the figures", "to": receiver.id, **due}),
            ("promise_kept", {"what": "the figures", "to": receiver.id}),
        ]
        assert [message.content for message in await receiver.pending_messages()] == ["I will"]


async def test_an_answer_is_owed_until_its_wait_has_ended(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> list[Any]:
        first = await ctx.wait_for("approval", bool, who="ada", why="pay 17")
        with ctx.scope("late"):
            second = await ctx.wait_for("approval", timeout=0.01, default="none", who="bob")
        return [first, second]

    async def owed(handle: TaskHandle[Any]) -> list[tuple[str, str, str]]:
        found = (await read_log_tail(app.producer.gateway, handle.partition, handle.id)).saved
        return (
            []
            if PROMISES not in found
            else [(one["by"], one["what"], one["wait"]) for one in orjson.loads(found[PROMISES])]
        )

    async with app, running_worker(app):
        handle = await job.enqueue()

        async def waits() -> bool:
            return bool(await handle.waits())

        await wait_until(waits, "it waits")
        assert await owed(handle) == [("ada", "pay 17", "approval")]
        await handle.answer("approval", True)
        assert await bounded(handle.result()) == [True, "none"]
        assert await owed(handle) == []
        assert await logged(handle) == []


async def test_promises_travel_with_a_successor_as_they_are(
    app: App, warnings_of: list[str], environment: None
) -> None:
    long, seen = "x" * 900, list[list[tuple[str, str, str]]]()

    @app.task(retry=AT_ONCE)
    async def second(ctx: Context) -> None:
        assert ctx.resumption is not None
        seen.append(promises_in(ctx.resumption.received))
        for number in range(40):
            await ctx.keep("ada", f"{number} {long}")
        if len(seen) == 1:
            raise ValueError("once more")
        await ctx.promise("ada", "more")

    @app.task
    async def first(ctx: Context) -> None:
        for number in range(40):
            await ctx.promise("ada", f"{number} {long}")
        _ = await ctx.open_wait("approval", who="bob", why="pay?")
        await ctx.continue_as(second)

    async with app:
        handle = await first.enqueue()
        await work_off(app)
        await bounded(handle.result())
        assert await logged(handle, "left_promises") == []
        following = await handle.successor()
        assert following is not None
        [(_, left)] = await logged(following, "left_promises")
        assert [one["what"] for one in left["promises"]] == ["pay?", "more"]
        tail = await read_log_tail(app.producer.gateway, following.partition, following.id)
        assert len(Handoff.from_json(following.id, tail.saved[RECEIVED]).promises) == 41
        shown = [
            (await asyncio.to_thread(call, "task", "show", task.id, "--json")).json for task in (handle, following)
        ]
        assert [len(found["promises"]) for found in shown] == [0, 2]
    assert seen[0] == seen[1]
    assert seen[0][0] == ("me", "ada", f"0 {long}")
    assert not any(handle.id in line and "open promise" in line for line in warnings_of if following.id not in line)


class Promises(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        await ctx.promise("ada", "send the list", NOON)
        return [PlanStep(key="a", title="A"), PlanStep(key="b", title="B")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
        if step.key == "a":
            await ctx.promise("bob", "call back")
            state.commitments.append(Commitment(what="by hand", to="eve"))
            return await ctx.ask("eve", "how many?", int, name="many")
        await ctx.keep("ada", "send the list")
        return None

    async def finish(self, ctx: Context, state: AgentState) -> Any:
        return [(one.to, one.what, one.done) for one in state.commitments]


async def test_promises_of_an_agent_are_commitments_of_its_state(app: App, warnings_of: list[str]) -> None:
    task = app.agent(Promises, name="promises")
    async with app, running_worker(app):
        handle = await task.enqueue("go")

        async def waits() -> bool:
            return bool(await handle.waits())

        await wait_until(waits, "it waits")
        await handle.answer("many", 3)
        assert await bounded(handle.result()) == [
            ["ada", "send the list", True],
            ["bob", "call back", False],
            ["eve", "by hand", False],
        ]
        [(_, left)] = await logged(handle, "left_promises")
        assert [one["what"] for one in left["promises"]] == ["call back", "by hand"]
    assert any("ends with 2 open promises" in line for line in warnings_of)


async def test_promises_of_an_agent_travel_with_its_successor(app: App) -> None:
    class Taker(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="a", title="A")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            await ctx.keep("ada", "send the list")

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return [(one.by, one.to, one.what, one.done) for one in state.commitments]

    taker = app.agent(Taker, name="taker")

    class Giver(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="a", title="A")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            await ctx.promise("ada", "send the list", NOON)
            await ctx.promise("me", "the key", by="ben")
            state.commitments.append(Commitment(what="done already", to="eve", done=True))
            await ctx.continue_as(taker, arguments={"goal": "go on"})

        async def finish(self, ctx: Context, state: AgentState) -> Any: ...

    giver = app.agent(Giver, name="giver")
    async with app:
        handle = await giver.enqueue("go")
        await work_off(app)
        assert await bounded(handle.result()) == [["me", "ada", "send the list", True], ["ben", "me", "the key", False]]


async def test_a_fork_has_the_promises_of_its_point(app: App) -> None:
    """Also those that the source has taken over, and an answer that is owed."""
    seen: list[list[str]] = []

    @app.task(retry=Retry(max_attempts=1))
    async def second(ctx: Context) -> None:
        if ctx.resumption is not None and ctx.resumption.after == "fork":
            seen.append([what for _, _, what in promises_in(ctx.resumption.handoff)])
        await ctx.promise("bob", "call")
        await ctx.step("one", str, 1)
        await ctx.keep("ada", "send")
        await ctx.step("two", str, 2)
        _ = await ctx.open_wait("approval", who="eve", why="pay?")
        await ctx.keep("bob", "call")

    @app.task
    async def first(ctx: Context) -> None:
        await ctx.promise("ada", "send")
        await ctx.continue_as(second)

    async with app:
        handle = await first.enqueue()
        await work_off(app)
        await bounded(handle.result())
        source = await handle.successor()
        assert source is not None
        forked = [(await fork(app.producer, source.id, at=at)).handle for at in ("one", "two", None)]
        forked.append((await fork(app.producer, forked[0].id, at=1)).handle)
        await work_off(app)
        for each in forked:
            assert await each.status() is State.SUCCEEDED
    assert sorted(seen) == [["call"], ["pay?"], ["send", "call"], ["send", "call"]]


async def test_handlers_in_threads_make_promises(app: App) -> None:
    @app.task
    def job(ctx: SyncContext) -> None:
        ctx.promise("ada", "send the list")
        ctx.keep("ada", "send the list")

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        await bounded(handle.result())
        assert [name for name, _ in await logged(handle)] == ["promised", "promise_kept"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("", "call"), r"to of a promise must be the name of a person or a task, 1 to 200 characters, got ''"),
        ((None, "call"), r"to of a promise must be the name of a person or a task, .* got None"),
        (("me", "call"), r"a promise must have two parties, got 'me' and 'me'"),
        (("ada", " "), r"what is promised must be a text of 1 to 1,000 characters, got ' '"),
        (("ada", "x" * 1001), r"what is promised must be a text of 1 to 1,000 characters"),
        (("ada", "call", 5), r"due of a promise must be a datetime with a time zone, got 5"),
        (("ada", "call", datetime(2030, 1, 1)), r"due of a promise must be a datetime with a time zone"),  # noqa: DTZ001
    ],
)
async def test_a_promise_that_is_none_says_why(arguments: Any, problem: str) -> None:
    ctx = make_context()
    with pytest.raises(StepDefinitionError, match=f"^{problem}"):
        await ctx.promise(*arguments)
    if arguments[0]:
        with pytest.raises(StepDefinitionError, match=f"^{problem}"):
            await Context.send(ctx, arguments[0], "hello", promise=arguments[1], due=(*arguments, None)[2])
    assert ctx.events == []


async def test_only_an_open_promise_is_kept() -> None:
    ctx = make_context()
    await ctx.promise("ada", "call")
    with pytest.raises(
        StepDefinitionError, match=r"could not keep promise 'write \(to ada\)': it is not open; open are: call"
    ):
        await ctx.keep("ada", "write")
    await ctx.keep("ada", "call")
    with pytest.raises(StepDefinitionError, match="open are: none"):
        await ctx.keep("ada", "call")
    for number in range(MAX_PROMISES + 5):
        await ctx.promise("ada", str(number))
    await ctx.keep("ada", "0")  # the oldest has made room
    assert [event.type for event in ctx.events].count("promise_kept") == 2


async def test_promises_of_encrypted_tasks_are_encrypted(settings: Settings) -> None:
    app = App("work", settings=with_keys(settings, FIRST))

    @app.task
    async def second(ctx: Context) -> None:
        await ctx.keep("ada-lovelace", "secretly")
        await ctx.promise("ada-lovelace", "hushed")

    @app.task
    async def first(ctx: Context) -> None:
        await ctx.promise("ada-lovelace", "secretly")
        await ctx.continue_as(second)

    async with app:
        handle = await first.enqueue()
        await work_off(app)
        await bounded(handle.result())
        stored = await everything(app)
        assert not [word for word in (b"secretly", b"hushed", b"ada-lovelace") if word in stored]

"""A run keeps the version of its task's code: it resumes under it, and only where that code is deployed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Unavailable, set_partitions
from perdure.queues.delivery.checkpoint import Entry
from perdure.worker.agent_task import AgentTask
from perdure.worker.agents.journal.forks import fork
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.errors import TaskDefinitionError

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import (
    bounded,
    history,
    letter,
    recorded_steps,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration

LATER = Retry(max_attempts=3, base=60.0, jitter=0.0)


class Deploy:
    """The app in one version of its code, whose task fails in its first attempt."""

    def __init__(self, settings: Settings, version: int, *, steps: bool = True) -> None:
        self.app = App("deployed", settings=settings)
        self.seen: list[int] = []
        self.ran: list[str] = []

        @self.app.task(version=version, retry=LATER)
        async def report(ctx: Context) -> int:
            self.seen.append(ctx.version)
            if steps:
                await ctx.step("one", self._one)
            if ctx.attempt == 1:
                raise ConnectionError("once")
            return ctx.version

        self.report = report

    async def _one(self) -> None:
        self.ran.append("one")


@asynccontextmanager
async def deployed(settings: Settings, version: int, *, steps: bool = True) -> AsyncIterator[Deploy]:
    deploy = Deploy(settings, version, steps=steps)
    async with deploy.app:
        yield deploy


async def after_one_attempt(deploy: Deploy) -> TaskHandle[int]:
    """Return a task whose first attempt has failed, and which is due."""
    handle = await deploy.report.enqueue()
    async with running_worker(deploy.app):
        await wait_until(lambda: has_state(handle, State.SCHEDULED), "its first attempt has failed")
    await make_due(deploy.app, handle)
    return handle


async def has_state(handle: TaskHandle[Any], state: State) -> bool:
    return await handle.status() is state


async def make_due(app: App, handle: TaskHandle[Any]) -> None:
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)


async def waits(handle: TaskHandle[Any], task: str = "report") -> bool:
    return (await handle.record()).waits == f"version 2 of {task}"


@pytest.mark.parametrize(
    ("first", "second", "seen"), [(1, 2, 1), (2, 2, 2), (2, 3, 2), (1, 1, 1)], ids=lambda version: f"v{version}"
)
async def test_a_resumed_run_has_the_version_that_the_task_began_with(
    settings: Settings, first: int, second: int, seen: int
) -> None:
    async with deployed(settings, first) as old:
        handle = await after_one_attempt(old)
        assert old.seen == [first]
    async with deployed(settings, second) as new:
        await work_off(new.app)
        found = await new.app.producer.find(handle.id)
        assert found is not None
        assert await bounded(found.result()) == seen
        assert (new.seen, new.ran) == ([seen], [])


async def test_the_version_is_stored_where_the_reply_to_the_resumption_was_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is stored, its reply is lost, and it is sent again together with the version and the first step."""
    write = CheckpointWriter.put_or_drop

    async def lose_reply(writer: CheckpointWriter, *entries: Entry) -> bool:
        await write(writer, *entries)
        writer._last -= len(entries)
        raise Unavailable("the reply was lost")

    monkeypatch.setattr(CheckpointWriter, "put_or_drop", lose_reply)
    async with deployed(settings, 2) as deploy:
        handle = await deploy.report.enqueue()
        await take_and_die(deploy.app)
        async with running_worker(deploy.app):
            await wait_until(lambda: has_state(handle, State.SCHEDULED), "its first attempt has failed")
        stored = await recorded_steps(deploy.app, handle)
        assert (stored.get("d:one") is not None, stored["s:#version"]) == (True, b"2")
        assert [event.type for event in await history(handle)].count("resumed") == 1


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 3)])
async def test_a_task_that_has_recorded_nothing_begins_with_the_version_of_its_next_worker(
    settings: Settings, first: int, second: int
) -> None:
    async with deployed(settings, first, steps=False) as old:
        handle = await after_one_attempt(old)
        assert await redis_command(old.app, "EXISTS", handle.partition.steps(handle.id)) == 0, "it writes nothing"
    async with deployed(settings, second) as new:
        await work_off(new.app)
        assert new.seen == [second]


async def test_the_version_is_stored_with_the_first_record_in_one_act(settings: Settings) -> None:
    async with deployed(settings, 2) as new:
        handle = await after_one_attempt(new)
        stored = await recorded_steps(new.app, handle)
        assert set(stored) - {"s:#handoff"} == {"d:one", "s:#version"}
        assert stored["s:#version"] == b"2"
        first = (await redis_command(new.app, "XRANGE", handle.partition.log(handle.id), "-", "+"))[0][1]
        assert first[first.index(b"e") + 1] == b"1"
        record = handle.partition.record(handle.id)
        assert await redis_command(new.app, "HGET", record, "entries") == b"2", (
            "the step is entry 1, the version entry 2"
        )


async def test_a_task_of_version_1_stores_no_version(settings: Settings) -> None:
    async with deployed(settings, 1) as old:
        handle = await after_one_attempt(old)
        assert "s:#version" not in await recorded_steps(old.app, handle)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_task_of_newer_code_waits_for_a_worker_that_has_it(settings: Settings, encrypted: bool) -> None:
    if encrypted:
        settings = with_keys(settings, FIRST)
    async with deployed(settings, 2) as new, deployed(settings, 1) as old:
        handle = await after_one_attempt(new)
        async with running_worker(old.app):
            await wait_until(lambda: waits(handle), "it is parked")
        record = await handle.record()
        assert (record.state, record.attempts, old.seen) == (State.WAITING, 1, [])
        since = int(await redis_command(new.app, "HGET", handle.partition.record(handle.id), "newer_since"))
        assert record.due_at == since + round(settings.version_wait * 1000)
        async with running_worker(new.app):  # it starts to serve the partition
            assert await bounded(handle.result()) == 2
        assert (new.seen, new.ran) == ([2, 2], ["one"])
        assert await redis_command(new.app, "EXISTS", handle.partition.task_versions("report")) == 0
        assert await redis_command(new.app, "HGET", handle.partition.record(handle.id), "newer_since") is None


async def test_a_task_that_older_workers_take_again_reaches_a_newer_one_soon(settings: Settings) -> None:
    """The newer worker has no free slot when the task is made due for it, so the older one parks the task again."""
    async with deployed(settings, 2) as new, deployed(settings, 1) as old:
        started, released = asyncio.Event(), asyncio.Event()

        @new.app.task
        async def hold(ctx: Context) -> None:
            started.set()
            await released.wait()

        handle = await after_one_attempt(new)
        await redis_command(new.app, "ZADD", handle.partition.due, "XX", 1 << 50, handle.id)
        await hold.enqueue()
        async with running_worker(new.app, concurrency=1):
            await bounded(started.wait())
            await make_due(new.app, handle)
            async with running_worker(old.app):
                await wait_until(lambda: waits(handle), "it is parked")
                released.set()
                assert await handle.result(timeout=30) == 2, "well before the next round of a minute"
        assert (new.seen, new.ran, old.seen) == ([2, 2], ["one"], [])


@pytest.mark.parametrize(("partitions", "slots"), [(1, 1), (4, 2), (4, 1)])
async def test_a_task_reaches_a_newer_worker_beside_older_ones_that_wait_for_messages(
    settings: Settings, partitions: int, slots: int
) -> None:
    """The older workers have slots for all partitions, so their reads block. The newer one polls if it has not."""
    async with deployed(settings, 2) as new, deployed(settings, 1) as old, AsyncExitStack() as stack:
        await set_partitions(new.app.producer.gateway, new.app.producer.namespace, new.app.name, partitions)
        handle = await after_one_attempt(new)
        for _ in range(2):
            await stack.enter_async_context(running_worker(old.app, concurrency=8))
        await wait_until(lambda: waits(handle), "an older worker parks it")
        await stack.enter_async_context(running_worker(new.app, concurrency=slots))
        assert await handle.result(timeout=30) == 2, "well before the next round of a minute"
        assert (new.seen, new.ran, old.seen) == ([2, 2], ["one"], [])


async def test_a_task_whose_arguments_the_older_code_does_not_accept_waits_too(settings: Settings) -> None:
    new, old = App("deployed", settings=settings), App("deployed", settings=settings)

    @new.task(name="report", version=2, retry=LATER)
    async def newer(ctx: Context, page: int) -> int:
        await ctx.step("one", len, "x")
        if ctx.attempt == 1:
            raise ConnectionError("once")
        return page

    @old.task(name="report")
    async def older(ctx: Context) -> None:
        raise AssertionError("it must not run")

    async with new, old:
        handle = await newer.enqueue(page=7)
        async with running_worker(new):
            await wait_until(lambda: has_state(handle, State.SCHEDULED), "its first attempt has failed")
        await make_due(new, handle)
        async with running_worker(old):
            await wait_until(lambda: left_the_queue(handle), "the older worker has settled it")
        assert await handle.status() is State.WAITING
        async with running_worker(new):
            assert await bounded(handle.result()) == 7


def traveller(app: App, version: int, seen: list[int]) -> AgentTask[AgentState]:
    class Traveller(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="go", title="go")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
            seen.append(ctx.version)
            if len(seen) == 1:
                raise ConnectionError("once")

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return ctx.version

    return app.agent(Traveller, version=version, retry=LATER)


async def test_an_agent_that_began_with_newer_code_waits_for_it(settings: Settings) -> None:
    async with App("deployed", settings=settings) as new, App("deployed", settings=settings) as old:
        seen, older = list[int](), list[int]()
        agent = traveller(new, 2, seen)
        traveller(old, 1, older)
        handle = await agent.enqueue("home")
        async with running_worker(new):
            await wait_until(lambda: has_state(handle, State.SCHEDULED), "its first attempt has failed")
        await make_due(new, handle)
        async with running_worker(old):
            await wait_until(lambda: waits(handle, "traveller"), "it is parked")
        async with running_worker(new):
            assert await bounded(handle.result()) == 2
    assert (seen, older) == ([2, 2], [])


def test_an_agent_has_no_strict_order() -> None:
    with pytest.raises(TaskDefinitionError, match=r"strict_order; .* use it for functions only"):
        App("deployed").agent(Agent, name="a", strict_order=True)  # type: ignore[call-overload]
    with pytest.raises(TaskDefinitionError, match="version must be a whole number from 1, got 0"):
        traveller(App("deployed"), 0, [])


async def left_the_queue(handle: TaskHandle[Any]) -> bool:
    return await handle.status() in (State.WAITING, State.DEAD)


async def test_an_older_worker_parks_it_for_the_rest_of_the_wait_then_buries_it(settings: Settings) -> None:
    async with deployed(settings, 2) as new, deployed(settings, 1) as old:
        handle = await after_one_attempt(new)
        record = handle.partition.record(handle.id)
        async with running_worker(old.app):
            await wait_until(lambda: waits(handle), "it is parked")
            due, settled = (await handle.record()).due_at, await redis_command(old.app, "HGET", record, "settled")
            await make_due(old.app, handle)

            async def again() -> bool:
                return await redis_command(old.app, "HGET", record, "settled") != settled and await waits(handle)

            await wait_until(again, "it is parked again")
            assert (await handle.record()).due_at == due
            await redis_command(old.app, "HINCRBY", record, "newer_since", -round(settings.version_wait * 1000))
            await make_due(old.app, handle)
            found = await bounded(letter(old.app, handle))
        assert (found.reason, found.attempts) == (Reason.NEWER_VERSION, 1)
        assert "began with version 2 of 'report', this worker has version 1: deploy the newer code" in found.message
        assert await replay(new.app.producer.gateway, found, Replay())
        async with running_worker(new.app):
            await wait_until(lambda: has_state(handle, State.SCHEDULED), "it has run again")
        assert (new.seen, new.ran) == ([2, 2], ["one"])


async def test_a_fresh_start_has_the_version_of_its_worker(settings: Settings) -> None:
    async with deployed(settings, 2) as new, deployed(settings, 1) as old:
        handle = await after_one_attempt(new)
        async with running_worker(old.app):
            await wait_until(lambda: waits(handle), "it is parked")
            record = handle.partition.record(handle.id)
            await redis_command(old.app, "HINCRBY", record, "newer_since", -round(settings.version_wait * 1000))
            await make_due(old.app, handle)
            found = await bounded(letter(old.app, handle))
            assert await replay(old.app.producer.gateway, found, Replay(fresh=True))
            await wait_until(lambda: has_state(handle, State.SCHEDULED), "it has run from its first step")
        assert (old.seen, old.ran) == ([1], ["one"])


async def test_crashes_are_counted_although_an_older_worker_gets_the_task_meanwhile(settings: Settings) -> None:
    async with deployed(settings, 2) as new, deployed(settings, 1) as old:
        handle = await after_one_attempt(new)
        await redis_command(new.app, "HSET", handle.partition.record(handle.id), "crashes", 1)
        async with running_worker(old.app):
            await wait_until(lambda: waits(handle), "it is parked")
        assert (await handle.record()).crashes == 1


async def test_a_fork_has_the_version_of_its_source(settings: Settings) -> None:
    async with deployed(settings, 2) as new, deployed(settings, 3) as newer:
        handle = await after_one_attempt(new)
        found = await fork(new.app.producer, handle.id)
        async with running_worker(newer.app):
            await wait_until(lambda: _seen(newer, 2), "both have run")
            await wait_until(lambda: has_state(found.handle, State.SCHEDULED), "the attempt of the fork has failed")
        assert (newer.seen, newer.ran) == ([2, 2], [])


async def _seen(deploy: Deploy, count: int) -> bool:
    return len(deploy.seen) >= count


async def test_a_version_that_is_no_number_is_buried(settings: Settings) -> None:
    async with deployed(settings, 2) as new:
        handle = await after_one_attempt(new)
        await redis_command(new.app, "HSET", handle.partition.steps(handle.id), "s:#version", "two")
        async with running_worker(new.app):
            found = await bounded(letter(new.app, handle))
        assert found.reason is Reason.UNREADABLE
        assert "the version of the task must be a number, got b'two'" in found.message


@pytest.mark.parametrize("version", [0, -1, "2", 1.0, True, None])
def test_a_version_must_be_a_whole_number(settings: Settings, version: Any) -> None:
    app = App("deployed", settings=settings)
    with pytest.raises(TaskDefinitionError, match="task 'report': version must be a whole number from 1"):

        @app.task(version=version)
        async def report(ctx: Context) -> None: ...

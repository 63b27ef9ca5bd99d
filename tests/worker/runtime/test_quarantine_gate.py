"""Quarantined tasks in workers: which worker runs them, how many at a time, and when the quarantine ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskFailed, TaskHandle, Worker
from perdure.deadletter.policy import Reason
from perdure.queues import Refused
from perdure.queues.delivery.leases import Leases
from perdure.queues.delivery.quarantine_store import quarantine, report_crash
from perdure.queues.envelope import Envelope
from perdure.queues.keys import GROUP, SUSPECTS
from perdure.worker.runtime.executor import Executor
from perdure.worker.runtime.supervisor_link import InheritedPipe, Role, SupervisorLink

from tests.support.consumers import LONG_AGO, claim_all, promote, read, worker
from tests.support.workers import (
    bounded,
    partition_of,
    pending,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("isolation", lease=60.0, quarantine_window=600.0)]


class Supervisor:
    """The supervisor's end of a link: collects the messages of the worker in order."""

    def __init__(self, role: Role) -> None:
        self._reader, child_write = os.pipe()
        child_read, self._writer = os.pipe()
        self._ends = (self._reader, self._writer, child_read, child_write)
        self.link = SupervisorLink(role, InheritedPipe(child_read, child_write))
        self._said = b""

    def said(self) -> list[dict[str, Any]]:
        os.set_blocking(self._reader, False)
        while True:
            try:
                self._said += os.read(self._reader, 65_536)
            except BlockingIOError:
                break
        return [orjson.loads(line) for line in self._said.splitlines()]

    async def hears(self, what: str, number: int = 1) -> dict[str, Any]:
        async def heard() -> bool:
            return len([line for line in self.said() if line["say"] == what]) >= number

        await wait_until(heard, f"{what} was said")
        return [line for line in self.said() if line["say"] == what][number - 1]

    def close(self) -> None:
        for descriptor in self._ends:
            os.close(descriptor)


@asynccontextmanager
async def supervised(app: App, role: Role, concurrency: int = 16) -> AsyncIterator[tuple[Worker, Supervisor]]:
    supervisor = Supervisor(role)
    try:
        async with Worker(app, concurrency=concurrency, link=supervisor.link) as runner:
            running = asyncio.create_task(runner.run())
            try:
                yield runner, supervisor
            finally:
                runner.stop()
                runner.stop()
                await bounded(running)
    finally:
        supervisor.close()


async def crash_with(app: App, number: int, *, times: int = 2, name: str = "dead") -> None:
    """Let workers take a number of new tasks and crash, one after another; a supervisor reports each crash.

    Args:
        times: Number of crashes; after two in a row, the tasks are suspects.
    """
    gateway, partition = app.producer.gateway, partition_of(app)
    for crash in range(times):
        dead = await worker(gateway, partition, name=f"{name}-{crash}")
        assert len(await (claim_all(dead) if crash else read(dead, number))) == number
        found = await report_crash(
            gateway, app.producer.namespace, [app.name], f"{name}-{crash}", exit_status="SIGKILL", steps={}
        )
        assert found.deliveries == number


async def quarantine_new(app: App, number: int, name: str = "dead") -> None:
    """Let workers crash twice with a number of new tasks, and another worker put them into quarantine."""
    await crash_with(app, number, name=name)
    gateway = app.producer.gateway
    for delivery in await claim_all(await worker(gateway, partition_of(app), name=f"{name}-finder")):
        await quarantine(gateway, delivery, Envelope.decode(delivery.fields[b"env"]).id)


async def crash_twice_unseen(app: App) -> None:
    """Let two workers in a row take the next message and die; nothing reports it, and the lease passes."""
    entry = await take_and_die(app)
    claim = ("XCLAIM", partition_of(app).ready, GROUP, "dead-worker", 0, entry)
    await redis_command(app, *claim, "IDLE", LONG_AGO, "RETRYCOUNT", 2, "JUSTID")


async def state(handle: TaskHandle[Any]) -> State:
    return (await handle.record()).state


# under a supervisor


async def test_a_supervised_worker_leaves_quarantined_tasks_to_its_supervisor(app: App) -> None:
    ran = []

    @app.task
    async def job(ctx: Context, number: int) -> int:
        ran.append(number)
        return number

    handles = await job.enqueue_many({"number": number} for number in range(2))
    await crash_with(app, 2)
    async with supervised(app, "worker") as (_, supervisor):
        await supervisor.hears("suspects")
        after = await job.enqueue(2)
        assert await bounded(after.result()) == 2
        assert ran == [2]
        assert {await state(handle) for handle in handles} == {State.QUEUED}


async def test_an_isolated_worker_runs_only_quarantined_tasks_one_at_a_time(app: App) -> None:
    running, most, ran = [0], [0], []

    @app.task
    async def job(ctx: Context, number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        ran.append(await ctx.step("only", echo, number))
        running[0] -= 1
        return number

    handles = await job.enqueue_many({"number": number} for number in range(3))
    await quarantine_new(app, 3)
    ordinary = await job.enqueue(99)
    async with supervised(app, "isolated", concurrency=1) as (runner, supervisor):
        assert [await bounded(handle.result()) for handle in handles] == [0, 1, 2]
        await supervisor.hears("idle")
        assert (most, ran) == ([1], [0, 1, 2])
        assert await state(ordinary) is State.QUEUED
        reported = [line for line in supervisor.said() if line["say"] in ("begins", "step", "ends")]
        assert reported[:3] == [
            {"say": "begins", "id": handles[0].id, "task": "job"},
            {"say": "step", "id": handles[0].id, "step": "only"},
            {"say": "ends", "id": handles[0].id},
        ]
        assert len(reported) == 9
        order = [line["say"] for line in supervisor.said() if line["say"] in ("begins", "suspects")]
        assert order == ["begins", "suspects", "begins", "suspects", "begins"]  # never "suspects" while it seems free
        assert [(await handle.record()).crashes for handle in handles] == [2, 2, 2]

        late = await job.enqueue(7)
        await quarantine_new(app, 2, name="late")
        runner.check_quarantine()
        assert await bounded(late.result()) == 7
        assert await bounded(ordinary.result()) == 99


async def echo(value: int) -> int:
    return value


async def test_a_supervised_worker_quarantines_reclaimed_tasks(app: App) -> None:
    """The crash was not reported: the lease expired."""
    ran = []

    @app.task
    async def job(ctx: Context) -> None:
        ran.append(ctx.task_id)

    handles = [await job.enqueue() for _ in range(2)]
    for _ in handles:
        await crash_twice_unseen(app)
    async with supervised(app, "worker") as (_, supervisor):
        await supervisor.hears("suspects", 2)
        await wait_until(lambda: waiting_alone(app, 2), "both were set aside")
        assert ran == []
        assert {await state(handle) for handle in handles} == {State.QUEUED}


async def waiting_alone(app: App, number: int) -> bool:
    return [owner for _, owner, _, _ in await pending(app)] == [SUSPECTS] * number


async def test_an_isolated_worker_reclaims_nothing(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        return "done"

    handle = await job.enqueue()
    await quarantine_new(app, 1)
    left = await job.enqueue()
    await take_and_die(app, name="unseen")
    async with supervised(app, "isolated", concurrency=1) as (_, supervisor):
        assert await bounded(handle.result()) == "done"
        await supervisor.hears("idle")
        assert [owner for _, owner, _, _ in await pending(app)] == ["unseen"]
        assert await state(left) is State.RUNNING


# without a supervisor


async def test_a_worker_runs_one_quarantined_task_at_a_time_and_reads_no_other(app: App) -> None:
    started: list[int] = []
    gates = [asyncio.Event() for _ in range(4)]

    @app.task
    async def job(ctx: Context, number: int) -> int:
        started.append(number)
        await gates[number].wait()
        return number

    handles = await job.enqueue_many({"number": number} for number in range(2))
    await crash_with(app, 2)
    later = await job.enqueue(2)
    async with running_worker(app):

        async def first_started() -> bool:
            return len(started) == 1

        await wait_until(first_started, "the first suspect began")
        [first] = started
        second = 1 - first
        last = await job.enqueue(3)
        for _ in range(20):
            await redis_command(app, "PING")
        assert started == [first]
        assert {await state(handle) for handle in (handles[second], later, last)} == {State.QUEUED}
        gates[first].set()
        assert await bounded(handles[first].result()) == first
        for gate in gates:
            gate.set()
        assert await bounded(handles[second].result()) == second
        assert [await bounded(one.result()) for one in (later, last)] == [2, 3]
    assert started[:2] == [first, second]


async def test_suspects_run_one_at_a_time(app: App) -> None:
    running, most = [0], [0]

    @app.task
    async def job(ctx: Context, number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await redis_command(app, "PING")
        running[0] -= 1
        return number

    @app.task
    async def other(ctx: Context) -> str:
        return "done"

    handles = [await job.enqueue(number) for number in range(4)]
    for _ in handles:
        await crash_twice_unseen(app)
    new = await other.enqueue_many({} for _ in range(20))
    async with running_worker(app):
        assert [await bounded(handle.result()) for handle in handles] == [0, 1, 2, 3]
        assert {await bounded(one.result()) for one in new} == {"done"}
    records = [await handle.record() for handle in handles] + [await one.record() for one in new]
    assert {record.attempts for record in records} == {1}
    assert most == [1]
    assert [(await handle.record()).crashes for handle in handles] == [2, 2, 2, 2]


async def test_no_task_is_read_while_a_reclaimed_task_runs(app: App) -> None:
    """The worker reads no message between the claim and the check of the quarantine."""
    started, hold = asyncio.Event(), asyncio.Event()

    @app.task
    async def suspect(ctx: Context) -> str:
        started.set()
        await hold.wait()
        return "ended"

    @app.task
    async def other(ctx: Context) -> str:
        return "done"

    handle = await suspect.enqueue()
    await crash_twice_unseen(app)
    new = await other.enqueue()
    async with running_worker(app):
        await bounded(started.wait())
        for _ in range(20):
            await redis_command(app, "PING")
        assert await state(new) is State.QUEUED
        hold.set()
        assert await bounded(handle.result()) == "ended"
        assert await bounded(new.result()) == "done"


async def test_a_worker_takes_other_tasks_after_a_claimed_one_that_redis_refuses_to_confirm(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait to learn whether that one is a suspect."""

    @app.task
    async def job(ctx: Context) -> str:
        return "done"

    async def refuse(*_: Any) -> None:
        raise Refused("WRONGTYPE")

    monkeypatch.setattr(Executor, "_confirm", refuse)
    monkeypatch.setattr(Leases, "had_fence", lambda _, delivery: delivery.claimed)
    await job.enqueue()
    await crash_with(app, 1, times=1)
    async with running_worker(app):
        assert await bounded((await job.enqueue()).result()) == "done"


async def test_a_quarantined_task_that_makes_progress_is_cleared(app: App) -> None:
    hold = asyncio.Event()

    @app.task
    async def suspect(ctx: Context) -> str:
        await ctx.step("further", echo, 1)
        await hold.wait()
        return "cleared"

    @app.task
    async def other(ctx: Context) -> str:
        return "done"

    handle = await suspect.enqueue()
    await crash_with(app, 1)
    later = await other.enqueue()
    async with running_worker(app):
        assert await bounded(later.result()) == "done"
        assert await state(handle) is State.RUNNING
        hold.set()
        assert await bounded(handle.result()) == "cleared"
    types = [event.type async for event in handle.events(follow=False)]
    assert types[:5] == ["crashed", "crashed", "resumed", "step_completed", "cleared"]


async def test_quarantine_ends_after_its_window(settings: Settings) -> None:
    hold = asyncio.Event()
    async with App("isolation", settings=settings.model_copy(update={"lease": 60.0, "quarantine_window": 0.1})) as app:

        @app.task
        async def suspect(ctx: Context) -> str:
            await hold.wait()
            return "ended"

        @app.task
        async def other(ctx: Context) -> str:
            return "done"

        handle = await suspect.enqueue()
        await crash_with(app, 1)
        later = await other.enqueue()
        async with running_worker(app):
            assert await bounded(later.result()) == "done"
            assert await state(handle) is State.RUNNING
            hold.set()
            assert await bounded(handle.result()) == "ended"


async def test_a_burst_waits_for_quarantined_tasks(app: App) -> None:
    @app.task
    async def job(ctx: Context, number: int) -> int:
        return number

    handles = await job.enqueue_many({"number": number} for number in range(5))
    await crash_with(app, 5)
    async with Worker(app) as runner:
        await bounded(runner.run(burst=True))
    assert [await bounded(handle.result()) for handle in handles] == [0, 1, 2, 3, 4]


async def test_an_idle_worker_takes_a_quarantined_task_at_once(app: App) -> None:
    """The lease is long: a nudge wakes the worker."""

    @app.task
    async def job(ctx: Context) -> str:
        return "done"

    handle = await job.enqueue()
    await read(await worker(app.producer.gateway, partition_of(app), name="dead"), 1)
    async with running_worker(app):
        after = await job.enqueue()
        assert await bounded(after.result()) == "done"
        assert await state(handle) is State.RUNNING
        await report_crash(
            app.producer.gateway, app.producer.namespace, [app.name], "dead", exit_status="SIGKILL", steps={}
        )
        assert await bounded(handle.result()) == "done"


# counting crashes


@pytest.mark.parametrize("seen", [True, False], ids=["seen by a supervisor", "found by its lease"])
async def test_one_crash_over_the_limit_buries_the_task(settings: Settings, seen: bool) -> None:
    """Each worker crashes before the task records a step."""
    lease = 60.0 if seen else 0.3
    async with App(
        "isolation", settings=settings.model_copy(update={"lease": lease, "quarantine_window": 600.0})
    ) as app:
        runs = []

        @app.task(retry=Retry(max_crashes=2, base=0.01))
        async def poison(ctx: Context) -> None:
            runs.append(ctx.crashes)

        handle = await poison.enqueue()
        gateway, partition = app.producer.gateway, partition_of(app)
        for number in (1, 2, 3):
            name = f"dead{number}"
            if number == 1:
                await read(await worker(gateway, partition, name=name), 1)
            else:
                await take_again(app, name)
            if seen:
                await report_crash(
                    gateway, app.producer.namespace, [app.name], name, exit_status="SIGSEGV", steps={handle.id: "boom"}
                )
        async with running_worker(app):
            with pytest.raises(TaskFailed) as caught:
                await bounded(handle.result())
        assert caught.value.reason == Reason.CRASH_LOOP
        assert runs == []
        record = await handle.record()
        assert record.crashes == 3
        assert record.error is not None
        message = str(record.error["message"])
        if seen:
            assert message.endswith("last crash: SIGSEGV in step 'boom' before any step was recorded")
        assert "3 deliveries ended" in message


async def test_excused_crashes_do_not_bury_a_task(app: App) -> None:
    """A task that makes progress between crashes may continue without limit."""

    @app.task(retry=Retry(max_crashes=1))
    async def long(ctx: Context) -> int:
        return ctx.crashes

    handle = await long.enqueue()
    await redis_command(app, "HSET", handle.partition.record(handle.id), "crashes", 5, "excused", 5)
    await take_and_die(app)
    async with running_worker(app):
        assert await bounded(handle.result()) == 6


async def take_again(app: App, name: str) -> None:
    """Let another worker claim the message of the crashed worker."""
    partition = partition_of(app)
    ((entry, _, _, count),) = await pending(app)
    await redis_command(app, "XCLAIM", partition.ready, "workers", name, 0, entry, "RETRYCOUNT", count + 1, "JUSTID")


async def test_a_crash_in_quarantine_delays_the_task(app: App) -> None:
    runs = []

    @app.task(retry=Retry(max_crashes=5, base=0.05, jitter=0.0))
    async def flaky(ctx: Context) -> int:
        runs.append(ctx.crashes)
        return ctx.crashes

    handle = await flaky.enqueue()
    await crash_with(app, 1)
    await take_again(app, "dead2")
    await report_crash(
        app.producer.gateway, app.producer.namespace, [app.name], "dead2", exit_status="exit code 1", steps={}
    )
    async with running_worker(app):
        assert await bounded(handle.result()) == 3
    types = [event.type async for event in handle.events(follow=False)]
    assert types == ["crashed", "crashed", "crashed", "crash_backoff", "resumed"]
    assert runs == [3]


async def test_the_first_crash_is_resumed_at_once_beside_other_tasks(app: App) -> None:
    """A lost host: its tasks resume in ordinary slots at full concurrency, and new tasks run meanwhile."""
    hold, running = asyncio.Event(), []

    @app.task
    async def job(ctx: Context, number: int) -> int:
        running.append(number)
        await hold.wait()
        return number

    @app.task
    async def other(ctx: Context) -> str:
        return "done"

    handles = [await job.enqueue(number) for number in range(8)]
    for _ in handles:
        await take_and_die(app)
    async with running_worker(app):
        await wait_until(lambda: has_length(running, 8), "all tasks run at the same time")
        new = await other.enqueue()
        assert await bounded(new.result()) == "done"
        hold.set()
        assert [await bounded(handle.result()) for handle in handles] == list(range(8))


async def has_length(found: list[int], number: int) -> bool:
    return len(found) == number


@pytest.mark.parametrize("supervised_by", ["a supervisor", "nothing"])
async def test_progress_between_crashes_keeps_a_task_alive(app: App, supervised_by: str) -> None:
    """It recorded a step between each of four crashes: it is resumed, and its crashes are shown."""

    @app.task(retry=Retry(max_crashes=3))
    async def long(ctx: Context, steps: int) -> int:
        for number in range(steps):
            await ctx.step("work", echo, number)
        return ctx.crashes

    handle = await long.enqueue(6)
    await redis_command(app, "HSET", handle.partition.record(handle.id), "excused", 3, "crashes", 3)
    if supervised_by == "nothing":
        await take_and_die(app)
    else:
        await crash_with(app, 1, times=1)
    async with running_worker(app):
        assert await bounded(handle.result()) == 4


async def test_the_progress_of_a_plan_step_excuses_a_crash(app: App) -> None:
    async def excused(task_id: str) -> bool:
        return bool(await redis_command(app, "HGET", partition_of(app).record(task_id), "excused") == b"1")

    class Reader(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="read", title="read")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
            if ctx.attempt == 1:
                raise ConnectionError("cut off")
            step.progress["page"] = 1
            await ctx.checkpoint()
            await wait_until(lambda: excused(ctx.task_id), "the crash is excused")
            return 1

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return ctx.crashes

    handle = await app.agent(name="reader", retry=Retry(base=600.0))(Reader).enqueue("read")
    async with running_worker(app):
        await wait_until(lambda: is_scheduled(handle), "its first attempt has failed")
    await promote(app.producer.gateway, handle.partition, handle.id)
    await take_and_die(app)
    async with running_worker(app):
        assert await bounded(handle.result()) == 1


@pytest.mark.parametrize(("act", "excused"), [("async step", b"1"), ("send", b"1"), ("progress", None)])
async def test_what_a_resumed_run_continues_from_excuses_a_crash(app: App, act: str, excused: bytes | None) -> None:
    @app.task
    async def job(ctx: Context) -> int:
        match act:
            case "async step":
                await ctx.options(durability="async").step("work", echo, 1)
            case "send":
                await ctx.send(ctx.task_id, "hello")
            case _:
                await ctx.progress(1)
        return ctx.crashes

    handle = await job.enqueue()
    await take_and_die(app)
    async with running_worker(app):
        assert await bounded(handle.result()) == 1
    assert await redis_command(app, "HGET", handle.partition.record(handle.id), "excused") == excused


async def is_scheduled(handle: TaskHandle[Any]) -> bool:
    return await state(handle) is State.SCHEDULED


async def test_a_task_that_progresses_and_crashes_again_and_again_is_quarantined_and_capped(app: App) -> None:
    """It records a step before each crash, so that no two crashes are in a row."""

    @app.task
    async def job(ctx: Context) -> int:
        return ctx.crashes

    quarantined, buried = await job.enqueue(), await job.enqueue()
    now = int((await redis_command(app, "TIME"))[0]) * 1000
    for handle, crashes in ((quarantined, 2), (buried, 10)):
        window = ("excused", crashes, "crashes", crashes, "recent", crashes, "recent_at", now)
        await redis_command(app, "HSET", handle.partition.record(handle.id), *window)
    await take_and_die(app)
    await take_and_die(app)
    async with supervised(app, "worker") as (_, supervisor):
        await supervisor.hears("suspects")
        await wait_until(lambda: waiting_alone(app, 1), "one was set aside")
        with pytest.raises(TaskFailed) as caught:
            await bounded(buried.result())
        assert caught.value.reason == Reason.CRASH_LOOP


async def test_a_survivor_frees_its_place_and_continues(settings: Settings) -> None:
    hold = asyncio.Event()
    async with App("isolation", settings=settings.model_copy(update={"lease": 60.0, "quarantine_window": 0.1})) as app:

        @app.task
        async def suspect(ctx: Context) -> str:
            await hold.wait()
            return "ended"

        handle = await suspect.enqueue()
        await quarantine_new(app, 1)
        async with supervised(app, "isolated", concurrency=1) as (_, supervisor):
            assert (await supervisor.hears("survived"))["id"] == handle.id
            await wait_until(lambda: is_ordinary(app, handle), "the mark of the quarantine is deleted")
            assert await state(handle) is State.RUNNING
            hold.set()
            assert await bounded(handle.result()) == "ended"


async def is_ordinary(app: App, handle: TaskHandle[Any]) -> bool:
    return await redis_command(app, "HGET", handle.partition.record(handle.id), "suspect") is None

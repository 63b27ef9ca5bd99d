"""Pauses of operators with workers: what starts, what waits, and what each task has cost when it runs again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from perdure import App, Context, Retry, State, TaskHandle
from perdure.queues.argument_conditions import ArgumentCondition
from perdure.queues.delivery.paused_tasks import wake_paused
from perdure.queues.envelope import DEFAULT_PAYLOAD_LIMIT
from perdure.queues.pauses import PauseRule, PauseStore, load_pauses
from perdure.worker.runtime.maintenance.janitor import RUNNING
from pydantic import SecretStr

from tests.support.limits import held
from tests.support.workers import (
    BOUND,
    bounded,
    partition_of,
    pending,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("shop")]


class Operator:
    """Pauses and resumes as the commands do, and waits until the workers of this process follow."""

    def __init__(self, app: App, log: Sequence[str]) -> None:
        self.app = app
        self._log = log
        self._store = PauseStore(app.producer.gateway, app.producer.namespace)

    async def pause(
        self, queue: str | None = None, task: str | None = None, where: Sequence[str] = (), *, followed: bool = True
    ) -> PauseRule:
        conditions = tuple(ArgumentCondition.parse(text) for text in where)
        rule, _ = await self._store.add(PauseRule(queue, task, conditions, by="ann", why="a move"))
        if followed:
            await self.logged(f"paused by ann: {rule.target}: a move; to end that: {rule.command}")
        return rule

    async def resume(self, rule: PauseRule, *, wake: bool = True, followed: bool = True) -> None:
        assert await self._store.remove(rule) is not None
        if followed:
            await self.logged(f"resumed: {rule.target}")
        if wake:
            await self.wake()

    async def wake(self) -> int:
        gateway, namespace = self.app.producer.gateway, self.app.producer.namespace
        return (await wake_paused(gateway, partition_of(self.app), await load_pauses(gateway, namespace))).woken

    async def logged(self, text: str) -> None:
        async def found() -> bool:
            return any(text in line for line in self._log)

        await wait_until(found, f"the log has {text!r}")


@pytest.fixture
async def operator(app: App, log: list[str]) -> AsyncIterator[Operator]:
    yield Operator(app, log)
    await redis_command(app, "DEL", app.producer.namespace.pauses)


async def becomes(handle: TaskHandle[Any], check: Callable[[Any], object], what: str) -> None:
    async def holds() -> object:
        return check(await handle.record())

    await wait_until(holds, what)


async def is_parked(handle: TaskHandle[Any]) -> None:
    await becomes(handle, lambda found: found.paused_by is not None, "the task is parked")


# a whole queue


async def test_a_paused_queue_starts_nothing_while_others_run(app: App, operator: Operator) -> None:
    ran: list[str] = []
    release, started = asyncio.Event(), asyncio.Event()

    @app.task
    async def slow(ctx: Context) -> None:
        started.set()
        await release.wait()

    @app.task
    async def quick(ctx: Context, name: str) -> None:
        ran.append(name)

    async with running_worker(app, queues=["shop", "other"]):
        running = await slow.enqueue()
        await bounded(started.wait())
        rule = await operator.pause("shop")
        waits = await quick.enqueue("waits")
        delayed = await quick.options(delay=0.01).enqueue("delayed")
        await quick.options(queue="other").enqueue("other")
        release.set()
        await running.result(timeout=BOUND)
        await becomes(delayed, lambda found: found.state is State.QUEUED, "due tasks are queued")
        assert (await waits.status(), ran) == (State.QUEUED, ["other"])
        await operator.resume(rule)
        await waits.result(timeout=BOUND)
        await delayed.result(timeout=BOUND)
    assert sorted(ran) == ["delayed", "other", "waits"]


async def test_a_worker_that_starts_later_follows_and_a_burst_ends(
    app: App, operator: Operator, log: list[str]
) -> None:
    @app.task
    async def quick(ctx: Context) -> int:
        return 1

    @app.task(limits=[app.limit("one", total=1)])
    async def limited(ctx: Context) -> int:
        return 2

    handle, waits = await quick.enqueue(), await limited.enqueue()
    rule = await operator.pause("shop", followed=False)
    await work_off(app)
    assert (await handle.status(), await waits.status()) == (State.QUEUED, State.LIMITED)
    assert any("queue shop is paused: 1 task is left; to end that: perdure queue resume shop" in line for line in log)
    await operator.resume(rule, followed=False)
    await work_off(app)
    assert (await handle.result(timeout=BOUND), await waits.result(timeout=BOUND)) == (1, 2)


async def test_the_task_of_a_dead_worker_is_claimed_after_the_pause_and_its_crash_counted_once(
    app: App, operator: Operator
) -> None:
    @app.task
    async def quick(ctx: Context) -> int:
        return 1

    handle = await quick.enqueue()
    await take_and_die(app)
    await redis_command(app, "DEL", partition_of(app).seen)  # the leases restart, and must not do so again and again
    rule = await operator.pause("shop", followed=False)
    await work_off(app)
    [(_, owner, _, count)] = await pending(app)
    assert (owner, count) == ("dead-worker", 1)
    await operator.resume(rule, followed=False)
    async with running_worker(app):
        assert await handle.result(timeout=BOUND) == 1
    record = await handle.record()
    assert (record.attempts, record.crashes) == (1, 1)


async def test_a_paused_queue_takes_no_tokens_from_others(app: App, operator: Operator) -> None:
    """Its tasks would be admitted, and hold their tokens for as long as they wait on the stream."""
    one = app.limit("one", total=1)

    @app.task(limits=[one])
    async def work(ctx: Context) -> str:
        return ctx.task_id

    async with running_worker(app, queues=["shop", "other"]):
        rule = await operator.pause("shop")
        waits = [await work.enqueue() for _ in range(3)]
        for _ in range(3):
            other = await work.options(queue="other").enqueue()
            assert await other.result(timeout=BOUND) == other.id
        assert {await handle.status() for handle in waits} == {State.LIMITED}
        await operator.resume(rule)
        for handle in waits:
            assert await handle.result(timeout=BOUND) == handle.id


# tasks of a name, and with certain arguments


async def test_a_task_is_parked_by_its_name_and_costs_nothing(app: App, operator: Operator) -> None:
    ran: list[str] = []

    @app.task
    async def report(ctx: Context) -> None:
        ran.append("report")

    @app.task
    async def quick(ctx: Context) -> None:
        ran.append("quick")

    async with running_worker(app):
        rule = await operator.pause(task="report")
        handle = await report.enqueue()
        await (await quick.enqueue()).result(timeout=BOUND)
        await is_parked(handle)
        assert (await handle.status(), ran) == (State.SCHEDULED, ["quick"])
        await operator.resume(rule)
        await handle.result(timeout=BOUND)
    record = await handle.record()
    assert (record.attempts, record.crashes, record.paused_by) == (1, 0, None)


async def test_conditions_compare_the_arguments(app: App, operator: Operator) -> None:
    ran: list[str] = []

    @app.task
    async def report(ctx: Context, tenant: str, options: dict[str, int] | None = None) -> None:
        ran.append(tenant)

    async with running_worker(app):
        rule = await operator.pause("shop", "report", ["tenant=acme", "options.depth=3"])
        held_back = await report.enqueue("acme", {"depth": 3})
        for tenant, options in (("acme", {"depth": 4}), ("acme", None), ("other", {"depth": 3})):
            await (await report.enqueue(tenant, options)).result(timeout=BOUND)
        await is_parked(held_back)
        assert ran == ["acme", "acme", "other"]
        await operator.resume(rule)
        await held_back.result(timeout=BOUND)


async def test_conditions_compare_large_arguments(app: App, operator: Operator) -> None:
    """They are stored in chunks."""

    @app.task
    async def report(ctx: Context, tenant: str, text: str) -> int:
        return len(text)

    large = "x" * 2 * DEFAULT_PAYLOAD_LIMIT
    async with running_worker(app):
        rule = await operator.pause(where=["tenant=acme"])
        held_back = await report.enqueue("acme", large)
        assert await (await report.enqueue("other", large)).result(timeout=BOUND) == len(large)
        await is_parked(held_back)
        await operator.resume(rule)
        assert await held_back.result(timeout=BOUND) == len(large)


async def test_a_secret_fulfils_no_condition(app: App, operator: Operator) -> None:
    """An operator could try out its value otherwise."""

    @app.task
    async def login(ctx: Context, user: str, token: SecretStr) -> str:
        return user

    async with running_worker(app):
        await operator.pause(where=["token=hunter2"])
        assert await (await login.enqueue("ann", SecretStr("hunter2"))).result(timeout=BOUND) == "ann"


async def test_arguments_that_cannot_be_read_are_no_dead_letter_while_the_task_is_paused(
    app: App, operator: Operator
) -> None:
    @app.task
    async def report(ctx: Context, days: int) -> int:
        return days

    async with running_worker(app):
        rule = await operator.pause(task="report")
        handle = await app.producer.enqueue("report", {"days": "not a number"}, queue="shop")
        unknown = await operator.pause(task="of another deploy")
        other = await app.producer.enqueue("of another deploy", queue="shop")
        await is_parked(handle)
        await is_parked(other)
        assert (await other.record()).attempts == 0
        for task in (handle, other):
            assert await task.cancel() is State.CANCELLED
        await operator.resume(rule)
        await operator.resume(unknown)


async def test_a_task_that_is_to_be_cancelled_is_not_parked(app: App, operator: Operator) -> None:
    """It would be due at once, and parked again and again, by a worker that does not know its clean-up task."""

    @app.task
    async def clean(ctx: Context, ended: str) -> None: ...

    @app.task(on_end=clean)
    async def report(ctx: Context) -> None: ...

    rule = await operator.pause(task="report", followed=False)
    handle = await report.enqueue()
    await work_off(app)
    await is_parked(handle)
    assert await handle.cancel() is State.SCHEDULED
    other = App("shop", settings=app.settings)

    @other.task
    async def quick(ctx: Context) -> None: ...

    async with other, running_worker(other):
        await operator.logged("no handler for task 'report' on this worker")
        assert (await handle.record()).paused_by is None
    await operator.resume(rule, followed=False)
    async with running_worker(app):
        await becomes(handle, lambda found: found.state is State.CANCELLED, "it is cancelled")


async def test_a_woken_run_and_a_retry_are_parked_too_and_keep_their_counters(app: App, operator: Operator) -> None:
    ran: list[int] = []

    @app.task(retry=Retry(max_attempts=3, base=0.01))
    async def report(ctx: Context) -> int:
        ran.append(1)
        answer = await ctx.wait_for("go", int, timeout=BOUND)
        if len(ran) < 3:
            raise ValueError("once")
        return answer

    async with running_worker(app):
        handle = await report.enqueue()
        await becomes(handle, lambda found: found.state is State.WAITING, "it waits")
        rule = await operator.pause(task="report")
        await handle.answer("go", 7)
        await is_parked(handle)
        assert (await handle.record()).attempts == 0
        await operator.resume(rule)
        assert await handle.result(timeout=BOUND) == 7
    assert (await handle.record()).attempts == 2


async def test_a_parked_task_keeps_no_token_and_its_place_in_an_ordered_key(app: App, operator: Operator) -> None:
    tenants = app.limit("tenants", total=2, by="tenant", running=1, ordered=True)
    ran: list[int] = []

    @app.task(limits=[tenants])
    async def work(ctx: Context, tenant: str, number: int) -> None:
        ran.append(number)

    async with running_worker(app):
        rule = await operator.pause(where=["number=1"])
        first = await work.enqueue("acme", 1)
        second = await work.enqueue("acme", 2)
        await is_parked(first)

        async def none_held() -> bool:
            return not await held(app, "tenants")

        await wait_until(none_held, "its token is released")
        assert await second.status() is State.LIMITED
        await operator.resume(rule)
        await second.result(timeout=BOUND)
    assert ran == [1, 2]


async def test_a_task_that_was_parked_after_the_resumption_is_woken_by_a_janitor(app: App, operator: Operator) -> None:
    """Its worker had not heard of the resumption yet."""

    @app.task
    async def report(ctx: Context) -> int:
        return 1

    async with running_worker(app):
        rule = await operator.pause(task="report")
        handle = await report.enqueue()
        await is_parked(handle)
        await operator.resume(rule, wake=False)
        assert (await handle.record()).paused_by == rule.number
        [janitor] = [one for one, loop in RUNNING.items() if loop is asyncio.get_running_loop()]
        await janitor.clean()
        assert await handle.result(timeout=BOUND) == 1


async def test_a_queue_and_its_tasks_are_paused_at_once(app: App, operator: Operator) -> None:
    @app.task
    async def report(ctx: Context) -> int:
        return 1

    async with running_worker(app):
        queue, tasks = await operator.pause("shop"), await operator.pause("shop", "report")
        handle = await report.enqueue()
        await operator.resume(queue)
        await is_parked(handle)
        await operator.resume(tasks)
        assert await handle.result(timeout=BOUND) == 1


async def test_a_rule_that_cannot_be_read_is_reported_and_the_others_hold(
    app: App, operator: Operator, log: list[str]
) -> None:
    @app.task
    async def report(ctx: Context) -> int:
        return 1

    await redis_command(app, "HSET", app.producer.namespace.pauses, "junk", "of another program")
    async with running_worker(app):
        rule = await operator.pause(task="report")
        handle = await report.enqueue()
        await is_parked(handle)
        await operator.resume(rule)
        await handle.result(timeout=BOUND)
    assert sum("a pause is ignored: could not read the pause: it has no number" in line for line in log) == 1

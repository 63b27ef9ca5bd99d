"""Clean-up tasks (`@app.task(on_end=...)`): enqueued in the act that ends a task, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from perdure import (
    App,
    Context,
    EndedTask,
    Producer,
    Retry,
    Settings,
    State,
    SyncContext,
    TaskCancelled,
    TaskHandle,
)
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues.errors import Unavailable
from perdure.queues.transport.gateway import Gateway
from perdure.worker.errors import TaskDefinitionError
from pydantic import SecretStr

from tests.support.workers import (
    bounded,
    expire_lease,
    letter,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("shop", lease=30.0)]


class Shop:
    """An app with a task that books, then does what the test wants; and its clean-up task, which notes what it gets."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.ended: list[EndedTask] = []
        self.booked = asyncio.Event()

        @app.task(retry=Retry(max_attempts=1))
        async def clean_up(ctx: Context, task_id: str) -> None:
            self.ended.append(await ctx.ended_task(task_id))

        async def book(room: str) -> str:
            self.booked.set()
            return f"booking of {room}"

        @app.task(on_end=clean_up, retry=Retry(max_attempts=1))
        async def reserve(ctx: Context, room: str, then: str = "return") -> str:
            booking = await ctx.step("book", book, room)
            match then:
                case "raise":
                    raise ValueError("no room")
                case "ask":
                    await ctx.ask("ada", "confirm?")
                case "sleep":
                    await asyncio.sleep(3600)
            return f"CONFIRMED {booking}"

        self.reserve = reserve

    def check(self, handle: TaskHandle[Any], state: State, then: str, *, reason: str | None = None) -> None:
        """Check that the clean-up task ran once, with the arguments and the results of the task."""
        steps = {"book": "booking of blue"}
        arguments = {"room": "blue", "then": then}
        assert self.ended == [EndedTask(handle.id, "reserve", state, reason, arguments, steps)]


@pytest.fixture
def shop(app: App) -> Shop:
    return Shop(app)


async def is_in(handle: TaskHandle[Any], *states: State) -> bool:
    return await handle.status() in states


async def ends(shop: Shop, count: int = 1) -> None:
    async def cleaned() -> bool:
        return len(shop.ended) == count

    await wait_until(cleaned, "the clean-up task runs")


async def test_a_result_enqueues_the_clean_up_task(shop: Shop) -> None:
    handle = await shop.reserve.enqueue("blue", "return")
    await work_off(shop.app)
    assert await bounded(handle.result()) == "CONFIRMED booking of blue"
    shop.check(handle, State.SUCCEEDED, "return")


async def test_a_dead_letter_enqueues_it_and_a_replay_that_ends_another_one(shop: Shop) -> None:
    handle = await shop.reserve.enqueue("blue", "raise")
    await work_off(shop.app)
    shop.check(handle, State.DEAD, "raise", reason="attempts_exhausted")
    found = await letter(shop.app, handle)
    await replay(shop.app.producer.gateway, found, Replay())
    await work_off(shop.app)
    assert [task.state for task in shop.ended] == [State.DEAD, State.DEAD]


async def test_a_retried_failure_and_a_wait_enqueue_nothing(app: App) -> None:
    ended: list[str] = []

    @app.task
    async def clean_up(ctx: Context, task_id: str) -> None:
        ended.append(task_id)

    @app.task(on_end=clean_up, retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError
        await ctx.ask("ada", "go on?")

    async with running_worker(app):
        handle = await job.enqueue()
        await wait_until(lambda: is_in(handle, State.WAITING), "the task waits")
        assert ended == []
        await handle.answer("question", "yes", by="ada")
        await bounded(handle.result())
        await wait_until(lambda: is_true(lambda: ended == [handle.id]), "the clean-up task runs")


async def is_true(condition: Callable[[], bool]) -> bool:
    return condition()


async def test_the_cancel_of_a_running_task_enqueues_it(shop: Shop) -> None:
    async with running_worker(shop.app):
        handle = await shop.reserve.enqueue("blue", "sleep")
        await bounded(shop.booked.wait())
        assert await handle.cancel() is State.RUNNING
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
        await ends(shop)
    shop.check(handle, State.CANCELLED, "sleep")


async def test_the_cancel_of_a_waiting_task_enqueues_it(shop: Shop) -> None:
    async with running_worker(shop.app):
        handle = await shop.reserve.enqueue("blue", "ask")
        await wait_until(lambda: is_in(handle, State.WAITING), "the task waits")
        assert await handle.cancel() is not State.WAITING
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
        await ends(shop)
    shop.check(handle, State.CANCELLED, "ask")


@pytest.mark.parametrize("delay", [0.0, 3600.0])
async def test_the_cancel_of_a_task_that_never_ran_enqueues_it(shop: Shop, delay: float) -> None:
    """No code of the task runs; a worker that comes later cancels it."""
    handle = await shop.reserve.options(delay=delay).enqueue("blue", "sleep")
    assert await handle.cancel() is State.SCHEDULED
    assert await handle.cancel() is State.SCHEDULED
    async with running_worker(shop.app):
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
        await ends(shop)
    assert not shop.booked.is_set()
    assert (shop.ended[0].state, shop.ended[0].steps) == (State.CANCELLED, {})
    assert shop.ended[0].arguments == {"room": "blue", "then": "sleep"}


async def test_the_cancel_of_a_waiting_task_of_an_untyped_producer_enqueues_it(shop: Shop, settings: Settings) -> None:
    """Its envelope does not say that it has a clean-up task; the run before it waited has stored that."""
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer, running_worker(shop.app):
        handle: Any = await producer.enqueue("reserve", {"room": "blue", "then": "ask"}, queue="shop")
        await wait_until(lambda: is_in(handle, State.WAITING), "the task waits")
        await handle.cancel()
        await ends(shop)
    shop.check(handle, State.CANCELLED, "ask")


async def test_a_worker_that_does_not_know_the_task_leaves_its_cancellation_to_others(
    shop: Shop, settings: Settings
) -> None:
    other = App("shop", settings=shop.app.settings)

    @other.task
    async def something_else(ctx: Context) -> None: ...

    handle = await shop.reserve.enqueue("blue", "sleep")
    await handle.cancel()

    async def returned() -> bool:
        return bool(await redis_command(other, "HGET", handle.partition.record(handle.id), "returns") == b"1")

    async with other, running_worker(other):
        await wait_until(returned, "the worker returns the task")
        assert await handle.status() is State.SCHEDULED
    async with running_worker(shop.app):
        await ends(shop)
    assert shop.ended[0].state is State.CANCELLED


async def test_a_task_whose_workers_die_enqueues_it(app: App) -> None:
    shop = Shop(app)

    @app.task(on_end=app.tasks["clean_up"], retry=Retry(max_crashes=0))
    async def fragile(ctx: Context) -> None: ...

    handle = await fragile.enqueue()
    await expire_lease(app, await take_and_die(app))
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.CRASH_LOOP
    assert [(task.id, task.state) for task in shop.ended] == [(handle.id, State.DEAD)]


async def test_a_successor_continues_the_work_and_only_its_end_enqueues_it(app: App) -> None:
    ended: list[str] = []

    @app.task
    async def clean_up(ctx: Context, task_id: str) -> None:
        ended.append(task_id)

    @app.task(on_end=clean_up)
    async def job(ctx: Context, left: int) -> None:
        if left:
            await ctx.continue_as(arguments={"left": left - 1}, queue=ctx.queue)

    handle = await job.enqueue(1)
    await work_off(app)
    assert ended == [f"{handle.id}.h1"]


async def test_a_purge_enqueues_nothing(shop: Shop) -> None:
    """The task ended when it was buried; the clean-up task that was enqueued then has run."""
    handle = await shop.reserve.enqueue("blue", "raise")
    await work_off(shop.app)
    gateway = shop.app.producer.gateway
    found = await letter(shop.app, handle)
    await purge(gateway, found)
    await work_off(shop.app)
    assert len(shop.ended) == 1


async def test_the_clean_up_of_a_plain_function_gets_the_same(app: App) -> None:
    ended: list[EndedTask] = []

    @app.task
    def clean_up(ctx: SyncContext, task_id: str) -> None:
        ended.append(ctx.ended_task(task_id))

    @app.task(on_end=clean_up)
    def job(ctx: SyncContext) -> int:
        return ctx.step("size", len, "xyz")

    handle = await job.enqueue()
    await work_off(app)
    assert [(task.id, task.steps) for task in ended] == [(handle.id, {"size": 3})]


@pytest.mark.parametrize("length", [1, 96, 97, 128])
async def test_ids_of_any_length_have_a_clean_up_task(shop: Shop, length: int) -> None:
    handle = await shop.reserve.options(task_id="x" * length).enqueue("blue", "return")
    await work_off(shop.app)
    shop.check(handle, State.SUCCEEDED, "return")


async def test_the_task_names_its_clean_up_task(shop: Shop) -> None:
    handle = await shop.reserve.enqueue("blue", "return")
    await work_off(shop.app)
    named = await redis_command(shop.app, "HGET", handle.partition.record(handle.id), "cleanup")
    assert named.startswith(f"{handle.id}.end.".encode())
    assert await redis_command(shop.app, "HGET", handle.partition.record(named.decode()), "state") == b"succeeded"


async def test_the_data_outlive_a_short_retention(app: App) -> None:
    @app.task
    async def clean_up(ctx: Context, task_id: str) -> None: ...

    @app.task(on_end=clean_up, result_ttl=1)
    async def job(ctx: Context) -> None: ...

    handle = await job.enqueue()
    await work_off(app)
    assert await redis_command(app, "PTTL", handle.partition.record(handle.id)) > 6 * 86_400_000


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_settlement_whose_reply_is_lost_enqueues_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The connection breaks before or after Redis has run the script; the worker repeats it."""
    run, broken = Gateway.run, list[str]()

    async def breaking(self: Gateway, script: Any, keys: Any, args: Any) -> Any:
        if script.name != "finish" or broken or not any(b"CONFIRMED" in bytes(str(arg), "utf-8") for arg in args):
            return await run(self, script, keys, args)
        if when == "after":
            await run(self, script, keys, args)
        broken.append(script.name)
        raise Unavailable("redis://test", "the connection broke")

    monkeypatch.setattr(Gateway, "run", breaking)
    handle = await shop.reserve.enqueue("blue", "return")
    await work_off(shop.app)
    assert broken == ["finish"]
    shop.check(handle, State.SUCCEEDED, "return")


async def test_a_clean_up_task_is_encrypted_by_the_worker(settings: Settings) -> None:
    """A caller without a key cancels the task; workers refuse what is not encrypted."""
    keys = {"encryption_keys": SecretStr("c2VhbGluZy1rZXktb2YtMzItYnl0ZXMtZm9yLXRlc3Q="), "encryption_required": True}
    async with App("shop", settings=settings.model_copy(update=keys)) as app:
        shop = Shop(app)
        async with Producer(settings.redis_url, namespace=settings.namespace) as keyless, running_worker(app):
            handle = await shop.reserve.enqueue("blue", "ask")
            await wait_until(lambda: is_in(handle, State.WAITING), "the task waits")
            found = await keyless.find(handle.id)
            assert found is not None
            await found.cancel()
            await ends(shop)
            shop.check(handle, State.CANCELLED, "ask")
            named = await redis_command(app, "HGET", handle.partition.record(handle.id), "cleanup")
            stored = await redis_command(app, "HGET", handle.partition.record(named.decode()), "args")
            assert handle.id.encode() not in stored


@pytest.mark.parametrize("on_end", ["clean_up", 3, lambda ctx, task_id: None])
def test_on_end_must_be_a_task(on_end: Any) -> None:
    app = App("refuses")
    with pytest.raises(TaskDefinitionError, match="on_end must be a task of app 'refuses', got"):

        @app.task(on_end=on_end)
        async def job(ctx: Context) -> None: ...


def test_on_end_must_take_an_id() -> None:
    app, other = App("refuses"), App("other")

    @app.task
    async def wrong(ctx: Context, first: str, second: str) -> None: ...

    @other.task
    async def foreign(ctx: Context, task_id: str) -> None: ...

    with pytest.raises(TaskDefinitionError, match="one argument, the id of the task that has ended"):

        @app.task(on_end=wrong)  # type: ignore[arg-type]
        async def job(ctx: Context) -> None: ...

    with pytest.raises(TaskDefinitionError, match="on_end must be a task of app 'refuses'"):

        @app.task(on_end=foreign)
        async def another(ctx: Context) -> None: ...

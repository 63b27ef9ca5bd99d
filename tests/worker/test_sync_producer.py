"""Synchronous calls: from threads, from code inside an event loop, and on the wrong event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    EnqueueCall,
    Middleware,
    PerdureError,
    PlanStep,
    Producer,
    Settings,
    State,
    TaskFailed,
    TaskHandle,
    Unavailable,
)
from perdure.queues import handle as handle_module
from perdure.queues.errors import EventLoopError, NotOpen
from perdure.queues.transport.threadsafe_calls import BackgroundLoop

from tests.support.workers import BOUND, bounded, redis_command, running_worker, wait_until, work_off

T = TypeVar("T")

THREAD = "perdure sync"


@pytest.fixture
def app(settings: Settings) -> Iterator[App]:
    app = App("shop", settings=settings)

    @app.task
    async def double(ctx: Context, number: int) -> int:
        return number * 2

    @app.task
    async def fail(ctx: Context) -> None:
        raise ValueError("no")

    yield app
    app.sync().close()


def run(function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on an event loop of a thread of its own."""

    async def main() -> T:
        return await function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(main())).result(BOUND)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


# what the calls return


def test_a_task_is_enqueued_and_its_result_awaited_while_a_worker_of_the_same_app_runs_it(app: App) -> None:
    double = app.tasks["double"]
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        async with running_worker(app):
            started.set()
            await asyncio.to_thread(ended.wait)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(lambda: asyncio.run(work()))
        started.wait(BOUND)
        with app.sync():
            assert double.enqueue_sync(21).result_sync(timeout=BOUND) == 42
            with pytest.raises(TaskFailed, match="ValueError: no"):
                app.tasks["fail"].options(max_attempts=1).enqueue_sync().result_sync(timeout=BOUND)
        ended.set()
        working.result(BOUND)


def test_every_call_of_a_handle_has_a_synchronous_one() -> None:
    public = {name: call for name, call in vars(TaskHandle).items() if not name.startswith("_")}
    asynchronous = {name for name, call in public.items() if inspect.iscoroutinefunction(call)} | {"events", "stream"}
    assert {name for name in public if name.endswith("_sync")} == {f"{name}_sync" for name in asynchronous}


def test_synchronous_calls_of_a_handle(app: App) -> None:
    with app.sync() as producer:
        handle = app.tasks["double"].options(delay=3600, task_id="later").enqueue_sync(1)
        assert handle.status_sync() is State.SCHEDULED
        assert handle.record_sync().task == "double"
        assert handle.explain_sync().cause == "delay"
        assert handle.progress_sync() is None
        assert handle.successor_sync() is None
        handle.send_sync("faster")
        producer.send_message("later", "still faster", sender="ops")
        assert [message.content for message in handle.pending_messages_sync()] == ["faster", "still faster"]
        assert handle.cancel_sync() is State.CANCELLED


def test_events_are_followed_to_the_end_or_given_up(app: App) -> None:
    @app.task
    async def stepped(ctx: Context) -> None:
        await ctx.step("first", lambda: 1)
        await ctx.step("second", lambda: 2)

    with app.sync():
        handle = stepped.enqueue_sync()
        run(lambda: work_off(app))
        followed = list(handle.events_sync())
        assert len(followed) > 1
        assert list(handle.events_sync(follow=False)) == followed
        assert list(handle.events_sync(after=followed[0].id)) == followed[1:]
        for event in handle.events_sync():
            assert event == followed[0]
            break


def test_tasks_are_enqueued_by_name_and_found_by_id(app: App) -> None:
    with app.sync() as producer:
        named = producer.enqueue("double", {"number": 2}, queue="shop")
        many = producer.enqueue_many("double", [{"number": 3}], queue="shop", delay=60)
        typed = app.tasks["double"].enqueue_many_sync({"number": number} for number in range(3))
        found = producer.find(named.id)
        assert found is not None
        assert found.status_sync() is State.QUEUED
        assert [handle.status_sync() for handle in many] == [State.SCHEDULED]
        assert len({handle.id for handle in typed}) == 3
        assert producer.find("unknown") is None


def test_the_items_of_many_tasks_are_read_in_the_calling_thread(app: App) -> None:
    """An iterator over a database may belong to its thread, and some refuse to work where an event loop runs."""

    def items() -> Iterator[dict[str, int]]:
        assert threading.current_thread() is threading.main_thread()
        yield {"number": 1}

    assert len(app.tasks["double"].enqueue_many_sync(items())) == 1
    assert len(app.sync().enqueue_many("double", items(), queue="shop")) == 1


def test_goals_of_agents_are_enqueued(settings: Settings) -> None:
    app = App("agents", settings=settings)

    class Clerk(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None: ...
        async def finish(self, ctx: Context, state: AgentState) -> None: ...

    clerk = app.agent(Clerk)
    with app.sync():
        handle = clerk.enqueue_sync("file the letters")
        assert handle.id == clerk.task_id("file the letters")
        assert handle.cancel_sync() is State.CANCELLED


def test_a_timeout_says_what_the_task_does(app: App) -> None:
    with app.sync(), pytest.raises(TimeoutError, match=r"within 0 s: it is queued"):
        app.tasks["double"].enqueue_sync(1).result_sync(timeout=0)


def test_invalid_arguments_are_refused(app: App) -> None:
    with app.sync(), pytest.raises(PerdureError, match="number"):
        app.tasks["double"].enqueue_sync("two")


def test_many_threads_share_one_loop(app: App) -> None:
    numbers = range(80)
    with app.sync(), ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(app.tasks["double"].enqueue_sync, numbers))
        assert threads() == [THREAD]
        run(lambda: work_off(app))
        results = list(pool.map(lambda handle: handle.result_sync(timeout=BOUND), handles))
    assert results == [number * 2 for number in numbers]


# opening and closing


def test_the_last_block_closes_the_connection_and_ends_the_loop(app: App) -> None:
    with app.sync():
        with app.sync():
            handle = app.tasks["double"].enqueue_sync(1)
        assert handle.status_sync() is State.QUEUED
    assert threads() == []
    with pytest.raises(EventLoopError, match="has ended: keep the app open for the call, or find the task again"):
        handle.status_sync()


async def test_waits_for_results_end_when_the_app_is_closed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timeout, they would wait for ever, since a closed connection does not come back."""
    monkeypatch.setattr(handle_module, "_POLL_INTERVAL", 10 * BOUND)
    async with app:
        handle = await app.tasks["double"].enqueue(1)
        waiting = asyncio.create_task(handle.result())
        await wait_until(partial(redis_command, app, "PUBSUB", "CHANNELS", f"*{handle.id}"), "the subscription")
    with pytest.raises(NotOpen):
        await bounded(waiting)
    with pytest.raises(NotOpen):
        await bounded(handle.result())


def test_a_thread_that_waits_for_a_result_gets_an_error_when_the_block_ends(app: App) -> None:
    with ThreadPoolExecutor(1) as pool:
        with app.sync():
            handle = app.tasks["double"].enqueue_sync(1)
            waiting = pool.submit(handle.result_sync)
            channels = partial(redis_command, app, "PUBSUB", "CHANNELS", f"*{handle.id}")
            app.sync().call(lambda _: wait_until(channels, "the subscription"), "")
        with pytest.raises((NotOpen, EventLoopError)):
            waiting.result(BOUND)


def test_an_interrupted_start_of_the_background_loop_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    loop = BackgroundLoop()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.acquire()
    started[0].join(BOUND)
    assert not started[0].is_alive()
    loop.acquire()
    loop.release()


def test_a_call_outside_of_a_block_opens_the_app_until_it_is_closed(app: App) -> None:
    handle = app.tasks["double"].enqueue_sync(1)
    with app.sync():
        assert threads() == [THREAD]
    assert handle.status_sync() is State.QUEUED
    app.sync().close()
    assert threads() == []
    assert app.tasks["double"].enqueue_sync(1).status_sync() is State.QUEUED


def test_a_call_of_another_thread_is_not_cut_off_by_the_end_of_a_block(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, left = threading.Event(), threading.Event()
    send_one = Producer.send_one

    async def slow(*args: Any, **options: Any) -> TaskHandle[Any]:
        within.set()
        await asyncio.to_thread(left.wait)
        return await send_one(*args, **options)

    monkeypatch.setattr(Producer, "send_one", slow)
    with ThreadPoolExecutor(1) as pool:
        with app.sync():
            pending = pool.submit(app.tasks["double"].enqueue_sync, 1)
            within.wait(BOUND)
        left.set()
        assert pending.result(BOUND).id
    assert threads() == []


def test_without_a_server_both_kinds_of_calls_raise_the_same_error() -> None:
    """Threads that wait for the same attempt to connect fail together, not one after another."""
    app = App("nowhere", redis_url="redis://127.0.0.1:1")

    @app.task
    async def work(ctx: Context) -> None: ...

    async def enter() -> None:
        async with app:
            pass

    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        calls: list[Callable[[], object]] = [lambda: run(enter), *[work.enqueue_sync] * 6]
        waiting = [pool.submit(call) for call in calls]
        errors = {(type(one.exception(BOUND)), str(one.exception())) for one in waiting}
    assert len(errors) == 1
    assert next(iter(errors))[0] is Unavailable
    assert time.monotonic() - started < 10, "each thread waited for its own attempt"
    assert threads() == []


def test_the_lifespan_is_not_opened(settings: Settings) -> None:
    opened = []

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[str]:
        opened.append(app)
        yield "database"

    app = App("shop", settings=settings, lifespan=lifespan)
    with app.sync():
        assert app.sync().find("x") is None
        assert not opened
        with pytest.raises(Unavailable, match="use its resources inside"):
            _ = app.resources


# inside event loops


async def test_a_caller_on_another_event_loop_is_blocked_for_the_call(app: App) -> None:
    """A cell of a notebook runs inside an event loop."""
    with app.sync():
        assert app.tasks["double"].enqueue_sync(1).status_sync() is State.QUEUED


async def test_a_call_on_the_loop_of_the_app_is_refused_with_the_asynchronous_one(app: App) -> None:
    double = app.tasks["double"]
    async with app:
        handle = await double.enqueue(1)
        with pytest.raises(EventLoopError, match=r"block the event loop .*: use 'await double\.enqueue\(\.\.\.\)'"):
            double.enqueue_sync(1)
        with pytest.raises(EventLoopError, match=r"block the event loop .*: use 'await handle\.result\(\)'"):
            handle.result_sync()
        with pytest.raises(EventLoopError, match="use 'async with app:'"), app.sync():
            pass
        assert await asyncio.to_thread(handle.status_sync) is State.QUEUED
        assert (await asyncio.to_thread(double.enqueue_sync, 1)).status_sync() is State.QUEUED


async def test_a_call_on_the_background_loop_is_refused(settings: Settings) -> None:
    class Audit(Middleware):
        async def enqueue(self, call: EnqueueCall, call_next: Callable[[], Awaitable[str]]) -> str:
            other.enqueue_sync()
            return await call_next()

    app = App("shop", settings=settings, middleware=[Audit()])
    elsewhere = App("elsewhere", settings=settings)

    @app.task
    async def work(ctx: Context) -> None: ...

    @elsewhere.task
    async def other(ctx: Context) -> None: ...

    with app.sync(), pytest.raises(EventLoopError, match=r"use 'await other\.enqueue\(\.\.\.\)'"):
        work.enqueue_sync()


async def test_a_handle_of_another_loop_is_refused_with_the_remedy(app: App) -> None:
    with app.sync():
        handle = app.tasks["double"].enqueue_sync(1)
        with pytest.raises(EventLoopError, match=r"another event loop: call .*result_sync.*or find the task again"):
            await handle.result(timeout=1)


# several event loops


def test_an_app_is_open_on_several_event_loops_each_with_its_resources(settings: Settings) -> None:
    opened: list[object] = []

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[asyncio.AbstractEventLoop]:
        opened.append(asyncio.get_running_loop())
        yield asyncio.get_running_loop()

    app = App("shop", settings=settings, lifespan=lifespan)

    @app.task
    async def work(ctx: Context) -> None: ...

    async def enter(level: int) -> None:
        async with app:
            assert app.resources is asyncio.get_running_loop()
            if level:
                await asyncio.to_thread(run, lambda: enter(level - 1))
            assert await asyncio.to_thread(lambda: app.resources) is opened[0]
            await (await work.enqueue()).cancel()

    run(lambda: enter(2))
    assert len(set(opened)) == 3


def test_an_app_that_was_not_left_on_an_ended_loop_opens_again(app: App) -> None:
    async def enter_only() -> None:
        await app.__aenter__()
        producer = app.producer
        await producer.__aexit__(None, None, None)  # only so that no connection is left to the garbage collector

    async def enqueue() -> State:
        async with app:
            return await (await app.tasks["double"].enqueue(1)).status()

    run(enter_only)
    assert run(enqueue) is State.QUEUED


def test_an_app_that_is_open_on_another_loop_only_says_so(app: App) -> None:
    async def enqueue() -> None:
        await app.tasks["double"].enqueue(1)

    with app.sync() as producer:
        producer.find("x")
        with pytest.raises(EventLoopError, match=r"not open on this event loop.*: enter 'async with app:' on this one"):
            run(enqueue)


def test_a_synchronous_call_keeps_the_signature_and_the_documentation_of_its_asynchronous_one() -> None:
    for name, call in inspect.getmembers(TaskHandle, inspect.isfunction):
        if name.endswith("_sync") and name not in ("events_sync", "stream_sync"):
            asynchronous = getattr(TaskHandle, name.removesuffix("_sync"))
            assert inspect.signature(call) == inspect.signature(asynchronous)
            assert call.__doc__ == asynchronous.__doc__

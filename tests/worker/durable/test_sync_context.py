"""Handlers that are plain functions: they run in a thread, with a synchronous context."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import (
    App,
    Context,
    Middleware,
    Retry,
    Settings,
    State,
    StepCall,
    StepTimeout,
    SyncContext,
    TaskCancelled,
    Worker,
    current_context,
    current_step,
)
from perdure.deadletter.policy import Reason
from perdure.testing import make_context
from perdure.worker.context import TaskInfo
from perdure.worker.durable.step_caller import StepCaller
from perdure.worker.durable.sync.blocking import Blocking
from perdure.worker.errors import StepOutsideTask, TaskDefinitionError
from perdure.worker.memory.task_memory import TaskMemory
from perdure.worker.middleware import CallNext
from perdure.worker.sync_context import SyncStepCaller
from perdure.worker.workspace.task_workspace import Workspace

from tests.support.command_line import Running
from tests.support.workers import (
    BOUND,
    bounded,
    expire_lease,
    history,
    letter,
    recorded_steps,
    running_worker,
    steal,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("plain", lease=300.0)]

REQUEST: ContextVar[str] = ContextVar("request", default="none")


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


OF_THE_LOOP = {
    TaskMemory: {"store"},
    Workspace: {"catch_up", "close", "restore", "find_change", "find_step_change", "entries", "take_up"},
}
"""Names without a synchronous form: an open store is used in an event loop; the worker calls those of a workspace."""


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (Context, SyncContext),
        (StepCaller, SyncStepCaller),
        *[(kind.__orig_bases__[0].__args__[0], kind) for kind in Blocking.__subclasses__() if kind is not SyncContext],  # type: ignore[attr-defined]
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_async_handlers_use_has_a_synchronous_form(kind: type, plain: type) -> None:
    missing = public(kind) - public(plain)
    assert missing == OF_THE_LOOP.get(kind, set())
    waiting = {name for name in public(plain) if inspect.iscoroutinefunction(getattr(plain, name))}
    assert waiting == set()


async def is_idle(worker: Worker) -> bool:
    return worker.in_flight == 0


def thread_name() -> int:
    return threading.get_ident()


# steps


async def test_steps_run_once_in_order_in_the_thread_of_the_handler(app: App) -> None:
    calls: list[str] = []
    threads: set[int] = set()

    def act(word: str, *, times: int = 1) -> str:
        calls.append(word)
        threads.add(threading.get_ident())
        return word * times

    async def act_async(word: str) -> str:
        calls.append(word)
        await asyncio.sleep(0)
        return word

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    def job(ctx: SyncContext, word: str) -> list[str]:
        threads.add(threading.get_ident())
        assert threading.current_thread() is not threading.main_thread()
        found = [ctx.step("act", act, word, times=2), ctx.step("act", act, "again")]
        found.append(ctx.step("async", act_async, "async"))
        with ctx.scope("page"):
            found.append(ctx.tool("act", act, "scoped"))
        if ctx.attempt == 1:
            raise ValueError("resume")
        return found

    handle = await job.enqueue("word")
    await work_off(app)
    assert await bounded(handle.result()) == ["wordword", "again", "async", "scoped"]
    assert calls == ["word", "again", "async", "scoped"]
    assert len(threads) <= 2  # one for each attempt
    assert set(await recorded_steps(app, handle)) == {"d:act", "d:act#2", "d:async", "d:page/act", "s:#tools"}


async def test_a_step_with_a_time_out_runs_in_a_thread_of_its_own(app: App) -> None:
    release = threading.Event()
    threads: list[int] = []

    def slow() -> str:
        threads.append(threading.get_ident())
        assert release.wait(BOUND)
        return "late"

    @app.task
    def job(ctx: SyncContext) -> list[str]:
        threads.append(threading.get_ident())
        try:
            with ctx.scope("outer"):
                ctx.options(timeout=0.05).step("slow", slow)
        except StepTimeout:
            release.set()
        return [ctx.step("after", str, 1), ctx.options(timeout=BOUND).step("slow", slow)]

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["1", "late"]
    assert len(set(threads)) == 3 or threads[1] == threads[2] != threads[0]
    assert set(await recorded_steps(app, handle)) == {"d:outer/slow", "d:after", "d:slow"}


async def test_steps_see_the_context_variables_of_the_thread(app: App) -> None:
    """Such as the trace or the request id that a library keeps there."""
    seen: list[str] = []

    def look() -> None:
        seen.append(REQUEST.get())

    async def look_in_loop() -> None:
        look()

    def outer() -> None:
        token = REQUEST.set("step")
        SyncContext.current().step("inner", look)
        REQUEST.reset(token)
        look()

    @app.task
    def job(ctx: SyncContext) -> None:
        ctx.step("before", look)
        token = REQUEST.set("handler")
        with ctx.scope("a"):
            ctx.step("sync", look)
            ctx.step("async", look_in_loop)
            ctx.options(timeout=BOUND).step("timed", look)
            ctx.options(nested="record").step("outer", outer)
        REQUEST.reset(token)
        ctx.step("after", look)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert seen == ["none", "handler", "handler", "handler", "step", "handler", "none"]


async def test_steps_within_steps_run_under_the_outer_one(app: App) -> None:
    def inner(number: int) -> int:
        assert current_step().key in ("outer", "timed", "recorded/inner", "outer#2")
        return number

    def outer(number: int) -> int:
        return SyncContext.current().step("inner", inner, number)

    def recorded(number: int) -> int:
        return SyncContext.current().options(nested="record").step("inner", inner, number)

    together = threading.Barrier(3)

    def meet(number: int) -> int:
        together.wait(BOUND)
        return outer(number)

    async def concurrent() -> list[int]:
        """The steps of concurrent tasks get threads of their own, from which the context works as well."""
        calls = (current_context().step("one", meet, number) for number in range(3))
        return list(await asyncio.gather(*calls))

    @app.task
    def job(ctx: SyncContext) -> list[Any]:
        return [
            ctx.step("outer", outer, 1),
            ctx.options(timeout=BOUND).step("timed", outer, 2),
            ctx.step("recorded", recorded, 3),
            ctx.step("outer", concurrent),
        ]

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [1, 2, 3, [0, 1, 2]]
    assert set(await recorded_steps(app, handle)) == {"d:outer", "d:timed", "d:recorded", "d:outer#2"}


async def test_a_step_left_in_a_scope_by_its_time_out_does_not_change_later_names(app: App) -> None:
    release, left = threading.Event(), threading.Event()

    def slow() -> None:
        try:
            with SyncContext.current().scope("inside"):
                assert release.wait(BOUND)
        finally:
            left.set()

    @app.task
    def job(ctx: SyncContext) -> None:
        with pytest.raises(StepTimeout):
            ctx.options(timeout=0.2).step("slow", slow)
        ctx.step("after", str, 1)
        release.set()
        assert left.wait(BOUND)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert set(await recorded_steps(app, handle)) == {"d:slow", "d:after"}


async def test_more_handlers_than_step_threads_do_not_block_each_other(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each handler waits for a step in another thread, of which there is one."""
    arrived = threading.Barrier(4)

    @app.task
    def job(ctx: SyncContext) -> str:
        arrived.wait(BOUND)  # all of them hold a thread
        return ctx.options(timeout=BOUND).step("one", str, 1)

    async with Worker(app, concurrency=4) as worker:
        worker._executor.threads._steps.total_tokens = 1
        handles = await job.enqueue_many({} for _ in range(4))
        running = asyncio.create_task(worker.run())
        assert [await bounded(handle.result()) for handle in handles] == ["1"] * 4
        worker.stop()
        await bounded(running)


async def test_middleware_sees_the_steps(settings: Settings) -> None:
    seen: list[str] = []

    class Watching(Middleware):
        async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
            seen.append(f"{ctx.task}/{step.key}")
            return await call_next()

    async with App("plain", settings=settings, middleware=[Watching()]) as app:

        @app.task
        def job(ctx: SyncContext) -> int:
            return ctx.step("one", len, "x")

        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 1
    assert seen == ["job/one"]


# the other methods of the context


async def test_the_context_logs_waits_and_sends(app: App) -> None:
    @app.task
    async def target(ctx: Context) -> list[Any]:
        return [message.content for message in await ctx.inbox(wait=BOUND)]

    @app.task
    def job(ctx: SyncContext, to: str) -> list[Any]:
        ctx.decide("left", reasoning="shorter")
        ctx.discover("the road is closed", source="map")
        ctx.add_message("user", "hello")
        artifact = ctx.artifacts.save("note", b"text")
        memory = ctx.memory.add("the sky is blue")
        ctx.progress(1, 2, note="half")
        ctx.checkpoint()
        (message,) = ctx.inbox(wait=BOUND)  # the task is parked here
        ctx.send(to, message.content)
        found = [one.memory.text for one in ctx.memory.search("sky")]
        assert ctx.memory.profile("user:1") == []
        assert b"".join(ctx.artifacts.chunks("note")) == b"text"
        info = dict(ctx.resume_info())
        assert "handoff" in info
        assert next(event.type for event in ctx.resume_info().history()) == "decided"
        return [ctx.artifacts.read("note").decode(), artifact.name, memory.text, found, ctx.resumed, ctx.attempt]

    receiving = await target.enqueue()
    handle = await job.enqueue(receiving.id)
    async with running_worker(app):

        async def waits() -> bool:
            return (await handle.record()).waits == "message"

        await wait_until(waits, "the task is parked")
        await handle.send("go on")
        assert await bounded(receiving.result()) == ["go on"]
        expected = ["text", "note", "the sky is blue", ["the sky is blue"], True, 1]
        assert await bounded(handle.result()) == expected
    types = [event.type for event in await history(handle)]
    assert types.count("decided") == types.count("discovered") == types.count("message_added") == 1


async def test_a_plain_function_continues_as_another_task(app: App) -> None:
    cleaned: list[str] = []

    @app.task
    async def other(ctx: Context, word: str) -> str:
        return f"{word} arrived"

    @app.task
    def job(ctx: SyncContext, word: str) -> str:
        try:
            ctx.continue_as(other)
        finally:
            cleaned.append("yes")

    handle = await job.enqueue("it")
    await work_off(app)
    assert await bounded(handle.result()) == "it arrived"
    assert cleaned == ["yes"]


# how it ends


async def test_an_error_of_a_plain_function_is_an_attempt(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    def job(ctx: SyncContext, kind: str) -> None:
        if kind == "exit":
            raise SystemExit(3)
        raise StopIteration if kind == "stop" else LookupError("it is not here")

    handles = [await job.enqueue(kind) for kind in ("error", "exit", "stop")]
    await work_off(app)
    found = [await letter(app, handle) for handle in handles]
    assert [one.attempts for one in found] == [2, 1, 2]  # a process that wants to exit is not retried
    assert found[0].message == "it is not here"
    assert "job" in found[0].traceback


async def test_a_cancelled_handler_is_stopped_in_the_call_that_it_waits_for(app: App) -> None:
    started = asyncio.Event()
    seen: list[str] = []

    async def endless() -> None:
        started.set()
        await anyio.sleep_forever()

    @app.task
    def job(ctx: SyncContext) -> None:
        try:
            ctx.step("endless", endless)
        except Exception:  # noqa: BLE001 - a handler that catches too much does not catch this
            seen.append("an error")
        except asyncio.CancelledError:
            time.sleep(0.05)  # the outcome waits for it
            seen.append("cancelled")
            with pytest.raises(asyncio.CancelledError):
                ctx.step("later", str, 1)
            raise

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
        assert seen == ["cancelled"]
        await wait_until(lambda: is_idle(worker), "the slot is free")
        assert worker.stuck_handlers == 0


@pytest.mark.parametrize("end", ["cancelled", "timed out", "lost"])
async def test_a_thread_that_runs_on_keeps_its_slot_and_can_write_nothing(app: App, end: str) -> None:
    started, release, refused = threading.Event(), threading.Event(), threading.Event()
    entry = b""

    @app.task(timeout=0.2 if end == "timed out" else None, retry=Retry(max_attempts=1))
    def job(ctx: SyncContext) -> str:
        if ctx.crashes:
            return "resumed"
        started.set()
        assert release.wait(BOUND)
        try:
            ctx.step("late", str, 1)
        except asyncio.CancelledError:
            refused.set()
        return "late"

    async with running_worker(app, concurrency=1) as worker:
        handle = await job.enqueue()
        await bounded(asyncio.to_thread(started.wait, BOUND))
        if end == "cancelled":
            await handle.cancel()
            with pytest.raises(TaskCancelled):
                await bounded(handle.result())
        elif end == "timed out":
            assert (await letter(app, handle)).reason is Reason.TIMEOUT
        else:
            entry = await steal(app, handle)
            worker._heartbeat.renew_now()

        async def leaked() -> bool:
            return (worker.stuck_handlers, worker._slots.free, worker._executor.threads.lost) == (1, 0, 1)

        await wait_until(leaked, "the slot is leaked")
        assert worker.in_flight == 0
        release.set()

        async def returned() -> bool:
            return (worker.stuck_handlers, worker._slots.free, worker._executor.threads.lost) == (0, 1, 0)

        await wait_until(returned, "the slot is free again")
        assert refused.is_set()
        if end == "lost":
            await expire_lease(app, entry)
            assert await bounded(handle.result()) == "resumed"
    assert await recorded_steps(app, handle) == {}
    assert await handle.status() is {"cancelled": State.CANCELLED, "timed out": State.DEAD}.get(end, State.SUCCEEDED)


async def test_a_stopping_worker_releases_a_plain_function_at_its_next_step(app: App) -> None:
    started, release = threading.Event(), threading.Event()
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        started.set()
        assert release.wait(BOUND)

    @app.task
    def job(ctx: SyncContext) -> str:
        ctx.step("first", first)
        ctx.step("second", calls.append, "second")
        return "done"

    handle = await job.enqueue()
    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        await bounded(asyncio.to_thread(started.wait, BOUND))
        worker.stop()
        release.set()
        await bounded(running)
    assert calls == ["first"]
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == (State.QUEUED, 0, 0)
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert calls == ["first", "second"]


async def test_a_plain_function_runs_with_the_context_of_a_unit_test() -> None:
    app = App("plain")

    @app.task
    def job(ctx: SyncContext, word: str) -> list[Any]:
        with ctx.scope("page"):
            length = ctx.step("length", len, word)
        ctx.decide("left")
        assert ctx.resumed
        assert {name: getattr(ctx, name) for name in facts} == facts
        return [length, [message.content for message in ctx.inbox()]]

    ctx = make_context(inbox=["hello"], recorded={"other": 1}, tags=["eu"], headers={"a": "b"}, version=2, resources=3)
    facts = {name: getattr(ctx, name) for name in public(TaskInfo) - {"log"}}
    assert facts["tags"] == ("eu",)
    assert await job(ctx, "word") == [4, ["hello"]]
    assert ctx.steps == {"page/length": 4}
    assert [event.type for event in ctx.events] == ["decided"]


# what is refused


async def test_the_context_is_for_the_thread_of_its_handler(app: App) -> None:
    def elsewhere(ctx: SyncContext) -> str:
        with pytest.raises(StepOutsideTask, match="must be used in the thread of its handler"):
            ctx.step("one", str, 1)
        return "refused"

    @app.task
    def job(ctx: SyncContext) -> list[str]:
        with pytest.raises(StepOutsideTask, match=r"use SyncContext\.current\(\)"):
            current_context()
        assert SyncContext.current() is ctx
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(elsewhere(ctx)))
        thread.start()
        thread.join(BOUND)
        return found

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["refused"]
    with pytest.raises(StepOutsideTask):
        SyncContext.current()


async def test_a_plain_function_must_not_return_a_coroutine(app: App) -> None:
    async def inner() -> int:
        return 1

    @app.task
    def job(ctx: SyncContext) -> Any:
        return inner()

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.message == "task 'job' is a plain function that returned a coroutine: use 'async def'"
    assert found.attempts == 1


def generator(ctx: SyncContext) -> Any:
    yield 1


async def async_generator(ctx: Context) -> Any:
    yield 1


def async_context(ctx: Context) -> None: ...


async def sync_context(ctx: SyncContext) -> None: ...


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (generator, "must be an 'async def' or a 'def', without 'yield'"),
        (async_generator, "must be an 'async def' or a 'def', without 'yield'"),
        (async_context, r"the first parameter must be the SyncContext: def f\(ctx: SyncContext, \.\.\.\)"),
        (sync_context, r"the first parameter must be the Context: async def f\(ctx: Context, \.\.\.\)"),
    ],
)
def test_a_function_that_does_not_fit_its_context_is_refused(handler: Callable[..., Any], says: str) -> None:
    app = App("plain")
    with pytest.raises(TaskDefinitionError, match=says):
        app.task(handler)


# a killed process

RESUMED = """
import os, signal
from pathlib import Path

from perdure import App, SyncContext

app = App("resumed")


def note(folder: str, name: str) -> str:
    with (Path(folder) / "calls").open("a") as calls:
        calls.write(name + "\\n")
    return name


def dies_once(folder: str) -> str:
    died = Path(folder) / "died"
    note(folder, "second")
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second"


@app.task
def job(ctx: SyncContext, folder: str) -> list[str]:
    return [ctx.step("first", note, folder, "first"), ctx.step("second", dies_once, folder)]
"""


@pytest.mark.processes
async def test_a_killed_worker_resumes_a_plain_function_at_its_step(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "resumed.py").write_text(RESUMED)
    for name, value in (("REDIS_URL", settings.redis_url), ("NAMESPACE", settings.namespace), ("LEASE", "1")):
        monkeypatch.setenv(f"PERDURE_{name}", value)
    async with App("resumed", settings=settings) as app:
        handle = await app.producer.enqueue("job", {"folder": str(tmp_path)}, queue="resumed")
        with Running("worker", "run", "resumed.py:app", "--processes", "1", cwd=tmp_path):
            assert await bounded(handle.result()) == ["first", "second"]
    assert (tmp_path / "calls").read_text().split() == ["first", "second", "second"]

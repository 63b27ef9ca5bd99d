"""Errors that do more than exceptions should: no worker hangs or ends because of them, and each task has an outcome."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from perdure import (
    App,
    Context,
    Middleware,
    Retry,
    Settings,
    StepCall,
    SyncContext,
)
from perdure.deadletter.burial import Evidence
from perdure.worker.log import logger
from perdure.worker.middleware import CallNext, Settlement

from tests.support.workers import bounded, letter, running_worker, work_off

pytestmark = pytest.mark.integration

ONCE = Retry(max_attempts=1)


class Mute(Exception):
    """An error whose text cannot be had."""

    def __init__(self, how: Callable[[], str]) -> None:
        self.how = how

    def __str__(self) -> str:
        return self.how()

    __repr__ = __str__


def fail() -> str:
    raise ValueError


def leave() -> str:
    sys.exit(3)


def interrupt() -> str:
    raise KeyboardInterrupt


def close() -> str:
    raise GeneratorExit


def recurse() -> str:
    return recurse()


def wrong_type() -> str:
    return 7  # type: ignore[return-value]


HOWS = [fail, leave, interrupt, close, recurse, wrong_type]
PLACES = [
    "handler",
    "plain handler",
    "step",
    "plain step",
    "step of a plain handler",
    "concurrent step",
    "verify",
    "plain verify",
    "hook of a step",
    "hook of a run",
    "hook of a concurrent step",
]


class Hooks(Middleware):
    def __init__(self) -> None:
        self.step_raises: Callable[[], BaseException] | None = None
        self.run_raises: Callable[[], BaseException] | None = None

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        if self.step_raises is not None:
            raise self.step_raises()
        return await call_next()

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        if self.run_raises is not None and ctx.task == "bad":
            raise self.run_raises()
        return await call_next()


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


@pytest.fixture
async def app(settings: Settings, hooks: Hooks) -> AsyncIterator[App]:
    async with App("hostile", settings=settings, middleware=[hooks]) as app:
        yield app


def declare(app: App, hooks: Hooks, place: str, make: Callable[[], BaseException]) -> Any:
    """Return a task that raises the error in a place."""
    tries = []

    def plain(*_: object) -> None:
        raise make()

    async def awaited(*_: object) -> None:
        raise make()

    if "plain handler" in place:

        @app.task(name="bad", retry=ONCE)
        def bad_plain(ctx: SyncContext) -> None:
            if place == "plain handler":
                raise make()
            ctx.step("act", plain)

        return bad_plain
    if place.startswith("hook of a run"):
        hooks.run_raises = make
    elif place.startswith("hook"):
        hooks.step_raises = make

    @app.task(name="bad", retry=ONCE)
    async def bad(ctx: Context) -> None:
        match place:
            case "handler":
                raise make()
            case "step":
                await ctx.step("act", awaited)
            case "plain step":
                await ctx.step("act", plain)
            case "concurrent step":
                await asyncio.gather(ctx.step("act", awaited), ctx.step("other", asyncio.sleep, 0))
            case "hook of a concurrent step":
                await asyncio.gather(ctx.step("act", asyncio.sleep, 0), ctx.step("other", asyncio.sleep, 0))
            case "verify" | "plain verify":

                async def act() -> None:
                    tries.append(1)
                    raise ConnectionError

                verify = awaited if place == "verify" else plain
                options = ctx.options(risky=True, verify=verify, retry=Retry(max_attempts=2, base=0))
                await asyncio.gather(options.step("act", act), ctx.step("other", asyncio.sleep, 0))
            case _:
                await ctx.step("act", asyncio.sleep, 0)

    return bad


async def outcome(app: App, hooks: Hooks, place: str, make: Callable[[], BaseException]) -> Any:
    """Return the dead letter of the task. Its worker runs another task after it."""
    bad = declare(app, hooks, place, make)

    @app.task(name="good")
    async def good(ctx: Context) -> str:
        return "good"

    async with running_worker(app):
        handle = await bad.enqueue()
        found = await letter(app, handle)
        assert await bounded((await good.enqueue()).result()) == "good"
    assert (found.attempts, found.crashes) == (1, 0)
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", HOWS)
async def test_an_error_without_a_text_is_a_failure(app: App, hooks: Hooks, place: str, how: Callable[[], str]) -> None:
    found = await outcome(app, hooks, place, lambda: Mute(how))
    assert found.error.endswith("Mute")
    assert found.message.startswith("<no message: str() raised ")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, KeyboardInterrupt])
async def test_an_exit_is_a_failure_of_its_task(app: App, hooks: Hooks, place: str, kind: type[BaseException]) -> None:
    found = await outcome(app, hooks, place, kind)
    assert kind.__name__ in f"{found.error} {found.message}"


async def test_a_generator_exit_is_the_failure_of_its_step(app: App) -> None:
    tries: list[int] = []

    def plain() -> int:
        tries.append(1)
        if len(tries) < 2:
            raise GeneratorExit
        return len(tries)

    async def awaited() -> int:
        return plain()

    @app.task
    async def job(ctx: Context) -> list[int]:
        options = ctx.options(retry=Retry(max_attempts=2, base=0))
        found: list[int] = []
        for function in (plain, awaited):
            tries.clear()
            found.append(await options.step("act", function))
        return found

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [2, 2]
    failed = [event.data["message"] async for event in handle.events(follow=False) if event.type == "step_failed"]
    why = "raised GeneratorExit, which only the close() of a generator may raise"
    assert failed == [f"step '{key}' {why}" for key in ("act", "act#2")]


@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, KeyboardInterrupt, lambda: Mute(leave)])
async def test_a_settle_hook_cannot_end_the_worker(settings: Settings, kind: Callable[[], BaseException]) -> None:
    raised: list[int] = []

    class Settles(Middleware):
        async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
            if ctx.task == "bad" and not raised:
                raised.append(1)
                raise kind()
            await call_next()

    async with App("hostile", settings=settings, middleware=[Settles()]) as app:

        @app.task
        async def bad(ctx: Context) -> None: ...

        @app.task
        async def good(ctx: Context) -> str:
            return "good"

        async with running_worker(app):
            await bad.enqueue()
            assert await bounded((await good.enqueue()).result()) == "good"
            assert raised


def test_the_log_of_an_error_without_a_text_has_its_traceback() -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    try:
        for how in HOWS:
            try:
                raise Mute(how)
            except Mute as error:
                logger.opt(exception=error).error("it failed")
                assert "raise Mute(how)" in Evidence.of(error).traceback
    finally:
        logger.remove(sink)
    assert sum("raise Mute(how)" in line for line in lines) == len(HOWS)

"""Errors of calls that waited or were refused: which server was asked, and what to do."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, Snooze, Worker
from perdure.queues import ConfigurationError, StillRunning, TaskNotFound
from perdure.testing import run_until_idle
from perdure.worker.errors import TaskDefinitionError

from tests.support.workers import BOUND, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    app = App("named", settings=settings)

    @app.task
    async def send(ctx: Context, number: int = 0) -> int:
        return number

    @app.task(retry=Retry(max_attempts=1))
    async def poll(ctx: Context) -> str:
        if await ctx.step("seen", lambda: True) and not polled:
            polled.append(True)
            raise Snooze(after=0.01)
        return "done"

    polled: list[bool] = []

    @app.agent(name="assistant")
    class Assistant(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            return ""

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return ""

    async with app:
        yield app


async def test_a_timeout_names_the_server(app: App) -> None:
    shown = app.settings.address.shown
    handle = await app.tasks["send"].enqueue(1)
    with pytest.raises(TimeoutError) as raised:
        await handle.result(timeout=0.05)
    assert str(raised.value) == (
        f"task {handle.id} (send) did not end within 0.05 s: it is queued, and no worker serves queue 'named'; "
        f"server: {shown}"
    )
    turn = await app.session(app.agents["assistant"], "ada").send("hello")
    with pytest.raises(TimeoutError, match=f"; server: {shown}$"):
        await turn.result(timeout=0.05)
    await app.session(app.agents["assistant"], "ada").forget()


async def test_a_refused_restart_and_a_missing_task_name_the_server(app: App) -> None:
    shown = app.settings.address.shown
    await app.agents["assistant"].enqueue("tidy up")
    with pytest.raises(StillRunning, match=f"is queued on {shown} and can be restarted only after its end"):
        await app.agents["assistant"].enqueue("tidy up", fresh=True)
    handle = await app.tasks["send"].enqueue(1)
    await work_off(app)
    await app.producer.gateway.command("DEL", handle.partition.record(handle.id))
    calls: list[Callable[[], Awaitable[Any]]] = [handle.record, handle.explain, handle.cancel, lambda: handle.send("x")]
    for call in calls:
        with pytest.raises(TaskNotFound, match=f"on {shown}: check the id"):
            await call()


@pytest.mark.parametrize("wrong", [math.nan, -math.nan])
async def test_a_time_that_is_no_number_is_refused(app: App, wrong: float) -> None:
    handle = await app.tasks["send"].enqueue(1)
    with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
        await handle.result(timeout=wrong)
    with pytest.raises(ValueError, match="delay must be a number of seconds, got nan"):
        await app.tasks["send"].options(delay=wrong).enqueue(1)
    with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
        app.tasks["send"].options(timeout=wrong)
    with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
        await run_until_idle(app, timeout=wrong)
    with pytest.raises(TaskDefinitionError, match="task 'poll': timeout must be a number of seconds, got nan"):
        App("other").task(timeout=wrong)(app.tasks["poll"].handler)
    with pytest.raises(ValueError, match=r"Retry.base must be a number of seconds, got nan"):
        Retry(base=wrong)
    assert await handle.record()
    await work_off(app)
    assert await handle.result(timeout=timedelta(seconds=BOUND)) == 1


async def test_one_id_for_many_tasks_is_refused_with_the_remedy(app: App) -> None:
    with pytest.raises(ValueError, match=r"got one id: send\.options\(task_id=lambda args: \.\.\.\)\.enqueue_many"):
        await app.tasks["send"].options(task_id="one").enqueue_many([{"number": 1}])


def test_an_app_without_tasks_is_refused_with_the_remedy(settings: Settings) -> None:
    with pytest.raises(ConfigurationError, match=r"has no tasks, .*; name the modules that define them: .*include="):
        Worker(App("empty", settings=settings))


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    logger.enable("perdure")
    handler = logger.add(lambda line: lines.append(str(line)), level="INFO", format="{level} {message}")
    yield lines
    logger.remove(handler)
    logger.disable("perdure")


async def test_a_task_that_polls_does_not_fill_the_log(app: App, log: list[str]) -> None:
    handle = await app.tasks["poll"].enqueue()
    states = await run_until_idle(app, timeout=BOUND)
    assert (await handle.result(timeout=BOUND), states["scheduled"]) == ("done", 1)
    assert not [line for line in log if "snoozed" in line]

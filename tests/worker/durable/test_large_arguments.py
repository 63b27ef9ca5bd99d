"""Large arguments of tasks: the handler gets them as it gets small ones, in the first run and in a resumed one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Ephemeral,
    PayloadTooLarge,
    PlanStep,
    Retry,
    Settings,
    State,
    TaskHandle,
)
from perdure.deadletter.policy import Reason
from perdure.worker.agents.journal.forks import fork
from pydantic import SecretStr

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, letter, redis_command, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)
LIMITS = {"payload_limit": 10_000, "large_limit": 3_000_000, "unknown_task": Retry(max_attempts=1)}
TEXT = "é" * 600_000


@pytest.fixture(params=["plain", "encrypted"])
async def app(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[App]:
    settings = settings.model_copy(update=LIMITS)
    if request.param == "encrypted":
        settings = with_keys(settings, FIRST).model_copy(update={"encryption_required": True})
    async with App("large", settings=settings) as app:
        yield app


async def stored_chunks(app: App, handle: TaskHandle[Any]) -> list[str]:
    names = await redis_command(app, "HKEYS", handle.partition.record(handle.id))
    return sorted(name.decode() for name in names if name.startswith(b"args:"))


async def test_each_run_gets_them(app: App) -> None:
    @app.task(retry=AGAIN)
    async def length(ctx: Context, text: str, token: SecretStr) -> int:
        assert token.get_secret_value() == "correct horse"
        found = await ctx.step("length", len, text)
        if ctx.attempt == 1:
            raise ConnectionError(f"cut off with {token.get_secret_value()}")
        return found + text.count("é")

    handle = await length.enqueue(TEXT, SecretStr("correct horse"))
    await work_off(app)
    assert await bounded(handle.result()) == 1_200_000
    assert len(await stored_chunks(app, handle)) == 3
    record = await handle.record()
    assert (record.shown_arguments() or b"").endswith(b" bytes, stored in 3 chunks)")
    assert b"correct horse" not in (await redis_command(app, "HGET", handle.partition.record(handle.id), "args"))


async def test_a_lost_chunk_is_a_dead_letter(app: App) -> None:
    @app.task(retry=AGAIN)
    async def length(ctx: Context, text: str) -> int:
        return len(text)

    handle = await length.enqueue(TEXT)
    await redis_command(app, "HDEL", handle.partition.record(handle.id), (await stored_chunks(app, handle))[0])
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.UNREADABLE, 0)
    assert found.message.startswith(f"could not read the arguments of task {handle.id}: chunk 1 of 3 is missing")


async def test_arguments_of_another_type_are_a_dead_letter(app: App) -> None:
    @app.task(retry=AGAIN)
    async def length(ctx: Context, text: int) -> int:
        return text

    handle = await app.producer.enqueue("length", {"text": TEXT}, queue="large")
    await work_off(app)
    assert (await letter(app, handle)).reason is Reason.INVALID_ARGUMENTS


async def test_a_successor_and_a_fork_have_them(app: App) -> None:
    @app.task(retry=AGAIN)
    async def first(ctx: Context, text: str, more: str = "") -> int:
        if more:
            return len(text) + len(more)
        return await ctx.continue_as(first, why="larger", arguments={"text": text, "more": TEXT[:10_000]})

    @app.task(retry=AGAIN)
    async def second(ctx: Context, text: str) -> int:
        await ctx.continue_as(third)

    @app.task(retry=AGAIN)
    async def third(ctx: Context, text: str) -> int:
        return len(text)

    handle, other = await first.enqueue(TEXT), await second.enqueue(TEXT)
    await work_off(app)
    assert await bounded(handle.result()) == 610_000
    assert await bounded(other.result()) == 600_000
    forked = await fork(app.producer, handle.id, edit={"more": "!"})
    assert await forked.handle.status() is State.QUEUED
    await work_off(app)
    assert await bounded(forked.handle.result()) == 600_001


async def test_an_agent_has_large_inputs_if_its_state_does_not_store_them(app: App) -> None:
    class State(AgentState):
        text: Annotated[str, Ephemeral] = ""

    class Reader(Agent[State]):
        async def plan(self, ctx: Context, state: State) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: State, step: PlanStep) -> None: ...

        async def finish(self, ctx: Context, state: State) -> int:
            return len(state.text)

    reader = app.agent(Reader)
    handle = await reader.enqueue("count", text=TEXT)
    await work_off(app)
    assert await bounded(handle.result()) == 600_000
    with pytest.raises(PayloadTooLarge, match=r"inputs, which the state has, is .* raise PERDURE_PAYLOAD_LIMIT"):
        await reader.enqueue(TEXT)
    with pytest.raises(PayloadTooLarge, match="raise PERDURE_LARGE_LIMIT"):
        await reader.enqueue("count", text=3 * TEXT)

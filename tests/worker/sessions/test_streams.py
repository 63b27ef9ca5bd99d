"""`turn.stream`: what an agent emits in a turn of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, StreamItem, TurnHandle
from perdure.queues.errors import SessionFailed, SessionNotFound

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("talk", lease=30.0)]


class Speaker(Agent[AgentState]):
    """Emits the words of the message."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="speak", title="speak")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        for word in state.goal.split():
            await ctx.emit(word, to="tokens")
        if "fail" in state.goal:
            raise ValueError("no voice")
        if "wait" in state.goal:
            await ctx.inbox(wait=3600, why="an answer")
        return state.goal

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results["speak"])


@pytest.fixture
def app(app: App) -> App:
    app.agent(Speaker, retry=Retry(max_attempts=1))
    return app


async def read_all(turn: TurnHandle, **options: Any) -> list[StreamItem]:
    async def read() -> list[StreamItem]:
        return [item async for item in turn.stream("tokens", **options)]

    return await bounded(read())


async def test_each_turn_has_its_stream_and_a_waiting_one_begins_later(app: App) -> None:
    session = app.session(Speaker, "ada")
    first, second = await session.send("how are you"), await session.send("good night")
    reading = asyncio.create_task(read_all(second))
    async with running_worker(app):
        found = await read_all(first)
        assert [item.value for item in found[:-1]] == ["how", "are", "you"]
        assert (found[-1].kind, found[-1].state, found[-1].result) == ("end", "succeeded", "how are you")
        found = await bounded(reading)
        assert [item.value for item in found[:-1]] == ["good", "night"]
        assert found[-1].result == "good night"
        assert {item.step for item in found[:-1]} == {"speak"}
    assert [item.value for item in await read_all(second, after=found[0].cursor)] == ["night", None]
    blocking = await asyncio.to_thread(lambda: list(second.stream_sync("tokens", last=1)))
    assert [item.value for item in blocking] == ["night", None]


async def test_a_turn_is_found_by_its_number(app: App) -> None:
    session = app.session(Speaker, "ada")
    with pytest.raises(SessionNotFound):
        await session.turn(1)
    sent = await session.send("good night")
    await work_off(app)
    found = await session.turn(1)
    assert (found.task_id, await found.result()) == (sent.task_id, "good night")
    assert [item.value for item in await read_all(found)] == ["good", "night", None]
    with pytest.raises(ValueError, match="number must be that of a turn of the session, 1 to 1, got 2"):
        await session.turn(2)


async def test_a_failed_turn_ends_and_the_next_one_says_why_it_does_not_begin(app: App) -> None:
    session = app.session(Speaker, "ada")
    first, second = await session.send("please fail"), await session.send("good night")
    reading = asyncio.create_task(read_all(first))
    await work_off(app)
    found = await bounded(reading)
    assert [item.value for item in found[:-1]] == ["please", "fail"]
    assert (found[-1].state, found[-1].error_type, found[-1].error) == ("dead", "ValueError", "no voice")
    with pytest.raises(SessionFailed):
        await read_all(second)
    with pytest.raises(ValueError, match="after must be"):
        second.stream("tokens", after="x")


async def test_a_turn_whose_task_is_gone_ends_with_its_answer(app: App) -> None:
    session = app.session(Speaker, "ada")
    turn = await session.send("good night")
    await work_off(app)
    handle = await app.producer.find(turn.task_id)
    assert handle is not None
    keys = [handle.partition.record(handle.id), handle.partition.stream(handle.id, "tokens")]
    assert await redis_command(app, "DEL", *keys) == 2
    [end] = await read_all(turn)
    assert (end.kind, end.state, end.result, end.cursor) == ("end", "succeeded", "good night", "0")


async def test_forgetting_a_session_removes_its_streams_and_ends_their_readers(app: App) -> None:
    session = app.session(Speaker, "ada")
    turn = await session.send("wait my number is 8151")
    async with running_worker(app):
        items = turn.stream("tokens")
        assert [(await bounded(anext(items))).value for _ in range(5)][-1] == "8151"
        assert await session.forget()
        end = await bounded(anext(items))
        assert (end.kind, end.state) == ("end", "expired")

        async def nothing_left() -> bool:
            _, keys = await redis_command(app, "SCAN", 0, "MATCH", "*:stream*:turn-*", "COUNT", 100_000)
            return not keys

        await wait_until(nothing_left, "the streams are gone")
    with pytest.raises(SessionNotFound):
        await read_all(turn)


@pytest.fixture
async def sealed(settings: Settings) -> AsyncIterator[App]:
    async with App("talk", settings=with_keys(settings, FIRST)) as app:
        app.agent(Speaker)
        yield app


async def test_streams_of_encrypted_sessions_are_encrypted(sealed: App, settings: Settings) -> None:
    turn = await sealed.session(Speaker, "ada").send("my number")
    await work_off(sealed)
    found = await read_all(turn)
    assert [item.value for item in found[:-1]] == ["my", "number"]
    handle = await sealed.producer.find(turn.task_id)
    assert handle is not None
    stored = await redis_command(sealed, "XRANGE", handle.partition.stream(handle.id, "tokens"), "-", "+")
    assert b"number" not in b"".join(stored[1][1])
    async with App("talk", settings=settings) as other:
        without_key = await other.producer.find(turn.task_id)
        assert without_key is not None
        found = [item async for item in without_key.stream("tokens")]
    assert [item.kind for item in found] == ["item", "item", "end"]
    assert [item.value for item in found] == [None, None, None]
    assert "could not decrypt" in str(found[0].problem)
    assert "could not decrypt the result" in str(found[-1].problem)
    assert [item.cursor for item in found] == ["1", "2", "2"]

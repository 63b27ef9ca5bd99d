"""Sessions that are forgotten: nothing of what was said in them is left, whatever their turns do meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry
from perdure.queues import Gateway
from perdure.queues.sessions.record import parse_turn_id
from perdure.queues.sessions.removal import finish_forgetting
from perdure.queues.sessions.turns import enqueue_turn
from perdure.worker.session import Session

from tests.support.runs import address_of
from tests.support.workers import redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(lease=30.0)]

SECRET = "my number is 8151"


class Listener(Agent[AgentState]):
    """Records a step, writes a memory of it into the state, and does what the message asks for."""

    running: ClassVar[asyncio.Event]
    release: ClassVar[asyncio.Event]

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="listen", title="listen"), PlanStep(key="act", title="act")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        if step.key == "listen":
            await ctx.discover(state.goal, source="user")
        elif "fail" in state.goal:
            raise ValueError(state.goal)
        elif "wait" in state.goal:
            await ctx.inbox(wait=3600, why="an answer")
        elif "continue" in state.goal:
            await ctx.continue_as("listen_on", arguments={"text": state.goal})
        elif "hang" in state.goal:
            self.running.set()
            await self.release.wait()
        return state.goal

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results["act"])


@pytest.fixture
def app(app: App) -> App:
    app.agent(Listener, retry=Retry(max_attempts=1))
    Listener.running, Listener.release = asyncio.Event(), asyncio.Event()

    @app.task
    async def listen_on(ctx: Context, text: str) -> str:
        return text

    return app


async def stored(app: App, *texts: str) -> list[str]:
    """Return the keys that have one of these texts in their name or content; by default what was said, and any turn."""
    found = []
    for key in await redis_command(app, "KEYS", f"{{{app.producer.namespace.name}*"):
        content, kind = b"", await redis_command(app, "TYPE", key)
        if kind == b"stream":
            content = repr(await redis_command(app, "XRANGE", key, "-", "+")).encode()
        elif kind == b"hash":
            content = repr(await redis_command(app, "HGETALL", key)).encode()
        elif kind == b"zset":
            content = repr(await redis_command(app, "ZRANGE", key, 0, -1)).encode()
        if any(text.encode() in key + content for text in texts or ("8151", "turn-")):
            found.append(key.decode())
    return found


async def say(app: App, session: Session[Any], *texts: str) -> None:
    for text in texts:
        await session.send(f"{SECRET}; {text}", skip_failed=True)
        await work_off(app)


async def test_a_forgotten_session_leaves_nothing_of_its_turns(app: App) -> None:
    session = app.session(Listener, "ada")
    await say(app, session, "hello", "fail", "continue", "fail")
    await app.session(Listener, "bob").send("hello")
    await work_off(app)
    assert len([key for key in await stored(app) if ":dead" in key]) == 1
    assert await session.forget()
    assert await stored(app, "8151", address_of(app, "listener", session).digest) == []
    assert await stored(app, address_of(app, "listener", app.session(Listener, "bob")).digest) != []
    assert not await session.forget()


@pytest.mark.parametrize("does", ["wait", "hang"])
async def test_a_session_is_forgotten_while_a_turn_runs_or_waits(app: App, does: str) -> None:
    session = app.session(Listener, "ada")
    async with running_worker(app):
        turn = await session.send(f"{SECRET}; {does}")
        if does == "hang":
            await Listener.running.wait()
        else:

            async def waits() -> bool:
                handle = await app.producer.find(turn.task_id)
                return handle is not None and str(await handle.status()) == "waiting"

            await wait_until(waits, "the turn waits")
        later = await session.send(f"{SECRET}; later")
        assert await session.forget()
        assert await stored(app) == []
        Listener.release.set()
        again = await session.send("a new beginning")
        assert await again.result(30) == "a new beginning"
    assert (again.number, later.number) == (1, 2)
    assert await stored(app, "8151", turn.task_id, later.task_id) == []


async def test_a_worker_deletes_what_a_dead_caller_has_left(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    session = app.session(Listener, "ada")
    await say(app, session, "hello", "fail")
    run, acts = Gateway.run, []

    async def die(self: Gateway, script: Any, keys: Any, args: Any) -> Any:
        acts.append(args)
        if len(acts) == 3:
            raise KeyboardInterrupt
        return await run(self, script, keys, args)

    with monkeypatch.context() as patch:
        patch.setattr(Gateway, "run", die)
        with pytest.raises(KeyboardInterrupt):
            await session.forget()
    assert any(":turn-" in key for key in await stored(app))
    await finish_forgetting(app.producer.gateway, app.producer.namespace)
    assert await stored(app) == []
    assert await redis_command(app, "EXISTS", address_of(app, "listener", session).partition.forgotten) == 0


@pytest.mark.parametrize("ends", ["settled", "cut off", "cancelled"])
async def test_the_task_of_a_forgotten_turn_that_is_stored_late_leaves_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Also if its worker dies as soon as the outcome is stored, or a caller cancels it."""
    session = app.session(Listener, "ada")
    turn = parse_turn_id((await session.send(SECRET)).task_id)
    assert turn is not None
    gateway, command = app.producer.gateway, Gateway.command

    async def slow(self: Gateway, *parts: Any, **options: Any) -> Any:
        reply = await command(self, *parts, **options)
        if parts[0] == "HMGET" and "basis" in parts and "claimed" in parts:  # the sender has read the session
            assert await session.forget()
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(Gateway, "command", slow)
        await enqueue_turn(gateway, address_of(app, "listener", session), turn)
    assert await stored(app) != []
    if ends == "cancelled":
        handle = await app.producer.find(str(turn))
        assert handle is not None
        await handle.cancel()
    else:
        if ends == "cut off":
            monkeypatch.setattr("perdure.queues.sessions.turns.end_turn", cut_off)
        await work_off(app)
    assert await stored(app) == []


async def cut_off(*_: object) -> bool:
    raise RuntimeError("the worker ends here")

"""Keys of Perdure that another program replaced by a value of another type: a worker moves it away and continues."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, State
from perdure.queues.keys import junk_keys, stored_type
from perdure.queues.records import read_tasks
from perdure.queues.sessions.record import SessionAddress

from tests.support.workers import bounded, partition_of, redis_command, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.app("foreign"), pytest.mark.usefixtures("quick_cleaning")]

REPLACE = "redis.call('DEL', KEYS[1]) return redis.call(unpack(ARGV))"
WRITES = {
    "string": ("SET", "{key}", "foreign"),
    "hash": ("HSET", "{key}", "a", "b"),
    "list": ("LPUSH", "{key}", "foreign"),
    "set": ("SADD", "{key}", "foreign"),
    "zset": ("ZADD", "{key}", "1", "foreign"),
    "stream": ("XADD", "{key}", "*", "a", "b"),
}
PARTITION = ["ready", "nudge", "due", "seen", "dead", "timeline", "retentions", "versions", "closed", "mark", "junk"]
LOCKS = ["promote_lock", "clean_lock", "sweep_lock"]


async def replace(app: App, key: str, kind: str) -> None:
    """Replace a key by a value of a type, in one act."""
    command = [word.format(key=key) for word in WRITES[kind]]
    await redis_command(app, "EVAL", REPLACE, 1, key, *command)


async def type_of(app: App, key: str) -> str:
    found: bytes = await redis_command(app, "TYPE", key)
    return found.decode()


@pytest.fixture
async def app(app: App) -> AsyncIterator[App]:
    @app.task
    async def sound(ctx: Context) -> str:
        return "sound"

    @app.task(retry=Retry(max_attempts=2, base=0.05))
    async def fails_once(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise ValueError("once")
        return ctx.attempt

    @app.task
    async def waits(ctx: Context) -> str:
        return "answered" if await ctx.inbox(0.05) else "woken"

    yield app
    namespace = app.producer.namespace
    for pattern in (f"{{{namespace.name}:*}}:junk*", f"{{{namespace.name}}}:junk*"):
        for key in await redis_command(app, "KEYS", pattern):
            await redis_command(app, "DEL", key)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return the warnings of moved keys, whatever another test has configured."""
    source = logging.getLogger("perdure.queues.transport.gateway")
    monkeypatch.setattr(source, "handlers", [caplog.handler])
    monkeypatch.setattr(source, "propagate", False)
    caplog.set_level(logging.WARNING, source.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == source.name]


async def check_works(app: App) -> None:
    """Run a new task, a delayed one, one that is retried, and one that waits."""
    sound, fails_once, waits = (app.tasks[name] for name in ("sound", "fails_once", "waits"))
    calls = sound, sound.options(delay=0.05), fails_once, waits
    handles = [await call.enqueue() for call in calls]  # they wait at the same time
    assert [await bounded(handle.result()) for handle in handles] == ["sound", "sound", 2, "woken"]


def others(key: str) -> list[str]:
    return [kind for kind in WRITES if kind != stored_type(key)]


@pytest.mark.parametrize("name", [*PARTITION, *LOCKS])
async def test_a_key_of_a_partition_of_another_type_is_moved_and_tasks_run(
    app: App, name: str, log: Callable[[], list[str]]
) -> None:
    key = getattr(partition_of(app), name)
    async with running_worker(app):
        await check_works(app)
        for kind in others(key):
            await replace(app, key, kind)
            await check_works(app)

            async def gone(kind: str = kind) -> bool:
                return await type_of(app, key) != kind

            await wait_until(gone, f"the {kind} left {key}")
            if name == "promote_lock":  # a worker that a nudge reached takes the lock over, whatever is there
                continue
            assert await type_of(app, junk_keys(key).value) == kind
            assert 0 < await redis_command(app, "TTL", junk_keys(key).value) <= 30 * 86_400
            (line,) = [line for line in log() if f"key {key} had a value of type {kind}" in line]
            assert str(stored_type(key)) in line
            await check_works(app)


@pytest.mark.parametrize("name", ["ready", "nudge", "due", "timeline", "closed"])
@pytest.mark.parametrize("kind", ["list", "hash", "string"])
async def test_a_key_of_another_type_from_before_the_worker_is_moved(app: App, name: str, kind: str) -> None:
    key = getattr(partition_of(app), name)
    if kind == stored_type(key):
        return
    await replace(app, key, kind)
    async with running_worker(app):
        await check_works(app)
    assert await type_of(app, key) != kind


async def test_a_ready_stream_without_its_group_is_read_again(app: App) -> None:
    ready: Any = partition_of(app).ready
    async with running_worker(app):
        await check_works(app)
        await redis_command(app, "XGROUP", "DESTROY", ready, "workers")
        await check_works(app)
        await redis_command(app, "DEL", ready)
        await check_works(app)


class Gate:
    """Halts a task between two steps."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.opened = anyio.Event()
        self.runs = 0

    async def first(self) -> int:
        self.runs += 1
        return 1

    async def second(self) -> int:
        return 2

    async def handle(self, ctx: Context) -> int:
        found = await ctx.step("first", self.first)
        self.reached.set()
        await self.opened.wait()
        return found + await ctx.step("second", self.second)


@pytest.mark.parametrize("name", ["record", "steps", "log", "inbox", "control"])
@pytest.mark.parametrize("kind", ["string", "list", "zset"])
async def test_a_key_of_a_task_of_another_type_harms_that_task_only(app: App, name: str, kind: str) -> None:
    gate = Gate()
    app.task(name="gated", retry=Retry(max_attempts=3, base=0.05))(gate.handle)
    async with running_worker(app) as worker:
        handle = await app.producer.enqueue("gated", queue="foreign")
        await bounded(gate.reached.wait())
        key = getattr(handle.partition, name)(handle.id)
        await replace(app, key, kind)
        gate.opened.set()
        await check_works(app)

        async def ended() -> bool:
            (row,) = await read_tasks(app.producer.gateway, handle.partition, [handle.id])
            return row is not None and row.state in (State.SUCCEEDED, State.DEAD)

        await wait_until(ended, "the task has ended")
        assert gate.runs == 1
        await check_works(app)
        assert worker.id
    await redis_command(app, "DEL", key)


class Talker(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="say", title="say")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return "said"

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return f"echo: {state.goal}"


@pytest.mark.parametrize("name", ["due", "timeline", "forgotten", "junk", "session", "history"])
async def test_a_key_of_sessions_of_another_type_is_moved_and_turns_run(app: App, name: str) -> None:
    app.agent(Talker)
    session = app.session(Talker, "u1")
    address = SessionAddress.of(app.producer.namespace, "talker", "u1")
    key = getattr(address.partition, name)
    if callable(key):
        key = key(address.digest)
    async with running_worker(app):
        assert await bounded((await session.send("one")).result()) == "echo: one"
        for kind in ("string", "list"):
            await replace(app, key, kind)
            turn = await session.send(f"a message after a {kind}")
            assert await bounded(turn.result()) == f"echo: a message after a {kind}"

            async def gone(kind: str = kind) -> bool:
                return await type_of(app, key) != kind

            await wait_until(gone, f"the {kind} left {key}")
        await check_works(app)
    await session.forget()

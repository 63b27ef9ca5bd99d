"""Values that another program wrote into keys of Perdure: they end no worker, and other tasks run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep
from perdure.queues.keys import SessionPartition

from tests.support.workers import bounded, partition_of, redis_command, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick_cleaning")]

MEMBERS = {
    "not UTF-8": b"\xff",
    "empty": b"",
    "NUL": b"\x00",
    "1 MB": b"a" * 1_000_000,
    "a name of JavaScript": b"__proto__",
    "a path": b"../../x",
    "an id of no task": b"0199aaaa-0000-7000-8000-000000000000",
}
BYTES = [pytest.param(member, id=name) for name, member in MEMBERS.items()]


class Talker(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="say", title="say")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return "said"

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return f"echo: {state.goal}"


@pytest.fixture
def app(app: App) -> App:
    @app.task
    async def sound(ctx: Context) -> str:
        return "sound"

    app.agent(Talker)
    return app


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{level} {message}", level="WARNING")
    yield lines
    logger.remove(sink)


async def check_works(app: App) -> None:
    """Run a new task and a delayed one."""
    sound = app.tasks["sound"]
    assert await bounded((await sound.enqueue()).result()) == "sound"
    assert await bounded((await sound.options(delay=0.05).enqueue()).result()) == "sound"


REPLACE = "redis.call('DEL', KEYS[1]) return redis.call(ARGV[1], KEYS[1], 'x')"
"""Script that replaces a key by one of another type."""


def logs(log: list[str], *texts: str) -> Callable[[], Awaitable[bool]]:
    async def found() -> bool:
        return any(all(text in line for text in texts) for line in log)

    return found


def sessions_of(app: App, index: int = 0) -> SessionPartition:
    return app.producer.namespace.session_partitions[index]


@pytest.mark.parametrize("member", BYTES)
async def test_a_foreign_member_of_the_due_set_is_gone_and_delays_no_task(app: App, member: bytes) -> None:
    due = partition_of(app).due
    await redis_command(app, "ZADD", due, 1, member)
    async with running_worker(app):
        await check_works(app)

        async def gone() -> bool:
            return await redis_command(app, "ZSCORE", due, member) is None

        await wait_until(gone, "the member left the due set")
        await check_works(app)


async def test_more_foreign_members_than_one_promotion_moves_delay_no_task(app: App) -> None:
    flat = [part for number in range(1000) for part in (1, b"\xff%d" % number)]
    await redis_command(app, "ZADD", partition_of(app).due, *flat)
    async with running_worker(app):
        await check_works(app)


@pytest.mark.parametrize("member", BYTES)
async def test_a_foreign_member_of_the_sessions_that_are_due_ends_no_worker(app: App, member: bytes) -> None:
    due = sessions_of(app, 3).due
    await redis_command(app, "ZADD", due, 1, member)
    async with running_worker(app):

        async def gone() -> bool:
            return await redis_command(app, "ZSCORE", due, member) is None

        await wait_until(gone, "the member left the set")
        await check_works(app)
    await redis_command(app, "DEL", due)


@pytest.mark.parametrize("value", [*BYTES, pytest.param(b"inf", id="inf"), pytest.param(b"nan", id="nan")])
@pytest.mark.parametrize("name", ["lease", "result_ttl", "dead_letter_ttl", b"\xff"])
async def test_a_foreign_setting_is_ignored(app: App, log: list[str], name: str | bytes, value: bytes) -> None:
    config = app.producer.namespace.config
    await redis_command(app, "HSET", config, name, value)
    async with running_worker(app):
        await check_works(app)
        assert isinstance(name, bytes) or await logs(log, f"the stored {name} is ignored")()
    await redis_command(app, "DEL", config)


FIELDS = ["agent", "queue", "id", "app", "secrets", "inputs", "m:1", "born", "sent", "claimed"]


@pytest.mark.parametrize("field", FIELDS)
async def test_a_session_with_foreign_fields_ends_no_worker(app: App, field: str) -> None:
    sessions, digest = sessions_of(app), "0000" + "a" * 28
    fields = {"born": "1", "turn": "1", "sent": "1", "ended": "0", "claimed": "1", "agent": "x", "queue": app.name}
    flat = [part for pair in (fields | {field: b"\xff"}).items() for part in pair]
    await redis_command(app, "HSET", sessions.session(digest), *flat)
    await redis_command(app, "ZADD", sessions.due, 1, digest)
    async with running_worker(app):

        async def looked_at() -> bool:
            return (await redis_command(app, "ZSCORE", sessions.due, digest) or b"2") != b"1"

        await wait_until(looked_at, "the session was looked at")
        await check_works(app)
    await redis_command(app, "DEL", sessions.due, sessions.session(digest))


@pytest.mark.parametrize("member", BYTES)
async def test_foreign_consumers_pending_entries_and_timelines_end_no_worker(app: App, member: bytes) -> None:
    place, sessions = partition_of(app), sessions_of(app)
    await redis_command(app, "XGROUP", "CREATE", place.ready, "workers", "0", "MKSTREAM")
    await redis_command(app, "XADD", place.ready, "*", member, member)
    await redis_command(app, "XREADGROUP", "GROUP", "workers", member, "COUNT", 1, "STREAMS", place.ready, ">")
    await redis_command(app, "ZADD", place.timeline, 1, member)
    await redis_command(app, "ZADD", sessions.timeline, 1, member)
    await redis_command(app, "HSET", sessions.forgotten, member, member)
    async with running_worker(app):

        async def cleaned() -> bool:
            known = await redis_command(app, "ZSCORE", sessions.timeline, member)
            return known is None and not await redis_command(app, "HLEN", sessions.forgotten)

        await wait_until(cleaned, "the janitor has come by")
        await check_works(app)
    await redis_command(app, "DEL", sessions.timeline, sessions.forgotten)


@pytest.mark.parametrize("member", BYTES)
async def test_foreign_members_of_registries_end_no_worker_and_stop_no_enqueueing(app: App, member: bytes) -> None:
    names, place = app.producer.namespace, partition_of(app)
    for key in (names.workers, names.supervisors, names.paused, names.catalog, names.sharing(app.name)):
        await redis_command(app, "ZADD", key, 5e12, member)
    await redis_command(app, "ZADD", names.catalog, 5e12, b"a:1")
    await redis_command(app, "HSET", names.catalog_entry("a", "1"), member, member)
    await redis_command(app, "HSET", names.queues, member, member, "another", member, app.name, b"\xff" + member)
    await redis_command(app, "HSET", names.deployment, "format", b"\xff" + member, "id", member)
    await redis_command(app, "XADD", place.dead, "1-1", "id", member)
    async with running_worker(app):
        await check_works(app)
        handle = await app.producer.enqueue("sound", queue=app.name)
        assert await bounded(handle.result()) == "sound"
        assert await app.producer.catalog()

        async def trimmed() -> bool:
            return not await redis_command(app, "XLEN", place.dead)

        await wait_until(trimmed, "the dead letter that has expired is gone")
        await check_works(app)
    for key in (names.supervisors, names.paused, names.catalog, names.sharing(app.name), names.catalog_entry("a", "1")):
        await redis_command(app, "DEL", key)


@pytest.mark.parametrize("shape", ["SADD", "LPUSH", "SET"])
@pytest.mark.parametrize("name", ["catalog", "workers", "supervisors", "paused", "config"])
async def test_a_registry_of_another_type_ends_no_worker(app: App, name: str, shape: str) -> None:
    async with running_worker(app):
        key = getattr(app.producer.namespace, name)
        await redis_command(app, "EVAL", REPLACE, 1, key, shape)
        await check_works(app)
        await redis_command(app, "DEL", key)


@pytest.mark.parametrize("kind", ["timeline", "dead", "closed", "mark", "seen", "versions", "retentions"])
async def test_a_key_of_another_type_ends_no_worker(app: App, kind: str) -> None:
    async with running_worker(app) as worker:
        key = getattr(partition_of(app), kind)
        await redis_command(app, "EVAL", REPLACE, 1, key, "SADD")
        with anyio.move_on_after(0.5):
            await anyio.sleep_forever()
        await redis_command(app, "DEL", key)
        await check_works(app)
        assert worker.id

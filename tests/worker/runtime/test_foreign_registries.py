"""Registries of a namespace into which another program wrote: workers and producers continue, and lists name it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from perdure import App, Context
from perdure.queues import Refused, list_queues, list_supervisors
from perdure.queues.catalog import CatalogTask, read_catalog
from perdure.queues.presence import read_registered

from tests.support.workers import bounded, partition_of, redis_command, running_worker, wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.app("foreign", heartbeat=0.1),
    pytest.mark.usefixtures("quick_cleaning"),
]

REPLACE = "redis.call('DEL', KEYS[1]) return redis.call(ARGV[1], KEYS[1], 'x')"


@pytest.fixture
async def app(app: App) -> AsyncIterator[App]:
    @app.task
    async def sound(ctx: Context) -> str:
        return "sound"

    yield app
    namespace = app.producer.namespace
    for pattern in (f"{{{namespace.name}:*}}:junk*", f"{{{namespace.name}}}:*"):
        for key in await redis_command(app, "KEYS", pattern):
            await redis_command(app, "DEL", key)


async def check_works(app: App, queue: str | None = "foreign") -> None:
    """Run a new task and a delayed one, enqueued by name."""
    for delay in (0, 0.05):
        handle = await app.producer.enqueue("sound", queue=queue, delay=delay)
        assert await bounded(handle.result()) == "sound"


async def find(app: App, name: str) -> list[CatalogTask]:
    return (await read_catalog(app.producer.gateway, app.producer.namespace)).named(name)


def listed(app: App) -> Any:
    async def published() -> bool:
        return bool(await find(app, "sound"))

    return published


async def flood(app: App, key: str, score: float, count: int = 20_000) -> None:
    for start in range(0, count, 5000):
        flat = [part for number in range(start, start + 5000) for part in (score, f"e{number}:0123456789ab")]
        await redis_command(app, "ZADD", key, *flat)


@pytest.mark.parametrize("score", [9e12, "now", "inf"])
async def test_a_flood_of_foreign_members_pushes_no_entry_out_of_the_catalog(app: App, score: float | str) -> None:
    catalog = app.producer.namespace.catalog
    async with running_worker(app):
        await wait_until(listed(app), "the worker has published its tasks")
        await flood(app, catalog, time.time() * 1000 if score == "now" else float(score))
        if score != "now":  # a reader sees at once that these are not of workers
            assert await find(app, "sound")
        await wait_until(listed(app), "the worker lists its tasks again")
        await check_works(app, queue=None)

        async def trimmed() -> bool:
            return bool(await redis_command(app, "ZCARD", catalog) <= 100)

        await wait_until(trimmed, "the members without an entry are gone")
        await check_works(app, queue=None)


@pytest.mark.parametrize("shape", ["SADD", "LPUSH", "SET"])
async def test_a_catalog_of_another_type_is_moved_and_published_again(app: App, shape: str) -> None:
    names = app.producer.namespace
    async with running_worker(app):
        await wait_until(listed(app), "the worker has published its tasks")
        await redis_command(app, "EVAL", REPLACE, 1, names.catalog, shape)
        await wait_until(listed(app), "the worker publishes its tasks again")
        (entry,) = await redis_command(app, "ZRANGE", names.catalog, 0, -1)
        await redis_command(app, "EVAL", REPLACE, 1, names.catalog_entry(*entry.decode().split(":")), "SADD")
        await wait_until(listed(app), "the worker publishes its entry again")
        await check_works(app, queue=None)


ENTRIES = ["", "no JSON", "[]", '{"tasks": 1}', '{"tasks": [1, {"name": 1, "queue": "q"}]}', '{"tasks": {}}']


@pytest.mark.parametrize("data", ENTRIES)
async def test_a_foreign_entry_of_the_catalog_is_named_and_hides_no_other(app: App, data: str) -> None:
    names = app.producer.namespace
    async with running_worker(app):
        await wait_until(listed(app), "the worker has published its tasks")
        await redis_command(app, "SET", names.catalog_entry("evil", "0123456789ab"), data)
        await redis_command(app, "ZADD", names.catalog, time.time() * 1000, "evil:0123456789ab", 1, b"\xff")
        found = await read_catalog(app.producer.gateway, names)
        assert [task.app for task in found.tasks] == ["foreign"]
        assert found.problems.keys() == {"evil:0123456789ab", names.catalog}
        await check_works(app, queue=None)


ROUTES = ["junk", "{}", "0", "-1", "1e9", "1000000000", '{"generations": []}', '{"generations": [[0, 1], [0, 1]]}']


@pytest.mark.parametrize("route", [*ROUTES, b"\xff", "[" * 100_000])
@pytest.mark.parametrize("known", [False, True])
async def test_a_foreign_route_is_replaced_by_the_one_that_workers_know(
    app: App, route: str | bytes, known: bool
) -> None:
    names = app.producer.namespace
    if not known:
        await redis_command(app, "HSET", names.queues, "foreign", route)
    async with running_worker(app):
        await redis_command(app, "HSET", names.queues, "foreign", route, "other", route, b"\xff", "1")
        rows = {row.queue: row.problem for row in await list_queues(app.producer.gateway, names)}
        assert "ignored" in rows["other"]
        assert "names no queue" in rows[r"'\xff'"]
        await check_works(app)

        async def replaced() -> bool:
            return bool(await redis_command(app, "HGET", names.queues, "foreign") == b"1")

        await wait_until(replaced, "the route is that of the workers")
        await check_works(app)


@pytest.mark.parametrize("fields", [("a", "b"), ("route", "x"), ("route", "5", "last", "x"), ("route", b"\xff")])
async def test_a_foreign_mark_closes_no_partition(app: App, fields: tuple[str | bytes, ...]) -> None:
    closed = partition_of(app).closed
    async with running_worker(app):
        await check_works(app)
        await redis_command(app, "HSET", closed, *fields)
        await check_works(app)
        assert await redis_command(app, "EXISTS", closed) == 0


@pytest.mark.parametrize("shape", ["SADD", "LPUSH", "SET"])
@pytest.mark.parametrize(
    "name", ["queues", "deployment", "workers", "supervisors", "config", "paused", "workspaces", "session_lock"]
)
async def test_a_key_of_the_namespace_of_another_type_is_moved(app: App, name: str, shape: str) -> None:
    key = getattr(app.producer.namespace, name)
    if (name, shape) == ("session_lock", "SET"):
        return
    async with running_worker(app) as worker:
        await check_works(app)
        await redis_command(app, "EVAL", REPLACE, 1, key, shape)
        await check_works(app)
        async with App("foreign", settings=app.settings) as another:  # a process that starts now
            await check_works(another)

        async def moved() -> bool:
            kind = (await redis_command(app, "TYPE", key)).decode()
            return bool(kind not in {"SADD": "set", "LPUSH": "list", "SET": "string"}[shape])

        await wait_until(moved, f"{key} has its type again")

        async def registered() -> bool:
            found = await read_registered(app.producer.gateway, app.producer.namespace)
            return worker.id in [info.id for info in found.workers] and not found.problems

        await wait_until(registered, "the worker is listed")
        await check_works(app)


async def test_a_newer_data_format_still_refuses_every_process(app: App) -> None:
    await redis_command(app, "HSET", app.producer.namespace.deployment, "format", "99")
    with pytest.raises(Refused, match="upgrade this process"):
        await app.producer.enqueue("sound", queue="foreign")


async def test_foreign_registrations_are_named_and_hide_no_worker(app: App) -> None:
    names, now = app.producer.namespace, time.time() * 1000
    async with running_worker(app) as worker:
        await redis_command(app, "ZADD", names.workers, now, b"\xff", now, "list", now, "hash")
        await redis_command(app, "LPUSH", names.worker("list"), "x")
        await redis_command(app, "HSET", names.worker("hash"), "a", "b")
        await redis_command(app, "ZADD", names.supervisors, now, "s")
        await redis_command(app, "LPUSH", names.supervisor("s"), "x")
        await redis_command(app, "ZADD", names.paused, now * 2, "p")
        await redis_command(app, "LPUSH", names.pause("p"), "x")
        found = await read_registered(app.producer.gateway, names)
        assert [info.id for info in found.workers] == [worker.id]
        assert found.problems.keys() == {names.workers, "list", "hash"}
        problems: dict[str, str] = {}
        assert await list_supervisors(app.producer.gateway, names, problems) == []
        assert problems.keys() == {"s", "p"}
        await check_works(app)


async def test_a_flood_of_foreign_workers_hides_no_worker_and_takes_no_partition(app: App) -> None:
    names = app.producer.namespace
    async with running_worker(app) as worker:
        await flood(app, names.workers, 9e12)
        await flood(app, names.sharing(app.name), 9e12)
        found = await read_registered(app.producer.gateway, names)
        assert [info.id for info in found.workers] == [worker.id]
        await check_works(app)

        async def trimmed() -> bool:
            return bool(await redis_command(app, "ZCARD", names.workers) == 1)

        await wait_until(trimmed, "the members in the future are gone")

"""Late duplicates of registrations and of changes that operators make: their bytes arrive after a later change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from perdure.queues import (
    Gateway,
    Namespace,
    Producer,
    SupervisorInfo,
    WorkerInfo,
    list_supervisors,
    list_workers,
    set_partitions,
)
from perdure.queues.catalog import AppEntry, CatalogTask, publish_entry
from perdure.queues.partitions.assignment import join_group, leave_group
from perdure.queues.partitions.resharding import retire_generation, sync_route
from perdure.queues.presence import announce, withdraw
from perdure.queues.shared_config import SharedName, load_config, set_config
from perdure.queues.supervisors import (
    count_crash,
    paused_supervisors,
    resume_supervisor,
    supervise,
    withdraw_supervisor,
)
from perdure.queues.transport.scripts import queue_script

from tests.support.lossy_proxy import LossyProxy, deliver_unchanged

WORKER = WorkerInfo("w1", "app", "host", 7, "0.1", ("default",), concurrency=8, in_flight=0, started=0)
SUPERVISOR = SupervisorInfo("s1", "app-host", app="app", host="host", pid=7, processes=2, window=60.0)

Line = tuple[Gateway, LossyProxy]


async def members(gateway: Gateway, namespace: Namespace) -> list[str]:
    """Return the members of the queue but the one that asks."""
    found = await join_group(gateway, namespace, "default", "other", 60.0)
    return sorted(found - {"other"})


async def join(gateway: Gateway, namespace: Namespace) -> None:
    await join_group(gateway, namespace, "default", "w1", 60.0)


async def leave(gateway: Gateway, namespace: Namespace) -> None:
    await leave_group(gateway, namespace, "default", "w1")


async def register(gateway: Gateway, namespace: Namespace) -> None:
    await announce(gateway, namespace, WORKER, 60.0)


async def deregister(gateway: Gateway, namespace: Namespace) -> None:
    await withdraw(gateway, namespace, "w1")


async def workers(gateway: Gateway, namespace: Namespace) -> list[str]:
    return [one.id for one in await list_workers(gateway, namespace)]


async def register_supervisor(gateway: Gateway, namespace: Namespace) -> None:
    await supervise(gateway, namespace, SUPERVISOR, 60.0)


async def deregister_supervisor(gateway: Gateway, namespace: Namespace) -> None:
    await withdraw_supervisor(gateway, namespace, "s1")


async def supervisors(gateway: Gateway, namespace: Namespace) -> list[str]:
    return [one.id for one in await list_supervisors(gateway, namespace)]


Change = Callable[[Gateway, Namespace], Awaitable[None]]
Look = Callable[[Gateway, Namespace], Awaitable[list[str]]]

REGISTRATIONS: dict[str, tuple[Change, Change, Look]] = {
    "register_worker": (register, deregister, workers),
    "join_group": (join, leave, members),
    "register_supervisor": (register_supervisor, deregister_supervisor, supervisors),
}
"""Calls that register a process, deregister it, and list what is registered, by the script that registers."""


@pytest.mark.parametrize("script", REGISTRATIONS)
async def test_a_registration_that_arrives_late_lists_no_process_that_has_left(
    gateway: Gateway, namespace: Namespace, line: Line, script: str
) -> None:
    late, proxy = line
    register, deregister, listed = REGISTRATIONS[script]
    proxy.hold(queue_script(script).sha.encode())
    await register(late, namespace)
    assert len(await listed(gateway, namespace)) == 1
    await deregister(late, namespace)
    assert await listed(gateway, namespace) == []
    await deliver_unchanged(gateway, namespace, proxy)
    assert await listed(gateway, namespace) == []


@pytest.mark.parametrize("script", REGISTRATIONS)
async def test_a_process_that_left_keeps_nothing_that_does_not_expire(
    gateway: Gateway, namespace: Namespace, script: str
) -> None:
    register, deregister, _ = REGISTRATIONS[script]
    await register(gateway, namespace)
    await deregister(gateway, namespace)
    marks = {
        "register_worker": namespace.worker("w1"),
        "join_group": namespace.sharing("default"),
        "register_supervisor": namespace.supervisor("s1"),
    }
    assert 0 < await gateway.command("PTTL", marks[script]) <= 3_600_000


@pytest.fixture
async def paused(gateway: Gateway, namespace: Namespace) -> AsyncIterator[str]:
    """A supervisor that a crash has paused."""
    await count_crash(gateway, namespace, "app-host", "w0", why="SIGKILL", threshold=0, window=60.0)
    yield "app-host"


async def test_a_resumption_that_arrives_late_lifts_no_later_pause(
    gateway: Gateway, namespace: Namespace, line: Line, paused: str
) -> None:
    late, proxy = line
    proxy.hold(queue_script("unpause_supervisor").sha.encode())
    assert await resume_supervisor(late, namespace, paused)
    await deliver_unchanged(gateway, namespace, proxy)
    await count_crash(gateway, namespace, paused, "w1", why="SIGKILL", threshold=0, window=60.0)
    assert await paused_supervisors(gateway, namespace) == [paused]
    await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize("later", [None, "w2"])
async def test_a_crash_that_is_reported_late_does_not_pause_a_resumed_supervisor(
    gateway: Gateway, namespace: Namespace, line: Line, paused: str, later: str | None
) -> None:
    """later: another worker crashes after the resumption."""
    late, proxy = line
    proxy.hold(queue_script("count_crash").sha.encode())
    await count_crash(late, namespace, paused, "w1", why="SIGKILL", threshold=0, window=60.0)
    await deliver_unchanged(gateway, namespace, proxy)
    assert await resume_supervisor(gateway, namespace, paused)
    if later is not None:
        state = await count_crash(gateway, namespace, paused, later, why="SIGKILL", threshold=1, window=60.0)
        assert (state.crashes, state.paused) == (1, False)
    await deliver_unchanged(gateway, namespace, proxy)
    assert await paused_supervisors(gateway, namespace) == []
    assert (await supervise(gateway, namespace, SUPERVISOR, 60.0)).crashes == (0 if later is None else 1)
    await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize(("name", "values"), [("lease", (20, 40)), ("result_ttl", (900, None)), ("lease", (None, 30))])
async def test_a_setting_that_arrives_late_replaces_no_later_one(
    gateway: Gateway, namespace: Namespace, line: Line, name: SharedName, values: tuple[float | None, float | None]
) -> None:
    late, proxy = line
    await set_config(gateway, namespace, name, 60)
    proxy.hold(queue_script("set_config").sha.encode())
    assert await set_config(late, namespace, name, values[0])
    await deliver_unchanged(gateway, namespace, proxy)
    for value in (values[1], 60):
        assert await set_config(gateway, namespace, name, value)
        await deliver_unchanged(gateway, namespace, proxy)
    assert (await load_config(gateway, namespace)).stored == {name: 60}


async def test_a_setting_whose_reply_was_lost_has_changed(gateway: Gateway, namespace: Namespace, line: Line) -> None:
    late, proxy = line
    proxy.lose(queue_script("set_config").sha.encode())
    assert await set_config(late, namespace, "lease", 20)
    assert proxy.lost == 1
    assert not await set_config(late, namespace, "lease", 20)


async def test_a_route_that_arrives_late_replaces_no_later_one(
    gateway: Gateway, namespace: Namespace, line: Line
) -> None:
    late, proxy = line
    await sync_route(gateway, namespace, "default")
    proxy.hold(queue_script("set_route").sha.encode())
    await set_partitions(late, namespace, "default", 4)
    for count in (2, 1, 4, 1):
        await deliver_unchanged(gateway, namespace, proxy)
        await set_partitions(gateway, namespace, "default", count)
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_first_route_that_arrives_late_replaces_none(
    gateway: Gateway, namespace: Namespace, line: Line
) -> None:
    late, proxy = line
    proxy.hold(queue_script("set_route").sha.encode())
    await sync_route(late, namespace, "default")
    await set_partitions(gateway, namespace, "default", 4)
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_partition_that_is_closed_late_changes_nothing(
    gateway: Gateway, namespace: Namespace, line: Line
) -> None:
    """The partitions that came after it stay open."""
    late, proxy = line
    proxy.hold(queue_script("close_partition").sha.encode())
    for count in (1, 3):
        await set_partitions(late, namespace, "default", count)
    await deliver_unchanged(gateway, namespace, proxy)
    for count in (2, 1):
        route = await set_partitions(gateway, namespace, "default", count)
        await deliver_unchanged(gateway, namespace, proxy)
        for index in route.last.indexes:
            assert not await gateway.command("EXISTS", namespace.partition("default", index).closed)


async def test_a_partition_is_not_retired_by_a_late_call_while_it_holds_a_task(
    gateway: Gateway, namespace: Namespace, producer: Producer, line: Line
) -> None:
    late, proxy = line
    await set_partitions(gateway, namespace, "default", 1)
    await producer.enqueue("t", task_id="x", queue="default")
    route = await set_partitions(gateway, namespace, "default", 3)
    proxy.hold(queue_script("retire_partition").sha.encode())
    assert not await retire_generation(late, namespace, "default", route, route.generations[0])
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_partition_is_retired_once(gateway: Gateway, namespace: Namespace, line: Line) -> None:
    late, proxy = line
    await set_partitions(gateway, namespace, "default", 1)
    route = await set_partitions(gateway, namespace, "default", 3)
    proxy.hold(queue_script("retire_partition").sha.encode())
    assert await retire_generation(late, namespace, "default", route, route.generations[0])
    await deliver_unchanged(gateway, namespace, proxy)
    await set_partitions(gateway, namespace, "default", 2)
    await deliver_unchanged(gateway, namespace, proxy)


async def test_an_app_that_is_published_late_is_listed_as_of_its_start(
    gateway: Gateway, namespace: Namespace, line: Line
) -> None:
    """The entry of an app outlives its workers, and a newer version goes before it."""
    late, proxy = line
    older, newer = (AppEntry("app", [CatalogTask("t", "default", description)]) for description in ("old", "new"))
    proxy.hold(namespace.catalog_entry("app", older.version).encode())
    await publish_entry(late, namespace, older, started=1_000)
    await deliver_unchanged(gateway, namespace, proxy)
    await publish_entry(gateway, namespace, newer, started=2_000)
    await deliver_unchanged(gateway, namespace, proxy)
    await publish_entry(gateway, namespace, older, started=3_000)
    await deliver_unchanged(gateway, namespace, proxy)

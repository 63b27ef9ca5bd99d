"""Late duplicates of registrations and of changes that operators make: their bytes arrive after a later change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from perdure.queues import (
    Gateway,
    Namespace,
    SupervisorInfo,
    WorkerInfo,
    list_supervisors,
    list_workers,
    set_partitions,
)
from perdure.queues.catalog import AppEntry, CatalogTask, publish_entry
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.partitions.assignment import join_group, leave_group
from perdure.queues.partitions.resharding import retire_generation, sync_route
from perdure.queues.pauses import PauseRule, PauseStore
from perdure.queues.presence import DrainAnswer, announce, drain_worker, withdraw
from perdure.queues.schedules.call import ScheduledCall
from perdure.queues.schedules.definition import Every, Rules
from perdure.queues.schedules.firing import ScheduleFirer
from perdure.queues.schedules.store import ScheduleDefinition, ScheduleStore
from perdure.queues.shared_config import SharedName, load_config, set_config
from perdure.queues.supervisors import (
    count_crash,
    paused_supervisors,
    resume_supervisor,
    supervise,
    withdraw_supervisor,
)

from tests.conformance.late import Moments, Scene, Table

REGISTRATIONS = Table()

WORKER = WorkerInfo("w1", "app", "host", 7, "0.1", ("default",), concurrency=8, in_flight=0, started=0)
SUPERVISOR = SupervisorInfo("s1", "app-host", app="app", host="host", pid=7, processes=2, window=60.0)


async def members(gateway: Gateway, namespace: Namespace) -> list[str]:
    """Return the members of the queue but the one that asks."""
    found = await join_group(gateway, namespace, "default", "other", 60.0)
    return sorted(found - {"other"})


async def workers(gateway: Gateway, namespace: Namespace) -> list[str]:
    return [worker.id for worker in await list_workers(gateway, namespace)]


async def supervisors(gateway: Gateway, namespace: Namespace) -> list[str]:
    return [supervisor.id for supervisor in await list_supervisors(gateway, namespace)]


Call = Callable[[Gateway, Namespace], Awaitable[object]]
Look = Callable[[Gateway, Namespace], Awaitable[list[str]]]

REGISTERING: dict[str, tuple[Call, Call, Look, Callable[[Namespace], str]]] = {
    "register_worker": (
        lambda gateway, namespace: announce(gateway, namespace, WORKER, 60.0),
        lambda gateway, namespace: withdraw(gateway, namespace, "w1"),
        workers,
        lambda namespace: namespace.worker("w1"),
    ),
    "join_group": (
        lambda gateway, namespace: join_group(gateway, namespace, "default", "w1", 60.0),
        lambda gateway, namespace: leave_group(gateway, namespace, "default", "w1"),
        members,
        lambda namespace: namespace.sharing("default"),
    ),
    "register_supervisor": (
        lambda gateway, namespace: supervise(gateway, namespace, SUPERVISOR, 60.0),
        lambda gateway, namespace: withdraw_supervisor(gateway, namespace, "s1"),
        supervisors,
        lambda namespace: namespace.supervisor("s1"),
    ),
}
"""By script: calls that register a process, deregister it, list what is registered; and the key that remembers it."""


@REGISTRATIONS.each(*REGISTERING)
async def registration(scene: Scene, variant: str) -> Moments:
    """No process is listed that has left."""
    register, deregister, listed, _ = REGISTERING[variant]
    scene.hold(variant)
    await register(scene.late, scene.namespace)
    assert len(await listed(scene.gateway, scene.namespace)) == 1
    await deregister(scene.late, scene.namespace)
    assert await listed(scene.gateway, scene.namespace) == []
    yield
    assert await listed(scene.gateway, scene.namespace) == []


@REGISTRATIONS.each("left", "left and expired")
async def drain(scene: Scene, variant: str) -> Moments:
    """No hash of a worker that has left is created again."""
    key = scene.namespace.worker("w1")
    await announce(scene.gateway, scene.namespace, WORKER, 60.0)
    scene.hold("drain_worker")
    assert await drain_worker(scene.late, scene.namespace, "w1") is DrainAnswer.ASKED
    yield
    await withdraw(scene.gateway, scene.namespace, "w1")
    if variant == "left and expired":
        await scene.gateway.command("DEL", key)
    before = await scene.gateway.command("HGETALL", key)
    yield
    assert await scene.gateway.command("HGETALL", key) == before
    assert await workers(scene.gateway, scene.namespace) == []


async def crash(gateway: Gateway, namespace: Namespace, worker: str, threshold: int = 0) -> tuple[int, bool]:
    """Count a crash; return how many the supervisor counts, and whether it is paused."""
    state = await count_crash(gateway, namespace, "app-host", worker, why="SIGKILL", threshold=threshold, window=60.0)
    return state.crashes, state.paused


@REGISTRATIONS.case
async def resumption(scene: Scene) -> Moments:
    """A later pause is not lifted."""
    await crash(scene.gateway, scene.namespace, "w0")
    scene.hold("unpause_supervisor")
    assert await resume_supervisor(scene.late, scene.namespace, "app-host")
    yield
    await crash(scene.gateway, scene.namespace, "w1")
    assert await paused_supervisors(scene.gateway, scene.namespace) == ["app-host"]
    yield


@REGISTRATIONS.each("resumed", "resumed, another crash")
async def report_of_a_crash(scene: Scene, variant: str) -> Moments:
    """The supervisor that was resumed is not paused."""
    await crash(scene.gateway, scene.namespace, "w0")
    scene.hold("count_crash")
    await crash(scene.late, scene.namespace, "w1")
    yield
    assert await resume_supervisor(scene.gateway, scene.namespace, "app-host")
    crashes = 0
    if variant == "resumed, another crash":
        assert await crash(scene.gateway, scene.namespace, "w2", threshold=1) == (1, False)
        crashes = 1
    yield
    assert await paused_supervisors(scene.gateway, scene.namespace) == []
    assert (await supervise(scene.gateway, scene.namespace, SUPERVISOR, 60.0)).crashes == crashes
    yield


SETTINGS: dict[str, tuple[SharedName, float | None, float | None]] = {
    "replaced": ("lease", 20, 40),
    "replaced and removed": ("result_ttl", 900, None),
    "removed and replaced": ("lease", None, 30),
}


@REGISTRATIONS.each(*SETTINGS)
async def setting(scene: Scene, variant: str) -> Moments:
    name, *values = SETTINGS[variant]
    await set_config(scene.gateway, scene.namespace, name, 60)
    scene.hold("set_config")
    assert await set_config(scene.late, scene.namespace, name, values[0])
    yield
    for value in (values[1], 60):
        assert await set_config(scene.gateway, scene.namespace, name, value)
        yield
    assert (await load_config(scene.gateway, scene.namespace)).stored == {name: 60}


@REGISTRATIONS.case
async def route(scene: Scene) -> Moments:
    await sync_route(scene.gateway, scene.namespace, "default")
    scene.hold("set_route")
    await set_partitions(scene.late, scene.namespace, "default", 4)
    for count in (2, 1, 4, 1):
        yield
        await set_partitions(scene.gateway, scene.namespace, "default", count)
    yield


@REGISTRATIONS.case
async def first_route(scene: Scene) -> Moments:
    scene.hold("set_route")
    await sync_route(scene.late, scene.namespace, "default")
    await set_partitions(scene.gateway, scene.namespace, "default", 4)
    yield


@REGISTRATIONS.case
async def closing_of_a_partition(scene: Scene) -> Moments:
    """The partitions that came after it stay open."""
    scene.hold("close_partition")
    for count in (1, 3):
        await set_partitions(scene.late, scene.namespace, "default", count)
    yield
    for count in (2, 1):
        changed = await set_partitions(scene.gateway, scene.namespace, "default", count)
        yield
        for index in changed.last.indexes:
            assert not await scene.gateway.command("EXISTS", scene.namespace.partition("default", index).closed)


@REGISTRATIONS.each("with a task", "empty")
async def retirement_of_a_partition(scene: Scene, variant: str) -> Moments:
    """One that has a task is not retired, and the others are retired once."""
    await set_partitions(scene.gateway, scene.namespace, "default", 1)
    if variant == "with a task":
        await scene.enqueue()
    changed = await set_partitions(scene.gateway, scene.namespace, "default", 3)
    scene.hold("retire_partition")
    retired = await retire_generation(scene.late, scene.namespace, "default", changed, changed.generations[0])
    assert bool(retired) == (variant == "empty")
    yield
    if variant == "empty":
        await set_partitions(scene.gateway, scene.namespace, "default", 2)
        yield


@REGISTRATIONS.case
async def entry_of_an_app(scene: Scene) -> Moments:
    """The entry of an app outlives its workers, and a newer version goes before it."""
    older, newer = (AppEntry("app", [CatalogTask("t", "default", description)]) for description in ("old", "new"))
    scene.proxy.hold(scene.namespace.catalog_entry("app", older.version).encode())
    await publish_entry(scene.late, scene.namespace, older, started=1_000)
    yield
    await publish_entry(scene.gateway, scene.namespace, newer, started=2_000)
    yield
    await publish_entry(scene.gateway, scene.namespace, older, started=3_000)
    yield


HOURLY = ScheduleDefinition(
    "hourly", Every(3600), Rules(), ScheduledCall.of(EnvelopeTemplate("t").message(b"{}"), "t", "default")
)


@REGISTRATIONS.each("added", "paused", "removed")
async def change_of_a_schedule(scene: Scene, variant: str) -> Moments:
    """Another operator has changed the schedule since, or removed it."""
    mine, theirs = (ScheduleStore(through, scene.namespace) for through in (scene.late, scene.gateway))
    if variant != "added":
        await theirs.add(HOURLY)
    scene.hold("write_compared")
    await {"added": lambda: mine.add(HOURLY), "paused": lambda: mine.pause("hourly")}.get(
        variant, lambda: mine.remove("hourly")
    )()
    yield
    if variant == "removed":
        await theirs.add(HOURLY)
    else:
        await theirs.edit("hourly", when=Every(60))
    yield
    await theirs.remove("hourly")
    yield


@REGISTRATIONS.each("fire_schedule", "write_compared")
async def firing(scene: Scene, variant: str) -> Moments:
    """Another worker has fired the same time since, and the record of its task has expired."""
    store = ScheduleStore(scene.gateway, scene.namespace)
    await store.add(HOURLY)
    read = await store.read("hourly")
    assert await store.write(read, {"last": read.now - 3_600_000}, look=0)
    scene.hold(variant)
    [fired] = (await ScheduleFirer(scene.late, scene.namespace, retention=60.0).fire_due()).fired
    yield
    await scene.gateway.command("DEL", scene.partition.record(fired.run.task_id), scene.partition.due)
    yield
    await store.remove("hourly")
    yield


@REGISTRATIONS.each("paused", "resumed")
async def change_of_the_pauses(scene: Scene, variant: str) -> Moments:
    """Another operator has ended the pause since, or paused again."""
    mine, theirs = (PauseStore(through, scene.namespace) for through in (scene.late, scene.gateway))
    rule = PauseRule("default", by="ann")
    if variant == "resumed":
        await theirs.add(rule)
    scene.hold("write_compared")
    await (mine.add(rule) if variant == "paused" else mine.remove(rule))
    yield
    await (theirs.remove(rule) if variant == "paused" else theirs.add(rule))
    yield
    await theirs.add(PauseRule("other"))
    yield
    await scene.gateway.command("DEL", scene.namespace.pauses)

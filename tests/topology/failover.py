"""Servers that are lost or moved under load: three scenes, and the figures of each.

`make failover` plays them at length and prints the figures. The short versions are in test_failover.py and
test_failover_sentinels.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.to_thread import run_sync
from perdure import Producer, Settings
from perdure.queues import Namespace, Partition
from perdure.queues.transport.replication import Replication

from tests.support.load import Fault, Figures, Journal, Load, redirections
from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.servers import BUNDLED, SYSTEM, find_program
from tests.support.servers.clusters import Cluster, private_cluster, slot_of
from tests.support.servers.nodes import Node
from tests.support.servers.sentinels import private_sentinels

CARRIER = PROGRAMS / "carrier.py"
NAMESPACE = Namespace("load")
LEASE = 8.0
"""Seconds: longer than a failover of these servers and one heartbeat."""
WORKERS = 3
CAREFUL = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
"""A primary without contact to a replica for a second refuses writes, since it may have been replaced."""
AT_LENGTH = 5
"""Rounds of each scenario outside of the tests."""


def queues_on_every_node(cluster: Cluster, each: int = 2) -> list[str]:
    """Return names of queues, this many for each primary."""
    found: dict[int, list[str]] = {node.port: [] for node in cluster.serving()}
    number = 0
    while any(len(names) < each for names in found.values()):
        name = f"q{number}"
        names = found[cluster.owner(slot_of(NAMESPACE.partition(name).ready)).port]
        if len(names) < each:
            names.append(name)
        number += 1
    return [name for names in zip(*found.values(), strict=True) for name in names]


@asynccontextmanager
async def under_load(
    url: str, queues: Sequence[str], folder: Path, *, replicas: int = 1, steps: str = "sync"
) -> AsyncIterator[tuple[Load, WorkerProcesses]]:
    """Workers and producers at work while the block runs; afterwards the producers have stopped.

    replicas: how many must have what is enqueued, and steps where they are `replicated`.
    """
    settings = Settings(redis_url=url, namespace=NAMESPACE.name, lease=LEASE)
    environment = {"QUEUES": ",".join(queues), "DURABILITY": steps, "PERDURE_REPLICAS": str(replicas)}
    with worker_processes(settings, folder, CARRIER, environment) as workers:
        for _ in range(WORKERS):
            workers.start(concurrency=8)
        for replica in workers.processes:
            await replica.ready()
        replication = Replication(replicas, 0.5)
        async with Producer(url, namespace=NAMESPACE.name, replication=replication) as producer:
            load = Load(producer, queues, Journal(workers.journal))
            running = asyncio.create_task(load.run())
            try:
                yield load, workers
            finally:
                load.stop()
                await asyncio.gather(running, return_exceptions=True)


async def ended_well(workers: WorkerProcesses) -> bool:
    """Whether every worker still runs, and ends at SIGTERM."""
    for replica in workers.processes:
        if replica.process.poll() is not None:
            return False
        replica.stop()
    return [await replica.ended() for replica in workers.processes] == [0] * len(workers.processes)


def check_figures(figures: Figures) -> None:
    """Fail if a task or the answer of a waiter is lost, or if the load was too small to prove it."""
    sys.stdout.write("".join(f"{name}: {value}\n" for name, value in figures.rows()))  # shown if the test fails
    assert figures.lost == 0
    assert figures.steps_run_again == 0
    assert figures.acknowledged >= 200
    assert figures.waiters == figures.waited


async def acknowledged(load: Load, more: int) -> None:
    """Wait until this many more tasks are acknowledged."""
    wanted = len(load.acknowledged) + more
    with anyio.fail_after(60):
        while len(load.acknowledged) < wanted:  # noqa: ASYNC110 - a set has no event
            await anyio.sleep(0.02)


async def resharding(program: Path, folder: Path, rounds: int) -> Figures:
    """Migrate slots between the primaries, key by key, while their queues are used."""
    with private_cluster(program) as cluster:
        queues = queues_on_every_node(cluster)

        async with under_load(cluster.url(), queues, folder) as (load, workers):
            await acknowledged(load, 50)
            for _ in range(rounds):
                for queue in queues:
                    await _move(cluster, slot_of(NAMESPACE.partition(queue).ready))
            await acknowledged(load, 50)
            load.stop()
            figures = await load.figures(redirections(cluster.nodes))
            assert await ended_well(workers)
            return figures


async def _move(cluster: Cluster, slot: int) -> None:
    """Migrate a slot to the next primary, slowly enough that it is used meanwhile."""
    serving = cluster.serving()
    source = cluster.owner(slot)
    move = cluster.migrate(slot, serving[(serving.index(source) + 1) % len(serving)])
    await run_sync(move.begin)
    for _ in range(10):
        await run_sync(move.keys, 5)
        await anyio.sleep(0.01)
    await run_sync(move.keys)
    await run_sync(move.finish)
    await anyio.sleep(0.1)


async def _begin_long(load: Load, rounds: int) -> None:
    """Start runs that are longer than the next fault, so that their leases must be renewed after it."""
    if rounds >= AT_LENGTH:
        await load.begin_long(LEASE * 1.5)


async def primary_killed(program: Path, folder: Path, rounds: int, *, full_coverage: bool = True) -> Figures:
    """Kill one primary of the cluster after another; a replica takes over, and the killed server returns as a replica.

    full_coverage: whether the other nodes refuse commands until a replica takes over, which is the default of Redis.
    """
    with private_cluster(
        program, options=("--cluster-require-full-coverage", "yes" if full_coverage else "no")
    ) as cluster:
        queues = queues_on_every_node(cluster)

        def primary(partition: Partition) -> Node:
            return cluster.owner(slot_of(partition.ready))

        async with under_load(cluster.url(), queues, folder, steps="replicated") as (load, workers):
            for number in range(rounds):
                await _begin_long(load, rounds)
                await acknowledged(load, 200)
                slot = slot_of(NAMESPACE.partition(queues[number % len(queues)]).ready)
                owner = cluster.owner(slot)
                hit = {queue for queue in queues if primary(NAMESPACE.partition(queue)) is owner}
                started = time.monotonic()
                victim = await run_sync(cluster.kill_primary, slot)
                await run_sync(cluster.failed_over, slot, victim)
                load.faults.append(Fault(started, time.monotonic(), frozenset(hit)))
                await acknowledged(load, 200)
                await run_sync(cluster.restart, victim)
            await acknowledged(load, 100)
            load.stop()
            figures = await load.figures(redirections(cluster.nodes))
            assert await ended_well(workers)
            return figures


async def sentinel_primary_killed(program: Path, folder: Path, rounds: int) -> Figures:
    """Kill the primary; the sentinels promote a replica, which is killed next when the first server has returned."""
    with private_sentinels(program, options=CAREFUL) as sentinels:
        replicas = sentinels.replicas
        async with under_load(sentinels.url(), ["q0", "q1"], folder, replicas=replicas, steps="replicated") as (
            load,
            workers,
        ):
            for _ in range(rounds):
                await _begin_long(load, rounds)
                await acknowledged(load, 200)
                victim = await run_sync(sentinels.kill_primary)
                await run_sync(sentinels.failed_over, victim)
                await run_sync(sentinels.restart, victim)
            await acknowledged(load, 200)
            load.stop()
            figures = await load.figures()
            assert await ended_well(workers)
            return figures


async def sentinel_primary_replaced(
    program: Path, folder: Path, rounds: int, *, options: Sequence[str] = CAREFUL
) -> Figures:
    """Promote a replica while the primary is alive and accepts writes until it is demoted."""
    with private_sentinels(program, options=options) as sentinels:
        replicas = sentinels.replicas
        async with under_load(sentinels.url(), ["q0", "q1"], folder, replicas=replicas, steps="replicated") as (
            load,
            workers,
        ):
            for _ in range(rounds):
                await _begin_long(load, rounds)
                await acknowledged(load, 200)
                former = await run_sync(sentinels.replace_primary)
                await run_sync(sentinels.failed_over, former)
                await run_sync(sentinels.demoted, former)
            await acknowledged(load, 200)
            load.stop()
            figures = await load.figures()
            assert await ended_well(workers)
            return figures


async def sentinel_primary_replaced_carelessly(program: Path, folder: Path, rounds: int) -> Figures:
    """Promote a replica of a primary without `min-replicas-to-write`."""
    return await sentinel_primary_replaced(program, folder, rounds, options=())


async def primary_killed_others_serve(program: Path, folder: Path, rounds: int) -> Figures:
    """Kill primaries of a cluster with `cluster-require-full-coverage no`."""
    return await primary_killed(program, folder, rounds, full_coverage=False)


SCENES: dict[str, Callable[[Path, Path, int], Awaitable[Figures]]] = {
    "cluster, slots moved": resharding,
    "cluster, primaries killed": primary_killed,
    "cluster, primaries killed, full coverage not required": primary_killed_others_serve,
    "sentinels, primaries killed": sentinel_primary_killed,
    "sentinels, primaries replaced": sentinel_primary_replaced,
    "the same without min-replicas-to-write": sentinel_primary_replaced_carelessly,
}


async def main() -> int:
    """Run every scenario on the system's server, else the bundled one; return the number of lost acknowledged tasks."""
    program = find_program(os.environ.get("PERDURE_TEST_SERVER", SYSTEM)) or find_program(BUNDLED)
    assert program is not None, "no redis-server here"
    columns: dict[str, dict[str, str]] = {}
    lost = 0
    for name, scene in SCENES.items():
        with tempfile.TemporaryDirectory(prefix="perdure-failover-") as folder:
            figures = await scene(program, Path(folder), AT_LENGTH)
        columns[name] = dict(figures.rows())
        lost += figures.lost
    sys.stdout.write(table(columns))
    return lost


def table(columns: dict[str, dict[str, str]]) -> str:
    """Return a Markdown table with a column per scenario and a row per figure."""
    names = list(dict.fromkeys(row for column in columns.values() for row in column))
    rows = [["", *columns], ["---", *("---:" for _ in columns)]]
    rows += [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(1 if anyio.run(main) else 0)

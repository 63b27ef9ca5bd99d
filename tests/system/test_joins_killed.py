"""kill -9 of the workers of 300 children: each ends in the join of its parent once, and none is enqueued twice."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import Producer, Settings
from perdure.queues.delivery.settlement import Counters, park
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.joins import (
    ChildEnd,
    JoinPlace,
    OnFailure,
    PlannedChild,
    add_children,
    close_join,
    ended_children,
    life_of,
    read_join,
    read_outcomes,
)

from tests.support.consumers import read_one, worker
from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import BOUND, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

CHILDREN, KILLS = 300, 12


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    """Workers with a lease of one second."""
    with worker_processes(settings, tmp_path, PROGRAMS / "family.py") as workers:
        yield workers


async def spawn(producer: Producer) -> JoinPlace:
    """Play the part of a parent: spawn children in a window, and park until they have ended."""
    gateway, partition = producer.gateway, producer.namespace.partition("family")
    await producer.enqueue("parent", {}, task_id="p", queue="family")
    delivery = await read_one(await worker(gateway, partition))
    place, template = JoinPlace(partition, "p", "g"), EnvelopeTemplate("child", app="family")
    children = [
        PlannedChild("small", template.message(b'{"n":%d}' % number, task_id=f"c{number}"))
        for number in range(CHILDREN)
    ]
    how: dict[str, Any] = {"on_failure": OnFailure.KEEP, "limit": 20, "life": life_of(0, 0)}
    await add_children(gateway, delivery, place, children, **how)
    await park(gateway, delivery, "p", Counters(), delay=3600, waits="children", conditions=[("join", "g")])
    return place


async def test_no_child_is_lost_or_doubled(workers: WorkerProcesses, producer: Producer) -> None:
    seed = time.time_ns()
    chance = random.Random(seed)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
    gateway, names = producer.gateway, [f"c{number}" for number in range(CHILDREN)]
    place = await spawn(producer)
    alive = {process.pid: process for process in [workers.start(concurrency=6) for _ in range(2)]}
    for _ in range(KILLS):
        before = len(workers.lines("begin"))
        if before >= CHILDREN - 20:
            break
        await workers.line("begin", number=before + 1)
        await anyio.sleep(chance.uniform(0.0, 0.08))  # the random moment itself
        alive.pop(chance.choice(sorted(alive))).kill()
        replacement = workers.start(concurrency=6)
        alive[replacement.pid] = replacement
    parent = await producer.find("p")
    assert parent is not None
    with anyio.fail_after(BOUND):
        assert await bounded(parent.result())
    state = await read_join(gateway, place)
    assert state is not None
    assert (state.total, state.ended, state.open, state.todo) == (CHILDREN, CHILDREN, 0, 0), f"seed {seed}"
    assert sorted(await ended_children(gateway, place, 0, 2 * CHILDREN)) == sorted(names)
    found = [outcome async for outcome in read_outcomes(gateway, place, names)]
    dead = [number for number in range(CHILDREN) if number % 50 == 49]
    assert [outcome.state for outcome in found] == [
        ChildEnd.DEAD if number in dead else ChildEnd.SUCCEEDED for number in range(CHILDREN)
    ]
    assert all(
        outcome.result == b"%d" % (number * number) for number, outcome in enumerate(found) if number not in dead
    )
    small = producer.namespace.partition("small")
    assert {line.key for line in workers.lines("begin")} == set(names)
    assert await gateway.command("ZCARD", small.timeline) == CHILDREN, "one task for each child"
    with anyio.fail_after(BOUND):
        while await gateway.command("EXISTS", small.outbox):  # noqa: ASYNC110 - nothing announces it
            await anyio.sleep(0.05)
    await close_join(gateway, place, retention=60)

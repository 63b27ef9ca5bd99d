"""SIGTERM: a worker releases its tasks, and another process resumes them at once, before any lease expires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure import Producer, Settings, State
from perdure.queues import list_workers
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import pairs

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, push_token, recorded, worker_processes
from tests.support.workers import BOUND, bounded, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

LEASE = 60.0
AT_ONCE = LEASE / 6
"""Seconds. The next sweep of an idle worker is 22 s away or more, and the lease is 60 s."""


@pytest.fixture
def workers(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcesses]:
    monkeypatch.setenv("RARE_SWEEPS", "1")
    with worker_processes(settings.model_copy(update={"lease": LEASE, "grace": BOUND}), tmp_path) as workers:
        yield workers


async def idle(producer: Producer) -> None:
    """Wait until a worker waits in its read."""

    async def blocked() -> bool:
        clients: bytes = await producer.gateway.command("CLIENT", "LIST")
        return any(b" flags=b" in line and b" cmd=xreadgroup " in line for line in clients.splitlines())

    await wait_until(blocked, "a worker waits in its read")


async def names(producer: Producer) -> set[str]:
    found = await producer.gateway.command("XINFO", "CONSUMERS", producer.namespace.partition("replica").ready, GROUP)
    return {pairs(one)[b"name"].decode() for one in found}


async def test_the_step_ends_and_another_worker_takes_the_rest_at_once(
    workers: WorkerProcesses, producer: Producer
) -> None:
    first = await workers.start(concurrency=1).ready()
    handle = await producer.enqueue("gate", {"name": "g"}, queue="replica")
    await workers.line("saved", f"{handle.id}:second", pid=first.pid)
    second = await workers.start().ready()
    await idle(producer)
    first.stop()
    await workers.line("stopping", pid=first.pid)
    await push_token(producer, "g", "opened")
    async with asyncio.timeout(AT_ONCE):
        found = await handle.result()
    assert found == {
        "steps": ["first", "opened after nothing", "third"],
        "pid": second.pid,
        "attempt": 1,
        "crashes": 0,
    }
    assert await first.ended() == 0
    assert [line.pid for line in workers.lines("begin", f"{handle.id}:second")] == [first.pid]
    assert [line.pid for line in workers.lines("end", f"{handle.id}:second")] == [first.pid]
    assert [line.pid for line in workers.lines("begin", f"{handle.id}:third")] == [second.pid]
    assert first.worker_id not in await names(producer)
    assert [worker.id for worker in await list_workers(producer.gateway, producer.namespace)] == [second.worker_id]


@pytest.mark.parametrize(("grace", "signals"), [(0.2, 1), (3600.0, 2)], ids=["the grace has passed", "a second signal"])
async def test_a_step_that_does_not_end_is_cancelled_and_runs_elsewhere_at_once(
    workers: WorkerProcesses, producer: Producer, grace: float, signals: int
) -> None:
    first = await workers.start(concurrency=1, grace=grace).ready()
    handle = await producer.enqueue("gate", {"name": "g"}, queue="replica")
    key = f"{handle.id}:second"
    await workers.line("saved", key, pid=first.pid)
    second = await workers.start().ready()
    await idle(producer)
    for number in range(1, signals + 1):
        first.stop()
        await workers.line("stopping", pid=first.pid, number=number)
    began = time.monotonic()
    await workers.line("saved", key, pid=second.pid)
    assert time.monotonic() - began < AT_ONCE
    assert await first.ended() == 0
    await push_token(producer, "g", "opened")
    async with asyncio.timeout(AT_ONCE):
        found = await handle.result()
    assert found == {
        "steps": ["first", "opened after progress", "third"],
        "pid": second.pid,
        "attempt": 1,
        "crashes": 0,
    }
    assert [line.pid for line in workers.lines("left", handle.id)] == [first.pid]
    assert [line.pid for line in workers.lines("end", key)] == [second.pid]
    assert await recorded(producer, handle) == {"first", "second", "third"}
    assert first.worker_id not in await names(producer)


async def test_a_rolling_deploy_loses_nothing_and_costs_nothing(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    """Four of six workers are stopped, one after another, each while it runs tasks, none of which ends before."""
    tasks, steps, gate = 12, 10, tmp_path / "gate"
    alive = {process.pid: process for process in [workers.start(concurrency=6) for _ in range(6)]}
    for process in alive.values():
        await process.ready()
    handles = [
        await producer.enqueue(
            "pipeline", {"value": number, "steps": steps, "pause": 0.05, "gate": str(gate)}, queue="replica"
        )
        for number in range(tasks)
    ]
    await workers.line("begin", number=tasks)
    stopped: list[int] = []
    async with asyncio.timeout(BOUND):
        for _ in range(4):
            busy = next(line.pid for line in reversed(workers.lines("begin")) if line.pid in alive)
            alive[busy].stop()
            assert await alive.pop(busy).ended() == 0
            stopped.append(busy)
        gate.touch()
        results = [await handle.result() for handle in handles]
    assert results == [chain(number, steps) for number in range(tasks)]
    left = set()
    for handle in handles:
        record = await handle.record()
        assert (record.attempts, record.crashes) == (1, 0)
        began = [line for line in workers.lines("begin") if line.key.startswith(handle.id)]
        steps_done = await recorded(producer, handle)
        assert (
            len(began) == len({line.key for line in began}) == len(steps_done)
        )  # none was cut off, and none ran twice
        assert began[-1].pid in alive
        left |= {line.pid for line in began} - alive.keys()
    assert left == set(stopped)


def chain(value: int, steps: int) -> int:
    for _ in range(steps):
        value = value * 3 + 1
    return value


# a deploy of changed code


async def test_a_task_that_newer_code_began_waits_for_it_and_one_of_older_code_keeps_its_way(
    settings: Settings, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        with worker_processes(settings, tmp_path, PROGRAMS / "versioned.py") as workers:

            async def start(version: int) -> int:
                workers.environment["CODE_VERSION"] = str(version)
                return (await workers.start(grace=0.1).ready()).pid

            async def waits() -> bool:
                return (await newer.record()).waits == "version 2 of report"

            await start(2)
            newer = await producer.enqueue("report", {"gate": str(gate)}, task_id="newer", queue="versioned")
            await workers.line("waits", "newer")
            workers.processes[0].kill()

            old = await start(1)
            older = await producer.enqueue("report", {"gate": str(gate)}, task_id="older", queue="versioned")
            await workers.line("waits", "older")
            await wait_until(waits, "the old worker has parked the task of the newer code")
            assert await newer.status() is State.WAITING
            workers.processes[1].stop()
            assert await workers.processes[1].ended() == 0

            await start(2)
            gate.touch()
            assert await bounded(newer.result()) == [2, 2]
            assert await bounded(older.result()) == [1, 2]
            assert sorted(line.key for line in workers.lines("read")) == ["newer", "older"], "no step has run twice"
            assert [line.key for line in workers.lines("check")] == ["newer"]
            assert workers.lines(pid=old, key="newer") == []
            assert len(workers.lines("run 2", "newer")) == len(workers.lines("run 1", "older")) == 2

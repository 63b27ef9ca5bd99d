"""Stops and clean-up tasks of real worker processes: SIGTERM, kill -9 and a cancel without workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from perdure import Producer, Settings, State, TaskHandle

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def processes(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    changed = settings.model_copy(update={"lease": 1.0, "grace": 0.1})
    with worker_processes(changed, tmp_path, PROGRAMS / "cleaning.py") as processes:
        yield processes


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


async def enqueue(producer: Producer, *, asks: bool) -> TaskHandle[Any]:
    return await producer.enqueue("stay", {"asks": asks}, queue="cleaning")


async def waits(handle: TaskHandle[Any]) -> None:
    async def waiting() -> bool:
        return await handle.status() is State.WAITING

    await wait_until(waiting, "the task waits")


async def test_sigterm_cancels_a_handler_and_ends_no_task(producer: Producer, processes: WorkerProcesses) -> None:
    process = await processes.start().ready()
    handle = await enqueue(producer, asks=False)
    await processes.line("sleeps", handle.id)
    process.stop()
    await processes.line("CancelledError shutdown False", handle.id)
    assert await process.ended() == 0
    assert await handle.status() is State.QUEUED
    await processes.start().ready()
    await processes.line("sleeps", handle.id, number=2)
    await handle.cancel()
    await processes.line("CancelledError cancel True", handle.id)
    await processes.line("give back", handle.id)
    assert len(processes.lines("cancelled with 1 steps", handle.id)) == 1
    assert len(processes.lines("book", handle.id)) == 1


async def test_a_killed_worker_leaves_the_clean_up_to_the_next_one(
    producer: Producer, processes: WorkerProcesses
) -> None:
    """The task is cancelled while its worker is dead: it still counts as running, and ends with its lease."""
    process = await processes.start().ready()
    handle = await enqueue(producer, asks=False)
    await processes.line("sleeps", handle.id)
    process.kill()
    assert await handle.cancel() is State.RUNNING
    await processes.start().ready()
    await processes.line("give back", handle.id)
    assert len(processes.lines("cancelled with 1 steps", handle.id)) == 1
    assert len(processes.lines("sleeps", handle.id)) == 1


async def test_a_waiting_task_is_cancelled_without_workers(producer: Producer, processes: WorkerProcesses) -> None:
    process = await processes.start().ready()
    handle = await enqueue(producer, asks=True)
    await waits(handle)
    await processes.line("RunStopped park False", handle.id)
    process.kill()
    assert await handle.cancel() is State.SCHEDULED
    await processes.start().ready()
    await processes.line("give back", handle.id)
    assert len(processes.lines("cancelled with 1 steps", handle.id)) == 1
    assert await handle.status() is State.CANCELLED

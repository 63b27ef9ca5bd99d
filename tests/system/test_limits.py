"""Limits and real worker processes: kill -9, frozen processes, shutdowns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from perdure import Producer, Settings, State, TaskHandle
from perdure.queues.errors import CatalogError
from perdure.queues.limits.store import LimitStore

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcess, WorkerProcesses, push_token, worker_processes
from tests.support.workers import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def processes(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    changed = settings.model_copy(update={"lease": 1.0, "grace": 0.2})
    with worker_processes(changed, tmp_path, PROGRAMS / "limited.py") as processes:
        yield processes


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


async def enqueue(producer: Producer, task: str, name: str) -> TaskHandle[Any]:
    """Enqueue a task whose worker is there: the catalog says which limits it has, so a mover admits it."""
    found: list[TaskHandle[Any]] = []

    async def published() -> bool:
        with suppress(CatalogError):
            found.append(await producer.enqueue(task, {"name": name}, task_id=name))
        return bool(found)

    await wait_until(published, "a worker publishes its tasks")
    return found[0]


async def holders(producer: Producer, limit: str) -> list[str]:
    view = (await LimitStore(producer.gateway, producer.namespace).read([limit]))[0]
    return [holder.member for holder in view.holders]


async def is_free(producer: Producer, limit: str) -> None:
    async def free() -> bool:
        return not await holders(producer, limit)

    await wait_until(free, f"no token of limit {limit} is held")


async def has_state(handle: TaskHandle[Any], state: State) -> None:
    async def reached() -> bool:
        return await handle.status() is state

    await wait_until(reached, f"the task is {state}")


def killed(processes: WorkerProcesses, process: WorkerProcess) -> None:
    """Kill a process, and note in the journal that nothing of it runs any more."""
    process.kill()
    with processes.journal.open("ab") as journal:
        journal.write(b"%d killed all\n" % process.pid)


def overlaps(processes: WorkerProcesses) -> list[tuple[str, ...]]:
    """Return the tasks that were inside at once, from the journal."""
    found: list[tuple[str, ...]] = []
    inside: dict[tuple[int, str], None] = {}
    for line in processes.lines():
        if line.what == "killed":
            inside = {place: None for place in inside if place[0] != line.pid}
        elif line.what == "begin":
            inside[line.pid, line.key] = None
            if len(inside) > 1:
                found.append(tuple(name for _, name in inside))
        elif line.what == "end" or line.what.startswith("stopped"):
            inside.pop((line.pid, line.key), None)
    return found


async def test_a_killed_worker_leaves_its_token_to_the_next_run_of_the_task(
    producer: Producer, processes: WorkerProcesses
) -> None:
    """The other task waits meanwhile: the token is that of the message, whichever worker runs it."""
    first_worker = await processes.start().ready()
    first = await enqueue(producer, "work", "first")
    await processes.line("begin", "first")
    second = await enqueue(producer, "short", "second")
    await has_state(second, State.LIMITED)
    tokens = await holders(producer, "one")
    killed(processes, first_worker)
    await processes.start().ready()
    await processes.line("begin", "first", number=2)
    assert await holders(producer, "one") == tokens
    assert await second.status() is State.LIMITED
    await push_token(producer, "first")
    await first.result(timeout=60)
    await second.result(timeout=60)
    await is_free(producer, "one")
    assert overlaps(processes) == []


async def test_a_frozen_worker_neither_releases_the_token_of_the_next_run_nor_keeps_running(
    producer: Producer, processes: WorkerProcesses
) -> None:
    """Its handler overlaps with the next run of its own task until it notices; no other task starts meanwhile.

    The lease is longer than a loaded machine delays a heartbeat: a task that has crashed twice runs again later.
    """
    frozen = await processes.start(lease=3.0).ready()
    first = await enqueue(producer, "work", "first")
    await processes.line("begin", "first", pid=frozen.pid)
    second = await enqueue(producer, "short", "second")
    await has_state(second, State.LIMITED)
    frozen.freeze()
    other = await processes.start(lease=3.0).ready()
    await processes.line("begin", "first", pid=other.pid)
    frozen.thaw()
    await processes.line("stopped lost", "first", pid=frozen.pid)
    assert len(await holders(producer, "one")) == 1
    assert await second.status() is State.LIMITED, processes.journal.read_text()
    await push_token(producer, "first")
    await first.result(timeout=60)
    await second.result(timeout=60)
    await is_free(producer, "one")
    assert {pair for pair in overlaps(processes) if len(set(pair)) > 1} == set(), "no two tasks at once"
    assert len(processes.lines("end", "first")) == 1


@pytest.mark.parametrize("task", ["call", "call_in_step"])
async def test_a_frozen_worker_stops_its_call_when_another_one_has_its_token(
    producer: Producer, processes: WorkerProcesses, task: str
) -> None:
    """Its token expires with its lease, the next task gets it, and the frozen call overlaps until it is stopped."""
    frozen = await processes.start(concurrency=1).ready()
    first = await enqueue(producer, task, "first")
    await processes.line("begin", "first", pid=frozen.pid)
    second = await enqueue(producer, task, "second")
    frozen.freeze()
    other = await processes.start(concurrency=1).ready()
    await processes.line("begin", "second", pid=other.pid)
    frozen.thaw()

    async def noticed() -> bool:
        found = [line.what for line in processes.lines(key="first", pid=frozen.pid)]
        return any(what.startswith("stopped") for what in found)

    await wait_until(noticed, "the frozen worker stops its call")
    assert len(await holders(producer, "calls")) == 1
    await push_token(producer, "second")
    await second.result(timeout=60)
    await push_token(producer, "first")
    await first.result(timeout=60)
    await is_free(producer, "calls")
    assert len(processes.lines("end", "first")) == len(processes.lines("end", "second")) == 1


async def test_two_workers_and_kills_never_run_two_tasks_of_one(producer: Producer, processes: WorkerProcesses) -> None:
    workers = [processes.start(), processes.start()]
    for worker in workers:
        await worker.ready()
    handles = [await enqueue(producer, "short", f"task-{number}") for number in range(40)]
    for kill in range(6):
        seen = len(processes.lines("begin"))
        await processes.line("begin", number=seen + 1)
        killed(processes, workers[kill % 2])
        workers[kill % 2] = await processes.start().ready()
    for handle in handles:
        await handle.result(timeout=60)
    await is_free(producer, "one")
    assert overlaps(processes) == []
    assert {line.key for line in processes.lines("end")} == {f"task-{number}" for number in range(40)}


async def test_a_shutdown_hands_the_token_to_the_next_worker(producer: Producer, processes: WorkerProcesses) -> None:
    leaving = await processes.start().ready()
    first = await enqueue(producer, "work", "first")
    await processes.line("begin", "first")
    second = await enqueue(producer, "short", "second")
    await has_state(second, State.LIMITED)
    other = await processes.start().ready()
    leaving.stop()
    assert await leaving.ended() == 0
    await processes.line("begin", "first", pid=other.pid)
    await push_token(producer, "first")
    await first.result(timeout=60)
    await second.result(timeout=60)
    await is_free(producer, "one")
    assert overlaps(processes) == []

"""Redis loses its last second while tasks run, and later a worker dies: no checkpoint has a gap, and no task is lost.

Each step returns a token that no other call returns, and gets the token of the step before as its argument. So a record
that follows from a lost one does not fit: the handler would end with `StepMismatch`, the agent with `BadSnapshot`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio.to_thread
import orjson
import pytest
from perdure import App, Producer, Settings, TaskHandle
from perdure.deadletter.letters import count_letters
from perdure.worker.agents.journal.history import check_state
from perdure.worker.durable.journal.step_record import StepRecord

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.servers import BUNDLED, find_program
from tests.support.servers.data_loss import CutServer, LaggingPair
from tests.support.workers import bounded, history, recorded_steps, redis_command, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

LOST = 1.2
"""Seconds of which Redis loses all writes."""

LENGTH = 170
"""Steps of a task, each of which takes 0.02 s and a round trip."""

CRASHES = 2
"""Redis, and a worker."""


@pytest.fixture(params=["power cut", "failover"])
def server(request: pytest.FixtureRequest) -> Iterator[CutServer | LaggingPair]:
    program = find_program(BUNDLED)
    assert program is not None
    made = CutServer(program) if request.param == "power cut" else LaggingPair(program, LOST)
    yield made
    made.close()


@pytest.fixture
async def app(server: CutServer | LaggingPair) -> AsyncIterator[App]:
    settings = Settings(redis_url=server.url, namespace="lost", lease=2.0)
    async with App("chaining", settings=settings) as app:
        yield app


@pytest.fixture
def workers(app: App, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(app.settings, tmp_path, PROGRAMS / "chaining.py") as workers:
        yield workers


async def enqueue(producer: Producer) -> list[TaskHandle[list[str]]]:
    """Enqueue functions and agents of the worker process."""
    functions = [
        await producer.enqueue("chain", {"length": LENGTH}, task_id=f"f{n}", queue="chaining") for n in range(2)
    ]
    arguments = {"goal": "tokens", "length": LENGTH}
    agents = [await producer.enqueue("agent", arguments, task_id=f"a{n}", queue="chaining") for n in range(2)]
    return functions + agents


def steps(workers: WorkerProcesses) -> Counter[str]:
    """Return how many steps each task has called so far."""
    return Counter(line.key.partition(":")[0] for line in workers.lines("step"))


async def until_steps(workers: WorkerProcesses, handles: list[TaskHandle[list[str]]], more: int) -> None:
    """Wait until each task has called so many steps more."""
    before = steps(workers)

    async def all_called() -> bool:
        now = steps(workers)
        return all(now[one.id] >= before[one.id] + more for one in handles)

    await wait_until(all_called, f"each task calls {more} steps more")


@pytest.mark.parametrize("dies", [True, False], ids=["a worker dies", "no worker dies"])
async def test_no_checkpoint_has_a_gap(
    app: App, server: CutServer | LaggingPair, workers: WorkerProcesses, dies: bool
) -> None:
    first = await workers.start().ready()
    handles = await enqueue(app.producer)
    await until_steps(workers, handles, 5)
    position = await anyio.to_thread.run_sync(server.position)

    async def keeps() -> bool:
        return await anyio.to_thread.run_sync(server.keeps, position, LOST)

    await wait_until(keeps, "the tasks, their deliveries and their first steps are safe")
    server.lose(LOST)
    await until_steps(workers, handles, 5)  # their records follow from those that were lost
    if dies:
        first.kill()
        await workers.start().ready()
    for handle in handles:
        tokens = await bounded(handle.result())
        if handle.id.startswith("f"):
            records = await recorded_steps(app, handle)
            keys = [f"d:link#{number + 1}" if number else "d:link" for number in range(LENGTH)]
            found = [orjson.loads(StepRecord.decode(records[key]).result) for key in keys]
            logged = [event.step for event in await history(handle) if event.type == "step_completed"]
            assert (found, len(records), len(logged), len(set(logged))) == (tokens, LENGTH, LENGTH, LENGTH)
        else:
            await check_state(app.producer.gateway, handle.partition, handle.id)
            numbers = [event.number for event in await history(handle) if event.number is not None]
            assert numbers == list(range(1, len(numbers) + 1))
        assert len(set(tokens)) == LENGTH
    calls = Counter(line.key for line in workers.lines("step"))
    assert len(calls) == LENGTH * len(handles)
    assert max(calls.values()) <= 1 + (CRASHES if dies else 1)
    if not dies:
        assert max(calls.values()) == 1  # the run sent again what was lost
    assert await count_letters(app.producer.gateway, [handles[0].partition]) == 0
    assert await redis_command(app, "XLEN", handles[0].partition.ready) == 0

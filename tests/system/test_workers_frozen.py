"""SIGSTOP past the lease: another worker takes over, and what the frozen one writes on waking changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure import Producer, Settings, State

from tests.support.processes import WorkerProcesses, push_token, recorded, worker_processes
from tests.support.workers import bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    """Replicas with a lease of 0.6 seconds."""
    with worker_processes(settings.model_copy(update={"lease": 0.6}), tmp_path) as workers:
        yield workers


async def test_a_frozen_worker_that_wakes_up_can_change_nothing(workers: WorkerProcesses, producer: Producer) -> None:
    """Frozen in a step that waits: on waking its beat finds the lease lost, and cancels the handler."""
    frozen = await workers.start().ready()
    handle = await producer.enqueue("gate", {"name": "g"}, queue="replica")
    key = f"{handle.id}:second"
    await workers.line("saved", key, pid=frozen.pid)
    frozen.freeze()
    heir = await workers.start().ready()
    await workers.line("saved", key, pid=heir.pid)
    frozen.thaw()
    await workers.line("left", handle.id, pid=frozen.pid)
    # A second token for the one that the frozen worker's abandoned read may swallow.
    await push_token(producer, "g", "opened")
    await push_token(producer, "g", "opened")
    found = await bounded(handle.result())
    assert found == {"steps": ["first", "opened after progress", "third"], "pid": heir.pid, "attempt": 1, "crashes": 1}
    record = await handle.record()
    assert (record.worker, record.crashes) == (heir.worker_id, 1)
    assert [line.pid for line in workers.lines("begin", f"{handle.id}:third")] == [heir.pid]

    heir.kill()  # and the worker that was frozen continues
    after = await producer.enqueue("pipeline", {"value": 1, "steps": 2, "pause": 0}, queue="replica")
    assert await bounded(after.result()) == 13
    assert (await after.record()).worker == frozen.worker_id


async def test_the_late_writes_of_a_frozen_worker_are_refused(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    """Frozen in a step that may end meanwhile: its first act on waking is to record the step."""
    gate = tmp_path / "gate"
    frozen = await workers.start().ready()
    handle = await producer.enqueue("sleeper", {"gate": str(gate)}, queue="replica")
    await workers.line("begin", pid=frozen.pid)
    frozen.freeze()
    gate.touch()
    heir = await workers.start().ready()
    assert await bounded(handle.result()) == heir.pid
    before = [event async for event in handle.events(follow=False)]
    checkpoint = await producer.gateway.command("HGETALL", handle.partition.steps(handle.id))
    frozen.thaw()
    await workers.line("left", handle.id, pid=frozen.pid)
    assert workers.lines("went on", handle.id, frozen.pid) == []
    assert await handle.result() == heir.pid
    assert [event async for event in handle.events(follow=False)] == before
    assert await producer.gateway.command("HGETALL", handle.partition.steps(handle.id)) == checkpoint
    record = await handle.record()
    assert (record.state, record.worker, record.attempts, record.crashes) == (State.SUCCEEDED, heir.worker_id, 1, 1)
    assert await recorded(producer, handle) == {"sleep"}

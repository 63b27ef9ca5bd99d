"""One task that kills whatever process runs it, among others that do no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure import Producer, Settings, State, TaskFailed
from perdure.deadletter.policy import Reason
from perdure.queues import list_supervisors, list_workers

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses
from tests.support.workers import BOUND, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PROGRAM = PROGRAMS / "poisonous.py"
TASKS = 32
POISON = 7


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> WorkerProcesses:
    """The journal alone: the processes are the supervisor's."""
    workers = WorkerProcesses(settings, tmp_path / "journal")
    workers.journal.touch()
    return workers


@pytest.fixture
def supervisor(settings: Settings, workers: WorkerProcesses, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a supervisor with one worker, and a lease so long that none expires in these tests."""
    environment = os.environ | {
        "JOURNAL": str(workers.journal),
        "GATES": str(tmp_path),
        "PERDURE_REDIS_URL": settings.redis_url,
        "PERDURE_NAMESPACE": settings.namespace,
        "PERDURE_LEASE": "600",
    }
    command = [sys.executable, "-m", "perdure.worker.cli", "worker", "run", f"{PROGRAM}:app", "--processes", "1"]
    process = subprocess.Popen([*command, "--concurrency", str(TASKS), "--isolated", "2"], env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 0


async def test_only_the_poison_dies_of_itself(
    supervisor: subprocess.Popen[bytes], workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    handles = await producer.enqueue_many(
        "job",
        [{"number": number, "poison": number == POISON} for number in range(TASKS)],
        queue="poisonous",
    )
    await workers.line("begin", number=TASKS)
    assert len({line.pid for line in workers.lines("begin")}) == 1
    (tmp_path / "poison").touch()
    (tmp_path / "innocent").touch()
    for number, handle in enumerate(handles):
        if number != POISON:
            assert await bounded(handle.result()) == number
    with pytest.raises(TaskFailed) as caught:
        await bounded(handles[POISON].result())
    assert caught.value.reason == Reason.CRASH_LOOP
    record = await handles[POISON].record()
    assert record.error is not None
    assert str(record.error["message"]).endswith("last crash: SIGKILL in step 'second' after step 'first'")
    assert (record.crashes, record.attempts) == (3, 0)

    for number, handle in enumerate(handles):
        found = await handle.record()
        if number != POISON:
            assert (found.state, found.attempts) == (State.SUCCEEDED, 1)
        ran = Counter(line.what for line in workers.lines(key=str(number)))
        assert ran["first"] == 1  # it was recorded, and is never run again
        assert ran["begin"] <= 3
    running: dict[int, set[str]] = {}
    for line in workers.lines():
        if line.what == "begin":
            running.setdefault(line.pid, set()).add(line.key)
        elif line.what == "end":
            running[line.pid].remove(line.key)
    killed = [tasks for tasks in running.values() if tasks]
    assert all(str(POISON) in tasks for tasks in killed)
    assert len([tasks for tasks in killed if len(tasks) > 1]) <= 2
    assert {str(POISON)} in killed  # the last time it died alone


async def test_a_task_that_ends_the_event_loop_counts_a_crash(
    supervisor: subprocess.Popen[bytes], workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    """A worker that ends in this way releases no task: the next one would run it again for ever."""
    innocent = await producer.enqueue("job", {"number": 1, "poison": False}, queue="poisonous")
    await workers.line("begin", "1")
    leaver = await producer.enqueue("leaver", {"number": 2}, queue="poisonous")
    with pytest.raises(TaskFailed) as caught:
        await bounded(leaver.result())
    assert caught.value.reason == Reason.CRASH_LOOP
    assert (await leaver.record()).crashes == len(workers.lines("begin", "2")) == 3
    (tmp_path / "innocent").touch()
    assert await bounded(innocent.result()) == 1


async def test_saved_progress_excuses_the_crashes_of_a_task_and_of_its_worker(
    supervisor: subprocess.Popen[bytes], workers: WorkerProcesses, producer: Producer
) -> None:
    """Three crashes in a row would bury it. They count within the window, whose limit is ten."""
    handle = await producer.enqueue("saver", {"number": 1, "kills": 4, "changing": True}, queue="poisonous")
    assert await bounded(handle.result()) == 4
    record = await handle.record()
    assert (record.crashes, record.attempts) == (4, 1)
    stored = await producer.gateway.command("HMGET", handle.partition.record(handle.id), "excused", "recent")
    assert stored == [b"4", b"4"]
    (info,) = await list_supervisors(producer.gateway, producer.namespace)
    assert (info.crashes, info.paused_since) == (0, 0)


async def test_a_step_excuses_the_crashes_before_it_although_the_process_dies_at_once(
    supervisor: subprocess.Popen[bytes], workers: WorkerProcesses, producer: Producer
) -> None:
    handle = await producer.enqueue("stepper", {"number": 1, "kills": 6}, queue="poisonous")
    assert await bounded(handle.result()) == 6
    assert len(workers.lines("first", "1")) == 6
    stored = await producer.gateway.command("HMGET", handle.partition.record(handle.id), "excused", "recent")
    assert stored == [b"5", b"5"]  # the last crash had no step after it


async def test_the_same_progress_again_excuses_no_crash(
    supervisor: subprocess.Popen[bytes], workers: WorkerProcesses, producer: Producer
) -> None:
    handle = await producer.enqueue("saver", {"number": 1, "kills": 9, "changing": False}, queue="poisonous")
    with pytest.raises(TaskFailed) as caught:
        await bounded(handle.result())
    assert caught.value.reason == Reason.CRASH_LOOP
    assert len(workers.lines("begin", "1")) == 3


async def test_tasks_of_a_killed_worker_are_resumed_at_once(
    supervisor: subprocess.Popen[bytes], workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    """The lease is ten minutes: what runs again within this test does not wait for it."""
    handle = await producer.enqueue("job", {"number": 1, "poison": False}, queue="poisonous")
    started = await workers.line("begin", "1")
    os.kill(started.pid, signal.SIGKILL)
    again = await workers.line("begin", "1", number=2)
    assert again.pid != started.pid
    (tmp_path / "innocent").touch()
    assert await bounded(handle.result()) == 1
    assert (await handle.record()).crashes == 1
    assert started.pid not in {worker.pid for worker in await list_workers(producer.gateway, producer.namespace)}
    types = [event.type async for event in handle.events(follow=False)]
    assert types[:4] == ["step_completed", "crashed", "resumed", "step_completed"]

"""kill -9 of real workers: nothing is lost, and no recorded step is ever run again."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import Producer, Settings, State, TaskFailed, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.queues.keys import GROUP

from tests.support.processes import WorkerProcesses, push_token, recorded, worker_processes
from tests.support.workers import BOUND, attended, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    """Replicas with a lease of one second."""
    with worker_processes(settings, tmp_path) as workers:
        yield workers


async def leases_passed(producer: Producer, lease: float, count: int) -> None:
    """Wait until this number of messages has been idle for a lease."""
    stream = producer.namespace.partition("replica").ready
    with anyio.fail_after(BOUND):
        while True:
            found = await producer.gateway.command(
                "XPENDING", stream, GROUP, "IDLE", round(lease * 1000), "-", "+", 1000
            )
            if len(found) >= count:
                return
            await anyio.sleep(0.02)


def chain(value: int, steps: int) -> int:
    for _ in range(steps):
        value = value * 3 + 1
    return value


STEPS, KILLS = 16, 8


def work_step(number: int) -> str:
    return "work" if number == 1 else f"work#{number}"


async def test_killed_again_and_again_at_random_moments(workers: WorkerProcesses, producer: Producer) -> None:
    """Three processes, one of them killed every now and then while it runs steps, and replaced."""
    seed = time.time_ns()
    chance = random.Random(seed)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
    alive = {process.pid: process for process in [workers.start(concurrency=4) for _ in range(3)]}
    killed: set[int] = set()
    handles: list[TaskHandle[Any]] = []
    for _ in range(KILLS):
        handles += await producer.enqueue_many(
            "pipeline",
            [{"value": number, "steps": STEPS, "pause": 0.08} for number in range(len(handles), len(handles) + 5)],
            queue="replica",
        )
        before = len(workers.lines("begin"))
        await workers.line("begin", number=before + 1)
        await anyio.sleep(chance.uniform(0.0, 0.3))  # the random moment itself
        victim = chance.choice(sorted({line.pid for line in workers.lines("begin")[before:]}))
        alive.pop(victim).kill()
        killed.add(victim)
        replacement = workers.start(concurrency=4)
        alive[replacement.pid] = replacement
    for number, handle in enumerate(handles):
        assert await bounded(handle.result()) == chain(number, STEPS), f"seed {seed}"

    began: dict[str, list[tuple[int, int]]] = defaultdict(list)
    known: dict[str, int] = {}
    for position, line in enumerate(workers.lines()):
        if line.what == "begin":
            began[line.key].append((position, line.pid))
        elif line.what.startswith("recorded "):
            known.setdefault(f"{line.key}:{work_step(int(line.what.split()[1]))}", position)
    assert set(began) == {f"{handle.id}:{work_step(number + 1)}" for handle in handles for number in range(STEPS)}
    cut_off = 0
    for key, runs in began.items():
        processes = [pid for _, pid in runs]
        assert len(set(processes)) == len(processes), f"seed {seed}: {key} ran twice in one process"
        assert set(processes[:-1]) <= killed, f"seed {seed}: {key} ran again without a kill"
        assert runs[-1][0] < known[key], f"seed {seed}: {key} ran again after it was recorded"
        cut_off += len(runs) - 1
    assert cut_off <= KILLS * 4, f"seed {seed}: more steps ran again than were in flight"
    records = [await handle.record() for handle in handles]
    assert {record.state for record in records} == {State.SUCCEEDED}
    assert {record.attempts for record in records} == {1}
    assert 1 <= sum(record.crashes for record in records) <= KILLS * 4


async def test_the_step_that_was_cut_off_runs_once_more_and_no_other(
    workers: WorkerProcesses, producer: Producer
) -> None:
    """The other worker is there already, and finds the task in its sweep."""
    first, second = workers.start(concurrency=1), workers.start(concurrency=1)
    await first.ready()
    await second.ready()
    handle = await producer.enqueue("gate", {"name": "g"}, queue="replica")
    holder = (await workers.line("saved", f"{handle.id}:second")).pid
    victim, heir = (first, second) if holder == first.pid else (second, first)
    victim.kill()
    again = await workers.line("saved", f"{handle.id}:second", number=2)
    assert again.pid == heir.pid
    await push_token(producer, "g", "opened")
    found = await bounded(handle.result())
    assert found == {
        "steps": ["first", "opened after progress", "third"],  # what the step had saved is there
        "pid": heir.pid,
        "attempt": 1,
        "crashes": 1,
    }
    assert [line.pid for line in workers.lines("begin", f"{handle.id}:first")] == [victim.pid]
    assert [line.pid for line in workers.lines("begin", f"{handle.id}:second")] == [victim.pid, heir.pid]
    assert [line.pid for line in workers.lines("begin", f"{handle.id}:third")] == [heir.pid]
    record = await handle.record()
    assert (record.attempts, record.crashes) == (1, 1)


async def test_a_new_worker_first_takes_up_what_a_killed_one_left(
    workers: WorkerProcesses, producer: Producer, settings: Settings
) -> None:
    victim = await workers.start(concurrency=3).ready()
    left = [await producer.enqueue("gate", {"name": "g"}, queue="replica") for _ in range(3)]
    for handle in left:
        await workers.line("saved", f"{handle.id}:second")
    victim.kill()
    new = await producer.enqueue("gate", {"name": "g"}, queue="replica")
    async with attended(producer.gateway, left[0].partition, settings.lease):
        await leases_passed(producer, settings.lease, 3)
        for _ in range(4):
            await push_token(producer, "g")
        heir = workers.start(concurrency=1)
        for handle in [*left, new]:
            await bounded(handle.result())
    order = [line.key for line in workers.lines("run", pid=heir.pid)]
    assert order == [*(handle.id for handle in left), new.id]


async def test_two_workers_that_claim_at_once_share_what_is_there(
    workers: WorkerProcesses, producer: Producer, settings: Settings
) -> None:
    victim = await workers.start(concurrency=30).ready()
    handles = [await producer.enqueue("gate", {"name": "g"}, queue="replica") for _ in range(30)]
    for handle in handles:
        await workers.line("saved", f"{handle.id}:second")
    victim.kill()
    await leases_passed(producer, settings.lease, 30)
    for _ in handles:
        await push_token(producer, "g")
    for process in [workers.start(concurrency=4), workers.start(concurrency=4)]:
        await process.ready()
    for handle in handles:
        found = await bounded(handle.result())
        assert (found["attempt"], found["crashes"]) == (1, 1)
        assert len(workers.lines("run", handle.id)) == 2
        assert len(workers.lines("begin", f"{handle.id}:second")) == 2
        assert len(workers.lines("begin", f"{handle.id}:third")) == 1


async def test_a_task_that_kills_its_workers_is_buried(
    workers: WorkerProcesses, producer: Producer, settings: Settings
) -> None:
    """Each process dies of it but the last, which buries it without running it."""
    processes = [workers.start(lease=0.5) for _ in range(4)]
    for process in processes:
        await process.ready()
    handle = await producer.enqueue("killer", queue="replica")
    with pytest.raises(TaskFailed) as caught:
        await handle.result(timeout=BOUND)
    assert caught.value.reason == Reason.CRASH_LOOP
    dead = [line.pid for line in workers.lines("run", handle.id)]
    assert len(dead) == len(set(dead)) == 3
    codes = [await process.ended() for process in processes if process.pid in dead]
    assert codes == [-9, -9, -9]
    survivor = next(process for process in processes if process.pid not in dead)
    record = await handle.record()
    assert (record.attempts, record.crashes, record.worker) == (0, 3, survivor.worker_id)
    after = await producer.enqueue("pipeline", {"value": 1, "steps": 1, "pause": 0}, queue="replica")
    assert await bounded(after.result()) == 4


@pytest.mark.parametrize("happened", [True, False], ids=["after the effect", "before the effect"])
async def test_a_risky_step_that_was_cut_off_finds_out_what_happened(
    workers: WorkerProcesses, producer: Producer, happened: bool
) -> None:
    victim = await workers.start().ready()
    handle = await producer.enqueue("payment", {"before": "b", "after": "a"}, queue="replica")
    key = f"{handle.id}:charge"
    if happened:
        await push_token(producer, "b")
    await workers.line("charged" if happened else "begin", key)
    victim.kill()
    assert await recorded(producer, handle) == set()
    await push_token(producer, "b")
    await push_token(producer, "a")
    workers.start()
    result = await bounded(handle.result())
    assert result == ("found to be charged" if happened else "charged by the first run")
    assert len(workers.lines("charged", key)) == 1
    assert len(workers.lines("verified", key)) == 1
    assert len(workers.lines("begin", key)) == (1 if happened else 2)


async def test_a_risky_step_in_doubt_is_left_to_a_person(workers: WorkerProcesses, producer: Producer) -> None:
    victim = await workers.start().ready()
    handle = await producer.enqueue("doubtful", {"before": "b", "after": "a"}, queue="replica")
    await push_token(producer, "b")
    await workers.line("charged", f"{handle.id}:charge")
    victim.kill()
    workers.start()
    with pytest.raises(TaskFailed) as caught:
        await handle.result(timeout=BOUND)
    assert caught.value.reason == Reason.IN_DOUBT
    assert len(workers.lines("charged")) == 1


async def test_asynchronous_records_that_were_stored_outlive_the_worker(
    workers: WorkerProcesses, producer: Producer
) -> None:
    victim = await workers.start().ready()
    handle = await producer.enqueue("hasty", {"gate": "g"}, queue="replica")
    await workers.line("steps done", handle.id)
    victim.kill()
    stored = await recorded(producer, handle)
    await push_token(producer, "g", "end")
    heir = workers.start()
    assert await bounded(handle.result()) == [*(str(number) for number in range(20)), "end"]
    again = {line.key.partition(":")[2] for line in workers.lines("begin", pid=heir.pid)}
    names = {"quick"} | {f"quick#{number}" for number in range(2, 21)}
    assert again == names - stored  # exactly what had not been stored is run again


async def test_a_worker_whose_event_loop_is_blocked_keeps_its_lease(
    workers: WorkerProcesses, producer: Producer
) -> None:
    """For five leases, with another worker that would gladly take it."""
    processes = [workers.start(lease=0.6) for _ in range(2)]
    for process in processes:
        await process.ready()
    handle = await producer.enqueue("blocks", {"seconds": 3.0}, queue="replica")
    holder = (await workers.line("run", handle.id)).pid
    assert await bounded(handle.result()) == holder
    assert len(workers.lines("run", handle.id)) == 1
    record = await handle.record()
    assert (record.attempts, record.crashes) == (1, 0)

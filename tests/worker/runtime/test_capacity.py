"""Capacity of a worker: what it reads by free slots, memory and the lag of its loop, and where people see it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from perdure import App, Context, State, Worker
from perdure.queues.presence import list_workers
from perdure.queues.runtime import RUNTIME
from perdure.worker.runtime.health.capacity import Capacity, MemoryUse, control_groups, memory_reader
from perdure.worker.runtime.health.report import CONSUMING, Report
from perdure.worker.runtime.slots import Slots

from tests.support.workers import bounded, running_worker, wait_until

MIB = 1024**2


class Machine:
    """Memory and time of a worker, as a test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share: float | None = 0.5
        self.now = 1000.0
        monkeypatch.setattr(RUNTIME, "monotonic", lambda: self.now)

    def read(self) -> MemoryUse | None:
        return None if self.share is None else MemoryUse(round(self.share * 1000 * MIB), 1000 * MIB, "a test")

    def capacity(self, slots: Slots, lag_limit: float = 1.0) -> Capacity:
        return Capacity(slots, lag_limit=lag_limit, read_memory=self.read)

    def later(self, capacity: Capacity, seconds: float = 1.0, lag: float = 0.0) -> None:
        self.now += seconds
        capacity.observe(lag)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_figure_is_the_share_of_free_slots(machine: Machine) -> None:
    slots = Slots(8)
    capacity = machine.capacity(slots)
    machine.later(capacity)
    assert (capacity.figure, slots.usable) == (1.0, 8)
    slots.leak(2)
    assert capacity.figure == 0.75
    assert capacity.summary() == {
        "figure": 0.75,
        "free_slots": 6,
        "lag": 0.0,
        "memory": 500 * MIB,
        "memory_limit": 1000 * MIB,
    }


def test_a_lag_above_the_limit_leaves_fewer_slots_and_at_least_one(machine: Machine) -> None:
    slots = Slots(16)
    capacity = machine.capacity(slots, lag_limit=0.5)
    usable = []
    for lag in (1.0, 1.5, 1.0, 3.0, 60.0):  # a mean of 0.5, 1, 1, 2 and 31 s
        machine.later(capacity, lag=lag)
        usable.append(slots.usable)
    assert usable == [16, 8, 8, 4, 1]
    assert capacity.lags
    for _ in range(20):  # it is forgotten when the loop answers in time
        machine.later(capacity)
    assert (slots.usable, capacity.lag, capacity.lags) == (16, 0.0, False)


def test_without_a_limit_no_lag_matters(machine: Machine) -> None:
    slots = Slots(16)
    capacity = machine.capacity(slots, lag_limit=0.0)
    machine.later(capacity, lag=60.0)
    assert slots.usable == 16


async def test_short_memory_stops_reading_until_there_is_some(machine: Machine, log: list[str]) -> None:
    slots, end = Slots(4), asyncio.Event()
    capacity = machine.capacity(slots)
    slots.fill(_wait(end))
    usable = []
    for share in (0.89, 0.90, 0.99, 0.86, 0.84, 0.89):
        machine.share = share
        machine.later(capacity)
        usable.append(slots.usable)
    assert usable == [4, 0, 0, 0, 4, 4]
    assert [line for line in log if "memory is short" in line] == [
        "memory is short: 90% of 1,000 MiB (a test) is used; no new task is read until it is less than 85%\n"
    ]
    assert len([line for line in log if "memory is free again: 84%" in line]) == 1
    end.set()
    await bounded(slots.wait_empty())


async def test_a_worker_whose_memory_stays_short_runs_one_task_at_a_time(machine: Machine) -> None:
    slots, end = Slots(4), asyncio.Event()
    capacity = machine.capacity(slots)
    machine.share = 0.95
    for _ in range(10):
        machine.later(capacity)
        assert slots.free == 0
    machine.later(capacity)
    assert slots.free == 1
    slots.fill(_wait(end))
    machine.later(capacity)
    assert slots.free == 0
    end.set()
    await bounded(slots.wait_empty())
    for _ in range(10):
        machine.later(capacity)
        assert slots.free == 0
    machine.later(capacity)
    assert slots.free == 1


def test_memory_that_cannot_be_read_limits_nothing(machine: Machine, log: list[str]) -> None:
    def fail() -> MemoryUse | None:
        raise OSError("no such file")

    slots = Slots(4)
    capacity = Capacity(slots, lag_limit=1.0, read_memory=fail)
    for _ in range(3):
        machine.later(capacity)
    assert slots.usable == 4
    assert len([line for line in log if "could not read the use of memory" in line]) == 1


async def _wait(end: asyncio.Event) -> None:
    await end.wait()


# what the system says


def group(folder: Path, names: tuple[str, str], limit: str, used: int, cache: str, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache} {cached}\nactive_file 7\n")


VERSION_2 = ("memory.max", "memory.current")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def uses(root: Path, text: str) -> list[tuple[int, int]]:
    process = root / "cgroup"
    process.write_text(text)
    return [(use.used, use.limit) for reader in control_groups(root, process) for use in [reader()]]


def test_control_groups_of_version_2_and_those_above_count(tmp_path: Path) -> None:
    group(tmp_path / "pod", VERSION_2, "1000", 700, "inactive_file", 100)
    group(tmp_path / "pod" / "worker", VERSION_2, "max", 300, "inactive_file", 50)
    group(tmp_path / "pod" / "worker" / "app", VERSION_2, "400", 300, "inactive_file", 50)
    assert uses(tmp_path, "0::/pod/worker/app\n") == [(250, 400), (600, 1000)]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    group(tmp_path, VERSION_2, "1000", 700, "inactive_file", 0)
    assert uses(tmp_path, "0::/\n") == [(700, 1000)]
    assert uses(tmp_path, "0::/../..\n") == [(700, 1000)]


def test_control_groups_of_version_1_count(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "docker", VERSION_1, "1000", 700, "total_inactive_file", 100)
    group(tmp_path / "memory", VERSION_1, "9223372036854771712", 700, "total_inactive_file", 100)
    assert uses(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker\n0::/\n") == [(600, 1000)]


@pytest.mark.parametrize("text", ["", "\n", "0\n", "0::/nowhere\n", "x:y\n:::\n"])
def test_no_limit_is_no_error(tmp_path: Path, text: str) -> None:
    assert uses(tmp_path, text) == []
    assert list(control_groups(tmp_path, tmp_path / "missing")) == []


def test_the_setting_is_compared_with_this_process() -> None:
    use = memory_reader(10_000 * MIB)()
    assert use is not None
    assert use.limit == 10_000 * MIB
    assert 5 * MIB < use.used < 10_000 * MIB


ADDRESS_SPACE = """
import resource

from perdure.worker.runtime.health.capacity import memory_reader

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
use = memory_reader(0)()
print(use.of, use.limit >> 30, 0 < use.share < 1)
"""


def test_the_limit_of_the_address_space_counts() -> None:
    ran = subprocess.run([sys.executable, "-c", ADDRESS_SPACE], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "RLIMIT_AS 8 True\n"


# workers


def consuming(report: Report) -> tuple[bool, str]:
    (level,) = [level for level in report.levels if level.name == CONSUMING]
    return level.ok, level.said


@pytest.mark.integration
@pytest.mark.app("shop", memory_limit=1 << 40, heartbeat=0.2)
async def test_a_worker_without_memory_finishes_its_tasks_and_reads_no_more(app: App, log: list[str]) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(ctx: Context) -> int:
        begun.set()
        await end.wait()
        return 1

    first = await work.enqueue()
    async with running_worker(app, concurrency=4) as worker:
        await bounded(begun.wait())
        shrink(worker)

        async def is_short() -> bool:
            return worker._capacity.short_of_memory

        await wait_until(is_short, "the worker notices that its memory is short")
        second = await work.enqueue()
        ok, said = consuming(worker.health())
        assert not ok
        assert said.startswith("memory is short, no new task is read: ")
        assert worker.health().live
        assert not worker.health().ready

        async def is_shown() -> bool:
            (info,) = await list_workers(app.producer.gateway, app.producer.namespace)
            return (info.capacity["figure"], info.capacity["memory_limit"]) == (0.0, MIB)

        await wait_until(is_shown, "the registration shows the capacity")
        assert (await second.record()).state is State.QUEUED
        end.set()
        assert await first.result(timeout=60) == 1
        assert (await second.record()).state is State.QUEUED
        shrink(worker, 1 << 40)
        assert await second.result(timeout=60) == 1
        assert consuming(worker.health())[0]
    assert len([line for line in log if "memory is short" in line]) == 1
    assert len([line for line in log if "memory is free again" in line]) == 1


def shrink(worker: Worker, limit: int = MIB) -> None:
    """Set another limit of the memory of a running worker, as an operator does with that of its control group."""
    worker._capacity._read_memory = memory_reader(limit)


@pytest.mark.integration
@pytest.mark.app("shop", lag_limit=0.05)
async def test_a_worker_whose_loop_lags_fills_fewer_slots(app: App) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    @app.task
    async def blocks(ctx: Context) -> None:
        time.sleep(1.0)  # noqa: ASYNC251 - it blocks the loop
        begun.set()
        await end.wait()

    @app.task
    async def work(ctx: Context) -> int:
        return 1

    async with running_worker(app, concurrency=8) as worker:
        await blocks.enqueue()
        await bounded(begun.wait())

        async def reads_less() -> bool:
            return worker._slots.usable < 8

        await wait_until(reads_less, "the worker notices that its loop lags")
        ok, said = consuming(worker.health())
        assert ok
        assert "of 8 slots are filled, since the event loop lags by" in said
        handle = await work.enqueue()
        assert await handle.result(timeout=60) == 1, "it reads again when the loop answers in time"
        end.set()


@pytest.mark.integration
@pytest.mark.app("shop", memory_limit=MIB, heartbeat=0.2)
async def test_a_worker_that_starts_without_memory_runs_tasks_one_by_one(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.worker.runtime.health.capacity._PATIENCE", 0.1)
    running, most = 0, 0

    @app.task
    async def work(ctx: Context) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1

    handles = await work.enqueue_many([{}] * 3)
    async with running_worker(app, concurrency=4) as worker:

        async def is_short() -> bool:
            return worker._capacity.short_of_memory

        await wait_until(is_short, "the worker notices that its memory is short")
        more = await work.enqueue_many([{}] * 3)
        assert [await handle.result(timeout=60) for handle in [*handles, *more]] == [1] * 6

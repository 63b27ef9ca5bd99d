"""kill -9 of workers that trace: the trace of the next run links to that of the killed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from perdure import Producer, Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import bounded, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

CALLER = f"{0xA:032x}"
HEADERS = {"traceparent": f"00-{CALLER}-{0xB:016x}-01"}


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(settings, tmp_path, program=PROGRAMS / "traced.py") as workers:
        yield workers


def spans(workers: WorkerProcesses, pid: int) -> dict[str, dict[str, Any]]:
    """Return the spans that a process has ended, by name."""
    found = [orjson.loads(line.key) for line in workers.lines("span", pid=pid)]
    return {span["name"]: span for span in found}


async def test_the_runs_of_a_task_whose_workers_are_killed_are_linked_and_a_recorded_step_has_one_span(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    handle = await producer.enqueue("charge", {"file": str(file)}, queue="traced", headers=HEADERS)
    first = await workers.start().ready()
    await workers.line("waits", pid=first.pid)
    first.kill()
    second = await workers.start().ready()
    await workers.line("waits", pid=second.pid)

    async def left() -> bool:
        data = await producer.gateway.command("HGET", handle.partition.steps(handle.id), "s:#trace")
        return first_trace.encode() not in (data or b"")

    first_trace = spans(workers, first.pid)["step_look_up"]["trace"]
    await wait_until(left, "the context of the second run, which its step stores after a second")
    second.kill()
    file.touch()
    third = await workers.start().ready()
    await bounded(handle.result())
    await workers.line("span", pid=third.pid, number=2)

    assert set(spans(workers, first.pid)) == {"step_look_up"}
    assert spans(workers, second.pid) == {}, "a killed run ends no span, and a recorded step has none"
    found = spans(workers, third.pid)
    assert set(found) == {"step_pay", "run_charge"}
    assert found["step_pay"]["trace"] == found["run_charge"]["trace"] != first_trace
    links = found["run_charge"]["links"]
    assert links["enqueue"] == CALLER
    assert links["previous_run"] not in (CALLER, first_trace, found["run_charge"]["trace"])


async def test_a_killed_run_that_recorded_nothing_has_left_its_trace_after_a_second(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    handle = await producer.enqueue("plain", {"file": str(file)}, queue="traced", headers=HEADERS)
    first = await workers.start().ready()
    steps, left = handle.partition.steps(handle.id), b""

    async def stored() -> bool:
        nonlocal left
        left = await producer.gateway.command("HGET", steps, "s:#trace") or b""
        return bool(left)

    await wait_until(stored, "the context of the run")
    first.kill()
    file.touch()
    second = await workers.start().ready()
    await bounded(handle.result())
    await workers.line("span", pid=second.pid)
    assert spans(workers, second.pid)["run_plain"]["links"] == {
        "enqueue": CALLER,
        "previous_run": left.split(b"-")[1].decode(),
    }

"""A deploy of changed code, with worker processes of the old and the new version on one queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import Producer, State
from perdure.worker.settings import Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import worker_processes
from tests.support.workers import bounded, wait_until

pytestmark = pytest.mark.integration


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

"""kill -9 of a worker whose task works in files: another worker restores those of the last recorded step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from perdure import Producer, Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    environment = {"PERDURE_ARTIFACTS": str(tmp_path / "store"), "PERDURE_WORKSPACES": str(tmp_path / "running")}
    with worker_processes(settings, tmp_path, PROGRAMS / "agents" / "workspaces.py", environment) as workers:
        yield workers


async def test_another_worker_restores_the_files_of_the_last_recorded_step(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    handle = await producer.enqueue("edit", {"path": str(tmp_path / "go")}, queue="files")
    first = await workers.start().ready()
    abandoned = anyio.Path((await workers.line("folder", pid=first.pid)).key)
    await workers.line("waits", pid=first.pid)
    assert await (abandoned / "half.txt").exists()
    first.kill()

    second = await workers.start().ready()
    await workers.line("waits", pid=second.pid)
    assert not await abandoned.exists(), "the second process has removed what the dead one left"
    (tmp_path / "go").touch()
    assert await bounded(handle.result()) == {"a.txt": f"by {first.pid}", "b.txt": f"by {second.pid}"}

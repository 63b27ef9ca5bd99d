"""kill -9 of workers whose tasks work in files: another worker restores those of the last recorded step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from perdure import App, Producer, Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.programs.sessions import checkout
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
    await (abandoned / "never-recorded.txt").touch()
    first.kill()

    second = await workers.start().ready()
    await workers.line("waits", pid=second.pid)
    folder = (await workers.line("folder", pid=second.pid)).key
    assert folder == str(abandoned), "files may have the path of the folder"
    assert not await (abandoned / "never-recorded.txt").exists(), "what the dead process left was removed"
    (tmp_path / "go").touch()
    assert await bounded(handle.result()) == {"a.txt": f"by {first.pid}", "b.txt": f"by {second.pid}"}


TURNS = 5


async def test_a_git_checkout_with_an_environment_survives_five_turns_with_kills(
    settings: Settings, tmp_path: Path
) -> None:
    """Each turn commits, collects the garbage of git, and is killed before it looks at what is left."""
    outside = tmp_path / "outside.txt"
    outside.write_text("outside")
    environment = {"PERDURE_ARTIFACTS": str(tmp_path / "store"), "PERDURE_WORKSPACES": str(tmp_path / "running")}
    program = PROGRAMS / "sessions" / "checkout.py"
    with worker_processes(settings, tmp_path, program, environment) as workers:
        async with App("checkout", settings=settings) as app:
            session = app.session(app.agent(checkout.Coder, name="coder"), "repository")
            for number in range(1, TURNS + 1):
                turn = await session.send(str(outside))
                first = await workers.start().ready()
                await workers.line("holds", str(number), pid=first.pid)
                first.kill()
                second = await workers.start().ready()
                await workers.line("holds", str(number), pid=second.pid)
                workers.journal.with_name(f"{workers.journal.name}-{number}").touch()
                answer = await bounded(turn.result())
                assert answer.rpartition("\n\n")[2] == str(number)
                second.stop()
                assert await second.ended() == 0
    assert outside.read_text() == "outside"

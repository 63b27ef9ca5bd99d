"""Middleware and lifespan in real worker processes: killed, supervised, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from perdure import Producer
from perdure.worker.settings import Settings

from tests.support.command_line import COMMAND
from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses
from tests.support.workers import BOUND, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PROGRAM = PROGRAMS / "hooked.py"


class Workers:
    """Worker commands of one test. None of their processes outlives it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.journal = WorkerProcesses(settings, folder / "journal")
        self.journal.journal.touch()
        self._environment = os.environ | {
            "JOURNAL": str(self.journal.journal),
            "PERDURE_REDIS_URL": settings.redis_url,
            "PERDURE_NAMESPACE": settings.namespace,
            "PERDURE_LEASE": "1",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [*COMMAND, "worker", "run", f"{PROGRAM}:app", *options]
        self._started.append(
            subprocess.Popen(
                command,
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if environment else None,
                start_new_session=True,
            )
        )
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(BOUND)
            if process.stderr is not None:
                process.stderr.close()


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(settings, tmp_path)
    try:
        yield workers
    finally:
        workers.close()


async def ended(process: subprocess.Popen[bytes]) -> int:
    with anyio.fail_after(BOUND):
        while process.poll() is None:  # noqa: ASYNC110 - only the parent learns of the exit
            await anyio.sleep(0.01)
    return process.returncode


async def test_after_kill_9_the_hooks_of_the_next_worker_see_recorded_steps(
    workers: Workers, settings: Settings, tmp_path: Path
) -> None:
    journal, file = workers.journal, tmp_path / "continue"
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        handle = await producer.enqueue("gated", {"file": str(file)}, queue="hooked")
        first = workers.start("--no-supervisor")
        await journal.line("begin", "continue", pid=first.pid)
        first.kill()
        file.touch()
        second = workers.start("--no-supervisor")
        assert await bounded(handle.result()) == second.pid
        await journal.line("settle-completed", handle.id, pid=second.pid)
    assert [line.what for line in journal.lines(pid=first.pid) if line.key.endswith(":wait")] == ["new"]
    seen = {line.key.partition(":")[2]: line.what for line in journal.lines(pid=second.pid) if ":" in line.key}
    assert seen == {"first": "recorded", "second": "recorded", "wait": "new"}
    assert len(journal.lines("begin", "first")) == 1
    assert not journal.lines("settle-completed", handle.id, first.pid)


async def test_every_process_opens_the_lifespan_once_and_closes_it_on_sigterm_after_its_runs(
    workers: Workers, settings: Settings, tmp_path: Path
) -> None:
    journal, file = workers.journal, tmp_path / "continue"
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        supervisor = workers.start("--processes", "2", "--concurrency", "4")
        await journal.line("opened", "hooked", number=2)
        handles = [await producer.enqueue("gated", {"file": str(file)}, queue="hooked") for _ in range(8)]
        await journal.line("begin", "continue", number=8)
        supervisor.send_signal(signal.SIGTERM)
        file.touch()
        assert await ended(supervisor) == 0
        settled = journal.lines("settle-completed") + journal.lines("settle-released")
        assert {line.key for line in settled} == {handle.id for handle in handles}
    opened = [line.pid for line in journal.lines("opened")]
    assert len(opened) == len(set(opened))
    assert len({line.pid for line in journal.lines("run")}) == 2
    assert {line.pid for line in journal.lines("run")} <= set(opened)
    assert sorted(line.pid for line in journal.lines("closed")) == sorted(opened)
    for pid in opened:
        assert journal.lines(pid=pid)[-1].what == "closed"


async def test_a_lifespan_that_cannot_open_ends_the_worker_with_one_line(workers: Workers) -> None:
    process = workers.start("--no-supervisor", BROKEN="1")
    assert await ended(process) == 1
    assert process.stderr is not None
    text = process.stderr.read().decode()
    assert "could not open the lifespan of app 'hooked': ConnectionRefusedError: no database" in text
    assert "Traceback" not in text
    assert not workers.journal.lines("opened")

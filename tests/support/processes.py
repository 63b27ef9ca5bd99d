"""Worker processes for tests, and the journal file to which they append what they do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest
from perdure import Producer, Settings, TaskHandle

from tests.support.forking import ForkedProcess, fork
from tests.support.paths import PROGRAMS
from tests.support.workers import BOUND

PROGRAM = PROGRAMS / "replica.py"


@dataclass(frozen=True)
class JournalLine:
    """One line of the journal: the process that wrote it, what happened, and the task or step (`id` or `id:step`)."""

    pid: int
    what: str
    key: str


class WorkerProcess:
    """One worker process."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self.pid = process.pid
        self.worker_id = ""

    async def ready(self) -> WorkerProcess:
        """Wait until the worker has joined its queues."""
        with anyio.fail_after(BOUND):
            line = await anyio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        assert line, f"the worker exited with {self.process.wait(BOUND)} before it was ready"
        self.worker_id = line.strip()
        return self

    async def ended(self) -> int:
        """Wait until the process has exited; return the exit code."""
        with anyio.fail_after(BOUND):
            while (code := self.process.poll()) is None:  # noqa: ASYNC110 - asyncio did not start this process
                await anyio.sleep(0.01)
        return code

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        self.process.kill()
        self.process.wait(BOUND)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the process is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process if it runs, and close its pipe."""
        if self.process.poll() is None:
            self.kill()
        self.process.stdout.close()


@dataclass
class WorkerProcesses:
    """Worker processes of one test; `worker_processes` kills them when the test ends."""

    settings: Settings
    journal: Path
    program: Path = PROGRAM
    environment: dict[str, str] = field(default_factory=dict)
    """More environment variables for the processes."""
    processes: list[WorkerProcess] = field(default_factory=list)
    _lines: list[JournalLine] = field(default_factory=list)
    _read: int = 0

    def start(self, *, concurrency: int = 8, **settings: Any) -> WorkerProcess:
        """Start a process without waiting for it; `settings` override those of the test."""
        changed = self.settings.model_copy(update=settings)
        environment = os.environ | {
            "JOURNAL": str(self.journal),
            "PERDURE_REDIS_URL": changed.redis_url,
            "PERDURE_NAMESPACE": changed.namespace,
            "PERDURE_LEASE": str(changed.lease),
            "PERDURE_GRACE": str(changed.grace),
            "PERDURE_PARTITIONS": changed.partitions,
            **self.environment,
        }
        process = fork(self.program, str(concurrency), environment=environment)
        self.processes.append(WorkerProcess(process))
        return self.processes[-1]

    def lines(self, what: str | None = None, key: str | None = None, pid: int | None = None) -> list[JournalLine]:
        """Return the lines written so far, in order, filtered by what happened, by task or step, and by process."""
        with self.journal.open("rb") as journal:
            journal.seek(self._read)
            new = journal.read()
        new = new[: new.rfind(b"\n") + 1]  # without a line that is still being written
        self._read += len(new)
        for text in new.decode().splitlines():
            process, _, rest = text.partition(" ")
            kind, _, subject = rest.rpartition(" ")
            self._lines.append(JournalLine(int(process), kind, subject))
        return [
            line
            for line in self._lines
            if what in (None, line.what) and key in (None, line.key) and pid in (None, line.pid)
        ]

    async def line(self, what: str, key: str | None = None, *, pid: int | None = None, number: int = 1) -> JournalLine:
        """Wait until such a line has been written `number` times; return the last one."""
        with anyio.move_on_after(BOUND):
            while len(found := self.lines(what, key, pid)) < number:  # noqa: ASYNC110 - a file has no event
                await anyio.sleep(0.005)
            return found[number - 1]
        pytest.fail(f"not in the journal: {what} {key} by {pid or 'any process'}; journal:\n{self.journal.read_text()}")


@contextmanager
def worker_processes(
    settings: Settings, folder: Path, program: Path = PROGRAM, environment: dict[str, str] | None = None
) -> Iterator[WorkerProcesses]:
    """Manage the worker processes of one test."""
    workers = WorkerProcesses(settings, folder / "journal", program, environment or {})
    workers.journal.touch()
    try:
        yield workers
    finally:
        for process in workers.processes:
            process.close()


async def push_token(producer: Producer, name: str, value: str = "token") -> None:
    """Push a token, for which one step of the programs waits."""
    key = f"{{{producer.namespace.name}}}:token:{name}"
    await producer.gateway.pipeline([("RPUSH", key, value), ("EXPIRE", key, 600)])


async def recorded(producer: Producer, handle: TaskHandle[Any]) -> set[str]:
    """Return the names of the recorded steps."""
    found = await producer.gateway.command("HKEYS", handle.partition.steps(handle.id))
    return {name.decode().removeprefix("d:") for name in found if name.startswith(b"d:")}

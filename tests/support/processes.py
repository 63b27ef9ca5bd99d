"""Worker processes for tests, and the journal in which they tell what they did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from perdure import Producer, Settings, TaskHandle

from tests.support.paths import PROGRAMS
from tests.support.workers import BOUND

REPLICA = PROGRAMS / "replica.py"


@dataclass(frozen=True)
class Line:
    """One effect: the process it happened in, what it was, and the task or step (`id` or `id:step`)."""

    pid: int
    what: str
    key: str


class Replica:
    """One worker process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.worker_id = ""

    async def ready(self) -> Replica:
        """Wait until it has joined its queues."""
        assert self.process.stdout is not None
        with anyio.fail_after(BOUND):
            line = await anyio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        assert line, f"the replica ended with {self.process.wait(BOUND)} before it was ready"
        self.worker_id = line.strip()
        return self

    async def ended(self) -> int:
        """Wait for its end; returns the exit code."""
        with anyio.fail_after(BOUND):
            while self.process.poll() is None:  # noqa: ASYNC110 - a process tells its end to nobody but its parent
                await anyio.sleep(0.01)
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL: no code of ours runs any more."""
        self.process.kill()
        self.process.wait(BOUND)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP, and return when the process stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Crew:
    """The replicas of one test. Whatever happens in the test, none of them outlives it."""

    settings: Settings
    journal: Path
    program: Path = REPLICA
    environment: dict[str, str] = field(default_factory=dict)
    """What the replicas are told besides."""
    replicas: list[Replica] = field(default_factory=list)
    _lines: list[Line] = field(default_factory=list)
    _read: int = 0

    def start(self, *, concurrency: int = 8, **settings: Any) -> Replica:
        """Start a replica, without waiting for it. settings: in place of the test's."""
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
        process = subprocess.Popen(
            [sys.executable, self.program, str(concurrency)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.replicas.append(Replica(process))
        return self.replicas[-1]

    def lines(self, what: str | None = None, key: str | None = None, pid: int | None = None) -> list[Line]:
        """What the replicas did so far, in order; of one kind, to one task or step, by one process."""
        with self.journal.open("rb") as journal:
            journal.seek(self._read)
            new = journal.read()
        new = new[: new.rfind(b"\n") + 1]  # a line that is being written is read the next time
        self._read += len(new)
        for text in new.decode().splitlines():
            process, _, rest = text.partition(" ")
            kind, _, subject = rest.rpartition(" ")
            self._lines.append(Line(int(process), kind, subject))
        return [
            line
            for line in self._lines
            if what in (None, line.what) and key in (None, line.key) and pid in (None, line.pid)
        ]

    async def line(self, what: str, key: str | None = None, *, pid: int | None = None, number: int = 1) -> Line:
        """Wait until such a line has been written `number` times; returns the last of them."""
        with anyio.move_on_after(BOUND):
            while len(found := self.lines(what, key, pid)) < number:  # noqa: ASYNC110 - a file tells of nothing
                await anyio.sleep(0.005)
            return found[number - 1]
        pytest.fail(f"never happened: {what} {key} by {pid or 'anybody'}; the journal:\n{self.journal.read_text()}")


@contextmanager
def hire(
    settings: Settings, folder: Path, program: Path = REPLICA, environment: dict[str, str] | None = None
) -> Iterator[Crew]:
    """A crew for one test."""
    crew = Crew(settings, folder / "journal", program, environment or {})
    crew.journal.touch()
    try:
        yield crew
    finally:
        for replica in crew.replicas:
            replica.close()


async def give(producer: Producer, name: str, value: str = "token") -> None:
    """Let one step that waits for a token of this name go on."""
    key = f"{{{producer.namespace.name}}}:token:{name}"
    await producer.gateway.pipeline([("RPUSH", key, value), ("EXPIRE", key, 600)])


async def recorded(producer: Producer, handle: TaskHandle[Any]) -> set[str]:
    """The steps whose results Redis holds."""
    found = await producer.gateway.command("HKEYS", handle.partition.steps(handle.id))
    return {name.decode().removeprefix("d:") for name in found if name.startswith(b"d:")}

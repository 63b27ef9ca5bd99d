"""The processes of a run: hosts with workers on them, each with its own line to the server, and producers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from .journal import Pen
from .line import Line
from .options import NAMESPACE, Options
from .versions import ROOT, knows_supervisors

__all__ = ["Fleet", "Keeper"]

_RESTART: Final = 0.3
"""Seconds until a process that ended is started again."""


class Keeper:
    """Keeps one process going: started again whenever it ends, until it is closed."""

    def __init__(self, role: str, number: int, pen: Pen, log: Path) -> None:
        self.role = role
        self.number = number
        self.version = "this"
        self.processes = 0
        """Workers under the supervisor; 0 where it is a plain worker."""
        self.supervisors: frozenset[str] = frozenset()
        """The versions that have one."""
        self.resting = False
        self.once = False
        """Whether it is not started again when it ends at rest."""
        self._pen = pen
        self._log = log
        self._process: Process | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def supervised(self) -> bool:
        """Whether what runs is a supervisor."""
        return bool(self.processes) and self.version in self.supervisors

    @property
    def pid(self) -> int | None:
        """Process id of the running process, if there is one."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def pids(self) -> list[int]:
        """The process and those below it."""
        if self.pid is None:
            return []
        with suppress(psutil.Error):
            return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]
        return [self.pid]

    def keep(self, command: Callable[[Keeper], tuple[list[str], Mapping[str, str]]]) -> None:
        """Start it, and keep it going. command: what to run now, and its environment."""
        self._task = asyncio.create_task(self._keep(command), name=f"{self.role} {self.number}")

    async def _keep(self, command: Callable[[Keeper], tuple[list[str], Mapping[str, str]]]) -> None:
        while not self._closing:
            arguments, environment = command(self)
            with self._log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *arguments, env=environment, cwd=self._log.parent, stdin=DEVNULL, stdout=log, stderr=log
                )
            self._process = process
            self._pen.note(
                "started",
                child=process.pid,
                role=self.role,
                number=self.number,
                version=self.version,
                processes=self.processes,
            )
            code = await process.wait()
            self._pen.note("exited", child=process.pid, role=self.role, code=code, closing=self._closing)
            if self.once and self.resting:
                return
            if not self._closing:
                await asyncio.sleep(_RESTART)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, where it lives."""
        if self.pid is not None:
            os.kill(self.pid, number)

    def rest(self) -> None:
        """SIGTERM, which a producer takes for the end of its work; one that is started from now on begins none."""
        self.resting = True
        self.send(signal.SIGTERM)

    async def ended(self, within: float) -> None:
        """Wait until a resting process has ended, for so many seconds at the most."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within)

    async def close(self) -> None:
        """End it and all below it, for good."""
        self._closing = True
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=10)
            if not done:
                self._task.cancel()


class Fleet:
    """All of them."""

    def __init__(self, options: Options, lines: list[Line], pen: Pen, former: Path | None) -> None:
        """lines: one per host, and one for the producers. former: what PYTHONPATH names for the other version."""
        self._options = options
        self._lines = lines
        self._former = former
        self._pen = pen
        self._newcomers: list[Keeper] = []
        folder = options.journal
        self.hosts = [Keeper("worker", number, pen, folder / "workers.log") for number in range(options.workers)]
        self.producers = [
            Keeper("producer", number, pen, folder / "producers.log") for number in range(options.producers)
        ]
        supervisors = {"this", *(["former"] if former is not None and knows_supervisors(former) else [])}
        for host in self.hosts:
            host.processes = options.processes if host.number % 2 == 0 else 0
            host.supervisors = frozenset(supervisors)
        for one in (*self.hosts, *self.producers):
            if former is not None and one.number % 2:
                one.version = "former"

    @property
    def versions(self) -> list[str]:
        """Those that a host may be given."""
        return ["this"] if self._former is None else ["this", "former"]

    def start(self) -> None:
        for host in self.hosts:
            host.keep(self._worker)
        for producer in self.producers:
            producer.keep(self._producer)

    def start_newcomer(self) -> Keeper:
        """Start one more plain worker, with the line of the producers; it is started until it rests."""
        newcomer = Keeper("worker", len(self.hosts), self._pen, self._options.journal / "workers.log")
        newcomer.once = True
        self._newcomers.append(newcomer)
        newcomer.keep(self._worker)
        return newcomer

    def _worker(self, host: Keeper) -> tuple[list[str], Mapping[str, str]]:
        options = self._options
        environment = self.environment(self._lines[host.number].url, host.version) | {
            "PERDURE_LEASE": str(options.lease),
            "PERDURE_GRACE": str(options.grace),
            "PERDURE_CRASH_THRESHOLD": "8",
            "PERDURE_RESTART_DELAYS": "0.2,0.5,1,2",
            "CHAOS_ROLE": "worker",
            "CHAOS_VERSION": host.version,
        }
        command = [sys.executable, "-m", "perdure.worker.cli", "worker", "run", "tests.chaos.app:app"]
        command += ["--concurrency", "32" if host.number == 0 else "8"]
        if host.supervised:
            command += ["--processes", str(host.processes), "--name", f"chaos-{host.number}"]
        return command, environment

    def _producer(self, producer: Keeper) -> tuple[list[str], Mapping[str, str]]:
        options = self._options
        rate = 0.0 if producer.resting else options.rate / options.producers
        seed = options.seed * 1000 + producer.number
        command = [sys.executable, "-m", "tests.chaos.producer", str(seed), str(rate)]
        return command, self.environment(self._lines[-1].url, producer.version)

    def environment(self, url: str, version: str) -> dict[str, str]:
        """Return the environment of every process of the run."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        path = [str(ROOT)]
        if version == "former":
            path.insert(0, str(self._former))
        return kept | {
            "PYTHONPATH": os.pathsep.join(path),
            "PERDURE_REDIS_URL": url,
            "PERDURE_NAMESPACE": NAMESPACE,
            "CHAOS_FOLDER": str(self._options.journal),
        }

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in [*self.hosts, *self._newcomers, *self.producers]))

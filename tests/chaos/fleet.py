"""The processes of a run: hosts with workers on them, each with its own proxy to the server, and producers."""

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

from .journal import JournalWriter
from .options import NAMESPACE, Options
from .proxy import Proxy
from .versions import ROOT, knows_supervisors

__all__ = ["Fleet", "ManagedProcess"]

_RESTART: Final = 0.3
"""Seconds until a process that exited is started again."""


class ManagedProcess:
    """A process that is started again whenever it exits, until it is closed."""

    def __init__(self, role: str, number: int, journal: JournalWriter, log: Path) -> None:
        self.role = role
        self.number = number
        self.version = "this"
        self.processes = 0
        """Workers under the supervisor; 0 for a plain worker."""
        self.supervisors: frozenset[str] = frozenset()
        """Versions that have supervisors."""
        self.settings: Mapping[str, str] = {}
        """Variables that differ from those of the other workers."""
        self.finishing = False
        self.once = False
        """Whether it is not started again if it exits after `finish`."""
        self._journal = journal
        self._log = log
        self._process: Process | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def supervised(self) -> bool:
        """Whether the running process is a supervisor."""
        return bool(self.processes) and self.version in self.supervisors

    @property
    def pid(self) -> int | None:
        """Process id of the running process, or None."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def pids(self) -> list[int]:
        """Return the ids of the process and its descendants."""
        if self.pid is None:
            return []
        with suppress(psutil.Error):
            return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]
        return [self.pid]

    def keep(self, command: Callable[[ManagedProcess], tuple[list[str], Mapping[str, str]]]) -> None:
        """Start it, and start it again when it exits. command: returns what to run now, and its environment."""
        self._task = asyncio.create_task(self._keep(command), name=f"{self.role} {self.number}")

    async def _keep(self, command: Callable[[ManagedProcess], tuple[list[str], Mapping[str, str]]]) -> None:
        while not self._closing:
            arguments, environment = command(self)
            with self._log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *arguments, env=environment, cwd=self._log.parent, stdin=DEVNULL, stdout=log, stderr=log
                )
            self._process = process
            self._journal.write(
                "started",
                child=process.pid,
                role=self.role,
                number=self.number,
                version=self.version,
                processes=self.processes,
            )
            code = await process.wait()
            self._journal.write("exited", child=process.pid, role=self.role, code=code, closing=self._closing)
            if self.once and self.finishing:
                return
            if not self._closing:
                await asyncio.sleep(_RESTART)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.pid is not None:
            os.kill(self.pid, number)

    def finish(self) -> None:
        """Send SIGTERM: a producer stops enqueueing, and one that is started later enqueues nothing."""
        self.finishing = True
        self.send(signal.SIGTERM)

    async def ended(self, within: float) -> None:
        """Wait until a finishing process has ended, for so many seconds at the most."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within)

    async def close(self) -> None:
        """Kill it and its descendants, and do not start it again."""
        self._closing = True
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=10)
            if not done:
                self._task.cancel()


class Fleet:
    """The processes of a run."""

    def __init__(
        self, options: Options, proxies: list[Proxy], journal: JournalWriter, former: Path | None, direct: str
    ) -> None:
        """Create them.

        Args:
            proxies: One per host, and one for the producers.
            former: PYTHONPATH of the other version.
            direct: URL of the server, for the hosts that no fault hits.
        """
        self._options = options
        self._direct = direct
        self._proxies = proxies
        self._former = former
        self._journal = journal
        self._newcomers: list[ManagedProcess] = []
        folder = options.journal
        self.hosts = [
            ManagedProcess("worker", number, journal, folder / "workers.log") for number in range(options.workers)
        ]
        self.spared = [
            ManagedProcess("worker", options.workers + 1 + number, journal, folder / "workers.log")
            for number in range(options.spared)
        ]
        """Hosts that no fault hits; numbered after a newcomer."""
        self.producers = [
            ManagedProcess("producer", number, journal, folder / "producers.log") for number in range(options.producers)
        ]
        self.pages = ManagedProcess("page", 0, journal, folder / "pages.log")
        """The process of the pages that follow streams."""
        supervisors = {"this", *(["former"] if former is not None and knows_supervisors(former) else [])}
        for host in self.hosts:
            host.processes = options.processes if host.number % 2 == 0 else 0
            host.supervisors = frozenset(supervisors)
        for host in self.spared:
            host.processes, host.supervisors = 1, frozenset({"this"})
        for one in (*self.hosts, *self.producers):
            if former is not None and one.number % 2:
                one.version = "former"

    @property
    def versions(self) -> list[str]:
        """Versions that a host may run."""
        return ["this"] if self._former is None else ["this", "former"]

    def start(self) -> None:
        for host in (*self.hosts, *self.spared):
            host.keep(self._worker)
        for producer in self.producers:
            producer.keep(self._producer)
        self.pages.keep(self._pages)

    def start_newcomer(self) -> ManagedProcess:
        """Start one more plain worker, on the proxy of the producers, until `finish` is called."""
        newcomer = ManagedProcess("worker", len(self.hosts), self._journal, self._options.journal / "workers.log")
        newcomer.once = True
        self._newcomers.append(newcomer)
        newcomer.keep(self._worker)
        return newcomer

    def _worker(self, host: ManagedProcess) -> tuple[list[str], Mapping[str, str]]:
        options = self._options
        url = self._direct if host in self.spared else self._proxies[host.number].url
        environment = self.environment(url, host.version) | {
            "PERDURE_LEASE": str(options.lease),
            "PERDURE_GRACE": str(options.grace),
            "PERDURE_CRASH_THRESHOLD": "8",
            "PERDURE_RESTART_DELAYS": "0.2,0.5,1,2",
            "CHAOS_ROLE": "worker",
            "CHAOS_VERSION": host.version,
            **host.settings,
        }
        command = [sys.executable, "-m", "perdure.worker.cli", "worker", "run", "tests.chaos.app:app"]
        command += ["--concurrency", "32" if host.number == 0 else "8"]
        if host.supervised:
            command += ["--processes", str(host.processes), "--name", f"chaos-{host.number}"]
        elif host.version == "this":  # a former version may not know the option, and then needs none
            command += ["--no-supervisor"]
        return command, environment

    def _producer(self, producer: ManagedProcess) -> tuple[list[str], Mapping[str, str]]:
        options = self._options
        rate = 0.0 if producer.finishing else options.rate / options.producers
        seed = options.seed * 1000 + producer.number
        command = [sys.executable, "-m", "tests.chaos.producer", str(seed), str(rate), options.mix]
        return command, self.environment(self._proxies[-1].url, producer.version)

    def _pages(self, pages: ManagedProcess) -> tuple[list[str], Mapping[str, str]]:
        command = [sys.executable, "-m", "tests.chaos.page", str(self._options.seed)]
        return command, self.environment(self._proxies[-1].url, pages.version)

    def environment(self, url: str, version: str) -> dict[str, str]:
        """Return the environment of a process of the run."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        path = [str(ROOT)]
        if version == "former":
            path.insert(0, str(self._former))
        return kept | {
            "PYTHONPATH": os.pathsep.join(path),
            "PERDURE_REDIS_URL": url,
            "PERDURE_NAMESPACE": NAMESPACE,
            "CHAOS_FOLDER": str(self._options.journal),
            "CHAOS_MIX": self._options.mix,
        }

    async def close(self) -> None:
        await asyncio.gather(
            *(one.close() for one in [*self.hosts, *self.spared, *self._newcomers, *self.producers, self.pages])
        )

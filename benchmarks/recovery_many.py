"""`python -m benchmarks.recovery_many`: recovery of many tasks at once, after a killed worker and after a lost host.

A worker runs n tasks, each in a long step, and is killed with SIGKILL. Measured are the times until the first, the
median and the last task runs again, and how long new tasks wait meanwhile. The tasks stay in their long step after they
were resumed, as agents do.

Four cases: a worker under a supervisor is killed, the supervisor reports the crash, and its spare process takes over;
the spare is killed as well, so that a process has to start; all processes of a host are killed, and another host claims
its tasks after a lease; the same with plain workers, without a supervisor.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import psutil
import typer
from perdure import App, Context, Producer

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.processes import ROOT, Child
from .support.server import own_server, server_line

__all__ = ["app"]

LEASE = 4.0
"""Seconds. The default is longer; recovery of a lost host takes the rest of a lease at any length."""

CONCURRENCY = 160
NEW_TASKS_EACH = 0.02
"""Seconds between two new tasks: some hundred of them are enqueued during a recovery, as a 99th percentile needs."""

_NORMAL = 400
"""New tasks before the kill; the second half of them is compared with those after it."""

_READY_WITHIN = 60.0

app = App("many")


@app.task
async def hold(ctx: Context) -> None:
    """Record one step, then stay in a step that does not end."""
    await ctx.step("first", _nothing)
    print("resumed" if ctx.resumed else "held", time.monotonic(), os.getpid(), flush=True)
    await ctx.step("long", _endless)


@app.task
async def new(ctx: Context, enqueued: float, when: Literal["before", "during"]) -> None:
    """Report how long the task waited, in seconds. when: whether it was enqueued before the kill."""
    print(when, time.monotonic() - enqueued, os.getpid(), flush=True)


async def _nothing() -> None:
    """Do nothing."""


async def _endless() -> None:
    await asyncio.Event().wait()


@dataclass(slots=True)
class Reports:
    """Reports of all workers: when a task was held or resumed (monotonic clock), and how long new tasks waited.

    before, during: waits of tasks that were enqueued before the kill, and after it, in seconds.
    holder: the process that reported last that it holds a task.
    """

    holder: int = 0
    held: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, child: Child) -> None:
        """Collect the reports of a process and its children until it ends."""
        with suppress(RuntimeError):
            while True:
                kind, number, pid = (await child.line(3600)).split()
                getattr(self, kind).append(float(number))
                if kind == "held":
                    self.holder = int(pid)
                self.changed.set()

    async def wait(self, kind: str, count: int, within: float) -> bool:
        """Wait until so many reports of a kind have arrived; return whether they did."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while len(getattr(self, kind)) < count:
                    self.changed.clear()
                    await self.changed.wait()
        return len(getattr(self, kind)) >= count


@dataclass(frozen=True, slots=True)
class Case:
    """One case. supervised: the workers have supervisors. killed: the process with the tasks, all children of its
    supervisor, or the supervisor, too."""

    name: str
    supervised: bool
    killed: Literal["worker", "children", "host"]


CASES = (
    Case("a worker is killed, its supervisor and a spare remain", supervised=True, killed="worker"),
    Case("a worker and the spare are killed, their supervisor remains", supervised=True, killed="children"),
    Case("a host is lost, another remains", supervised=True, killed="host"),
    Case("a plain worker is lost, another remains", supervised=False, killed="host"),
)


@asynccontextmanager
async def _worker(name: str, case: Case, deployment: Deployment, reports: Reports) -> AsyncIterator[psutil.Process]:
    """Start a worker, or a supervisor with one; all of its processes are gone on exit."""
    options = ["--processes", "1", "--name", name] if case.supervised else _PLAIN
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.worker.cli", "worker", "run", f"{__package__}.recovery_many:app"),
        *("--concurrency", str(CONCURRENCY), *options),
        stdout=PIPE,
        cwd=ROOT,
        env={**deployment.environment, "PERDURE_LOG_LEVEL": "ERROR"},
    )
    reading = asyncio.create_task(reports.read(Child(process)))
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            _kill(_tree(psutil.Process(process.pid), whole=True))
        await process.wait()
        reading.cancel()


_PLAIN: list[str] = ["--no-supervisor"]
"""Options of a worker without a supervisor."""


def _tree(process: psutil.Process, *, whole: bool) -> list[int]:
    """Return the processes that a process has started, after itself if the whole host is meant."""
    return [*([process.pid] if whole else []), *(child.pid for child in process.children(recursive=True))]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds after the kill until the tasks ran again, in order; waits of new tasks before and after, in seconds.

    during: the waits of all tasks that were enqueued between the kill and the last resume, also those that ran later.
    """

    resumed: list[float]
    before: list[float]
    during: list[float]


async def _measure(case: Case, count: int, deployment: Deployment, patience: float) -> Recovery:
    reports = Reports()
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        AsyncExitStack() as stack,
    ):
        first = await stack.enter_async_context(_worker("first", case, deployment, reports))
        await producer.enqueue_many("hold", [{}] * count, queue="many")
        if not await reports.wait("held", count, _READY_WITHIN):
            raise RuntimeError(f"only {len(reports.held)} of {count} tasks started")
        if case.killed == "host":
            await stack.enter_async_context(_worker("second", case, deployment, reports))
        before = asyncio.create_task(_feed(producer, "before", []))
        stack.callback(before.cancel)
        if not await reports.wait("before", _NORMAL, _READY_WITHIN):
            raise RuntimeError("new tasks are not run")
        await asyncio.sleep(LEASE * random.uniform(0.0, 0.3))  # at any time between two renewals
        before.cancel()
        normal = reports.before[_NORMAL // 2 :]
        pids = [reports.holder] if case.killed == "worker" else _tree(first, whole=case.killed == "host")
        killed = time.monotonic()
        _kill(pids)
        enqueued: list[str] = []
        during = asyncio.create_task(_feed(producer, "during", enqueued))
        stack.callback(during.cancel)
        await reports.wait("resumed", count, patience)
        during.cancel()
        if not await reports.wait("during", len(enqueued), _READY_WITHIN):
            raise RuntimeError(f"{len(enqueued) - len(reports.during)} of {len(enqueued)} new tasks did not run")
        return Recovery(sorted(at - killed for at in reports.resumed), normal, reports.during)


async def _feed(producer: Producer, when: Literal["before", "during"], enqueued: list[str]) -> None:
    """Enqueue a new task at regular intervals, and list its id."""
    while True:
        arguments = {"enqueued": time.monotonic(), "when": when}
        enqueued.append((await producer.enqueue("new", arguments, queue="many")).id)
        await asyncio.sleep(NEW_TASKS_EACH)


def main(
    counts: Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")] = "1,12,32,64",
    patience: Annotated[float, typer.Option(help="Seconds to wait for the last task.")] = 180.0,
) -> None:
    """Print the seconds until n tasks run again after a worker or a host is lost, and the p99 wait of new tasks."""
    with own_server(fsync=False) as deployment:
        print(origin_line(server_line(deployment)), f"lease {LEASE:g} s", sep="\n")
        for case in CASES:
            print(f"\n{case.name}")
            columns = ("tasks", "resumed", "first", "median", "last", "new before", "new during")
            print(*(f"{column:>10}" for column in columns))
            for count in map(int, counts.split(",")):
                namespace = f"many-{CASES.index(case)}-{count}"
                found = run(_measure(case, count, replace(deployment.within(namespace), lease=LEASE), patience))
                times = found.resumed or [math.nan]
                seconds = (times[0], statistics.median(times), times[-1])
                waits = (f"{1000 * _p99(waited):7.1f} ms" for waited in (found.before, found.during))
                shown = (*(f"{value:10.3f}" for value in seconds), *waits)
                print(f"{count:10} {len(found.resumed):10}", *shown, flush=True)


def _p99(seconds: list[float]) -> float:
    """Return the 99th percentile by nearest rank: the longest of fewer than 100."""
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1] if seconds else math.nan


if __name__ == "__main__":
    typer.run(main)

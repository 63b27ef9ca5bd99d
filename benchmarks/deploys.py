"""`python -m benchmarks.deploys`: deploys of new code under load, with the commands of service managers.

Tasks of three steps are enqueued at a constant rate, before, during and after the deploy. Each step writes to a file
that is not in Redis when it begins and ends. Counted are tasks without a result, steps that ran to their end twice, and
steps that were cut off and ran again. Measured are the longest time in which no step began or ended, and the longest
time that a task waited for its first step.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Final, NamedTuple

import psutil
import typer
from perdure import Producer, TaskHandle

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.processes import ROOT
from .support.server import own_server, server_line

__all__ = ["SCENES", "Outcome", "Scene", "Size", "play"]

PERDURE: Final = (sys.executable, "-m", "perdure.worker.cli")
ECOSYSTEM: Final = ROOT / "deploy" / "pm2" / "ecosystem.config.cjs"
_READY_WITHIN: Final = 90.0
_ENDED_WITHIN: Final = 120.0

APP: Final = """
import os
import time

import anyio
from perdure import App, Context

VERSION = 1
JOURNAL = os.open(os.environ["JOURNAL"], os.O_WRONLY | os.O_APPEND)
app = App("deploys")


@app.task
async def job(ctx: Context, seconds: float) -> None:
    for number in range(3):
        await ctx.step("carry", carry, ctx.task_id, number, seconds)


async def carry(task: str, number: int, seconds: float) -> None:
    write("begins", task, number)
    await anyio.sleep(seconds)
    write("ends", task, number)


def write(what: str, task: str, number: int) -> None:
    os.write(JOURNAL, f"{time.monotonic()} {VERSION} {what} {task} {number}\\n".encode())
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Load of a scene. Times are seconds.

    Args:
        rate: tasks per second. step: duration of a step. before, after: time of load around the deploy.
    """

    rate: float = 20.0
    step: float = 0.5
    before: float = 5.0
    after: float = 5.0


class Line(NamedTuple):
    """A line of the journal: a step begins or ends."""

    time: float
    version: int
    what: str
    task: str
    step: int


@dataclass
class Place:
    """The folder of the app, and the environment of its workers."""

    folder: Path
    deployment: Deployment
    pm2: Path | None = None
    grace: float = 10.0

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def environment(self) -> dict[str, str]:
        settings = {"JOURNAL": str(self.journal), "PERDURE_GRACE": str(self.grace), "PERDURE_LEASE": "15"}
        return {**self.deployment.environment, **settings, "PM2_HOME": str(self.folder / "pm2")}

    def release(self, version: int) -> None:
        """Put new code in place, as an installation or a switched link does: at one moment."""
        new = self.folder / "app.new"
        new.write_text(APP.replace("VERSION = 1", f"VERSION = {version}"))
        new.rename(self.folder / "app.py")

    def lines(self) -> list[Line]:
        words = (line.split() for line in self.journal.read_text().splitlines())
        return [Line(float(at), int(version), what, task, int(step)) for at, version, what, task, step in words]

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start `perdure worker run`."""
        command = [*PERDURE, "worker", "run", "app.py:app", "--concurrency", "32", *options]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stderr=self.log()
        )

    def log(self) -> int:
        return os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


class Fleet(ABC):
    """Workers that a service manager runs, and the deploy of new code."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def deploy(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...


class Reload(Fleet):
    """One supervisor with two workers, and SIGHUP: `ExecReload=` of the systemd unit."""

    async def start(self) -> None:
        self._process = self.place.start("--processes", "2", "--health-port", str(_port(self, 0)))
        await _until_ready(self._port)

    @property
    def _port(self) -> int:
        return _port(self, 0)

    async def deploy(self) -> None:
        old = {child.pid for child in psutil.Process(self._process.pid).children()}
        self._process.send_signal(signal.SIGHUP)
        await _until(lambda: not any(map(psutil.pid_exists, old)), "the end of the old workers")

    async def stop(self) -> None:
        await _terminate(self._process)


class Restart(Reload):
    """The same supervisor, stopped and started again: `systemctl restart`, or a container that is replaced."""

    async def deploy(self) -> None:
        await _terminate(self._process)
        await self.start()


class Pods(Fleet):
    """Three supervisors of one worker each, replaced one after another: a rolling update of a Kubernetes Deployment.

    As with `maxSurge: 1, maxUnavailable: 0`, an old one gets SIGTERM when the new one is ready.
    """

    surge = True

    async def start(self) -> None:
        self._processes = [self._start(number) for number in range(3)]
        for number in range(3):
            await _until_ready(_port(self, number))

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        name = ("--name", f"pod-{number}")
        return self.place.start("--processes", "1", "--health-port", str(_port(self, number)), *name)

    async def deploy(self) -> None:
        for number in range(3):
            old = self._processes[number]
            if not self.surge:
                await _terminate(old)
            self._processes[number] = self._start(number + 3)
            await _until_ready(_port(self, number + 3))
            if self.surge:
                await _terminate(old)

    async def stop(self) -> None:
        await asyncio.gather(*map(_terminate, self._processes))


class PodsInPlace(Pods):
    """The same, each stopped before its successor starts: `maxSurge: 0, maxUnavailable: 1`."""

    surge = False


class Recreated(Pods):
    """Three supervisors, all stopped, then all started: `docker compose up`."""

    async def deploy(self) -> None:
        await self.stop()
        self._processes = [self._start(number + 3) for number in range(3)]
        for number in range(3):
            await _until_ready(_port(self, number + 3))


class Pm2(Fleet):
    """The file for PM2, and `pm2 reload`."""

    async def start(self) -> None:
        port = _port(self, 0)
        config = self.place.folder / "ecosystem.config.cjs"
        changes = {"script": PERDURE[0], "cwd": str(self.place.folder), "env": self.place.environment}
        own = PERDURE[1:]
        config.write_text(
            f"const base = require({json.dumps(str(ECOSYSTEM))});\n"
            f"const app = Object.assign(base.apps[0], {json.dumps(changes)});\n"
            f"app.args = [...{json.dumps(own)}, ...app.args, '--health-port', '{port}'];\n"
            "module.exports = base;\n"
        )
        await self.call("start", str(config))
        await _until_ready(port)

    async def call(self, *arguments: str) -> str:
        """Run pm2. Raises RuntimeError if it fails."""
        if self.place.pm2 is None:
            raise RuntimeError("give --pm2 the path of pm2, which npm installs")
        with TemporaryFile() as output:  # not a pipe: the daemon that the first command starts keeps it open
            process = await asyncio.create_subprocess_exec(
                self.place.pm2,
                *arguments,
                env=self.place.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            code = await process.wait()
            output.seek(0)
            text = output.read().decode()
        if code:
            raise RuntimeError(f"pm2 {' '.join(arguments)}: {text}")
        return text

    async def pid(self) -> int:
        return int((await self.call("pid", "perdure")).split()[-1])

    async def deploy(self) -> None:
        await self.call("reload", "perdure")
        await _until_ready(_port(self, 0))

    async def stop(self) -> None:
        await self.call("kill")


class Pm2Signal(Pm2):
    """The file for PM2, and `pm2 sendSignal SIGHUP`: a rolling reload by the supervisor."""

    async def deploy(self) -> None:
        old = {child.pid for child in psutil.Process(await self.pid()).children()}
        await self.call("sendSignal", "SIGHUP", "perdure")
        await _until(lambda: not any(map(psutil.pid_exists, old)), "the end of the old workers")


class Pm2Kill(Pm2):
    """The file for PM2, and SIGKILL to the supervisor, which PM2 starts again."""

    async def deploy(self) -> None:
        old = await self.pid()
        os.kill(old, signal.SIGKILL)
        await _until(lambda: not psutil.pid_exists(old), "the end of the old supervisor")
        await _until_ready(_port(self, 0))


@dataclass(frozen=True, slots=True)
class Scene:
    """One way to deploy: its name in the table."""

    name: str
    fleet: Callable[[Place], Fleet]


SCENES: Final[Mapping[str, Scene]] = {
    "reload": Scene("systemd: `systemctl reload` (SIGHUP)", Reload),
    "restart": Scene("systemd: `systemctl restart`", Restart),
    "pods": Scene("Kubernetes: rolling update of three pods, `maxSurge: 1`", Pods),
    "pods-in-place": Scene("Kubernetes: the same with `maxUnavailable: 1`", PodsInPlace),
    "compose": Scene("compose: `up` replaces three containers at once", Recreated),
    "pm2-signal": Scene("PM2: `pm2 sendSignal SIGHUP perdure`", Pm2Signal),
    "pm2-reload": Scene("PM2: `pm2 reload perdure`", Pm2),
    "pm2-kill": Scene("PM2: `kill -9` of the supervisor", Pm2Kill),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts and times of a scene. Times are seconds.

    Attributes:
        lost: Tasks that have no result.
        repeated: Steps that ran to their end more than once.
        cut_off: Steps that began again because a stop or a crash had cut them off.
        took: Time of the deploy.
        pause: Longest time in which no step began or ended, from the deploy to the end of the load.
        usual_pause: The same before the deploy.
        wait: Longest time from the enqueueing of a task to its first step.
        by_new_code: Steps that the new code ran.
    """

    scene: str
    tasks: int
    lost: int
    repeated: int
    cut_off: int
    took: float
    pause: float
    usual_pause: float
    wait: float
    by_new_code: int


@dataclass
class _Load:
    """Tasks that are enqueued at a constant rate."""

    producer: Producer
    size: Size
    enqueued: dict[str, float] = field(default_factory=dict)
    handles: list[TaskHandle[None]] = field(default_factory=list)
    until: float = float("inf")

    async def run(self) -> None:
        start = time.monotonic()
        while (now := time.monotonic()) < self.until:
            while len(self.handles) < (now - start) * self.size.rate:
                called = time.monotonic()
                handle = await self.producer.enqueue("job", {"seconds": self.size.step}, queue="deploys")
                self.enqueued[handle.id] = called
                self.handles.append(handle)
            await asyncio.sleep(1 / self.size.rate)


async def play(scene: str, size: Size, deployment: Deployment, pm2: Path | None = None) -> Outcome:
    """Play a scene in an empty namespace.

    Raises:
        RuntimeError: Workers or pm2 did not do what the scene needs; the text has the end of their log.
    """
    with TemporaryDirectory(prefix="perdure-deploys-") as name:
        place = Place(Path(name), deployment.within(scene), pm2)
        place.journal.touch()
        place.release(1)
        fleet = SCENES[scene].fleet(place)
        try:
            async with Producer(deployment.url, namespace=place.deployment.namespace) as producer:
                await fleet.start()
                try:
                    return await _measure(scene, fleet, place, _Load(producer, size))
                finally:
                    await fleet.stop()
        except (RuntimeError, TimeoutError, psutil.Error) as error:
            log = place.folder / "log"
            text = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            raise RuntimeError(f"{scene}: {error!r}\n{text}") from error
        finally:
            place.deployment.purge()


async def _measure(scene: str, fleet: Fleet, place: Place, load: _Load) -> Outcome:
    async with _running(load):
        await asyncio.sleep(load.size.before)
        place.release(2)
        began = time.monotonic()
        await fleet.deploy()
        ended = time.monotonic()
        load.until = ended + load.size.after
        await asyncio.sleep(load.size.after)
    lost = 0
    deadline = time.monotonic() + _ENDED_WITHIN
    for handle in load.handles:
        try:
            await handle.result(timeout=max(0.01, deadline - time.monotonic()))
        except Exception:  # noqa: BLE001 - a task without a result is lost, whatever the error
            lost += 1
    lines = place.lines()
    begins = Counter((line.task, line.step) for line in lines if line.what == "begins")
    ends = Counter((line.task, line.step) for line in lines if line.what == "ends")
    first: dict[str, float] = {}
    for line in lines:
        first.setdefault(line.task, line.time)
    usual = [line.time for line in lines if line.time < began][len(lines) // 20 :]
    during = [began, *(line.time for line in lines if began <= line.time <= load.until), load.until]
    return Outcome(
        scene,
        tasks=len(load.handles),
        lost=lost,
        repeated=sum(count > 1 for count in ends.values()),
        cut_off=sum(count > 1 for step, count in begins.items() if ends[step] <= 1),
        took=ended - began,
        pause=_longest(during),
        usual_pause=_longest(usual),
        wait=max(first[task] - at for task, at in load.enqueued.items() if task in first),
        by_new_code=sum(line.version == 2 for line in lines if line.what == "ends"),
    )


@asynccontextmanager
async def _running(load: _Load) -> AsyncIterator[None]:
    task = asyncio.create_task(load.run())
    try:
        yield
        await task
    finally:
        task.cancel()


def _longest(times: Sequence[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def _port(fleet: Fleet, number: int) -> int:
    """Return a free port, the same for the same number of a fleet."""
    ports: dict[int, int] = fleet.__dict__.setdefault("_ports", {})
    if number not in ports:
        with socket.create_server(("127.0.0.1", 0)) as found:
            ports[number] = found.getsockname()[1]
    return ports[number]


async def _until_ready(port: int) -> None:
    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    await _until(ready, "a ready worker")


async def _until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _READY_WITHIN
    while not await asyncio.to_thread(done):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of {what} within {_READY_WITHIN:g} s")
        await asyncio.sleep(0.05)


async def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    code = await asyncio.to_thread(process.wait, _READY_WITHIN)
    if code:
        raise RuntimeError(f"perdure worker run exited with {code}")


_HEAD: Final = (
    "deploy",
    "tasks",
    "lost",
    "recorded steps repeated",
    "steps cut off",
    "longest pause",
    "before it",
    "longest wait of a task",
    "it took",
)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    rows = [
        (
            SCENES[outcome.scene].name,
            str(outcome.tasks),
            str(outcome.lost),
            str(outcome.repeated),
            str(outcome.cut_off),
            *(f"{seconds:.2f} s" for seconds in (outcome.pause, outcome.usual_pause, outcome.wait, outcome.took)),
        )
        for outcome in outcomes
    ]
    right = ["---", *["---:"] * (len(_HEAD) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (_HEAD, right, *rows))


def main(
    scenes: Annotated[list[str] | None, typer.Argument(help=f"Some of: {', '.join(SCENES)}. Default: all.")] = None,
    *,
    rate: Annotated[float, typer.Option(help="Tasks per second.")] = 20.0,
    pm2: Annotated[Path | None, typer.Option(help="Path of pm2. Default: the one of PATH.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Deploy new code under load, in the ways of several service managers, and print what became of the tasks."""
    found = pm2 or (Path(path) if (path := shutil.which("pm2")) else None)
    wanted = scenes or [name for name in SCENES if found is not None or not name.startswith("pm2")]
    if unknown := set(wanted) - set(SCENES):
        raise typer.BadParameter(f"no scene {', '.join(sorted(unknown))}; there are {', '.join(SCENES)}")
    with own_server(fsync=True) as deployment:
        where = origin_line(server_line(deployment))
        outcomes = []
        for name in wanted:
            outcomes.append(run(play(name, Size(rate=rate), deployment, found)))
            print(outcomes[-1], file=sys.stderr)
    print(json.dumps([asdict(outcome) for outcome in outcomes]) if as_json else f"{table(outcomes)}\n\n{where}")
    if any(outcome.lost or outcome.repeated or not outcome.by_new_code for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

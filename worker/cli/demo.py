"""`perdure demo`: kill workers of a task on real files, replay a dead letter, and count the evidence.

The worker processes run this module. Each run of a step writes a line into a journal, a file outside of Redis, before
it does anything else. A kill cuts off the step that its worker logged last, which may have been recorded in the instant
before; so each kill allows one further run of that step, and of no other.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import anyio.to_thread
import orjson
import typer

from ...deadletter.letters import DeadLetter, count_letters, find_letter
from ...deadletter.policy import Retry
from ...deadletter.replay import Replay, replay
from ...queues.embedded.control import stop
from ...queues.errors import TaskFailed
from ...queues.handle import TaskHandle
from ...queues.presence import list_workers
from ..app import App
from ..durable.context import Context
from ..durable.steps.current import current_step
from ..journal.state import Artifact
from ..log import configure_process_log
from ..runtime.worker import Worker
from .support.connection import warn_of_password
from .support.errors import Failed
from .support.output import AsJson, note, print_fields, print_json, print_table, print_text, stdout
from .support.temporary import run_interruptible, temporary_namespace

MAX_KILLS: Final = 20
LEASE: Final = 1.5
"""Lease of the workers in seconds."""
_TAKEOVER_LIMIT: Final = LEASE + 5.0
"""Seconds within which another worker must resume the task of a killed one."""
_ATTEMPTS: Final = 3
_WORKERS: Final = 2
_FILES_PER_KILL: Final = 10
"""With fewer files, the task could end before the last kill."""
_STEP_PAUSE: Final = 0.03
"""Seconds that a step waits for each file, as for a call to a model. They leave time for the kills."""
_MAX_FILE_SIZE: Final = 16 << 20
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages"})
_JOURNAL: Final = "DEMO_JOURNAL"

app = App("demo")


def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to report on. Default: the standard library of this Python.")
    ] = None,
    *,
    files: Annotated[int, typer.Option(min=1, metavar="N", help="Report on at most N files, evenly spread.")] = 300,
    kills: Annotated[
        int, typer.Option(min=1, max=MAX_KILLS, metavar="N", help="Kill N workers, but at most one for ten files.")
    ] = 3,
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this server, in a new namespace that is removed at the end; see 'perdure enqueue --help' about "
            "passwords. Default: a new embedded server.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Kill workers and replay a dead letter, on real files.

    One task reports on the files of a folder, each file in its own step,
    while its workers are killed with SIGKILL at random moments. A second task
    fails until it is a dead letter, and is replayed. At the end, the demo
    counts the evidence; exit code 1 means that a claim does not hold.

    Example: perdure demo src --kills 5
    """
    warn_of_password("--redis-url", redis_url, "PERDURE_REDIS_URL")
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder.absolute()
    found = list_files(str(root), files)
    if not found:
        raise Failed(f"FOLDER must be a folder with readable files, got {str(folder)!r}")
    possible = max(1, len(found) // _FILES_PER_KILL)
    evidence, letter, output = run_interruptible(partial(run_demo, str(root), found, min(kills, possible), redis_url))
    claims, takeovers = evidence.claims(), evidence.takeovers()
    broken = [claim for claim in claims if not claim.holds]
    if json:
        shown = letter.summary() | {"kept": evidence.kept}
        print_json(
            {"holds": not broken, "report": str(output), "kills": takeovers, "dead_letter": shown, "evidence": claims}
        )
    else:
        print_text(f"One task of {evidence.steps:,} steps, with a step for each file, reported on: {root}\n")
        rows = [
            (str(kill.killed), f"{kill.started:,}", kill.subject[-24:], str(kill.resumed_by or "none"), kill.after)
            for kill in takeovers
        ]
        print_table(("Killed worker", "In step#", "File", "Resumed by", "After#"), rows)
        print_text(f"Another worker claims the task when its lease of {LEASE:g} s ends.\n")
        print_fields(
            {
                "dead letter": f"{letter.id}, task {letter.task}",
                "reason": f"{letter.reason}: {letter.attempts} attempts, {letter.crashes} crashes",
                "error": f"{letter.error}: {letter.message}",
                "kept": f"recorded steps: {', '.join(evidence.kept)}",
            }
        )
        print_text("")
        verdicts = {True: "yes", False: "NO"}
        print_table(
            ("Evidence", "Counted#", "Allowed", "Counted from", "Holds"),
            [(claim.statement, claim.shown, claim.allowed, claim.source, verdicts[claim.holds]) for claim in claims],
        )
        text = f"All {len(claims)} claims hold."
        if broken:
            failed = "; ".join(f"{claim.statement}: {claim.shown}, allowed {claim.allowed}" for claim in broken)
            text = f"{len(broken)} of {len(claims)} claims do not hold: {failed}"
        stdout().print(text, style="bold red" if broken else "bold green", markup=False)
        print_text(f"Report: {output}")
    if broken:
        raise typer.Exit(1)


async def run_demo(
    root: str, files: list[str], kills: int, redis_url: str | None
) -> tuple[DemoEvidence, DeadLetter, Path]:
    """Run the demo. Return the evidence, the dead letter, and the path of the report, the only file that is left."""
    killed, steps = list[Kill](), len(files) + 2
    async with _started_workers(redis_url) as workers:
        note(f"reporting on {len(files):,} files in {steps:,} steps, killing {kills} workers")
        reported = await report.enqueue(root, len(files))
        async with anyio.create_task_group() as group:
            group.start_soon(_kill_workers, workers, reported.id, steps, kills, killed)
            try:
                artifact = await reported.result()
            except TaskFailed as error:
                raise Failed(f"could not finish the report: {error}") from error
            group.cancel_scope.cancel()
        note("making the same report without workers")
        # One call per file in a thread, so that Ctrl-C interrupts between two files.
        rows = [await anyio.to_thread.run_sync(count_file, root, path, abandon_on_cancel=True) for path in files]

        note(f"publishing the report in a missing folder: {_ATTEMPTS} attempts, then a dead letter")
        site = workers.journal.with_name("site")
        published = await publish.enqueue(artifact, str(site))
        with suppress(TaskFailed):
            await published.result(timeout=30)
        gateway, partitions = app.producer.gateway, [published.partition]
        letter = await find_letter(gateway, partitions, published.id)
        if letter is None:
            raise Failed(f"task {published.id} must become a dead letter, got none")
        kept = await _completed_steps(published)
        site.mkdir()
        await replay(gateway, letter, Replay())
        await published.result(timeout=30)
        evidence = DemoEvidence(
            steps=steps,
            planned_kills=kills,
            kills=killed,
            runs=read_step_runs(workers.journal, reported.id),
            crashes=(await reported.record()).crashes,
            completed=await _completed_steps(reported),
            expected_sha256=hashlib.sha256(render(root, rows).encode()).hexdigest(),
            published_sha256=hashlib.sha256((site / "report.txt").read_bytes()).hexdigest(),
            attempts=letter.attempts,
            kept=kept,
            publish_runs=read_step_runs(workers.journal, published.id),
            letters=await count_letters(gateway, partitions),
        )
        output = Path(tempfile.gettempdir(), f"perdure-demo-{secrets.token_hex(4)}.txt")
        shutil.copyfile(site / "report.txt", output)
        note("stopping the workers and removing the keys")
    return evidence, letter, output


async def _completed_steps(handle: TaskHandle[Any]) -> list[str]:
    return [event.step async for event in handle.events(follow=False) if event.type == "step_completed" and event.step]


@app.task(queue=app.name, retry=Retry(max_attempts=1, max_crashes=MAX_KILLS))
async def report(ctx: Context, root: str, limit: int) -> Artifact:
    """Report on the files of a folder, with one step per file."""
    files = await ctx.step("list", _list, root, limit)
    rows = [await ctx.step("count", _count, root, path) for path in files]

    async def save() -> Artifact:
        _log_step_run()
        return await ctx.artifacts.save("report.txt", render(root, rows))

    return await ctx.step("save", save)


def _list(root: str, limit: int) -> list[str]:
    _log_step_run()
    return list_files(root, limit)


def _count(root: str, path: str) -> str:
    _log_step_run(path)
    time.sleep(_STEP_PAUSE)
    return count_file(root, path)


@app.task(queue=app.name, retry=Retry(max_attempts=_ATTEMPTS, base=0.25))
async def publish(ctx: Context, text: Artifact, site: str) -> None:
    """Copy a report to a folder, beside its checksum. Fails while the folder does not exist."""
    path = str(await ctx.artifacts.path(text))
    checksum = await ctx.step("checksum", _checksum, path)
    await ctx.step("publish", _publish, path, site, checksum)


def _checksum(path: str) -> str:
    _log_step_run()
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _publish(path: str, site: str, checksum: str) -> None:
    _log_step_run()
    Path(site, "report.sha256").write_text(f"{checksum}  report.txt\n", encoding="utf-8")
    Path(site, "report.txt").write_bytes(Path(path).read_bytes())


def list_files(root: str, limit: int) -> list[str]:
    """Return at most `limit` files below a folder, evenly spread: sorted POSIX paths relative to it.

    Leaves out hidden folders, `__pycache__`, `site-packages`, linked folders, unreadable files, files over 16 MiB, and
    names that are not printable or not UTF-8.
    """
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in _SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in names)
        readable = [path for path in paths if os.access(path, os.R_OK) and path.is_file()]
        found += [path.relative_to(root).as_posix() for path in readable if path.stat().st_size <= _MAX_FILE_SIZE]
    found = sorted(path for path in found if path.isprintable())
    taken = min(limit, len(found))
    return [found[index * len(found) // taken] for index in range(taken)]


def count_file(root: str, path: str) -> str:
    """Return the report's row for one file."""
    data = Path(root, path).read_bytes()
    digest, lines = hashlib.sha256(data).hexdigest(), data.count(b"\n")
    return f"{digest}  {lines:>9,}  {len(data.split()):>9,}  {len(data):>10,}  {path}"


def render(root: str, rows: Sequence[str]) -> str:
    """Return the text of the report. Equal rows give equal text."""
    head = f"{'SHA-256':<64}  {'lines':>9}  {'words':>9}  {'bytes':>10}  path"
    return "\n".join((f"{len(rows):,} files of {root!r}", head, *rows, ""))


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run of a step. at: seconds of the machine's monotonic clock. subject: the file it works on, or empty."""

    at: float
    pid: int
    task: str
    step: str
    subject: str = ""


def _log_step_run(subject: str = "") -> None:
    """Write the line of the current step. One write to a file opened for appending: lines of processes never mix."""
    task, _, step = current_step().idempotency_key.partition(":")
    with Path(os.environ[_JOURNAL]).open("ab", buffering=0) as file:
        file.write(orjson.dumps([time.monotonic(), os.getpid(), task, step, subject]) + b"\n")


def read_step_runs(path: Path, task: str) -> list[StepRun]:
    """Return the runs of one task's steps, leaving out a line that is not yet complete."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [run for run in (StepRun(*orjson.loads(line)) for line in lines) if run.task == task]


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL. at: seconds of the machine's monotonic clock. status: the exit status that the system reported."""

    at: float
    pid: int
    status: int


@dataclass(slots=True)
class WorkerProcesses:
    """Worker processes with the same settings and journal. They log to the demo's stderr."""

    settings: Mapping[str, object]
    journal: Path
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> int:
        """Start a process and return its id, without waiting until it is ready."""
        # In its own session: Ctrl-C reaches the demo only, which then kills its workers. The kernel closes their
        # standard input when the demo ends, so no worker outlives it.
        command = [sys.executable, "-m", __name__]
        # Of the user's settings, the workers keep the encryption keys only.
        kept = {name: value for name, value in os.environ.items() if name[:8] != "PERDURE_" or "ENCRYPTION" in name}
        given = {f"PERDURE_{name.upper()}": str(value) for name, value in self.settings.items()}
        environment = kept | given | {_JOURNAL: str(self.journal)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        self.running[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> Kill:
        """Send SIGKILL to a process and wait for its exit status."""
        with self.running.pop(pid) as process:
            process.send_signal(signal.SIGKILL)
            return Kill(time.monotonic(), pid, process.wait())

    def kill_all(self) -> None:
        """Kill all processes that still run."""
        for pid in list(self.running):
            self.kill(pid)

    def check(self) -> None:
        """Raise `Failed` if a process exited without being killed."""
        for pid, process in self.running.items():
            if process.poll() is not None:
                raise Failed(f"could not continue the demo: worker {pid} exited with status {process.returncode}")


@asynccontextmanager
async def _started_workers(redis_url: str | None) -> AsyncIterator[WorkerProcesses]:
    """Start workers on the given server, or on a new embedded one. On exit, remove all but the report."""
    note(f"starting {_WORKERS} workers")
    folder = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
    settings: dict[str, Any] = {
        "redis_url": redis_url or "embedded:",
        "data_dir": folder / "data",
        "artifacts": str(folder / "artifacts"),
        "lease": LEASE,
        "log_level": "ERROR",
        "log_json": False,
    }
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        cleanup.callback(stop, folder / "data", force=True)
        namespace = await cleanup.enter_async_context(temporary_namespace(app, app.name, **settings))
        workers = WorkerProcesses(settings | {"namespace": namespace.name}, folder / "journal")
        cleanup.callback(workers.kill_all)
        for _ in range(_WORKERS):
            workers.start()
        while len(await list_workers(app.producer.gateway, namespace)) < _WORKERS:
            workers.check()
            await anyio.sleep(0.05)
        yield workers


async def _kill_workers(workers: WorkerProcesses, task: str, steps: int, count: int, kills: list[Kill]) -> None:
    """Kill `count` workers of a task at random moments of its first steps, and replace each. Runs until cancelled."""
    due = sorted(random.sample(range(1, steps * 4 // 5 + 1), count))
    while True:
        workers.check()
        runs = read_step_runs(workers.journal, task)
        if due and runs and runs[-1].pid in workers.running and len({run.step for run in runs}) >= due[0]:
            await anyio.sleep(random.uniform(0, _STEP_PAUSE))  # noqa: S311 - not a secret
            kills.append(workers.kill(runs[-1].pid))
            workers.start()
            note(f"killed worker {kills[-1].pid} in step {runs[-1].step}")
            del due[0]
        await anyio.sleep(0.004)


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement that must hold. counted: None if there was nothing to count. source: where it was counted."""

    id: str
    statement: str
    counted: int | float | str | None
    allowed: str
    source: str
    holds: bool

    @property
    def shown(self) -> str:
        return _shown(self.counted)


@dataclass(frozen=True, slots=True)
class Takeover:
    """One kill and the next step run by another worker, if there was one.

    started: steps started until the kill. subject: the file of the killed worker's last step, or empty.
    """

    killed: int
    started: int
    subject: str
    resumed_by: int | None
    seconds: float | None

    @property
    def after(self) -> str:
        return _shown(self.seconds)


def _shown(counted: int | float | str | None) -> str:
    if isinstance(counted, int):
        return f"{counted:,}"
    return f"{counted:.2f} s" if isinstance(counted, float) else (counted or "none")[:8]


@dataclass(frozen=True, slots=True)
class DemoEvidence:
    """Observations of one run: of the journal (`runs`, `publish_runs`), the record, the event log and the files."""

    steps: int
    planned_kills: int
    kills: Sequence[Kill]
    runs: Sequence[StepRun]
    crashes: int
    completed: Sequence[str]
    expected_sha256: str
    published_sha256: str
    attempts: int
    kept: Sequence[str]
    publish_runs: Sequence[StepRun]
    letters: int

    def takeovers(self) -> list[Takeover]:
        """Return what followed each kill."""
        found = []
        for kill in self.kills:
            started = len({run.step for run in self.runs if run.at <= kill.at})
            subject = next((run.subject for run in reversed(self.runs) if run.pid == kill.pid), "")
            after = next((run for run in self.runs if run.at > kill.at and run.pid != kill.pid), None)
            resumed = (after.pid, round(after.at - kill.at, 3)) if after else (None, None)
            found.append(Takeover(kill.pid, started, subject, *resumed))
        return found

    def claims(self) -> list[Claim]:
        """Return all claims with their verdicts."""
        last = {run.pid: run.step for run in self.runs}
        killed = sum(kill.status == -signal.SIGKILL and kill.pid in last for kill in self.kills)
        once = sum(count == 1 for count in Counter(self.completed).values())
        cut_off = Counter(last[kill.pid] for kill in self.kills if kill.pid in last)
        most, again = f"up to {cut_off.total()}", Counter(run.step for run in self.runs)
        again.subtract(set(again))
        seconds = [takeover.seconds for takeover in self.takeovers() if takeover.seconds is not None]
        slowest = max(seconds) if seconds and len(seconds) == len(self.kills) else None
        in_time, limit = slowest is not None and slowest < _TAKEOVER_LIMIT, f"under {_TAKEOVER_LIMIT:g} s"
        kept = Counter(run.step for run in self.publish_runs if run.step in self.kept)
        kept_again = kept.total() - len(kept) if self.kept and len(kept) == len(self.kept) else None
        return [
            _equal("killed", "Workers killed by SIGKILL", killed, self.planned_kills, "exit status"),
            _equal("crashes", "Crashes counted", self.crashes, len(self.kills), "task record"),
            _equal("completed", "Steps recorded once", once, self.steps, "event log"),
            Claim("repeated", "Steps run again", again.total(), most, "journal", again <= cut_off),
            Claim("takeover", "Slowest kill to next step", slowest, limit, "journal", in_time),
            _equal("attempts", "Attempts until dead letter", self.attempts, _ATTEMPTS, "dead letter"),
            _equal("kept_repeated", "Kept steps run again", kept_again, 0, "journal"),
            _equal("published", "Report, SHA-256", self.published_sha256, self.expected_sha256, "file"),
            _equal("letters", "Dead letters left", self.letters, 0, "dead letters"),
        ]


def _equal(claim: str, statement: str, counted: int | str | None, expected: int | str, source: str) -> Claim:
    return Claim(claim, statement, counted, str(expected)[:8], source, counted == expected)


async def _work() -> None:
    """Run tasks until standard input ends."""
    configure_process_log(app.settings.log_level)
    async with Worker(app, concurrency=1) as worker, anyio.create_task_group() as group:
        group.start_soon(worker.run)
        await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        worker.stop()


if __name__ == "__main__":
    anyio.run(_work)

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
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Any, Final, NamedTuple, ParamSpec, TypeVar

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
from ..agents.journal.state import Artifact
from ..app import App
from ..context import Context
from ..durable.steps.current import current_step
from ..log import configure_process_log
from ..runtime.worker import Worker
from .support.connection import warn_of_password
from .support.errors import Failed
from .support.output import AsJson, note, print_json, print_table, print_text
from .support.temporary import run_interruptible, temporary_namespace

P = ParamSpec("P")
R = TypeVar("R")

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
"""Seconds that a step waits, as for a call to a model. They leave time for the kills."""
_MAX_FILE_SIZE: Final = 16 << 20
_SKIPPED_FOLDERS: Final = ("__pycache__", "site-packages")
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
    root = str(sysconfig.get_path("stdlib") if folder is None else folder.absolute())
    if not (found := list_files(root, files)):
        raise Failed(f"FOLDER must be a folder with readable files, got {str(folder)!r}")
    possible = max(1, len(found) // _FILES_PER_KILL)
    evidence, letter, output = run_interruptible(partial(run_demo, root, found, min(kills, possible), redis_url))
    claims = evidence.claims()
    broken = [f"{claim.statement}: {claim.shown}, allowed {claim.allowed}" for claim in claims if not claim.holds]
    if json:
        dead = letter.summary() | {"kept": evidence.kept}
        seen = {"report": str(output), "kills": evidence.takeovers(), "dead_letter": dead}
        print_json({"holds": not broken, **seen, "evidence": [claim._asdict() for claim in claims]})
    else:
        print_text(f"One task of {evidence.steps:,} steps, with a step for each file, reported on: {root}")
        print_text(f"Another worker claimed it when the lease of {LEASE:g} s of a killed worker had ended.")
        print_text(f"Dead letter {letter.id}: {letter.error}: {letter.message}\n")
        verdicts = {True: "yes", False: "NO"}
        rows = [(claim.statement, claim.shown, claim.allowed, claim.source, verdicts[claim.holds]) for claim in claims]
        print_table(("Evidence", "Counted#", "Allowed", "Counted from", "Holds"), rows)
        failed = f"{len(broken)} of {len(claims)} claims do not hold: {'; '.join(broken)}"
        print_text(f"\n{failed if broken else f'All {len(claims)} claims hold.'}\nReport: {output}")
    if broken:
        raise typer.Exit(1)


async def run_demo(
    root: str, files: list[str], kills: int, redis_url: str | None
) -> tuple[DemoEvidence, DeadLetter, Path]:
    """Run the demo. Return the evidence, the dead letter, and the path of the report, the only file that is left."""
    killed, steps = list[Kill](), len(files) + 2
    async with _started_workers(redis_url, killed) as journal:
        note(f"reporting on {len(files):,} files in {steps:,} steps, killing {kills} workers")
        reported = await report.enqueue(root, len(files))
        async with anyio.create_task_group() as group:
            group.start_soon(_kill_workers, journal, reported.id, steps, kills)
            artifact = await reported.result()
            group.cancel_scope.cancel()
        note("making the same report without workers")
        # One call per file in a thread, so that Ctrl-C interrupts between two files.
        rows = [await anyio.to_thread.run_sync(describe, root, path, abandon_on_cancel=True) for path in files]

        note(f"publishing the report in a missing folder: {_ATTEMPTS} attempts, then a dead letter")
        site = journal.with_name("site")
        published = await publish.enqueue(artifact, str(site))
        with suppress(TaskFailed):
            await published.result(timeout=30)
        gateway, partitions = app.producer.gateway, [published.partition]
        if (letter := await find_letter(gateway, partitions, published.id)) is None:
            raise Failed(f"task {published.id} must become a dead letter, got none")
        kept = await _completed_steps(published)
        site.mkdir()
        await replay(gateway, letter, Replay())
        await published.result(timeout=30)
        evidence = DemoEvidence(
            steps=steps,
            planned_kills=kills,
            kills=killed,
            runs=read_step_runs(journal, reported.id),
            crashes=(await reported.record()).crashes,
            completed=await _completed_steps(reported),
            expected_sha256=hashlib.sha256(render(root, rows).encode()).hexdigest(),
            published_sha256=_checksum(site / "report.txt"),
            attempts=letter.attempts,
            kept=kept,
            publish_runs=read_step_runs(journal, published.id),
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
    files = await ctx.step("list", _logged(list_files), root, limit)
    rows = [await ctx.step("describe", _logged(_describe_slowly), root, path) for path in files]

    async def save() -> Artifact:
        return await _logged(ctx.artifacts.save)("report.txt", render(root, rows))

    return await ctx.step("save", save)


@app.task(queue=app.name, retry=Retry(max_attempts=_ATTEMPTS, base=0.25))
async def publish(ctx: Context, text: Artifact, site: str) -> None:
    """Copy a report to a folder, beside its checksum. Fails while the folder does not exist."""
    path = await ctx.artifacts.path(text)
    checksum = await ctx.step("checksum", _logged(_checksum), path)
    await ctx.step("publish", _logged(_publish), path, Path(site), checksum)


def _describe_slowly(root: str, path: str) -> str:
    time.sleep(_STEP_PAUSE)
    return describe(root, path)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _publish(path: Path, site: Path, checksum: str) -> None:
    (site / "report.sha256").write_text(f"{checksum}  report.txt\n", encoding="utf-8")
    shutil.copyfile(path, site / "report.txt")


def list_files(root: str, limit: int) -> list[str]:
    """Return at most `limit` files below a folder, evenly spread: sorted POSIX paths relative to it.

    Leaves out hidden folders, `__pycache__`, `site-packages`, linked folders, unreadable files, files over 16 MiB, and
    names that are not printable or not UTF-8.
    """
    found: list[str] = []
    for path in Path(root).rglob("*"):
        name = path.relative_to(root).as_posix()
        skipped = any(folder[0] == "." or folder in _SKIPPED_FOLDERS for folder in name.split("/")[:-1])
        readable = not skipped and name.isprintable() and path.is_file() and os.access(path, os.R_OK)
        if readable and path.stat().st_size <= _MAX_FILE_SIZE:
            found.append(name)
    found.sort()
    taken = min(limit, len(found))
    return [found[index * len(found) // taken] for index in range(taken)]


def describe(root: str, path: str) -> str:
    """Return the report's row for one file."""
    data = Path(root, path).read_bytes()
    return f"{hashlib.sha256(data).hexdigest()}  {len(data.split()):>9,}  {len(data):>10,}  {path}"


def render(root: str, rows: Sequence[str]) -> str:
    """Return the text of the report. Equal rows give equal text."""
    return "\n".join((f"{len(rows):,} files of {root!r}: SHA-256, words, bytes, path", *rows, ""))


class StepRun(NamedTuple):
    """One run of a step. at: seconds of the machine's monotonic clock."""

    at: float
    pid: int
    task: str
    step: str


def _logged(work: Callable[P, R]) -> Callable[P, R]:
    """Return a function that writes the line of the current step into the journal, and then does the work."""

    @wraps(work)
    def log_and_work(*args: P.args, **kwargs: P.kwargs) -> R:
        task, _, step = current_step().idempotency_key.partition(":")
        # One write to a file that is opened for appending: the lines of several processes never mix.
        with Path(os.environ[_JOURNAL]).open("ab", buffering=0) as file:
            file.write(orjson.dumps([time.monotonic(), os.getpid(), task, step]) + b"\n")
        return work(*args, **kwargs)

    return log_and_work


def read_step_runs(path: Path, task: str) -> list[StepRun]:
    """Return the runs of one task's steps, leaving out a line that is not yet complete."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [run for run in (StepRun(*orjson.loads(line)) for line in lines) if run.task == task]


class Kill(NamedTuple):
    """One SIGKILL. at: seconds of the machine's monotonic clock. status: the exit status that the system reported."""

    at: float
    pid: int
    status: int


@asynccontextmanager
async def _started_workers(redis_url: str | None, killed: list[Kill]) -> AsyncIterator[Path]:
    """Start workers on the given server, or on a new embedded one; yield their journal. Remove all on exit."""
    note(f"starting {_WORKERS} workers")
    with ExitStack() as cleanup:
        temporary = tempfile.TemporaryDirectory(prefix="perdure-demo-", ignore_cleanup_errors=True)
        folder = Path(cleanup.enter_context(temporary))
        cleanup.callback(stop, folder / "data", force=True)
        settings: dict[str, Any] = {"redis_url": redis_url or "embedded:", "lease": LEASE, "log_level": "ERROR"}
        settings |= {"data_dir": folder / "data", "artifacts": str(folder / "artifacts"), "log_json": False}
        async with temporary_namespace(app, app.name, **settings) as space, anyio.create_task_group() as workers:
            for _ in range(_WORKERS):
                workers.start_soon(keep_worker, settings | {"namespace": space.name}, folder / "journal", killed)
            while len(await list_workers(app.producer.gateway, space)) < _WORKERS:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.05)
            yield folder / "journal"
            workers.cancel_scope.cancel()


async def keep_worker(settings: Mapping[str, object], journal: Path, killed: list[Kill]) -> None:
    """Run a worker process that logs to the demo's stderr, and replace it when it is killed. Runs until cancelled."""
    # Of the user's settings, the workers keep the encryption keys only.
    kept = {name: value for name, value in os.environ.items() if name[:8] != "PERDURE_" or "ENCRYPTION" in name}
    given = {f"PERDURE_{name.upper()}": str(value) for name, value in settings.items()}
    while True:
        # In its own session: Ctrl-C reaches the demo only, which then kills its workers. The kernel closes their
        # standard input when the demo ends, so no worker outlives it.
        command, environment = [sys.executable, "-m", __name__], {**kept, **given, _JOURNAL: str(journal)}
        start = partial(anyio.open_process, stdin=PIPE, stdout=None, stderr=None, start_new_session=True)
        async with await start(command, env=environment) as process:
            status = await process.wait()
            killed.append(Kill(time.monotonic(), process.pid, status))
        if status != -signal.SIGKILL:
            raise Failed(f"could not continue the demo: worker {process.pid} exited with status {status}")


async def _kill_workers(journal: Path, task: str, steps: int, count: int) -> None:
    """Kill `count` workers of a task at random moments of its first steps. Runs until cancelled."""
    killed = set[int]()
    for due in sorted(random.sample(range(1, steps * 4 // 5 + 1), count)):
        runs: list[StepRun] = []
        while len({run.step for run in runs}) < due or runs[-1].pid in killed:
            await anyio.sleep(0.004)
            runs = read_step_runs(journal, task)
        await anyio.sleep(random.uniform(0, _STEP_PAUSE))  # noqa: S311 - not a secret
        killed.add(runs[-1].pid)
        os.kill(runs[-1].pid, signal.SIGKILL)
        note(f"killed worker {runs[-1].pid} in step {runs[-1].step}")


class Claim(NamedTuple):
    """One statement that must hold. counted: None if there was nothing to count. source: where it was counted."""

    id: str
    statement: str
    counted: int | float | str | None
    allowed: str
    source: str
    holds: bool

    @property
    def shown(self) -> str:
        if isinstance(self.counted, float):
            return f"{self.counted:.2f} s"
        return f"{self.counted:,}" if isinstance(self.counted, int) else (self.counted or "none")[:8]


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

    def takeovers(self) -> list[dict[str, Any]]:
        """Return each kill with the next worker that ran a step, and the seconds until then, if there was one."""
        found = []
        for at, pid, _ in self.kills:
            after = next((run for run in self.runs if run.at > at and run.pid != pid), None)
            resumed = (after.pid, round(after.at - at, 3)) if after else (None, None)
            found.append(dict(zip(("killed", "resumed_by", "seconds"), (pid, *resumed), strict=True)))
        return found

    def claims(self) -> list[Claim]:
        """Return all claims with their verdicts."""
        last = {run.pid: run.step for run in self.runs}
        killed = sum(kill.status == -signal.SIGKILL and kill.pid in last for kill in self.kills)
        once = sum(count == 1 for count in Counter(self.completed).values())
        cut_off = Counter(last[kill.pid] for kill in self.kills if kill.pid in last)
        again = Counter(run.step for run in self.runs)
        again.subtract(set(again))
        seconds = [takeover["seconds"] for takeover in self.takeovers()]
        slowest = None if not seconds or None in seconds else max(seconds)
        in_time = slowest is not None and slowest < _TAKEOVER_LIMIT
        kept = Counter(run.step for run in self.publish_runs if run.step in self.kept)
        kept_again = kept.total() - len(kept) if self.kept and len(kept) == len(self.kept) else None

        def equal(name: str, statement: str, counted: int | str | None, expected: int | str, source: str) -> Claim:
            return Claim(name, statement, counted, str(expected)[:8], source, counted == expected)

        limit = f"under {_TAKEOVER_LIMIT:g} s"
        return [
            equal("killed", "Workers killed by SIGKILL", killed, self.planned_kills, "exit status"),
            equal("crashes", "Crashes counted", self.crashes, len(self.kills), "task record"),
            equal("completed", "Steps recorded once", once, self.steps, "event log"),
            Claim(
                "repeated", "Steps run again", again.total(), f"up to {cut_off.total()}", "journal", again <= cut_off
            ),
            Claim("takeover", "Slowest kill to next step", slowest, limit, "journal", in_time),
            equal("attempts", "Attempts until dead letter", self.attempts, _ATTEMPTS, "dead letter"),
            equal("kept_repeated", "Kept steps run again", kept_again, 0, "journal"),
            equal("published", "Report, SHA-256", self.published_sha256, self.expected_sha256, "file"),
            equal("letters", "Dead letters left", self.letters, 0, "dead letters"),
        ]


async def _work() -> None:
    """Run tasks until standard input ends."""
    configure_process_log(app.settings.log_level)
    async with Worker(app, concurrency=1) as worker, anyio.create_task_group() as group:
        group.start_soon(worker.run)
        await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        worker.stop()


if __name__ == "__main__":
    anyio.run(_work)

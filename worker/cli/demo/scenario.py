"""Sequence of the demo: a report while workers are killed, the same report without workers, a dead letter, a replay."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from ....deadletter import DeadLetter, Replay, count_letters, find_letter, replay
from ....queues import TaskFailed, TaskHandle, list_workers
from ....queues.embedded import stop
from ..support.errors import Failed
from ..support.output import note
from ..support.temporary import temporary_namespace
from .app import ATTEMPTS, app, count_file, publish, render, report
from .evidence import LEASE, DemoEvidence
from .journal import read_step_runs
from .processes import Kill, WorkerProcesses, kill_workers

__all__ = ["DemoResult", "run_demo"]

_WORKERS: Final = 2
_PUBLISH_TIMEOUT: Final = 30.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Outcome of the demo. root: the folder. report: path of the report."""

    root: str
    evidence: DemoEvidence
    letter: DeadLetter
    report: Path


async def run_demo(root: str, files: list[str], kills: int, redis_url: str | None) -> DemoResult:
    """Run the demo. Leaves nothing but a temporary file with the report. Raises `Failed`, `PerdureError`.

    Args:
        redis_url: None for a new embedded server.
    """
    killed, steps = list[Kill](), len(files) + 2
    async with _started_workers(redis_url) as workers:
        note(f"reporting on {len(files):,} files in {steps:,} steps, killing {kills} workers")
        reported = await report.enqueue(root, len(files))
        async with anyio.create_task_group() as group:
            group.start_soon(kill_workers, workers, reported.id, steps, kills, killed)
            try:
                artifact = await reported.result()
            except TaskFailed as error:
                raise Failed(f"could not finish the report: {error}") from error
            group.cancel_scope.cancel()
        note("making the same report without workers")
        # One call per file in a thread, so that Ctrl-C interrupts between two files.
        call = anyio.to_thread.run_sync
        rows = [await call(count_file, root, path, abandon_on_cancel=True) for path in files]

        note(f"publishing the report in a missing folder: {ATTEMPTS} attempts, then a dead letter")
        site = workers.journal.with_name("site")
        published = await publish.enqueue(artifact, str(site))
        with suppress(TaskFailed):
            await published.result(timeout=_PUBLISH_TIMEOUT)
        gateway, partitions = app.producer.gateway, [published.partition]
        letter = await find_letter(gateway, partitions, published.id)
        if letter is None:
            raise Failed(f"task {published.id} must become a dead letter, got none")
        kept = await _completed_steps(published)
        site.mkdir()
        await replay(gateway, letter, Replay())
        await published.result(timeout=_PUBLISH_TIMEOUT)
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
    return DemoResult(root, evidence, letter, output)


async def _completed_steps(handle: TaskHandle[Any]) -> list[str]:
    return [event.step async for event in handle.events(follow=False) if event.type == "step_completed" and event.step]


@asynccontextmanager
async def _started_workers(redis_url: str | None) -> AsyncIterator[WorkerProcesses]:
    """Start workers on the given server, or on a new embedded one, and wait until they are ready.

    On exit, also after an error, removes the workers, the keys, the new server and the temporary folder.
    """
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

"""Sequence of the demo: a report while workers are killed, the same report without workers, a dead letter, a replay."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from ....deadletter import DeadLetter, Replay, count_letters, find_letter, replay
from ....queues import Gateway, Namespace, Partition, TaskFailed, TaskHandle, list_workers, read_events
from ....queues.embedded import stop
from ..support.connection import ConnectionOptions
from ..support.errors import Failed
from ..support.output import note
from ..support.temporary import remove_namespace
from .app import ATTEMPTS, app, count_file, publish, render, report
from .evidence import DemoEvidence
from .journal import JOURNAL_VARIABLE, read_step_runs
from .processes import Kill, WorkerProcesses, draw_moments, kill_workers

__all__ = ["LEASE", "DemoPlan", "DemoResult", "run_demo"]

LEASE: Final = 1.5
_WORKERS: Final = 2
_PUBLISH_TIMEOUT: Final = 30.0


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Input of the demo. title: of the folder. seed: of the random moments. output: path of the report."""

    root: Path
    title: str
    files: list[str]
    kills: int
    seed: int
    output: Path
    place: ConnectionOptions


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Outcome of the demo. replay_seconds: from the replay to its success. seconds: of the whole demo."""

    plan: DemoPlan
    evidence: DemoEvidence
    letter: DeadLetter
    replay_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Workspace:
    """Temporary folder, workers and partition of one run."""

    folder: Path
    journal: Path
    workers: WorkerProcesses
    gateway: Gateway
    partition: Partition


async def run_demo(plan: DemoPlan) -> DemoResult:
    """Run the demo. Leaves nothing but the report at `plan.output`. Raises `Failed`, `PerdureError`."""
    began, kills, steps = time.monotonic(), list[Kill](), len(plan.files) + 2
    note(f"starting {_WORKERS} workers")
    async with open_workspace(plan.place) as space:
        note(f"reporting on {len(plan.files):,} files in {steps:,} steps, killing {plan.kills} workers")
        reported = await report.enqueue(plan.title, str(plan.root), len(plan.files))
        async with anyio.create_task_group() as group:
            moments = draw_moments(plan.seed, plan.kills, steps)
            group.start_soon(kill_workers, space.workers, space.journal, reported.id, moments, kills)
            try:
                artifact = await reported.result()
            except TaskFailed as error:
                raise Failed(f"could not finish the report: {error}") from error
            group.cancel_scope.cancel()
        note("making the same report without workers")
        # One call per file in a thread, so that Ctrl-C interrupts between two files.
        call = anyio.to_thread.run_sync
        rows = [await call(count_file, str(plan.root), path, abandon_on_cancel=True) for path in plan.files]

        note(f"publishing the report in a missing folder: {ATTEMPTS} attempts, then a dead letter")
        site = space.folder / "site"
        published = await publish.enqueue(artifact, str(site))
        letter = await _wait_for_letter(space, published)
        kept = await _completed_steps(space, published)
        site.mkdir()
        replayed = time.monotonic()
        await replay(space.gateway, letter, Replay())
        await published.result(timeout=_PUBLISH_TIMEOUT)
        replay_seconds = time.monotonic() - replayed
        evidence = DemoEvidence(
            steps=steps,
            planned_kills=plan.kills,
            max_attempts=ATTEMPTS,
            lease=LEASE,
            kills=kills,
            runs=read_step_runs(space.journal, reported.id),
            crashes=(await reported.record()).crashes,
            completed=await _completed_steps(space, reported, limit=10 * steps),
            report_sha256=artifact.hash,
            expected_sha256=hashlib.sha256(render(plan.title, rows).encode()).hexdigest(),
            published_sha256=hashlib.sha256((site / "report.txt").read_bytes()).hexdigest(),
            attempts=letter.attempts,
            kept=kept,
            publish_runs=read_step_runs(space.journal, published.id),
            letters=await count_letters(space.gateway, [space.partition]),
        )
        shutil.copyfile(site / "report.txt", plan.output)
        note("stopping the workers and removing the keys")
    return DemoResult(plan, evidence, letter, replay_seconds, time.monotonic() - began)


async def _completed_steps(space: Workspace, handle: TaskHandle[Any], limit: int = 1_000) -> list[str]:
    events = await read_events(space.gateway, space.partition, handle.id, limit=limit)
    return [event.step for event in events if event.type == "step_completed" and event.step]


async def _wait_for_letter(space: Workspace, handle: TaskHandle[Any]) -> DeadLetter:
    with suppress(TaskFailed):
        await handle.result(timeout=_PUBLISH_TIMEOUT)
    letter = await find_letter(space.gateway, [space.partition], handle.id)
    if letter is None:
        raise Failed(f"task {handle.id} must become a dead letter, got none")
    return letter


@asynccontextmanager
async def open_workspace(place: ConnectionOptions) -> AsyncIterator[Workspace]:
    """Start workers on the given server, or on a new embedded one, and wait until they are ready.

    On exit, also after an error, removes the workers, the keys, the new server and the folder. Raises `Failed`,
    `Unavailable`, `Refused`, `BadAddress`, `EmbeddedServerError`.
    """
    given = place.overrides()
    folder = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
    settings: dict[str, Any] = {
        "redis_url": given["redis_url"] or "embedded:",
        "data_dir": given["data_dir"] if given["redis_url"] else folder / "data",
        "namespace": f"demo-{secrets.token_hex(6)}",
        "artifacts": str(folder / "artifacts"),
        "lease": LEASE,
        "log_level": "WARNING",
        "log_json": False,
    }
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        if not given["redis_url"]:
            cleanup.callback(stop, folder / "data", force=True)
        app.configure(**settings)
        await cleanup.enter_async_context(app)
        gateway, namespace = app.producer.gateway, Namespace(app.settings.namespace)
        partition = namespace.partition(app.name)
        if given["redis_url"]:
            cleanup.push_async_callback(_remove_keys, gateway, namespace, partition)
        settings["data_dir"] = app.settings.address.directory or ""
        workers = WorkerProcesses(_environment(settings, folder / "journal"), folder / "workers.log")
        cleanup.callback(workers.kill_all)
        for _ in range(_WORKERS):
            workers.start()
        while len(await list_workers(gateway, namespace)) < _WORKERS:
            workers.check()
            await anyio.sleep(0.05)
        yield Workspace(folder, folder / "journal", workers, gateway, partition)


async def _remove_keys(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    with anyio.CancelScope(shield=True):
        await remove_namespace(gateway, namespace, [partition])


def _environment(settings: dict[str, Any], journal: Path) -> dict[str, str]:
    """Return the environment of the workers: these settings, and of the user's PERDURE_* variables the keys only."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PERDURE_") or "ENCRYPTION" in name
    }
    given = {f"PERDURE_{name.upper()}": str(value) for name, value in settings.items()}
    return kept | given | {JOURNAL_VARIABLE: str(journal)}

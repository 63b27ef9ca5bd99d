"""The sequence of the demo: an audit under kills, the same without any, a dead letter and its way back."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from ....deadletter import DeadLetter, Replay, count_letters, find_letter, replay
from ....queues import TaskEvent, TaskFailed, TaskHandle, read_events
from ..connection import Place
from ..failures import Failed
from . import evidence
from .app import ATTEMPTS, QUEUE, AuditResult, Job, app, audit, publish, steps_of_audit
from .audit import audit_file
from .evidence import Claim
from .journal import Line
from .killer import Killer, draw
from .progress import Progress
from .replicas import Kill
from .report import AuditSummary, render
from .stage import LEASE, Stage, prepare_stage
from .takeovers import Takeover, takeovers

__all__ = ["Ending", "Plan", "perform"]

_PUBLISHED_WITHIN: Final = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. title: what the report calls the folder. output: where the report is to be in the end."""

    root: Path
    title: str
    files: list[str]
    kills: int
    seed: int
    output: Path
    place: Place


@dataclass(frozen=True, slots=True)
class Audited:
    """The audit, with all that it left behind. undisturbed: the SHA-256 of the report made without Perdure."""

    result: AuditResult
    lines: list[Line]
    kills: list[Kill]
    events: list[TaskEvent]
    crashes: int
    undisturbed: str


@dataclass(frozen=True, slots=True)
class Published:
    """The dead letter, what was kept of its task, and what became of it. site: the folder that was missing. seconds:
    from the replay to the success.
    """

    letter: DeadLetter
    site: Path
    kept: list[str]
    seconds: float
    sha256: str
    lines: list[Line]
    letters_left: int


@dataclass(frozen=True, slots=True)
class Ending:
    """All that the demo has to show. seconds: how long it took."""

    plan: Plan
    audited: Audited
    published: Published
    seconds: float

    @property
    def summary(self) -> AuditSummary:
        return self.audited.result.summary

    def takeovers(self) -> list[Takeover]:
        """The kills, and what became of each."""
        return takeovers(self.audited.lines, self.audited.kills)

    def claims(self) -> list[Claim]:
        """The evidence, counted."""
        steps = steps_of_audit(len(self.plan.files))
        ran, published = self.audited, self.published
        logged = [event.step for event in ran.events if event.type == "step_completed" and event.step]
        sha256 = ran.result.sha256
        return [
            evidence.killed_at_work(ran.kills, ran.lines, self.plan.kills),
            evidence.deliveries_lost(ran.crashes, ran.kills),
            evidence.steps_recorded(logged, steps),
            evidence.recorded_twice(logged),
            evidence.steps_run(ran.lines, steps, ran.kills),
            evidence.steps_run_twice(ran.lines, ran.kills),
            evidence.resumed(ran.lines, ran.kills, LEASE),
            evidence.same_contents("report", "The report", sha256, ran.undisturbed, "undisturbed run"),
            evidence.attempts_before_burial(published.letter.attempts, ATTEMPTS),
            evidence.kept_steps_run_again(published.lines, published.kept),
            evidence.same_contents("published", "The published report", published.sha256, sha256, "the report"),
            evidence.letters_left(published.letters_left),
        ]


async def perform(plan: Plan, progress: Progress) -> Ending:
    """Tell the whole story; leaves nothing behind but the report. Raises `Failed`, `PerdureError`."""
    began = time.monotonic()
    with progress:
        progress.scene("starting a server and two workers")
        async with prepare_stage(app, QUEUE, plan.place) as stage:
            await stage.wait_joined()
            job = Job(
                root=str(plan.root),
                title=plan.title,
                files=len(plan.files),
                report=str(stage.folder / "report.md"),
                journal=str(stage.journal.path),
            )
            audited = await _audit_under_kills(plan, stage, job, progress)
            published = await _fail_and_replay(stage, job, progress)
            await anyio.to_thread.run_sync(shutil.copyfile, job.report, plan.output)
            progress.scene("cleaning up")
    return Ending(plan, audited, published, time.monotonic() - began)


async def _audit_under_kills(plan: Plan, stage: Stage, job: Job, progress: Progress) -> Audited:
    steps = steps_of_audit(len(plan.files))
    handle = await audit.enqueue(job)
    progress.follow(stage.journal, handle.id, steps)
    killer = Killer(stage.journal, stage.replicas, progress.killed)
    async with anyio.create_task_group() as group:
        group.start_soon(killer.run, handle.id, draw(plan.seed, plan.kills, steps))
        try:
            result = await handle.result()
        except TaskFailed as error:
            raise Failed(f"the audit did not come to its end: {error}") from error
        group.cancel_scope.cancel()
    stage.journal.refresh()
    progress.scene("the same audit undisturbed: in this process, without Perdure")
    return Audited(
        result=result,
        lines=list(stage.journal.of(handle.id)),
        kills=stage.replicas.kills,
        events=await read_events(stage.gateway, stage.partition, handle.id, limit=10 * steps),
        crashes=(await handle.record()).crashes,
        undisturbed=await _audit_undisturbed(plan),
    )


async def _audit_undisturbed(plan: Plan) -> str:
    """The SHA-256 of the report that the same functions make, called one after another."""
    # In a thread, so that a Ctrl-C is heard between two files.
    audits = [
        await anyio.to_thread.run_sync(audit_file, str(plan.root), path, abandon_on_cancel=True) for path in plan.files
    ]
    return hashlib.sha256(render(plan.title, audits).encode()).hexdigest()


async def _fail_and_replay(stage: Stage, job: Job, progress: Progress) -> Published:
    site = stage.folder / "site"
    handle = await publish.enqueue(job, str(site))
    progress.scene("publishing the report in a folder that is missing: three attempts, then a dead letter")
    letter = await _wait_for_letter(stage, handle)
    events = await read_events(stage.gateway, stage.partition, handle.id)
    kept = [event.step for event in events if event.type == "step_completed" and event.step]
    site.mkdir()
    replayed = time.monotonic()
    await replay(stage.gateway, letter, Replay())
    sha256 = await handle.result(timeout=_PUBLISHED_WITHIN)
    seconds = time.monotonic() - replayed
    stage.journal.refresh()
    left = await count_letters(stage.gateway, [stage.partition])
    return Published(letter, site, kept, seconds, sha256, list(stage.journal.of(handle.id)), left)


async def _wait_for_letter(stage: Stage, handle: TaskHandle[Any]) -> DeadLetter:
    try:
        await handle.result(timeout=_PUBLISHED_WITHIN)
    except TaskFailed:
        letter = await find_letter(stage.gateway, [stage.partition], handle.id)
        if letter is not None:
            return letter
    raise Failed(f"task {handle.id} was to fail and has not")

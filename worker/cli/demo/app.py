"""The demo's tasks. They know nothing of kills: this is how any task is written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pydantic import BaseModel

from ....deadletter import Retry
from ...app import App
from ...durable import Context
from .audit import audit_file
from .folder import list_files
from .journal import note
from .models import FileAudit
from .report import AuditSummary, render, summarise

__all__ = ["ATTEMPTS", "MOST_KILLS", "QUEUE", "AuditResult", "Job", "app", "audit", "publish", "steps_of_audit"]

QUEUE = "demo"
MOST_KILLS = 20
ATTEMPTS = 3

app = App("demo")


class Job(BaseModel):
    """What to audit and where to put the report. title: what the report calls the folder. files: at most so many."""

    root: str
    title: str
    files: int
    report: str
    journal: str


class AuditResult(BaseModel):
    """The totals, and the SHA-256 of the report in hexadecimal."""

    summary: AuditSummary
    sha256: str


def steps_of_audit(files: int) -> int:
    """How many steps the audit of so many files has: it lists them, reads each, and writes the report."""
    return files + 2


@app.task(queue=QUEUE, retry=Retry(max_attempts=1, max_crashes=MOST_KILLS))
async def audit(ctx: Context, job: Job) -> AuditResult:
    """Audit a folder of Python code, each file in a step of its own."""
    files = await ctx.step("list", find_files, job)
    audits = [await ctx.step("read", read_file, job.journal, job.root, path) for path in files]
    sha256 = await ctx.step("report", write_report, job, audits)
    return AuditResult(summary=summarise(audits), sha256=sha256)


def find_files(job: Job) -> list[str]:
    note(job.journal)
    return list_files(job.root, job.files)


def read_file(journal: str, root: str, path: str) -> FileAudit:
    note(journal, path)
    return audit_file(root, path)


def write_report(job: Job, audits: list[FileAudit]) -> str:
    note(job.journal)
    return replace_file(Path(job.report), render(job.title, audits).encode())


@app.task(queue=QUEUE, retry=Retry(max_attempts=ATTEMPTS, base=0.25))
async def publish(ctx: Context, job: Job, site: str) -> str:
    """Publish the report in a folder, with a page of its contents; fails while there is no such folder."""
    sha256 = await ctx.step("checksum", checksum, job)
    contents = await ctx.step("contents", list_contents, job)
    return await ctx.step("publish", publish_report, job, site, sha256, contents)


def checksum(job: Job) -> str:
    note(job.journal)
    return hashlib.sha256(Path(job.report).read_bytes()).hexdigest()


def list_contents(job: Job) -> list[str]:
    note(job.journal)
    text = Path(job.report).read_text(encoding="utf-8")
    return [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]


def publish_report(job: Job, site: str, sha256: str, contents: list[str]) -> str:
    note(job.journal)
    lines = [f"# {job.title}", "", *(f"- {heading}" for heading in contents), "", f"SHA-256 of report.md: {sha256}"]
    replace_file(Path(site, "contents.md"), "\n".join(lines).encode())
    return replace_file(Path(site, "report.md"), Path(job.report).read_bytes())


def replace_file(path: Path, data: bytes) -> str:
    """Write a file whole or not at all, so that a step cut off half-way can be run again. Returns its SHA-256."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)
    return hashlib.sha256(data).hexdigest()

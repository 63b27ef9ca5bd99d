"""A nightly batch over the files of a folder. A worker that is killed in the middle leaves the rest to the next one.

    perdure worker run examples/nightly_batch.py:app &
    perdure enqueue nightly --queue nightly --args '{"folder": "/var/log"}' --id nightly-$(date +%F)
    perdure task show nightly-$(date +%F)

The second command is for cron: the id of the night makes it safe to send twice.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from perdure import App, Context, Retry
from pydantic import BaseModel

AT_ONCE = 4
"""Files that are read at the same time."""

app = App("nightly")


class Report(BaseModel):
    """Result of a night."""

    files: int = 0
    lines: int = 0
    errors: int = 0
    unreadable: list[str] = []


def list_files(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*.log"))


def read_file(path: str) -> tuple[int, int]:
    """Return the number of lines, and of those with an error. A slow disk is read here."""
    time.sleep(float(os.environ.get("SECONDS_PER_FILE", "0")))
    lines = Path(path).read_text("utf-8", "replace").splitlines()
    return len(lines), sum("ERROR" in line for line in lines)


async def read_or_skip(ctx: Context, path: str) -> tuple[int, int] | None:
    """Read a file in a step, which is recorded; after three tries the file is left out."""
    try:
        return await ctx.options(timeout=60, retry=Retry(max_attempts=3, base=0.1)).step("read", read_file, path)
    except OSError:
        return None


def batches(files: Sequence[str]) -> list[Sequence[str]]:
    return [files[start : start + AT_ONCE] for start in range(0, len(files), AT_ONCE)]


@app.task(timeout=6 * 3600, retry=Retry(max_attempts=3))
async def nightly(ctx: Context, folder: str) -> Report:
    files = await ctx.step("list", list_files, folder)  # recorded: files that arrive later belong to the next night
    report = Report(files=len(files))
    for batch in batches(files):
        found = await asyncio.gather(*(read_or_skip(ctx, path) for path in batch))
        for path, counted in zip(batch, found, strict=True):
            if counted is None:
                report.unreadable.append(path)
            else:
                report.lines += counted[0]
                report.errors += counted[1]
    return report

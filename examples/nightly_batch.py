"""A nightly batch over the files of a folder. A worker that is killed in the middle leaves the rest to the next one.

    perdure worker run examples/nightly_batch.py:app &
    perdure enqueue nightly --queue nightly --args '{"folder": "/var/log"}' --id nightly-$(date +%F)
    perdure task show nightly-$(date +%F)

In a crontab, a % is written \\%. The id of the night makes it safe to send twice:

    0 2 * * * perdure enqueue nightly --queue nightly --args '{"folder": "/var/log"}' --id nightly-$(date +\\%F)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from perdure import App, Context, Retry, current_step
from pydantic import BaseModel

AT_ONCE = 4
"""Files that are read at the same time."""

TRIES = 3
"""Tries to read a file before it is left out."""

app = App("nightly")


class Report(BaseModel):
    """Result of a night."""

    files: int = 0
    lines: int = 0
    errors: int = 0
    unreadable: list[str] = []


def list_files(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*.log") if not path.is_dir())


def read_file(path: str) -> tuple[int, int] | None:
    """Return the number of lines, and of those with an error; None if it cannot be read.

    The last error is caught here, inside the step: so it is recorded as a result that the file is left out.
    """
    time.sleep(float(os.environ.get("SECONDS_PER_FILE", "0")))  # a slow disk
    try:
        lines = Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        if current_step().attempt < TRIES:
            raise
        return None
    return len(lines), sum("ERROR" in line for line in lines)


def batches(files: Sequence[str]) -> list[Sequence[str]]:
    return [files[start : start + AT_ONCE] for start in range(0, len(files), AT_ONCE)]


@app.task(timeout=6 * 3600, retry=Retry(max_attempts=3))
async def nightly(ctx: Context, folder: str) -> Report:
    files = await ctx.step("list", list_files, folder)  # recorded: files that arrive later belong to the next night
    report = Report(files=len(files))
    reading = ctx.options(retry=Retry(max_attempts=TRIES, base=0.1))
    for batch in batches(files):
        found = await asyncio.gather(*(reading.step("read", read_file, path) for path in batch))
        for path, counted in zip(batch, found, strict=True):
            if counted is None:
                report.unreadable.append(path)
            else:
                report.lines += counted[0]
                report.errors += counted[1]
    return report

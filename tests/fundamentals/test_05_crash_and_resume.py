"""Crash and resume: a worker process is killed, and another one continues its task.

This file is also the app that the worker processes run: `perdure worker run test_05_crash_and_resume.py:app`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from perdure import App, Context, Settings

pytestmark = [pytest.mark.integration, pytest.mark.processes]

app = App("orders")


def charge(folder: str, order: str) -> str:
    with Path(folder, "payments").open("a") as payments:
        payments.write(f"{order}\n")
    return f"receipt for {order}"


def ship(folder: str, receipt: str) -> str:
    while Path(folder, "hold").exists():
        time.sleep(0.01)
    return f"shipped with {receipt}"


@app.task
async def fulfil(ctx: Context, folder: str, order: str) -> str:
    receipt = await ctx.step("charge", charge, folder, order)
    return await ctx.step("ship", ship, folder, receipt)


def start_worker(settings: Settings) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "perdure.worker.cli", "worker", "run", f"{__file__}:app", "--no-supervisor"]
    environment = {
        "PERDURE_REDIS_URL": settings.redis_url,
        "PERDURE_NAMESPACE": settings.namespace,
        "PERDURE_LEASE": str(settings.lease),
    }
    return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)


async def test_another_worker_resumes_the_task_of_a_killed_one_at_the_recorded_step(
    settings: Settings, tmp_path: Path
) -> None:
    """A worker renews the lease of its task. When it dies, the lease expires, and another worker claims the task."""
    app.configure(**settings.model_dump())
    hold = tmp_path / "hold"
    hold.touch()
    workers = [start_worker(settings)]
    try:
        async with app:
            handle = await fulfil.enqueue(str(tmp_path), "A17")
            async for event in handle.events():
                if event.type == "step_completed":  # "charge" is recorded, "ship" is running
                    break
            workers[0].kill()
            hold.unlink()
            workers.append(start_worker(settings))
            assert await handle.result(timeout=30) == "shipped with receipt for A17"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert (tmp_path / "payments").read_text() == "A17\n"  # charged once

"""A `Worker` in a user's own program: quarantined tasks run in it, alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from perdure import Producer, Settings, TaskHandle
from perdure.queues.delivery.quarantine_store import report_crash

from tests.support.consumers import claim_all, read
from tests.support.consumers import worker as consumer
from tests.support.workers import BOUND, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PROGRAM = """
import asyncio, loguru, os, time
from perdure import App, Context, Settings, Worker

loguru.logger.enable("perdure")
app = App("own")
print("imported", flush=True)

@app.task
async def job(ctx: Context) -> list[float]:
    start = time.monotonic()
    await asyncio.sleep(0.05)
    return [os.getpid(), start, time.monotonic()]

async def main() -> None:
    async with Worker(app) as worker:
        await worker.run(burst=True)

asyncio.run(main())
"""


async def test_suspects_run_in_the_worker_one_at_a_time(settings: Settings, producer: Producer, tmp_path: Path) -> None:
    tasks = await suspects(producer, "own", "job", 3)
    with program(settings, tmp_path, PROGRAM) as process:
        found = [await bounded(task.result()) for task in tasks]
    out, err = process.communicate(timeout=BOUND)
    assert process.returncode == 0, err
    assert {run[0] for run in found} == {process.pid}
    runs = sorted(run[1:] for run in found)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(runs))
    assert out == "imported\n"


async def suspects(
    producer: Producer, queue: str, task: str, number: int, **arguments: object
) -> list[TaskHandle[list[float]]]:
    """Enqueue tasks, and let two workers crash with them."""
    handles = [await producer.enqueue(task, arguments, queue=queue) for _ in range(number)]
    for name in ("dead", "dead too"):
        dead = await consumer(producer.gateway, handles[0].partition, name=name)
        assert len(await (claim_all(dead) if name == "dead too" else read(dead, number))) == number
        await report_crash(producer.gateway, producer.namespace, [queue], name, exit_status="SIGKILL", steps={})
    return handles


@contextmanager
def program(settings: Settings, folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(text)
    environment = os.environ | {"PERDURE_REDIS_URL": settings.redis_url, "PERDURE_NAMESPACE": settings.namespace}
    process = subprocess.Popen(
        [sys.executable, script], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    except BaseException:
        process.kill()
        process.communicate()
        raise

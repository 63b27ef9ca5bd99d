"""A `Worker` in a user's own program: with an import path, quarantined tasks run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from perdure import Producer, Settings, State, TaskFailed, TaskHandle
from perdure.deadletter import Reason
from perdure.queues import report_crash

from tests.support.consumers import claim_all, read
from tests.support.consumers import worker as consumer
from tests.support.processes import PROGRAM as REPLICA
from tests.support.processes import push_token, worker_processes
from tests.support.workers import BOUND, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

ENVIRONMENT = {"IMPORT_PATH": f"{REPLICA}:app"}

PROGRAM = """
import asyncio, loguru, os, sys
from perdure import App, Context, Settings, Worker

loguru.logger.enable("perdure")
app = App("own")
print("imported", flush=True)

@app.task
async def job(ctx: Context) -> int:
    return os.getpid()

async def main() -> None:
    async with Worker(app, import_path=PATH) as worker:
        await worker.run(burst=True)

"""
RUN = 'if __name__ == "__main__":\n    asyncio.run(main())\n'
FAILS = "if __name__ != '__main__':\n    sys.exit(3)\n"
CONFIGURED = 'if __name__ == "__main__":\n    app.configure(time_limit=60.0)\n'


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(address=settings.address, namespace=settings.namespace) as producer:
        yield producer


async def test_a_task_that_kills_its_process_ends_alone(settings: Settings, producer: Producer, tmp_path: Path) -> None:
    """It kills two workers. The third one starts a process for it, and runs other tasks meanwhile."""
    with worker_processes(settings.model_copy(update={"lease": 1.0}), tmp_path, environment=ENVIRONMENT) as workers:
        poison = await producer.enqueue("killer", {}, queue="replica")
        for _ in range(2):
            assert await (await workers.start().ready()).ended() == -9
        own = await workers.start().ready()
        other = await producer.enqueue("gate", {"name": "held"}, queue="replica")
        with pytest.raises(TaskFailed) as caught:
            await bounded(poison.result())
        assert caught.value.reason == Reason.CRASH_LOOP
        assert own.process.poll() is None
        *_, last = [line.pid for line in workers.lines("run", poison.id)]
        assert last not in {process.pid for process in workers.processes}
        await push_token(producer, "held")
        result = await bounded(other.result())
        assert (result["pid"], result["crashes"]) == (own.pid, 0)
        own.stop()
        assert await own.ended() == 0


async def test_processes_for_quarantined_tasks_end_with_the_program(
    settings: Settings, producer: Producer, tmp_path: Path
) -> None:
    with worker_processes(settings.model_copy(update={"grace": 0.5}), tmp_path, environment=ENVIRONMENT) as workers:
        (task,) = await suspects(producer, "replica", "gate", 1, name="never")
        own = await workers.start().ready()
        child = psutil.Process((await workers.line("saved", f"{task.id}:second")).pid)
        assert child.ppid() == own.pid
        own.kill()
        child.wait(BOUND)
        record = await task.record()
        assert (record.state, record.attempts, record.crashes) == (State.QUEUED, 0, 0)  # released by the child


@pytest.mark.parametrize(
    ("path", "end", "said"),
    [
        ("script.py:app", RUN, None),
        (None, RUN, "the worker has no import_path"),
        ("script.py:app", CONFIGURED + RUN, "an app with other tasks or settings"),
        ("script.py:app", FAILS + RUN, "ended by exit code"),
    ],
    ids=["import path", "none", "configured under the guard", "import fails"],
)
async def test_suspects_run_in_the_worker_if_no_other_process_can_import_its_app(
    settings: Settings, producer: Producer, tmp_path: Path, path: str | None, end: str, said: str | None
) -> None:
    tasks = await suspects(producer, "own", "job", 2)
    with program(settings, tmp_path, PROGRAM.replace("PATH", repr(path)) + end) as process:
        found = {await bounded(task.result()) for task in tasks}
    out, err = process.communicate(timeout=BOUND)
    assert process.returncode == 0, err
    if said is None:
        assert process.pid not in found
        assert "one at a time" not in err
    else:
        assert found == {process.pid}
        assert said in err
        assert err.count("one at a time") == 1
    assert (out == "imported\n") == (path is None)  # only then, the file is not imported once more


async def suspects(
    producer: Producer, queue: str, task: str, number: int, **arguments: object
) -> list[TaskHandle[int]]:
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

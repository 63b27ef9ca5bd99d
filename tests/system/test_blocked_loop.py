"""Code that blocks: a worker whose event loop does not answer says where it is stuck, and lets its tasks go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from perdure import Producer, Settings, State
from perdure.queues.keys import GROUP

from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import BOUND, bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    """Replicas that give up what they hold when their loop is blocked for longer than 0.6 seconds."""
    environment = {"PERDURE_STALL_WARNING": "0.3", "PERDURE_STALL_LIMIT": "0.6"}
    with worker_processes(settings.model_copy(update={"lease": 0.9}), tmp_path, environment=environment) as workers:
        yield workers


class Pipe:
    """A named pipe that a run waits at."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        os.mkfifo(self.path)

    def let_go(self) -> None:
        pipe = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"x")
        os.close(pipe)


class Stderr:
    """Stderr of the processes so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.text = ""

    async def until(self, *texts: str) -> None:
        with anyio.move_on_after(BOUND):
            while not all(text in self._read() for text in texts):  # noqa: ASYNC110 - a file tells of nothing
                await anyio.sleep(0.01)
            return
        pytest.fail(f"never said: {texts}; but:\n{self.text}")

    def _read(self) -> str:
        self.text += self._capfd.readouterr().err
        return self.text


@pytest.mark.parametrize("keeps_the_lock", [False, True], ids=["blocked loop", "lock kept"])
async def test_a_worker_that_is_stuck_loses_its_task_and_comes_back(
    workers: WorkerProcesses,
    producer: Producer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    keeps_the_lock: bool,
) -> None:
    """Blocked in the handler: others take the task meanwhile, and what it does on waking is refused."""
    pipe, stderr = Pipe(tmp_path), Stderr(capfd)
    stuck = await workers.start().ready()
    handle = await producer.enqueue(
        "stalls", {"gate": str(pipe.path), "keeps_the_lock": keeps_the_lock}, queue="replica"
    )
    await workers.line("run", handle.id, pid=stuck.pid)
    heir = await workers.start().ready()
    assert await bounded(handle.result()) == heir.pid  # while the first one is still blocked
    assert workers.lines("came back") == []
    if not keeps_the_lock:
        await stderr.until(
            "the event loop has not answered for",
            f"blocked by the handler of task 'stalls' {handle.id}",
            "thread MainThread",
            "in block",
            "leases are no longer renewed",
        )
    pipe.let_go()
    await workers.line("left", handle.id, pid=stuck.pid)
    record = await handle.record()
    assert (record.state, record.worker, record.crashes) == (State.SUCCEEDED, heir.worker_id, 1)

    heir.kill()  # and the worker that was stuck continues, and renews its leases again
    after = await producer.enqueue("sleeper", {"seconds": 1.5}, queue="replica")
    assert await bounded(after.result()) == stuck.pid
    assert (await after.record()).crashes == 0
    await stderr.until("process was frozen for" if keeps_the_lock else "the event loop answers again, after")


async def test_a_loop_that_is_blocked_for_less_than_the_limit_keeps_its_task(
    settings: Settings, producer: Producer, tmp_path: Path
) -> None:
    """Its thread renews the lease again and again, beside another worker that would take the task."""
    pipe = Pipe(tmp_path)
    partition = producer.namespace.partition("replica")

    async def idle() -> int:
        [(_, _, milliseconds, _)] = await producer.gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 10)
        return int(milliseconds)

    with worker_processes(settings.model_copy(update={"lease": 3.0}), tmp_path) as workers:
        stuck = await workers.start().ready()
        handle = await producer.enqueue("stalls", {"gate": str(pipe.path), "keeps_the_lock": False}, queue="replica")
        await workers.line("run", handle.id, pid=stuck.pid)
        await workers.start().ready()
        renewed, before = 0, 0
        with anyio.fail_after(BOUND):
            while renewed < 4:  # a third of a lease apart
                now = await idle()
                renewed, before = renewed + (now < before), now
                await anyio.sleep(0.05)
        pipe.let_go()
        assert await bounded(handle.result()) == stuck.pid
    assert (await handle.record()).crashes == 0


BUSY = """
import asyncio
from perdure.worker.runtime.health.loop_watchdog import LoopWatchdog

def recurse(depth):
    if depth:
        recurse(depth - 1)

async def main():
    LoopWatchdog(warn_after=0.02, stall_limit=10.0).start()
    print("ready", flush=True)
    while True:
        recurse(50)
        await asyncio.sleep(0)

asyncio.run(main())
"""


def test_a_busy_process_survives_being_frozen_again_and_again() -> None:
    """A dump of its stacks by a timer of faulthandler crashed one process in forty when it continued."""
    command = (sys.executable, "-c", BUSY)
    frozen = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(4)]
    try:
        for process in frozen:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for _ in range(50):
            for number, seconds in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.02)):
                for process in frozen:
                    process.send_signal(number)
                time.sleep(seconds)
        assert [process.poll() for process in frozen] == [None] * 4
    finally:
        for process in frozen:
            process.kill()
            process.communicate()

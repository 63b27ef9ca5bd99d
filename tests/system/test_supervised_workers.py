"""Real workers under a real supervisor: kill -9 of either, a reload under load, what cannot start, a burst."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from perdure import Producer, TaskHandle
from perdure.queues import list_supervisors, list_workers
from perdure.worker.settings import Settings

from tests.support.command_line import Answer, process
from tests.support.paths import PROGRAMS
from tests.support.supervisors import Supervisors, all_work
from tests.support.workers import BOUND, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PROGRAM = PROGRAMS / "supervised.py"


async def gone(one: psutil.Process) -> None:
    async def is_gone() -> bool:
        return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE

    await wait_until(is_gone, f"the end of {one}")


async def logged(handle: TaskHandle[Any], *types: str) -> list[str]:
    return [event.type async for event in handle.events(follow=False) if event.type in types]


async def test_tasks_of_a_killed_worker_are_resumed_at_once_by_another(
    supervisors: Supervisors, producer: Producer, tmp_path: Path
) -> None:
    supervisor = supervisors.start()
    gate = tmp_path / "gate"
    handle = await producer.enqueue("gated", {"name": str(gate), "starts": True}, queue="supervised")
    second = f"{handle.id}:second"
    journal = supervisors.journal
    victim = (await journal.line("begin", second)).pid
    started, _, pipes = (await journal.line("started")).key.partition(":")
    supervisors.children(supervisor)
    os.kill(victim, signal.SIGKILL)
    again = await journal.line("begin", second, number=2)
    assert again.pid != victim
    assert len(journal.lines("begin", f"{handle.id}:first")) == 1
    assert pipes == "0"  # what a task starts has no part in the line to the supervisor
    await wait_until(lambda: _is_no_process(int(started)), "the end of what the dead worker had started")
    gate.touch()
    assert await handle.result(timeout=BOUND) == again.pid
    assert await logged(handle, "crashed") == ["crashed"]

    await all_work(producer, 2)
    [info] = await list_supervisors(producer.gateway, producer.namespace)
    assert info.crashes == 0  # the worker had recorded a step: progress excuses its crash
    importers = {line.pid for line in journal.lines("imported")}
    assert importers == {victim, *(child.pid for child in supervisors.children(supervisor))}
    supervisor.terminate()
    assert await supervisors.ended() == 0


async def _is_no_process(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_children_end_with_their_supervisor_and_hand_over_at_no_cost(
    supervisors: Supervisors, producer: Producer, tmp_path: Path
) -> None:
    supervisor = supervisors.start(processes=1)
    gate = tmp_path / "gate"
    handle = await producer.enqueue("gated", {"name": str(gate)}, queue="supervised")
    await supervisors.journal.line("begin", f"{handle.id}:second")
    await supervisors.journal.line("imported", number=2)
    children = supervisors.children(supervisor)
    supervisor.kill()
    gate.touch()  # the step ends within the grace period
    for child in children:
        await gone(child)
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) in (("queued", 0, 0), ("succeeded", 1, 0))
    await handle.cancel()


@pytest.mark.parametrize("ends", [True, False], ids=["the step ends", "the step does not end"])
async def test_a_child_whose_supervisor_is_gone_has_its_grace(
    supervisors: Supervisors, producer: Producer, tmp_path: Path, ends: bool
) -> None:
    """A step that ends within the grace is recorded, one that does not is cancelled; another worker takes the rest."""
    supervisor = supervisors.start(processes=1, grace=BOUND if ends else 1.0)
    journal = supervisors.journal
    gate = tmp_path / "gate"
    handle = await producer.enqueue("gated", {"name": str(gate), "more": True}, queue="supervised")
    busy = psutil.Process((await journal.line("begin", f"{handle.id}:second")).pid)
    await journal.line("imported", number=2)
    [idle] = supervisors.children(supervisor) - {busy}
    supervisor.kill()
    await gone(idle)  # it has nothing to end
    await journal.line("stopping", pid=busy.pid)
    if ends:
        assert busy.is_running()
        gate.touch()
    await gone(busy)
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == ("queued", 0, 0)
    assert await logged(handle, "step_completed", "handed_off") == ["step_completed"] * (1 + ends) + ["handed_off"]
    assert not journal.lines("begin", f"{handle.id}:third")
    await handle.cancel()


async def test_the_tasks_of_a_lost_host_resume_together_beside_new_ones(
    supervisors: Supervisors, producer: Producer, tmp_path: Path
) -> None:
    """Supervisor and worker die together, so that only the lease reveals it. Each task is in a long step."""
    host = supervisors.start(1, concurrency=32, lease=3.0)
    gate, journal = tmp_path / "gate", supervisors.journal
    handles = [await producer.enqueue("gated", {"name": str(gate)}, queue="supervised") for _ in range(32)]
    await journal.line("begin", number=2 * len(handles))
    (former,) = {line.pid for line in journal.lines("begin")}
    supervisors.run("--no-supervisor", "--concurrency=64", lease=3.0)
    await wait_until(lambda: registered(producer, 2), "another worker")
    for one in (host, *supervisors.children(host)):  # the supervisor first, so that it reports nothing
        one.kill()
    new = [await producer.enqueue("walk", {"steps": 1, "pause": 0.0}, queue="supervised") for _ in range(100)]
    for handle in new:
        await handle.result(timeout=BOUND)
    for handle in handles:
        await journal.line("begin", f"{handle.id}:second", number=2)
    assert not gate.exists()  # all of them run at the same time
    gate.touch()
    pids = {await handle.result(timeout=BOUND) for handle in handles}
    assert len(pids) == 1
    assert former not in pids
    assert {((found := await handle.record()).crashes, found.attempts) for handle in handles} == {(1, 1)}


async def registered(producer: Producer, number: int) -> bool:
    return len(await list_workers(producer.gateway, producer.namespace)) >= number


async def test_a_reload_under_load_loses_nothing_and_costs_nothing(
    supervisors: Supervisors, producer: Producer
) -> None:
    supervisor = supervisors.start()
    journal = supervisors.journal
    await all_work(producer, 2)
    old = {line.pid for line in journal.lines("imported")}
    handles = [await producer.enqueue("walk", {"steps": 3, "pause": 0.05}, queue="supervised") for _ in range(16)]
    await journal.line("begin", number=10)
    supervisor.send_signal(signal.SIGHUP)
    ended = 0
    while len({line.pid for line in journal.lines("begin")} - old) < 2:  # the load lasts until both new ones bear it
        await handles[ended].result(timeout=BOUND)
        ended += 1
        handles.append(await producer.enqueue("walk", {"steps": 3, "pause": 0.05}, queue="supervised"))
    for handle in handles[ended:]:
        await handle.result(timeout=BOUND)
    for pid in old:
        await wait_until(lambda pid=pid: _is_no_process(pid), "the end of the old workers")  # type: ignore[misc]
    await all_work(producer, 2)
    assert not old & {child.pid for child in supervisors.children(supervisor)}
    records = [await handle.record() for handle in handles]
    assert {(record.attempts, record.crashes) for record in records} == {(1, 0)}
    entered = [line.key for line in journal.lines("begin")]
    assert len(entered) == len(set(entered)) == 3 * len(handles)
    [info] = await list_supervisors(producer.gateway, producer.namespace)
    assert info.crashes == 0
    supervisor.terminate()
    assert await supervisors.ended() == 0


def run(settings: Settings, *args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    journal = tmp_path / "journal"
    journal.touch()
    monkeypatch.setenv("JOURNAL", str(journal))
    monkeypatch.setenv("PERDURE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", settings.namespace)
    return process("worker", "run", *args, cwd=tmp_path)


async def test_a_burst_of_several_processes_ends_when_all_is_done(
    settings: Settings, producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [await producer.enqueue("walk", {"steps": 2, "pause": 0.0}, queue="supervised") for _ in range(20)]
    options = (f"{PROGRAM}:app", "--burst", "--processes", "2", "--name", "mine")
    answer = await anyio.to_thread.run_sync(lambda: run(settings, *options, tmp_path=tmp_path, monkeypatch=monkeypatch))
    assert answer.code == 0, answer.err
    assert "supervisor mine-" in answer.err
    assert {(await handle.record()).state for handle in handles} == {"succeeded"}


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("nothing:app", "--processes", "3"), 2, "no module 'nothing'"),
        ((f"{PROGRAM}:app", "--processes", "3", "--lease", "0.1"), 2, "lease: Input should be greater"),
    ],
)
def test_what_cannot_start_says_so_once(
    settings: Settings,
    args: tuple[str, ...],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = run(settings, *args, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert (answer.code, answer.out, answer.err.count("\n")) == (code, "", 1), answer.err
    assert said in answer.err


def test_a_worker_whose_loop_is_stuck_ends_though_its_supervisor_is_gone() -> None:
    program = """
import asyncio, os, sys, time
from types import SimpleNamespace
from perdure import configure_logging
from perdure.worker.cli.support.worker_process import SupervisedWorker
from perdure.worker.runtime.supervisor_link import InheritedPipe, SupervisorLink

configure_logging()

async def work():
    worker = SimpleNamespace(settings=SimpleNamespace(grace=0.1), stop=lambda: print("never"))
    link = SupervisorLink("worker", InheritedPipe(int(sys.argv[1]), int(sys.argv[2])))
    SupervisedWorker(link, exit_margin=0.1).attach(worker)
    print("stuck", flush=True)
    time.sleep(1000)

asyncio.run(work())
"""
    theirs, ours = os.pipe()
    answers, says = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(theirs), str(says)],
        pass_fds=(theirs, says),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "stuck\n"
        for descriptor in (theirs, ours, answers, says):
            os.close(descriptor)
        out, err = worker.communicate(timeout=BOUND)
    assert (worker.returncode, out) == (1, "")
    assert "the supervisor is gone" in err

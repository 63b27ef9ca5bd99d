"""Supervisor and its children: crash, stall, replacement, failed start, reload, pause and drain.

The children are simulated (programs/pretender.py): they send and receive the messages of a worker but run no tasks, so
each process starts quickly. tests/system/test_supervised_workers.py covers real workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import psutil
import pytest
from perdure.queues import Producer, Refused, SupervisorInfo, Unavailable, list_supervisors
from perdure.queues.supervisors import SupervisorState, count_crash, resume_supervisor
from perdure.queues.transport.backoff import Backoff
from perdure.worker.log import logger
from perdure.worker.runtime.children import processes
from perdure.worker.runtime.children.child import Child, ChildPipe, PipedProcess, SupervisorTimings
from perdure.worker.runtime.children.processes import StallMonitor
from perdure.worker.runtime.children.quarantine_pool import QuarantinePool
from perdure.worker.runtime.service_manager import ServiceManager
from perdure.worker.settings import Settings
from perdure.worker.supervise import crash_counter
from perdure.worker.supervise.config import SupervisorConfig
from perdure.worker.supervise.supervisor import Supervisor, run_alert

from tests.support.lossy_proxy import LossyProxy
from tests.support.notify_socket import NotifySocket
from tests.support.paths import PROGRAMS
from tests.support.processes import JournalLine, WorkerProcesses
from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.servers.webhook_server import listening
from tests.support.workers import BOUND, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PRETENDER = PROGRAMS / "pretender.py"


def json_line(what: str, task: str) -> str:
    return f"say {json.dumps({'what': what, 'id': task})}"


TIMINGS = SupervisorTimings(register_interval=0.1, abort_limit=0.3)


@dataclass
class Harness:
    """One supervisor in this process, and its simulated children."""

    folder: Path
    producer: Producer
    app_info: Mapping[str, Any]
    journal: WorkerProcesses
    patch: pytest.MonkeyPatch
    timings: SupervisorTimings = TIMINGS
    service: ServiceManager | None = None
    running: list[asyncio.Task[int]] = field(default_factory=list)

    async def start(self, processes: int = 2, **config: Any) -> Supervisor:
        """Start a supervisor and wait until all its children are ready."""
        before, spares = len(self.journal.lines("ready")), len(self.journal.lines("loaded", "spare"))
        supervisor = await self.start_without_waiting(processes, **config)
        await self.journal.line("ready", number=before + processes)
        if not config.get("burst"):
            await self.journal.line("loaded", "spare", number=spares + 1)
        return supervisor

    async def quarantine_child(self, task: str | None = None) -> int:
        """Have a quarantine child started, because an ordinary one leaves a quarantined task to it; return it.

        Args:
            task: The task that it runs; by default it finds none.
        """
        number = len(self.ready("isolated")) + 1
        self.order(self.ready()[0], 'say {"what": "suspects"}')
        child = await self.until_ready(number, "isolated")
        if task is not None:
            self.order(child, json_line("begins", task))
        return child

    async def start_without_waiting(self, processes: int = 2, *, isolated: int = 2, **config: Any) -> Supervisor:
        command = (sys.executable, "-X", "faulthandler", "-S", str(PRETENDER))
        settings = SupervisorConfig(command, processes, isolated, timings=self.timings, **config)
        supervisor = Supervisor(settings, self.service)
        self.running.append(asyncio.create_task(supervisor.run()))
        return supervisor

    async def exit_code(self) -> int:
        """Wait for the exit code of the supervisor that was started last."""
        return await asyncio.wait_for(asyncio.shield(self.running[-1]), BOUND)

    def set_app_info(self, **changes: Any) -> None:
        """Set what children that start from now on report about the app."""
        self.patch.setenv("FACTS", json.dumps({**self.app_info, **changes}))

    def order(self, pid: int, *lines: str) -> None:
        with (self.folder / str(pid)).open("a") as orders:
            orders.writelines(f"{line}\n" for line in lines)

    def order_new_children(self, order: str | None, role: str | None = None) -> None:
        path = self.folder / ("start" if role is None else f"start-{role}")
        if order is None:
            path.unlink()
        else:
            path.write_text(order)

    def ready(self, role: str = "worker") -> list[int]:
        """Return all processes that have been ready, in order."""
        return [line.pid for line in self.journal.lines("ready", role)]

    def started(self) -> int:
        return len(self.journal.lines("began"))

    async def until_ready(self, number: int, role: str = "worker") -> int:
        """Wait until this number of processes has been ready; return the last one."""
        return (await self.journal.line("ready", role, number=number)).pid

    async def until_received(self, pid: int, what: str, number: int = 1) -> JournalLine:
        return await self.journal.line("heard", what, pid=pid, number=number)

    async def info(self) -> SupervisorInfo:
        """Wait until the supervisor is registered; return its entry."""
        await wait_until(self._listed, "the supervisor's registration")
        return (await self._listed())[0]

    async def _listed(self) -> list[SupervisorInfo]:
        return await list_supervisors(self.producer.gateway, self.producer.namespace)

    async def until_counted(self, crashes: int) -> None:
        async def enough() -> bool:
            return (await self.info()).crashes >= crashes

        await wait_until(enough, f"{crashes} crashes")
        assert (await self.info()).crashes == crashes

    async def until_listed(self, **expected: int) -> None:
        """Wait until the list shows exactly these numbers of children by role and state."""

        async def right() -> bool:
            return Counter(f"{child.role}_{child.state}" for child in (await self.info()).children) == expected

        await wait_until(right, f"{expected} in the list")

    async def until_spare(self, number: int = 1) -> int:
        """Wait until the supervisor lists this spare, counted from 1, as one that can take over; return it."""
        pid = (await self.journal.line("loaded", "spare", number=number)).pid

        async def idle() -> bool:
            return any(child.pid == pid and child.state == "idle" for child in (await self.info()).children)

        await wait_until(idle, f"the spare {pid}")
        return pid

    def alive(self) -> set[int]:
        return {one.pid for one in psutil.Process().children() if is_pretender(one)}


def is_pretender(process: psutil.Process) -> bool:
    """Return whether a process is a simulated child that has not ended."""
    try:
        return "pretender.py" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or its subclass: a zombie
        return False


@pytest.fixture
async def harness(
    settings: Settings, producer_of_settings: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Harness]:
    async with open_harness(settings, producer_of_settings, tmp_path, monkeypatch) as harness:
        yield harness


@pytest.fixture
async def producer_of_settings(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(address=settings.address, namespace=settings.namespace) as producer:
        yield producer


@asynccontextmanager
async def open_harness(
    settings: Settings, producer: Producer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Harness]:
    app_info = {
        "app": "play",
        "url": settings.address.url,
        "directory": None,
        "namespace": settings.namespace,
        "grace": 5.0,
        "stall_limit": 1000.0,
        "crash_threshold": 3,
        "crash_window": 600.0,
        "restart_delays": [0.0],
    }
    orders = folder / "orders"
    orders.mkdir()
    workers = WorkerProcesses(settings, folder / "journal")
    workers.journal.touch()
    for name, path in {"JOURNAL": workers.journal, "ORDERS": orders}.items():
        monkeypatch.setenv(name, str(path))
    harness = Harness(orders, producer, app_info, workers, monkeypatch)
    harness.set_app_info()

    try:
        yield harness
    finally:
        for running in harness.running:
            running.cancel()
            await asyncio.wait([running])
        assert not harness.alive()


async def test_a_crashed_child_is_counted_and_replaced(harness: Harness) -> None:
    await harness.start()
    first, second = harness.ready()
    harness.order(first, "kill SIGKILL")
    await harness.until_ready(3)
    await harness.until_counted(1)
    harness.order(second, "exit 3")
    await harness.until_ready(4)
    await harness.until_counted(2)
    info = await harness.info()
    assert (info.processes, info.paused_since, info.app) == (2, 0, "play")
    await harness.until_listed(worker_working=2, spare_idle=1)


async def test_a_crash_after_progress_is_not_counted(harness: Harness) -> None:
    """Four kills of a child that had settled a task or recorded a step do not pause the supervisor."""
    harness.set_app_info(crash_threshold=1, restart_delays=[1000.0])
    harness.timings = replace(harness.timings, shortest_run=0.0)
    await harness.start(processes=1)
    for number in range(1, 5):
        harness.order(await harness.until_ready(number), 'say {"what": "progress"}', "kill SIGKILL")
    await harness.until_ready(5)
    info = await harness.info()
    assert (info.crashes, info.paused_since) == (0, 0)


async def test_a_spare_takes_over_at_once_and_is_replaced(harness: Harness) -> None:
    harness.set_app_info(restart_delays=[1000.0])
    await harness.start(processes=1)
    spare = await harness.until_spare()
    harness.order(harness.ready()[0], "kill SIGKILL")
    assert await harness.until_ready(2) == spare
    await harness.journal.line("loaded", "spare", number=2)


@pytest.fixture
def delays() -> Iterator[list[float]]:
    """Delays before replacements that the supervisor has logged."""
    found: list[float] = []

    def keep(message: Any) -> None:
        if text := re.search(r"starting another worker in ([0-9.]+) s", message.record["message"]):
            found.append(float(text[1]))

    sink = logger.add(keep, level="WARNING")
    yield found
    logger.remove(sink)


async def until_delayed(delays: list[float], number: int) -> None:
    """Wait until so many replacements have been announced."""

    async def enough() -> bool:
        return len(delays) >= number

    await wait_until(enough, f"{number} announced replacements")


async def test_only_after_the_first_crash_a_spare_takes_over_at_once(harness: Harness, delays: list[float]) -> None:
    harness.set_app_info(restart_delays=[1000.0, 2000.0])
    await harness.start(processes=1)
    await harness.until_spare()
    harness.order(harness.ready()[0], "kill SIGKILL")
    second = await harness.until_ready(2)
    await harness.until_spare(2)
    harness.order(second, "kill SIGKILL")
    await until_delayed(delays, 2)
    assert delays == [0, 2000]
    await harness.until_listed(spare_idle=1)
    assert len(harness.ready()) == 2


async def test_a_first_crash_without_a_spare_waits_for_its_delay(harness: Harness, delays: list[float]) -> None:
    harness.set_app_info(restart_delays=[1000.0])
    await harness.start(processes=1, burst=True)
    harness.order(harness.ready()[0], "kill SIGKILL")
    await until_delayed(delays, 1)
    assert delays == [1000]
    assert len(harness.ready()) == 1


async def test_a_spare_that_dies_is_replaced_and_not_counted(harness: Harness) -> None:
    await harness.start(processes=1)
    [spare] = [line.pid for line in harness.journal.lines("loaded", "spare")]
    os.kill(spare, signal.SIGKILL)
    await harness.journal.line("loaded", "spare", number=2)
    assert (await harness.info()).crashes == 0


async def test_a_child_that_exits_with_code_0_is_replaced_but_not_counted(harness: Harness) -> None:
    await harness.start()
    harness.order(harness.ready()[0], "exit 0")
    await harness.until_ready(3)
    assert (await harness.info()).crashes == 0


async def test_a_drained_child_is_not_replaced_and_the_supervisor_ends_with_the_last_one(harness: Harness) -> None:
    supervisor = await harness.start()
    first, second = harness.ready()
    harness.order(first, 'say {"what": "draining"}')
    await harness.until_listed(worker_working=1, worker_draining=1, spare_idle=1)
    supervisor.reload()
    replaced = await harness.until_ready(3)
    await harness.until_received(second, "stop")
    assert not [line for line in harness.journal.lines("heard", "stop") if line.pid == first], "it finishes its tasks"
    harness.order(first, "exit 0")
    await harness.until_listed(worker_working=1, spare_idle=1)
    harness.order(replaced, 'say {"what": "draining"}', "exit 0")
    assert await harness.exit_code() == 0
    assert len(harness.ready()) == 3
    assert await list_supervisors(harness.producer.gateway, harness.producer.namespace) == []


async def test_a_drained_child_that_crashes_is_counted_and_not_replaced(harness: Harness) -> None:
    await harness.start()
    first, second = harness.ready()
    harness.order(first, 'say {"what": "draining"}', "kill SIGKILL")
    await harness.until_counted(1)
    harness.order(second, 'say {"what": "draining"}', "exit 0")
    assert await harness.exit_code() == 0
    assert len(harness.ready()) == 2


async def test_a_failed_start_is_retried_and_not_counted(harness: Harness) -> None:
    await harness.start()
    harness.order_new_children("exit 1")
    harness.order(harness.ready()[0], "kill SIGKILL")
    await harness.journal.line("obeys", "exit-1", number=3)
    harness.order_new_children(None)
    await harness.until_ready(3)
    await harness.until_counted(1)


@pytest.mark.parametrize(("order", "code"), [("exit 2", 2), ("exit 0", 1), ("kill SIGSEGV", 128 + signal.SIGSEGV)])
async def test_a_first_child_that_fails_to_start_ends_the_supervisor(harness: Harness, order: str, code: int) -> None:
    harness.order_new_children(order)
    await harness.start_without_waiting(processes=3)
    assert await harness.exit_code() == code
    assert harness.started() == 1


async def test_stopping_drains_all_children(harness: Harness) -> None:
    await harness.start(processes=3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await harness.exit_code() == 0
    assert len(harness.journal.lines("heard", "stop")) == 4  # three workers and the spare
    assert await list_supervisors(harness.producer.gateway, harness.producer.namespace) == []


async def test_the_second_signal_stops_at_once_and_the_third_kills(harness: Harness) -> None:
    harness.set_app_info(grace=1000.0)
    await harness.start(processes=1)
    (harness.folder / "stubborn").touch()
    everybody = harness.alive()
    for number, sent in enumerate((signal.SIGTERM, signal.SIGINT), 1):
        os.kill(os.getpid(), sent)
        for pid in everybody:
            await harness.until_received(pid, "stop", number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await harness.exit_code() == 1


async def test_a_child_that_exceeds_the_stop_limit_is_killed_and_the_exit_code_is_1(harness: Harness) -> None:
    harness.set_app_info(grace=0.0)
    harness.timings = replace(harness.timings, stop_margin=0.1)
    (harness.folder / "stubborn").touch()
    supervisor = await harness.start(processes=1)
    supervisor.stop()
    assert await harness.exit_code() == 1


async def test_a_child_inherits_its_own_pipes_only(harness: Harness) -> None:
    await harness.start(processes=3)
    assert {line.key for line in harness.journal.lines("pipes")} == {"2"}


async def test_at_most_one_child_per_processor_starts_at_a_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    await harness.start(processes=4)
    order = [(line.what, line.pid) for line in harness.journal.lines() if line.what in ("began", "ready")]
    expected = [(what, pid) for _, pid in order[::2] for what in ("began", "ready")]
    assert order == expected[: len(order)]  # the spare may still be starting


async def test_quarantined_tasks_wake_idle_children_and_start_others_up_to_the_limit(harness: Harness) -> None:
    supervisor = await harness.start(processes=1, isolated=2)
    warm = await harness.quarantine_child()
    harness.order(harness.ready()[0], 'say {"what": "suspects"}')
    await harness.until_received(warm, "isolate")
    harness.order(warm, 'say {"what": "begins", "id": "t1"}')
    harness.order(warm, 'say {"what": "suspects"}')  # a busy child cannot run another task
    more = await harness.until_ready(2, "isolated")
    harness.order(more, 'say {"what": "begins", "id": "t2"}', 'say {"what": "suspects"}', "note said")
    await harness.journal.line("noted", "said", pid=more)  # both are busy, and the limit is two
    harness.order(warm, 'say {"what": "ends", "id": "t1"}', 'say {"what": "suspects"}')
    await harness.until_received(warm, "isolate", 2)
    supervisor.stop()
    await harness.exit_code()
    assert len(harness.ready("isolated")) == 2


async def test_survivors_free_their_places(harness: Harness) -> None:
    """Long suspects do not keep others waiting; when they end, the limit holds again."""
    await harness.start(processes=1, isolated=1)
    survivors: list[int] = []
    for number in range(1, 4):
        child = await harness.until_ready(number, "isolated") if survivors else await harness.quarantine_child()
        harness.order(child, json_line("begins", f"t{number}"), 'say {"what": "suspects"}')
        harness.order(child, json_line("survived", f"t{number}"))
        survivors.append(child)
    last = await harness.until_ready(4, "isolated")
    harness.order(last, json_line("begins", "t4"))
    harness.order(survivors[0], json_line("ends", "t1"))
    await harness.until_received(survivors[0], "stop")


async def test_idle_quarantine_children_are_terminated(harness: Harness) -> None:
    harness.timings = replace(harness.timings, idle_limit=0.05, idle_poll=0.05)
    await harness.start(processes=1, isolated=2)
    await harness.until_received(await harness.quarantine_child(), "stop")


async def test_a_crash_of_a_quarantine_child_is_not_counted(harness: Harness) -> None:
    harness.set_app_info(restart_delays=[1000.0])
    await harness.start(processes=1)
    warm = await harness.quarantine_child("t1")
    harness.order(warm, "kill SIGKILL")
    await wait_until(lambda: gone(warm), "the child's end")
    await harness.quarantine_child()
    assert (await harness.info()).crashes == 0


async def test_a_requested_replacement_is_ready_before_the_old_child_stops(harness: Harness) -> None:
    supervisor = await harness.start(processes=1)
    [old] = harness.ready()
    harness.order(old, *['say {"what": "replace", "why": "threads"}'] * 2)
    await harness.until_received(old, "stop")
    new = await harness.until_ready(2)
    happened = [(line.what, line.pid) for line in harness.journal.lines() if line.key in ("worker", "stop")]
    assert happened.index(("ready", new)) < happened.index(("heard", old))
    assert (await harness.info()).crashes == 0
    supervisor.stop()
    await harness.exit_code()
    assert len(harness.ready()) == 2  # though requested twice


async def test_a_replaced_child_that_exceeds_the_stop_limit_is_killed(harness: Harness) -> None:
    harness.set_app_info(grace=0.0)
    harness.timings = replace(harness.timings, stop_margin=0.1)
    (harness.folder / "stubborn").touch()
    await harness.start(processes=1)
    [old] = harness.ready()
    harness.order(old, 'say {"what": "replace", "why": "threads"}')
    await harness.until_ready(2)

    async def killed() -> bool:
        return not psutil.pid_exists(old)

    await wait_until(killed, "the old child was killed")


@pytest.mark.parametrize("stuck", ["in its loop", "in C code", "stopped"])
async def test_a_stalled_child_dumps_its_stacks_and_is_replaced(
    harness: Harness, stuck: str, capfd: pytest.CaptureFixture[str]
) -> None:
    harness.set_app_info(stall_limit=500.0 if stuck == "in its loop" else 1.0)
    await harness.start(processes=1)
    [one] = harness.ready()
    if stuck == "in its loop":
        harness.order(one, "lag 501")
    elif stuck == "in C code":
        harness.order(one, "stick")
    else:
        os.kill(one, signal.SIGSTOP)
    await harness.until_ready(2)
    await harness.until_counted(1)
    if stuck != "stopped":  # a stopped process ends by SIGKILL only
        assert "Fatal Python error: Aborted" in capfd.readouterr().err


async def test_a_child_that_is_silent_from_its_first_task_on_is_replaced(harness: Harness) -> None:
    """A task that holds the interpreter lock may run before the first heartbeat."""
    harness.set_app_info(stall_limit=1.0)
    (harness.folder / "silent").touch()
    await harness.start_without_waiting(processes=1)
    silent = await harness.until_ready(1)
    (harness.folder / "silent").unlink()
    assert await harness.until_ready(2) != silent
    await harness.until_counted(1)


async def test_the_health_of_a_supervisor_names_the_child_whose_interpreter_is_stuck(harness: Harness) -> None:
    harness.timings = replace(TIMINGS, heartbeat_limit=1.0)
    supervisor = await harness.start(processes=1)
    [one] = harness.ready()

    async def heartbeats(live: bool) -> bool:
        return supervisor.health().live is live

    harness.order(one, "stick")
    await harness.journal.line("stuck", pid=one)
    await wait_until(partial(heartbeats, live=False), "the supervisor is not live")
    health = supervisor.health()
    assert not health.ready
    failing = [(report["worker"], level) for report in health.summary()["workers"] for level in report["levels"]]
    [said] = [level["said"] for worker, level in failing if worker == f"worker-{one}" and level["name"] == "alive"]
    assert said.startswith("no heartbeat for")
    os.kill(one, signal.SIGKILL)
    await wait_until(partial(heartbeats, live=True), "the child is replaced")


@dataclass
class SilentChild:
    """A child that sent one heartbeat at time 0."""

    last_heartbeat: float = 0.0
    loop_lag: float = 0.0
    stalled: str = ""
    stop_requests: int = 0
    worker: str = "silent"
    pid: int = 0
    exited: anyio.Event = field(default_factory=anyio.Event)


@pytest.mark.parametrize(("seconds", "stalled"), [(1.0, True), (100.0, False)], ids=["running", "frozen"])
def test_missing_heartbeats_count_only_while_the_supervisor_runs(seconds: float, stalled: bool) -> None:
    """After a supervisor was frozen, the silence of its children means nothing."""
    silent = cast("Child", SilentChild())
    monitor = StallMonitor([silent], 10.0, SupervisorTimings())
    found = [child for check in range(13) for child in monitor.find_stalled(check * seconds)]
    assert (silent in found) is stalled


def test_a_supervisor_that_was_frozen_for_longer_than_a_short_stall_limit_kills_no_child() -> None:
    silent = cast("Child", SilentChild())
    monitor = StallMonitor([silent], 2.0, SupervisorTimings())
    assert not [child for now in (0.0, 0.5, 1.0, 4.0) for child in monitor.find_stalled(now)]
    assert [child for now in (5.0, 6.0, 6.5) for child in monitor.find_stalled(now)] == [silent]


async def test_messages_left_in_the_pipe_of_a_dead_child_are_read() -> None:
    """The exit may be noticed before the last messages are read."""

    class Dead:
        pid = 0

        async def wait(self) -> int:
            return -signal.SIGKILL

    pipe = ChildPipe()
    dead = Child("isolated", PipedProcess(cast("asyncio.subprocess.Process", Dead()), pipe), lambda *_: None)
    os.write(
        pipe.child_ends[1], b'{"say": "begins", "id": "t1"}\n{"say": "step", "id": "t1", "step": "die"}\n{"say": "en'
    )
    pipe.close_child_ends()
    await dead.wait()
    assert (dead.exit_status, dead.steps) == ("SIGKILL", {"t1": "die"})


async def test_an_alert_command_gets_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERDURE_ENCRYPTION_KEYS", "PERDURE_WEBHOOK_SECRET", "PERDURE_WEBHOOK_URL", "PERDURE_MEMORY"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://host")
    seen = tmp_path / "seen"
    await run_alert(f"env > {seen}", {"event": "paused"}, 20.0)
    assert "hunter2" not in seen.read_text()
    assert "PERDURE_REDIS_URL=redis://host" in seen.read_text()  # the command may run perdure


async def test_an_alert_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    await run_alert(f"sleep 1000 & echo $! > {pid_file}; wait", {"event": "paused"}, 0.2)
    await wait_until(lambda: gone(int(pid_file.read_text())), "the end of the alert's child process")


async def test_invalid_messages_of_a_child_are_ignored(harness: Harness) -> None:
    await harness.start(processes=1)
    [one] = harness.ready()
    invalid = ("not json", "[]", "{}", '{"say": 1}', '{"say": "alive", "lag": "x"}', '{"say": "later"}', "\xff")
    harness.order(one, *(f"raw {line}" for line in invalid), 'say {"what": "suspects"}')
    await harness.until_ready(1, "isolated")


async def test_a_reload_replaces_one_child_at_a_time(harness: Harness, log: list[str]) -> None:
    await harness.start(processes=3)
    old = harness.ready()
    idle = await harness.quarantine_child()
    os.kill(os.getpid(), signal.SIGHUP)
    await harness.until_received(idle, "stop")
    new = harness.ready()[3:]
    happened = [
        (line.what, line.pid)
        for line in harness.journal.lines()
        if (line.what, line.key) in (("ready", "worker"), ("heard", "stop")) and line.pid in (*old, *new)
    ][3:]
    assert [what for what, _ in happened] == ["ready", "heard"] * 3
    assert [pid for what, pid in happened if what == "ready"] == new
    assert sorted(pid for what, pid in happened if what == "heard") == sorted(old)  # in any order
    assert len(harness.ready("isolated")) == 1
    assert (await harness.info()).crashes == 0
    await until_logged(log, "all workers replaced")
    assert not [line for line in log if "reload stopped" in line]


async def test_a_reload_during_start_up_is_done_after_it(harness: Harness) -> None:
    supervisor = await harness.start_without_waiting(processes=1)
    await harness.journal.line("began")
    supervisor.reload()  # the first child may have loaded the old code
    first = await harness.until_ready(1)
    await harness.until_received(first, "stop")
    await harness.until_ready(2)


async def test_the_service_manager_is_notified_of_the_state(harness: Harness, tmp_path: Path) -> None:
    with NotifySocket(tmp_path / "notify") as systemd:
        harness.service = ServiceManager(systemd.name, watchdog=0.3)
        supervisor = await harness.start(processes=2)
        assert "of 2 workers ready" in (await systemd.until())["STATUS"]  # before it is ready
        await systemd.until(READY="1")
        await systemd.until(WATCHDOG="1")
        os.kill(os.getpid(), signal.SIGHUP)
        await systemd.until(RELOADING="1")
        await systemd.until(READY="1")
        assert len(harness.ready()) == 4  # the reload had ended
        supervisor.stop()
        await systemd.until(STOPPING="1")
        assert await harness.exit_code() == 0


async def test_a_supervisor_that_starts_paused_is_ready_for_the_service_manager(
    harness: Harness, tmp_path: Path
) -> None:
    harness.set_app_info(crash_threshold=0)
    await harness.start(processes=1)
    harness.order(harness.ready()[0], "kill SIGKILL")

    async def paused() -> bool:
        return (await harness.info()).paused_since > 0

    await wait_until(paused, "the pause")
    harness.running[0].cancel()
    await asyncio.wait([harness.running[0]])
    with NotifySocket(tmp_path / "notify") as systemd:
        harness.service = ServiceManager(systemd.name, watchdog=0.03)
        await harness.start_without_waiting(processes=1)
        await systemd.until(READY="1")  # else systemd would end it as one that does not start
        await systemd.until(STATUS="paused after crashes, 0 of 1 worker ready; see 'perdure worker list'")
        await systemd.until(WATCHDOG="1")


async def test_a_supervisor_stops_when_its_terminal_is_closed(harness: Harness) -> None:
    program = f"""
import fcntl, termios
import anyio
from perdure.worker.supervise.config import SupervisorConfig
from perdure.worker.supervise.supervisor import Supervisor
child = ({sys.executable!r}, "-S", {str(PRETENDER)!r})
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
raise SystemExit(anyio.run(Supervisor(SupervisorConfig(child, 1, 1)).run))
"""
    ours, theirs = os.openpty()
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdin=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        await harness.until_ready(1)
        os.kill(supervisor.pid, signal.SIGHUP)
        await harness.until_ready(2)  # SIGHUP is a reload while the terminal exists
        os.close(ours)
        assert await asyncio.wait_for(supervisor.wait(), BOUND) == 0
    finally:
        if supervisor.returncode is None:
            supervisor.kill()
            await supervisor.wait()


async def test_a_reload_waits_for_the_end_of_a_quarantined_task(harness: Harness) -> None:
    supervisor = await harness.start(processes=1)
    busy = await harness.quarantine_child("t1")
    harness.order(busy, 'say {"what": "suspects"}')  # read after the message that it is busy
    idle = await harness.until_ready(2, "isolated")
    supervisor.reload()
    await harness.until_received(idle, "stop")
    assert not harness.journal.lines("heard", "stop", pid=busy)
    harness.order(busy, 'say {"what": "ends", "id": "t1"}')
    await harness.until_received(busy, "stop")


async def test_a_request_that_arrives_with_the_first_messages_of_a_child_is_not_lost() -> None:
    """They are handled before the pool knows that the child is ready."""
    started: list[SimpleNamespace] = []

    async def spawn() -> Child:
        started.append(running_child(busy=not started))
        if started[-1].busy:
            pool.scale_up(1)
        return cast("Child", started[-1])

    pool = QuarantinePool(spawn, lambda child: None, lambda failures: 0.0, 4, SupervisorTimings())
    async with anyio.create_task_group() as running:
        running.start_soon(pool.run)
        pool.scale_up(1)
        await wait_until(partial(_has, started, 2), "another child")
        running.cancel_scope.cancel()


async def test_each_failed_start_of_a_quarantine_child_takes_the_next_delay() -> None:
    tried: list[int] = []
    delays: list[int] = []

    async def spawn() -> None:
        tried.append(delays[-1])

    def delay(failures: int) -> float:
        delays.append(failures)
        return 0.0

    pool = QuarantinePool(spawn, lambda child: None, delay, 4, SupervisorTimings())
    async with anyio.create_task_group() as running:
        running.start_soon(pool.run)
        for number in range(1, 4):
            pool.scale_up(1)
            await wait_until(partial(_has, tried, number), "another start")
            await wait_until(_idle(pool), "its failure")
        running.cancel_scope.cancel()
    assert tried == [0, 1, 2]


async def test_a_quarantine_child_that_dies_without_a_task_is_replaced_after_a_delay() -> None:
    """Each takes the next delay: what ends it may end the next one, too."""
    started: list[SimpleNamespace] = []
    delays: list[int] = []

    async def spawn() -> Child:
        started.append(running_child(busy=False, crashed=True))
        return cast("Child", started[-1])

    def delay(failures: int) -> float:
        delays.append(failures)
        return 0.0

    pool = QuarantinePool(spawn, lambda child: None, delay, 4, SupervisorTimings())
    async with anyio.create_task_group() as running:
        running.start_soon(pool.run)
        pool.scale_up(1)
        for number in range(1, 4):
            await wait_until(partial(_has, started, number), "another child")
            await wait_until(lambda: _is_in(pool, started[-1]), "its place")
            pool.on_exit(cast("Child", started[-1]))
        await wait_until(partial(_has, started, 4), "the last child")
        running.cancel_scope.cancel()
    assert delays == [0, 1, 2, 3]


async def _is_in(pool: QuarantinePool, child: SimpleNamespace) -> bool:
    return child in pool._children


def _idle(pool: QuarantinePool) -> Callable[[], Awaitable[bool]]:
    async def idle() -> bool:
        return pool.idle

    return idle


@pytest.mark.parametrize("code", [0, 1])
async def test_a_quarantine_child_that_exits_as_soon_as_it_is_ready_takes_up_no_place(code: int) -> None:
    """Its exit is handled before the pool knows that it is ready. Then a later request starts another child."""
    started: list[SimpleNamespace] = []

    async def spawn() -> Child:
        started.append(running_child(busy=False))
        if len(started) == 1:
            started[0].crashed = code != 0
            started[0].exited.set()
            pool.on_exit(cast("Child", started[0]))
        return cast("Child", started[-1])

    pool = QuarantinePool(spawn, lambda child: None, lambda failures: 0.0, 1, SupervisorTimings())
    async with anyio.create_task_group() as running:
        running.start_soon(pool.run)
        pool.scale_up(1)
        await wait_until(partial(_has, started, 1), "the first child")
        await anyio.wait_all_tasks_blocked()
        pool.scale_up(1)
        await wait_until(partial(_has, started, 2), "another child")
        running.cancel_scope.cancel()


def running_child(*, busy: bool, crashed: bool = False) -> SimpleNamespace:
    events = {name: anyio.Event() for name in ("ready", "exited")}
    events["ready"].set()
    return SimpleNamespace(
        busy=busy,
        crashed=crashed,
        survived=False,
        stop_requests=0,
        idle_since=0.0,
        check_quarantine=lambda: None,
        **events,
    )


async def _has(found: Sequence[object], number: int) -> bool:
    return len(found) >= number


@pytest.mark.parametrize(
    ("order", "ended"), [("exit 1", []), ("exit 0", ["exit code 0"]), ("kill SIGKILL", ["SIGKILL"])]
)
async def test_a_reload_logs_that_a_new_child_failed_to_start(
    harness: Harness, log: list[str], order: str, ended: list[str]
) -> None:
    """A child that ends with another exit code than 0 has logged its error itself."""
    supervisor = await harness.start(processes=1)
    harness.order_new_children(order)
    supervisor.reload()
    await until_logged(log, "reload stopped")
    assert not [line for line in log if "all workers replaced" in line]
    assert [how for line in log for how in re.findall(r"ended by (.+) before it was ready", line)] == ended
    assert set(harness.ready()) <= harness.alive()


async def until_logged(log: list[str], text: str) -> None:
    async def logged() -> bool:
        return any(text in line for line in log)

    await wait_until(logged, f"the log line {text!r}")


async def test_a_failed_start_stops_the_reload_and_keeps_the_old_children(harness: Harness, log: list[str]) -> None:
    supervisor = await harness.start()
    old = harness.ready()
    harness.order_new_children("exit 1")
    supervisor.reload()
    await until_logged(log, "reload stopped")
    harness.order_new_children(None)
    await harness.until_listed(worker_working=2, spare_idle=1)
    assert set(old) <= harness.alive()
    assert not [pid for pid in old if harness.journal.lines("heard", "stop", pid=pid)]
    supervisor.reload()
    for pid in old:
        await harness.until_received(pid, "stop")


async def test_a_failed_reload_warns_once_that_a_crash_cannot_be_replaced(
    harness: Harness, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor tries again until the code can be imported, and says so once at the begin and once at the end."""
    monkeypatch.setattr(processes, "_RETRY", Backoff(first=0.01, longest=0.01))
    why = "a worker that crashes now cannot be replaced: could not import tasks.py: no module 'shop'"
    supervisor = await harness.start(processes=1)

    async def has_spare() -> bool:
        return supervisor.measurements().gauges["perdure_supervisor_spare",] == 1

    await wait_until(has_spare, "there is a spare")
    assert why not in supervisor.health().reasons
    harness.order_new_children("fail could not import tasks.py: no module 'shop'")
    began = len(harness.journal.lines("began", "spare"))
    supervisor.reload()
    await until_logged(log, "reload stopped")
    await harness.journal.line("began", "spare", number=began + 3)
    assert why in supervisor.health().reasons
    assert supervisor.measurements().gauges["perdure_supervisor_spare",] == 0
    harness.order_new_children(None)
    await until_logged(log, "a worker that crashes can be replaced again")
    assert [line for line in log if "cannot be replaced" in line] == [f"{why}; this is tried again until it succeeds\n"]
    assert [line for line in log if "could not start: could not import tasks.py" in line]
    assert why not in supervisor.health().reasons
    await wait_until(has_spare, "there is a spare again")


async def test_counts_of_a_child_that_was_killed_stay_in_the_metrics(harness: Harness) -> None:
    supervisor = await harness.start(processes=2)
    one, two = harness.ready()
    key = ["perdure_task_runs_total", "q", "t", "completed"]
    for pid, number in ((one, 5), (two, 7)):
        row = json.dumps({"say": "counts", "rows": [[key, [number]]], "gauges": {"perdure_worker_slots": 16}})
        harness.order(pid, f"raw {row}")

    def counted() -> tuple[float, float]:
        measured = supervisor.measurements()
        return measured.counts.get(tuple(key), [0.0])[0], measured.gauges.get(("perdure_worker_slots",), 0.0)

    async def both() -> bool:
        return counted() == (12, 32)

    await wait_until(both, "both have sent their counts")
    harness.order(one, "kill SIGKILL")
    await harness.until_ready(3)
    assert counted() == (12, 16)  # the new one has sent nothing yet
    assert supervisor.measurements().counts["perdure_supervisor_crashes_total", "worker"] == [1]
    harness.order(two, f"raw {json.dumps({'say': 'counts', 'rows': [[key, [9]]]})}", "raw {", 'raw {"say": "counts"}')

    async def more() -> bool:
        return counted()[0] == 14

    await wait_until(more, "the other one goes on counting")


async def test_too_many_crashes_pause_and_alert_and_the_pause_survives_a_restart(
    harness: Harness, tmp_path: Path
) -> None:
    alerted = tmp_path / "alerted"
    with listening() as webhook:
        harness.set_app_info(crash_threshold=1, webhook=webhook.url)
        supervisor = await harness.start(alert=f"cat > {alerted}.tmp && mv {alerted}.tmp {alerted}")
        harness.order(harness.ready()[0], "kill SIGKILL")
        replaced = await harness.until_ready(3)
        harness.order(replaced, "kill SIGSEGV")
        _, posted = await webhook.heard()

    async def paused() -> bool:
        return (await harness.info()).paused_since > 0 and alerted.exists()

    await wait_until(paused, "the pause, and the alert")
    about = json.loads(alerted.read_bytes())
    assert posted == about
    assert (about["event"], about["crashes"], about["supervisor"]) == ("paused", 2, (await harness.info()).name)
    assert f"worker-{replaced} ended by SIGSEGV" in about["why"]
    assert harness.alive() & set(harness.ready()) == {harness.ready()[1]}
    assert f"perdure worker resume {about['supervisor']}" in about["remedy"]
    reason = supervisor.health().reasons[0]
    assert reason.startswith(f"supervisor {about['supervisor']} paused at 20")
    assert reason.endswith(f"perdure worker resume {about['supervisor']}")
    assert supervisor.measurements().gauges["perdure_supervisor_paused",] == 1

    supervisor.stop()
    assert supervisor.health().reasons[0] == "the supervisor is stopping all workers"
    assert await harness.exit_code() == 0
    alerted.unlink()
    spares = len(harness.journal.lines("loaded", "spare"))
    await harness.start_without_waiting()
    await harness.journal.line("loaded", "spare", number=spares + 1)
    assert len(harness.ready()) == 3
    info = await harness.info()
    assert info.paused_since == about["paused_since"]
    assert await resume_supervisor(harness.producer.gateway, harness.producer.namespace, info.name)
    await harness.until_ready(5)
    assert (await harness.info()).crashes == 0
    assert not alerted.exists()


async def test_a_burst_ends_when_all_children_have_exited(harness: Harness) -> None:
    await harness.start(burst=True)
    for pid in harness.ready():
        harness.order(pid, "exit 0")
    assert await harness.exit_code() == 0
    assert len(harness.ready()) == 2


async def test_a_burst_waits_for_quarantined_tasks(harness: Harness) -> None:
    await harness.start(processes=1, burst=True)
    [ordinary] = harness.ready()
    warm = await harness.quarantine_child("t1")
    harness.order(warm, 'say {"what": "suspects"}')
    more = await harness.until_ready(2, "isolated")
    harness.order(ordinary, "exit 0")
    harness.order(
        more, 'say {"what": "begins", "id": "t2"}', 'say {"what": "ends", "id": "t2"}', 'say {"what": "idle"}'
    )
    await harness.until_listed(isolated_busy=1, isolated_idle=1)
    assert not harness.running[0].done()
    harness.order(warm, 'say {"what": "ends", "id": "t1"}', 'say {"what": "idle"}')
    harness.order(await harness.until_ready(2), "exit 0")
    assert await harness.exit_code() == 0


@pytest.mark.parametrize("end", ["kill SIGKILL", 'say {"what": "ends", "id": "t1"}'])
async def test_a_burst_looks_for_what_a_quarantine_child_has_left(harness: Harness, end: str) -> None:
    """A task that it left for a retry, or that killed it, is queued, and the ordinary child has exited before."""
    harness.order_new_children('say {"what": "idle"}', "isolated")
    await harness.start(processes=1, burst=True)
    [ordinary] = harness.ready()
    isolated = await harness.quarantine_child("t1")

    async def busy() -> bool:
        return any(child.state == "busy" for child in (await harness.info()).children)

    await wait_until(busy, "a busy quarantine child")
    harness.order(ordinary, "exit 0")
    await wait_until(lambda: gone(ordinary), "the end of the ordinary child")
    harness.order(isolated, end, 'say {"what": "idle"}')
    harness.order(await harness.until_ready(2), "exit 0")
    assert await harness.exit_code() == 0
    assert len(harness.ready()) == 2


async def test_a_burst_waits_for_a_quarantine_child_that_fails_to_start(harness: Harness) -> None:
    harness.order_new_children("exit 1", "isolated")
    await harness.start(processes=1, burst=True)
    [ordinary] = harness.ready()
    harness.order(ordinary, 'say {"what": "suspects"}', "exit 0")
    await wait_until(lambda: gone(ordinary), "the end of the ordinary child")
    harness.order_new_children(None, "isolated")
    isolated = await harness.until_ready(1, "isolated")
    harness.order(isolated, 'say {"what": "idle"}')
    assert await harness.exit_code() == 0


async def test_a_crash_while_redis_is_unavailable_is_reported_later(
    settings: Settings, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    try:
        away = settings.model_copy(update={"redis_url": server.url})
        async with (
            Producer(address=away.address, namespace=namespace_name) as producer,
            open_harness(away, producer, tmp_path, monkeypatch) as harness,
        ):
            await harness.start(processes=1)
            server.kill()
            harness.order(harness.ready()[0], "kill SIGKILL")
            await wait_until(lambda: gone(harness.ready()[0]), "the child's end")
            server.start()
            await harness.until_ready(2)
            await harness.until_counted(1)
    finally:
        server.stop()


async def test_counting_a_crash_is_retried_while_redis_is_unavailable(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def away(*args: Any, **named: Any) -> SupervisorState:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise Unavailable("away")
        return await count_crash(*args, **named)

    monkeypatch.setattr(crash_counter, "count_crash", away)
    await harness.start(processes=1)
    harness.order(harness.ready()[0], "kill SIGKILL")
    await harness.until_ready(2)
    await harness.until_counted(1)


async def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_a_supervisor_stops_in_time_while_redis_is_away(harness: Harness, settings: Settings) -> None:
    """Frozen connections answer nothing. Its registration expires, so it does not wait to remove it."""
    async with LossyProxy(Path(settings.redis_url.removeprefix("unix://")), harness.folder / "line").open() as line:
        harness.set_app_info(url=f"unix://{harness.folder / 'line'}")
        supervisor = await harness.start(processes=1)
        await harness.info()
        line.hang()
        started = time.monotonic()
        supervisor.stop()
        assert await harness.exit_code() == 0
        assert time.monotonic() - started < 5, "it took 11 s"


async def test_no_child_starts_work_if_redis_refuses_the_connection(harness: Harness) -> None:
    harness.set_app_info(url=harness.app_info["url"].replace("unix://", "unix://:wrong@"))
    await harness.start_without_waiting()
    with pytest.raises(ExceptionGroup) as raised:
        await harness.exit_code()
    assert raised.group_contains(Refused)
    assert harness.ready() == []

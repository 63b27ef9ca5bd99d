"""The supervisor and its children: what it does when they die, hang, ask for something or do not start.

The children pretend (programs/pretender.py): they speak the supervisor's language and run no tasks, so that each of
these processes starts in a moment. With real ones: test_supervised_workers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import psutil
import pytest
from perdure.queues import (
    Producer,
    Refused,
    SupervisorInfo,
    SupervisorState,
    Unavailable,
    count_crash,
    list_supervisors,
    resume_supervisor,
)
from perdure.worker.log import logger
from perdure.worker.settings import Settings
from perdure.worker.supervise import (
    Supervisor,
    SupervisorConfig,
    child,
    children,
    crash_counter,
    quarantine_pool,
    stall_monitor,
)
from perdure.worker.supervise import child as line
from perdure.worker.supervise import supervisor as alert
from perdure.worker.supervise.child import Child
from perdure.worker.supervise.stall_monitor import StallMonitor

from tests.support.paths import PROGRAMS
from tests.support.processes import Crew, Line
from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.webhook_server import listening
from tests.support.workers import BOUND, until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PRETENDER = PROGRAMS / "pretender.py"


@dataclass
class Stage:
    """One supervisor in this process, and its pretending children."""

    folder: Path
    producer: Producer
    facts: Mapping[str, Any]
    journal: Crew
    patch: pytest.MonkeyPatch
    running: list[asyncio.Task[int]] = field(default_factory=list)

    async def start(self, processes: int = 2, **plan: Any) -> Supervisor:
        """Start a supervisor, and return when all its children work."""
        before = len(self.journal.lines("ready"))
        supervisor = await self.begin(processes, **plan)
        await self.journal.line("ready", number=before + processes + 1)
        return supervisor

    async def begin(self, processes: int = 2, *, isolated: int = 2, **plan: Any) -> Supervisor:
        """Start a supervisor."""
        command = (sys.executable, "-X", "faulthandler", "-S", str(PRETENDER))
        supervisor = Supervisor(SupervisorConfig({"worker": command, "isolated": command}, processes, isolated, **plan))
        self.running.append(asyncio.create_task(supervisor.run()))
        return supervisor

    async def ended(self) -> int:
        """The exit code of the supervisor that was started last."""
        return await asyncio.wait_for(asyncio.shield(self.running[-1]), BOUND)

    def change(self, **facts: Any) -> None:
        """What children tell that start from now on."""
        self.patch.setenv("FACTS", json.dumps({**self.facts, **facts}))

    def order(self, pid: int, *lines: str) -> None:
        with (self.folder / str(pid)).open("a") as orders:
            orders.writelines(f"{line}\n" for line in lines)

    def order_all_that_start(self, order: str | None, role: str | None = None) -> None:
        path = self.folder / ("start" if role is None else f"start-{role}")
        if order is None:
            path.unlink()
        else:
            path.write_text(order)

    def ready(self, role: str = "worker") -> list[int]:
        """Processes that ever worked, in order."""
        return [line.pid for line in self.journal.lines("ready", role)]

    def began(self) -> int:
        return len(self.journal.lines("began"))

    async def came(self, number: int, role: str = "worker") -> int:
        """Wait until so many have worked; returns the process that came last."""
        return (await self.journal.line("ready", role, number=number)).pid

    async def told(self, pid: int, what: str, number: int = 1) -> Line:
        return await self.journal.line("heard", what, pid=pid, number=number)

    async def info(self) -> SupervisorInfo:
        """What is known of the supervisor, as soon as it has announced itself."""
        await until(self._listed, "the supervisor's announcement")
        return (await self._listed())[0]

    async def _listed(self) -> list[SupervisorInfo]:
        return await list_supervisors(self.producer.gateway, self.producer.namespace)

    async def counted(self, crashes: int) -> None:
        async def enough() -> bool:
            return (await self.info()).crashes >= crashes

        await until(enough, f"{crashes} crashes")
        assert (await self.info()).crashes == crashes

    async def shows(self, **expected: int) -> None:
        """Wait until the list shows so many children of each role and state, and no others."""

        async def right() -> bool:
            return Counter(f"{child.role}_{child.state}" for child in (await self.info()).children) == expected

        await until(right, f"{expected} in the list")

    def alive(self) -> set[int]:
        return {one.pid for one in psutil.Process().children() if "pretender.py" in " ".join(one.cmdline())}


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
async def stage(
    settings: Settings, producer_of_settings: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    async with staged(settings, producer_of_settings, tmp_path, monkeypatch) as stage:
        yield stage


@pytest.fixture
async def producer_of_settings(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(address=settings.address, namespace=settings.namespace) as producer:
        yield producer


@asynccontextmanager
async def staged(
    settings: Settings, producer: Producer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    facts = {
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
    crew = Crew(settings, folder / "journal")
    crew.journal.touch()
    for name, path in {"JOURNAL": crew.journal, "ORDERS": orders}.items():
        monkeypatch.setenv(name, str(path))
    monkeypatch.setattr(crash_counter, "_INTERVAL", 0.1)
    monkeypatch.setattr(child, "_LAST_WORDS", 0.3)
    stage = Stage(orders, producer, facts, crew, monkeypatch)
    stage.change()

    try:
        yield stage
    finally:
        for running in stage.running:
            running.cancel()
            await asyncio.wait([running])
        assert not stage.alive()


async def test_a_child_that_dies_is_counted_and_replaced(stage: Stage) -> None:
    await stage.start()
    first, second = stage.ready()
    stage.order(first, "kill SIGKILL")
    await stage.came(3)
    await stage.counted(1)
    stage.order(second, "exit 3")
    await stage.came(4)
    await stage.counted(2)
    info = await stage.info()
    assert (info.processes, info.paused_since, info.app) == (2, 0, "play")
    await stage.shows(worker_working=2, isolated_idle=1)


async def test_a_child_that_came_to_its_end_is_replaced_and_not_counted(stage: Stage) -> None:
    await stage.start()
    stage.order(stage.ready()[0], "exit 0")
    await stage.came(3)
    assert (await stage.info()).crashes == 0


async def test_what_does_not_start_is_tried_again_and_not_counted(stage: Stage) -> None:
    await stage.start()
    stage.order_all_that_start("exit 1")
    stage.order(stage.ready()[0], "kill SIGKILL")
    await stage.journal.line("obeys", "exit-1", number=3)
    stage.order_all_that_start(None)
    await stage.came(3)
    await stage.counted(1)


@pytest.mark.parametrize(("order", "code"), [("exit 2", 2), ("exit 0", 1), ("kill SIGSEGV", 128 + signal.SIGSEGV)])
async def test_a_first_child_that_cannot_begin_ends_the_supervisor(stage: Stage, order: str, code: int) -> None:
    stage.order_all_that_start(order)
    await stage.begin(processes=3)
    assert await stage.ended() == code
    assert stage.began() == 1


async def test_stopping_drains_all_children(stage: Stage) -> None:
    await stage.start(processes=3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stage.ended() == 0
    assert len(stage.journal.lines("heard", "stop")) == 4
    assert await list_supervisors(stage.producer.gateway, stage.producer.namespace) == []


async def test_the_second_signal_hurries_and_the_third_kills(stage: Stage) -> None:
    stage.change(grace=1000.0)
    await stage.start(processes=1)
    (stage.folder / "stubborn").touch()
    everybody = stage.alive()
    for number, sent in enumerate((signal.SIGTERM, signal.SIGINT), 1):
        os.kill(os.getpid(), sent)
        for pid in everybody:
            await stage.told(pid, "stop", number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stage.ended() == 1


async def test_a_child_that_takes_too_long_is_killed_and_the_exit_code_tells(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_LEAVING", -4.9)
    (stage.folder / "stubborn").touch()
    supervisor = await stage.start(processes=1)
    supervisor.stop()
    assert await stage.ended() == 1


async def test_a_child_has_its_own_pipes_and_no_others(stage: Stage) -> None:
    await stage.start(processes=3)
    assert {line.key for line in stage.journal.lines("pipes")} == {"2"}


async def test_no_more_children_start_at_a_time_than_there_are_processors(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    await stage.start(processes=4)
    order = [(line.what, line.pid) for line in stage.journal.lines() if line.what in ("began", "ready")]
    assert order == [(what, pid) for _, pid in order[::2] for what in ("began", "ready")]


async def test_suspects_wake_who_is_idle_and_bring_in_others_up_to_the_limit(stage: Stage) -> None:
    supervisor = await stage.start(processes=1, isolated=2)
    [ordinary], [warm] = stage.ready(), stage.ready("isolated")
    stage.order(ordinary, 'say {"what": "suspects"}')
    await stage.told(warm, "isolate")
    stage.order(warm, 'say {"what": "begins", "id": "t1"}')
    stage.order(warm, 'say {"what": "suspects"}')  # one that is busy cannot run another
    more = await stage.came(2, "isolated")
    stage.order(more, 'say {"what": "begins", "id": "t2"}', 'say {"what": "suspects"}', "note said")
    await stage.journal.line("noted", "said", pid=more)  # both are busy, and there may be no third
    stage.order(warm, 'say {"what": "ends", "id": "t1"}', 'say {"what": "suspects"}')
    await stage.told(warm, "isolate", 2)
    supervisor.stop()
    await stage.ended()
    assert len(stage.journal.lines("began", "isolated")) == 2


async def test_isolated_children_with_nothing_to_do_end_but_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_pool, "_IDLE", 0.05)
    monkeypatch.setattr(quarantine_pool, "_LOOK", 0.05)
    await stage.start(processes=1, isolated=2)
    [warm] = stage.ready("isolated")
    stage.order(warm, 'say {"what": "begins", "id": "t1"}', 'say {"what": "suspects"}')
    more = await stage.came(2, "isolated")
    stage.order(warm, 'say {"what": "ends", "id": "t1"}', 'say {"what": "idle"}')
    await stage.told(warm, "stop")
    assert not stage.journal.lines("heard", "stop", pid=more)


async def test_the_death_of_an_isolated_child_counts_nothing_and_another_one_comes_at_once(stage: Stage) -> None:
    stage.change(restart_delays=[1000.0])
    await stage.start(processes=1)
    [warm] = stage.ready("isolated")
    stage.order(warm, 'say {"what": "begins", "id": "t1"}', "kill SIGKILL")
    await stage.came(2, "isolated")
    assert (await stage.info()).crashes == 0


async def test_a_child_that_asks_for_it_is_replaced_once_another_works(stage: Stage) -> None:
    supervisor = await stage.start(processes=1)
    [old] = stage.ready()
    stage.order(old, *['say {"what": "replace", "why": "threads"}'] * 2)
    await stage.told(old, "stop")
    new = await stage.came(2)
    happened = [(line.what, line.pid) for line in stage.journal.lines() if line.key in ("worker", "stop")]
    assert happened.index(("ready", new)) < happened.index(("heard", old))
    assert (await stage.info()).crashes == 0
    supervisor.stop()
    await stage.ended()
    assert len(stage.journal.lines("began", "worker")) == 2  # though it was asked for twice


@pytest.mark.parametrize("stuck", ["in its loop", "in C code", "stopped"])
async def test_a_child_that_does_not_answer_is_dumped_and_replaced(
    stage: Stage, stuck: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.change(stall_limit=500.0 if stuck == "in its loop" else 0.5)
    await stage.start(processes=1)
    [one] = stage.ready()
    stage.order(one, 'say {"what": "alive", "lag": 0.0}', "note lives")
    await stage.journal.line("noted", "lives")
    if stuck == "in its loop":
        stage.order(one, 'say {"what": "alive", "lag": 501}')
    elif stuck == "in C code":
        stage.order(one, "stick")
    else:
        os.kill(one, signal.SIGSTOP)
    await stage.came(2)
    await stage.counted(1)
    if stuck != "stopped":  # such a process dies of SIGKILL alone
        assert "Fatal Python error: Aborted" in capfd.readouterr().err


@dataclass
class Mute:
    """A child as the watch sees it, which was heard of long ago."""

    heard: float = 0.0
    lag: float = 0.0
    stalled: str = ""
    stops: int = 0
    worker: str = "mute"
    pid: int = 0
    gone: anyio.Event = field(default_factory=anyio.Event)

    async def abort(self, why: str) -> None:
        self.stalled = why


@pytest.mark.parametrize(("pace", "killed"), [(1.0, True), (100.0, False)], ids=["watching", "frozen itself"])
async def test_silence_counts_only_while_the_supervisor_listens(
    pace: float, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that was frozen, and its children with it, has heard of none of them for long."""
    mute, looks = Mute(), 0

    async def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        if looks > 12:
            raise asyncio.CancelledError

    monkeypatch.setattr(f"{stall_monitor.__name__}.time.monotonic", lambda: looks * pace)
    monkeypatch.setattr(f"{stall_monitor.__name__}.anyio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await StallMonitor(cast("list[Child]", [mute]), 10.0).run()
    assert (mute.stalled == "stalled") is killed


async def test_the_last_words_of_a_dead_child_are_heard() -> None:
    """Its end may be known before what it has said was read: the pipe keeps it."""

    class Dead:
        pid = 0

        async def wait(self) -> int:
            return -signal.SIGKILL

    its_line = line.ChildPipe()
    dead = Child("isolated", cast("asyncio.subprocess.Process", Dead()), its_line, lambda *_: None)
    os.write(
        its_line.theirs[1], b'{"say": "begins", "id": "t1"}\n{"say": "step", "id": "t1", "step": "die"}\n{"say": "en'
    )
    its_line.give_away()
    await dead.wait()
    assert (dead.how, dead.doing) == ("SIGKILL", {"t1": "die"})


async def test_an_alert_that_hangs_is_ended_with_all_it_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(alert, "_BOUND", 0.2)
    told = tmp_path / "pid"
    await alert.alert(f"sleep 1000 & echo $! > {told}; wait", {"event": "paused"})
    await until(lambda: gone(int(told.read_text())), "the end of what the alert has started")


async def test_nonsense_on_the_line_harms_nobody(stage: Stage) -> None:
    await stage.start(processes=1)
    [one] = stage.ready()
    nonsense = ("not json", "[]", "{}", '{"say": 1}', '{"say": "alive", "lag": "x"}', '{"say": "later"}', "\xff")
    stage.order(one, *(f"raw {line}" for line in nonsense), 'say {"what": "suspects"}')
    await stage.told(stage.ready("isolated")[0], "isolate")


async def test_a_reload_replaces_one_at_a_time(stage: Stage, log: list[str]) -> None:
    await stage.start(processes=3)
    old = stage.ready()
    os.kill(os.getpid(), signal.SIGHUP)
    await stage.told(stage.ready("isolated")[0], "stop")
    new = stage.ready()[3:]
    happened = [
        (line.what, line.pid)
        for line in stage.journal.lines()
        if (line.what, line.key) in (("ready", "worker"), ("heard", "stop")) and line.pid in (*old, *new)
    ][3:]
    assert [what for what, _ in happened] == ["ready", "heard"] * 3
    assert [pid for what, pid in happened if what == "ready"] == new
    assert sorted(pid for what, pid in happened if what == "heard") == sorted(old)  # who was ready first may be any
    assert len(stage.ready("isolated")) == 2
    assert (await stage.info()).crashes == 0
    await until_logged(log, "all workers are replaced")
    assert not [line for line in log if "ended early" in line]


async def test_a_reload_that_comes_early_is_remembered(stage: Stage) -> None:
    supervisor = await stage.begin(processes=1)
    await stage.journal.line("began")
    supervisor.reload()  # the first child may have read the old code
    pilot = await stage.came(1)
    await stage.told(pilot, "stop")
    await stage.came(2)


async def test_a_supervisor_whose_terminal_is_closed_stops(stage: Stage) -> None:
    program = f"""
import fcntl, termios
import anyio
from perdure.worker.supervise import Plan, Supervisor
child = ({sys.executable!r}, "-S", {str(PRETENDER)!r})
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
raise SystemExit(anyio.run(Supervisor(Plan({{"worker": child, "isolated": child}}, 1, 1)).run))
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
        await stage.came(1)
        await stage.came(1, "isolated")
        os.kill(supervisor.pid, signal.SIGHUP)
        await stage.came(2)  # while there is a terminal, it is a reload
        await stage.came(2, "isolated")
        os.close(ours)
        assert await asyncio.wait_for(supervisor.wait(), BOUND) == 0
    finally:
        if supervisor.returncode is None:
            supervisor.kill()
            await supervisor.wait()


async def test_a_reload_lets_a_suspect_come_to_its_end(stage: Stage) -> None:
    supervisor = await stage.start(processes=1)
    [busy] = stage.ready("isolated")
    stage.order(busy, 'say {"what": "begins", "id": "t1"}')
    stage.order(busy, 'say {"what": "suspects"}')  # heard after that it is busy
    await stage.came(2, "isolated")
    supervisor.reload()
    await stage.told(stage.ready("isolated")[1], "stop")
    assert not stage.journal.lines("heard", "stop", pid=busy)
    stage.order(busy, 'say {"what": "ends", "id": "t1"}')
    await stage.told(busy, "stop")


@pytest.mark.parametrize("role", ["worker", "isolated"])
async def test_a_reload_says_that_a_new_child_did_not_start(stage: Stage, log: list[str], role: str) -> None:
    supervisor = await stage.start(processes=1)
    stage.order_all_that_start("exit 1", role)
    supervisor.reload()
    await until_logged(log, "the reload has ended early")
    assert not [line for line in log if "all workers are replaced" in line]
    assert set(stage.ready("isolated")) <= stage.alive()


async def until_logged(log: list[str], text: str) -> None:
    async def logged() -> bool:
        return any(text in line for line in log)

    await until(logged, f"the log says {text!r}")


async def test_broken_code_ends_the_reload_and_the_old_ones_go_on(stage: Stage) -> None:
    supervisor = await stage.start()
    old = stage.alive()
    before = stage.began()
    stage.order_all_that_start("exit 1")
    supervisor.reload()
    await stage.journal.line("obeys", "exit-1")
    stage.order_all_that_start(None)
    await stage.shows(worker_working=2, isolated_idle=1)
    assert stage.alive() == old
    assert not stage.journal.lines("heard", "stop")
    supervisor.reload()
    for pid in old:
        await stage.told(pid, "stop")
    assert stage.began() == before + 1 + len(old)


async def test_too_many_crashes_pause_alert_and_outlive_the_supervisor(stage: Stage, tmp_path: Path) -> None:
    alerted = tmp_path / "alerted"
    with listening() as webhook:
        stage.change(crash_threshold=1, webhook=webhook.url)
        supervisor = await stage.start(alert=f"cat > {alerted}.tmp && mv {alerted}.tmp {alerted}")
        stage.order(stage.ready()[0], "kill SIGKILL")
        replaced = await stage.came(3)
        stage.order(replaced, "kill SIGSEGV")
        _, posted = await webhook.heard()

    async def paused() -> bool:
        return (await stage.info()).paused_since > 0 and alerted.exists()

    await until(paused, "the pause, and the alert")
    about = json.loads(alerted.read_bytes())
    assert posted == about
    assert (about["event"], about["crashes"], about["supervisor"]) == ("paused", 2, (await stage.info()).name)
    assert f"worker-{replaced} ended by SIGSEGV" in about["why"]
    assert stage.alive() == {stage.ready()[1], *stage.ready("isolated")}

    supervisor.stop()
    assert await stage.ended() == 0
    alerted.unlink()
    await stage.begin()
    await stage.came(2, "isolated")
    assert len(stage.ready()) == 3
    info = await stage.info()
    assert info.paused_since == about["paused_since"]
    assert await resume_supervisor(stage.producer.gateway, stage.producer.namespace, info.name)
    await stage.came(5)
    assert (await stage.info()).crashes == 0
    assert not alerted.exists()


async def test_a_burst_ends_when_the_children_have(stage: Stage) -> None:
    await stage.start(burst=True)
    for pid in stage.ready():
        stage.order(pid, "exit 0")
    assert await stage.ended() == 0
    assert len(stage.ready()) == 2


async def test_a_burst_waits_for_suspects(stage: Stage) -> None:
    await stage.start(processes=1, burst=True)
    [ordinary], [warm] = stage.ready(), stage.ready("isolated")
    stage.order(warm, 'say {"what": "begins", "id": "t1"}', 'say {"what": "suspects"}')
    more = await stage.came(2, "isolated")
    stage.order(ordinary, "exit 0")
    stage.order(more, 'say {"what": "begins", "id": "t2"}', 'say {"what": "ends", "id": "t2"}', 'say {"what": "idle"}')
    await stage.shows(isolated_busy=1, isolated_idle=1)
    assert not stage.running[0].done()
    stage.order(warm, 'say {"what": "ends", "id": "t1"}', 'say {"what": "idle"}')
    assert await stage.ended() == 0


async def test_a_crash_while_redis_is_away_is_told_when_it_is_back(
    settings: Settings, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    try:
        away = settings.model_copy(update={"redis_url": server.url})
        async with (
            Producer(address=away.address, namespace=namespace_name) as producer,
            staged(away, producer, tmp_path, monkeypatch) as stage,
        ):
            await stage.start(processes=1)
            server.kill()
            stage.order(stage.ready()[0], "kill SIGKILL")
            await until(lambda: gone(stage.ready()[0]), "the child's end")
            server.start()
            await stage.came(2)
            await stage.counted(1)
    finally:
        server.stop()


async def test_a_crash_is_counted_though_redis_goes_away_in_between(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def away(*args: Any, **named: Any) -> SupervisorState:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise Unavailable("away")
        return await count_crash(*args, **named)

    monkeypatch.setattr(crash_counter, "count_crash", away)
    await stage.start(processes=1)
    stage.order(stage.ready()[0], "kill SIGKILL")
    await stage.came(2)
    await stage.counted(1)


async def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_where_redis_refuses_no_child_begins(stage: Stage) -> None:
    stage.change(url=stage.facts["url"].replace("unix://", "unix://:wrong@"))
    await stage.begin()
    with pytest.raises(ExceptionGroup) as raised:
        await stage.ended()
    assert raised.group_contains(Refused)
    assert stage.ready() == []

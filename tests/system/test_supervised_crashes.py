"""Real workers under a real supervisor, killed again and again: with progress between the kills, and without."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import orjson
import pytest
from perdure import Producer, State
from perdure.queues import SupervisorInfo, list_supervisors
from perdure.queues.delivery.quarantine_store import report_crash

from tests.support.consumers import claim_all, read
from tests.support.consumers import worker as consumer
from tests.support.supervisors import Supervisors, all_work
from tests.support.workers import BOUND, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

SUSPECTS = 8
PLACES = 4
"""Quarantine processes at one time. 32 suspects on 16 places take two processors more than ten seconds to start."""


async def info(producer: Producer) -> SupervisorInfo:
    [found] = await list_supervisors(producer.gateway, producer.namespace)
    return found


async def test_an_agent_survives_four_kills_with_progress_between_them(
    supervisors: Supervisors, producer: Producer, tmp_path: Path
) -> None:
    """It records five steps before each. The last ones hit its quarantine process: three crashes in ten minutes."""
    supervisors.environment["PERDURE_CRASH_THRESHOLD"] = "0"
    supervisors.start(processes=1)
    agent = await producer.enqueue("climbing", {"goal": "up", "folder": str(tmp_path), "steps": 22}, queue="supervised")
    killed = []
    for number in (5, 10, 15, 20):
        line = await supervisors.journal.line("begin", f"{agent.id}:{number}")
        os.kill(line.pid, signal.SIGKILL)
        killed.append(line.pid)
        (tmp_path / str(number)).touch()
    last = await agent.result(timeout=BOUND)
    assert len({*killed, last}) == 5
    record = await agent.record()
    assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 1, 4)
    await all_work(producer, 1)
    found = await info(producer)
    assert (found.crashes, found.paused_since) == (0, 0)


@pytest.mark.parametrize("kills", [4, 7])
async def test_a_burst_ends_after_the_last_suspect_has(
    supervisors: Supervisors, producer: Producer, tmp_path: Path, kills: int
) -> None:
    """The last kills hit quarantine processes, when the ordinary worker has found the queue empty and has exited."""
    agent = await producer.enqueue(
        "climbing", {"goal": "up", "folder": str(tmp_path), "steps": 5 * kills + 2}, queue="supervised"
    )
    supervisors.run("--processes", "1", "--burst")
    killed = []
    for number in range(5, 5 * kills + 1, 5):
        line = await supervisors.journal.line("begin", f"{agent.id}:{number}")
        os.kill(line.pid, signal.SIGKILL)
        killed.append(line.pid)
        (tmp_path / str(number)).touch()
    assert await supervisors.ended() == 0
    record = await agent.record()
    assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 1, kills)
    assert len(set(killed)) == kills


async def test_kills_of_a_child_that_settles_tasks_between_them_pause_nothing(
    supervisors: Supervisors, producer: Producer
) -> None:
    supervisors.environment["PERDURE_CRASH_THRESHOLD"] = "0"
    supervisors.start(processes=1)
    killed: list[int] = []
    for _ in range(4):
        await (await producer.enqueue("walk", {"steps": 0, "pause": 0.0}, queue="supervised")).result(timeout=BOUND)
        # A second one, because the child reports the first only after its result is stored.
        pid = await (await producer.enqueue("walk", {"steps": 0, "pause": 0.0}, queue="supervised")).result(
            timeout=BOUND
        )
        assert pid not in killed
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    await all_work(producer, 1)
    found = await info(producer)
    assert (found.crashes, found.paused_since) == (0, 0)


async def test_a_loop_of_crashes_without_progress_pauses_and_alerts(
    supervisors: Supervisors, producer: Producer, tmp_path: Path
) -> None:
    alert = tmp_path / "alert"
    supervisors.environment["PERDURE_CRASH_THRESHOLD"] = "1"
    supervisors.run("--concurrency", "2", "--alert", f"cat > {alert}.new && mv {alert}.new {alert}")
    await producer.enqueue("die", {}, queue="supervised")

    async def alerted() -> bool:
        return alert.exists()

    await wait_until(alerted, "the alert")
    event = orjson.loads(alert.read_bytes())
    assert (event["event"], event["crashes"]) == ("paused", 2)
    assert "ended by SIGKILL" in event["why"]
    found = await info(producer)
    assert found.paused_since > 0
    assert event["remedy"].endswith(f"perdure worker resume {found.name}")


async def test_long_suspects_free_their_places_after_the_probation_time(
    supervisors: Supervisors, producer: Producer, tmp_path: Path
) -> None:
    """Twice as many as there are places run at the same time in the end; new tasks run in the ordinary worker."""
    gate, journal = tmp_path / "gate", supervisors.journal
    suspects = [await producer.enqueue("gated", {"name": str(gate)}, queue="supervised") for _ in range(SUSPECTS)]
    for name in ("dead", "dead too"):
        dead = await consumer(producer.gateway, suspects[0].partition, name=name)
        assert len(await (claim_all(dead) if name == "dead too" else read(dead, SUSPECTS))) == SUSPECTS
        await report_crash(producer.gateway, producer.namespace, ["supervised"], name, exit_status="SIGKILL", steps={})
    supervisors.environment["PERDURE_QUARANTINE_WINDOW"] = "0.5"
    supervisors.run("--concurrency", "4", "--isolated", str(PLACES))
    ordinary: set[int] = set()
    while len(journal.lines("begin")) < 2 * SUSPECTS:
        new = await producer.enqueue("walk", {"steps": 0, "pause": 0.0}, queue="supervised")
        ordinary.add(await new.result(timeout=BOUND))
    assert len(ordinary) == 1  # the ordinary worker has never stopped
    assert not gate.exists()  # so all suspects are running
    gate.touch()
    pids = {await suspect.result(timeout=BOUND) for suspect in suspects}
    assert len(pids) == SUSPECTS
    assert not pids & ordinary

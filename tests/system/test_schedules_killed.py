"""kill -9 of workers that fire schedules, before and after each of their writes: each planned time is fired once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import pytest
from perdure import Producer, Settings
from perdure.queues.schedules.store import ScheduleStore

from tests.support.paths import PROGRAMS
from tests.support.workers import BOUND, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

ACTS: Final = [f"{when} {act}" for act in ("claim", "fire", "settle") for when in ("before", "after")]
"""The writes of a firing, in order."""


class Firers:
    """Worker processes, and the journal of the tasks that they ran."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._journal = folder / "journal"
        self._journal.touch()
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, queue: str, kill: str = "") -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "JOURNAL": str(self._journal),
            "PERDURE_REDIS_URL": self._settings.redis_url,
            "PERDURE_NAMESPACE": self._settings.namespace,
            "PERDURE_HEARTBEAT": "0.2",
        }
        command = [sys.executable, str(PROGRAMS / "scheduling.py"), json.dumps({"queue": queue, "kill": kill})]
        self.running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        return self.running[-1]

    def ran(self) -> list[str]:
        return self._journal.read_text().split()


@pytest.fixture
def firers(settings: Settings, tmp_path: Path) -> Iterator[Firers]:
    found = Firers(settings, tmp_path)
    try:
        yield found
    finally:
        for process in found.running:
            process.kill()
            process.wait()


def moment(task_id: str) -> datetime:
    return datetime.strptime(task_id.removeprefix("tick-"), "%Y%m%dT%H%M%S%z")


async def test_workers_killed_at_each_write_fire_each_time_once(firers: Firers, settings: Settings) -> None:
    """Only the first worker runs the tasks, whose records expire at once; the others fire until they die."""
    first = firers.start("clock")
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:

        async def hand_over(signal_to_first: signal.Signals) -> None:
            first.send_signal(signal_to_first)
            await producer.gateway.command("DEL", producer.namespace.schedule_lock)

        with anyio.fail_after(4 * BOUND):
            for act in ACTS:
                before = len(firers.ran())
                await hand_over(signal.SIGSTOP)
                process = firers.start("idle", act)
                while process.poll() is None:  # noqa: ASYNC110 - asyncio did not start this process
                    await anyio.sleep(0.02)
                assert process.returncode == -9
                await hand_over(signal.SIGCONT)
                while len(firers.ran()) == before:  # noqa: ASYNC110 - a file has no event
                    await anyio.sleep(0.02)
    last = len(firers.ran()) + 3

    async def more() -> bool:
        return len(firers.ran()) >= last

    await wait_until(more, "the schedule fires after all of them")
    ran = firers.ran()
    assert len(ran) == len({*ran}), "none was fired twice, though the records have expired"
    times = sorted(map(moment, ran))
    assert times[-1] - times[0] == timedelta(seconds=len(times) - 1), "none is missing"
    firers.running[0].kill()
    firers.running[0].wait()
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        stored = await ScheduleStore(producer.gateway, producer.namespace).read("tick")
        assert stored.firing is None or stored.runs
        partition = producer.namespace.partition("clock")
        for task in await producer.gateway.command("ZRANGE", partition.timeline, 0, -1):
            await producer.gateway.command("DEL", partition.record(task.decode()))

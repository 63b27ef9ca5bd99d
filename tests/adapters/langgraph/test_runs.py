"""Graphs in processes that are killed, frozen and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure.integrations.langgraph import PerdureSaver

from .research import app, research

PROGRAM = f"{Path(__file__).with_name('research.py')}:app"
BOUND = 60.0


class Workers:
    """Worker processes of the program of this folder, its journal, and the call that blocks."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.hold = folder / "journal", folder / "hold"
        self.journal.touch()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        command = [Path(sys.executable).with_name("perdure"), "worker", "run", PROGRAM, "--no-supervisor"]
        process = subprocess.Popen(command, env={**os.environ, "PERDURE_LEASE": "1.5"})
        self._processes.append(process)
        return process

    def calls(self) -> Counter[str]:
        return Counter(line.split(" ", 1)[1] for line in self.journal.read_text().splitlines())

    def callers(self) -> set[int]:
        return {int(line.split(" ", 1)[0]) for line in self.journal.read_text().splitlines()}

    async def reached(self, call: str, times: int = 1) -> None:
        await _until(lambda: self.calls()[call] >= times)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(BOUND)


async def _until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND
    while not met():
        assert time.monotonic() < end
        await anyio.sleep(0.02)


@pytest.fixture
def workers(perdure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    found = Workers(tmp_path)
    monkeypatch.setenv("RESEARCH_JOURNAL", str(found.journal))
    monkeypatch.setenv("RESEARCH_HOLD", str(found.hold))
    yield found
    found.close()


async def _waits(handle: Any) -> None:
    with anyio.fail_after(BOUND):
        while not await handle.waits():  # noqa: ASYNC110 - nothing notifies of it
            await anyio.sleep(0.02)


UNDISTURBED = Counter(
    {
        "look_up": 1,
        "look_up ends": 1,
        "ask_model": 1,
        "search books": 1,
        "search papers": 1,
        "search model": 1,
        "approve": 2,  # LangGraph runs a node again after an interrupt
        "write_report": 1,
        "search report": 1,
    }
)
"""Calls of a run that nothing disturbs."""

REPORT = {
    "topic": "tides",
    "notes": ["found in model", "found in books", "found in papers"],
    "approved": "yes",
    "report": "found in report",
}


@pytest.mark.timeout(90)
async def test_a_killed_worker_is_followed_by_another(workers: Workers) -> None:
    """The second search of a node is killed: its first one, and the node beside it, are not repeated."""
    workers.hold.write_text("search papers")
    async with app:
        handle = await research.enqueue({"topic": "tides", "notes": []})
        first = workers.start()
        await workers.reached("search papers")
        await workers.reached("search model")
        first.kill()
        workers.hold.unlink()
        workers.start()
        await _waits(handle)
        await handle.answer("approve", "yes")
        assert await handle.result(timeout=BOUND) == REPORT
    more = workers.calls() - UNDISTURBED
    assert set(more) <= {"look_up", "search papers", "ask_model", "search model"}, more
    assert more["look_up"] == more["search papers"] == 1
    assert workers.calls() & UNDISTURBED == UNDISTURBED


@pytest.mark.timeout(90)
async def test_a_frozen_worker_that_wakes_rolls_nothing_back(workers: Workers) -> None:
    """The first worker is stopped at the end of a node until the second one has finished the thread.

    When it wakes up, the node returns, and LangGraph stores its checkpoint, which would be the newest one.
    """
    workers.hold.write_text("look_up ends")
    async with app:
        handle = await research.enqueue({"topic": "tides", "notes": []}, thread_id="frozen")
        first = workers.start()
        await workers.reached("look_up ends")
        await workers.reached("search model")
        first.send_signal(signal.SIGSTOP)
        workers.hold.unlink()
        second = workers.start()
        await _waits(handle)
        await handle.answer("approve", "yes")
        assert await handle.result(timeout=BOUND) == REPORT
        saver, config = PerdureSaver(app), {"configurable": {"thread_id": "frozen"}}
        before = [found.config async for found in saver.alist(config)]
        second.terminate()
        await anyio.to_thread.run_sync(second.wait)
        first.send_signal(signal.SIGCONT)
        other = await research.enqueue({"topic": "tides", "notes": []})  # which the first one takes when it is awake
        await _waits(other)
        assert [found.config async for found in saver.alist(config)] == before
        newest = await saver.aget_tuple(config)
        assert newest is not None
        assert newest.checkpoint["channel_values"]["report"] == "found in report"
    assert first.pid in workers.callers()


@pytest.mark.timeout(90)
async def test_a_persons_answer_after_a_restart(workers: Workers) -> None:
    async with app:
        handle = await research.enqueue({"topic": "tides", "notes": []})
        first = workers.start()
        await _waits(handle)
        first.terminate()
        await anyio.to_thread.run_sync(first.wait)
        [wait] = await handle.waits()
        assert (wait.name, wait.shown) == ("approve", {"notes": 3})
        await handle.answer("approve", "yes")
        second = workers.start()
        assert await handle.result(timeout=BOUND) == REPORT
        items = [item.value async for item in handle.stream("custom") if item.kind == "item"]
    assert items == [{"at": "model"}]
    assert workers.calls() == UNDISTURBED
    assert workers.callers() == {first.pid, second.pid}

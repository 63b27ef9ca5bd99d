"""Loops of a worker: an error of one item is logged once, and ends no loop."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest
from loguru import logger
from perdure.queues import QueueError, Refused
from perdure.queues.transport.backoff import Backoff
from perdure.worker import loop_errors
from perdure.worker.loop_errors import LoopErrors, keep_running


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{level} {message}", level="WARNING")
    yield lines
    logger.remove(sink)


def test_each_error_is_logged_once(log: list[str]) -> None:
    errors = LoopErrors("clean up")
    for error in (ValueError("x"), Refused("WRONGTYPE"), QueueError("away"), KeyError("y")):
        errors.note(error, "queue a")
        errors.note(error, "queue a")
    errors.note(ValueError("x"), "queue b")
    assert [line.splitlines()[0] for line in log] == [
        "ERROR could not clean up, queue a; the worker continues",
        "WARNING could not clean up, queue a: WRONGTYPE",
        "ERROR could not clean up, queue a; the worker continues",
        "ERROR could not clean up, queue b; the worker continues",
    ]
    assert "ValueError: x" in log[0]


async def test_the_work_on_an_item_says_whether_it_failed(log: list[str]) -> None:
    async def fail() -> None:
        raise ValueError("x")

    async def work() -> None:
        """Do nothing."""

    errors = LoopErrors("clean up")
    assert await errors.attempt(work)
    assert not log
    assert not await errors.attempt(fail)
    assert log


async def test_a_loop_that_fails_runs_again_until_it_returns(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_errors, "_RESTART", Backoff(first=0.001, longest=0.001))
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise ValueError("x")

    with anyio.fail_after(60):
        await keep_running(run)
    assert runs == 4
    assert len(log) == 1


async def test_a_cancelled_loop_ends(log: list[str]) -> None:
    async with anyio.create_task_group() as loops:
        loops.start_soon(keep_running, anyio.sleep_forever)
        await anyio.lowlevel.checkpoint()
        loops.cancel_scope.cancel()
    assert not log

"""Agents of Pydantic AI in worker processes that are killed, frozen, and restarted while a person thinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from perdure import TaskHandle
from perdure.integrations.pydantic_ai import ToolDecision
from perdure.queues import State
from perdure.queues.waits import OpenWait
from perdure.testing import PerdureFixture

from tests.adapters.pydantic_ai.clerk import app, settle
from tests.adapters.support.processes import BOUND, WorkerProcesses, until, worker_processes

RESULT = {"output": "Paid.", "requests": 3, "tools": 3}


@pytest.fixture
def workers(perdure: PerdureFixture, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes("tests.adapters.pydantic_ai.clerk:app", tmp_path) as processes:
        yield processes


async def question(handle: TaskHandle[Any]) -> OpenWait:
    """Wait until the task asks, and return what it asks."""
    wait: OpenWait
    [wait] = await until(handle.waits, "the task asks")
    return wait


async def is_parked(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.WAITING


async def approve(handle: TaskHandle[Any]) -> None:
    await question(handle)
    await handle.answer("approve-pay", ToolDecision(approved=True), by="ada")


async def test_another_worker_finishes_what_a_killed_one_began_in_a_tool(workers: WorkerProcesses) -> None:
    async with app:
        handle = await settle.enqueue("Settle the accounts.")
        workers.journal.hold("look b")
        first = workers.start()
        await workers.journal.noted("look b")
        await workers.kill(first)
        workers.journal.hold("pay")
        second = workers.start()
        await approve(handle)
        await workers.journal.noted("pay")
        await workers.kill(second)
        workers.journal.release()
        workers.start()
        assert await handle.result(timeout=BOUND) == RESULT
    calls = workers.journal.calls()
    assert calls["model"] == 3
    assert calls["look b"] == calls["pay"] == 2  # in flight when their worker was killed
    assert calls["look a"] in (1, 2)


async def test_a_frozen_worker_that_wakes_changes_nothing(workers: WorkerProcesses) -> None:
    async with app:
        handle = await settle.enqueue("Settle the accounts.")
        workers.journal.hold("pay")
        first = workers.start()
        await approve(handle)
        await workers.journal.noted("pay")
        await workers.freeze(first)
        workers.journal.release()
        workers.start()
        assert await handle.result(timeout=BOUND) == RESULT
        before = [event async for event in handle.events(follow=False)]
        workers.thaw(first)
        again = await settle.enqueue("Settle the accounts.")
        await approve(again)
        assert await again.result(timeout=BOUND) == RESULT
        assert [event async for event in handle.events(follow=False)] == before
        assert await handle.result() == RESULT
    assert workers.journal.calls() == {"model": 6, "look a": 2, "look b": 2, "pay": 3}


async def test_a_decision_after_a_restart_of_every_worker_is_used_once(workers: WorkerProcesses) -> None:
    async with app:
        handle = await settle.enqueue("Settle the accounts.")
        first = workers.start()
        wait = await question(handle)
        assert wait.shown == {"tool": "pay", "arguments": {"amount": 3}}
        await until(lambda: is_parked(handle), "the task is parked")
        await workers.kill(first)
        await approve(handle)
        workers.start()
        assert await handle.result(timeout=BOUND) == RESULT
    assert workers.journal.calls() == {"model": 3, "look a": 1, "look b": 1, "pay": 1}

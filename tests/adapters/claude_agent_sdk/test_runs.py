"""A conversation in worker processes that are killed, frozen, and restarted while a person thinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure.testing import PerdureFixture

from tests.adapters.claude_agent_sdk.talk import KEY, app, sessions, talk
from tests.adapters.support.processes import BOUND, WorkerProcesses, until, worker_processes

PROGRAM = "tests.adapters.claude_agent_sdk.talk:app"
TURNS = ["turn-0", "turn-1", "turn-2"]


@pytest.fixture
def workers(perdure: PerdureFixture, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(PROGRAM, tmp_path) as processes:
        yield processes


async def turns() -> list[str]:
    return [line["uuid"] for line in await sessions.load(KEY) or ()]  # type: ignore[typeddict-item]


async def test_a_worker_that_is_killed_after_an_append_leaves_no_line_twice(workers: WorkerProcesses) -> None:
    async with app:
        handle = await talk.enqueue()
        workers.journal.hold("said 1")
        first = workers.start()
        await workers.journal.noted("said 1")
        await workers.kill(first)
        workers.journal.release()
        workers.start()
        assert await handle.result(timeout=BOUND) == 3
        assert await turns() == TURNS
        assert dict(workers.journal.calls()) == {**{f"say {turn}": 1 + (turn == 1) for turn in range(3)}} | {
            f"said {turn}": 1 + (turn == 1) for turn in range(3)
        }


async def test_a_frozen_worker_that_wakes_up_adds_nothing(workers: WorkerProcesses) -> None:
    async with app:
        handle = await talk.enqueue()
        workers.journal.hold("say 1")
        frozen = workers.start()
        await workers.journal.noted("say 1")
        await workers.freeze(frozen)
        workers.journal.release()
        workers.start()
        assert await handle.result(timeout=BOUND) == 3
        before = await app.store("claude-sessions", "project", "talk").entry("head/")
        workers.thaw(frozen)
        after = await talk.options(task_id="after").enqueue()  # of the same transcript
        assert await after.result(timeout=BOUND) == 3
        await workers.stop(frozen)
        assert await turns() == TURNS
        head = await app.store("claude-sessions", "project", "talk").entry("head/")
        assert before is not None
        assert head is not None
        assert (before.value["next"], head.value["next"]) == (3, 6)


async def test_an_answer_after_a_restart_continues_the_conversation(workers: WorkerProcesses) -> None:
    async with app:
        handle = await talk.enqueue(asks=True)
        first = workers.start()
        await until(handle.waits, "the task asks")
        await workers.kill(first)
        await handle.answer("go-on", True, by="ada")
        workers.start()
        assert await handle.result(timeout=BOUND) == 3
        assert await turns() == TURNS
        assert workers.journal.calls()["say 0"] == workers.journal.calls()["say 1"] == 1

"""Jobs of a program in arq's form whose worker is killed, frozen, or restarted before a person answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure.integrations.arq import create_pool
from perdure.testing import PerdureFixture

from tests.adapters.support.processes import BOUND, until, worker_processes

PROGRAM = "tests.adapters.arq.program:WorkerSettings"

pytestmark = pytest.mark.timeout(120)


async def test_a_job_whose_worker_is_killed_runs_again(perdure: PerdureFixture, tmp_path: Path) -> None:
    redis = await create_pool()
    with worker_processes(PROGRAM, tmp_path) as workers:
        workers.journal.hold("whole a")
        job = await redis.enqueue_job("whole", "a")
        assert job is not None
        killed = workers.start()
        await workers.journal.noted("whole a")
        await workers.kill(killed)
        workers.journal.release()
        workers.start()
        assert await job.result(timeout=BOUND) == "a"
        assert workers.journal.calls() == {"whole a": 2}
    await redis.aclose()


async def test_steps_of_a_killed_job_do_not_run_again(perdure: PerdureFixture, tmp_path: Path) -> None:
    redis = await create_pool()
    with worker_processes(PROGRAM, tmp_path) as workers:
        workers.journal.hold("between b")
        job = await redis.enqueue_job("in_steps", "b")
        assert job is not None
        killed = workers.start()
        await workers.journal.noted("between b")
        await workers.kill(killed)
        workers.journal.release()
        workers.start()
        assert await job.result(timeout=BOUND) == ["seat of b", "seat of b again"]
        assert workers.journal.calls() == {"reserve b": 1, "between b": 2, "reserve b again": 1}
    await redis.aclose()


async def test_a_frozen_worker_that_wakes_changes_nothing(perdure: PerdureFixture, tmp_path: Path) -> None:
    redis = await create_pool()
    with worker_processes(PROGRAM, tmp_path) as workers:
        workers.journal.hold("between c")
        job = await redis.enqueue_job("in_steps", "c")
        assert job is not None
        frozen = workers.start()
        await workers.journal.noted("between c")
        await workers.freeze(frozen)
        workers.journal.release()
        workers.start()
        result = await job.result(timeout=BOUND)
        ended = await job.result_info()
        workers.thaw(frozen)
        other = await redis.enqueue_job("whole", "d")
        assert other is not None
        await other.result(timeout=BOUND)
        await workers.stop(frozen)
        assert (await job.result_info(), await job.result()) == (ended, result)
        calls = workers.journal.calls()
        assert (calls["reserve c"], calls["between c"]) == (1, 2)
        assert calls["reserve c again"] in (1, 2)  # the frozen worker was in its call, and its record is refused
    await redis.aclose()


async def test_a_person_answers_after_a_restart(perdure: PerdureFixture, tmp_path: Path) -> None:
    redis = await create_pool()
    with worker_processes(PROGRAM, tmp_path) as workers:
        job = await redis.enqueue_job("asks", "e")
        assert job is not None
        first = workers.start()
        handle = await redis.find(job.job_id, "arq:queue")
        assert handle is not None
        await until(handle.waits, "the job waits for an answer")
        await workers.stop(first)
        await handle.answer("approval", "yes", by="ann")
        workers.start()
        assert await job.result(timeout=BOUND) == "e yes"
        assert workers.journal.calls() == {"reserve e": 1}
    await redis.aclose()

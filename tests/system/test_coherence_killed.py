"""SIGKILL between a coherence finding and its policy: the next run carries it out, and nothing is logged twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import Producer, Settings, TaskFailed

from tests.support.processes import worker_processes
from tests.support.workers import bounded, history

pytestmark = [pytest.mark.integration, pytest.mark.processes]


async def test_a_policy_is_carried_out_after_a_kill(settings: Settings, tmp_path: Path) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        handle = await producer.enqueue("circling", {"goal": "find it"}, queue="replica")
        with worker_processes(settings, tmp_path, environment={"DIES_BEFORE_IT_ACTS": "1"}) as workers:
            assert await (await workers.start().ready()).ended() == -9
            assert len(workers.lines("found")) == 1
            del workers.environment["DIES_BEFORE_IT_ACTS"]
            await workers.start().ready()
            with pytest.raises(TaskFailed, match=r"incoherent.*search.*was called 5 times") as failed:
                await bounded(handle.result())
        assert failed.value.reason == "incoherent"
        assert [event.type for event in await history(handle)].count("incoherent") == 1

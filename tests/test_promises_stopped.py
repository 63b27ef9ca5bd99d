"""SIGTERM: a worker leaves in order, and another process goes on at once, long before any lease has passed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from perdure import Producer, Settings
from perdure.queues import list_workers, pairs
from perdure.queues.keys import GROUP

from processes import Crew, Replica, give, hire, recorded
from working import BOUND, until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

LEASE = 60.0
AT_ONCE = LEASE / 6
"""The next sweep of an idle worker is 22 s away or more, and a lease 60 s."""


@pytest.fixture
def crew(settings: Settings, tmp_path: Path) -> Iterator[Crew]:
    with hire(settings.model_copy(update={"lease": LEASE, "grace": BOUND}), tmp_path) as crew:
        yield crew


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


async def idle(producer: Producer) -> None:
    """Wait until a worker waits in its read."""

    async def blocked() -> bool:
        info: bytes = await producer.gateway.command("CLIENT", "LIST")
        return any(b"cmd=xreadgroup" in line and b" flags=b" in line for line in info.splitlines())

    await until(blocked, "a worker waits in its read")


async def names(producer: Producer) -> set[str]:
    found = await producer.gateway.command(
        "XINFO", "CONSUMERS", producer.namespace.partition("default").ready, GROUP
    )
    return {pairs(one)[b"name"].decode() for one in found}


async def test_the_step_ends_and_the_next_worker_takes_the_rest_at_once(crew: Crew, producer: Producer) -> None:
    first = await crew.start(concurrency=1).ready()
    handle = await producer.enqueue("gate", {"name": "g"})
    await crew.line("saved", f"{handle.id}:second", pid=first.pid)
    second = await crew.start().ready()
    await idle(producer)
    first.stop()
    await producer.gateway.command("PING")
    await give(producer, "g", "opened")
    async with asyncio.timeout(AT_ONCE):
        found = await handle.result()
    # The step ended where it was, its result was recorded, and the rest ran elsewhere; or, where the token came
    # before the signal, all of it.
    assert found["steps"] == ["first", "opened after nothing", "third"]
    assert (found["attempt"], found["crashes"]) == (1, 0)
    assert await first.ended() == 0
    assert len(crew.lines("begin", f"{handle.id}:second")) == 1
    assert first.worker_id not in await names(producer)
    assert [worker.id for worker in await list_workers(producer.gateway, producer.namespace)] == [second.worker_id]


async def stopped_in_the_step(crew: Crew, producer: Producer, replica: Replica, signals: int) -> None:
    """A step that does not end is cancelled, the task given back, and taken by another process at once."""
    handle = await producer.enqueue("gate", {"name": "g"})
    await crew.line("saved", f"{handle.id}:second", pid=replica.pid)
    heir = await crew.start().ready()
    await idle(producer)
    for number in range(signals):
        if number:
            await stopping(producer, replica)
        replica.stop()
    began = time.monotonic()
    await crew.line("saved", f"{handle.id}:second", pid=heir.pid)
    assert time.monotonic() - began < AT_ONCE
    assert await replica.ended() == 0
    await give(producer, "g", "opened")
    async with asyncio.timeout(AT_ONCE):
        found = await handle.result()
    assert found == {"steps": ["first", "opened after progress", "third"], "pid": heir.pid, "attempt": 1, "crashes": 0}
    assert [line.pid for line in crew.lines("left", handle.id)] == [replica.pid]
    assert await recorded(producer, handle) == {"first", "second", "third"}
    assert replica.worker_id not in await names(producer)

"""No message is lost and none used twice, wherever the process of its reader dies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from perdure import App, Producer
from perdure.worker.settings import Settings

from tests.support.paths import PROGRAMS
from tests.support.programs import reader
from tests.support.workers import BOUND, bounded, history, running_worker

pytestmark = pytest.mark.integration

MOMENTS = range(20)
"""More than there are between two things that a run asks of Redis: the last processes live."""

PROGRAM = PROGRAMS / "reader.py"


async def test_a_reader_killed_at_each_moment_loses_no_message_and_uses_none_twice(settings: Settings) -> None:
    app = App("reader", settings=settings)
    app.task(name="converse", retry=reader.converse.retry)(reader.converse.handler)
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        friends = await producer.enqueue_many("unregistered", [{}] * len(MOMENTS), queue="friends", delay=3600)
        readers = []
        for number, friend in zip(MOMENTS, friends, strict=True):
            handle = await producer.enqueue("converse", {"friend": friend.id}, queue=f"q{number}")
            readers.append(handle)
            for content in (1, 2):
                await handle.send(content)
        died = _kill_at_each(settings)
        assert died[0] == -9
        assert died[-1] == 0, "the last one got to the end: there are no later moments"
        for handle in readers:
            await handle.send(3)
            await handle.send("end")
        async with running_worker(app, queues=[f"q{number}" for number in MOMENTS]):
            for handle, friend in zip(readers, friends, strict=True):
                assert await bounded(handle.result()) == [1, 2, 3, "end"]
                assert await handle.pending_messages() == []
                assert [one.content for one in await friend.pending_messages()] == [1, 2, 3, "end"]
                received = [event.data for event in await history(handle) if event.type == "received"]
                assert [one["content"] for one in received] == [1, 2, 3, "end"]
                assert (await handle.record()).attempts == 1


def _kill_at_each(settings: Settings) -> list[int]:
    """Return the exit code of each process."""
    place = {
        "PERDURE_REDIS_URL": settings.redis_url,
        "PERDURE_NAMESPACE": settings.namespace,
        "PERDURE_LEASE": str(settings.lease),
    }
    command = [sys.executable, str(PROGRAM), *map(str, MOMENTS)]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, timeout=BOUND, check=True, text=True)
    return [int(line.split()[1]) for line in done.stdout.splitlines()]

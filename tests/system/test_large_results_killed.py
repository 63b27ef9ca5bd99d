"""kill -9 around the record of a large step result, and of a worker and a producer of a task with large arguments."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure import App, Producer, Settings

from tests.support.command_line import call
from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.servers.shared_store import objects, shared_url
from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]

SIZE = 3_000_000


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(settings, tmp_path, program=PROGRAMS / "large_results.py") as workers:
        yield workers


async def test_a_worker_killed_before_and_after_the_record_of_a_large_result(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path
) -> None:
    arguments = {"size": SIZE, "path": str(tmp_path / "go")}
    handle = await producer.enqueue("report", arguments, queue="large", result_ttl=600)
    steps, record = handle.partition.steps(handle.id), handle.partition.record(handle.id)
    workers.environment["HELD"] = "reference"
    first = await workers.start().ready()
    await workers.line("chunks", pid=first.pid)
    del workers.environment["HELD"]
    second = workers.start()
    names = await producer.gateway.command("HKEYS", steps)
    assert len(names) == 6
    assert all(name.startswith(b"c:") for name in names)
    first.kill()

    await workers.line("waits", pid=second.pid)
    third = workers.start()
    assert len(workers.lines("make", pid=second.pid)) == 1
    assert {*names, b"d:make"} == set(await producer.gateway.command("HKEYS", steps)), "the same chunks, once"
    second.kill()

    await workers.line("waits", pid=third.pid)
    assert workers.lines("make", pid=third.pid) == []
    (tmp_path / "go").touch()
    assert await bounded(handle.result()) == "<" + "x" * SIZE + ">"
    lifetimes = await producer.gateway.pipeline([("TTL", steps), ("TTL", record)])
    assert all(0 < ttl <= 600 for ttl in lifetimes)


async def test_a_worker_killed_before_the_link_to_an_object(
    workers: WorkerProcesses, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object that it leaves is collected, those of live tasks are kept. Encrypted objects are never equal."""
    folder = tmp_path / "store"
    limits = {"payload_limit": 10_000, "large_limit": 100_000, "artifacts": shared_url(folder)}
    settings = with_keys(settings.model_copy(update=limits), FIRST)
    where = {"redis_url": settings.redis_url, "namespace": settings.namespace, "encryption_keys": FIRST}
    for name, value in (limits | where).items():
        monkeypatch.setenv(f"PERDURE_{name.upper()}", str(value))
    workers.environment["HELD"] = "link"
    async with App("large", settings=settings) as app:
        producer = app.producer
        arguments = {"size": SIZE, "path": str(tmp_path / "go")}
        handle = await producer.enqueue("report", arguments, queue="large")
        first = await workers.start().ready()
        await workers.line("object", pid=first.pid)
        assert await producer.gateway.command("HKEYS", handle.partition.steps(handle.id)) == []
        (left,) = objects(folder)
        del workers.environment["HELD"]
        second = workers.start()
        first.kill()

        await workers.line("waits", pid=second.pid)
        assert len(workers.lines("make", pid=second.pid)) == 1
        (tmp_path / "go").touch()
        assert await bounded(handle.result()) == "<" + "x" * SIZE + ">"
        assert len(objects(folder)) == 3
        collected = await asyncio.to_thread(call, "artifacts", "gc", "--grace", "0")
        assert collected.out.split() == [left.parent.name + left.name]
        assert len(objects(folder)) == 2
        assert await bounded(handle.result()) == "<" + "x" * SIZE + ">"


PRODUCER = """
import asyncio, sys
from perdure import Producer
from perdure.queues import Gateway

run = Gateway.run


async def until_enqueue(gateway, script, keys, args):
    if script.name == "enqueue_one":
        print("uploaded", flush=True)
        await asyncio.sleep(3600)
    return await run(gateway, script, keys, args)


async def main(url, namespace, size):
    Gateway.run = until_enqueue
    async with Producer(url, namespace=namespace) as producer:
        await producer.enqueue("count", {"text": "x" * int(size)}, queue="large")


asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_worker_and_a_producer_of_a_task_with_large_arguments_killed(
    workers: WorkerProcesses, producer: Producer, settings: Settings, tmp_path: Path
) -> None:
    size = 20_000_000
    arguments = {"text": "x" * size, "path": str(tmp_path / "go")}
    handle = await producer.enqueue("count", arguments, queue="large", result_ttl=600)
    first = await workers.start().ready()
    await workers.line("waits", pid=first.pid)
    second = workers.start()
    first.kill()
    await workers.line("waits", pid=second.pid)
    assert [line.key for line in workers.lines("takes")] == [str(size)] * 2

    command = (sys.executable, "-c", PRODUCER, settings.redis_url, settings.namespace, str(SIZE))
    dying = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert dying.stdout is not None
    assert await bounded(dying.stdout.readline()) == b"uploaded\n"
    dying.kill()
    await dying.wait()
    pattern = handle.partition.upload("*", "*").replace("{", "[{]").replace("}", "[}]")
    (upload,) = await producer.gateway.command("KEYS", pattern)
    assert 0 < await producer.gateway.command("TTL", upload) <= 600
    assert await producer.gateway.command("XLEN", handle.partition.ready) == 1, "the first task alone"

    (tmp_path / "go").touch()
    assert await bounded(handle.result()) == 2 * size
    assert 0 < await producer.gateway.command("TTL", handle.partition.record(handle.id)) <= 600

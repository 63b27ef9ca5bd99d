"""The successor of a task runs once, whatever happens to the continued task before its own outcome is stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from perdure import App, Context, Settings, State
from perdure.queues import Namespace, Partition, TaskNotFound
from perdure.queues.derived_tasks import enqueue_successor
from perdure.queues.inbox import forward_messages
from perdure.worker.runtime.stages import successor as stage

from tests.support.workers import bounded, running_worker, wait_until

pytestmark = pytest.mark.integration


async def test_a_successor_that_has_expired_does_not_run_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of the continued task fails after it has stored the successor; the lease brings that task back."""
    app = App("relay", settings=settings)
    runs: Counter[str] = Counter()

    @app.task(result_ttl=0.01)
    async def second(ctx: Context) -> None:
        runs["second"] += 1

    @app.task
    async def first(ctx: Context) -> None:
        runs["first"] += 1
        await ctx.continue_as(second, why="the first half is done", arguments={})

    async def fail_once(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(stage, "forward_messages", forward_messages)
        raise RuntimeError("the worker fails between the two writes")

    monkeypatch.setattr(stage, "forward_messages", fail_once)
    async with app, running_worker(app):
        handle = await first.enqueue()
        successor = handle.partition.record(f"{handle.id}.h1")

        async def expired() -> bool:
            return runs["second"] > 0 and not await app.producer.gateway.command("EXISTS", successor)

        async def settled() -> bool:
            return await handle.status() is State.SUCCEEDED

        await wait_until(expired, "the successor ends, and its record expires")
        assert await handle.status() is State.RUNNING
        await wait_until(settled, "the continued task is settled after its lease")
        assert (await handle.record()).handed_to == f"{handle.id}.h1"
        assert not await app.producer.gateway.command("EXISTS", successor)
    assert runs == {"first": 1, "second": 1}


async def test_a_successor_that_redis_has_lost_is_stored_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis loses it before the messages are forwarded to it."""
    app = App("relay", settings=settings)
    runs: Counter[str] = Counter()
    started, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def second(ctx: Context) -> str:
        runs["second"] += 1
        return str((await ctx.inbox(wait=60))[0].content)

    @app.task
    async def first(ctx: Context) -> str:
        runs["first"] += 1
        started.set()
        await proceed.wait()
        await ctx.continue_as(second, why="the first half is done", arguments={})

    async def lost_once(gateway: Any, namespace: Namespace, successor: Any) -> Partition:
        monkeypatch.setattr(stage, "enqueue_successor", enqueue_successor)
        return namespace.partition(successor.queue)

    monkeypatch.setattr(stage, "enqueue_successor", lost_once)
    async with app, running_worker(app):
        handle = await first.enqueue()
        await bounded(started.wait())
        await handle.send("for the second half")
        proceed.set()
        assert await bounded(handle.result()) == "for the second half"
        assert (await handle.record()).crashes == 0
    assert runs == {"first": 1, "second": 1}


async def test_a_successor_that_expires_before_its_messages_are_forwarded_does_not_run_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("relay", settings=settings)
    runs: Counter[str] = Counter()

    @app.task(result_ttl=0.01)
    async def second(ctx: Context) -> None:
        runs["second"] += 1

    @app.task
    async def first(ctx: Context) -> None:
        runs["first"] += 1
        await ctx.continue_as(second, why="the first half is done", arguments={})

    async def late(gateway: Any, partition: Any, task_id: str, to: Partition, to_id: str, **options: Any) -> Any:
        async def expired() -> bool:
            return runs["second"] > 0 and not await gateway.command("EXISTS", to.record(to_id))

        await wait_until(expired, "the successor ends, and its record expires")
        raise TaskNotFound(to_id, "relay")

    monkeypatch.setattr(stage, "forward_messages", late)
    async with app, running_worker(app):
        handle = await first.enqueue()

        async def settled() -> bool:
            return await handle.status() is State.SUCCEEDED

        await wait_until(settled, "the continued task is settled")
        assert (await handle.record()).crashes == 0
    assert runs == {"first": 1, "second": 1}


async def test_a_message_to_the_successor_does_not_overtake_those_that_move_to_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of the continued task fails right after messages are routed to the successor, which runs already."""
    app = App("relay", settings=settings)
    started, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def second(ctx: Context) -> list[Any]:
        read: list[Any] = []
        while len(read) < 3:
            read += [message.content for message in await ctx.inbox(wait=60)]
        return read

    @app.task
    async def first(ctx: Context) -> list[Any]:
        started.set()
        await proceed.wait()
        await ctx.continue_as(second, why="the first half is done", arguments={})

    async def fail_once_routed(gateway: Any, partition: Partition, task_id: str, *to: Any, **options: Any) -> Any:
        if await gateway.command("HEXISTS", partition.record(task_id), "handed_to"):
            monkeypatch.setattr(stage, "forward_messages", forward_messages)
            assert (await handle.send("third")).task_id == f"{task_id}.h1"
            raise RuntimeError("the worker fails before the outcome is stored")
        return await forward_messages(gateway, partition, task_id, *to, **options)

    monkeypatch.setattr(stage, "forward_messages", fail_once_routed)
    async with app, running_worker(app):
        handle = await first.enqueue()
        await bounded(started.wait())
        await handle.send("first")
        await handle.send("second")
        proceed.set()
        assert await bounded(handle.result()) == ["first", "second", "third"]

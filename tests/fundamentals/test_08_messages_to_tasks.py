"""Messages to tasks: each task has an inbox that programs, people and other tasks write to."""

from __future__ import annotations

import asyncio

import pytest
from perdure import App, Context, State, TaskEnded, Worker

pytestmark = pytest.mark.integration


async def test_a_task_reads_the_messages_in_its_inbox(app: App) -> None:
    """`ctx.inbox` returns the messages that are there now. A message is read exactly once, in the order of sending."""

    @app.task
    async def write(ctx: Context, topic: str) -> list[str]:
        return [topic, *(message.content for message in await ctx.inbox())]

    async with app:
        handle = await write.enqueue("leases")
        await handle.send("mention fencing", sender="ada")
        await handle.send("be brief", sender="grace")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == ["leases", "mention fencing", "be brief"]


async def test_a_task_that_waits_for_an_answer_is_parked(app: App) -> None:
    """`ctx.ask` waits for an answer without a worker, a slot or a lease; the answer wakes the task."""

    @app.task
    async def publish(ctx: Context, page: str) -> str:
        answer = await ctx.ask("ada", f"Publish {page}?")
        return f"{page}: {answer}"

    async with app:
        handle = await publish.enqueue("leases.md")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.status() is State.WAITING  # parked, and no worker is needed
        await handle.answer("question", "yes", by="ada")
        async with Worker(app) as worker, asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            assert await handle.result(timeout=10) == "leases.md: yes"
            worker.stop()


async def test_tasks_send_messages_to_each_other(app: App) -> None:
    """`ctx.send` is a step: it is sent once, however often the sender is run again."""

    @app.task
    async def reader(ctx: Context) -> str:
        (message,) = await ctx.inbox(wait=60)
        return f"{message.content} from {message.sender}"

    @app.task
    async def writer(ctx: Context, to: str) -> None:
        await ctx.send(to, "hello")

    async with app:
        reading = await reader.enqueue()
        writing = await writer.enqueue(reading.id)
        async with Worker(app) as worker, asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            assert await reading.result(timeout=10) == f"hello from {writing.id}"
            worker.stop()


async def test_a_message_to_a_task_that_has_ended_is_refused(app: App) -> None:
    """The sender gets `TaskEnded`, so no message is lost without an error."""

    @app.task
    async def short(ctx: Context) -> None:
        return None

    async with app:
        handle = await short.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)
        with pytest.raises(TaskEnded):
            await handle.send("too late")

"""`handle.events(include="emitted")`: the log and all streams of a task as one sequence."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from perdure import App, Context, TaskHandle
from perdure.queues import TaskEvent

from tests.support.streams import StreamWriter
from tests.support.workers import bounded, running_worker, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("work")]


async def read_all(handle: TaskHandle[Any], **options: Any) -> list[TaskEvent]:
    async def read() -> list[TaskEvent]:
        return [event async for event in handle.events(include="emitted", **options)]

    return await bounded(read())


def shown(events: list[TaskEvent]) -> list[Any]:
    return [event.data.get("value", event.data["kind"]) if event.type == "emitted" else event.type for event in events]


async def test_items_of_all_streams_come_between_the_events_of_the_log(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        await ctx.emit("first")
        await asyncio.sleep(0.01)
        await ctx.step("one", int)
        await asyncio.sleep(0.01)
        await ctx.emit({"words": 2}, to="counts")
        await asyncio.sleep(0.01)
        await ctx.step("two", int)

    handle = await job.enqueue()
    following = asyncio.create_task(read_all(handle))
    await work_off(app)
    found = await bounded(following)
    assert shown(found) == ["first", "step_completed", {"words": 2}, "step_completed"]
    assert [event.data["stream"] for event in found if event.type == "emitted"] == ["output", "counts"]
    assert found[0].summary()["data"] == {"stream": "output", "cursor": "1", "kind": "item", "value": "first"}
    assert found[0].task_id == handle.id
    stored = await read_all(handle, follow=False)
    assert stored == found
    for number, event in enumerate(found):
        assert await read_all(handle, follow=False, after=event.id) == found[number + 1 :]
    assert [event.type async for event in handle.events(follow=False)] == ["step_completed"] * 2
    blocking = await asyncio.to_thread(lambda: list(handle.events_sync(follow=False, include="emitted")))
    assert blocking == found


async def test_a_stream_that_appears_while_it_is_followed(app: App) -> None:
    seen = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.emit(1)
        await seen.wait()
        await ctx.emit(2, to="other")
        await ctx.emit(3)
        await ctx.inbox(wait=3600, why="an answer")

    async with running_worker(app):
        handle = await job.enqueue()
        events = handle.events(include="emitted")
        found = [await bounded(anext(events))]
        seen.set()
        while len(found) < 3:
            event = await bounded(anext(events))
            if event.type == "emitted":
                found.append(event)
        assert sorted(shown(found)) == [1, 2, 3]
        await events.aclose()
        await handle.cancel()


async def test_many_items_of_one_millisecond_are_read_in_pages(app: App) -> None:
    handle = await app.producer.enqueue("job", queue="work")
    writer = StreamWriter(app.producer.gateway, handle, pace=0)
    await writer.emit(*range(333))
    await writer.mark("", 0)
    await handle.cancel()
    found = await read_all(handle)
    assert shown(found) == [*range(333), "cut_off"]
    assert found[333].data["reason"] == "retried"


async def test_no_item_is_lost_if_the_clock_was_set_back(app: App) -> None:
    handle = await app.producer.enqueue("job", queue="work")
    writer = StreamWriter(app.producer.gateway, handle, pace=-10)
    await writer.emit(*range(60))
    async with aclosing(handle.events(include="emitted")) as events:
        found = [await bounded(anext(events)) for _ in range(60)]
        for number in range(60, 63):
            await writer.emit(number)
            found.append(await bounded(anext(events)))
    await handle.cancel()
    assert shown(found) == [*range(63)]
    stored = await read_all(handle, follow=False)
    assert stored == found
    assert await read_all(handle, follow=False, after=stored[55].id) == stored[56:]


async def test_an_item_of_the_future_is_not_waited_for(app: App) -> None:
    handle = await app.producer.enqueue("job", queue="work")
    writer = StreamWriter(app.producer.gateway, handle, pace=10**12)
    await writer.emit("ahead")
    await handle.cancel()
    assert shown(await read_all(handle)) == ["ahead"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"include": "everything"}, "include must be 'emitted' or None, got 'everything'"),
        ({"include": "emitted", "after": "x"}, "after must be the id of an event, got 'x'"),
    ],
)
async def test_wrong_arguments_are_one_sentence(app: App, options: dict[str, Any], problem: str) -> None:
    handle = await app.producer.enqueue("job", queue="work")
    with pytest.raises(ValueError, match="must be") as caught:
        handle.events(**options)
    assert str(caught.value) == problem

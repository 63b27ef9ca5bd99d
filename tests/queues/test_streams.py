"""`handle.stream`: items in order, marks, ends of each kind, cursors, trimmed and lost items, many and slow readers."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from typing import Any

import pytest
from perdure import (
    App,
    Context,
    Retry,
    StreamItem,
    StreamTrimmed,
    TaskHandle,
    TaskNotFound,
)
from perdure.queues import Gateway, streams
from perdure.queues.stream_items import CUT_ALL
from pydantic import BaseModel

from tests.support.streams import StreamWriter
from tests.support.workers import bounded, redis_command, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("work")]


@pytest.fixture
async def handle(app: App) -> TaskHandle[Any]:
    """A task that no worker runs."""
    return await app.producer.enqueue("job", queue="work")


@pytest.fixture
async def writer(app: App, handle: TaskHandle[Any]) -> StreamWriter:
    return StreamWriter(app.producer.gateway, handle)


async def take(handle: TaskHandle[Any], count: int, name: str = "output", **options: Any) -> list[StreamItem]:
    """Read so many items."""
    found: list[StreamItem] = []
    async with aclosing(handle.stream(name, **options)) as items:
        while len(found) < count:
            found.append(await bounded(anext(items)))
    return found


async def read_all(handle: TaskHandle[Any], name: str = "output", **options: Any) -> list[StreamItem]:
    async def read() -> list[StreamItem]:
        return [item async for item in handle.stream(name, **options)]

    return await bounded(read())


def values(items: list[StreamItem]) -> list[Any]:
    return [item.value for item in items if item.kind == "item"]


async def test_items_come_in_order_while_the_task_runs_and_then_the_end(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit("a", "b", unit="write", attempt=1)
    async with aclosing(handle.stream()) as items:
        first = await bounded(anext(items))
        assert (first.kind, first.value, first.cursor, first.stream) == ("item", "a", "1", "output")
        assert (first.step, first.attempt, first.task_id, first.at) == ("write", 1, handle.id, 1_700_000_000_001)
        assert (await bounded(anext(items))).value == "b"
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await writer.emit("c")
        third = await bounded(waiting)
        assert (third.value, third.cursor, third.step, third.attempt) == ("c", "3", "", 0)
        await handle.cancel()
        end = await bounded(anext(items))
        assert (end.kind, end.state, end.cursor, end.error_type) == ("end", "cancelled", "3", "TaskCancelled")
        assert end.at > 0
        assert await anext(items, None) is None
    assert not app.producer.notifications.tails


async def test_every_way_to_end_gives_an_end(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context, how: str) -> str:
        if how == "fail":
            raise ValueError("no paper")
        return how

    good, bad = await job.enqueue("well"), await job.enqueue("fail")
    reading = [asyncio.ensure_future(read_all(handle)) for handle in (good, bad)]
    await work_off(app)
    [success], [failure] = await asyncio.gather(*reading)
    assert (success.kind, success.state, success.result, success.error) == ("end", "succeeded", "well", None)
    assert (failure.state, failure.error_type, failure.error) == ("dead", "ValueError", "no paper")
    assert failure.reason == "attempts_exhausted"
    assert failure.cursor == success.cursor == "0"
    assert [item.summary()["state"] for item in await read_all(good)] == ["succeeded"]


async def test_streams_of_successors_follow_and_their_cursors_name_them(app: App) -> None:
    @app.task
    async def count(ctx: Context, number: int) -> int:
        await ctx.emit(f"a{number}")
        await ctx.emit(f"b{number}")
        if number < 2:
            await ctx.continue_as("count", arguments={"number": number + 1})
        return number

    handle = await count.enqueue(0)
    reading = asyncio.create_task(read_all(handle))
    await work_off(app)
    found = await bounded(reading)
    assert [item.value for item in found] == ["a0", "b0", "a1", "b1", "a2", "b2", None]
    assert (found[-1].state, found[-1].result, found[-1].task_id) == ("succeeded", 2, found[-2].task_id)
    assert [item.cursor for item in found[:2]] == ["1", "2"]
    assert {item.task_id for item in found[:2]} == {handle.id}
    assert [item.cursor for item in found[2:4]] == [f"1@{found[2].task_id}", f"2@{found[2].task_id}"]
    for number, item in enumerate(found):
        assert await read_all(handle, after=item.cursor) == found[number + 1 :] or item.kind == "end"
    assert values(await read_all(handle, last=1)) == ["b2"]
    assert values(await read_all(handle, last=5, after=found[4].cursor)) == ["b2"]
    following = await handle.successor()
    assert following is not None
    assert values(await read_all(following, after=2)) == ["a2", "b2"]


async def test_a_task_whose_record_vanishes_ends_as_expired(
    app: App, handle: TaskHandle[Any], writer: StreamWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.streams._POLL_INTERVAL", 0.05)
    await writer.emit(1)
    async with aclosing(handle.stream()) as items:
        assert (await bounded(anext(items))).value == 1
        await redis_command(app, "DEL", handle.partition.record(handle.id), writer.key)
        end = await bounded(anext(items))
    assert (end.kind, end.state, end.error_type) == ("end", "expired", "TaskNotFound")
    assert "has no record any more" in str(end.error)
    with pytest.raises(TaskNotFound):
        await read_all(handle)


async def test_a_reader_starts_after_its_cursor_or_with_the_last_items(
    handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit(*range(1, 501))
    await handle.cancel()
    assert values(await read_all(handle)) == [*range(1, 501)]
    assert values(await read_all(handle, after="497")) == [498, 499, 500]
    assert values(await read_all(handle, after=498)) == [499, 500]
    assert values(await read_all(handle, last=2)) == [499, 500]
    assert values(await read_all(handle, last=2, after="499")) == [500]
    assert values(await read_all(handle, last=20, after="1")) == [*range(481, 501)]
    assert values(await read_all(handle, last=0)) == []
    assert values(await read_all(handle, last=1000)) == [*range(1, 501)]
    assert [item.kind for item in await read_all(handle, after="500")] == ["end"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"after": "newest"}, "after must be the cursor of an item of the stream, such as '17', got 'newest'"),
        ({"after": "-1"}, "after must be the cursor"),
        ({"after": True}, "after must be the cursor"),
        ({"after": 1.5}, "after must be the cursor"),
        ({"after": "3@ "}, "after must be the cursor"),
        ({"last": -1}, "last must be a number of items of at least 0, or None for all, got -1"),
        ({"last": "5"}, "last must be a number"),
        ({"name": "a:b"}, "name of a stream must be 1 to 64 letters"),
        ({"name": ""}, "name of a stream must be"),
    ],
)
async def test_wrong_arguments_are_one_sentence_at_the_call(
    handle: TaskHandle[Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        handle.stream(**options)
    assert problem in str(caught.value)


async def test_a_cursor_of_another_task_is_refused(app: App, handle: TaskHandle[Any]) -> None:
    other = await app.producer.enqueue("job", queue="work")
    with pytest.raises(ValueError, match=f"after must be a cursor of task {handle.id} or of a successor"):
        await read_all(handle, after=f"1@{other.id}")


async def test_a_reader_behind_the_cap_hears_what_is_gone_and_where_to_read_on(
    app: App, handle: TaskHandle[Any]
) -> None:
    writer = StreamWriter(app.producer.gateway, handle, kept=10)
    await writer.emit(*range(1, 31))
    await handle.cancel()
    with pytest.raises(StreamTrimmed) as caught:
        await read_all(handle, after="5")
    error = caught.value
    assert (error.first, error.last, error.after, error.stream) == (6, 20, "20", "output")
    assert "items 6 to 20 of stream 'output'" in str(error)
    assert values(await read_all(handle, after=error.after)) == [*range(21, 31)]
    assert values(await read_all(handle)) == [*range(21, 31)], "without a cursor, what is kept"
    assert values(await read_all(handle, last=20)) == [*range(21, 31)]
    assert values(await read_all(handle, after="20")) == [*range(21, 31)]


async def test_a_live_reader_that_is_too_slow_hears_it(app: App, handle: TaskHandle[Any]) -> None:
    writer = StreamWriter(app.producer.gateway, handle, kept=300)
    await writer.emit(*range(1, 301))
    async with aclosing(handle.stream()) as slow, aclosing(handle.stream()) as fast:
        assert (await bounded(anext(slow))).value == 1
        for number in range(1, 301):
            assert (await bounded(anext(fast))).value == number
        for start in range(301, 1001, 100):
            await writer.emit(*range(start, start + 100))
            for number in range(start, start + 100):
                assert (await bounded(anext(fast))).value == number
        found = [1]
        with pytest.raises(StreamTrimmed) as caught:
            while True:
                found.append((await bounded(anext(slow))).value)
    assert found == [*range(1, len(found) + 1)]
    assert (caught.value.first, caught.value.last) == (len(found) + 1, 700)


async def test_marks_say_which_items_are_void(handle: TaskHandle[Any], writer: StreamWriter) -> None:
    await writer.emit("body")
    await writer.emit("half", unit="write", attempt=1)
    await writer.emit("other", unit="read", attempt=1)
    await writer.emit_keyed("once", "keyed")
    await writer.mark("write", 1)
    await writer.emit("whole", unit="write", attempt=2)
    await handle.cancel()
    found = await read_all(handle)
    assert [item.kind for item in found] == ["item"] * 4 + ["cut_off", "item", "end"]
    mark = found[4]
    assert (mark.step, mark.attempt, mark.reason, mark.value) == ("write", 1, "retried", None)
    assert [item.value for item in found if mark.voids(item)] == ["half"]
    assert (found[3].step, found[3].attempt) == (None, None)
    await writer.mark("", 0, CUT_ALL)
    await writer.emit("fresh")
    found = await read_all(handle)
    assert found[6].reason == "replayed"
    assert [item.value for item in found if item.kind == "item" and not found[6].voids(item)] == ["keyed", "fresh"]


async def test_readers_of_one_stream_share_its_reads(
    app: App, handle: TaskHandle[Any], writer: StreamWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    submit = Gateway._submit

    def counted(gateway: Gateway, command: Any, node_of: str | None = None) -> Any:
        if command[:2] == ("XRANGE", writer.key):
            reads.append(command)
        return submit(gateway, command, node_of)

    monkeypatch.setattr(Gateway, "_submit", counted)
    reading = [asyncio.ensure_future(read_all(handle)) for _ in range(1000)]

    async def all_wait() -> bool:
        tails = app.producer.notifications.tails
        return bool(tails) and all(tail.readers == 1000 for tail in tails.values())

    await wait_until(all_wait, "all readers have joined")
    for number in range(10):
        await writer.emit(number)
        await asyncio.sleep(0)
    await handle.cancel()
    found = await bounded(asyncio.gather(*reading))
    assert {tuple(values(items)) for items in found} == {tuple(range(10))}
    assert {items[-1].state for items in found} == {"cancelled"}
    assert len(reads) < 40, "not one read for each reader"
    assert not app.producer.notifications.tails


async def test_a_thousand_streams_need_no_further_connection(app: App) -> None:
    async def connections() -> int:
        return len((await redis_command(app, "CLIENT", "LIST")).splitlines())

    handles = await asyncio.gather(*(app.producer.enqueue("job", queue="work") for _ in range(200)))
    writers = [StreamWriter(app.producer.gateway, handle) for handle in handles]
    before = await connections()
    reading = [asyncio.ensure_future(read_all(handle)) for handle in handles]

    async def all_wait() -> bool:
        return len(app.producer.notifications.tails) == 200

    await wait_until(all_wait, "all readers have joined")
    for number in range(3):
        await asyncio.gather(*(writer.emit(number) for writer in writers))
    assert await connections() <= before + 1
    await asyncio.gather(*(handle.cancel() for handle in handles))
    for items in await bounded(asyncio.gather(*reading)):
        assert values(items) == [0, 1, 2]


async def test_a_reader_that_leaves_disturbs_no_other(handle: TaskHandle[Any], writer: StreamWriter) -> None:
    staying = asyncio.ensure_future(read_all(handle))
    leaving = [asyncio.ensure_future(read_all(handle)) for _ in range(20)]
    await writer.emit(1)
    await asyncio.sleep(0.02)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await writer.emit(2)
    await handle.cancel()
    assert values(await bounded(staying)) == [1, 2]


async def test_a_slow_reader_of_an_ended_task_shows_none_of_its_items_to_the_next_task_of_the_id(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit("a", "b")
    async with aclosing(handle.stream()) as slow, aclosing(handle.stream()) as fast:
        assert (await bounded(anext(slow))).value == "a"
        await handle.cancel()
        assert [(await bounded(anext(fast))).kind for _ in range(3)] == ["item", "item", "end"]
        await redis_command(app, "DEL", handle.partition.record(handle.id), writer.key)
        again = await app.producer.enqueue("job", queue="work", task_id=handle.id)
        following = StreamWriter(app.producer.gateway, again)
        await following.emit("c")
        assert [item.value for item in await take(again, 1)] == ["c"]
        await again.cancel()
        assert values(await read_all(again)) == ["c"]


async def test_items_that_redis_has_lost_are_marked_and_read_again(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit("a", "b")
    async with aclosing(handle.stream()) as items:
        found = [await bounded(anext(items)), await bounded(anext(items))]
        await writer.emit("c", "d")
        found += [await bounded(anext(items)), await bounded(anext(items))]
        await redis_command(app, "DEL", writer.key)  # as after a restart without the last second
        writer.number = 0
        await writer.emit("a", "b", "C")
        await redis_command(app, "CLIENT", "KILL", "TYPE", "pubsub")
        shown = list(found)
        while not shown or shown[-1].value != "C":
            item = await bounded(anext(items))
            if item.kind == "cut_off":
                assert item.reason == "lost"
            shown = [kept for kept in shown if not item.voids(kept)] + [item]
        await handle.cancel()
        assert (await bounded(anext(items))).kind == "end"
    assert values(shown) == ["a", "b", "C"]


async def test_replaced_items_are_read_again_that_were_read_one_by_one(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    shown: list[StreamItem] = []
    async with aclosing(handle.stream()) as items, aclosing(handle.stream(after="0")) as others:
        for value in ("a", "b", "c"):
            await writer.emit(value)
            shown.append(await bounded(anext(items)))
            await bounded(anext(others))
        await app.producer.notifications.tails[writer.key].page(3)  # all readers know that there is nothing yet
        await redis_command(app, "DEL", writer.key)
        for number, value in enumerate("ABCD", 1):  # without a notification, as long as Redis is away
            fields = ("t", "1", "u", "", "y", "0", "n", str(number), "d", f'"{value}"')
            await redis_command(app, "XADD", writer.key, f"{number}-0", *fields)
        await redis_command(app, "CLIENT", "KILL", "TYPE", "pubsub")
        while not shown or shown[-1].value != "D":
            item = await bounded(anext(items))
            shown = [kept for kept in shown if not item.voids(kept)] + [item] * (item.kind == "item")
    assert values(shown) == ["A", "B", "C", "D"]


async def test_items_are_read_again_of_a_reader_whose_cursor_redis_has_lost_since(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit("a", "b", "c")
    async with aclosing(handle.stream(after="3")) as items:
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0.05)  # it reads that there is nothing yet; it finds the same if it is slower
        await redis_command(app, "DEL", writer.key)
        writer.number = 0
        await writer.emit("A", "B")
        await redis_command(app, "CLIENT", "KILL", "TYPE", "pubsub")
        found = [await bounded(waiting), await bounded(anext(items)), await bounded(anext(items))]
    assert [(item.kind, item.reason, item.value) for item in found] == [
        ("cut_off", "lost", None),
        ("item", None, "A"),
        ("item", None, "B"),
    ]


async def test_a_read_from_further_back_shows_that_items_were_replaced(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    """No notification tells of the loss: another reader meets it first."""
    async with aclosing(handle.stream()) as items:
        for value in ("a", "b", "c"):
            await writer.emit(value)
            await bounded(anext(items))
        waiting = asyncio.ensure_future(anext(items))
        await redis_command(app, "DEL", writer.key)
        for number, value in enumerate("ABC", 1):
            fields = ("t", "1", "u", "", "y", "0", "n", str(number), "d", f'"{value}"')
            await redis_command(app, "XADD", writer.key, f"{number}-0", *fields)
        async with aclosing(handle.stream()) as others:
            assert [(await bounded(anext(others))).value for _ in range(3)] == ["A", "B", "C"]
        found = [await bounded(waiting), *[await bounded(anext(items)) for _ in range(3)]]
    assert [(item.kind, item.reason, item.value) for item in found] == [
        ("cut_off", "lost", None),
        ("item", None, "A"),
        ("item", None, "B"),
        ("item", None, "C"),
    ]


async def test_what_is_stored_while_the_end_is_read_comes_before_it(
    app: App, handle: TaskHandle[Any], writer: StreamWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has lost the end, and the task has run again, before the reader had its result."""
    read_end, reads = streams._end, 0

    async def end_twice(*args: Any) -> StreamItem:
        nonlocal reads
        reads += 1
        if reads == 1:
            async with app.producer.notifications.listen(writer.key) as notified:
                await writer.emit("b")
                await bounded(notified.get())
        return await read_end(*args)

    monkeypatch.setattr(streams, "_end", end_twice)
    await writer.emit("a")
    await handle.cancel()
    found = await read_all(handle)
    assert values(found) == ["a", "b"]
    assert [item.kind for item in found].count("end") == 1


async def test_a_cursor_that_redis_has_lost_is_a_mark(handle: TaskHandle[Any], writer: StreamWriter) -> None:
    await writer.emit("a", "b")
    await handle.cancel()
    mark, *others, end = await read_all(handle, after="9")
    assert (mark.kind, mark.reason, mark.cursor) == ("cut_off", "lost", "0")
    assert values(others) == ["a", "b"], "nothing tells which of them the reader has"
    assert end.kind == "end"


async def test_values_have_the_type_that_the_reader_names(handle: TaskHandle[Any], writer: StreamWriter) -> None:
    class Token(BaseModel):
        text: str

    await writer.emit({"text": "a"}, {"words": 3})
    await handle.cancel()
    good, bad, _ = await read_all(handle, type=Token)
    assert good.value == Token(text="a")
    assert bad.value is None
    assert "the value does not fit" in str(bad.problem)


async def test_what_another_program_wrote_is_an_item_with_a_problem(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit("a")
    await redis_command(app, "XADD", writer.key, "2-0", "foreign", "bytes")
    writer.number = 2
    await writer.emit("b")
    await handle.cancel()
    found = await read_all(handle)
    assert [item.value for item in found[:3]] == ["a", None, "b"]
    assert "no item of a stream" in str(found[1].problem)
    assert found[1].summary()["problem"] == found[1].problem


async def test_an_id_of_another_program_is_read_once(app: App, handle: TaskHandle[Any], writer: StreamWriter) -> None:
    await writer.emit("a")
    await redis_command(app, "XADD", writer.key, "5-3", "foreign", "bytes")
    await handle.cancel()
    found = await read_all(handle)
    assert [(item.kind, item.cursor) for item in found] == [("item", "1"), ("item", "5"), ("end", "5")]
    events = [event async for event in handle.events(follow=False, include="emitted")]
    assert [event.data["cursor"] for event in events] == ["1", "5"]


async def test_blocking_reads_are_the_same(app: App, handle: TaskHandle[Any], writer: StreamWriter) -> None:
    await writer.emit(1, 2)
    await handle.cancel()
    found = await asyncio.to_thread(lambda: list(handle.stream_sync("output", after="1")))
    assert [item.kind for item in found] == ["item", "end"]
    assert found[0].value == 2

    def first() -> Any:
        return next(iter(handle.stream_sync())).value

    assert await asyncio.to_thread(first) == 1
    gc.collect()
    with pytest.raises(ValueError, match="last must be"):
        handle.stream_sync(last=-3)


async def test_an_item_that_was_moved_or_copied_is_an_item_with_a_problem(
    app: App, handle: TaskHandle[Any], writer: StreamWriter
) -> None:
    await writer.emit("a", "b", unit="write", attempt=1)
    await writer.emit("a", unit="write", attempt=2)
    key = handle.partition.stream(handle.id, "output")
    (_, first), (_, second), (_, third) = await redis_command(app, "XRANGE", key, "-", "+")
    await redis_command(app, "DEL", key)
    for number, fields in enumerate((second, first, second, third), 1):
        await redis_command(app, "XADD", key, f"{number}-0", *fields)
    found = await take(handle, 4)
    assert [item.value for item in found] == ["b", None, None, "a"]
    assert [item.problem is not None for item in found] == [False, True, True, False]
    assert "item 1 of its step comes after item 2" in str(found[1].problem)

"""`ctx.values`: named values that pages read and write while a task runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, SyncContext, TaskHandle
from perdure.queues import InboxFull, QueueError, TaskEnded, TaskNotFound, ValueRefused, inbox
from perdure.queues.delivery.checkpoint import Entry, Kind
from perdure.queues.errors import NoKey, TamperedData, UnreadableRecord
from perdure.testing import make_context
from perdure.worker.runtime.stages import successor

from tests.support.stored_data import FIRST, everything, with_keys
from tests.support.workers import bounded, history, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("work")]

AT_ONCE = Retry(max_attempts=3, base=0.0)


async def has(handle: TaskHandle[Any], **expected: Any) -> None:
    """Wait until a page sees these values."""

    async def seen() -> bool:
        found = await handle.values()
        return {name: found.get(name) for name in expected} == expected

    await wait_until(seen, f"the values are {expected}")


async def test_a_page_reads_and_writes_values_while_the_task_runs(app: App) -> None:
    updated = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> list[Any]:
        first = await ctx.values.get("speed", 1)
        await ctx.values.set("status", {"page": 3})
        await updated.wait()
        return [first, await ctx.values.get("speed"), await ctx.values.get("missing"), await ctx.values.get("status")]

    async with app, running_worker(app):
        handle = await job.enqueue()
        await has(handle, status={"page": 3})
        receipt = await handle.update("speed", 7, by="ada")
        assert receipt.task_id == handle.id
        assert (await handle.update("speed", 8)).number > receipt.number
        updated.set()
        assert await bounded(handle.result()) == [1, 8, None, {"page": 3}]
        assert await handle.values() == {"status": {"page": 3}, "speed": 8}


async def test_a_resumed_run_reads_what_the_run_before_it_read(app: App) -> None:
    runs: list[list[Any]] = []

    @app.task(retry=AT_ONCE)
    async def job(ctx: Context) -> list[Any]:
        runs.append([await ctx.values.get("speed", "none"), await ctx.values.get("speed", "none")])
        await handle.update("speed", len(runs))
        if len(runs) == 1:
            raise ValueError("once more")
        runs[-1].append(await ctx.values.get("speed"))
        return runs[-1]

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["none", "none", 2]
        assert [event.type for event in await history(handle)] == ["attempt_failed"]


async def test_a_resumed_run_replaces_no_later_value_of_a_page(app: App) -> None:
    runs: list[int] = []

    @app.task(retry=AT_ONCE)
    async def job(ctx: Context) -> Any:
        runs.append(1)
        for number in range(5):
            await ctx.values.set("speed", number)
        with ctx.scope("second"):
            await ctx.values.set("speed", "second")
        await ctx.step("stored", str, 1)
        if len(runs) == 1:
            await handle.update("speed", "of a page", by="ada")
            raise ValueError("once more")
        seen = await ctx.values.get("speed")
        await ctx.values.set("speed", "new")
        return seen

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "of a page"
        assert await handle.values() == {"speed": "new"}


async def test_a_value_that_is_written_late_replaces_no_later_one_of_a_page(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> Any:
        for number in range(3):  # the last one waits for its write
            await ctx.values.set("mode", number)
            await ctx.step("between", str, number)
            await ctx.values.set("mode", -number)
        await asyncio.sleep(0.01)
        await handle.update("mode", "of a page", by="ada")
        await asyncio.sleep(0.01)
        await ctx.values.set("other", 1)
        await ctx.step("stored", str, 1)
        seen = await ctx.values.get("mode")
        await ctx.values.set("mode", "new")
        return seen

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "of a page"
        assert await handle.values() == {"mode": "new", "other": 1}


async def test_of_many_changes_few_are_written_and_the_last_one_always(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.worker.durable.checkpoint_writer import CheckpointWriter

    written: list[Entry] = []
    write = CheckpointWriter._write

    def noted(writer: CheckpointWriter, puts: Any, **options: Any) -> Any:
        written.extend(entry for put in puts for entry in put[0])
        return write(writer, puts, **options)

    monkeypatch.setattr(CheckpointWriter, "_write", noted)

    @app.task
    async def job(ctx: Context) -> None:
        for number in range(1000):
            await ctx.values.set("count", number)
            await ctx.values.set("other", -number)

    async with app:
        handle = await job.enqueue()
        await work_off(app)
        assert await handle.values() == {"count": 999, "other": -999}
    assert 1 < len([entry for entry in written if entry.kind is Kind.VALUE]) < 20


async def test_a_step_reads_the_present_value_in_each_try(app: App) -> None:
    async def poll(ctx: Context) -> list[Any]:
        found = [await ctx.values.get("go")]
        await ctx.values.set("asked", True)
        await has(handle, asked=True)
        await handle.update("go", "now")
        return [*found, await ctx.values.get("go")]

    @app.task
    async def job(ctx: Context) -> Any:
        async def look() -> list[Any]:
            return await poll(ctx)

        return [await ctx.step("look", look), await ctx.values.get("go")]

    async with app:
        handle = await job.enqueue()
        async with running_worker(app):
            assert await bounded(handle.result()) == [[None, "now"], "now"]


async def test_handlers_in_threads_and_their_steps_use_values(app: App) -> None:
    @app.task
    def job(ctx: SyncContext) -> list[Any]:
        ctx.values.set("a", 1)

        def step() -> Any:
            current = SyncContext.current()
            current.values.set("b", [2])
            return current.values.get("a")

        return [ctx.step("step", step), ctx.values.get("b"), ctx.values.get("c", "none")]

    @app.task
    async def threads(ctx: Context) -> Any:
        def step() -> Any:
            anyio.from_thread.run(ctx.values.set, "a", 3)
            return anyio.from_thread.run(ctx.values.get, "a")

        return await ctx.step("step", step)

    async with app:
        one, two = await job.enqueue(), await threads.enqueue()
        await work_off(app)
        assert await bounded(one.result()) == [1, [2], "none"]
        assert await bounded(two.result()) == 3
        assert await one.values() == {"a": 1, "b": [2]}


async def test_the_steps_of_an_agent_use_values(app: App) -> None:
    class Sets(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            await ctx.values.set("stage", "plan")
            return [PlanStep(key="a", title="A"), PlanStep(key="b", title="B")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            await ctx.values.set("stage", step.key)
            return await ctx.values.get("stage")

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            await ctx.values.set("stage", "finish")
            return state.results

    task = app.agent(Sets, name="sets")
    async with app:
        handle = await task.enqueue("go")
        await work_off(app)
        assert await bounded(handle.result()) == {"a": "a", "b": "b"}
        assert await handle.values() == {"stage": "finish"}
        left = await redis_command(app, "HKEYS", handle.partition.steps(handle.id))
        assert not [name for name in left if b"a/" in name or b"b/" in name], "they go with the record of their step"


async def test_following_events_shows_each_value(app: App) -> None:
    go = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.values.set("stage", 1)
        await go.wait()

    async with app, running_worker(app):
        handle = await job.enqueue()
        found: list[Any] = []
        async for event in handle.events():
            found.append((event.type, event.data))
            if len(found) == 1:
                await handle.update("speed", 2, by="ada")
            else:
                go.set()
        assert found == [
            ("value_set", {"name": "stage", "value": 1, "by": "handler"}),
            ("value_set", {"name": "speed", "value": 2, "by": "ada"}),
        ]


async def test_the_successor_begins_with_the_values_and_gets_later_ones(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, late = successor._forward, list[str]()

    async def slowly(*args: Any) -> None:
        if not late:
            late.append((await handle.update("late", "came")).task_id)
        await forward(*args)

    monkeypatch.setattr(successor, "_forward", slowly)

    @app.task
    async def second(ctx: Context) -> list[Any]:
        await moved.wait()
        return [await ctx.values.get("speed"), await ctx.values.get("late")]

    @app.task
    async def first(ctx: Context) -> list[Any]:
        await ctx.values.set("speed", 5)
        await ctx.continue_as(second)

    moved = asyncio.Event()
    async with app, running_worker(app):
        handle = await first.enqueue()

        async def is_moved() -> bool:
            return (await handle.record()).state is State.SUCCEEDED

        await wait_until(is_moved, "the first task has ended")
        assert late == [handle.id]
        assert await handle.values() == {"speed": 5, "late": "came"}
        assert (await handle.update("more", 1)).task_id == f"{handle.id}.h1"
        moved.set()
        assert await bounded(handle.result()) == [5, "came"]


async def test_bad_updates_say_why(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    async with app:
        handle = await job.options(delay=3600).enqueue()
        with pytest.raises(ValueError, match=r"name of a value must be 1 to 64 letters, .* got 'a b'"):
            await handle.update("a b", 1)
        with pytest.raises(TypeError, match="value 'a' must be JSON-serialisable"):
            await handle.update("a", object())
        with pytest.raises(ValueRefused, match=r"value 'a' has 70,002 bytes of JSON, over the limit of 65,536"):
            await handle.update("a", "x" * 70_000)
        with pytest.raises(ValueError, match="by must be a text of at most 200 characters"):
            await handle.update("a", 1, by="x" * 201)
        for number in range(64):
            await handle.update(f"v{number}", number)
        with pytest.raises(ValueRefused, match=r"has 64 values, the most that a task may have: set one of them"):
            await handle.update("one-more", 1)
        assert (await handle.update("v1", "again")).task_id == handle.id
        await handle.cancel()
        with pytest.raises(TaskEnded, match="takes no more values: it is cancelled"):
            await handle.update("v1", 1)
        assert (await handle.values())["v1"] == "again"
        await redis_command(app, "DEL", handle.partition.record(handle.id))
        for call in (handle.update("v1", 1), handle.values()):
            with pytest.raises(TaskNotFound):
                await call


async def test_bad_sets_say_why_and_are_not_tried_again(app: App) -> None:
    wrong: dict[str, Any] = {"a b": 1, "object": object(), "large": "x" * 70_000}

    @app.task(retry=AT_ONCE)
    async def job(ctx: Context, name: str) -> None:
        await ctx.values.set(name, wrong[name])

    @app.task(retry=AT_ONCE)
    async def many(ctx: Context) -> None:
        for number in range(65):
            await ctx.values.set(f"v{number}", number)

    async with app:
        handles = [await job.enqueue(name) for name in wrong] + [await many.enqueue()]
        await work_off(app)
        records = [await handle.record() for handle in handles]
        assert {(record.reason, record.attempts) for record in records} == {("not_retryable", 1)}
        texts = [str((record.error or {})["message"]) for record in records]
    assert "name of a value must be 1 to 64 letters" in texts[0]
    assert "must be JSON-serialisable" in texts[1]
    assert "save an artifact, and set its name" in texts[2]
    assert texts[3] == "a task may have at most 64 values: value 'v64' was not set; put several into one value"


async def test_values_of_encrypted_tasks_are_encrypted(settings: Settings) -> None:
    app = App("work", settings=with_keys(settings, FIRST))

    @app.task
    async def job(ctx: Context) -> Any:
        await ctx.values.set("mine", "hushed")
        return await ctx.values.get("speed")

    async with app:
        handle = await job.enqueue()
        await handle.update("speed", "secretly", by="ada-lovelace")
        stored = await everything(app)
        assert b"secretly" not in stored
        assert b"ada-lovelace" not in stored
        async with App("work", settings=settings) as plain:
            other = await plain.producer.find(handle.id)
            assert other is not None
            with pytest.raises(NoKey, match="a value to task"):
                await other.update("speed", 1)
            with pytest.raises(QueueError, match="value"):
                await other.values()
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), "values", "speed moved")
        kept = await redis_command(app, "HGET", handle.partition.inbox(handle.id), "v:speed")
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), "v:moved", kept)
        with pytest.raises(TamperedData):
            await handle.values()
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), "values", "speed")
        await work_off(app)
        assert await bounded(handle.result()) == "secretly"
        assert b"hushed" not in await everything(app)
        assert await handle.values() == {"speed": "secretly", "mine": "hushed"}


@pytest.fixture
def warnings_of() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}", level="WARNING")
    yield lines
    logger.remove(sink)


async def test_a_value_that_another_program_wrote_counts_as_missing(app: App, warnings_of: list[str]) -> None:
    @app.task
    async def job(ctx: Context) -> Any:
        return [await ctx.values.get("a", "default"), await ctx.values.get("b", "default"), await ctx.inbox()]

    async with app:
        handle = await job.enqueue()
        key = handle.partition.inbox(handle.id)
        await redis_command(app, "HSET", key, "v:a", "1 foreign", "v:b", "x" * 200_000, "values", "a b \xff ..")
        with pytest.raises(UnreadableRecord, match=r"value '.'.*set the value again"):
            await handle.values()
        await work_off(app)
        assert await bounded(handle.result()) == ["default", "default", []]
    assert any("value 'a' of task" in line and "counts as missing" in line for line in warnings_of)


async def test_values_are_no_messages(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 2)

    @app.task
    async def job(ctx: Context) -> Any:
        return [message.content for message in await ctx.inbox()]

    async with app:
        handle = await job.enqueue()
        for number in range(10):
            await handle.update(f"v{number}", number)
        await handle.send(1)
        await handle.send(2)
        with pytest.raises(InboxFull):
            await handle.send(3)
        found = await handle.pending_messages()
        assert [(message.number > 0, message.content) for message in found] == [(True, 1), (True, 2)]
        await work_off(app)
        assert await bounded(handle.result()) == [1, 2]


async def test_a_unit_test_gives_values_and_sees_those_that_were_set() -> None:
    async def handler(ctx: Context) -> Any:
        await ctx.values.set("done", (1, 2))
        return [await ctx.values.get("speed"), await ctx.values.get("none", 0), await ctx.values.get("done")]

    ctx = make_context(values={"speed": 4})
    assert await handler(ctx) == [4, 0, [1, 2]]
    assert ctx.named == {"speed": 4, "done": [1, 2]}

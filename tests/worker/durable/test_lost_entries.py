"""Redis loses entries of a running task: the run sends them again, or the task resumes from what Redis has.

The loss is made by hand: the keys of the task's checkpoint get their content of an earlier moment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from perdure import App, Context, Retry, State, TaskCancelled, TaskFailed, TaskHandle
from perdure.queues.delivery.checkpoint import Written
from perdure.worker.durable import checkpoint_writer
from perdure.worker.durable.checkpoint_writer import CheckpointWriter

from tests.support.runs import current_run
from tests.support.workers import (
    bounded,
    history,
    partition_of,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
)

pytestmark = pytest.mark.integration

FIELDS = ("entries", "events")
"""Fields of the record that the runs of a task write."""


class Loss:
    """Keeps the checkpoint of a task at one moment, and puts it back at another."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._kept: dict[str, bytes] = {}
        self._fields: list[bytes | None] = []

    async def keep(self, task_id: str) -> None:
        partition = partition_of(self._app)
        for key in (partition.steps(task_id), partition.log(task_id)):
            self._kept[key] = await redis_command(self._app, "DUMP", key)
        self._fields = await redis_command(self._app, "HMGET", partition.record(task_id), *FIELDS)

    async def lose(self, task_id: str) -> None:
        """Put the checkpoint back; a part that was empty is deleted."""
        for key, data in self._kept.items():
            await redis_command(self._app, "DEL", key)
            if data is not None:
                await redis_command(self._app, "RESTORE", key, 0, data)
        record = partition_of(self._app).record(task_id)
        for name, value in zip(FIELDS, self._fields, strict=True):
            if value is None:
                await redis_command(self._app, "HDEL", record, name)
            else:
                await redis_command(self._app, "HSET", record, name, value)


class Scene:
    """The first steps of a task, of whose records Redis loses all but the first, once."""

    def __init__(self, app: App) -> None:
        self.calls: Counter[str] = Counter()
        self._loss = Loss(app)
        self._lost = False

    async def _call(self, name: str) -> str:
        self.calls[name] += 1
        return name

    async def call(self, ctx: Context, name: str) -> str:
        return await ctx.step(name, self._call, name)

    async def begin(self, ctx: Context) -> None:
        await self.call(ctx, "one")
        if not self._lost:
            await self._loss.keep(ctx.task_id)
        await self.call(ctx, "two")
        await ctx.decide("go")
        await self.call(ctx, "three")
        await ctx.checkpoint()
        if not self._lost:
            self._lost = True
            await self._loss.lose(ctx.task_id)


async def events_of(handle: TaskHandle[Any]) -> list[str]:
    """Return type, and step if there is one, of all events."""
    return [event.step or event.type for event in await history(handle)]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run keep none of its written entries."""
    monkeypatch.setattr(checkpoint_writer, "_KEPT_BYTES", 0)


async def test_the_next_record_sends_lost_ones_again(app: App) -> None:
    scene = Scene(app)

    @app.task
    async def job(ctx: Context) -> str:
        await scene.begin(ctx)
        return await scene.call(ctx, "four")

    async with running_worker(app):
        handle = await job.enqueue()
        assert await bounded(handle.result()) == "four"
    assert scene.calls == {"one": 1, "two": 1, "three": 1, "four": 1}
    assert set(await recorded_steps(app, handle)) == {"d:one", "d:two", "d:three", "d:four", "d:#decided"}
    assert await events_of(handle) == ["one", "two", "decided", "three", "four"]


Ending = Callable[[Context], Any]


async def returns(_: Context) -> str:
    return "done"


async def fails(_: Context) -> str:
    raise ValueError("no")


async def waits(ctx: Context) -> str:
    found = await ctx.inbox(wait=600)
    return f"{len(found)} messages"


ENDINGS: dict[str, tuple[Ending, int, list[str]]] = {
    "succeed": (returns, 1, []),
    "retry": (fails, 2, ["attempt_failed"]),
    "bury": (fails, 1, ["buried"]),
    "park": (waits, 1, ["waiting"]),
}
"""How the handler ends, the largest number of attempts, and the events that follow the lost ones."""


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_outcome_is_stored_with_all_entries_or_not_at_all(
    app: App, monkeypatch: pytest.MonkeyPatch, ending: str, kept: bool
) -> None:
    """If the run does not keep them any more, the task resumes from what Redis has, at no cost."""
    scene = Scene(app)
    end, attempts, expected = ENDINGS[ending]
    if not kept:
        forget(monkeypatch)

    @app.task(retry=Retry(max_attempts=attempts, base=600.0, cap=600.0))
    async def job(ctx: Context) -> str:
        await scene.begin(ctx)
        return str(await end(ctx))

    async with running_worker(app):
        handle = await job.enqueue()
        settled = {"succeed": State.SUCCEEDED, "bury": State.DEAD, "park": State.WAITING}.get(ending, State.SCHEDULED)

        async def is_settled() -> bool:
            return await handle.status() is settled

        await wait_until(is_settled, f"the task is {settled}")
        if ending == "bury":
            with pytest.raises(TaskFailed):
                await bounded(handle.result())
        record = await handle.record()
    assert (record.crashes, record.attempts) == (0, int(ending != "park"))
    assert scene.calls == ({"one": 1, "two": 1, "three": 1} if kept else {"one": 1, "two": 2, "three": 2})
    again = [] if kept else ["data_lost", "resumed"]
    assert await events_of(handle) == ["one", *again, "two", "decided", "three", *expected]


async def test_a_shutdown_releases_a_task_with_all_its_entries(app: App) -> None:
    scene = Scene(app)
    at_work, stopped = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        await scene.begin(ctx)
        at_work.set()
        await stopped.wait()
        return await scene.call(ctx, "four")

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(at_work.wait())
    stopped.set()
    async with running_worker(app):
        assert await bounded(handle.result()) == "four"
    assert scene.calls == {"one": 1, "two": 1, "three": 1, "four": 1}


async def test_a_cancelled_task_needs_no_entries(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(app)
    forget(monkeypatch)
    at_work = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await scene.begin(ctx)
        at_work.set()
        await asyncio.Event().wait()

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(at_work.wait())
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
    assert scene.calls["two"] == 1


async def test_a_run_keeps_a_bounded_number_of_entries(monkeypatch: pytest.MonkeyPatch, app: App) -> None:
    """It keeps two batches, each of a bounded size and a bounded time."""
    kept: list[int] = []
    monkeypatch.setattr(checkpoint_writer, "_ENTRY_BYTES", 600)
    monkeypatch.setattr(checkpoint_writer, "_KEPT_BYTES", 2200)

    @app.task
    async def job(ctx: Context) -> None:
        recorder = current_run(ctx).recorder

        def count() -> None:
            kept.append(len(recorder._kept_before) + len(recorder._kept))

        for number in range(8):
            await ctx.step("small", str, number)
            count()
        await ctx.step("large", "x".__mul__, 2000)
        count()
        await ctx.step("larger", "y".__mul__, 2500)
        count()
        recorder._kept_until = 0.0
        await ctx.step("last", str, 0)
        count()

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(handle.result())
    assert kept == [1, 2, 3, 4, 5, 6, 7, 4, 1, 1, 1]


async def test_many_lost_entries_are_sent_again_in_bounded_writes(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "_WRITE_BYTES", 8 * (checkpoint_writer._ENTRY_BYTES + 100))
    writes: list[int] = []
    write, loss = CheckpointWriter._write, Loss(app)

    def noted(writer: CheckpointWriter, puts: Sequence[Any], *, replicated: bool = False) -> Awaitable[Written]:
        writes.append(sum(len(entries) for entries, _ in puts))
        return write(writer, puts, replicated=replicated)

    monkeypatch.setattr(CheckpointWriter, "_write", noted)
    calls: list[int] = []

    async def call(value: int) -> None:
        calls.append(value)

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(50):
            await ctx.step(f"s{value}", call, value)
            if value == 10:
                await current_run(ctx).flush()
                await loss.keep(ctx.task_id)
            elif value == 40:
                await current_run(ctx).flush()
                await loss.lose(ctx.task_id)
                writes.clear()

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(handle.result())
    assert calls == list(range(50))
    assert max(writes) <= 8
    assert sum(writes) == writes[0] + 50 - 11
    assert await events_of(handle) == [f"s{value}" for value in range(50)]


async def test_a_message_that_redis_hands_out_again_gets_a_new_fence(app: App) -> None:
    """Redis has lost that it handed out the message, and hands it to the same worker: two runs under one fence."""
    starts: list[int] = []
    first = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> int:
        starts.append(current_run(ctx).delivery.count)
        if len(starts) == 1:
            first.set()
            await asyncio.Event().wait()
        return await ctx.step("count", len, starts)

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(first.wait())
        ready = handle.partition.ready
        entry = await redis_command(app, "HGET", handle.partition.record(handle.id), "entry")
        lost = [("XACK", ready, "workers", entry), ("XGROUP", "SETID", ready, "workers", "0")]
        await app.producer.gateway.pipeline(lost)
        await job.options(task_id="wakes-the-reader").enqueue()
        assert await bounded(handle.result()) >= 2
    assert starts[0] == 1
    assert 2 in starts


@pytest.mark.parametrize("risky", [False, True])
@pytest.mark.parametrize("gap", [False, True])
async def test_a_function_resumes_from_before_a_gap_in_its_log(app: App, gap: bool, risky: bool) -> None:
    """The event and the record of the second of three tools are missing; it has another result the next time."""
    calls: Counter[str] = Counter()

    def read(name: str, after: str) -> str:
        calls[name] += 1
        return f"{name}{calls[name]} after ({after})"

    @app.task(retry=Retry(max_attempts=2, base=600.0))
    async def walk(ctx: Context) -> str:
        found = "start"
        for name in ("a", "b", "c", "d"):
            found = await ctx.options(risky=risky and name == "c").tool(name, read, name, found)
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return found

    handle = await walk.enqueue()
    async with running_worker(app):
        await wait_until(lambda: is_scheduled(handle), "its first attempt has failed")
    await redis_command(app, "HDEL", handle.partition.steps(handle.id), "d:b")
    (lost,) = [event for event in await history(handle) if event.type == "tool_called" and event.step == "b"]
    if gap:
        await redis_command(app, "XDEL", handle.partition.log(handle.id), lost.id)
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)
    async with running_worker(app):
        if risky or not gap:
            with pytest.raises(TaskFailed, match=r"step 'c' was recorded .*: a step before it was not recorded"):
                await bounded(handle.result())
            return
        assert await bounded(handle.result()) == "d2 after (c2 after (b2 after (a1 after (start))))"
    assert calls == {"a": 1, "b": 2, "c": 2, "d": 2}
    outdated = [event for event in await history(handle) if event.type == "step_outdated"]
    assert [(event.step, event.data["first"], event.data["last"]) for event in outdated] == [
        ("c", lost.number, lost.number),
        ("d", lost.number, lost.number),
    ]


async def is_scheduled(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.SCHEDULED

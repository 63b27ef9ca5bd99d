"""Asynchronous recording: a step returns at once, and the outcome waits for every record."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from perdure import App, Context, Retry
from perdure.queues import Gateway, Unavailable
from perdure.queues.delivery.checkpoint import Entry, Kind
from perdure.queues.transport.scripts import Script
from perdure.worker.durable import checkpoint_writer
from perdure.worker.durable.checkpoint_writer import CheckpointWriter

from tests.support.runs import current_run
from tests.support.workers import (
    BOUND,
    Gate,
    bounded,
    history,
    recorded_steps,
    running_worker,
    steal,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("durability", lease=60.0)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class Writes:
    """The checkpoint writes that Redis got: the names of their entries, and their bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[list[str]] = []
        self.sizes: list[int] = []
        self.on_write: Callable[[int], Awaitable[None]] | None = None
        """Awaited between a write and its reply, with the number of the write."""
        run = Gateway.run

        async def noted(gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
            reply = await run(gateway, script, keys, args)
            if script.name == "write_checkpoint":
                self.names.append([str(name) for name in args[7::4]])
                self.sizes.append(sum(len(value) for value in args[6:]))
                if self.on_write is not None:
                    await self.on_write(len(self.names))
            return reply

        monkeypatch.setattr(Gateway, "run", noted)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


async def number(value: int) -> int:
    return value


async def text(size: int) -> str:
    return "x" * size


async def test_an_async_step_returns_before_its_record_is_stored(app: App, gate: Gate) -> None:
    went_on = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> int:
        value = await ctx.step("one", number, 1)
        went_on.set()
        return value

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(went_on.wait())
        assert await recorded_steps(app, handle) == {}
        gate.open.set()
        assert await bounded(handle.result()) == 1
    assert list(await recorded_steps(app, handle)) == ["d:one"]


async def test_a_sync_step_returns_after_its_record_is_stored(app: App, gate: Gate) -> None:
    went_on = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("one", number, 1)
        went_on.set()

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(gate.reached.wait())
        assert not went_on.is_set()
        gate.open.set()
        await bounded(handle.result())
    assert went_on.is_set()


async def test_every_record_is_stored_before_the_outcome(app: App, gate: Gate) -> None:
    returned = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> int:
        found = [await ctx.step("one", number, value) for value in range(50)]
        returned.set()
        return sum(found)

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(returned.wait())
        assert "finish" not in gate.sent
        gate.open.set()
        assert await bounded(handle.result()) == sum(range(50))
    assert "write_checkpoint" in gate.sent
    assert "write_checkpoint" not in gate.sent[gate.sent.index("finish") :]
    assert len(await recorded_steps(app, handle)) == 50


async def test_records_added_during_a_write_are_batched_in_order(app: App, gate: Gate) -> None:
    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(20):
            await ctx.step(f"s{value}", number, value)
            gate.open.set()

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert [event.step for event in await history(handle)] == [f"s{value}" for value in range(20)]
    assert gate.sent.count("write_checkpoint") < 20


async def test_a_failed_attempt_keeps_its_records(app: App, gate: Gate) -> None:
    calls: list[int] = []

    @app.task(durability="async", retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        await ctx.step("one", calls.append, 1)
        gate.open.set()
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert calls == [1]


async def test_a_sync_step_stores_the_records_added_before_it(app: App, gate: Gate) -> None:
    seen: list[list[str]] = []

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        await ctx.step("later", number, 1)
        gate.open.set()
        await ctx.options(durability="sync").step("now", number, 2)
        handle = await app.producer.find(ctx.task_id)
        assert handle is not None
        seen.append(sorted(await recorded_steps(app, handle)))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert seen == [["d:later", "d:now"]]


async def test_records_added_during_a_background_write_are_stored(app: App, gate: Gate) -> None:
    ends = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        await ctx.step("first", number, 1)
        await gate.reached.wait()
        await ctx.step("second", number, 2)
        gate.open.set()
        await ends.wait()

    async with running_worker(app):
        handle = await job.enqueue()

        async def both() -> bool:
            return set(await recorded_steps(app, handle)) == {"d:first", "d:second"}

        await wait_until(both, "the second record is stored while the handler waits for something else")
        ends.set()
        await bounded(handle.result())


async def test_a_lease_lost_in_the_background_cancels_the_run(app: App, gate: Gate) -> None:
    cancelled: list[str] = []
    started = asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        await ctx.step("one", number, 1)
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(ctx.task_id)
            raise

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(app, handle)
        gate.open.set()

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the run that lost its lease ends before the next heartbeat")
    assert cancelled == [handle.id]
    assert await recorded_steps(app, handle) == {}
    assert (await handle.record()).worker == "thief"


async def test_a_result_after_a_lost_lease_is_refused(app: App, gate: Gate) -> None:
    started, ends = asyncio.Event(), asyncio.Event()

    @app.task(durability="async")
    async def job(ctx: Context) -> str:
        await ctx.step("one", number, 1)
        started.set()
        await ends.wait()
        return "of the loser"

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(app, handle)
        ends.set()
        gate.open.set()

        async def idle() -> bool:
            return worker.in_flight == 0

        await wait_until(idle, "the loser ends")
        assert (await handle.record()).result is None


async def test_a_claimed_task_has_the_stored_async_records(app: App, gate: Gate) -> None:
    """Steps stored before the first worker died are not repeated; the others are."""
    gate.open.set()
    calls: list[str] = []

    @app.task(durability="async")
    async def job(ctx: Context) -> bool:
        await ctx.step("one", calls.append, "one")
        return ctx.resumed

    handle = await job.enqueue()
    await take_and_die(app)
    await work_off(app)
    assert await handle.result(timeout=BOUND) is False
    assert calls == ["one"]
    assert (await handle.record()).crashes == 1


STEPS = 1300
"""Unwaited records for three writes: about 500 small ones are one."""


async def test_many_unwaited_records_are_several_bounded_writes(app: App, writes: Writes) -> None:
    """A step that waits returns when all records before it are stored, too."""
    stored: list[int] = []

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(STEPS):
            await ctx.step(f"s{value}", number, value)
        await ctx.options(durability="sync").step("last", number, 0)
        handle = await app.producer.find(ctx.task_id)
        assert handle is not None
        stored.append(len(await recorded_steps(app, handle)))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert stored == [STEPS + 1]
    assert len(writes.names) == 3
    assert max(len(names) for names in writes.names) < 512
    assert [event.step for event in await history(handle)] == [*(f"s{value}" for value in range(STEPS)), "last"]


async def test_a_write_of_large_records_is_bounded_too(app: App, writes: Writes) -> None:
    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(8):
            await ctx.step(f"s{value}", text, 300_000)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert [len(names) for names in writes.names] == [3, 3, 2]
    assert max(writes.sizes) < 1024 * 1024


async def test_what_one_put_has_is_never_split(app: App, writes: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that a single put exceeds has nothing else."""
    monkeypatch.setattr(checkpoint_writer, "_WRITE_BYTES", 5 * (checkpoint_writer._ENTRY_BYTES + 10))
    puts = [1, 3, 9, 2, 1, 1, 3, 3, 0, 2]

    @app.task
    async def job(ctx: Context) -> None:
        recorder = current_run(ctx).recorder
        for value, count in enumerate(puts):
            await recorder.put(*[Entry(Kind.SAVED, f"put {value}", b"")] * count, wait=False)
        await current_run(ctx).flush()

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    expected = [{0: 1, 1: 3}, {2: 9}, {3: 2, 4: 1, 5: 1}, {6: 3}, {7: 3, 9: 2}]
    assert [Counter(names) for names in writes.names] == [
        {f"put {value}": count for value, count in write.items()} for write in expected
    ]


async def test_a_run_that_ends_between_two_writes_leaves_the_first_records(app: App, writes: Writes) -> None:
    calls: Counter[int] = Counter()

    async def count(value: int) -> None:
        calls[value] += 1

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(STEPS):
            await ctx.step(f"s{value}", count, value)

    handle = await job.enqueue()

    async def lose_lease(write: int) -> None:
        if write == 2:
            await steal(app, handle, expired=True)

    writes.on_write = lose_lease
    async with running_worker(app) as worker:

        async def lost() -> bool:
            return len(writes.names) == 3 and worker.in_flight == 0

        await wait_until(lost, "the third write is refused")
    kept = len(writes.names[0]) + len(writes.names[1])
    assert set(await recorded_steps(app, handle)) == {f"d:s{value}" for value in range(kept)}
    await work_off(app)
    await bounded(handle.result())
    assert [calls[value] for value in range(STEPS)] == [1] * kept + [2] * (STEPS - kept)
    assert [event.step for event in await history(handle) if event.step] == [f"s{value}" for value in range(STEPS)]


async def test_a_write_in_the_middle_is_repeated_if_its_reply_is_lost(app: App, writes: Writes) -> None:
    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(STEPS):
            await ctx.step(f"s{value}", number, value)

    async def lose_reply(write: int) -> None:
        if write == 2:
            raise Unavailable("the reply is lost")

    writes.on_write = lose_reply
    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert len(writes.names) == 4
    assert writes.names[1] == writes.names[2]
    assert [event.step for event in await history(handle)] == [f"s{value}" for value in range(STEPS)]


async def test_a_step_waits_while_too_many_records_are_unwritten(
    app: App, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_PENDING_BYTES", 400 * checkpoint_writer._ENTRY_BYTES)
    called: list[int] = []

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(1000):
            called.append(await ctx.step(f"s{value}", number, value))  # noqa: PERF401 - seen while the loop runs

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(gate.reached.wait())
        assert 300 < len(called) < 400
        gate.open.set()
        await bounded(handle.result())
    assert len(await recorded_steps(app, handle)) == 1000


async def test_a_replicated_step_is_confirmed_with_the_write_that_has_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed: list[tuple[str, bool]] = []
    write = CheckpointWriter._write

    def noted(writer: CheckpointWriter, puts: Sequence[Any], *, replicated: bool = False) -> Awaitable[Any]:
        confirmed.append((puts[-1][0][-1].step, replicated))
        return write(writer, puts)  # the server of the test has no replica

    monkeypatch.setattr(CheckpointWriter, "_write", noted)

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for value in range(600):
            await ctx.step(f"s{value}", number, value)
        await ctx.options(durability="replicated").step("paid", number, 0)
        await ctx.options(durability="sync").step("last", number, 0)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert confirmed[0][0].startswith("s")
    assert confirmed[1:] == [("paid", True), ("last", False)]


async def test_an_unknown_durability_is_refused(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        try:
            await ctx.options(durability="never").step("one", number, 1)  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        return ""

    handle = await job.enqueue()
    await work_off(app)
    assert "durability must be one of" in await bounded(handle.result())

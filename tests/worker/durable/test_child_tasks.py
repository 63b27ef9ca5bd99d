"""Tasks that a handler enqueues: once per attempt, whatever happens to the worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from perdure import App, Context, Retry, Snooze, SyncContext, TaskHandle
from perdure.deadletter.replay import Replay, replay
from perdure.queues import TaskExists
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from pydantic import ValidationError

from tests.support.workers import bounded, letter, recorded_steps, steal, work_off

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:a task waits for the result")]

AT_ONCE = Retry(max_attempts=3, base=0.0)


async def lose_worker(app: App, handle: TaskHandle[Any]) -> None:
    """Lose the lease, so that the next run continues; the present one is cancelled."""
    await steal(app, handle, expired=True)
    await asyncio.sleep(60)


async def test_a_resumed_run_gets_the_tasks_that_the_lost_one_enqueued(app: App) -> None:
    ran, handles = Counter[str](), list[list[str]]()

    @app.task
    async def child(ctx: Context, name: str) -> str:
        ran[name] += 1
        return name.upper()

    @app.task
    async def parent(ctx: Context) -> list[str]:
        one = await child.enqueue("one")
        again = await child.enqueue("one")
        many = await child.enqueue_many([{"name": "two"}, {"name": "three"}])
        some = [handle async for handle in child.enqueue_stream({"name": f"s{number}"} for number in range(3))]
        handles.append([handle.id for handle in (one, again, *many, *some)])
        if len(handles) == 1:
            await lose_worker(app, running)
        return [await handle.result() for handle in (one, again, *many, *some)]

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == ["ONE", "ONE", "TWO", "THREE", "S0", "S1", "S2"]
        assert handles[0] == handles[1]
        assert len(set(handles[0])) == 7
        assert ran == {"one": 2, "two": 1, "three": 1, "s0": 1, "s1": 1, "s2": 1}


@pytest.mark.parametrize("cut", ["plan", "enqueue", "record"])
async def test_a_crash_at_each_write_enqueues_a_task_once(app: App, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    put, ran, cuts = CheckpointWriter.put, Counter[str](), list[str]()

    async def lost(self: CheckpointWriter, *entries: Any, **options: Any) -> None:
        kinds = [entry.kind.value for entry in entries if entry.step.startswith("#enqueue")]
        before = {"plan": "saved", "enqueue": None, "record": "mark"}[cut]
        if kinds == [before] and not cuts:
            cuts.append(cut)
            await lose_worker(app, running)
        await put(self, *entries, **options)
        if cut == "enqueue" and kinds == ["saved"] and not cuts:
            cuts.append(cut)
            await lose_worker(app, running)

    monkeypatch.setattr(CheckpointWriter, "put", lost)

    @app.task
    async def child(ctx: Context, name: str) -> None:
        ran[name] += 1

    @app.task
    async def parent(ctx: Context) -> None:
        await child.enqueue("one")
        await child.enqueue_many([{"name": "two"}, {"name": "three"}])

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        await bounded(running.result())
        assert cuts == [cut]
        assert ran == {"one": 1, "two": 1, "three": 1}


@pytest.mark.parametrize("error", [RuntimeError("once more"), Snooze(0.0)], ids=["failure", "snooze"])
async def test_another_attempt_enqueues_a_new_task(app: App, error: Exception) -> None:
    ids: list[str] = []

    @app.task
    async def child(ctx: Context) -> None: ...

    @app.task(retry=AT_ONCE)
    async def parent(ctx: Context) -> int:
        ids.append((await child.enqueue()).id)
        if len(ids) < 3:
            raise error
        return len(ids)

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == 3
        assert len(set(ids)) == 3


async def test_a_replay_enqueues_a_new_task(app: App) -> None:
    ids: list[str] = []

    @app.task
    async def child(ctx: Context) -> None: ...

    @app.task(retry=Retry(max_attempts=1))
    async def parent(ctx: Context) -> None:
        ids.append((await child.enqueue()).id)
        raise ValueError("no")

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        assert not [name for name in await recorded_steps(app, running) if "#enqueue" in name]


async def test_a_replay_after_too_many_crashes_enqueues_a_new_task(app: App) -> None:
    """The attempt ends with the burial, though no handler has raised."""
    ids: list[str] = []

    @app.task
    async def child(ctx: Context) -> None: ...

    @app.task(retry=Retry(max_attempts=1, max_crashes=0))
    async def parent(ctx: Context) -> int:
        ids.append((await child.enqueue()).id)
        if len(ids) == 1:
            await lose_worker(app, running)
        return len(ids)

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        assert await replay(app.producer.gateway, await letter(app, running), Replay())
        await work_off(app)
        assert await bounded(running.result()) == 2
        assert len(set(ids)) == 2


async def test_a_crash_in_a_step_doubles_no_task_and_another_try_enqueues_one(app: App) -> None:
    ids: list[str] = []

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    async def start(number: int) -> TaskHandle[int]:
        handle = await child.enqueue(number)
        ids.append(handle.id)
        if len(ids) == 1:
            await lose_worker(app, running)
        if len(ids) == 2:
            raise RuntimeError("after it was enqueued")
        return handle

    @app.task
    async def parent(ctx: Context) -> int:
        handle = await ctx.options(retry=Retry(max_attempts=2, base=0.0)).step("start", start, 5)
        assert handle.id == ids[-1]
        return await handle.result()

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == 5
        assert ids[0] == ids[1] != ids[2]


async def test_a_handle_is_recorded_as_the_result_of_a_step(app: App) -> None:
    runs: list[TaskHandle[int]] = []

    @app.task
    async def child(ctx: Context) -> int:
        return 7

    async def start() -> TaskHandle[int]:
        return await child.enqueue()

    @app.task
    async def parent(ctx: Context) -> int:
        runs.append(await ctx.step("start", start))
        if len(runs) == 1:
            await lose_worker(app, running)
        return await runs[-1].result()

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == 7
        assert runs[0] == runs[1]
        assert hash(runs[0]) == hash(runs[1])


async def test_a_handle_cannot_be_read_outside_of_tasks(app: App) -> None:
    @app.task
    async def child(ctx: Context) -> int:
        return 7

    @app.task
    async def parent(ctx: Context) -> TaskHandle[int]:
        return await child.enqueue()

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        with pytest.raises(ValidationError, match="only in a task that a worker runs"):
            await running.result()


async def test_ids_of_the_caller_hold_over_attempts(app: App) -> None:
    ran: list[str] = []

    @app.task
    async def child(ctx: Context, name: str) -> None:
        ran.append(name)

    @app.task(retry=AT_ONCE)
    async def parent(ctx: Context) -> int:
        await child.options(task_id=f"{ctx.task_id}-mail").enqueue("one")

        def by_name(args: Mapping[str, Any]) -> str:
            return f"{ctx.task_id}-{args['name']}"

        await child.options(task_id=by_name).enqueue_many([{"name": "two"}, {"name": "three"}])
        await child.options(task_id=[f"{ctx.task_id}-x"]).enqueue_many([{"name": "four"}])
        if ctx.attempt < 3:
            raise RuntimeError("once more")
        return ctx.attempt

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == 3
        assert sorted(ran) == ["four", "one", "three", "two"]


async def test_a_plain_function_gets_its_tasks_again(app: App) -> None:
    ids: list[list[str]] = []

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    def start(number: int) -> str:
        return child.enqueue_sync(number).id

    @app.task
    def parent(ctx: SyncContext) -> int:
        one, two = child.enqueue_sync(1), child.enqueue_many_sync([{"number": 2}])[0]
        ids.append([one.id, two.id, ctx.step("start", start, 3)])
        if len(ids) == 1:
            ctx.step("lose the worker", lose_worker, app, running)
        return len(ids)

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == 2
        assert ids[0] == ids[1]
        assert len(set(ids[0])) == 3


async def test_threads_of_steps_and_handlers_enqueue_tasks(app: App) -> None:
    """The steps of an async handler run in threads, and a handler may start threads of its own."""
    ids: list[str] = []

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    def start(number: int) -> str:
        ids.append(child.enqueue_sync(number).id)
        if len(ids) == 1:
            raise ConnectionError("after it was enqueued")
        return ids[-1]

    @app.task(retry=AT_ONCE)
    async def parent(ctx: Context) -> str:
        await asyncio.to_thread(child.enqueue_sync, 1)
        return await ctx.step("start", start, 2)

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == ids[-1]
        assert len(set(ids)) == 2
    await asyncio.to_thread(app.sync().close)  # of the calls of the threads


async def test_wrong_ids_are_refused_before_anything_is_stored(app: App) -> None:
    @app.task
    async def child(ctx: Context, name: str) -> None: ...

    two = [{"name": "a"}, {"name": "b"}]
    async with app:
        with pytest.raises(ValueError, match="a list of ids or a function"):
            await child.options(task_id="x").enqueue_many(two)
        with pytest.raises(ValueError, match="each of 2 sets of arguments, got 1 ids"):
            await child.options(task_id=["x"]).enqueue_many(two)
        with pytest.raises(ValueError, match="got 1 ids for more"):
            await child.options(task_id=["x"]).enqueue_many(iter(two))
        with pytest.raises(ValueError, match="a text for one task"):
            await child.options(task_id=["x"]).enqueue("a")
        assert await app.producer.find("x") is None


async def test_a_taken_id_is_refused_in_a_handler_too(app: App) -> None:
    @app.task
    async def child(ctx: Context, name: str) -> None: ...

    @app.task
    async def parent(ctx: Context) -> str:
        await child.options(task_id="taken").enqueue("one")
        try:
            await child.options(task_id="taken").enqueue("two")
        except TaskExists:
            return "refused"
        return "stored"

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == "refused"


async def test_changed_arguments_meet_the_recorded_task(app: App) -> None:
    """A text that differs in each run, such as a time, starts no second task in the attempt."""
    runs: list[str] = []

    @app.task
    async def child(ctx: Context, at: int) -> int:
        return at

    @app.task
    async def parent(ctx: Context) -> int:
        handle = await child.enqueue(len(runs))
        runs.append(handle.id)
        if len(runs) == 1:
            await lose_worker(app, running)
        return await handle.result()

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        assert await bounded(running.result()) == 0
        assert runs[0] == runs[1]


async def test_concurrent_branches_keep_their_tasks(app: App) -> None:
    runs: list[dict[int, str]] = []

    @app.task
    async def child(ctx: Context, number: int) -> None: ...

    @app.task
    async def parent(ctx: Context) -> None:
        order = range(8) if not runs else reversed(range(8))

        async def start(number: int) -> tuple[int, str]:
            return number, (await child.enqueue(number)).id

        runs.append(dict(await asyncio.gather(*map(start, order))))
        if len(runs) == 1:
            await lose_worker(app, running)

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        await work_off(app)
        await bounded(running.result())
        assert runs[0] == runs[1]


async def test_the_delay_after_repeated_crashes_enqueues_no_task_again(app: App) -> None:
    ran, starts = Counter[str](), list[int]()

    @app.task
    async def child(ctx: Context) -> None:
        ran["child"] += 1

    @app.task(retry=Retry(max_attempts=1, max_crashes=10, base=0.0))
    async def parent(ctx: Context) -> int:
        await child.enqueue()
        starts.append(ctx.crashes)
        if len(starts) < 5:
            await lose_worker(app, running)
        return len(starts)

    async with app:
        running = await parent.enqueue()
        while len(starts) < 5:
            await work_off(app)
        assert await bounded(running.result()) == 5
        assert "crash_backoff" in [event.type async for event in running.events()]
        assert ran == {"child": 1}

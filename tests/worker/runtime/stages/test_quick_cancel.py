"""Running tasks are cancelled at once: their worker is notified, and renews no lease within the time of a test."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings, State, TaskCancelled, TaskHandle, Worker
from perdure.queues import Gateway, Refused
from perdure.queues.keys import GROUP
from perdure.queues.partitions.resharding import set_partitions
from perdure.worker.durable.run import Run

from tests.support.command_line import Running, call
from tests.support.servers.clusters import Cluster
from tests.support.workers import (
    BOUND,
    bounded,
    history,
    pending,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("ends", lease=300.0)]


async def ends_cancelled(handle: TaskHandle[Any]) -> None:
    with pytest.raises(TaskCancelled):
        await bounded(handle.result())


async def is_idle(worker: Worker) -> bool:
    return worker.in_flight == 0


async def has_subscribed(app: App, worker: Worker) -> bool:
    found = await redis_command(app, "PUBSUB", "NUMSUB", app.producer.namespace.worker_channel(worker.id))
    return int(found[1]) == 1


async def test_a_running_step_is_cancelled_at_once(app: App) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("once", len, "x")
        await ctx.step("endless", endless)

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        assert await handle.cancel() is State.RUNNING
        await bounded(cancelled.wait())
        await ends_cancelled(handle)
        await wait_until(lambda: is_idle(worker), "the slot is free again")
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == (State.CANCELLED, 0, 0)
    assert list(await recorded_steps(app, handle)) == ["d:once"]


async def test_only_the_named_task_is_cancelled(app: App) -> None:
    started, proceed = asyncio.Semaphore(0), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        started.release()
        await proceed.wait()
        return "done"

    async with running_worker(app):
        first, second = await job.enqueue(), await job.enqueue()
        for _ in range(2):
            await bounded(started.acquire())
        await first.cancel()
        await ends_cancelled(first)
        proceed.set()
        assert await bounded(second.result()) == "done"


async def test_a_forged_notification_cancels_nothing(app: App) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        started.set()
        await proceed.wait()
        return "done"

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await wait_until(lambda: has_subscribed(app, worker), "the worker has subscribed")
        ((entry, name, _, _),) = await pending(app)
        ready = handle.partition.ready
        await redis_command(app, "XCLAIM", ready, GROUP, name, 0, entry, "IDLE", 100_000, "JUSTID")
        await redis_command(app, "PUBLISH", app.producer.namespace.worker_channel(worker.id), handle.id)

        async def renewed() -> bool:
            ((_, _, idle, _),) = await pending(app)
            return idle < 100_000

        await wait_until(renewed, "the worker has renewed the lease, and read that there is no request")
        proceed.set()
        assert await bounded(handle.result()) == "done"


async def test_a_worker_subscribes_again_when_its_connection_is_lost(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        started.set()
        await anyio.sleep_forever()

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())

        await wait_until(lambda: has_subscribed(app, worker), "the worker has subscribed")
        await redis_command(app, "CLIENT", "KILL", "TYPE", "pubsub")
        await handle.cancel()  # either the notification arrives, or the renewal after the new subscription reads it
        await ends_cancelled(handle)


async def test_a_worker_that_may_not_subscribe_reads_the_request_at_the_renewal(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's own rules may not let workers subscribe."""

    async def refuse(gateway: Gateway) -> Any:
        raise Refused("no permission")

    started = asyncio.Event()
    async with App("ends", settings=settings) as app:

        @app.task
        async def job(ctx: Context) -> None:
            started.set()
            await anyio.sleep_forever()

        with monkeypatch.context() as patch:
            patch.setattr(Gateway, "subscription", refuse)
            async with running_worker(app):
                handle = await job.enqueue()
                await bounded(started.wait())
                await handle.cancel()

                async def cancelled() -> bool:
                    return await handle.status() is State.CANCELLED

                await wait_until(cancelled, "the renewal has read the request")


@pytest.mark.cluster
async def test_a_running_task_is_cancelled_at_once_on_a_cluster(shared_cluster: Cluster, namespace_name: str) -> None:
    """The caller, the worker's subscription and the task may be on three nodes."""
    started = asyncio.Semaphore(0)
    settings = Settings(redis_url=shared_cluster.url(), namespace=namespace_name, lease=300.0)
    async with App("ends", settings=settings) as app:

        @app.task
        async def job(ctx: Context) -> None:
            started.release()
            await anyio.sleep_forever()

        await set_partitions(app.producer.gateway, app.producer.namespace, "ends", 3)
        async with running_worker(app):
            handles = await job.enqueue_many({} for _ in range(6))
            for _ in handles:
                await bounded(started.acquire())
            for handle in handles:
                await handle.cancel()
                await ends_cancelled(handle)


@pytest.mark.processes
async def test_a_command_cancels_a_task_of_another_process(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    for name, value in (("REDIS_URL", settings.redis_url), ("NAMESPACE", settings.namespace), ("LEASE", "300")):
        monkeypatch.setenv(f"PERDURE_{name}", value)
    async with App("sleeping", settings=settings) as app:
        handle = await app.producer.enqueue("job", {"folder": str(tmp_path)}, queue="sleeping")
        with Running("worker", "run", "sleeping.py:app", "--no-supervisor", cwd=tmp_path):
            await wait_until(anyio.Path(tmp_path / "started").exists, "the step runs")
            answer = await asyncio.to_thread(call, "task", "cancel", handle.id)
            assert (answer.code, answer.out) == (0, f"{handle.id}\n")
            await ends_cancelled(handle)
            assert (tmp_path / "closed").exists()


SLEEPING = """
import asyncio
from pathlib import Path

from perdure import App, Context

app = App("sleeping")


async def sleep(folder: Path) -> None:
    (folder / "started").touch()
    await asyncio.sleep(3600)


@app.task
async def job(ctx: Context, folder: Path) -> None:
    try:
        await ctx.step("sleep", sleep, folder)
    finally:
        await asyncio.sleep(0.01)
        (folder / "closed").touch()
"""


# cleaning up


async def test_a_cancelled_handler_may_clean_up(app: App) -> None:
    """It is not cancelled again while it awaits, renewals of the lease included, and needs no step for it."""
    started, release = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    @app.task
    async def job(ctx: Context) -> None:
        try:
            started.set()
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            await release.wait()
            done.append("undone")
            raise
        finally:
            await asyncio.sleep(0.6)  # longer than the interval in which a handler that does not end is cancelled
            done.append("closed")

    async with running_worker(app) as worker:
        handle = await job.enqueue()
        await bounded(started.wait())
        await handle.cancel()
        await redis_command(app, "PUBLISH", app.producer.namespace.worker_channel(worker.id), handle.id)
        release.set()
        await ends_cancelled(handle)
    assert done == ["undone", "closed"]


async def test_cleaning_up_is_bounded(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "cleanup_limit", 0.05)
    started = asyncio.Event()
    cleaned: list[str] = []

    @app.task
    async def job(ctx: Context) -> None:
        try:
            started.set()
            await anyio.sleep_forever()
        finally:
            cleaned.append("began")
            await anyio.sleep_forever()
            cleaned.append("ended")

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
        await handle.cancel()
        await ends_cancelled(handle)
    assert cleaned == ["began"]


# threads


async def test_a_step_in_a_thread_is_abandoned_at_once_and_its_result_is_refused(app: App) -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def blocks() -> str:
        started.set()
        try:
            assert release.wait(BOUND)
            return "too late"
        finally:
            ended.set()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("blocks", blocks)

    async with running_worker(app, concurrency=1) as worker:
        threads = worker._executor.threads
        handle = await job.enqueue()
        await bounded(asyncio.to_thread(started.wait, BOUND))
        await handle.cancel()
        await ends_cancelled(handle)  # the thread still runs
        assert not ended.is_set()
        assert threads.lost == 1
        await wait_until(lambda: is_idle(worker), "the slot is free again")
        events = [event.type for event in await history(handle)]
        release.set()
        await bounded(asyncio.to_thread(ended.wait, BOUND))

        async def returned() -> bool:
            return threads.lost == 0

        await wait_until(returned, "the thread is no longer counted as lost")
        assert await recorded_steps(app, handle) == {}
        assert [event.type for event in await history(handle)] == events
    assert await handle.status() is State.CANCELLED

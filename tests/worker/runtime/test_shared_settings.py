"""Workers that are given different leases and TTLs: stored values take precedence, at the start and while they run."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from perdure import App, Context, Settings, Worker
from perdure.deadletter.letters import count_letters
from perdure.queues.shared_config import set_config
from perdure.worker.errors import SettingsDiffer
from perdure.worker.log import logger
from perdure.worker.runtime.shared_settings import WorkerTimings
from perdure.worker.settings import load_settings

from tests.support.workers import bounded, running_worker, wait_until

pytestmark = [pytest.mark.integration]


def app_of(settings: Settings, **given: Any) -> App:
    """Return an app whose environment gives these settings, and no others of those that can be stored."""
    own = load_settings(redis_url=settings.redis_url, namespace=settings.namespace, heartbeat=0.05, **given)
    return App("shared", settings=own)


@pytest.fixture
def warnings() -> Any:
    found: list[str] = []
    sink = logger.add(lambda message: found.append(message.record["message"]), level="WARNING", filter="perdure")
    yield found
    logger.remove(sink)


async def test_a_worker_with_a_shorter_lease_takes_no_healthy_task(settings: Settings, warnings: list[str]) -> None:
    """It claims by the stored lease; by its own, it would claim the task several times while its worker is alive."""
    starts: Counter[str] = Counter()
    apps = app_of(settings), app_of(settings, lease=0.3)
    for app in apps:

        @app.task
        async def long(ctx: Context) -> None:
            starts["long"] += 1
            await asyncio.sleep(1.5)

    async with apps[0], AsyncExitStack() as stack:
        await set_config(apps[0].producer.gateway, apps[0].producer.namespace, "lease", 6)
        await stack.enter_async_context(running_worker(apps[0]))
        handle = await apps[0].tasks["long"].enqueue()

        async def started() -> bool:
            return bool(starts)

        await wait_until(started, "the first worker runs it")
        await stack.enter_async_context(running_worker(apps[1]))
        await bounded(handle.result())
    assert starts == {"long": 1}
    assert warnings == ["lease 6 s is stored: used in place of this worker's 0.3 s"]


async def test_a_strict_worker_starts_only_with_the_stored_settings(settings: Settings) -> None:
    stored = app_of(settings)
    async with stored:
        await set_config(stored.producer.gateway, stored.producer.namespace, "lease", 30)
        await set_config(stored.producer.gateway, stored.producer.namespace, "result_ttl", 900)
    for given, name in (({"lease": 60}, "lease"), ({"lease": 30, "result_ttl": 60}, "result_ttl")):
        app = app_of(settings, strict=True, **given)
        app.task(idle)
        with pytest.raises(SettingsDiffer, match=f"{name} must be the stored"):
            await Worker(app).__aenter__()
    for given in ({}, {"lease": 30, "dead_letter_ttl": 60}):
        app = app_of(settings, strict=True, **given)
        app.task(idle)
        async with Worker(app) as worker:
            await bounded(worker.run(burst=True))


async def idle(ctx: Context) -> None:
    """A task, because a worker needs one."""


async def test_running_workers_follow_a_change(settings: Settings, warnings: list[str]) -> None:
    app = app_of(settings, lease=2.0, dead_letter_ttl=600.0)

    @app.task
    async def short(ctx: Context) -> None:
        pass

    async with app, running_worker(app) as worker:
        gateway, namespace = app.producer.gateway, app.producer.namespace

        def used() -> tuple[float, float, float, float]:
            shared = worker._shared
            return shared.renewal_lease, shared.claim_lease, shared.dead_letter_ttl, shared.result_ttl

        async def is_used(expected: tuple[float, float, float, float]) -> None:
            async def applied() -> bool:
                return used() == expected

            await wait_until(applied, f"the worker uses {expected}")

        await is_used((2.0, 2.0, 600.0, 86_400.0))
        await set_config(gateway, namespace, "lease", 12)
        await set_config(gateway, namespace, "result_ttl", 900)
        await is_used((2.0, 12.0, 600.0, 900.0))
        await gateway.command("HSET", namespace.config, "lease_changed_at", 1)
        await is_used((12.0, 12.0, 600.0, 900.0))
        handle = await app.tasks["short"].enqueue()
        await bounded(handle.result())
        assert 800_000 < await gateway.command("PTTL", handle.partition.record(handle.id)) <= 900_000
        await set_config(gateway, namespace, "lease", None)
        await is_used((2.0, 12.0, 600.0, 900.0))
    assert warnings == ["lease 12 s is stored: used in place of this worker's 2 s"]


async def test_a_shorter_lease_is_renewed_in_time_at_once(settings: Settings) -> None:
    """The heartbeat does not wait for the end of the former interval, which is longer than the new lease."""
    app = app_of(settings, lease=60.0)
    release = asyncio.Event()

    @app.task
    async def held(ctx: Context) -> None:
        await release.wait()

    async with app, running_worker(app):
        gateway, namespace = app.producer.gateway, app.producer.namespace
        handle = await app.tasks["held"].enqueue()
        ready = handle.partition.ready

        async def idle_ms() -> int:
            pending = await gateway.command("XPENDING", ready, "workers", "-", "+", 1)
            return int(pending[0][2]) if pending else 0

        async def waits() -> bool:
            return await idle_ms() > 500

        async def renewed() -> bool:
            return await idle_ms() < 400

        await wait_until(waits, "nothing is renewed for a while")
        await set_config(gateway, namespace, "lease", 0.9)
        for _ in range(3):
            await wait_until(renewed, "the heartbeat renews")
            await asyncio.sleep(0.3)
        release.set()
        await bounded(handle.result())


async def test_an_expired_dead_letter_takes_its_record_along(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker keeps dead letters for a moment, the one that buried the task for long."""
    monkeypatch.setattr(Worker, "timings", WorkerTimings(clean_interval=0.02, clean_lock=0.02))
    patient, hasty = app_of(settings), app_of(settings, dead_letter_ttl=0.01)
    for app in (patient, hasty):

        @app.task(name="fail")
        async def fail(ctx: Context) -> None:
            raise ValueError

    async with patient:
        gateway = patient.producer.gateway
        async with Worker(patient) as worker:
            handle = await patient.tasks["fail"].options(max_attempts=1).enqueue()
            await bounded(worker.run(burst=True))
            assert await count_letters(gateway, [handle.partition]) == 1
        async with running_worker(hasty):

            async def trimmed() -> bool:
                return await count_letters(gateway, [handle.partition]) == 0

            await wait_until(trimmed, "the other worker's janitor trims the letter")
        assert not await gateway.command("EXISTS", handle.partition.record(handle.id))

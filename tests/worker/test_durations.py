"""Durations and points in time: seconds, timedelta and datetime wherever a time is taken."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from perdure import App, Context, Producer, Retry, RetryLater, Settings, Snooze, State, StepTimeout
from perdure.deadletter.policy import backoff
from perdure.queues import ConfigurationError, ConnectionSettings
from perdure.queues.durations import seconds_until, to_seconds
from perdure.worker.settings import load_settings

from tests.support.workers import running_worker

MINUTE = timedelta(minutes=1)


def in_an_hour() -> datetime:
    return datetime.now(timezone(timedelta(hours=5))) + timedelta(hours=1)


def test_a_duration_is_seconds_or_a_timedelta() -> None:
    assert (to_seconds(1.5), to_seconds(timedelta(milliseconds=1500))) == (1.5, 1.5)


def test_a_moment_is_a_duration_or_a_datetime() -> None:
    assert (seconds_until(2), seconds_until(MINUTE)) == (2, 60.0)
    assert 3500 < seconds_until(in_an_hour()) <= 3600
    assert 0 < seconds_until(datetime(2020, 1, 1, tzinfo=UTC)) < 0.01


def test_a_datetime_needs_a_time_zone() -> None:
    with pytest.raises(ValueError, match=r"a time must have a time zone, got 2030-01-01 .*datetime\.now\(UTC\)"):
        seconds_until(datetime(2030, 1, 1))  # noqa: DTZ001 - that is the mistake


def test_a_retry_policy_takes_timedeltas() -> None:
    policy = Retry(base=MINUTE, cap=timedelta(hours=1))
    assert policy == Retry(base=60.0, cap=3600.0)
    assert [backoff(policy, failures, chance=0.0) for failures in (1, 2, 9)] == [60.0, 120.0, 3600.0]
    with pytest.raises(ValueError, match=r"base >= 0, .* got -60\.0"):
        Retry(base=-MINUTE)


def test_settings_take_timedeltas() -> None:
    settings = load_settings(lease=MINUTE, grace=timedelta(0), restart_delays=[0, 5])
    assert (settings.lease, settings.grace) == (60.0, 0.0)
    assert ConnectionSettings.model_validate({"replication_timeout": MINUTE}).replication_timeout == 60.0


@pytest.mark.parametrize("kind", [RetryLater, Snooze])
def test_a_handler_can_ask_for_a_time(kind: type[RetryLater] | type[Snooze]) -> None:
    assert kind(after=MINUTE).after == 60.0
    assert 3500 < kind(after=in_an_hour()).after <= 3600


def test_a_task_takes_timedeltas() -> None:
    app = App("durations")

    @app.task(timeout=MINUTE, idle_timeout=timedelta(seconds=30), result_ttl=timedelta(days=2))
    async def task(ctx: Context) -> None: ...

    assert (task.timeout, task.idle_timeout, task.result_ttl) == (60.0, 30.0, 172_800.0)


@pytest.mark.integration
async def test_enqueuing_takes_timedeltas_and_datetimes(settings: Settings) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace, result_ttl=MINUTE) as producer:
        handles = [
            await producer.enqueue("t", queue="q", delay=MINUTE, timeout=MINUTE, result_ttl=MINUTE),
            await producer.enqueue("t", queue="q", delay=in_an_hour()),
            *await producer.enqueue_many("t", [{}], queue="q", delay=MINUTE),
            await producer.enqueue("t", queue="q", delay=timedelta(0)),
        ]
        records = [await handle.record() for handle in handles]
        waits = [record.due_at and record.enqueued_at and record.due_at - record.enqueued_at for record in records]
        assert [record.state for record in records] == [State.SCHEDULED] * 3 + [State.QUEUED]
        assert waits[0] is not None
        assert waits[1] is not None
        assert 59_000 < waits[0] < 61_000
        assert 3_500_000 < waits[1] < 3_601_000
        for moment in (timedelta(milliseconds=10), datetime.now(UTC)):
            with pytest.raises(TimeoutError):
                await handles[0].result(timeout=moment)
        with pytest.raises(TypeError, match=r"^timeout must be seconds, a timedelta or a datetime, got '5'"):
            await handles[0].result(timeout="5")  # type: ignore[arg-type]
        for handle in handles:
            await handle.cancel()


@pytest.mark.integration
async def test_a_handler_takes_timedeltas_and_datetimes(settings: Settings) -> None:
    app = App("durations", redis_url=settings.redis_url, namespace=settings.namespace)

    @app.task
    async def task(ctx: Context) -> list[Any]:
        async def forever() -> None:
            await stuck.wait()

        with pytest.raises(StepTimeout, match=r"0\.05 s"):
            await ctx.options(timeout=timedelta(milliseconds=50)).step("slow", forever)
        for call in (ctx.inbox("5"), ctx.ask("ops", "?", timeout="5")):  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"^(wait|timeout) must be seconds, a timedelta or a datetime, got '5'"):
                await call
        return [
            await ctx.inbox(wait=timedelta(milliseconds=20)),
            await ctx.inbox(wait=datetime.now(UTC)),
            await ctx.ask("ops", "?", timeout=datetime.now(UTC) - MINUTE, default=None),
        ]

    stuck = asyncio.Event()
    async with app, running_worker(app):
        handle = await task.options(timeout=MINUTE, result_ttl=MINUTE).enqueue()
        assert await handle.result(timeout=MINUTE) == [[], [], None]


def test_settings_of_the_environment_have_the_form_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_LEASE", "2m")
    monkeypatch.setenv("PERDURE_RESULT_TTL", "7d")
    monkeypatch.setenv("PERDURE_RESTART_DELAYS", "5,30s,2m")
    settings = load_settings()
    assert (settings.lease, settings.result_ttl, settings.restart_delays) == (120.0, 604_800.0, (5.0, 30.0, 120.0))
    monkeypatch.setenv("PERDURE_LEASE", "soon")
    with pytest.raises(
        ConfigurationError, match=r"PERDURE_LEASE: must be a number of seconds, or a duration such as 90s, 15m, "
    ):
        load_settings()


def test_every_setting_that_is_a_float_is_a_time() -> None:
    """The environment's form of durations is read for all of them."""
    floats = {name for name, field in Settings.model_fields.items() if field.annotation is float}
    limits = {f"{name}_limit" for name in ("time", "idle", "stall", "lag")}
    waits = {"stall_warning", "version_wait", "replication_timeout", "webhook_timeout", "crash_window"}
    kept = {f"{name}_ttl" for name in ("result", "dead_letter", "session", "workspace")}
    assert floats == limits | waits | kept | {"lease", "grace", "heartbeat", "quarantine_window"}

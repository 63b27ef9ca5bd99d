"""The interface of arq without arq: programs that were written for it, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import pytest
from perdure.integrations.arq import (
    ArqApp,
    ArqRedis,
    FailedJobs,
    Job,
    JobExecutionFailed,
    JobStatus,
    RedisSettings,
    ResultNotFound,
    Retry,
    Worker,
    check_health,
    create_pool,
    create_worker,
    cron,
    func,
)
from perdure.queues.errors import ConfigurationError
from perdure.worker.integrations.arq.worker_settings import async_check_health

from tests.support.workers import BOUND, running_worker

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def environment(redis_url: str, namespace_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `RedisSettings()` be the server of the test."""
    monkeypatch.setenv("PERDURE_REDIS_URL", redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", namespace_name)


@pytest.fixture
async def pool(environment: None) -> AsyncIterator[ArqRedis]:
    redis = await create_pool()
    yield redis
    await redis.aclose()


async def add(ctx: dict[str, Any], left: int, right: int = 1) -> int:
    return left + right


async def boom(ctx: dict[str, Any]) -> None:
    raise ValueError("no such order")


async def lines(ctx: dict[str, Any], *parts: str, **named: str) -> list[str]:
    return [*parts, *named.values()]


async def work(*functions: Any, **options: Any) -> Worker:
    worker = Worker(functions, burst=True, handle_signals=False, **options)
    await asyncio.wait_for(worker.async_run(), BOUND)
    return worker


async def test_a_job_runs_and_its_result_is_read(pool: ArqRedis) -> None:
    job = await pool.enqueue_job("add", 2, right=40)
    assert job is not None
    assert await job.status() is JobStatus.queued
    info = await job.info()
    assert info is not None
    assert (info.function, info.args, info.kwargs, info.job_try) == ("add", (2,), {"right": 40}, None)
    assert abs(datetime.now(UTC) - info.enqueue_time) < timedelta(minutes=5)
    worker = await work(add, lines)
    assert await job.result(timeout=BOUND) == 42
    assert (worker.jobs_complete, worker.jobs_failed) == (1, 0)
    result = await job.result_info()
    assert result is not None
    assert (result.success, result.result, result.job_try) == (True, 42, 1)
    assert result.start_time <= result.finish_time
    assert [(found.job_id, found.result) for found in await pool.all_job_results()] == [(job.job_id, 42)]


async def test_positional_and_named_arguments_reach_functions_that_take_any(pool: ArqRedis) -> None:
    job = await pool.enqueue_job("lines", "a", "b", c="d")
    assert job is not None
    await work(lines)
    assert await job.result(timeout=BOUND) == ["a", "b", "d"]


async def test_a_failed_job_is_not_retried_and_raises_its_exception(pool: ArqRedis) -> None:
    job = await pool.enqueue_job("boom")
    assert job is not None
    with pytest.raises(FailedJobs, match="1 job failed: ValueError"):
        await Worker([boom], burst=True, handle_signals=False).run_check()
    with pytest.raises(ValueError, match="no such order"):
        await job.result(timeout=BOUND)
    result = await job.result_info()
    assert result is not None
    assert (result.success, result.job_try) == (False, 1)


async def test_a_job_that_asks_for_it_is_retried_until_no_try_is_left(pool: ArqRedis) -> None:
    tries: list[int] = []

    async def flaky(ctx: dict[str, Any], good: int) -> str:
        tries.append(ctx["job_try"])
        if ctx["job_try"] < good:
            raise Retry(defer=timedelta(seconds=0))
        return "done"

    first = await pool.enqueue_job("flaky", 3)
    assert first is not None
    worker = await work(func(flaky, name="flaky", max_tries=3))
    assert (await first.result(timeout=BOUND), tries) == ("done", [1, 2, 3])
    assert (worker.jobs_complete, worker.jobs_retried) == (1, 2)
    tries.clear()
    second = await pool.enqueue_job("flaky", 9, _job_try=2)
    assert second is not None
    await work(func(flaky, name="flaky", max_tries=3))
    with pytest.raises(JobExecutionFailed, match="max 3 retries exceeded"):
        await second.result(timeout=BOUND)
    assert tries == [2, 3]


async def test_retry_jobs_off_lets_a_retry_fail(pool: ArqRedis) -> None:
    async def again(ctx: dict[str, Any]) -> None:
        raise Retry(defer=5)

    job = await pool.enqueue_job("again")
    assert job is not None
    await work(func(again, name="again"), retry_jobs=False)
    with pytest.raises(JobExecutionFailed, match="retry in 5 s"):
        await job.result(timeout=BOUND)


async def test_an_id_is_free_again_when_the_result_has_expired(pool: ArqRedis) -> None:
    assert await pool.enqueue_job("add", 1, _job_id="backup:daily") is not None
    assert await pool.enqueue_job("add", 1, _job_id="backup:daily") is None
    assert await pool.enqueue_job("add", 2, _job_id="backup:daily") is None
    seen: list[str] = []

    async def start(ctx: dict[str, Any]) -> None:
        seen.append(ctx["job_id"])

    await work(func(add, keep_result=0), on_job_start=start)
    assert seen == ["backup:daily"]
    job = Job("backup:daily", pool)
    assert repr(job) == "<arq job backup:daily>"
    while await job.status() is not JobStatus.not_found:  # noqa: ASYNC110 - Redis removes it after a millisecond
        await asyncio.sleep(0.01)
    with pytest.raises(ResultNotFound, match="job backup:daily must exist"):
        await job.result()
    assert await job.info() is None
    assert await pool.enqueue_job("add", 1, _job_id="backup:daily") is not None


async def test_deferred_jobs_and_their_expiry(pool: ArqRedis) -> None:
    later = await pool.enqueue_job("add", 1, _defer_by=timedelta(hours=1))
    at = datetime(2100, 1, 28)  # noqa: DTZ001 - arq takes local times
    far = await pool.enqueue_job("add", 2, _defer_until=at)
    gone = await pool.enqueue_job("add", 3, _expires=0.3)
    assert later is not None
    assert far is not None
    assert gone is not None
    assert await later.status() is JobStatus.deferred
    assert [job.args for job in await pool.queued_jobs()] == [(3,), (1,), (2,)]
    assert [job.score for job in await pool.queued_jobs()][2] == round(at.timestamp() * 1000)
    await asyncio.sleep(0.31)  # until it expires
    await work(add)
    with pytest.raises(JobExecutionFailed, match="job expired"):
        await gone.result(timeout=BOUND)
    with pytest.raises(RuntimeError, match="not both"):
        await pool.enqueue_job("add", _defer_by=1, _defer_until=at)
    with pytest.raises(TimeoutError):
        await later.result(timeout=0.01)


async def test_a_running_job_and_a_queued_one_are_aborted(pool: ArqRedis) -> None:
    began = asyncio.Event()

    async def slow(ctx: dict[str, Any]) -> None:
        began.set()
        await asyncio.Event().wait()

    class WorkerSettings:
        functions: ClassVar = [func(slow, name="slow")]

    queued = await pool.enqueue_job("slow", _defer_by=60)
    assert queued is not None
    assert await queued.abort(timeout=BOUND)
    with pytest.raises(asyncio.CancelledError):
        await queued.result()
    job = await pool.enqueue_job("slow")
    assert job is not None
    async with running_worker(ArqApp(WorkerSettings)):
        await asyncio.wait_for(began.wait(), BOUND)
        assert await job.status() is JobStatus.in_progress
        assert await async_check_health(WorkerSettings) == 0
        assert await job.abort(timeout=BOUND)
    assert not await Job("unknown", pool).abort()
    assert await async_check_health({"functions": [add], "queue_name": "other"}) == 1


async def test_hooks_share_the_context_of_the_worker(pool: ArqRedis) -> None:
    calls: list[str] = []

    def hook(name: str) -> Any:
        async def call(ctx: dict[Any, Any]) -> None:
            calls.append(f"{name} {ctx.get('job_id', '-')} {ctx['tag']}")

        return call

    async def nested(ctx: dict[str, Any]) -> str:
        await ctx["redis"].set("{arq-test}:key", "x", ex=1)
        job = await ctx["redis"].enqueue_job("add", 1, 1, _job_id="inner")
        assert await ctx["redis"].get("{arq-test}:key") == b"x"
        found: str = job.job_id
        return found

    job = await pool.enqueue_job("nested", _job_id="outer", _queue_name="mail:jobs")
    assert job is not None
    hooks = {name: hook(name) for name in ("on_startup", "on_job_start", "on_job_end", "after_job_end", "on_shutdown")}
    await work(func(nested, name="nested"), add, ctx={"tag": 7}, queue_name="mail:jobs", max_jobs=1, **hooks)
    assert await job.result(timeout=BOUND) == "inner"
    assert calls[:4] == ["on_startup - 7", "on_job_start outer 7", "on_job_end outer 7", "after_job_end outer 7"]
    assert calls[4:] == ["on_job_start inner 7", "on_job_end inner 7", "after_job_end inner 7", "on_shutdown - 7"]


@pytest.mark.filterwarnings("ignore:a task waits for the result:RuntimeWarning")
async def test_a_job_that_awaits_another_one_is_not_started_again(pool: ArqRedis) -> None:
    starts: list[str] = []

    async def outer(ctx: dict[str, Any]) -> Any:
        starts.append(ctx["job_id"])
        inner = await ctx["redis"].enqueue_job("add", 1, 1)
        return await inner.result(timeout=BOUND)

    job = await pool.enqueue_job("outer")
    assert job is not None
    await work(func(outer, name="outer"), add)
    assert (await job.result(timeout=BOUND), starts) == (2, [job.job_id])


@dataclass
class Order:
    number: int


async def test_other_values_than_json_are_read_by_annotations(pool: ArqRedis) -> None:
    async def typed(ctx: dict[str, Any], when: datetime, order: Order, names: set[str]) -> list[Any]:
        return [when.year, order.number, type(names).__name__]

    async def untyped(ctx: Any, when: Any) -> None: ...

    when = datetime(2026, 1, 2, tzinfo=UTC)
    good = await pool.enqueue_job("typed", when, Order(7), names={"a"})
    bad = await pool.enqueue_job("untyped", when)
    wrong = await pool.enqueue_job("typed", when, {"number": 1}, names=UTC.utcoffset(None))
    assert good is not None
    assert bad is not None
    assert wrong is not None
    await work(func(typed, name="typed"), func(untyped, name="untyped"))
    assert await good.result(timeout=BOUND) == [2026, 7, "set"]
    with pytest.raises(JobExecutionFailed, match="argument when of job 'untyped' must have an annotation"):
        await bad.result(timeout=BOUND)
    with pytest.raises(JobExecutionFailed, match="argument names of job 'typed'"):
        await wrong.result(timeout=BOUND)
    with pytest.raises(TypeError, match="argument 0 of job 'typed' must have a JSON form, got object"):
        await pool.enqueue_job("typed", object())


async def test_cron_jobs_become_schedules_and_run_at_startup(pool: ArqRedis) -> None:
    ran: list[str] = []

    async def tick(ctx: dict[str, Any]) -> None:
        ran.append(ctx["job_id"])

    jobs = [cron(tick, name="cron:tick", hour={9, 12, 18}, minute=12, run_at_startup=True)]
    await work(cron_jobs=jobs, timezone=ZoneInfo("Europe/Berlin"))
    await work(cron_jobs=jobs, timezone=ZoneInfo("Europe/Berlin"))
    assert 1 <= len(ran) <= 2, "two minutes began between the two starts at most"
    app = ArqApp({"cron_jobs": jobs, "timezone": timezone(timedelta(hours=2))})
    assert [str(definition.when) for definition in app.schedules.values()] == ["12 9,12,18 * * * Etc/GMT-2"]


@pytest.mark.parametrize(
    ("options", "expression"),
    [
        ({}, "* * * * *"),
        ({"second": {0, 30}}, "0,30 * * * * *"),
        ({"second": None}, "* * * * * *"),
        ({"hour": {9, 12, 18}, "minute": 12}, "12 9,12,18 * * *"),
        ({"weekday": "mon", "hour": 3, "minute": 0}, "0 3 * * 1"),
        ({"weekday": {0, 6}}, "* * * * 0,1"),
        ({"month": 2, "day": 29, "hour": 0, "minute": 0}, "0 0 29 2 *"),
        ({"day": {1, 2, 3, 4, 5, 6, 7}, "weekday": 0}, "* * */31,1,2,3,4,5,6,7 * 1"),
        ({"day": 13, "weekday": 6}, "* * 13 * */8,0"),
    ],
)
def test_options_of_cron_as_an_expression(options: dict[str, Any], expression: str) -> None:
    assert cron(add, **options).expression == expression


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"day": 13, "weekday": "fri"}, "must not both be given"),
        ({"unique": False}, "unique of cron job 'cron:add' must be omitted"),
        ({"job_id": "a"}, "job_id of cron job 'cron:add' must be omitted"),
        ({"weekday": "friday"}, "one of mon, tues"),
        ({"hour": set()}, "hour of cron job 'cron:add' must be numbers from 0"),
        ({"month": 0}, "month of cron job 'cron:add' must be numbers from 1"),
        ({"hour": "9"}, "must be a number or a set of numbers"),
    ],
)
def test_options_of_cron_that_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        cron(add, **options)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (RedisSettings("cache", 6380, database=2), "redis://cache:6380/2"),
        (RedisSettings(password="a/b@c"), "redis://:a%2Fb%40c@localhost:6379/0"),
        (RedisSettings("::1", username="u", password="p"), "redis://u:p@[::1]:6379/0"),
        (RedisSettings(unix_socket_path="/run/redis.sock", database=3), "unix:///run/redis.sock?db=3"),
        (
            RedisSettings([("a", 26379), ("b", 26380)], sentinel=True, sentinel_master="main"),
            "redis+sentinel://a:26379,b:26380/main/0",
        ),
        (
            RedisSettings("tls", ssl=True, ssl_ca_certs="/ca.pem"),
            "rediss://tls:6379/0?ssl_ca_certs=%2Fca.pem&ssl_cert_reqs=required&ssl_check_hostname=False",
        ),
        (RedisSettings.from_dsn("redis://u:p%40@host:1/4"), "redis://u:p%40@host:1/4"),
        (RedisSettings.from_dsn("redis://host?db=5"), "redis://host:6379/5"),
        (RedisSettings.from_dsn("unix:///a/b.sock"), "unix:///a/b.sock"),
    ],
)
def test_redis_settings_as_a_url(settings: RedisSettings, url: str) -> None:
    assert settings.url() == url
    assert "p%40" not in repr(settings)
    settings.load()


def test_settings_without_arguments_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RedisSettings().url() is None
    monkeypatch.delenv("PERDURE_REDIS_URL")
    assert RedisSettings().url() == "redis://localhost:6379/0"
    with pytest.raises(RuntimeError, match="invalid DSN scheme"):
        RedisSettings.from_dsn("http://host")
    with pytest.raises(ConfigurationError, match="list of sentinels"):
        RedisSettings("host", sentinel=True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"job_serializer": repr}, "job_serializer must be omitted, got .*: Perdure stores .* as JSON only"),
        ({"job_deserializer": repr}, "job_deserializer must be omitted"),
        ({"max_burst_jobs": 3}, "max_burst_jobs must be omitted"),
        ({"functions": []}, "at least one function"),
        ({"queue_name": None}, "queue_name must be given"),
        ({"timezone": timezone(timedelta(minutes=90)), "cron_jobs": [cron(add)]}, "timezone of WorkerSettings"),
    ],
)
def test_settings_of_workers_that_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        ArqApp({"functions": [add], **options})


def test_other_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="'max_job' must be an option"):
        Worker([add], max_job=1)
    with pytest.raises(ConfigurationError, match="a function that is no 'async def' must be made by"):
        func(len)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must be a coroutine function"):
        func("os.path.join")
    with pytest.raises(RuntimeError, match="named by its module"):
        func("add")
    assert func("tests.worker.integrations.test_arq.add").coroutine is add


async def test_a_pool_refuses_serializers() -> None:
    with pytest.raises(ConfigurationError, match="job_serializer must be omitted"):
        _ = await create_pool(job_serializer=repr)  # type: ignore[arg-type]


def test_settings_of_a_base_class_count() -> None:
    class Base:
        max_jobs = 3
        job_timeout = timedelta(minutes=1)

    class WorkerSettings(Base):
        functions: ClassVar = [add, func(boom, timeout=5, keep_result_forever=True)]
        unknown = SimpleNamespace()

        @staticmethod
        async def on_startup(ctx: dict[Any, Any]) -> None: ...

    worker = create_worker(WorkerSettings, max_tries=2)
    assert worker.app.default_concurrency == 3
    tasks = worker.app.tasks
    assert (tasks["add"].timeout, tasks["boom"].timeout, tasks["add"].retry.max_attempts) == (60, 5, 2)
    assert (tasks["add"].result_ttl, tasks["boom"].result_ttl) == (3600, 1e10)
    assert tasks["add"].queue == "arq.queue"
    assert check_health(WorkerSettings) == 1

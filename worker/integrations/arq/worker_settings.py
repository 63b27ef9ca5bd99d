"""arq's worker side: a `WorkerSettings` class as an app, `func`, `cron`, `Retry`, `Worker` and `run_worker`."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from ....deadletter.policy import Retry
from ....queues.defaults import MAX_SECONDS
from ....queues.durations import to_seconds
from ....queues.errors import ConfigurationError, TaskExists
from ....queues.inspection.views import observed_workers
from ....queues.records import State
from ....queues.runtime import RUNTIME
from ....queues.schedules.definition import Cron
from ...app import App
from ...context import Context
from ...errors import RetryLater, TaskDefinitionError
from ...log import logger
from ...middleware import CallNext, Middleware, Settlement
from ...runtime.stop_signals import stop_on_signals
from ...runtime.worker import Worker
from . import pool as arq
from .pool import ArqJobResult, ArqRedis, JobExecutionFailed, RedisSettings, Seconds, create_pool

_SHORTEST: Final = 0.001
"""Seconds for which the outcome of a job is kept whose result is not kept."""

_WEEKDAYS: Final = ("mon", "tues", "wed", "thurs", "fri", "sat", "sun")

_WITHOUT_EFFECT: Final = {
    "poll_delay": "nothing polls",
    "queue_read_limit": "a worker reads as many jobs as it has free slots",
    "health_check_interval": "a worker registers every 5 s",
    "health_check_key": "'perdure worker health' finds workers by their registration",
    "allow_abort_jobs": "jobs can always be aborted",
    "log_results": "results are in 'perdure task show'",
    "expires_extra_ms": "the pool that enqueues a job sets its expiry",
}
"""Options of arq's worker that have no effect, and why."""

Coroutine = Callable[..., Awaitable[Any]]
Hook = Callable[[dict[Any, Any]], Awaitable[Any]]
Option = int | Collection[int] | None


class ArqRetry(RuntimeError):
    """Run the job again if tries are left. defer: seconds or a timedelta until then."""

    def __init__(self, defer: Seconds | None = None) -> None:
        self.seconds = 0.0 if defer is None else to_seconds(defer, "defer")
        super().__init__(f"retry in {self.seconds:g} s")


class FailedJobs(RuntimeError):
    """Jobs that a worker ran in `run_check` have failed."""

    def __init__(self, count: int, job_results: list[ArqJobResult]) -> None:
        self.count, self.job_results = count, job_results
        what = "1 job" if count == 1 else f"{count} jobs"
        super().__init__(f"{what} failed: {', '.join(repr(job.result) for job in job_results)}")


@dataclass(frozen=True)
class ArqFunction:
    """A function with options of its jobs. None: that of the worker."""

    name: str
    coroutine: Coroutine
    timeout_s: float | None = None
    keep_result_s: float | None = None
    keep_result_forever: bool | None = None
    max_tries: int | None = None


@dataclass(frozen=True)
class CronJob(ArqFunction):
    """A function that runs at planned times. expression: six fields of cron, the seconds first, or five."""

    expression: str = ""
    run_at_startup: bool = False


def func(
    coroutine: ArqFunction | Coroutine | str,
    *,
    name: str | None = None,
    keep_result: Seconds | None = None,
    timeout: Seconds | None = None,
    keep_result_forever: bool | None = None,
    max_tries: int | None = None,
) -> ArqFunction:
    """Return a function with options of its jobs. Raises `RuntimeError` if it is not a coroutine function."""
    if isinstance(coroutine, ArqFunction):
        return coroutine
    if not isinstance(coroutine, str) and not inspect.iscoroutinefunction(coroutine):
        arq.check_own("a function that is no 'async def'", coroutine, ArqFunction)
    called = name or (coroutine if isinstance(coroutine, str) else coroutine.__qualname__)
    return ArqFunction(
        called, _load(coroutine), _seconds(timeout), _seconds(keep_result), keep_result_forever, max_tries
    )


def cron(
    coroutine: Coroutine | str,
    *,
    name: str | None = None,
    month: Option = None,
    day: Option = None,
    weekday: Option | str = None,
    hour: Option = None,
    minute: Option = None,
    second: Option = 0,
    microsecond: int = 123_456,
    run_at_startup: bool = False,
    unique: bool = True,
    job_id: str | None = None,
    timeout: Seconds | None = None,
    keep_result: Seconds | None = 0,
    keep_result_forever: bool | None = False,
    max_tries: int | None = 1,
) -> CronJob:
    """Return a function that runs at planned times, once at each, however many workers there are.

    Args:
        month, day, weekday, hour, minute, second: a number or a set of numbers; None for all. A weekday is 0 (Monday)
            to 6, or mon, tues, wed, thurs, fri, sat, sun.
        microsecond: without effect: a planned time is a whole second.
        run_at_startup: also run it when a worker starts.
        timeout, keep_result: seconds or a timedelta.

    Raises:
        ConfigurationError: `unique=False` or `job_id`, or days and weekdays that no expression of cron has.
        RuntimeError: it is not a coroutine function.
    """
    called = name or f"cron:{coroutine if isinstance(coroutine, str) else coroutine.__qualname__}"
    for option, given, remedy in (
        ("unique", not unique, "each planned time is fired once"),
        ("job_id", job_id is not None, "a task of a planned time has an id that follows from that time"),
    ):
        if given:
            raise ConfigurationError(f"{option} of cron job {called!r} must be omitted: {remedy}")
    fields = [
        _cron_field(called, what, given, first)
        for what, given, first in (
            ("second", second, 0),
            ("minute", minute, 0),
            ("hour", hour, 0),
            ("day", day, 1),
            ("month", month, 1),
        )
    ]
    fields.append(_weekday_field(called, weekday))
    if fields[3] != "*" and fields[5] != "*":
        # With a star at the start of one of the two fields, days must match both, as arq's do.
        if "1" in fields[3].split(","):
            fields[3] = f"*/31,{fields[3]}"
        elif "0" in fields[5].split(","):
            fields[5] = f"*/8,{fields[5]}"
        else:
            raise ConfigurationError(
                f"day and weekday of cron job {called!r} must not both be given, unless day has 1 or weekday has "
                "Sunday: give one of them, and check the other in the function"
            )
    if fields[0] == "0":
        del fields[0]
    return CronJob(
        called,
        _load(coroutine),
        _seconds(timeout),
        _seconds(keep_result),
        keep_result_forever,
        max_tries,
        expression=" ".join(fields),
        run_at_startup=run_at_startup,
    )


def _cron_field(name: str, what: str, given: Any, first: int) -> str:
    if given is None:
        return "*"
    numbers = [given] if type(given) is int else given
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise ConfigurationError(f"{what} of cron job {name!r} must be a number or a set of numbers, got {given!r}")
    known = sorted(set(numbers))
    if not known or any(type(number) is not int or number < first for number in known):
        raise ConfigurationError(f"{what} of cron job {name!r} must be numbers from {first}, got {given!r}")
    return ",".join(map(str, known))


def _weekday_field(name: str, given: Any) -> str:
    """Return the field of cron, where Sunday is 0, for weekdays of arq, where Monday is 0."""
    if isinstance(given, str):
        if given.lower() not in _WEEKDAYS:
            raise ConfigurationError(
                f"weekday of cron job {name!r} must be a number or one of {', '.join(_WEEKDAYS)}, got {given!r}"
            )
        given = _WEEKDAYS.index(given.lower())
    found = _cron_field(name, "weekday", given, 0)
    return (
        found
        if found == "*"
        else ",".join(str(number) for number in sorted((int(day) + 1) % 7 for day in found.split(",")))
    )


def _seconds(given: Seconds | None) -> float | None:
    return None if given is None else to_seconds(given, "a time")


def _load(coroutine: Coroutine | str) -> Coroutine:
    """Return a coroutine function, or import it by its dotted name. Raises `RuntimeError`."""
    found: Any = coroutine
    if isinstance(coroutine, str):
        module, _, attribute = coroutine.rpartition(".")
        if not module:
            raise RuntimeError(f"a function must be named by its module, such as 'shop.jobs.send', got {coroutine!r}")
        found = getattr(import_module(module), attribute, None)
    if not inspect.iscoroutinefunction(found):
        raise RuntimeError(f"{coroutine!r} must be a coroutine function: async def f(ctx, ...)")
    loaded: Coroutine = found
    return loaded


@dataclass(frozen=True)
class _Settings:
    """The attributes of a `WorkerSettings` class that have a meaning; see `ArqWorker`."""

    functions: Sequence[Any] = ()
    queue_name: str | None = arq.DEFAULT_QUEUE
    cron_jobs: Sequence[CronJob] | None = None
    redis_settings: RedisSettings | None = None
    redis_pool: ArqRedis | None = None
    burst: bool = False
    on_startup: Hook | None = None
    on_shutdown: Hook | None = None
    on_job_start: Hook | None = None
    on_job_end: Hook | None = None
    after_job_end: Hook | None = None
    handle_signals: bool = True
    job_completion_wait: float = 0
    max_jobs: int = 10
    job_timeout: Seconds | None = 300
    keep_result: Seconds = 3600
    keep_result_forever: bool = False
    max_tries: int = 5
    ctx: dict[Any, Any] | None = None
    retry_jobs: bool = True
    max_burst_jobs: int = -1
    job_serializer: object = None
    job_deserializer: object = None
    timezone: tzinfo | None = None
    poll_delay: object = None
    queue_read_limit: object = None
    health_check_interval: object = None
    health_check_key: object = None
    allow_abort_jobs: object = None
    log_results: object = None
    expires_extra_ms: object = None

    @classmethod
    def of(cls, source: object) -> _Settings:
        """Return the attributes of a class, which may be in its bases, or the items of a dict."""
        known = cls.__dataclass_fields__
        if isinstance(source, Mapping):
            return cls(**{name: value for name, value in source.items() if name in known})
        given: dict[str, Any] = {}
        for kind in reversed(inspect.getmro(source)) if isinstance(source, type) else ():
            given |= {name: value for name, value in vars(kind).items() if name in known}
        return cls(**{name: _plain(value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def is_worker_settings(value: object) -> bool:
    """Return whether a value is a `WorkerSettings` class: it has functions or cron jobs."""
    return isinstance(value, type) and (hasattr(value, "functions") or hasattr(value, "cron_jobs"))


class ArqApp(App):
    """The functions and cron jobs of a `WorkerSettings` class as an app, whose name is that of their queue.

    Raises:
        ConfigurationError: the class has no functions, a custom serializer, or an option that cannot be kept.
    """

    def __init__(self, source: object, *, middleware: Sequence[Middleware] = ()) -> None:
        given = _Settings.of(source)
        arq.refuse_serializers(job_serializer=given.job_serializer, job_deserializer=given.job_deserializer)
        if given.max_burst_jobs >= 0:
            raise ConfigurationError("max_burst_jobs must be omitted: a burst ends when the queue is empty")
        name = given.queue_name or (None if given.redis_pool is None else given.redis_pool.default_queue_name)
        if name is None:
            raise ConfigurationError("queue_name must be given, or a redis_pool that has one")
        arq.check_own("redis_settings", given.redis_settings, RedisSettings)
        arq.check_own("redis_pool", given.redis_pool, ArqRedis)
        for job in given.cron_jobs or ():
            arq.check_own("a cron job", job, CronJob)
        functions = [*map(func, given.functions), *(given.cron_jobs or ())]
        if not functions:
            raise ConfigurationError("at least one function or cron_job must be registered: functions = [...]")
        for option, why in _WITHOUT_EFFECT.items():
            if getattr(given, option) is not None:
                logger.debug("{} of WorkerSettings has no effect: {}", option, why)
        place = given.redis_settings or RedisSettings()
        settings = (
            place.load(grace=float(given.job_completion_wait))
            if given.redis_pool is None
            else given.redis_pool.settings
        )
        self.arq_queue = name
        self.given = given
        self.ctx: dict[Any, Any] = given.ctx if given.ctx is not None else {}
        hooks = [] if given.after_job_end is None else [_AfterJobEnd(self, given.after_job_end)]
        super().__init__(arq.queue_of(name), settings=settings, lifespan=_lifespan, middleware=[*middleware, *hooks])
        self.default_concurrency = given.max_jobs
        for function in functions:
            self._register(function)

    def _register(self, function: ArqFunction) -> None:
        given = self.given
        keep = given.keep_result if function.keep_result_s is None else function.keep_result_s
        forever = given.keep_result_forever if function.keep_result_forever is None else function.keep_result_forever
        tries = given.max_tries if function.max_tries is None else function.max_tries
        timeout = given.job_timeout if function.timeout_s is None else function.timeout_s
        handler = _handler(self, function, tries)
        task = self.task(
            name=function.name,
            retry=Retry(max_attempts=max(1, tries), on=(), base=0.0),
            timeout=timeout,
            idle_timeout=math.inf,
            result_ttl=MAX_SECONDS if forever else max(_SHORTEST, to_seconds(keep)),
        )(handler)
        if isinstance(function, CronJob):
            zone = _zone_name(given.timezone)
            schedule = function.name.replace(":", ".").replace("<locals>.", "")
            self.schedule(schedule, task, Cron(function.expression, tz=zone), missed="skip")

    async def contexts(self, ctx: Context) -> dict[Any, Any]:
        """Return arq's context of the job that a task runs."""
        headers = ctx.headers
        now = str(round(RUNTIME.wall_clock() * 1000))
        first = int(headers.get(arq.JOB_TRY, 1))
        return {
            **self.ctx,
            "job_id": headers.get(arq.JOB_ID, ctx.task_id),
            "job_try": first + ctx.attempt - 1,
            "enqueue_time": arq.time_of(float(headers.get(arq.ENQUEUED_AT, now))),
            "score": int(headers.get(arq.SCORE, now)),
            "perdure": ctx,
        }


@asynccontextmanager
async def _lifespan(app: App) -> AsyncIterator[dict[Any, Any]]:
    """Open the worker's context: `ctx['redis']`, then what `on_startup` adds."""
    assert isinstance(app, ArqApp)  # noqa: S101 - only an ArqApp has this lifespan
    given, context = app.given, app.ctx
    redis = given.redis_pool or ArqRedis.over(app.producer, app.settings, owned=False, default_queue_name=app.arq_queue)
    context["redis"] = redis
    try:
        if given.on_startup is not None:
            await given.on_startup(context)
        for job in given.cron_jobs or ():
            if job.run_at_startup:
                await _run_at_startup(app, job)
        yield context
    finally:
        if given.on_shutdown is not None:
            await given.on_shutdown(context)
        if given.redis_pool is None:
            await redis.aclose()


async def _run_at_startup(app: ArqApp, job: CronJob) -> None:
    """Enqueue a cron job, once for all workers that start within the same minute."""
    minute = int(RUNTIME.wall_clock() // 60)
    try:
        await app.tasks[job.name].options(task_id=arq.task_id_of(f"{job.name}:startup:{minute}")).enqueue()
    except TaskExists:
        logger.debug("cron job {} runs for another worker that started", job.name)


class _AfterJobEnd(Middleware):
    """Calls `after_job_end` when the outcome of a run is stored."""

    def __init__(self, app: ArqApp, hook: Hook) -> None:
        self._app, self._hook = app, hook

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        await self._hook(await self._app.contexts(ctx))


def _handler(app: ArqApp, function: ArqFunction, tries: int) -> Callable[..., Any]:
    read = _ArgumentReader(function)

    async def run(ctx: Context, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None) -> Any:
        given = app.given
        context = await app.contexts(ctx)
        if context["job_try"] > tries:
            raise JobExecutionFailed(f"max {tries} retries exceeded")
        if given.on_job_start is not None:
            await given.on_job_start(context)
        try:
            call = read(args or (), kwargs or {}, arq.names_of(ctx.headers.get(arq.CONVERTED)))
            return await function.coroutine(context, *call.args, **call.kwargs)
        except ArqRetry as error:
            if not given.retry_jobs:
                raise
            if context["job_try"] >= tries:
                raise JobExecutionFailed(f"max {tries} retries exceeded") from error
            raise RetryLater(after=error.seconds, why=str(error)) from error
        finally:
            if given.on_job_end is not None:
                await given.on_job_end(context)

    run.__doc__ = inspect.getdoc(function.coroutine)
    return run


@dataclass
class _Call:
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


class _ArgumentReader:
    """Reads the arguments of a job from JSON data by the annotations of its function."""

    def __init__(self, function: ArqFunction) -> None:
        self._name = function.name
        parameters = list(inspect.signature(function.coroutine).parameters.values())[1:]
        self._positional = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        try:
            hints = get_type_hints(function.coroutine, include_extras=True)
        except (NameError, TypeError) as error:
            raise TaskDefinitionError(
                f"job {self._name!r}: an annotation cannot be resolved: {error}; import the type where the module is "
                "loaded, not only under TYPE_CHECKING"
            ) from None
        for parameter in parameters:
            declared = hints.get(parameter.name, Any)
            if declared is not Any and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                try:
                    self._adapters[parameter.name] = TypeAdapter(declared)
                except PydanticUserError:
                    continue  # a type without a JSON form: an argument of it is refused below

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], converted: Iterable[str]) -> _Call:
        """Return the arguments of a call. Raises `JobExecutionFailed` for one that cannot be read."""
        changed = set(converted)
        names = [*self._positional[: len(args)], *[""] * (len(args) - len(self._positional))]
        call = _Call()
        for index, (name, value) in enumerate(zip(names, args, strict=True)):
            call.args.append(self._read(name, value, str(index) in changed, str(index)))
        for name, value in kwargs.items():
            call.kwargs[name] = self._read(name, value, name in changed, name)
        return call

    def _read(self, name: str, value: Any, changed: bool, shown: str) -> Any:
        if not changed:
            return value
        adapter = self._adapters.get(name)
        if adapter is None:
            raise JobExecutionFailed(
                f"argument {name or shown} of job {self._name!r} must have an annotation, since it was enqueued as a "
                "value that JSON does not have"
            )
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            raise JobExecutionFailed(f"argument {name} of job {self._name!r}: {found['msg']}") from None


def _zone_name(zone: tzinfo | None) -> str:
    """Return the name of a time zone in the IANA database. None: the zone of the system."""
    if zone is None:
        if (found := _system_zone()) is not None:
            return found
        zone = datetime.now().astimezone().tzinfo
    name = getattr(zone, "key", None)
    if isinstance(name, str):
        return name
    offset = zone.utcoffset(None) if isinstance(zone, timezone) else None
    if offset == timedelta(0):
        return "UTC"
    if offset is not None and not offset % timedelta(hours=1):
        return f"Etc/GMT{-(offset // timedelta(hours=1)):+d}"
    raise ConfigurationError(
        "timezone of WorkerSettings must be a zone of the IANA database, such as ZoneInfo('Europe/Berlin'), "
        f"got {zone!r}"
    )


def _system_zone() -> str | None:
    """Return the name of the system's time zone, None if neither TZ nor /etc/localtime has one."""
    if name := os.environ.get("TZ", "").lstrip(":"):
        return name
    target = Path("/etc/localtime").resolve()
    _, found, name = str(target).partition("zoneinfo/")
    return name.removeprefix("posix/") if found else None


class ArqWorker:
    """arq's worker: the same options as keyword arguments, run by a worker of Perdure.

    Attributes:
        jobs_complete, jobs_retried, jobs_failed: runs of this worker by their outcome.
    """

    def __init__(self, functions: Sequence[Any] = (), **options: Any) -> None:
        """Create a worker. Raises `ConfigurationError`, and `TypeError` for an option that arq does not have."""
        unknown = sorted(options.keys() - _Settings.__dataclass_fields__)
        if unknown:
            raise TypeError(f"{unknown[0]!r} must be an option of arq's Worker, such as max_jobs")
        self.app = ArqApp({"functions": functions, **options}, middleware=[_Counter(self)])
        self.jobs_complete = self.jobs_retried = self.jobs_failed = 0
        self._worker: Worker | None = None

    @property
    def ctx(self) -> dict[Any, Any]:
        """The context of the worker, of which each job gets a copy."""
        return self.app.ctx

    def run(self) -> None:
        """Run the worker until SIGINT or SIGTERM, or until the queue is empty with `burst`."""
        asyncio.run(self._run(signals=self.app.given.handle_signals))

    async def async_run(self) -> None:
        """Run the worker in the running event loop, without handlers of signals."""
        await self._run(signals=False)

    main = async_run

    async def _run(self, *, signals: bool) -> None:
        worker = Worker(self.app, concurrency=self.app.default_concurrency)
        self._worker = worker
        try:
            if signals:
                async with stop_on_signals(worker.stop), worker:
                    await worker.run(burst=self.app.given.burst)
            else:
                async with worker:
                    await worker.run(burst=self.app.given.burst)
        finally:
            self._worker = None

    async def run_check(self) -> int:
        """Run the worker and return the number of completed jobs. Raises `FailedJobs` if jobs failed."""
        await self.async_run()
        if not self.jobs_failed:
            return self.jobs_complete
        redis = await create_pool(self.app.given.redis_settings)
        try:
            failed = [job for job in await redis.all_job_results() if not job.success]
        finally:
            await redis.aclose()
        raise FailedJobs(self.jobs_failed, failed)

    async def close(self) -> None:
        """Stop the worker if it runs."""
        if self._worker is not None:
            self._worker.stop()

    def __repr__(self) -> str:
        counts = f"j_complete={self.jobs_complete} j_failed={self.jobs_failed} j_retried={self.jobs_retried}"
        return f"<Worker {counts} j_ongoing={0 if self._worker is None else self._worker.in_flight}>"


class _Counter(Middleware):
    """Counts the runs of a worker by their outcome."""

    def __init__(self, worker: ArqWorker) -> None:
        self._worker = worker

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        if settlement.state is State.SUCCEEDED:
            self._worker.jobs_complete += 1
        elif settlement.state.terminal:
            self._worker.jobs_failed += 1
        else:
            self._worker.jobs_retried += 1


def create_worker(settings_cls: object, **options: Any) -> ArqWorker:
    """Return a worker for a `WorkerSettings` class. options: in place of its attributes."""
    given = _Settings.of(settings_cls)
    return ArqWorker(**{**vars(given), **options})


def run_worker(settings_cls: object, **options: Any) -> ArqWorker:
    """Run a worker for a `WorkerSettings` class until it is stopped, in this process and without a supervisor."""
    worker = create_worker(settings_cls, **options)
    worker.run()
    return worker


async def async_check_health(settings_cls: object) -> int:
    """Return 0 if a worker that reads the queue of a `WorkerSettings` class reports, else 1."""
    app = ArqApp(settings_cls)
    async with app:
        workers = await observed_workers(app.producer.gateway, app.producer.namespace)
    return 0 if any(app.name in worker.queues for worker in workers) else 1


def check_health(settings_cls: object) -> int:
    """Return 0 if a worker that reads the queue of a `WorkerSettings` class reports, else 1."""
    return asyncio.run(async_check_health(settings_cls))

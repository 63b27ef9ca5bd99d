"""arq's side that enqueues: `create_pool`, `ArqRedis.enqueue_job`, and `Job`."""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, NamedTuple, NoReturn, Self
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import anyio
import redis.asyncio
from pydantic_core import PydanticSerializationError, from_json, to_jsonable_python

from ....queues.durations import to_seconds
from ....queues.envelope import check_own_id, new_task_id
from ....queues.errors import ConfigurationError, TaskCancelled, TaskExists, TaskFailed, TaskNotFound, Unavailable
from ....queues.handle import TaskHandle
from ....queues.inspection.views import list_tasks
from ....queues.keys import check_name
from ....queues.producer import Producer
from ....queues.records import Record, State
from ....queues.runtime import RUNTIME
from ....queues.transport.clients import async_client
from ...log import logger
from ...settings import Settings, load_settings

DEFAULT_QUEUE: Final = "arq:queue"
"""Name of arq's default queue."""

EXPIRES_EXTRA_MS: Final = 86_400_000
"""Time after the planned start of a job within which it must start, in milliseconds."""

JOB_ID: Final = "arq-job-id"
ENQUEUED_AT: Final = "arq-enqueued-at"
SCORE: Final = "arq-score"
JOB_TRY: Final = "arq-job-try"
CONVERTED: Final = "arq-converted"
"""Headers of a job's task: its id for arq if that is no id of a task, times in milliseconds since the epoch, the number
of its first try, and which arguments are values that JSON does not have."""

Seconds = int | float | timedelta


class ResultNotFound(RuntimeError):
    """The job does not exist, or its result is not kept."""


class JobExecutionFailed(RuntimeError):
    """The job has failed."""


class JobStatus(str, Enum):  # noqa: UP042 - its text is that of arq: JobStatus.queued
    """Status of a job."""

    deferred = "deferred"
    queued = "queued"
    in_progress = "in_progress"
    complete = "complete"
    not_found = "not_found"


@dataclass
class JobDef:
    """A job as it was enqueued. score: time at which it is due, in milliseconds since the epoch."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    job_try: int | None
    enqueue_time: datetime
    score: int | None
    job_id: str | None


@dataclass
class ArqJobResult(JobDef):
    """A job that has ended. result: what its function returned, or the exception."""

    success: bool
    result: Any
    start_time: datetime
    finish_time: datetime
    queue_name: str


@dataclass
class RedisSettings:
    """Address of the server, in the form of arq.

    Without arguments it is PERDURE_REDIS_URL if that is set, else localhost:6379 as in arq.

    Raises:
        ConfigurationError: an option has no meaning for Perdure.
    """

    host: str | list[tuple[str, int]] = "localhost"
    port: int = 6379
    unix_socket_path: str | None = None
    database: int = 0
    username: str | None = None
    password: str | None = None
    ssl: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_cert_reqs: str = "required"
    ssl_ca_certs: str | None = None
    ssl_ca_data: str | None = None
    ssl_check_hostname: bool = False
    conn_timeout: int = 1
    conn_retries: int = 5
    conn_retry_delay: int = 1
    max_connections: int | None = None
    sentinel: bool = False
    sentinel_master: str = "mymaster"
    retry_on_timeout: bool = False
    retry_on_error: list[type[Exception]] | None = None
    retry: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.host, str) == self.sentinel:
            raise ConfigurationError(
                "host of RedisSettings must be a list of sentinels with sentinel=True, and a name without it, "
                f"got {self.host!r}"
            )

    def __repr__(self) -> str:
        shown = replace(self, password=None if self.password is None else "***")
        return f"RedisSettings({', '.join(f'{name}={value!r}' for name, value in vars(shown).items())})"

    @classmethod
    def from_dsn(cls, dsn: str) -> RedisSettings:
        """Return the settings of a URL: redis, rediss or unix. Raises `RuntimeError` for another scheme."""
        parts = urlsplit(dsn)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise RuntimeError("invalid DSN scheme")
        path = parts.path.strip("/") if parts.scheme != "unix" else ""
        database = parse_qs(parts.query).get("db", [path or "0"])[0]
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or 6379,
            ssl=parts.scheme == "rediss",
            username=None if parts.username is None else unquote(parts.username),
            password=None if parts.password is None else unquote(parts.password),
            database=int(database),
            unix_socket_path=parts.path if parts.scheme == "unix" else None,
        )

    def url(self) -> str | None:
        """Return the address as a URL; None for that of the environment."""
        if self == RedisSettings() and os.environ.get("PERDURE_REDIS_URL"):
            return None
        names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ca_data")
        query: dict[str, Any] = {name: getattr(self, name) for name in names if self.ssl and getattr(self, name)}
        if self.ssl:
            query |= {"ssl_cert_reqs": self.ssl_cert_reqs, "ssl_check_hostname": str(self.ssl_check_hostname)}
        user = "" if self.username is None else quote(self.username, safe="")
        user += "" if self.password is None else f":{quote(self.password, safe='')}"
        at = f"{user}@" if user else ""
        if self.unix_socket_path is not None:
            query |= {"db": self.database} if self.database else {}
            where = f"unix://{at}{quote(self.unix_socket_path)}"
        else:
            hosts = [(self.host, self.port)] if isinstance(self.host, str) else self.host
            places = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts)
            service = f"/{quote(self.sentinel_master)}" if self.sentinel else ""
            scheme = ("rediss" if self.ssl else "redis") + ("+sentinel" if self.sentinel else "")
            where = f"{scheme}://{at}{places}{service}/{self.database}"
        return where + (f"?{urlencode(query)}" if query else "")

    def load(self, **overrides: object) -> Settings:
        """Return Perdure's settings with this address, and the rest from the environment."""
        return load_settings(redis_url=self.url(), **overrides)


def refuse_serializers(**given: object) -> None:
    """Raise `ConfigurationError` for custom serializers, which would let data be code again."""
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"{name} must be omitted, got {value!r}: Perdure stores arguments and results as JSON only"
            )


def check_own(name: str, value: object, kind: type) -> None:
    """Raise `ConfigurationError` for a value that another module has made, such as arq itself."""
    if value is not None and not isinstance(value, kind):
        made = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigurationError(f"{name} must be made by perdure.integrations.arq, got a {made}: change its import")


def queue_of(name: str) -> str:
    """Return the queue of Perdure for one of arq, whose names have colons. Raises `ValueError`."""
    return check_name("queue", name.replace(":", "."))


def task_id_of(job_id: str) -> str:
    """Return the id of the task of a job: the job's own if that is valid, else one that follows from it."""
    try:
        return check_own_id(job_id)
    except ValueError:
        return f"job-{hashlib.sha256(job_id.encode()).hexdigest()[:40]}"


def time_of(milliseconds: float) -> EnqueueTime:
    """Return a time in UTC."""
    return EnqueueTime.fromtimestamp(milliseconds / 1000, UTC)


class EnqueueTime(datetime):
    """A time with its zone, from which arq's examples subtract a time without one, which is then local time."""

    def __rsub__(self, other: Any) -> Any:
        if isinstance(other, datetime) and other.utcoffset() is None:
            other = other.astimezone()
        return other - datetime.fromtimestamp(self.timestamp(), UTC)


def is_json(value: object) -> bool:
    """Return whether a value comes back from JSON as it is; a tuple comes back as a list, which counts as equal."""
    if isinstance(value, (list, tuple)):
        return all(map(is_json, value))
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and is_json(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


class _EncodedCall(NamedTuple):
    """Arguments of a job as JSON data, and the positions and names of those that were something else."""

    arguments: dict[str, Any]
    converted: list[str]


def _encode(function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _EncodedCall:
    """Return the arguments as JSON data. Raises `TypeError` that names the argument without a JSON form."""
    found: dict[str, Any] = {}
    given = [*((str(index), value) for index, value in enumerate(args)), *kwargs.items()]
    for name, value in given:
        try:
            found[name] = to_jsonable_python(value)
        except (PydanticSerializationError, ValueError) as error:
            raise TypeError(
                f"argument {name} of job {function!r} must have a JSON form, got {type(value).__name__}: {error}"
            ) from None
    arguments = {
        "args": [found[str(index)] for index in range(len(args))],
        "kwargs": {key: found[key] for key in kwargs},
    }
    return _EncodedCall(arguments, [name for name, value in given if not is_json(value)])


class ArqRedis(redis.asyncio.Redis):
    """Client of the server with arq's `enqueue_job`, which stores tasks of Perdure. `create_pool` opens it."""

    _producer: Producer
    _owned: bool
    default_queue_name: str
    expires_extra_ms: int
    settings: Settings

    @classmethod
    def over(
        cls,
        producer: Producer,
        settings: Settings,
        *,
        owned: bool,
        default_queue_name: str = DEFAULT_QUEUE,
        expires_extra_ms: int = EXPIRES_EXTRA_MS,
    ) -> Self:
        """Return a client that enqueues by an open producer. owned: closing it closes the producer.

        Raises `ConfigurationError` on a Redis Cluster, which the client of one server cannot use.
        """
        if producer.address.clustered:
            raise ConfigurationError(
                f"redis_settings must not name a Redis Cluster, got {producer.address.shown}: arq's pool is a client "
                "of one server; use the tasks of an App there"
            )
        pool = async_client(producer.address, producer.gateway.socket).connection_pool
        client = cls(connection_pool=pool)
        client.auto_close_connection_pool = True
        client._producer, client._owned, client.settings = producer, owned, settings
        client.default_queue_name, client.expires_extra_ms = default_queue_name, expires_extra_ms
        return client

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections."""
        if self._owned:
            self._owned = False
            await self._producer.__aexit__(None, None, None)
        await super().aclose(close_connection_pool)

    async def enqueue_job(
        self,
        function: str,
        *args: Any,
        _job_id: str | None = None,
        _queue_name: str | None = None,
        _defer_until: datetime | None = None,
        _defer_by: Seconds | None = None,
        _expires: Seconds | None = None,
        _job_try: int | None = None,
        **kwargs: Any,
    ) -> Job | None:
        """Enqueue a job. Return None if a job with this id exists already.

        Args:
            function: name of the function.
            args, kwargs: its arguments: JSON data, or values that a parameter's annotation reads back from JSON.
            _job_id: the caller's id for the job.
            _queue_name: in place of the pool's.
            _defer_until: time at which it is due; one without a zone is local time.
            _defer_by: seconds or a timedelta until then.
            _expires: seconds or a timedelta from now on within which it must start, else it fails. Default:
                `expires_extra_ms` after it is due.
            _job_try: number of its first try.

        Raises:
            RuntimeError: `_defer_until` and `_defer_by` are given.
            TypeError: an argument has no JSON form.
            Unavailable: the server is unavailable.
        """
        if _defer_until and _defer_by:
            raise RuntimeError("use either 'defer_until' or 'defer_by' or neither, not both")
        now = RUNTIME.wall_clock()
        delay = 0.0 if _defer_by is None else to_seconds(_defer_by, "_defer_by")
        if _defer_until is not None:
            delay = max(0.0, _defer_until.timestamp() - now)
        expires = delay + self.expires_extra_ms / 1000 if _expires is None else to_seconds(_expires, "_expires")
        queue_name, job_id = _queue_name or self.default_queue_name, _job_id or new_task_id()
        task_id = task_id_of(job_id)
        arguments, converted = _encode(function, args, kwargs)
        headers = {ENQUEUED_AT: str(round(now * 1000)), SCORE: str(round((now + delay) * 1000))}
        headers |= {JOB_ID: job_id} if task_id != job_id else {}
        headers |= {JOB_TRY: str(_job_try)} if _job_try else {}
        headers |= {CONVERTED: ",".join(converted)} if converted else {}
        try:
            handle = await self._producer.enqueue(
                function,
                arguments,
                queue=queue_of(queue_name),
                task_id=task_id,
                delay=delay,
                expires=expires,
                headers=headers,
            )
        except TaskExists:
            return None
        return None if handle.existed else Job(job_id, self, queue_name)

    async def find(self, job_id: str, queue_name: str) -> TaskHandle[Any] | None:
        """Return the handle of a job's task, None if there is no such task."""
        return await self._producer.find(task_id_of(job_id), queue_of(queue_name))

    async def all_job_results(self) -> list[ArqJobResult]:
        """Return the results of all jobs that are stored, the job that was enqueued first before the others."""
        ended = [State.SUCCEEDED, State.DEAD, State.CANCELLED]
        found = [await _result_of(record, self._producer) async for record in self._records(None, ended)]
        return sorted(found, key=lambda result: result.enqueue_time)

    async def queued_jobs(self, *, queue_name: str | None = None) -> list[JobDef]:
        """Return the jobs that have not ended, the one that is due first before the others."""
        open_states = [State.QUEUED, State.SCHEDULED, State.WAITING, State.LIMITED, State.RUNNING]
        queue = queue_of(queue_name or self.default_queue_name)
        found = [_definition_of(record) async for record in self._records(queue, open_states)]
        return sorted(found, key=lambda job: job.score or 0)

    def _records(self, queue: str | None, states: list[State]) -> Any:
        return list_tasks(self._producer.gateway, self._producer.namespace, queue=queue, states=states)


async def create_pool(
    settings_: RedisSettings | None = None,
    *,
    retry: int = 0,
    job_serializer: Callable[[Any], bytes] | None = None,
    job_deserializer: Callable[[bytes], Any] | None = None,
    default_queue_name: str = DEFAULT_QUEUE,
    expires_extra_ms: int = EXPIRES_EXTRA_MS,
) -> ArqRedis:
    """Open a pool, and try again up to `conn_retries` times while the server does not answer.

    Raises:
        ConfigurationError: a custom serializer, or a wrong address.
        Unavailable: the server does not answer.
    """
    refuse_serializers(job_serializer=job_serializer, job_deserializer=job_deserializer)
    check_own("settings_", settings_, RedisSettings)
    place = settings_ or RedisSettings()
    settings = place.load()
    while True:
        producer = Producer(
            address=settings.address,
            namespace=settings.namespace,
            payload_limit=settings.payload_limit,
            large_limit=settings.large_limit,
            encryptor=settings.encryptor,
            answer_keys=settings.answer_keys,
            requirements=settings.requirements,
        )
        try:
            await producer.__aenter__()
        except Unavailable as error:
            if retry >= place.conn_retries:
                raise
            retry += 1
            logger.warning("could not connect, try {} of {}: {}", retry, place.conn_retries, error)
            await anyio.sleep(place.conn_retry_delay)
        else:
            return ArqRedis.over(
                producer,
                settings,
                owned=True,
                default_queue_name=default_queue_name,
                expires_extra_ms=expires_extra_ms,
            )


class Job:
    """A job by its id."""

    __slots__ = ("_queue_name", "_redis", "job_id")

    def __init__(
        self, job_id: str, redis: ArqRedis, _queue_name: str = DEFAULT_QUEUE, _deserializer: object = None
    ) -> None:
        refuse_serializers(_deserializer=_deserializer)
        self.job_id = job_id
        self._redis = redis
        self._queue_name = _queue_name

    async def result(self, timeout: float | None = None, *, poll_delay: float = 0.5) -> Any:
        """Wait for the result and return it, as JSON data. poll_delay: without effect, since nothing polls.

        Raises:
            ResultNotFound: there is no such job, or its result is not kept.
            TimeoutError: the timeout in seconds has passed.
            asyncio.CancelledError: the job was aborted.
            Exception: the job has failed: the builtin exception that it raised, made from its text, else
                `JobExecutionFailed`.
        """
        handle = await self._redis.find(self.job_id, self._queue_name)
        if handle is None:
            _raise_not_found(self.job_id)
        try:
            return handle.decode(await handle.read_result(timeout))
        except TaskNotFound:
            _raise_not_found(self.job_id)
        except TaskCancelled:
            raise asyncio.CancelledError(f"job {self.job_id} was aborted") from None
        except TaskFailed as error:
            raise _exception_of(error.reason, error.error) from error

    async def info(self) -> JobDef | None:
        """Return the job with its result if it has one; None if there is no such job."""
        record = await self._record()
        if record is None:
            return None
        return await _result_of(record, self._redis._producer) if record.state.terminal else _definition_of(record)

    async def result_info(self) -> ArqJobResult | None:
        """Return the result of a job that has ended, else None."""
        record = await self._record()
        return None if record is None or not record.state.terminal else await _result_of(record, self._redis._producer)

    async def status(self) -> JobStatus:
        """Return the status."""
        record = await self._record()
        if record is None:
            return JobStatus.not_found
        if record.state.terminal:
            return JobStatus.complete
        if record.state is State.RUNNING:
            return JobStatus.in_progress
        return JobStatus.deferred if record.state is State.SCHEDULED else JobStatus.queued

    async def abort(self, *, timeout: float | None = None, poll_delay: float = 0.5) -> bool:
        """Cancel the job, and wait until it has ended. Return whether it was cancelled.

        Works whatever `allow_abort_jobs` says. Raises `TimeoutError` after `timeout` seconds, and what the job raised.
        """
        handle = await self._redis.find(self.job_id, self._queue_name)
        if handle is None:
            return False
        try:
            await handle.cancel()
            await self.result(timeout)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return True
        except (ResultNotFound, TaskNotFound):
            pass
        return False

    async def _record(self) -> Record | None:
        handle = await self._redis.find(self.job_id, self._queue_name)
        if handle is None:
            return None
        try:
            return await handle.record()
        except TaskNotFound:
            return None

    def __repr__(self) -> str:
        return f"<arq job {self.job_id}>"


def _raise_not_found(job_id: str) -> NoReturn:
    raise ResultNotFound(f"job {job_id} must exist: there is no such job, or its worker does not keep its result")


def _exception_of(reason: str, error: Mapping[str, Any]) -> Exception:
    """Return the exception of a failed job: a builtin one of the same name, else `JobExecutionFailed`."""
    if reason == "expired":
        return JobExecutionFailed("job expired")
    name, text = str(error.get("error", "")), str(error.get("message", ""))
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:
            pass
    known = name.rpartition(".")[2] == "JobExecutionFailed"
    return JobExecutionFailed(text if known else f"{name}: {text}" if name else reason)


def _definition_of(record: Record) -> JobDef:
    given: Any = from_json(record.shown_arguments() or b"{}") if record.args is not None else {}
    known = given if isinstance(given, dict) else {}
    enqueued = float(record.headers.get(ENQUEUED_AT) or record.enqueued_at or 0)
    planned = int(float(record.headers.get(SCORE) or enqueued))
    due = planned if not record.attempts or record.due_at is None else record.due_at
    return JobDef(
        function=record.task or "",
        args=tuple(known.get("args") or ()),
        kwargs=dict(known.get("kwargs") or {}),
        job_try=record.attempts or None,
        enqueue_time=time_of(enqueued),
        score=None if record.state.terminal else due,
        job_id=record.headers.get(JOB_ID, record.id),
    )


async def _result_of(record: Record, producer: Producer) -> ArqJobResult:
    defined = _definition_of(record)
    finished = record.finished_at or 0
    result: Any
    if record.state is State.SUCCEEDED:
        handle = await producer.find(record.id, record.queue)
        try:
            result = None if handle is None else handle.decode(await handle.read_result(timeout=0))
        except TaskNotFound:
            result = None
    elif record.state is State.CANCELLED:
        result = asyncio.CancelledError()
    else:
        result = _exception_of(record.reason or "unknown", dict(record.error or {}))
    return ArqJobResult(
        **{**vars(defined), "job_try": record.attempts},
        success=record.state is State.SUCCEEDED,
        result=result,
        start_time=time_of(finished - (record.ran_ms or 0)),
        finish_time=time_of(finished),
        queue_name=record.queue,
    )


def names_of(converted: str | None) -> Iterable[str]:
    """Return the positions and names in the header of converted arguments."""
    return converted.split(",") if converted else ()

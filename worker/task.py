"""Tasks: a handler, its name, its policy, and the calls that enqueue it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Final, Generic, Literal, Never, ParamSpec, Protocol, TypeVar, get_args

from ..deadletter.policy import Retry
from ..queues.defaults import unknown_option
from ..queues.durations import Duration, Moment, seconds_until
from ..queues.envelope import EnvelopeTemplate, Options, TaskMessage, make_options
from ..queues.handle import TaskHandle
from ..queues.producer import Key, Producer, key_of, map_items
from ..queues.transport.replication import Replicated
from .arguments import CALL_OPTIONS, CALL_WORDS, Arguments, type_hints
from .durable.context import Context
from .durable.middleware import Chain, EnqueueCall
from .durable.steps.codec import Codec
from .durable.steps.current import Durability
from .durable.sync.context import SyncContext, call_in_thread
from .errors import InvalidArguments, TaskDefinitionError
from .sync_producer import SyncProducer

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]
SyncHandler = Callable[Concatenate[SyncContext, P], R]

_WORDS: Final[Mapping[str, str]] = {
    **{option: f"the options of each call: options({option}=...).enqueue(...)" for option in CALL_OPTIONS},
    **dict.fromkeys(("attempts", "max_attempts", "max_retries", "retries", "tries"), "retry=Retry(max_attempts=...)"),
    **dict.fromkeys(("backoff", "retry_delay"), "retry=Retry(base=..., factor=...)"),
    "max_crashes": "retry=Retry(max_crashes=...)",
    "strict_order": "it for functions only, since a plan may change",
    "time_limit": "timeout",
}
"""Remedies for options of a call and for names that options of a task have elsewhere."""


def refuse_unknown(method: Callable[..., Any], unknown: Collection[str]) -> None:
    """Raise `TaskDefinitionError` if a method that registers a task is given options that it does not have."""
    if unknown:
        parameters = inspect.signature(method).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        raise TaskDefinitionError(unknown_option(f"option of app.{method.__name__}", unknown, known, _WORDS))


def check_options(name: str, *, retry: object, durability: object, on_orphan: object, strict_order: object) -> None:
    """Check options of a task that are not times. Raises `TaskDefinitionError`."""
    if not isinstance(retry, Retry):
        raise TaskDefinitionError(f"task {name!r}: retry must be a Retry, such as Retry(max_attempts=3), got {retry!r}")
    known = {"durability": (durability, get_args(Durability)), "on_orphan": (on_orphan, ("warn", "fail"))}
    for what, (given, allowed) in known.items():
        if given not in allowed:
            raise TaskDefinitionError(f"task {name!r}: {what} must be one of {', '.join(allowed)}, got {given!r}")
    if not isinstance(strict_order, bool):
        raise TaskDefinitionError(f"task {name!r}: strict_order must be True or False, got {strict_order!r}")


def as_async(name: str, handler: Callable[..., Any]) -> Handler[..., Any]:
    """Return a handler as an async function; a plain one runs in a thread. Raises `TaskDefinitionError`."""
    is_async = inspect.iscoroutinefunction(handler)
    if not is_async and (not inspect.isroutine(handler) or _yields(handler)):
        raise TaskDefinitionError(f"task {name!r} must be an 'async def' or a 'def', without 'yield', got {handler!r}")
    wrong: type = SyncContext if is_async else Context
    if wrong in type_hints(name, handler).values():
        remedy = "Context: async def f(ctx: Context, ...)" if is_async else "SyncContext: def f(ctx: SyncContext, ...)"
        raise TaskDefinitionError(f"task {name!r}: the first parameter must be the {remedy}")
    return handler if is_async else call_in_thread(name, handler)


def _yields(handler: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler)


_NO_WISH = Options()

OnOrphan = Literal["warn", "fail"]


class TaskOwner(Protocol):
    """Protocol of the app that a task belongs to. enqueue_chain: None without middleware for `enqueue`."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Collection[str]: ...

    @property
    def producer(self) -> Producer: ...

    @property
    def enqueue_chain(self) -> Chain | None: ...

    def sync(self) -> SyncProducer: ...


@dataclass(frozen=True, slots=True)
class Task(Generic[P, R]):
    """A registered handler.

    timeout, idle_timeout, result_ttl: seconds, None for the worker's setting. version: of its code.
    """

    name: str
    handler: Handler[P, R]
    queue: str
    retry: Retry
    timeout: float | None
    idle_timeout: float | None
    durability: Durability
    result_ttl: float | None
    on_orphan: OnOrphan
    version: int
    strict_order: bool
    app: TaskOwner = field(repr=False)
    arguments: Arguments = field(repr=False)
    result: Codec = field(repr=False)
    template: EnvelopeTemplate = field(repr=False)

    async def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the handler as a plain function, inside another task or in a test. Raises `InvalidArguments`."""
        first: object = ctx
        if first is not None and not hasattr(first, "step"):
            raise InvalidArguments(
                self.name,
                f"the first argument must be a Context, got {ctx!r}: await {self.handler.__name__}.enqueue(...) starts "
                "the task; a test calls the handler with make_context() of perdure.testing",
            )
        return await self.handler(ctx, *args, **kwargs)

    @property
    def decode(self) -> Callable[[bytes], R]:
        """The decoder of the task's results."""
        return self.result.decode

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue the task. Once this returns, the task is never lost.

        Raises `InvalidArguments` before anything is sent, `PayloadTooLarge`, `Unavailable`.
        """
        return await TaskCall(self, self.template).enqueue(*args, **kwargs)

    async def enqueue_many(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], **unknown: Never
    ) -> list[TaskHandle[R]]:
        """Enqueue one task per set of arguments (by name); all are validated before any is sent."""
        return await TaskCall(self, self.template).enqueue_many(many, **unknown)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue the task from synchronous code, in any thread. See `App.sync`."""
        return TaskCall(self, self.template).enqueue_sync(*args, **kwargs)

    def enqueue_many_sync(self, many: Iterable[Mapping[str, Any]], **unknown: Never) -> list[TaskHandle[R]]:
        """Enqueue one task per set of arguments from synchronous code."""
        return TaskCall(self, self.template).enqueue_many_sync(many, **unknown)

    def enqueue_stream(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], **unknown: Never
    ) -> AsyncIterator[TaskHandle[R]]:
        """Enqueue one task per set of arguments, in constant memory: `async for handle in ...`.

        Each handle is that of a stored task. If a set of arguments is refused, tasks before it may be stored.
        """
        return TaskCall(self, self.template).enqueue_stream(many, **unknown)

    def options(
        self,
        *,
        delay: Moment = 0.0,
        queue: str | None = None,
        key: Key = None,
        task_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        result_ttl: Duration | None = None,
        durability: Replicated | None = None,
        tags: Collection[str] = (),
        **unknown: Never,
    ) -> TaskCall[P, R]:
        """Return the task with options for one call: `await audit.options(delay=60).enqueue("src")`.

        Raises `InvalidArguments` for an option that does not exist.

        Args:
            delay: seconds or a timedelta until it may run, or a datetime at which it may.
            queue: in place of the task's.
            key: tasks of one key start in the order in which they were enqueued. For
                `enqueue_many` and `enqueue_stream` it may be a function of the arguments.
            task_id: the caller's id for the task, which makes enqueuing idempotent: the call may be repeated with the
                same arguments; `TaskExists` if the task that has the id differs.
            headers: text for the handler and for middleware, `ctx.headers`.
            timeout, max_attempts, result_ttl: in place of the task's.
            durability: "replicated" waits until replicas have the task, and raises `NotReplicated` if too few have it
                in time.
            tags: words by which `perdure task list --tag` finds the task.
        """
        if unknown:
            problem = unknown_option("option of a call", unknown, CALL_OPTIONS, CALL_WORDS)
            raise InvalidArguments(self.name, problem)
        wish = make_options(timeout, max_attempts, result_ttl)
        special = headers or tags or wish != _NO_WISH
        form = EnvelopeTemplate(self.name, headers, wish, tags, app=self.app.name) if special else self.template
        return TaskCall(self, form, delay, queue, key, task_id, durability, headers, wish, tags)


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[P, R]):
    """A task with options, ready to be enqueued."""

    task: Task[P, R]
    template: EnvelopeTemplate = field(repr=False)
    delay: Moment = 0.0
    queue: str | None = None
    key: Key = None
    task_id: str | None = None
    durability: Replicated | None = None
    headers: Mapping[str, str] | None = None
    limits: Options = _NO_WISH
    tags: Collection[str] = ()

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """See `Task.enqueue`."""
        if callable(self.key):
            raise ValueError("key must be a text for one task; a function is for enqueue_many and enqueue_stream")
        chain = self.task.app.enqueue_chain
        if chain is None:
            arguments, secrets = self.task.arguments.encode_call(args, kwargs)
            message = self.template.message(arguments, secrets, key=self.key, task_id=self.task_id)
        else:
            message = await self._hooked(chain, args, kwargs, self.key)
        return await self.task.app.producer.send_one(
            message,
            queue=self._queue,
            delay=self.delay,
            decode=self.task.decode,
            durability=self.durability,
            same=self.task.arguments.same,
        )

    async def enqueue_many(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], **unknown: Never
    ) -> list[TaskHandle[R]]:
        """See `Task.enqueue_many`."""
        messages, producer = self._messages(many, unknown), self.task.app.producer
        return await producer.send(
            messages, queue=self._queue, delay=self.delay, decode=self.task.decode, durability=self.durability
        )

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """See `Task.enqueue_sync`."""
        task = self.task
        return task.app.sync().call(lambda _: self.enqueue(*args, **kwargs), f"await {task.name}.enqueue(...)")

    def enqueue_many_sync(self, many: Iterable[Mapping[str, Any]], **unknown: Never) -> list[TaskHandle[R]]:
        """See `Task.enqueue_many_sync`."""
        task, listed = self.task, list(many)  # in this thread: its iterator may use a connection of this thread
        return task.app.sync().call(
            lambda _: self.enqueue_many(listed, **unknown), f"await {task.name}.enqueue_many(...)"
        )

    def enqueue_stream(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], **unknown: Never
    ) -> AsyncIterator[TaskHandle[R]]:
        """See `Task.enqueue_stream`."""
        messages, producer = self._messages(many, unknown), self.task.app.producer
        return producer.send_stream(
            messages, queue=self._queue, delay=self.delay, decode=self.task.decode, durability=self.durability
        )

    def _messages(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], unknown: Collection[str]
    ) -> Iterable[TaskMessage] | AsyncIterable[TaskMessage]:
        if unknown:
            problem = f"got an unexpected keyword argument {next(iter(unknown))!r}{self.task.arguments.hint(unknown)}"
            raise InvalidArguments(self.task.name, problem)
        if self.task_id is not None:
            raise ValueError(
                "task_id must not be set for many tasks; enqueue each with an id of its own: "
                f"{self.task.name}.options(task_id=...).enqueue(...)"
            )
        form, encode, key = self.template, self.task.arguments.encode_call, self.key
        if (chain := self.task.app.enqueue_chain) is not None:
            return self._all_hooked(chain, many)

        def build(item: Mapping[str, Any]) -> TaskMessage:
            args = self._checked(item)
            return form.message(*encode((), args), key=key_of(key, args))

        return map_items(build, many)

    def _checked(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an item of many. Raises `InvalidArguments` if it has no arguments by name."""
        given: object = item
        if not isinstance(given, Mapping):
            problem = f"each item must be a dict of arguments by name, got {given!r}"
            raise InvalidArguments(self.task.name, problem)
        return item

    async def _all_hooked(
        self, chain: Chain, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[TaskMessage]:
        if isinstance(many, AsyncIterable):
            async for arguments in many:
                yield await self._hooked(chain, (), self._checked(arguments), key_of(self.key, arguments))
        else:
            for arguments in many:
                yield await self._hooked(chain, (), self._checked(arguments), key_of(self.key, arguments))

    async def _hooked(
        self, chain: Chain, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str | None
    ) -> TaskMessage:
        """Build one message within the enqueue hooks, which may add headers."""
        task, limits = self.task, self.limits
        options: dict[str, Any] = {"key": key, "task_id": self.task_id, "durability": self.durability}
        options |= {"delay": seconds_until(self.delay, "delay") or None, "tags": self.tags or None}
        options |= {"timeout": limits.timeout, "max_attempts": limits.max_attempts, "result_ttl": limits.result_ttl}
        call = EnqueueCall(
            task=task.name,
            arguments=task.arguments.by_name(args, kwargs),
            queue=self._queue,
            options={name: value for name, value in options.items() if value is not None},
            headers=dict(self.headers or {}),
        )

        def build() -> TaskMessage:
            arguments, secrets = task.arguments.encode_call(args, kwargs)
            template = self.template
            if call.headers:
                template = EnvelopeTemplate(task.name, call.headers, limits, self.tags, app=task.app.name)
            return template.message(arguments, secrets, key=key, task_id=self.task_id)

        return await hooked_message(chain, call, build)

    @property
    def _queue(self) -> str:
        return self.queue or self.task.queue


async def hooked_message(chain: Chain, call: EnqueueCall, build: Callable[[], TaskMessage]) -> TaskMessage:
    """Return the message that was built within the enqueue hooks."""
    built: list[TaskMessage] = []

    async def prepare() -> str:
        built.append(build())
        return built[0].id

    await chain(call, prepare)
    return built[0]

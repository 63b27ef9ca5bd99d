"""Tasks: a handler, its name, its policy, and the calls that enqueue it."""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Never,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
)

import orjson
from pydantic_core import from_json

from ..deadletter.policy import Retry
from ..queues.defaults import unknown_option
from ..queues.durations import Duration, Moment, seconds_until
from ..queues.enqueueing import BatchLimits
from ..queues.envelope import EnvelopeTemplate, Options, TaskMessage, make_options
from ..queues.errors import ConfigurationError
from ..queues.groups import GroupErrors, GroupItem, check_group, encode_group
from ..queues.handle import TaskHandle
from ..queues.keys import Partition, check_tenant, tenant_of
from ..queues.lanes import IDLE, Lane, Priority, check_lane
from ..queues.producer import Key, Producer, batched, key_of, map_items
from ..queues.security.secret_arguments import SecretPaths
from ..queues.transport.replication import Replicated
from ..queues.transport.threadsafe_calls import blocking, call_without_loop
from ..queues.unique import Unique, UniqueTask, check_unique
from .arguments import CALL_OPTIONS, CALL_WORDS, Arguments, type_hints
from .context import Context
from .durable.child_tasks import Ids, enqueue_once, enqueuing_run, repeated_id
from .durable.joining import DEFAULT_LIMIT, Spawnable, arguments_of, child_call, each_item
from .durable.run import Run
from .durable.steps.codec import Codec
from .durable.steps.current import Durability
from .durable.sync.session import call_in_loop, in_handler_thread
from .errors import InvalidArguments, SpawnRefused, TaskDefinitionError
from .middleware import Chain, EnqueueCall
from .sync_context import SyncContext, call_in_thread
from .sync_producer import SyncProducer

if TYPE_CHECKING:
    from ..queues.budgets.definition import TaskBudgets
    from ..queues.depth import MaxDepth, WhenFull
    from ..queues.limits.task_limits import TaskLimits

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

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

Many = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]

TaskIds = str | Sequence[str] | Callable[[Mapping[str, Any]], str] | None
"""Ids that the caller has chosen: for one task, or for many as a list or a function of each task's arguments."""

IdsOfItems = Callable[[int, Mapping[str, Any]], str]
"""Returns the id of one of many tasks from its number and its arguments."""


def _always(_stored: bytes, _sent: bytes) -> bool:
    return True


def _shifted(ids: IdsOfItems, by: int, number: int, item: Mapping[str, Any]) -> str:
    return ids(by + number, item)


OnOrphan = Literal["warn", "fail"]


def check_cleanup(name: str, on_end: object, app: TaskOwner) -> None:
    """Raise `TaskDefinitionError` if a task cannot be the clean-up task of another one."""
    if on_end is None:
        return
    if not isinstance(on_end, Task) or on_end.app is not app:
        raise TaskDefinitionError(f"task {name!r}: on_end must be a task of app {app.name!r}, got {on_end!r}")
    try:
        on_end.arguments.encode_call(("id",), {})
    except InvalidArguments as error:
        raise TaskDefinitionError(
            f"task {name!r}: on_end must be a task with one argument, the id of the task that has ended: {error}"
        ) from None


class TaskOutbox(Protocol):
    """Protocol of a table of tasks that transactions of a database enqueue; see outbox.py."""

    async def add(self, session: Any, row: Any, /) -> None: ...

    def add_sync(self, session: Any, row: Any, /) -> None: ...


class TaskOwner(Protocol):
    """Protocol of the app that a task belongs to.

    enqueue_chain: None without middleware for `enqueue`. max_depths: limits of the depth of queues, by their names.
    """

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Collection[str]: ...

    @property
    def producer(self) -> Producer: ...

    @property
    def enqueue_chain(self) -> Chain | None: ...

    @property
    def max_depths(self) -> Mapping[str, MaxDepth]: ...

    @property
    def tenant(self) -> str | None: ...

    @property
    def outbox(self) -> TaskOutbox | None: ...

    def sync(self) -> SyncProducer: ...

    def outbox_row(self, call: TaskCall[..., Any], message: TaskMessage) -> Any: ...


@dataclass(frozen=True, slots=True)
class Task(Generic[P, R]):
    """A registered handler.

    timeout, idle_timeout, result_ttl: seconds, None for the worker's setting. version: of its code. on_orphan: None for
    an agent, whose plan decides which steps it asks for. watches_tools: whether coherence checks begin with the first
    tool call of a run. on_end: the task that cleans up after it. unique: its rule for unique tasks.
    limits, budgets: None without any. lane: of its queue, by its priority.
    slots: slots of a worker that a run takes. max_depth: limit of the depth of its queue; None for the app's limit.
    """

    name: str
    handler: Handler[P, R]
    queue: str
    retry: Retry
    timeout: float | None
    idle_timeout: float | None
    durability: Durability
    result_ttl: float | None
    on_orphan: OnOrphan | None
    version: int
    strict_order: bool
    watches_tools: bool
    on_end: Task[Any, Any] | None
    unique: UniqueTask | None
    limits: TaskLimits | None
    budgets: TaskBudgets | None
    lane: Lane
    slots: int
    max_depth: MaxDepth | None
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

    def as_call(self) -> TaskCall[P, R]:
        """Return the task with the options of a call that has none."""
        return TaskCall(self, self.template)

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue the task. Once this returns, the task is never lost.

        If it is unique (`Unique`) and another task has its key, the handle is that task's, with `existed` true.

        Raises `InvalidArguments` and `InvalidUniqueKey` before anything is sent, `PayloadTooLarge`, `QueueFull`,
        `Unavailable`.
        """
        return await TaskCall(self, self.template).enqueue(*args, **kwargs)

    async def enqueue_in(self, session: Any, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Enqueue the task in a transaction of a database; return its id.

        The task is enqueued if and when the transaction commits: a worker of the app sends it from the app's outbox.

        Args:
            session: the session or connection of the transaction, as the app's outbox takes it; None for the current
                transaction of Django.

        Raises:
            InvalidArguments: the arguments do not fit the task.
            ConfigurationError: the app has no outbox.
        """
        return await self.as_call().enqueue_in(session, *args, **kwargs)

    def enqueue_in_sync(self, session: Any, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Enqueue the task in a transaction of a database, from synchronous code. See `enqueue_in`."""
        return self.as_call().enqueue_in_sync(session, *args, **kwargs)

    async def enqueue_many(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], **unknown: Never
    ) -> list[TaskHandle[R]]:
        """Enqueue one task per set of arguments (by name); all are validated before any is sent.

        Raises `QueueFull` with the ids of those that are stored.
        """
        return await TaskCall(self, self.template).enqueue_many(many, **unknown)

    async def enqueue_group(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        then: Spawnable[..., T],
        limit: int = DEFAULT_LIMIT,
        errors: GroupErrors = "raise",
        **arguments: Any,
    ) -> TaskHandle[T]:
        """Enqueue a task for each item, and a callback that gets the list of their results as its first argument.

        The tasks are children of the callback, which is parked until they have ended. Returns the handle of the
        callback.

        Args:
            items: a list or a generator; see `ctx.gather`.
            then: the callback: a registered task, or `task.options(...)`.
            limit: tasks that are open at once.
            errors: `raise` lets the callback fail if a task of the group ends without a result, as its own retry policy
                says; `wait` waits until the dead letter is replayed.
            arguments: further arguments of the callback, by name: JSON data.

        Raises:
            InvalidArguments: arguments do not fit a task; nothing was enqueued.
            ValueError: an option or a limit is wrong, or an argument is secret; nothing was enqueued.
            PayloadTooLarge: all arguments together are over the limit of large ones.
        """
        given: dict[str, Any] = {"then": then, "limit": limit, "errors": errors}
        return await self.as_call().enqueue_group(items, **given, **arguments)

    def _run(self, call: Callable[[Task[P, R]], Coroutine[Any, Any, T]], instead: str) -> T:
        if in_handler_thread():
            return call_in_loop(partial(call, self))
        return self.app.sync().call(lambda _: call(self), f"await {self.name}.{instead}")

    enqueue_sync = blocking(enqueue, _run)

    def enqueue_group_sync(
        self,
        items: Iterable[Any],
        *,
        then: Spawnable[..., T],
        limit: int = DEFAULT_LIMIT,
        errors: GroupErrors = "raise",
        **arguments: Any,
    ) -> TaskHandle[T]:
        """Enqueue a group from synchronous code. See `enqueue_group`."""
        given: dict[str, Any] = {"then": then, "limit": limit, "errors": errors, **arguments}
        call = partial(TaskCall[P, R].enqueue_group, self.as_call(), list(items), **given)
        return self._run(lambda _: call(), "enqueue_group(...)")

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
        task_id: TaskIds = None,
        tenant: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        result_ttl: Duration | None = None,
        expires: Moment | None = None,
        durability: Replicated | None = None,
        tags: Collection[str] = (),
        unique: Unique | Literal[False] | None = None,
        costs: Mapping[str, int] | None = None,
        priority: Priority | None = None,
        idle: bool | None = None,
        max_depth: int | Literal[False] | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
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
                same arguments; `TaskExists` if the task that has the id differs. For `enqueue_many` and
                `enqueue_stream`, a list of ids or a function of the arguments.
            tenant: tenant that the task belongs to. Default: that of the task whose handler enqueues it, else that of
                the app.
            headers: text for the handler and for middleware, `ctx.headers`.
            timeout, max_attempts, result_ttl: in place of the task's.
            expires: seconds from now on, a timedelta or a datetime: a task that no worker has started by then becomes a
                dead letter `expired` when a worker takes it.
            durability: "replicated" waits until replicas have the task, and raises `NotReplicated` if too few have it
                in time.
            tags: words by which `perdure task list --tag` finds the task.
            unique: a rule for unique tasks in place of the task's; False for none.
            costs: costs of the call by the names of the task's limits, such as `{"openai": 1200}`.
            priority, idle: in place of the task's, see `App.task`.
            max_depth, when_full, wait_limit: limit of the queue's depth in place of the task's, see `App.task`; False
                for no limit.
        """
        if unknown:
            problem = unknown_option("option of a call", unknown, CALL_OPTIONS, CALL_WORDS)
            raise InvalidArguments(self.name, problem)
        try:
            wish = make_options(timeout, max_attempts, result_ttl, expires)
        except (TypeError, ValueError) as error:
            if expires is None:
                raise
            raise InvalidArguments(self.name, str(error)) from None
        try:
            lane = check_lane(priority, idle)
        except ValueError as error:
            raise InvalidArguments(self.name, str(error)) from None
        special = headers or tags or wish != _NO_WISH or lane is not None
        form = self.template
        if special:
            cleanup = self.on_end is not None
            form = EnvelopeTemplate(
                self.name, headers, wish, tags, app=self.app.name, on_end=cleanup, lane=lane or self.lane
            )
        call = TaskCall(self, form, delay, queue, key, task_id, durability, headers, wish, tags, lane=lane)
        if tenant is not None:
            call = call.with_tenant(tenant)
        if costs:
            call = replace(call, costs=self._checked_costs(costs))
        if (max_depth, when_full, wait_limit) != (None, None, None):
            call = call.with_limit(max_depth, when_full, wait_limit)
        return call if unique is None else call.with_unique(unique)

    def limit_on(self, queue: str) -> MaxDepth | None:
        """Return the limit of the depth of a queue for this task; None without one."""
        return self.app.max_depths.get(queue) if self.max_depth is None else self.max_depth

    def _checked_costs(self, costs: Mapping[str, int]) -> Mapping[str, int]:
        """Return the costs of a call. Raises `InvalidArguments` for what the limits of the task do not have."""
        given: object = costs
        if not isinstance(given, Mapping):
            raise InvalidArguments(self.name, f"costs must be a dict by the names of limits, got {costs!r}")
        if self.limits is None:
            raise InvalidArguments(self.name, f"costs must name limits of the task, and it has none, got {costs!r}")
        self.limits.check_costs(costs)
        return costs


class ChildArguments(NamedTuple):
    """Arguments of a child: as they were given, and encoded. key: its ordering key."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str | None
    data: bytes
    secrets: SecretPaths


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[P, R]):
    """A task with options, ready to be enqueued."""

    task: Task[P, R]
    template: EnvelopeTemplate = field(repr=False)
    delay: Moment = 0.0
    queue: str | None = None
    key: Key = None
    task_id: TaskIds = None
    durability: Replicated | None = None
    headers: Mapping[str, str] | None = None
    limits: Options = _NO_WISH
    tags: Collection[str] = ()
    inherited: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the envelope that a spawned task has from its parent."""
    unique: UniqueTask | Literal[False] | None = None
    """The rule of the call, False for none; None for that of the task."""
    costs: Mapping[str, int] | None = None
    """Costs of the call by the names of limits."""
    lane: Lane | None = None
    """The lane of the call; None for that of the task."""
    max_depth: MaxDepth | Literal[False] | None = None
    """The limit of the call, False for none; None for that of the task."""
    tenant: str | None = None
    """The tenant of the call; None for that of the task that enqueues it, or of the app."""

    def with_tenant(self, tenant: str) -> TaskCall[P, R]:
        """Return the call for a tenant. Raises `InvalidArguments`."""
        try:
            return replace(self, tenant=check_tenant(tenant))
        except ValueError as error:
            raise InvalidArguments(self.task.name, str(error)) from None

    def with_unique(self, unique: Unique | Literal[False]) -> TaskCall[P, R]:
        """Return the call with a rule for unique tasks, False for none. Raises `InvalidArguments`."""
        try:
            rule: UniqueTask | Literal[False] = False
            if unique is not False:
                rule = self.task.arguments.bind_unique(check_unique(unique))
        except (TypeError, ValueError) as error:
            raise InvalidArguments(self.task.name, str(error)) from None
        return replace(self, unique=rule)

    def with_limit(
        self, max_depth: int | Literal[False] | None, when_full: WhenFull | None, wait_limit: Duration | None
    ) -> TaskCall[P, R]:
        """Return the call with a limit of its queue's depth. Raises `InvalidArguments`."""
        from ..queues.depth import make_limit

        try:
            limit = make_limit(max_depth, when_full, wait_limit, self.task.limit_on(self.own_queue))
        except (TypeError, ValueError) as error:
            raise InvalidArguments(self.task.name, str(error)) from None
        return replace(self, max_depth=limit or False)

    @property
    def unique_rule(self) -> UniqueTask | None:
        """The rule for unique tasks that holds for the call."""
        return (self.task.unique if self.unique is None else self.unique) or None

    def limited(self, message: TaskMessage, arguments: Mapping[str, Any] | None = None) -> TaskMessage:
        """Return a message with the uses of the task's limits. arguments: in place of its own.

        Raises `InvalidLimitUse`.
        """
        limits = self.task.limits
        return message if limits is None else limits.limited(message, self.costs, arguments)

    @property
    def depth_limit(self) -> MaxDepth | None:
        """The limit of the queue's depth that holds for the call."""
        return (self.task.limit_on(self.own_queue) if self.max_depth is None else self.max_depth) or None

    def as_call(self) -> TaskCall[P, R]:
        """Return this call."""
        return self

    def spawned(self, headers: Mapping[str, str], inherited: Mapping[str, Any]) -> TaskCall[P, R]:
        """Return the call of a child: with fields of the envelope that it has from its parent.

        headers: the parent's that the child gets if the call has none of their names.

        Raises `SpawnRefused` for options that a child cannot have.
        """
        refused: dict[str, object] = {"delay": self.delay, "task_id": self.task_id, "durability": self.durability}
        refused |= {"unique": self.unique, "max_depth": self.max_depth}
        if given := [name for name, value in refused.items() if value]:
            raise SpawnRefused(
                f"could not spawn task {self.task.name!r}: a child cannot have the option {given[0]}; enqueue the task "
                "in place of spawning it"
            )
        merged = {**headers, **(self.headers or {})}
        fields = {**inherited, "version": self.task.version}
        parent = tenant_of(str(inherited["parent"]))
        if self.tenant not in (None, parent):
            raise SpawnRefused(f"could not spawn task {self.task.name!r}: {_other_tenant(self.tenant, parent)}")
        return replace(self, template=self._form(merged, fields), headers=merged, inherited=fields, tenant=parent)

    def encode_child(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ChildArguments:
        """Return the arguments of a child. Raises `InvalidArguments`."""
        key = self.key
        if callable(key):
            key = key_of(key, self.task.arguments.by_name(args, kwargs))
        return ChildArguments(args, kwargs, key, *self.task.arguments.encode_call(args, kwargs))

    async def child_message(self, child: ChildArguments, task_id: str) -> TaskMessage:
        """Return the message of a child."""
        if (chain := self.task.app.enqueue_chain) is not None:
            return await self._hooked(chain, child.args, child.kwargs, child.key, task_id)
        message = self.template.message(child.data, child.secrets, key=child.key, task_id=task_id, tenant=self.tenant)
        return self.limited(message)

    def _form(self, headers: Mapping[str, str] | None, inherited: Mapping[str, Any]) -> EnvelopeTemplate:
        cleanup = self.task.on_end is not None
        app, lane = self.task.app.name, self.lane or self.task.lane
        return EnvelopeTemplate(
            self.task.name, headers, self.limits, self.tags, app=app, on_end=cleanup, lane=lane, **inherited
        )

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """See `Task.enqueue`."""
        own = self._one_id()
        if (run := enqueuing_run()) is None:
            return await self._enqueue(args, kwargs, own, self.task.arguments.same)

        async def enqueue(ids: Ids | None, *, planned: bool) -> Sequence[TaskHandle[R]]:
            task_id = own if ids is None else ids(0)
            return [await self._enqueue(args, kwargs, task_id, _always if planned else self.task.arguments.same)]

        def call() -> bytes:
            return self.call_text([self.task.arguments.encode_call(args, kwargs)[0]])

        [handle] = await enqueue_once(run, self.task.name, call, enqueue, self.handle, own_ids=own is not None)
        return handle

    def _one_id(self) -> str | None:
        """Return the id that the caller has chosen for one task. Raises `ValueError` for options of many."""
        if callable(self.key):
            raise ValueError("key must be a text for one task; a function is for enqueue_many and enqueue_stream")
        own = self.task_id
        if not (own is None or isinstance(own, str)):
            raise ValueError("task_id must be a text for one task; a list and a function are for many tasks")
        return own

    async def enqueue_in(self, session: Any, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """See `Task.enqueue_in`."""
        outbox = self._outbox()
        message = await self._outbox_message(args, kwargs)
        await outbox.add(session, self.task.app.outbox_row(self, message))
        return message.id

    def enqueue_in_sync(self, session: Any, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """See `Task.enqueue_in_sync`."""
        outbox = self._outbox()
        if in_handler_thread():
            message = call_in_loop(partial(self._outbox_message, args, kwargs))
        else:
            instead = f"await {self.task.name}.enqueue_in(...)"
            message = call_without_loop(self._outbox_message(args, kwargs), instead)
        outbox.add_sync(session, self.task.app.outbox_row(self, message))
        return message.id

    def _outbox(self) -> TaskOutbox:
        if (outbox := self.task.app.outbox) is None:
            raise ConfigurationError(
                f"app {self.task.app.name!r} has no outbox: App(..., outbox=...) takes one of "
                "perdure.integrations.sqlalchemy or perdure.integrations.django"
            )
        return outbox

    async def _outbox_message(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TaskMessage:
        """Return the message of one task. In a handler, a run that repeats the call gives it the same id."""
        own, task = self._one_id(), self.task
        key = None if callable(self.key) else self.key
        if own is None and (run := enqueuing_run()) is not None:
            text = self.call_text([task.arguments.encode_call(args, kwargs)[0]])
            own = await repeated_id(run, task.name, text)
        return await self._message(args, kwargs, key, own)

    async def enqueue_group(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        then: Spawnable[..., T],
        limit: int = DEFAULT_LIMIT,
        errors: GroupErrors = "raise",
        **arguments: Any,
    ) -> TaskHandle[T]:
        """See `Task.enqueue_group`."""
        receiver: TaskCall[..., T] = child_call("enqueue_group", then)  # type: ignore[assignment]
        options = ("delay", "task_id", "durability", "unique", "max_depth")
        if refused := [name for name in options if getattr(self, name)]:
            raise ValueError(f"the tasks of a group cannot have the option {refused[0]}")
        children = [self.encode_child(*arguments_of(item)) async for item in each_item("enqueue_group", items)]
        check_group(children, limit, errors)
        if any(child.secrets for child in children):
            raise ValueError(f"task {self.task.name!r}: the tasks of a group cannot have secret arguments")
        receiver.task.arguments.check_further(arguments)
        limits = self.task.limits
        listed = [
            GroupItem(
                child.data, child.key, () if limits is None else limits.uses_of(from_json(child.data), self.costs)
            )
            for child in children
        ]
        data = encode_group(self.template, self.own_queue, listed, limit=limit, errors=errors, arguments=arguments)
        return await receiver.enqueue_encoded(data, arguments)

    async def enqueue_encoded(self, data: bytes, arguments: Mapping[str, Any]) -> TaskHandle[R]:
        """Enqueue the callback of a group. data: its arguments, see `encode_group`. arguments: the further ones."""
        own, key = self.task_id, self.key
        if not (own is None or isinstance(own, str)) or callable(key):
            raise ValueError("task_id and key of the callback of a group must be texts")
        if self.unique:
            raise ValueError("the callback of a group cannot have the option unique")
        form, tenant = self._form(self.headers, {"group": True}), self.own_tenant

        async def enqueue(ids: Ids | None, *, planned: bool) -> Sequence[TaskHandle[R]]:
            message = form.message(data, key=key, task_id=own if ids is None else ids(0), tenant=tenant)
            message = self.limited(message, arguments)
            send = self.task.app.producer.send_one
            same = _always if planned else None
            return [
                await send(
                    message,
                    queue=self.own_queue,
                    delay=self.delay,
                    decode=self.task.decode,
                    durability=self.durability,
                    same=same,
                )
            ]

        if (run := enqueuing_run()) is None:
            return (await enqueue(None, planned=False))[0]
        call = partial(self.call_text, [data])
        [handle] = await enqueue_once(run, self.task.name, call, enqueue, self.handle, own_ids=own is not None)
        return handle

    async def _enqueue(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        task_id: str | None,
        same: Callable[[bytes, bytes], bool],
    ) -> TaskHandle[R]:
        """Enqueue one task. same: see `find_conflicts`."""
        key = None if callable(self.key) else self.key
        message = await self._message(args, kwargs, key, task_id)
        return await self.task.app.producer.send_one(
            message,
            queue=self.own_queue,
            delay=self.delay,
            decode=self.task.decode,
            durability=self.durability,
            same=same,
            unique=self.unique_rule,
            limit=self.depth_limit,
        )

    async def _message(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str | None, task_id: str | None
    ) -> TaskMessage:
        """Return the message of one task, within the enqueue hooks if there are any."""
        if (chain := self.task.app.enqueue_chain) is not None:
            return await self._hooked(chain, args, kwargs, key, task_id)
        arguments, secrets = self.task.arguments.encode_call(args, kwargs)
        tenant = self.own_tenant
        return self.limited(self.template.message(arguments, secrets, key=key, task_id=task_id, tenant=tenant))

    def call_text(self, arguments: Iterable[bytes]) -> bytes:
        """Return what tells a call in a handler from others of the same task."""
        key = self.key if isinstance(self.key, str) else None
        return b"\n".join([orjson.dumps([self.own_queue, key]), *arguments])

    def handle(self, task_id: str, partition: Partition) -> TaskHandle[R]:
        return self.task.app.producer.handle_at(task_id, partition, self.task.decode)

    async def enqueue_many(self, /, many: Many, **unknown: Never) -> list[TaskHandle[R]]:
        """See `Task.enqueue_many`."""
        self._refuse(unknown)
        if (run := enqueuing_run()) is None:
            return await self._enqueue_many(many, self._ids(many), None)
        listed = [item async for item in many] if isinstance(many, AsyncIterable) else list(many)
        return await self._enqueue_many_once(run, listed, self._ids(listed))

    async def _enqueue_many_once(
        self, run: Run, many: Sequence[Mapping[str, Any]], own: IdsOfItems | None
    ) -> list[TaskHandle[R]]:
        """Enqueue tasks in a handler. own: the ids that the caller has chosen."""

        async def enqueue(ids: Ids | None, *, planned: bool) -> Sequence[TaskHandle[R]]:
            chosen = own if ids is None else lambda number, _: ids(number)
            return await self._enqueue_many(many, chosen, _always if planned else None)

        def call() -> bytes:
            encode = self.task.arguments.encode_call
            return self.call_text(encode((), self._checked(item))[0] for item in many)

        if not many:
            return []
        return list(await enqueue_once(run, self.task.name, call, enqueue, self.handle, own_ids=own is not None))

    async def _enqueue_many(
        self, many: Many, ids: IdsOfItems | None, same: Callable[[bytes, bytes], bool] | None
    ) -> list[TaskHandle[R]]:
        return await self.task.app.producer.send(
            self._messages(many, ids),
            queue=self.own_queue,
            delay=self.delay,
            decode=self.task.decode,
            durability=self.durability,
            same=same,
            unique=self.unique_rule,
            limit=self.depth_limit,
        )

    def _run(self, call: Callable[[TaskCall[P, R]], Coroutine[Any, Any, T]], instead: str) -> T:
        if in_handler_thread():
            return call_in_loop(partial(call, self))
        return self.task.app.sync().call(lambda _: call(self), f"await {self.task.name}.{instead}")

    enqueue_sync = blocking(enqueue, _run)
    _enqueue_listed = blocking(enqueue_many, _run)

    def enqueue_many_sync(self, many: Iterable[Mapping[str, Any]], **unknown: Never) -> list[TaskHandle[R]]:
        """See `Task.enqueue_many_sync`."""
        return self._enqueue_listed(list(many), **unknown)  # in this thread, whose connections its iterator may use

    def enqueue_stream(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], **unknown: Never
    ) -> AsyncIterator[TaskHandle[R]]:
        """See `Task.enqueue_stream`."""
        self._refuse(unknown)
        ids = self._ids(many)
        if (run := enqueuing_run()) is not None:
            return self._stream_once(run, many, ids)
        return self.task.app.producer.send_stream(
            self._messages(many, ids),
            queue=self.own_queue,
            delay=self.delay,
            decode=self.task.decode,
            durability=self.durability,
            unique=self.unique_rule,
            limit=self.depth_limit,
        )

    async def _stream_once(self, run: Run, many: Many, ids: IdsOfItems | None) -> AsyncGenerator[TaskHandle[R]]:
        """Enqueue tasks in a handler, in batches that are recorded."""
        first, batches = 0, batched(many, BatchLimits().script)
        async with aclosing(batches):
            async for batch in batches:
                own = None if ids is None else partial(_shifted, ids, first)
                for handle in await self._enqueue_many_once(run, batch, own):
                    yield handle
                first += len(batch)

    def _refuse(self, unknown: Collection[str]) -> None:
        if unknown:
            problem = f"got an unexpected keyword argument {next(iter(unknown))!r}{self.task.arguments.hint(unknown)}"
            raise InvalidArguments(self.task.name, problem)

    def _ids(self, many: Many) -> IdsOfItems | None:
        """Return the function of the ids that the caller has chosen for many tasks. Raises `ValueError`."""
        chosen = self.task_id
        if chosen is None:
            return None
        if isinstance(chosen, str):
            raise ValueError(
                "task_id of many tasks must be a list of ids or a function of the arguments, got one id: "
                f"{self.task.name}.options(task_id=lambda args: ...).enqueue_many(...)"
            )
        if callable(chosen):
            return lambda _, item: chosen(item)
        given = len(many) if isinstance(many, Sized) else None
        if given is not None and given != len(chosen):
            raise ValueError(f"task_id must have an id for each of {given} sets of arguments, got {len(chosen)} ids")

        def of(number: int, _: Mapping[str, Any]) -> str:
            if number >= len(chosen):
                raise ValueError(f"task_id must have an id for each set of arguments, got {len(chosen)} ids for more")
            return chosen[number]

        return of

    def _messages(self, many: Many, ids: IdsOfItems | None) -> Iterable[TaskMessage] | AsyncIterable[TaskMessage]:
        """Return the messages of many tasks. ids: None for new ones."""
        form, encode, key, limits = self.template, self.task.arguments.encode_call, self.key, self.task.limits
        if (chain := self.task.app.enqueue_chain) is not None:
            return self._all_hooked(chain, many, ids)
        numbers, tenant = count(), self.own_tenant

        def build(item: Mapping[str, Any]) -> TaskMessage:
            args = self._checked(item)
            task_id = None if ids is None else ids(next(numbers), args)
            message = form.message(*encode((), args), key=key_of(key, args), task_id=task_id, tenant=tenant)
            return message if limits is None else limits.limited(message, self.costs)

        return map_items(build, many)

    def _checked(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an item of many. Raises `InvalidArguments` if it has no arguments by name."""
        given: object = item
        if type(given) is not dict and not isinstance(given, Mapping):  # the second one takes longer
            problem = f"each item must be a dict of arguments by name, got {given!r}"
            raise InvalidArguments(self.task.name, problem)
        return item

    async def _all_hooked(self, chain: Chain, many: Many, ids: IdsOfItems | None) -> AsyncIterator[TaskMessage]:
        numbers = count()

        async def build(item: Mapping[str, Any]) -> TaskMessage:
            args = self._checked(item)
            task_id = None if ids is None else ids(next(numbers), args)
            return await self._hooked(chain, (), args, key_of(self.key, args), task_id)

        if isinstance(many, AsyncIterable):
            async for item in many:
                yield await build(item)
        else:
            for item in many:
                yield await build(item)

    async def _hooked(
        self, chain: Chain, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str | None, task_id: str | None
    ) -> TaskMessage:
        """Build one message within the enqueue hooks, which may add headers."""
        task, limits, tenant = self.task, self.limits, self.own_tenant
        options: dict[str, Any] = {"key": key, "task_id": task_id, "tenant": self.tenant, "durability": self.durability}
        options |= {"delay": seconds_until(self.delay, "delay") or None, "tags": self.tags or None}
        options |= {
            "costs": self.costs,
            "timeout": limits.timeout,
            "max_attempts": limits.max_attempts,
            "result_ttl": limits.result_ttl,
        }
        if self.lane is not None:
            options |= {"idle": True} if self.lane == IDLE else {"priority": self.lane}
        call = EnqueueCall(
            task=task.name,
            arguments=task.arguments.by_name(args, kwargs),
            queue=self.own_queue,
            options={name: value for name, value in options.items() if value is not None},
            headers=dict(self.headers or {}),
        )

        def build() -> TaskMessage:
            arguments, secrets = task.arguments.encode_call(args, kwargs)
            template = self.template
            if call.headers:
                template = self._form(call.headers, self.inherited)
            return self.limited(template.message(arguments, secrets, key=key, task_id=task_id, tenant=tenant))

        return await hooked_message(chain, call, build)

    @property
    def own_tenant(self) -> str | None:
        """The tenant of the call, else that of the task whose handler makes it, else that of the app.

        Raises `InvalidArguments` for another tenant than that of the task or the app.
        """
        return chosen_tenant(self.task, self.tenant)

    @property
    def own_queue(self) -> str:
        """The queue of the call, else that of the task."""
        return self.queue or self.task.queue


def chosen_tenant(task: Task[..., Any], tenant: str | None) -> str | None:
    """Return the tenant of a call. See `TaskCall.own_tenant`."""
    run, apps = enqueuing_run(), task.app.tenant
    around = apps if run is None else run.envelope.tenant or apps
    if tenant is not None and around not in (None, tenant):
        raise InvalidArguments(task.name, _other_tenant(tenant, around))
    return tenant or around


def _other_tenant(tenant: str | None, around: str | None) -> str:
    return f"tenant must be that of the task that enqueues it, {around!r}, got {tenant!r}"


async def hooked_message(chain: Chain, call: EnqueueCall, build: Callable[[], TaskMessage]) -> TaskMessage:
    """Return the message that was built within the enqueue hooks."""
    built: list[TaskMessage] = []

    async def prepare() -> str:
        built.append(build())
        return built[0].id

    await chain(call, prepare)
    return built[0]

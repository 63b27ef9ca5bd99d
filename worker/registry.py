"""Tasks and their registry: a handler, its name, how it is retried, and how it is called from elsewhere."""

from __future__ import annotations

import inspect
import math
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, NotRequired, ParamSpec, Protocol, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import to_json
from typing_extensions import TypedDict

from ..deadletter import Retry
from ..queues import (
    LONGEST,
    EnvelopeTemplate,
    Key,
    Options,
    Producer,
    Replicated,
    SecretPaths,
    TaskHandle,
    TaskMessage,
    contains_mask,
    has_secret,
    key_of,
    map_items,
    secret_values,
    unwrap_secrets,
)
from .durable import Chain, Codec, Context, Durability, EnqueueCall
from .errors import InvalidArguments, TaskDefinitionError

__all__ = ["Handler", "Registry", "Task", "TaskCall", "build_message", "hooked_message"]

P = ParamSpec("P")
R = TypeVar("R")

_NO_WISH = Options()

Handler = Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]


class TaskOwner(Protocol):
    """What a task needs of its app in order to be enqueued. enqueue_chain: None without middleware for `enqueue`."""

    @property
    def producer(self) -> Producer: ...

    @property
    def enqueue_chain(self) -> Chain | None: ...


@dataclass(frozen=True, slots=True)
class Task(Generic[P, R]):
    """A registered handler. timeout, idle_timeout, result_ttl: seconds, None for the worker's setting."""

    name: str
    handler: Handler[P, R]
    queue: str
    retry: Retry
    timeout: float | None
    idle_timeout: float | None
    durability: Durability
    result_ttl: float | None
    app: TaskOwner = field(repr=False)
    arguments: Arguments = field(repr=False)
    result: Codec = field(repr=False)
    template: EnvelopeTemplate = field(repr=False)

    async def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the handler as a plain function, within another task's run or in a test."""
        return await self.handler(ctx, *args, **kwargs)

    @property
    def decode(self) -> Callable[[bytes], R]:
        """Reads the task's results."""
        return self.result.decode

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue the task; once this returns, it is never lost.

        Raises `InvalidArguments` before anything is sent, `PayloadTooLarge`, `Unavailable`.
        """
        return await TaskCall(self, self.template).enqueue(*args, **kwargs)

    async def enqueue_many(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> list[TaskHandle[R]]:
        """Enqueue one task per set of arguments (by name); all are checked before any is sent."""
        return await TaskCall(self, self.template).enqueue_many(many)

    def enqueue_stream(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[TaskHandle[R]]:
        """Enqueue one task per set of arguments as they come, in constant memory: `async for handle in ...`.

        Each handle is of a task that is stored. Where a set of arguments is refused, those before it may be stored.
        """
        return TaskCall(self, self.template).enqueue_stream(many)

    def options(
        self,
        *,
        delay: float = 0.0,
        queue: str | None = None,
        key: Key = None,
        task_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        result_ttl: float | None = None,
        durability: Replicated | None = None,
    ) -> TaskCall[P, R]:
        """The task with options for one call: `await audit.options(delay=60).enqueue("src")`.

        delay: seconds until it may run. key: tasks of one key are taken up in the order in which they were enqueued,
        see docs/partitions.md; where many are enqueued, it may be a function of each one's arguments. task_id: an id
        of the caller's own, which makes enqueuing idempotent. durability: "replicated" waits until replicas have the
        task, and raises `NotReplicated` where too few do in time, see docs/durability.md. The others take the place of
        what the task was defined with.
        """
        wish = Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl)
        form = EnvelopeTemplate(self.name, headers, wish) if headers or wish != _NO_WISH else self.template
        return TaskCall(self, form, delay, queue, key, task_id, durability, headers, wish)


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[P, R]):
    """A task with options, ready to be enqueued."""

    task: Task[P, R]
    template: EnvelopeTemplate = field(repr=False)
    delay: float = 0.0
    queue: str | None = None
    key: Key = None
    task_id: str | None = None
    durability: Replicated | None = None
    headers: Mapping[str, str] | None = None
    limits: Options = _NO_WISH

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """See `Task.enqueue`."""
        if callable(self.key):
            raise ValueError("a key that is a function is for enqueue_many and enqueue_stream: give one task its text")
        chain = self.task.app.enqueue_chain
        if chain is None:
            arguments, secrets = self.task.arguments.encode_call(args, kwargs)
            message = self.template.message(arguments, secrets, key=self.key, task_id=self.task_id)
        else:
            message = await self._hooked(chain, args, kwargs, self.key)
        return await self.task.app.producer.send_one(
            message, queue=self._queue, delay=self.delay, decode=self.task.decode, durability=self.durability
        )

    async def enqueue_many(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> list[TaskHandle[R]]:
        """See `Task.enqueue_many`."""
        messages, producer = self._messages(many), self.task.app.producer
        return await producer.send(
            messages, queue=self._queue, delay=self.delay, decode=self.task.decode, durability=self.durability
        )

    def enqueue_stream(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[TaskHandle[R]]:
        """See `Task.enqueue_stream`."""
        messages, producer = self._messages(many), self.task.app.producer
        return producer.send_stream(
            messages, queue=self._queue, delay=self.delay, decode=self.task.decode, durability=self.durability
        )

    def _messages(
        self, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> Iterable[TaskMessage] | AsyncIterable[TaskMessage]:
        if self.task_id is not None:
            raise ValueError("one task_id cannot name many tasks")
        form, encode, key = self.template, self.task.arguments.encode_call, self.key
        if (chain := self.task.app.enqueue_chain) is not None:
            return self._all_hooked(chain, many)
        return map_items(lambda args: form.message(*encode((), args), key=key_of(key, args)), many)

    async def _all_hooked(
        self, chain: Chain, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncIterator[TaskMessage]:
        if isinstance(many, AsyncIterable):
            async for arguments in many:
                yield await self._hooked(chain, (), arguments, key_of(self.key, arguments))
        else:
            for arguments in many:
                yield await self._hooked(chain, (), arguments, key_of(self.key, arguments))

    async def _hooked(
        self, chain: Chain, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str | None
    ) -> TaskMessage:
        """Build one message within the enqueue hooks, which may add headers."""
        task, limits = self.task, self.limits
        options = {"delay": self.delay or None, "key": key, "task_id": self.task_id, "durability": self.durability}
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
            template = EnvelopeTemplate(task.name, call.headers, limits) if call.headers else self.template
            return template.message(arguments, secrets, key=key, task_id=self.task_id)

        return await hooked_message(chain, call, build)

    @property
    def _queue(self) -> str:
        return self.queue or self.task.queue


async def hooked_message(chain: Chain, call: EnqueueCall, build: Callable[[], TaskMessage]) -> TaskMessage:
    """Return the message that `build_message`, the innermost of the enqueue hooks, built."""
    built: list[TaskMessage] = []
    await chain(call, build, built)
    return built[0]


async def build_message(_call: EnqueueCall, build: Callable[[], TaskMessage], built: list[TaskMessage]) -> str:
    """Build a message; the innermost of the enqueue hooks."""
    built.append(build())
    return built[0].id


class Arguments:
    """The arguments of one handler: bound by its signature, validated and serialised by their annotations."""

    def __init__(self, name: str, handler: Callable[..., Any]) -> None:
        self._name = name
        parameters = list(inspect.signature(handler).parameters.values())
        if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise TaskDefinitionError(f"task {name!r}: its first parameter must be the Context: async def f(ctx, ...)")
        for parameter in parameters[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TaskDefinitionError(
                    f"task {name!r}: parameter {str(parameter)!r} cannot travel by name; give every argument a name"
                )
        self._signature = inspect.Signature(parameters[1:])
        self._in_order = [one.name for one in parameters[1:] if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._adapter = _argument_adapter(name, handler, parameters[1:])
        self._validate = self._adapter.validator.validate_python
        self._to_json = self._adapter.serializer.to_json
        self.has_secrets = has_secret(self._adapter.core_schema)

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, SecretPaths]:
        """Arguments of a call as a JSON object, and where secrets are in it. Raises `InvalidArguments`."""
        try:
            checked = self._validate(self._named(args, kwargs))
            data: bytes = self._to_json(checked)
            if self.has_secrets or contains_mask(data):
                whole, secrets = unwrap_secrets(checked, self._adapter.dump_python(checked, mode="json"))
                return to_json(whole, inf_nan_mode="null"), secrets
            return data, ()
        except ValidationError as error:
            raise InvalidArguments(self._name, self._misfit(args, kwargs) or _problem(error)) from None
        except (TypeError, ValueError) as error:
            raise InvalidArguments(self._name, str(error)) from None

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, not validated. Raises `InvalidArguments`."""
        try:
            return self._named(args, kwargs)
        except TypeError as error:
            raise InvalidArguments(self._name, str(error)) from None

    def secret_values(self, arguments: Mapping[str, Any]) -> list[str]:
        """The secrets among decoded arguments, as text."""
        whole, secrets = unwrap_secrets(arguments, self._adapter.dump_python(dict(arguments), mode="json"))
        return secret_values(to_json(whole, inf_nan_mode="null"), secrets)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name. `TypeError` for too many, or one given twice."""
        named = dict(zip(self._in_order, args, strict=False))
        if len(args) > len(self._in_order) or not named.keys().isdisjoint(kwargs):
            self._signature.bind(*args, **kwargs)
        named.update(kwargs)
        return named

    def _misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """What Python says of a call whose arguments are too many, too few, or of other names."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return None

    def decode(self, data: bytes) -> dict[str, Any]:
        """Arguments from a message, by name. Raises `InvalidArguments`."""
        try:
            decoded: dict[str, Any] = self._adapter.validate_json(data)
        except (ValidationError, RecursionError) as error:
            problem = _problem(error) if isinstance(error, ValidationError) else "nested too deeply"
            raise InvalidArguments(self._name, problem) from None
        return decoded


def _argument_adapter(
    name: str, handler: Callable[..., Any], parameters: Sequence[inspect.Parameter]
) -> TypeAdapter[Any]:
    hints = _hints(name, handler)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        declared = hints.get(parameter.name, Any)
        fields[parameter.name] = declared if parameter.default is parameter.empty else NotRequired[declared]
    shape = TypedDict(f"arguments of {name}", fields)  # type: ignore[misc]  # its fields are the handler's parameters
    shape.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    try:
        return TypeAdapter(shape)
    except PydanticUserError as error:
        raise TaskDefinitionError(f"task {name!r}: {error.message}") from None


def _hints(name: str, handler: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(handler, include_extras=True)
    except (NameError, TypeError) as error:
        raise TaskDefinitionError(
            f"task {name!r}: an annotation cannot be resolved: {error}; import the type where the module is loaded, "
            "not only under TYPE_CHECKING"
        ) from None


def _problem(error: ValidationError) -> str:
    found = error.errors(include_url=False)
    parts = []
    for one in found[:3]:
        where = ".".join(str(part) for part in one["loc"])
        parts.append(f"{where}: {one['msg']}" if where else one["msg"])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return "; ".join(parts) + more


class Registry(Mapping[str, Task[Any, Any]]):
    """The tasks of one app, by name."""

    def __init__(self, app: TaskOwner) -> None:
        self._app = app
        self._tasks: dict[str, Task[Any, Any]] = {}

    def __getitem__(self, name: str) -> Task[Any, Any]:
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(
        self,
        handler: Handler[P, R],
        *,
        name: str | None,
        queue: str,
        retry: Retry,
        timeout: float | None,
        idle_timeout: float | None,
        durability: Durability,
        result_ttl: float | None,
    ) -> Task[P, R]:
        """Register a handler. Raises `TaskDefinitionError` for one that cannot be a task."""
        name = name or getattr(handler, "__name__", "")
        if not name or name == "<lambda>":
            raise TaskDefinitionError(f"{handler!r} has no name: pass name=...")
        if not inspect.iscoroutinefunction(handler):
            raise TaskDefinitionError(
                f"task {name!r} must be an 'async def': put blocking work into a step, which runs it in a thread: "
                f"await ctx.step('work', {name}, ...)"
            )
        if name in self._tasks:
            raise TaskDefinitionError(f"task {name!r} is defined twice: pass name=... to one of them")
        idle = None if idle_timeout == math.inf else idle_timeout  # infinite: no such limit
        for what, seconds in (("timeout", timeout), ("idle_timeout", idle), ("result_ttl", result_ttl)):
            if seconds is not None and not 0 < seconds <= LONGEST:
                raise TaskDefinitionError(
                    f"task {name!r}: {what} must be more than 0 seconds and at most {LONGEST:.0e}, not {seconds}"
                )
        try:
            result = Codec(_hints(name, handler).get("return", Any))
        except PydanticUserError as error:
            raise TaskDefinitionError(f"task {name!r}: its result: {error.message}") from None
        task = Task(
            name=name,
            handler=handler,
            queue=queue,
            retry=retry,
            timeout=timeout,
            idle_timeout=idle_timeout,
            durability=durability,
            result_ttl=result_ttl,
            app=self._app,
            arguments=Arguments(name, handler),
            result=result,
            template=EnvelopeTemplate(name),
        )
        self._tasks[name] = task
        return task

    @property
    def queues(self) -> list[str]:
        """The queues that the tasks are on, by name."""
        return sorted({task.queue for task in self._tasks.values()})

"""The synchronous context: the first argument of a handler that is a plain function."""

from __future__ import annotations

import functools
import inspect
from asyncio import CancelledError
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Token
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from .context import Context, TaskInfo
from .durable.joining import DEFAULT_LIMIT, Errors, Spawnable
from .durable.journal.step_record import PLANNED
from .durable.step_caller import StepCaller
from .durable.steps.current import check_name
from .durable.sync.blocking import Blocking, blocking
from .durable.sync.session import ThreadSession, call_in_loop, current_session
from .errors import RunStopped, StepDefinitionError, TaskDefinitionError

if TYPE_CHECKING:
    from ..queues.limits.definition import Limit
    from .durable.first import First
    from .durable.limiting import Use
    from .durable.saga import Saga
    from .sync_parts import (
        SyncArtifacts,
        SyncMemory,
        SyncResumeInfo,
        SyncSharedWorkspace,
        SyncStore,
        SyncValues,
        SyncWait,
        SyncWorkspace,
    )

P = ParamSpec("P")
R = TypeVar("R")


def _reading(
    method: Callable[Concatenate[StepCaller, P], Awaitable[R]],
) -> Callable[Concatenate[SyncStepCaller, P], R]:
    """Return the synchronous form of a read of the inbox, or of a wait."""

    @functools.wraps(method)
    def read(self: SyncStepCaller, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = call_in_loop(functools.partial(getattr(self._caller, method.__name__), *args, **kwargs))
        return result

    return read


class SyncStepCaller:
    """Calls steps with the same options: a `SyncContext`, or the result of `ctx.options(...)`."""

    def __init__(self, caller: StepCaller) -> None:
        self._caller = caller

    @overload
    def step(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def step(self, name: str, fn: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` once and record its result; on a resumed run, return the record.

        A plain `fn` runs in the handler's thread, or in a thread of its own if the step has a time-out. An async `fn`
        runs in the event loop. Arguments and errors: see `Context.step`.
        """
        return call_in_loop(lambda: self._caller.step(name, fn, *args, **kwargs))

    @overload
    def tool(self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def tool(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def tool(self, name: str, fn: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        """Call a tool: a step that is logged with its arguments, its result and the reasoning. See `step`."""
        return call_in_loop(lambda: self._caller.tool(name, fn, *args, **kwargs))

    inbox = _reading(StepCaller.inbox)
    ask = _reading(StepCaller.ask)
    wait_for = _reading(StepCaller.wait_for)

    def open_wait(self, name: str, type: Any = Any, **options: Any) -> SyncWait:
        """Open a wait, and return it before it has its answer, which is `wait.result()`. See `Context.open_wait`."""
        from .sync_parts import SyncWait

        return SyncWait(call_in_loop(functools.partial(self._caller.open_wait, name, type, **options)))


def _options(
    method: Callable[Concatenate[Context, P], StepCaller],
) -> Callable[Concatenate[SyncContext, P], SyncStepCaller]:
    @functools.wraps(method)
    def options(self: SyncContext, /, *args: P.args, **kwargs: P.kwargs) -> SyncStepCaller:
        return SyncStepCaller(method(self._wrapped, *args, **kwargs))

    return options


class SyncSaga:
    """Steps of a `with ctx.saga()` block; see `Saga`."""

    def __init__(self, saga: Saga) -> None:
        self._saga = saga

    def step(
        self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Callable[[Any], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run a step that `undo` undoes if the block fails. See `Saga.step`."""
        return call_in_loop(lambda: self._saga.step(name, fn, *args, undo=undo, **kwargs))


class SyncContext(TaskInfo, SyncStepCaller, Blocking[Context]):
    """The running task, as a handler sees it that is a plain function: `Context` without `await`.

    It is used in the handler's thread. After the task was cancelled, timed out or released, or its lease was lost, each
    call raises `asyncio.CancelledError`. A call that makes the task wait raises `RunStopped`, as each later one does.
    `except Exception` catches neither.
    """

    def __init__(self, ctx: Context) -> None:
        Blocking.__init__(self, ctx)
        SyncStepCaller.__init__(self, ctx)
        self._run, self._resources = ctx._run, ctx._resources

    @staticmethod
    def current() -> SyncContext:
        """Return the context of the handler in whose thread this is called. Raises `StepOutsideTask`."""
        context: SyncContext = current_session().context
        return context

    @property
    def resumed(self) -> bool:
        """Whether earlier runs left recorded steps."""
        return self._wrapped.resumed

    @property
    def memory(self) -> SyncMemory:
        """Long-term memories, which outlive the task."""
        from .sync_parts import SyncMemory

        return SyncMemory(self._wrapped.memory)

    @property
    def artifacts(self) -> SyncArtifacts:
        """Files and other bytes that the task produces, stored outside Redis."""
        from .sync_parts import SyncArtifacts

        return SyncArtifacts(self._wrapped.artifacts)

    @property
    def values(self) -> SyncValues:
        """Named values that pages read and write while the task runs."""
        from .sync_parts import SyncValues

        return SyncValues(self._wrapped.values)

    @property
    def workspace(self) -> SyncWorkspace:
        """A folder whose files are saved with each step and restored with the task."""
        from .sync_parts import SyncWorkspace

        return SyncWorkspace(self._wrapped.workspace)

    def shared_workspace(self, name: str) -> SyncSharedWorkspace:
        """Return files that several tasks change, with compare-and-set."""
        from .sync_parts import SyncSharedWorkspace

        return SyncSharedWorkspace(self._wrapped.shared_workspace(name))

    def store(self, *parts: str | Sequence[str]) -> SyncStore:
        """Return a namespace of the key-value store, by the parts of its name."""
        from .sync_parts import SyncStore

        return SyncStore(self._wrapped.store(*parts))

    def resume_info(self) -> SyncResumeInfo:
        """Return what to read before resuming, in this order: handoff, messages, state; and the history on demand."""
        from .sync_parts import SyncResumeInfo

        return SyncResumeInfo(self._wrapped.resume_info())

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Return a scope of steps: `with ctx.scope("page-3"): ...` puts `page-3/` before their keys."""
        keys = self._run.keys

        async def enter() -> Token[str]:
            return keys.enter_scope(name)

        async def leave() -> None:
            keys.leave_scope(token)

        async def end() -> None:
            from .durable.planning import note_end

            note_end(self._run, keys.scope.removesuffix("/"))

        check_name("scope", name)
        token = call_in_loop(enter)  # in the asyncio task that calls the steps
        try:
            yield
            if PLANNED in self._run.history.saved:
                call_in_loop(end)
        finally:
            call_in_loop(leave)

    options = _options(Context.options)
    progress = blocking(Context.progress)
    plan = blocking(Context.plan)
    emit = blocking(Context.emit)
    capacity = blocking(Context.capacity)
    spend = blocking(Context.spend)
    budget = blocking(Context.budget)
    checkpoint = blocking(Context.checkpoint)
    decide = blocking(Context.decide)
    discover = blocking(Context.discover)
    promise = blocking(Context.promise)
    keep = blocking(Context.keep)
    add_message = blocking(Context.add_message)
    record_event = blocking(Context.record_event)
    recall_step = blocking(Context.recall_step)
    continue_as = blocking(Context.continue_as)
    send = blocking(Context.send)
    ended_task = blocking(Context.ended_task)
    forget = blocking(Context.forget)
    sleep = blocking(Context.sleep)
    sleep_until = blocking(Context.sleep_until)
    spawn = blocking(Context.spawn)
    join = blocking(Context.join)
    gather = blocking(Context.gather)

    def as_completed(
        self,
        task: Spawnable[..., R],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        limit: int | None = DEFAULT_LIMIT,
        errors: Errors = "raise",
    ) -> Iterator[R]:
        """Spawn a child for each item, and yield the results as they arrive. See `Context.as_completed`."""
        results = self._wrapped.as_completed(task, items, limit=limit, errors=errors)

        async def following() -> tuple[bool, Any]:
            try:
                return True, await anext(results)
            except StopAsyncIteration:
                return False, None

        while (found := call_in_loop(following))[0]:
            yield found[1]

    def first(self, /, **branches: Callable[[], Any]) -> First[Any]:
        """Return the name and the value of the branch that ends first, and cancel the others. See `Context.first`.

        Args:
            branches: functions without arguments, such as `lambda: ctx.sleep(60)`. Each is called in a thread of its
                own. A branch that has lost is cut off in its next call of the context.
        """
        session = current_session()
        for name, branch in branches.items():
            if not callable(branch):
                raise StepDefinitionError(
                    f"branch {name!r} must be a function, such as lambda: ctx.sleep(60), got {branch!r}"
                )
        found: First[Any] = call_in_loop(
            lambda: self._wrapped.first(**{name: session.branch(branch) for name, branch in branches.items()})
        )
        return found

    @contextmanager
    def limit(self, limit: str | Limit, *, cost: int | None = None, key: Any = None) -> Iterator[Use]:
        """Return a block that uses a limit: `with ctx.limit("openai", cost=1200) as use: ...`. See `Context.limit`."""
        block = self._wrapped.limit(limit, cost=cost, key=key)
        use = call_in_loop(block.__aenter__)
        try:
            yield use
        except BaseException as error:
            with suppress(RunStopped, CancelledError):  # then the end of the run releases the token
                call_in_loop(functools.partial(block.__aexit__, type(error), error, None))
            raise
        call_in_loop(functools.partial(block.__aexit__, None, None, None))

    @contextmanager
    def saga(self) -> Iterator[SyncSaga]:
        """Return a block of steps that are undone together if it fails: `with ctx.saga() as saga: ...`."""
        saga = self._wrapped.saga()
        try:
            yield SyncSaga(saga)
        except Exception as error:
            if saga.is_failure(error):
                call_in_loop(functools.partial(saga.undo, error))
            raise


def call_in_thread(
    name: str, handler: Callable[Concatenate[SyncContext, P], R]
) -> Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]:
    """Return a plain function as an async handler, which calls it in a thread. name: that of the task."""

    @functools.wraps(handler)
    async def call(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        run, sync = ctx._run, SyncContext(ctx)
        session = ThreadSession(run.threads, run.keys, sync)
        value: R = await session.run_handler(functools.partial(handler, sync, *args, **kwargs))
        if inspect.iscoroutine(value):
            value.close()
            raise TaskDefinitionError(f"task {name!r} is a plain function that returned a coroutine: use 'async def'")
        return value

    return call

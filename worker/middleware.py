"""Middleware: hooks around enqueue, run, step and settle, given as `App(middleware=[...])`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..queues.records import State
from .durable.steps.current import StepCall

if TYPE_CHECKING:
    from .context import Context
    from .durable.journal.handoff.document import Handoff

CallNext = Callable[[], Awaitable[Any]]
Chain = Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class EnqueueCall:
    """A task that is about to be enqueued.

    Attributes:
        task: name of the task.
        arguments: arguments by name, as the caller gave them; not validated yet.
        queue: the queue that the task goes to.
        options: options of this call that differ from the defaults, such as `delay` or `task_id`.
        headers: headers of the task; a middleware may add some before it calls `call_next()`.
    """

    task: str
    arguments: Mapping[str, Any]
    queue: str
    options: Mapping[str, Any]
    headers: dict[str, str]


@dataclass(slots=True)
class Settlement:
    """The outcome of a run, which is about to be stored.

    Attributes:
        state: state of the task once the outcome is stored; `queued`, `scheduled` and `waiting` tasks run again.
        stop: why the run stopped, such as "completed", "failed", "timed_out" or "released".
        attempt: number of the attempt, from 1.
        error: the exception that led to the outcome, None for a result.
        reason: reason of the dead letter if the task became one.
        delay: seconds until the next run if one is scheduled.
        handoff: the handoff document that the run left, if it left one.
    """

    state: State
    stop: str
    attempt: int
    error: BaseException | None = None
    reason: str | None = None
    delay: float | None = None
    handoff: Handoff | None = field(default=None, repr=False)


class Middleware:
    """Base class of middleware. A hook that a subclass does not override costs nothing.

    Each hook calls `await call_next()` exactly once, unless stated otherwise, and returns what it returned.
    """

    async def enqueue(self, call: EnqueueCall, call_next: CallNext) -> str:
        """Wrap the preparation of one task, which is stored after all hooks have returned; returns the task's id.

        For a message to a session, `call_next()` stores it, and returns the id of its turn's task.
        """
        task_id: str = await call_next()
        return task_id

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        """Wrap one call of the handler; returns the task's result, and what it raises counts as the handler's error."""
        return await call_next()

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        """Wrap one step, its tries and its record; returns what the handler gets as the step's result."""
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        """Wrap the storing of the outcome; what it raises before `call_next()` leaves the task to the lease."""
        await call_next()


async def enqueue_innermost(_call: EnqueueCall, prepare: CallNext) -> str:
    """Prepare a task, and return its id; the innermost of the enqueue hooks."""
    task_id: str = await prepare()
    return task_id


class _Next:
    """`call_next` of one hook in one call: runs the rest of the chain, once."""

    __slots__ = ("_args", "_hook", "_inner", "called")

    def __init__(self, hook: Callable[..., Any], inner: Chain, args: tuple[Any, ...]) -> None:
        self._hook = hook
        self._inner = inner
        self._args = args
        self.called = False

    def __call__(self) -> Awaitable[Any]:
        if self.called:
            raise RuntimeError(f"{self._hook.__qualname__} must call call_next() once, got a second call")
        self.called = True
        return self._inner(*self._args)


def build_chain(
    middleware: Sequence[Middleware],
    hook: Literal["enqueue", "run", "step", "settle"],
    innermost: Chain,
    *,
    shown: int,
    must_call: bool = False,
) -> Chain | None:
    """Compose one hook of all middleware, the first outermost; None where no middleware overrides the hook.

    Args:
        middleware: the middleware, the outermost first.
        hook: name of the hook.
        innermost: what the last middleware wraps. The chain is called with its arguments.
        shown: how many of these arguments the hooks get, before `call_next`.
        must_call: whether a hook that returns without `call_next()` is an error.
    """
    chain = innermost
    for one in reversed(middleware):
        if getattr(type(one), hook) is not getattr(Middleware, hook):
            chain = _link(getattr(one, hook), chain, shown, must_call=must_call)
    return None if chain is innermost else chain


def _link(hook: Callable[..., Awaitable[Any]], inner: Chain, shown: int, *, must_call: bool) -> Chain:
    async def call(*args: Any) -> Any:
        call_next = _Next(hook, inner, args)
        result = await hook(*args[:shown], call_next)
        if must_call and not call_next.called:
            raise RuntimeError(f"{hook.__qualname__} must call call_next(), got none")
        return result

    return call

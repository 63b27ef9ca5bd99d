"""Calls of steps and tools, reads of the inbox, and waits: typed methods of a context, and of `ctx.options(...)`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from ...queues.durations import Moment
from ...queues.handle import TaskHandle
from ...queues.inbox import InboxMessage
from ..errors import StepDefinitionError
from .joining import followed
from .messaging import receive
from .run import Run
from .steps.current import CURRENT_RUN, StepOptions
from .steps.execution import run_step
from .steps.tool_calls import CallReasons, LoggedCall
from .waiting import REQUIRED

if TYPE_CHECKING:
    from .answers import Wait

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D")


class StepCaller:
    """Calls steps with the same options: a context, or the result of `ctx.options(...)`."""

    def __init__(self, run: Run, options: StepOptions) -> None:
        self._run = run
        self._options = options

    @overload
    def step(
        self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def step(self, name: str, fn: Any = None, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Run `fn(*args, **kwargs)` once and record its result; on a resumed run, return the record.

        Args:
            name: name of the step within its scope; the second use of a name is `name#2`.
            fn: async function, or a plain one, which runs in a thread that cannot be stopped from outside. Its result
                must be JSON data, or of the type that it declares.
            args, kwargs: all of them are arguments of `fn`. Options of the step are given to `ctx.options(...)`.

        Raises:
            StepDefinitionError, StepMismatch, StepTimeout, StepInDoubt, StepOutsideTask: see there.
            UnserialisableResult, PayloadTooLarge: the result cannot be recorded.
            LeaseLost: another worker runs the task.
            Exception: what `fn` raises.
        """
        options = self._options
        if options.reasoning or options.call is not None:
            raise StepDefinitionError(f"reasoning and call must be used with tool(), got step {name!r}")
        return run_step(self._run, name, fn, args, kwargs, options, None, _caller())

    @overload
    def tool(
        self, name: str, fn: Callable[P, Awaitable[TaskHandle[R]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def tool(
        self, name: str, fn: Callable[P, TaskHandle[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def tool(
        self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def tool(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def tool(self, name: str, fn: Any = None, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a tool: a step that is logged with its arguments, its result and the reasoning. See `step`.

        If `fn` returns the handle of a task, and declares it (`-> TaskHandle[str]`), the handle is the result of the
        step, and the call returns the result of the task: the handler is parked until then.
        """
        options = self._options
        if options.reasoning and options.call is not None:
            CallReasons.add(self._run, options.call, options.reasoning)
        tool = LoggedCall(name, fn, args, kwargs, options)
        call = run_step(self._run, name, fn, args, kwargs, options, tool, _caller())
        return followed(call if self._run.watch is None else _watched(self._run, call))

    # messages, see docs/how-to/messages.md

    async def inbox(
        self,
        wait: Moment | None = None,
        *,
        limit: int | None = None,
        sender: str | None = None,
        why: str = "",
    ) -> list[InboxMessage]:
        """Return the unread messages of this task, in order. Recorded once, like a step.

        Args:
            wait: seconds or a timedelta to wait for a message if the inbox is empty, or a datetime until which to
                wait; `math.inf` for ever. The task is parked, without a worker or a lease, and a message wakes it; `[]`
                if the time passes first.
            limit: the largest number of messages.
            sender: only messages of this sender; others stay unread.
            why: reason of the wait, for operators. To ask a question, use `ask` or `wait_for`.
        """
        return await receive(self._run, wait=wait, limit=limit, sender=sender, why=why, options=self._options)

    # answers, see docs/how-to/approvals.md

    @overload
    async def wait_for(
        self,
        name: str,
        type: type[T],
        *,
        timeout: Moment | None = None,
        default: D = REQUIRED,
        who: str = "",
        why: str = "",
        shows: Any = None,
        token: str | None = None,
    ) -> T | D: ...
    @overload
    async def wait_for(
        self,
        name: str,
        type: Any = Any,
        *,
        timeout: Moment | None = None,
        default: Any = REQUIRED,
        who: str = "",
        why: str = "",
        shows: Any = None,
        token: str | None = None,
    ) -> Any: ...
    async def wait_for(
        self,
        name: str,
        type: Any = Any,
        *,
        timeout: Moment | None = None,
        default: Any = REQUIRED,
        who: str = "",
        why: str = "",
        shows: Any = None,
        token: str | None = None,
    ) -> Any:
        """Wait for an answer to this name, and return it in its type. Recorded once, like a step.

        The task is parked meanwhile, without a worker or a lease. An answer that came before the first wait of its name
        is kept for it, unless that has `shows` or `token`; a late or a second one is refused.

        Args:
            name: of the wait: 1 to 64 letters, digits, `.`, `_` or `-`. The second wait of a name is `name#2`.
            type: of the answer, by which its sender's JSON data is checked, and again here.
            timeout: seconds or a timedelta, or a datetime until which to wait; None for ever.
            default: what a time-out returns; without one it raises.
            who: person or group that is asked.
            why: reason, or the question.
            shows: what people see before they answer, as JSON data or a model. If a later run shows something else, an
                answer to the former is void.
            token: name of the answer in this deployment, such as `order:17`: `app.answer("order:17", ...)`.

        Raises:
            WaitTimedOut: the time has passed, and there is no default.
            TokenTaken: another open wait has the token.
            StepMismatch: an answer is recorded here that another person gave, or to something else than is shown.
            StepDefinitionError, PayloadTooLarge: an argument is not valid, or too large.
        """
        from .answers import open_wait

        given: dict[str, Any] = {"timeout": timeout, "default": default, "who": who, "why": why}
        return await (await open_wait(self._run, name, type, self._options, **given, shows=shows, token=token))

    async def open_wait(
        self,
        name: str,
        type: Any = Any,
        *,
        timeout: Moment | None = None,
        default: Any = REQUIRED,
        who: str = "",
        why: str = "",
        shows: Any = None,
        token: str | None = None,
    ) -> Wait[Any]:
        """Open a wait, and return it before it has its answer: `await wait` returns that. See `wait_for`.

        So people are notified after they can answer: `wait = await ctx.open_wait(...)`, then a step that sends them
        `wait.id` or the token, then `await wait`.
        """
        from .answers import open_wait

        given: dict[str, Any] = {"timeout": timeout, "default": default, "who": who, "why": why}
        return await open_wait(self._run, name, type, self._options, **given, shows=shows, token=token)

    async def ask(
        self,
        who: str,
        question: str,
        type: Any = str,
        *,
        name: str | None = None,
        timeout: Moment | None = None,
        default: Any = REQUIRED,
    ) -> Any:
        """Ask a person or program, and return the answer: `wait_for` with a text for what people are shown.

        Args:
            who: person or group that is asked.
            question: its text. Without a name, an answer is for this text only.
            type: of the answer.
            name: of the wait, under which it is answered; then the text may differ in each run. `question` by default.
            timeout, default: see `wait_for`.

        Raises as `wait_for`.
        """
        from .answers import ask

        given: dict[str, Any] = {"timeout": timeout, "default": default}
        return await ask(self._run, who, question, type, name=name, **given, options=self._options)


async def _watched(run: Run, call: Coroutine[Any, Any, Any]) -> Any:
    """Return what a tool call returns, before which the checks of the run's coherence start."""
    watch = run.watch
    if watch is not None and not run.stopped and CURRENT_RUN.get() is run:
        run.watch = None
        try:
            await watch(run)
        except BaseException:
            call.close()
            raise
    return await call


def _caller() -> asyncio.Task[Any] | None:
    """Return the asyncio task that makes a call, which may start another one to await it, as `asyncio.gather` does."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs: the call is refused when it is awaited
        return None

"""Calls of steps and tools, and reads of the inbox: typed methods of a context, and of `ctx.options(...)`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

from ...queues.durations import Moment
from ...queues.inbox import InboxMessage
from ..errors import StepDefinitionError
from .messaging import ask, receive
from .run import Run
from .steps.current import StepOptions
from .steps.execution import run_step
from .steps.tool_calls import CallReasons, LoggedCall

P = ParamSpec("P")
R = TypeVar("R")


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
        self, name: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def tool(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def tool(self, name: str, fn: Any = None, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a tool: a step that is logged with its arguments, its result and the reasoning. See `step`."""
        options = self._options
        if options.reasoning and options.call is not None:
            CallReasons.add(self._run, options.call, options.reasoning)
        tool = LoggedCall(name, fn, args, kwargs, options)
        return run_step(self._run, name, fn, args, kwargs, options, tool, _caller())

    # messages, see docs/how-to/messages.md

    async def inbox(
        self,
        wait: Moment | None = None,
        *,
        limit: int | None = None,
        sender: str | None = None,
        why: str = "",
        key: str | None = None,
    ) -> list[InboxMessage]:
        """Return the unread messages of this task, in order. Recorded once, like a step.

        Args:
            wait: seconds or a timedelta to wait for a message if the inbox is empty, or a datetime until which to
                wait; `math.inf` for ever. The task is parked, without a worker or a lease, and a message wakes it; `[]`
                if the time passes first.
            limit: the largest number of messages.
            sender: only messages of this sender; others stay unread.
            why: reason of the wait, for operators. With `wait` it is a question, as that of `ask`.
            key: identifies the question in place of `why`.

        Raises:
            StepMismatch: see `ask`.
        """
        return await receive(self._run, wait=wait, limit=limit, sender=sender, why=why, key=key, options=self._options)

    async def ask(
        self, who: str, question: str, *, wait: Moment = math.inf, key: str | None = None
    ) -> InboxMessage | None:
        """Ask a person or program, and wait for its next message; None when `wait` seconds have passed.

        An answer is for one question of one person. If a resumed run asks another one, an open question is withdrawn:
        the new one is asked, and messages from before do not answer it. A recorded answer raises `StepMismatch`, or
        with `ctx.options(on_mismatch="rerun")` the new question is asked.

        Args:
            who: the sender name of the answer (`perdure task send ID yes --from NAME`). The task is parked meanwhile.
            question: its text.
            wait: seconds, or a timedelta, or a datetime until which to wait.
            key: identifies the question in place of its text, which then may differ in each run.

        Raises:
            StepMismatch: another question was answered here.
        """
        return await ask(self._run, who, question, wait=wait, key=key, options=self._options)


def _caller() -> asyncio.Task[Any] | None:
    """Return the asyncio task that makes a call, which may start another one to await it, as `asyncio.gather` does."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs: the call is refused when it is awaited
        return None

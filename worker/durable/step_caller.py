"""Call steps and tools: the typed methods `step` and `tool` of a context, and of `ctx.options(...)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

from ..errors import StepDefinitionError
from .run import Run
from .steps.execution import run_step
from .steps.options import StepOptions
from .steps.tool_calls import CallReasons, LoggedCall

__all__ = ["StepCaller"]

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
        return run_step(self._run, name, fn, args, kwargs, options)

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
        return run_step(self._run, name, fn, args, kwargs, options, LoggedCall(name, fn, args, kwargs, options))

"""Sagas: steps that are undone in reverse order if a later one fails, and then run again by the next attempt."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ..errors import StepDefinitionError
from .attempt_end import add_forgotten
from .run import Run
from .steps.current import StepOptions, check_name
from .steps.execution import run_step


class Saga:
    """Steps of an `async with ctx.saga()` block.

    If the block raises an `Exception`, the undo functions of its finished steps are called in reverse order, each as a
    step `undo NAME` with the result of the step that it undoes. When all have returned, the steps of the block are
    forgotten with the end of the attempt (`Context.forget`), and the exception continues. An undo that fails replaces
    the exception: the next attempt meets the same failure again and calls the rest of the undo functions.

    A stop of the run (shutdown, a wait, a time-out, a cancellation) undoes nothing: a run that shuts down or waits
    continues later, and no step can be called while a run stops.
    """

    def __init__(self, run: Run, options: StepOptions) -> None:
        self._run = run
        self._options = options
        self._keys: list[str] = []
        self._undos: list[tuple[str, Callable[[Any], Any], Any]] = []

    async def step(
        self, name: str, fn: Callable[..., Any], /, *args: Any, undo: Callable[[Any], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run a step, as `Context.step` does.

        Args:
            undo: Function that undoes it; its argument is the result of the step. None if nothing is to be undone.

        Raises as `Context.step`.
        """
        given: object = undo
        if given is not None and not callable(given):
            raise StepDefinitionError(f"undo of step {name!r} must be a function of the step's result, got {undo!r}")
        if undo is not None:
            check_name("name of its undo step", f"undo {name}")
        result = await run_step(self._run, name, fn, args, kwargs, self._options, keys=self._keys)
        if undo is not None:
            self._undos.append((name, undo, result))
        return result

    async def undo(self) -> None:
        """Undo the finished steps in reverse order, and forget them with the end of the attempt."""
        for name, undo, result in reversed(self._undos):
            await run_step(self._run, f"undo {name}", undo, (result,), {}, self._options, keys=self._keys)
        await add_forgotten(self._run, self._keys)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            await self.undo()

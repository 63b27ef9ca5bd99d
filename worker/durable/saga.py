"""Sagas: steps that are undone in reverse order if a later one fails, and then run again by the next attempt."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TypeGuard

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ..errors import Reschedule, StepDefinitionError, StepInDoubt
from .attempt_end import forget_undone
from .run import Run
from .steps.current import StepOptions, check_call, check_name
from .steps.execution import run_step
from .steps.recorded_errors import describe, make_error

_UNDOING: Final = "#undo:"
"""Beginning of the checkpoint keys of failures with which the undoing of a saga began."""


class Saga:
    """Steps of an `async with ctx.saga()` block.

    If the block raises an `Exception`, the undo functions of its finished steps are called in reverse order, each as a
    step `undo NAME` with the result of the step that it undoes. When all have returned, the exception continues, and if
    the attempt ends with it, the steps of the block are forgotten (`Context.forget`). An undo that fails replaces the
    exception: the next attempt meets the same failure again and calls the rest of the undo functions.

    A stop of the run (shutdown, a wait, a time-out, a cancellation) undoes nothing: a run that shuts down or waits
    continues later, and no step can be called while a run stops.
    """

    def __init__(self, run: Run, options: StepOptions) -> None:
        self._run = run
        self._options = options
        self._keys: list[str] = []
        self._finished: set[str] = set()
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
        called: list[str] = []
        try:
            result = await run_step(self._run, name, fn, args, kwargs, self._options, keys=called)
        finally:
            self._keys += called
        self._finished.update(called)
        if undo is not None:
            self._undos.append((name, undo, result))
        await self._meet_failure()
        return result

    async def _meet_failure(self) -> None:
        """Raise the failure again with which an earlier run began to undo these steps, once all have returned."""
        history = self._run.history
        if history.pages is not None:
            await history.read_unfinished(*(_UNDOING + key for key in self._keys))
        saved = history.saved
        if not saved:
            return
        for key in tuple(self._keys):
            if (noted := saved.get(_UNDOING + key)) is not None:
                found = orjson.loads(noted)
                if self._finished.issuperset(found["finished"]):
                    self._keys += found["keys"]
                    raise make_error(key, found["text"], found["error"])

    async def undo(self, error: Exception) -> None:
        """Undo the finished steps in reverse order, and forget them if the attempt ends with this failure.

        The failure is stored first: a run that takes over must not continue with what is undone in part.
        """
        marks: list[str] = []
        if self._undos:
            run, key = self._run, _UNDOING + self._keys[0]
            await check_call(run, key, own=True)
            noted = [mark for step in self._keys if (mark := _UNDOING + step) in run.history.saved]
            if not noted:
                text, described = describe(error, run.payload_limit)
                data = orjson.dumps(
                    {"keys": self._keys, "finished": sorted(self._finished), "text": text, "error": described}
                )
                await run.recorder.put(Entry(Kind.SAVED, key, data), wait=True)
            marks = noted or [key]
        for name, undo, result in reversed(self._undos):
            await run_step(self._run, f"undo {name}", undo, (result,), {}, self._options, keys=self._keys)
        await forget_undone(self._run, [*self._keys, *marks], error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_failure(error):
            await self.undo(error)

    @staticmethod
    def is_failure(error: BaseException | None) -> TypeGuard[Exception]:
        """Return whether the block is undone when it ends with this error: not by a request, nor while in doubt."""
        return isinstance(error, Exception) and not isinstance(error, (Reschedule, StepInDoubt))

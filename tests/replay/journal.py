"""Journal of what happened outside of a task, and of what its handler saw of its recorded calls."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from perdure import ChildFailed, Context, TaskHandle
from perdure.queues.inbox import Sent
from perdure.worker.durable.run import Run
from perdure.worker.durable.step_caller import StepCaller
from perdure.worker.durable.steps.current import CURRENT_RUN, CURRENT_STEP
from perdure.worker.task import Task
from perdure.worker.testing.cut_off import IS_DEAD

_CALL: ContextVar[str] = ContextVar("replay_call", default="")
"""The recorded call that runs here."""


class Journal:
    """File to which all processes append lines: `effect`, `begin` and `end` of a call, and `run`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, **line: Any) -> None:
        """Append a line, unless the process is dead."""
        if not IS_DEAD.get()():
            with self.path.open("ab") as file:
                os.write(file.fileno(), json.dumps(line).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    # outside of the task

    def call(self, name: str) -> int:
        """Note a call of an external service; return how many there were, including this one."""
        self.write(effect=name, call=_CALL.get())
        return self.count(name)

    def count(self, name: str) -> int:
        """Return how often an external service was called."""
        return sum(line.get("effect") == name for line in self.lines())


class AttemptFailed(BaseException):
    """Raised from a recorded call to end the attempt there."""


class Observer:
    """Notes what the handler sees of each recorded call.

    fails_after: Number of the call of the handler's own asyncio task after whose end the attempt fails.
    """

    def __init__(self, journal: Journal, fails_after: int | None = None) -> None:
        self._journal = journal
        self.fails_after = fails_after
        self.calls = 0
        self._tasks: dict[asyncio.Task[Any] | None, int] = {}
        self._numbers: dict[str, int] = {}

    def begin_run(self) -> None:
        """Note that a run of the handler begins."""
        self._numbers.clear()
        self._journal.write(run=True)

    def _label(self, what: str) -> str:
        self._numbers[what] = number = self._numbers.get(what, 0) + 1
        return what if number == 1 else f"{what} #{number}"

    def _place(self, run: Run) -> int:
        """Return the number of the running asyncio task; 0 for the handler's own."""
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return 0
        return 0 if task is run.task else self._tasks.setdefault(task, len(self._tasks) + 1)

    async def observe(self, run: Run, what: str, call: Coroutine[Any, Any, Any], caller: int) -> Any:
        place = self._place(run)
        label, nested = self._label(what), _CALL.get()
        token = _CALL.set(label)
        write = self._journal.write
        try:
            write(begin=label, task=place, within=nested)
            value = await call
        except Exception as error:
            write(end=label, task=place, by=caller, within=nested, raised=f"{type(error).__name__}: {error}")
            self._count(place, nested)
            raise
        except asyncio.CancelledError:
            if not run.stopped:
                write(end=label, task=place, by=caller, within=nested, raised="cut off")
            raise
        finally:
            _CALL.reset(token)
        write(end=label, task=place, by=caller, within=nested, value=_outcome(value))
        self._count(place, nested)
        return value

    def _count(self, place: int, nested: str) -> None:
        if place or nested or IS_DEAD.get()():
            return
        self.calls += 1
        if self.calls == self.fails_after:
            raise AttemptFailed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the recorded calls of all contexts."""
        with (
            patch.object(StepCaller, "step", self._watched(StepCaller.step)),
            patch.object(StepCaller, "tool", self._watched(StepCaller.tool)),
            patch.object(StepCaller, "inbox", self._watched(StepCaller.inbox)),
            patch.object(StepCaller, "ask", self._watched(StepCaller.ask)),
            patch.object(StepCaller, "wait_for", self._watched(StepCaller.wait_for)),
            patch.object(Context, "send", self._watched(Context.send)),
            patch.object(Context, "decide", self._watched(Context.decide)),
            patch.object(Context, "discover", self._watched(Context.discover)),
            patch.object(Context, "add_message", self._watched(Context.add_message)),
            patch.object(Context, "spawn", self._watched(Context.spawn)),
            patch.object(Context, "join", self._watched(Context.join)),
            patch.object(Context, "gather", self._watched(Context.gather)),
            patch.object(TaskHandle, "result", self._watched_result(TaskHandle.result)),
        ):
            yield

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(caller: Any, *args: Any, **kwargs: Any) -> Any:
            shown = [_shown(arg) for arg in (*args, *kwargs.values()) if arg != caller._run.id]
            what = f"{method.__name__}({', '.join(shown)})"
            return self.observe(caller._run, what, method(caller, *args, **kwargs), self._place(caller._run))

        return call

    def _watched_result(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def result(handle: TaskHandle[Any], *args: Any) -> Any:
            run = CURRENT_RUN.get()
            if run is None or CURRENT_STEP.get() is not None:
                return method(handle, *args)
            return self.observe(run, "result", method(handle, *args), self._place(run))

        return result


STEPS: Final = ("step(", "tool(", "ask(", "wait_for(", "send(", "spawn(", "join(", "gather(", "result")
"""Calls whose result is confirmed before they return."""


def _outcome(value: Any) -> str:
    """Return a result as text, without the ids and times of messages."""
    if isinstance(value, list):
        return str([_outcome(one) for one in value])
    if isinstance(value, TaskHandle | ChildFailed):
        return type(value).__name__
    return "sent" if isinstance(value, Sent) else repr(getattr(value, "content", value))


def _shown(value: object) -> str:
    if isinstance(value, Task | TaskHandle):
        return getattr(value, "name", "task")
    return getattr(value, "__name__", None) or repr(value) if callable(value) else repr(value)

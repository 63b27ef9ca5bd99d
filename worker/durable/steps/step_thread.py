"""Calls of step functions in threads, and the late ones, which run on after their step was given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ....queues.runtime import RUNTIME
from ...errors import StepError
from ...log import logger
from ..handler_task import GENERATOR_EXIT


class StepThread:
    """One call of a step's function in a thread. Nothing can stop it, so it may end after its step was given up.

    Attributes:
        task: Id of the task.
        step: Key of the step, or the name of a part of another step.
        digest: Hash of the arguments.
        shares_thread: Whether it runs in the thread of its handler, which occupies a slot.
        late_since: When its step was given up (monotonic clock).
        record: Records the result of a late call; None if it cannot be recorded.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_failed",
        "_function",
        "_lock",
        "_on_end",
        "_value",
        "_waiting",
        "digest",
        "late_since",
        "record",
        "shares_thread",
        "step",
        "task",
    )

    def __init__(self, task: str, step: str, digest: str, function: Callable[[], Any]) -> None:
        self.task, self.step, self.digest = task, step, digest
        self.shares_thread = False
        self.late_since = 0.0
        self.record: Callable[[Any], Awaitable[None]] | None = None
        self._function: Callable[[], Any] | None = function
        self._lock = threading.Lock()
        self._ended = self._failed = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._on_end: Callable[[], None] | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def __call__(self) -> Any:
        """Call the function, in its thread. A call that was given up before it began does nothing."""
        with self._lock:
            function, self._function = self._function, None
        if function is None:
            return None
        try:
            value = function()
        except GeneratorExit as error:  # thrown into a coroutine, it would close it
            exited = StepError(f"step {self.step!r} {GENERATOR_EXIT}")
            self._end(None, exited)
            raise exited from error
        except BaseException as error:
            self._end(None, error)
            raise
        self._end(value, None)
        return value

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            self._ended, self._value, self._failed = True, value, error is not None
            on_end, waiting, self._waiting = self._on_end, self._waiting, []
            if on_end is not None:  # else the step raises it, and it would refer to itself
                self._error = error
        for future in waiting:
            with suppress(RuntimeError):  # the loop is closed
                future.get_loop().call_soon_threadsafe(_wake, future)
        if on_end is not None:
            on_end()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def failed(self) -> bool:
        """Whether a late call has raised."""
        return self._failed

    def give_up(self, on_end: Callable[[], None]) -> bool:
        """Stop waiting for the call. Return whether it is late: one that has not started will not run.

        on_end: called in the thread when the call has ended.
        """
        with self._lock:
            if self._function is not None or self._failed:
                self._function = None
                return False
            self.late_since = RUNTIME.monotonic()
            self._on_end = on_end
            return True

    async def wait(self) -> None:
        """Return when the call has ended."""
        while not self._ended:
            future = asyncio.get_running_loop().create_future()
            with self._lock:
                if self.ended:
                    return
                self._waiting.append(future)
            await future

    def result(self) -> Any:
        """Return or raise the result of a late call that has ended."""
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            self._error = None  # no cycle with the traceback

    def log_dropped(self) -> None:
        """Log that the result of a late call is not used."""
        late, bound = RUNTIME.monotonic() - self.late_since, logger.bind(id=self.task, step=self.step)
        how, self._error = "returned" if self._error is None else f"raised {type(self._error).__name__}", None
        bound.warning("step {} {} {:.1f} s after it was given up; its result is dropped", self.step, how, late)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class LateCalls:
    """Late calls of a worker, by task. The next try of a step finds the call that it must not run beside.

    A call is kept until its result is used, or until it has ended and no run of its task waits for it.

    Attributes:
        by_task: The calls. To be changed by the methods only.
    """

    __slots__ = ("_left", "_lock", "by_task")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_task: dict[str, list[StepThread]] = {}
        self._left: set[StepThread] = set()
        """Calls whose run is over."""

    def __bool__(self) -> bool:
        return bool(self.by_task)

    def add(self, call: StepThread) -> None:
        """Keep a call whose step is given up, if it has started."""
        if call.give_up(lambda: self._ended(call)):
            with self._lock:
                self.by_task.setdefault(call.task, []).append(call)

    def find(self, task: str, step: str, digest: str | None = None) -> StepThread | None:
        """Return the latest late call of a step; with a digest, one with these arguments."""
        calls = self.by_task.get(task, ())
        return next((call for call in reversed(calls) if call.step == step and digest in (None, call.digest)), None)

    def of(self, task: str) -> list[StepThread]:
        """Return the late calls of a task."""
        return list(self.by_task.get(task, ()))

    def remove(self, call: StepThread) -> bool:
        """Forget a call. Return whether it was known."""
        with self._lock:
            self._left.discard(call)
            calls = self.by_task.get(call.task, [])
            if call not in calls:
                return False
            calls.remove(call)
            if not calls:
                del self.by_task[call.task]
            return True

    def drop(self, call: StepThread) -> None:
        """Forget a call, and log that its result is not used."""
        if self.remove(call) and call.ended:
            call.log_dropped()

    def leave(self, task: str) -> None:
        """Drop the results of a task's late calls: its run is over. Those that still run remain known."""
        for call in self.of(task) if self.by_task else ():
            with self._lock:
                self._left.add(call)
            if call.ended:
                self.drop(call)

    def _ended(self, call: StepThread) -> None:
        if call in self._left:
            self.drop(call)

"""The asyncio task of a handler, and its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import ClassVar, Final, NoReturn

import anyio

from ...queues.delivery.checkpoint import Entry
from ..errors import RunStopped
from .steps.equal_calls import EqualCalls

GENERATOR_EXIT: Final = "raised GeneratorExit, which only the close() of a generator may raise"


def is_closing() -> bool:
    """Return whether the running coroutine is closed after its event loop, which raises GeneratorExit in it."""
    try:
        return asyncio.current_task() is None
    except RuntimeError:  # no event loop runs
        return True


_QUICK_REFUSALS: Final = 20
"""Calls of a stopped run that are refused at once. A handler that swallows more of them must not block the loop."""


class _Calling:
    """A block in which a call of the context is in progress that is no step."""

    __slots__ = ("_handler",)

    def __init__(self, handler: HandlerTask) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._handler.calls += 1

    def __exit__(self, *raised: object) -> None:
        self._handler.calls -= 1
        self._handler.calls_ended += 1


class InFlight:
    """Step in flight, of which only its begin is known (monotonic clock)."""

    __slots__ = ("began",)

    began: float

    def intent(self) -> tuple[Entry, ...]:
        """Return the entries which say that the step has been running for a while; none if none are to be written."""
        return ()


class HandlerTask:
    """Base of a run: cancels the asyncio task in which the handler runs.

    The handler may clean up for a while (`finally`, `except CancelledError`). Then it is cancelled again and again.
    """

    cleanup_limit: ClassVar[float] = 4.0
    """Seconds that a cancelled handler has to clean up before it is cancelled again."""

    cancel_interval: ClassVar[float] = 0.5
    """Seconds between the cancellations of a handler that has not ended by then."""

    __slots__ = (
        "_cancels",
        "_equal_calls",
        "_failed",
        "_holding",
        "_left_counted",
        "_loop",
        "_own_call",
        "_quiet",
        "_refused",
        "_retry_cancel",
        "_step_tasks",
        "_task",
        "branched",
        "calls",
        "calls_ended",
        "steps_in_flight",
        "stopped",
        "stopping",
    )

    def __init__(self) -> None:
        self.steps_in_flight: dict[str, InFlight] = {}
        """Steps that run, by their keys."""
        self.calls = self.calls_ended = 0
        """Calls of the context in progress that are no steps, but for waits; and those that have ended."""
        self.branched = False
        """Whether another asyncio task than the handler's own has made a call of the context."""
        self.stopping = self._failed = False
        """stopping: whether the run stops at its next step boundary."""
        self.stopped = False
        """Whether the handler was stopped or has ended: its calls of the context are refused."""
        self._cancels = self._refused = 0
        self._equal_calls: EqualCalls | None = None
        self._holding: anyio.CancelScope | None = None
        self._left_counted = 0
        """Cancellations that the handler's code has left counted when the run stopped it: a task group of Python 3.11
        and 3.12 does so where one of its tasks fails."""
        self._loop = asyncio.get_running_loop()
        self._own_call = ("", "")
        self._quiet: anyio.Event | None = None
        self._retry_cancel: asyncio.TimerHandle | None = None
        self._step_tasks: dict[str, asyncio.Task[object]] = {}
        self._task: asyncio.Task[object] | None = None

    async def drain_cancellation(self) -> None:
        """Absorb a cancellation that arrived after the handler had ended, so that it cancels nothing else.

        Raises `CancelledError` where the worker itself is being cancelled.
        """
        task = asyncio.current_task()
        if self._cancels:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if task is not None and task.cancelling():
                    raise
        if task is not None and task.cancelling():
            raise asyncio.CancelledError

    async def check_stopped(self) -> None:
        """Refuse a call if the run was stopped. Raises `CancelledError`, `RunStopped`, `LeaseLost`."""
        if self.stopped:
            await self.refuse()

    async def refuse(self) -> NoReturn:
        """Refuse a call of a run that was stopped. Raises `CancelledError`; `RunStopped` where that stopped it."""
        self._refused += 1
        await asyncio.sleep(0 if self._refused <= _QUICK_REFUSALS else self.cancel_interval)
        why = "the task was stopped: its handler may clean up, without its context"
        if self._retry_cancel is not None and not self._cancels and self.is_own_task():
            raise RunStopped(why)
        raise asyncio.CancelledError(why)

    def is_own_task(self) -> bool:
        """Return whether the handler's asyncio task calls, and none that runs beside it."""
        return self._task is not None and asyncio.current_task() is self._task

    async def await_steps(self) -> None:
        """Wait until the steps beside a handler that has failed are recorded; no other step begins."""
        self.stopping = self._failed = True
        await self._steps_ended()

    async def _steps_ended(self) -> None:
        while self.steps_in_flight:
            self._quiet = self._quiet or anyio.Event()
            await self._quiet.wait()

    def _note_step(self, key: str, digest: str) -> None:
        """Note the asyncio task of a step that runs beside the handler's, as in `asyncio.gather`.

        digest: hash of its arguments, if equal calls must not be concurrent.
        """
        task = asyncio.current_task()
        if task is None or task is self._task:
            self._own_call = (key, digest)
            if self._equal_calls is not None:
                self._equal_calls.check(key, digest)
            return
        self.branched = True
        self._step_tasks[key] = task
        if digest:
            if self._equal_calls is None:
                self._equal_calls = EqualCalls()
            own = self._own_call
            self._equal_calls.add(key, digest, task, own if own[0] in self.steps_in_flight else ("", ""))

    def calling(self) -> AbstractContextManager[None]:
        """Return a block in which open waits do not park the run: a call of the context is in progress."""
        return _Calling(self)

    def note_caller(self) -> None:
        """Note whether another asyncio task than the handler's own makes a call."""
        if not self.branched and asyncio.current_task() is not self._task:
            self.branched = True

    def wait_began(self, name: str, task: asyncio.Task[object] | None = None) -> None:
        """Note an asyncio task beside the handler's that waits, and is cancelled with it. None: the current one."""
        if task is None:
            task = asyncio.current_task()
            self.note_caller()
        if task is not None and task is not self._task:
            self._step_tasks[name] = task

    def wait_ended(self, name: str) -> None:
        self._step_tasks.pop(name, None)

    def _cancel_steps(self) -> None:
        """Cancel the steps that run beside the handler, which has ended: their results are not awaited."""
        for task in self._step_tasks.values():
            task.cancel()
        self._step_tasks.clear()

    async def hold(self, until: Awaitable[object], seconds: float) -> bool:
        """Wait after the end of the handler, with the lease. Return whether the time is over. A stop ends the wait."""
        with anyio.move_on_after(seconds) as scope:
            self._holding = scope
            await until
        self._holding = None
        return scope.cancelled_caught and anyio.current_time() >= scope.deadline

    def limit_cleanup(self) -> None:
        """Cancel the handler, which `RunStopped` stops, when it has had its time to clean up."""
        self._note_counted()
        self._retry_cancel = self._loop.call_later(self.cleanup_limit, self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._note_counted()
            self._cancels += 1
            self._task.cancel()
            delay = self.cleanup_limit if self._cancels == 1 else self.cancel_interval
            self._retry_cancel = self._loop.call_later(delay, self._cancel)

    def _note_counted(self) -> None:
        if self._retry_cancel is None and self._task is not None:
            self._left_counted = self._task.cancelling()

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The asyncio task of the handler; None before the handler begins and after it ends."""
        return self._task

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the handler."""
        return self._loop

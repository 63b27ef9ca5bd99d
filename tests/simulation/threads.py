"""Threads of the simulated world: greenlets that the loop resumes, so that blocking code runs in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NoReturn

from greenlet import getcurrent, greenlet

from .loop import CURRENT, SimulatedLoop

__all__ = ["ProcessEnded", "SimulatedEvent", "SimulatedThread", "block", "leave", "sleep"]


class ProcessEnded(BaseException):
    """The machine of the running callback has ended; the loop must run nothing more of it."""


def block(loop: SimulatedLoop, arrange: Callable[[Callable[..., None]], object]) -> Any:
    """Suspend the running thread. `arrange` gets a function that resumes it, once, with a value that is returned."""
    thread, context = getcurrent(), copy_context()
    resumed = False

    def resume(value: Any = None) -> None:
        nonlocal resumed
        if not resumed:
            resumed = True
            loop.call_soon(thread.switch, value, context=context)

    arrange(resume)
    assert thread.parent is not None, "code of the event loop must not block"
    return thread.parent.switch()


def sleep(loop: SimulatedLoop, seconds: float) -> None:
    """Suspend the running thread for so many seconds."""
    block(loop, lambda resume: loop.call_later(seconds, resume))


def leave() -> NoReturn:
    """Run no more of the calling thread, whose machine has ended, not even the end of a `finally` block."""
    thread = getcurrent()
    if thread.parent is None:  # a callback of the event loop
        raise ProcessEnded
    while True:
        thread.parent.switch()


def _root() -> greenlet:
    """Return the greenlet of the event loop."""
    root = getcurrent()
    while root.parent is not None:
        root = root.parent
    return root


class SimulatedThread:
    """A thread of the machine that starts it."""

    def __init__(self, loop: SimulatedLoop, target: Callable[[], None], name: str) -> None:
        self._loop = loop
        self._name = name
        self._ended = SimulatedEvent(loop)
        self._target = target
        self._greenlet = greenlet(self._run, _root())

    def start(self) -> None:
        context = copy_context()
        context.run(lambda: CURRENT.set((CURRENT.get()[0], self._name)))
        self._greenlet.gr_context = context
        self._loop.call_soon(self._greenlet.switch, context=context.copy())

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()


class SimulatedEvent:
    """An event that threads and callbacks of the simulated world set, and threads wait for."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: list[Callable[..., None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            block(self._loop, lambda resume: self._arrange(resume, timeout))
        return self._set

    def _arrange(self, resume: Callable[..., None], timeout: float | None) -> None:
        self._waiting.append(resume)
        if timeout is not None:
            self._loop.call_later(timeout, resume)

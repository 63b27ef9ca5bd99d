"""The loop watchdog: a thread that checks whether the event loop answers.

The thread pings the loop repeatedly; the lag is the time since an unanswered ping. A lag of a few seconds is logged
with the stacks of all threads, the loop's first, so the log shows what blocks. If the lag exceeds the stall limit,
`should_renew` is False, the leases lapse and other workers claim the tasks. When the loop answers again, renewal
resumes; writes for lost deliveries are refused by the fence.

C code that holds the GIL stops this thread and the heartbeat as well. Then no lease is renewed, and a supervisor ends
the worker with SIGABRT, on which faulthandler writes the stacks. The timer of faulthandler would not need a supervisor,
but it fires when a frozen process continues, reads the frames of running threads, and crashes the process.

Stacks contain code positions only, never values.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any, Final

from ....queues.runtime import RUNTIME
from ...durable.steps.variables import driven_by
from ...log import logger

_FRAMES_OF_THE_FIRST: Final = 12
_FRAMES_OF_OTHERS: Final = 4
_THREADS: Final = 16
"""Limits of a dump: innermost frames of the loop's thread and of others, and threads."""


def stacks_of_all_threads(first: int) -> str:
    """Return the stacks of all threads but the calling one, innermost call last.

    first: ident of the thread shown first.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames.pop(threading.get_ident(), None)
    ordered = sorted(frames, key=lambda ident: (ident != first, names.get(ident, "")))
    stacks = [
        _stack_text(
            names.get(ident, "unknown"), frames[ident], _FRAMES_OF_THE_FIRST if ident == first else _FRAMES_OF_OTHERS
        )
        for ident in islice(ordered, _THREADS)
    ]
    if len(ordered) > _THREADS:
        stacks.append(f"... and {len(ordered) - _THREADS} more threads")
    return "\n".join(stacks)


def _stack_text(name: str, frame: FrameType, most: int) -> str:
    stack = traceback.extract_stack(frame)
    left_out = f" (outer calls left out: {len(stack) - most})" if len(stack) > most else ""
    return f"thread {name}{left_out}:\n" + "".join(traceback.format_list(stack[-most:])).rstrip()


def stack_of_task(task: asyncio.Task[object]) -> str:
    """Return the stack of a waiting asyncio task, innermost await last."""
    frames: list[traceback.FrameSummary] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(frames) < _FRAMES_OF_THE_FIRST:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None) or driven_by(awaited)
    return "".join(traceback.format_list(frames)).rstrip()


_TICK: Final = 1.0
"""Longest interval between two pings, in seconds."""


class LoopWatchdog:
    """Watches the event loop in which `start` is called.

    `lag`, `should_renew` and `is_slow` may be called from any thread; they depend neither on the loop nor on the
    watchdog's thread.
    """

    def __init__(
        self,
        *,
        warn_after: float,
        stall_limit: float,
        on_check: Callable[[float], None] = lambda lag: None,
        describe_current: Callable[[asyncio.AbstractEventLoop], str] = lambda loop: "",
    ) -> None:
        """Create the watchdog; `start` starts its thread.

        Args:
            warn_after: Lag in seconds that is logged.
            stall_limit: Lag in seconds from which leases are not renewed.
            on_check: Called in the watchdog's thread at least once a second with the lag in seconds.
            describe_current: Returns which task the loop runs at the moment, for the log; called in that thread too.
        """
        self._warn_after = warn_after
        self._stall_limit = stall_limit
        self._on_check = on_check
        self._describe_current = describe_current
        self._tick = min(_TICK, warn_after / 4, stall_limit / 4)
        self._pinged: float | None = None
        self._excused = False
        self._warned = False
        self._stalled = False
        self._stop = RUNTIME.event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._thread = RUNTIME.thread(self._run, "perdure watchdog")

    def start(self) -> None:
        """Start the thread. Call it in the loop to be watched."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stop.set()
        self._thread.join(timeout=self._tick + 1.0)

    @property
    def lag(self) -> float:
        """Seconds since an unanswered ping; 0 if the loop answers."""
        asked = self._pinged
        return 0.0 if asked is None else RUNTIME.monotonic() - asked

    def should_renew(self) -> bool:
        """Return whether the lag is within the stall limit, so that leases may be renewed."""
        return self.lag <= self._stall_limit

    def is_slow(self) -> bool:
        """Return whether the lag exceeds the warning limit."""
        return self.lag > self._warn_after

    def _run(self) -> None:
        checked = RUNTIME.monotonic()
        while not self._stop.wait(self._tick):
            now = RUNTIME.monotonic()
            # The whole process may have been frozen. Then the loop gets one more tick to answer.
            absent, checked = now - checked - self._tick, now
            if absent > self._warn_after:
                logger.warning("process was frozen for {:.1f} s: it was stopped, or C code held the GIL", absent)
                if self._pinged is not None and not self._excused:
                    self._excused = True
                    continue
            self._check()

    def _check(self) -> None:
        lag = self.lag
        try:
            self._on_check(lag)
        except Exception:  # noqa: BLE001 - an error of the callback must not stop the watchdog
            logger.exception("could not report the state of the event loop")
        if lag > self._warn_after and not self._warned:
            self._warned = True
            stacks = stacks_of_all_threads(self._loop_thread)
            logger.bind(stacks=stacks).warning("{}", self._text(lag))
        if lag > self._stall_limit and not self._stalled:
            self._stalled = True
            logger.error("{}: leases are no longer renewed, other workers claim the tasks", self._text(lag))
        if self._pinged is None:
            self._ping()

    def _text(self, lag: float) -> str:
        who = "" if self._loop is None else self._describe_current(self._loop)
        return f"the event loop has not answered for {lag:.1f} s{who}"

    def _ping(self) -> None:
        if self._loop is None:
            return
        self._excused = False
        self._pinged = RUNTIME.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._pong)
        except RuntimeError:  # the loop is closed
            self._pinged = None
            self._stop.set()

    def _pong(self) -> None:
        """Answer a ping, in the loop."""
        lag, self._pinged = self.lag, None
        if self._warned:
            renewed = " and leases are renewed again" if self._stalled else ""
            logger.warning("the event loop answers again, after {:.1f} s{}", lag, renewed)
            self._warned = self._stalled = False

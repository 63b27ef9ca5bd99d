"""Watching, from a thread of its own, that the event loop answers.

The loop is asked again and again; for as long as it owes an answer it lags. A lag of a few seconds is logged with the
stacks of all threads, the loop's first: what blocks is read there. One over the stall limit is the end of the worker's
claim to its tasks: `may_beat` says no, their leases lapse, and others take them. When the loop comes back it may beat
again; what it lost meanwhile is refused in Redis.

C code that keeps the interpreter's lock stops this thread and the beat's as well. Then nothing is renewed anyway, and a
supervisor ends the worker with SIGABRT, on which faulthandler writes the stacks. faulthandler's timer would need no
supervisor, but it fires when a process that was frozen continues, reads frames while their threads run, and crashes it.

The stacks of all threads, as text for the log. No values: a stack shows where the code is, never what it holds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any, Final

from ...log import logger

__all__ = ["LoopWatchdog", "stack_of_task", "stacks_of_all_threads"]

_FRAMES_OF_THE_FIRST: Final = 12
_FRAMES_OF_OTHERS: Final = 4
_THREADS: Final = 16
"""How many innermost frames, and how many threads, are told of."""


def stacks_of_all_threads(first: int) -> str:
    """Where every thread is, the innermost call last. first: the identifier of the thread to begin with.

    The thread that asks is left out.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames.pop(threading.get_ident(), None)
    ordered = sorted(frames, key=lambda ident: (ident != first, names.get(ident, "")))
    told = [
        _stack_text(
            names.get(ident, "unknown"), frames[ident], _FRAMES_OF_THE_FIRST if ident == first else _FRAMES_OF_OTHERS
        )
        for ident in islice(ordered, _THREADS)
    ]
    if len(ordered) > _THREADS:
        told.append(f"... and {len(ordered) - _THREADS} threads more")
    return "\n".join(told)


def _stack_text(name: str, frame: FrameType, most: int) -> str:
    stack = traceback.extract_stack(frame)
    left_out = f" (outer calls left out: {len(stack) - most})" if len(stack) > most else ""
    return f"thread {name}{left_out}:\n" + "".join(traceback.format_list(stack[-most:])).rstrip()


def stack_of_task(task: asyncio.Task[object]) -> str:
    """Where an asyncio task waits, the innermost call last: from its handler down to what that awaits."""
    told: list[traceback.FrameSummary] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(told) < _FRAMES_OF_THE_FIRST:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            told.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "".join(traceback.format_list(told)).rstrip()


_TICK: Final = 1.0
"""Seconds between two looks at the loop, at the most."""


class LoopWatchdog:
    """Keeps watch over one event loop, the one in which `start` is called.

    `lag` and `may_beat` may be asked from any thread, and need nobody's help: not the loop's, nor this thread's.
    """

    def __init__(
        self,
        *,
        warn_after: float,
        stall_limit: float,
        on_check: Callable[[float], None] = lambda lag: None,
        describe_current: Callable[[asyncio.AbstractEventLoop], str] = lambda loop: "",
    ) -> None:
        """warn_after, stall_limit: seconds. on_look: called in the vigil's thread, each second or more often, with the
        lag in seconds. who: names whom the loop is working for, as far as that can be told; called in that thread too.
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
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._thread = threading.Thread(target=self._run, name="perdure vigil", daemon=True)

    def start(self) -> None:
        """Begin; to be called in the loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """End; returns when the thread has."""
        self._stop.set()
        self._thread.join(timeout=self._tick + 1.0)

    @property
    def lag(self) -> float:
        """Seconds for which the loop has owed an answer; 0 where it answers."""
        asked = self._pinged
        return 0.0 if asked is None else time.monotonic() - asked

    def should_renew(self) -> bool:
        """Whether the loop has answered within the stall limit, so that its tasks are still in good hands."""
        return self.lag <= self._stall_limit

    def is_slow(self) -> bool:
        """Whether the loop has not answered for long enough to be worth a warning."""
        return self.lag > self._warn_after

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self._tick):
            now = time.monotonic()
            # The whole process may have stood still. Then the loop gets one tick to answer before it is judged.
            absent, looked = now - looked - self._tick, now
            if absent > self._warn_after:
                logger.warning(
                    "this process stood still for {:.1f} s: it was stopped, or code kept the interpreter's lock", absent
                )
                if self._pinged is not None and not self._excused:
                    self._excused = True
                    continue
            self._check()

    def _check(self) -> None:
        lag = self.lag
        try:
            self._on_check(lag)
        except Exception:  # noqa: BLE001 - whatever is wrong there, the watch goes on
            logger.exception("cannot tell how the event loop is")
        if lag > self._warn_after and not self._warned:
            self._warned = True
            stacks = stacks_of_all_threads(self._loop_thread)
            logger.bind(stacks=stacks).warning("{}", self._text(lag))
        if lag > self._stall_limit and not self._stalled:
            self._stalled = True
            logger.error("{}: leases are no longer renewed, and other workers take the tasks", self._text(lag))
        if self._pinged is None:
            self._ping()

    def _text(self, lag: float) -> str:
        who = "" if self._loop is None else self._describe_current(self._loop)
        return f"the event loop has not answered for {lag:.1f} s{who}"

    def _ping(self) -> None:
        if self._loop is None:
            return
        self._excused = False
        self._pinged = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._pong)
        except RuntimeError:  # the loop is closed: there is nothing to watch any more
            self._pinged = None
            self._stop.set()

    def _pong(self) -> None:
        """In the loop."""
        lag, self._pinged = self.lag, None
        if self._warned:
            renewed = " and leases are renewed again" if self._stalled else ""
            logger.warning("the event loop answers again, after {:.1f} s{}", lag, renewed)
            self._warned = self._stalled = False

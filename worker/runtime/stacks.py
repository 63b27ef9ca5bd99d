"""The stacks of all threads, as text for the log. No values: a stack shows where the code is, never what it holds."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from itertools import islice
from types import FrameType
from typing import Any, Final

__all__ = ["stack_of_task", "stacks_of_all_threads"]

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
        _told(names.get(ident, "unknown"), frames[ident], _FRAMES_OF_THE_FIRST if ident == first else _FRAMES_OF_OTHERS)
        for ident in islice(ordered, _THREADS)
    ]
    if len(ordered) > _THREADS:
        told.append(f"... and {len(ordered) - _THREADS} threads more")
    return "\n".join(told)


def _told(name: str, frame: FrameType, most: int) -> str:
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

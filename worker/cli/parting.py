"""Ending the process though threads of the user's code do not end.

A step that blocks in a thread cannot be stopped from outside, and Python waits for such threads before it exits. Once
the worker has given its tasks back nothing such a thread does is recorded any more, so nobody has to wait for it. The
same holds for handlers that swallow their cancellation: asyncio would wait for them before it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from ..observe import logger

__all__ = ["end_despite_threads"]

PATIENCE: Final = 2.0
"""Seconds that threads have to end after the worker has stopped."""


def end_despite_threads(code: int, unending: Callable[[], int] = lambda: 0) -> None:
    """Watch that the process ends: with `code`, should threads still hold it when their time is over, or handlers.

    unending: how many handlers there are that do not end; asked in a thread.
    """
    threading.Thread(target=_watch, args=(code, unending), name="perdure parting", daemon=True).start()


def _watch(code: int, unending: Callable[[], int]) -> None:
    time.sleep(PATIENCE)
    if handlers := unending():
        logger.warning("leaving handlers that swallow their cancellation: {}", handlers)
        _end(code)
    main = threading.main_thread()
    while not (held := [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]):
        time.sleep(PATIENCE)  # what else takes its time, such as exit functions, may go on
    logger.warning("leaving threads that run code which cannot be stopped: {}", ", ".join(held))
    _end(code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""What a supervisor tells a worker, brought to the worker; and the worker's end when the supervisor's comes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..app import App
from ..observe import logger
from ..runtime import Worker
from ..runtime.link import Link

__all__ = ["Reins"]

_LEAVING: Final = 10.0
"""Seconds that a worker has beyond its grace, when its supervisor is gone, to give back what it holds and leave."""


class Reins:
    """The supervisor's hold on this worker, from before its app is imported.

    Until there is a worker nothing has been begun, so to stop is to end.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._may_work = threading.Event()
        self._taking = threading.Lock()
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = _Stops()
        link.listen(self._hear, self._lose)

    def wait_for_work(self, app: App) -> None:
        """Tell what the supervisor must know, and wait until it says that there is to be a worker."""
        settings = app.settings
        address = settings.address
        self.link.say(
            "loaded",
            app=app.name,
            url=address.url,
            directory=None if address.directory is None else str(address.directory),
            namespace=settings.namespace,
            grace=settings.grace,
            stall_limit=settings.stall_limit,
            crash_threshold=settings.crash_threshold,
            crash_window=settings.crash_window,
            restart_delays=settings.restart_delays,
            webhook=settings.webhook_url.get_secret_value(),
            webhook_secret=settings.webhook_secret.get_secret_value(),
            webhook_timeout=settings.webhook_timeout,
        )
        self._may_work.wait()

    def take(self, worker: Worker) -> Callable[[], None]:
        """From now on the supervisor steers this worker, in the running loop. Returns what a signal is to call."""
        with self._taking:
            self._worker = worker
            self._loop = asyncio.get_running_loop()
        return lambda: self._stops.ask("signal", worker.stop)

    def _hear(self, what: str) -> None:
        match what:
            case "work":
                self._may_work.set()
            case "stop":
                self._stop("supervisor", 0)
            case "isolate":
                self._call(Worker.look_for_suspects)
            case _:
                pass

    def _lose(self) -> None:
        """The supervisor is gone. Stop gracefully, and end in any case: nobody would end this process any more."""
        worker = self._stop("end of the supervisor", 1)
        logger.warning("the supervisor is gone: stopping")
        time.sleep(worker.settings.grace + _LEAVING)
        logger.error("ending, though the event loop does not")
        sys.stderr.flush()
        os._exit(1)

    def _stop(self, who: str, code: int) -> Worker:
        with self._taking:
            worker = self._worker
            if worker is None:
                os._exit(code)
        self._call(lambda worker: self._stops.ask(who, worker.stop))
        return worker

    def _call(self, act: Callable[[Worker], None]) -> None:
        """Have the loop do something to the worker."""
        worker, loop = self._worker, self._loop
        if worker is None or loop is None:
            return
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(act, worker)


class _Stops:
    """Counts how often each of those asks who may ask for the end: a service manager that signals all processes at once
    and a supervisor that passes the signal on have asked once.
    """

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._passed_on = 0

    def ask(self, who: str, stop: Callable[[], None]) -> None:
        self._asked[who] = self._asked.get(who, 0) + 1
        while self._passed_on < max(self._asked.values()):
            self._passed_on += 1
            stop()

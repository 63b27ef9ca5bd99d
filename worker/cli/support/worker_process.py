"""One worker in this process: on its own, or as the child of a supervisor.

What a supervisor tells a worker, brought to the worker; and the worker's end when the supervisor's comes.

Ending the process though threads of the user's code do not end.

A step that blocks in a thread cannot be stopped from outside, and Python waits for such threads before it exits. Once
the worker has given its tasks back nothing such a thread does is recorded any more, so nobody has to wait for it. The
same holds for handlers that swallow their cancellation: asyncio would wait for them before it ends.

The health probe of a worker or a supervisor: where the command line wants it, and what is wrong with that.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import anyio

from ...app import App
from ...log import configure_logging, logger
from ...runtime import Worker
from ...runtime.health.probe_server import HealthSource, ProbeServer
from ...runtime.signals import stop_on_signals
from ...runtime.supervisor_link import SupervisorLink
from .app_loader import load_app
from .connection import ConnectionOptions
from .errors import Failed, Misuse

__all__ = ["ProbePlace", "SupervisedWorker", "force_exit", "run_worker"]

_LEAVING: Final = 10.0
"""Seconds that a worker has beyond its grace, when its supervisor is gone, to give back what it holds and leave."""


class SupervisedWorker:
    """The supervisor's hold on this worker, from before its app is imported.

    Until there is a worker nothing has been begun, so to stop is to end.
    """

    def __init__(self, link: SupervisorLink) -> None:
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
                self._call(Worker.check_quarantine)
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


PATIENCE: Final = 2.0
"""Seconds that threads have to end after the worker has stopped."""


def force_exit(code: int, unending: Callable[[], int] = lambda: 0) -> None:
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


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """host, port: where the probe is to be; no port for no probe."""

    host: str | None
    port: int | None

    @contextmanager
    def serving(self, report: Callable[[], HealthSource]) -> Iterator[None]:
        """Answer probes within the block. Raises `Failed` where the address cannot be had."""
        if self.port is None:
            if self.host is not None:
                raise Misuse("--health-host says where the probe is: give --health-port too")
            yield
            return
        host = self.host or "127.0.0.1"
        try:
            probes = ProbeServer(report, host, self.port)
        except (OSError, UnicodeError) as error:
            raise Failed(
                f"--health-port: cannot listen on {host}:{self.port}: {error}; choose another port, or 0 for any"
            ) from error
        with probes:
            logger.info("health at {0}/livez and {0}/readyz", probes.address)
            yield


def run_worker(
    place: ConnectionOptions,
    probe: ProbePlace,
    application: str,
    *,
    concurrency: int,
    queues: Sequence[str] | None,
    name: str | None,
    burst: bool,
    settings: Mapping[str, object],
) -> None:
    """Work until told to stop, by a signal or by the supervisor. settings: those of the command line."""
    link = SupervisorLink.from_environment()
    reins = None if link is None else SupervisedWorker(link)
    loaded = load_app(application)
    loaded.configure(**place.overrides(), **settings)
    configure_logging(loaded.settings.log_level, json=loaded.settings.log_json)
    _stay()
    if reins is not None:
        reins.wait_for_work(loaded)
    anyio.run(
        _work,
        loaded,
        probe,
        reins,
        concurrency,
        queues,
        name,
        burst,
        backend_options={"use_uvloop": find_spec("uvloop") is not None},
    )


def _stay() -> None:
    """What is loaded by now stays to the end: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


async def _work(
    loaded: App,
    probe: ProbePlace,
    reins: SupervisedWorker | None,
    concurrency: int,
    queues: Sequence[str] | None,
    name: str | None,
    burst: bool,
) -> None:
    link = None if reins is None else reins.link
    runner = Worker(loaded, concurrency=concurrency, queues=queues, name=name, link=link)
    idle = sorted(set(runner.queues) - set(loaded.tasks.queues))
    if idle and (link is None or link.role == "worker"):
        logger.warning("no task of app {!r} is on {}: {} are", loaded.name, ", ".join(idle), loaded.tasks.queues)
    code = 1
    try:
        async with AsyncExitStack() as stack:
            stop = runner.stop if reins is None else reins.take(runner)
            await stack.enter_async_context(stop_on_signals(stop))
            stack.enter_context(probe.serving(runner.health))
            await stack.enter_async_context(runner)
            if reins is not None:
                reins.link.say("ready", worker=runner.id, queues=runner.queues)
            logger.info(
                "{} {} works on {} of namespace {} at {}, {} at once",
                "isolated worker" if link is not None and link.role == "isolated" else "worker",
                runner.id,
                ", ".join(runner.queues),
                loaded.settings.namespace,
                loaded.settings.address.shown,
                runner.concurrency,
            )
            await runner.run(burst=burst)
        logger.info("worker {} stopped: {} ran", runner.id, runner.settled)
        code = 0
    finally:
        force_exit(code, lambda: runner.stuck_handlers)

"""Worker in this process: on its own, or as the child of a supervisor.

`SupervisedWorker` connects the worker to its supervisor. `force_exit` ends the process although user code still runs:
Python waits at exit for threads that block, and asyncio for handlers that swallow their cancellation. At that point
the worker has released its tasks, so nothing that such code does is recorded.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import anyio
import typer
from redis.exceptions import NoPermissionError

from ....queues.errors import Refused
from ....queues.keys import Namespace
from ....queues.runtime import RUNTIME
from ....queues.transport.gateway import Gateway
from ....queues.wording import counted
from ...app import App
from ...durable.steps.current import log_fields
from ...log import add_to_json, configure_process_log, logger
from ...runtime.children.child import passed_metrics, passed_redis_url
from ...runtime.service_manager import ServiceManager
from ...runtime.stop_signals import stop_on_signals
from ...runtime.supervisor_link import SupervisorLink
from ...runtime.worker import Worker
from .app_loader import load_app
from .connection import ConnectionOptions
from .errors import EXPECTED, explanation
from .probe import ProbeOptions


class SupervisedWorker:
    """Connection of a worker to its supervisor, open before the app is imported.

    Until `attach`, no task has been read, so a stop request ends the process at once.

    Args:
        exit_margin: Seconds beyond the grace that a worker has to release its tasks and exit after its supervisor died.
    """

    def __init__(self, link: SupervisorLink, *, exit_margin: float = 10.0) -> None:
        self.link = link
        self._exit_margin = exit_margin
        self._may_work = RUNTIME.event()
        self._attaching = threading.Lock()
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requests = StopRequests()
        link.listen(self._on_message, self._on_supervisor_gone)

    def wait_for_work(self, app: App) -> None:
        """Report the app's settings, and wait until the supervisor requests a worker."""
        settings = app.settings
        address = settings.address
        self.link.send(
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

    def attach(self, worker: Worker) -> Callable[[], None]:
        """Let the supervisor control this worker, in the running loop. Return the handler for signals."""
        with self._attaching:
            self._worker = worker
            self._loop = asyncio.get_running_loop()
        return lambda: self._stop_requests.add("signal", worker.stop)

    def _on_message(self, kind: str) -> None:
        match kind:
            case "work":
                self._may_work.set()
            case "stop":
                self._stop("supervisor", 0)
            case "isolate":
                self._call(Worker.check_quarantine)
            case _:
                pass

    def _on_supervisor_gone(self) -> None:
        """Stop gracefully, and exit in any case: no other process would end this one."""
        worker = self._stop("end of the supervisor", 1)
        logger.warning("the supervisor is gone: stopping")
        RUNTIME.sleep(worker.settings.grace + self._exit_margin)
        logger.error("worker did not stop in time: exiting")
        sys.stderr.flush()
        RUNTIME.exit(1)

    def _stop(self, source: str, code: int) -> Worker:
        with self._attaching:
            worker = self._worker
            if worker is None:
                RUNTIME.exit(code)
        self._call(lambda worker: self._stop_requests.add(source, worker.stop))
        return worker

    def _call(self, function: Callable[[Worker], None]) -> None:
        """Call a function with the worker in its event loop."""
        worker, loop = self._worker, self._loop
        if worker is None or loop is None:
            return
        with suppress(RuntimeError):  # the loop is closed: the process is exiting
            loop.call_soon_threadsafe(function, worker)


class StopRequests:
    """Counter of stop requests by source.

    A service manager that signals all processes and a supervisor that forwards the same signal make one request.
    """

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._forwarded = 0

    def add(self, source: str, stop: Callable[[], None]) -> None:
        """Count a request, and call `stop` unless another source has made the same one."""
        self._requests[source] = self._requests.get(source, 0) + 1
        while self._forwarded < max(self._requests.values()):
            self._forwarded += 1
            stop()


def force_exit(code: int, stuck_handlers: Callable[[], int] = lambda: 0, *, limit: float = 2.0) -> None:
    """Exit with `code` if threads or handlers of user code still run after a time limit.

    Args:
        stuck_handlers: Returns the number of handlers that do not end; called in a thread.
        limit: Seconds.
    """
    RUNTIME.thread(lambda: _watch(code, stuck_handlers, limit), "perdure exit").start()


def _watch(code: int, stuck_handlers: Callable[[], int], limit: float) -> None:
    RUNTIME.sleep(limit)
    if handlers := stuck_handlers():
        logger.warning("exiting with {} handlers that ignored their cancellation", handlers)
        _exit(code)
    main = threading.main_thread()
    while not (held := [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]):
        RUNTIME.sleep(limit)  # whatever else takes time, such as exit functions, may continue
    logger.warning("exiting with running threads that cannot be stopped: {}", ", ".join(held))
    _exit(code)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    RUNTIME.exit(code)


def run_worker(
    place: ConnectionOptions,
    probe: ProbeOptions,
    application: str,
    *,
    concurrency: int | None,
    queues: Sequence[str] | None,
    name: str | None,
    burst: bool,
    settings: Mapping[str, object],
) -> None:
    """Run a worker until a signal or the supervisor stops it.

    Args:
        settings: Options of the command line that override the app's settings.
    """
    link = SupervisorLink.from_environment()
    with _reported(link):
        _run_worker(
            place,
            probe,
            application,
            link,
            concurrency=concurrency,
            queues=queues,
            name=name,
            burst=burst,
            settings=settings,
        )


@contextmanager
def _reported(link: SupervisorLink | None) -> Iterator[None]:
    """Send expected errors to the supervisor, which logs them as all else; without one, the command prints them."""
    try:
        yield
    except EXPECTED as raised:
        found = None if link is None else explanation(raised)
        if link is None or found is None:
            raise
        link.send("failed", why=found.text)
        raise typer.Exit(found.exit_code) from raised


def _run_worker(
    place: ConnectionOptions,
    probe: ProbeOptions,
    application: str,
    link: SupervisorLink | None,
    *,
    concurrency: int | None,
    queues: Sequence[str] | None,
    name: str | None,
    burst: bool,
    settings: Mapping[str, object],
) -> None:
    service = ServiceManager.from_environment()
    supervised = None if link is None else SupervisedWorker(link)
    url, measured = passed_redis_url(), passed_metrics()
    app = load_app(application)
    app.configure(**(place if url is None else replace(place, redis_url=url)).overrides(), **settings)
    if app.settings.address.assumed:  # the worker's first line in the log says so
        app.configure(redis_url="embedded:")
    configure_process_log(app.settings.log_level, json=app.settings.log_json, fields=log_fields)
    _freeze_garbage_collector()
    if supervised is not None:
        supervised.wait_for_work(app)
        Gateway.log_findings = supervised.link.reports
    isolated = link is not None and link.role == "isolated"

    def make_worker() -> Worker:
        worker = Worker(
            app,
            concurrency=1 if isolated else concurrency or app.default_concurrency,
            queues=queues,
            name=name,
            link=link,
            metrics=probe.metrics if link is None else measured,
        )
        add_to_json(worker=worker.id)
        return worker

    anyio.run(
        partial(serve, make_worker, supervised, probe, burst=burst and not isolated, service=service),
        backend_options={"use_uvloop": find_spec("uvloop") is not None},
    )


def _freeze_garbage_collector() -> None:
    """Exclude all objects that exist now from garbage collection: modules live until the process exits."""
    gc.collect()
    gc.freeze()


async def serve(
    make_worker: Callable[[], Worker],
    supervised: SupervisedWorker | None,
    probe: ProbeOptions,
    *,
    burst: bool = False,
    service: ServiceManager | None = None,
) -> None:
    """Run a worker in the running event loop until it is stopped, and end the process even if user code still runs.

    Args:
        supervised: Connection to the supervisor; None without one.
        service: The service manager; by default none.
    """
    service = service or ServiceManager()
    worker = make_worker()
    app = worker.app
    isolated = supervised is not None and supervised.link.role == "isolated"
    idle = sorted(set(worker.queues) - set(app.tasks.queues))
    if idle and not isolated:
        logger.warning(
            "app {!r} has no task for queue {}; it has tasks for {}", app.name, ", ".join(idle), app.tasks.queues
        )
    code = 1
    try:
        async with AsyncExitStack() as stack:
            stop = worker.stop if supervised is None else supervised.attach(worker)

            def on_signal() -> None:
                service.stopping()
                stop()

            await stack.enter_async_context(stop_on_signals(on_signal))
            stack.enter_context(probe.serving(worker.health, worker.measurements))
            await stack.enter_async_context(worker)
            await _check_rights(app, worker.queues[0])
            if supervised is not None:
                supervised.link.send("ready", worker=worker.id, queues=worker.queues)
            logger.info(
                "{} {} started: queues {}, namespace {} at {}, concurrency {}",
                "quarantine worker" if isolated else "worker",
                worker.id,
                ", ".join(worker.queues),
                app.settings.namespace,
                app.settings.address.described,
                worker.concurrency,
            )
            stack.enter_context(
                service.watching(
                    lambda: worker.health().live,
                    lambda: f"{worker.in_flight} of {counted(worker.concurrency, 'slot')} in use",
                )
            )
            try:
                await worker.run(burst=burst)
            except asyncio.CancelledError:
                # Nothing else cancels it. The tasks in flight are not released: each counts a crash, the cause too.
                logger.critical("user code ended the event loop: SystemExit or KeyboardInterrupt in an asyncio task")
                _exit(1)
        logger.info("worker {} stopped after {}", worker.id, counted(worker.settled, "run"))
        code = 0
    finally:
        force_exit(code, lambda: worker.stuck_handlers)


async def _check_rights(app: App, queue: str) -> None:
    """Raise `Refused` if the user of the connection may not read or claim messages.

    The commands name a group that does not exist, so that they have no effect: the server checks the rights first.
    """
    ready = Namespace(app.settings.namespace).partition(queue).ready
    gateway, nobody = app.producer.gateway, "~start"
    commands: tuple[tuple[str | int, ...], ...] = (
        ("XREADGROUP", "GROUP", nobody, nobody, "COUNT", 1, "STREAMS", ready, ">"),
        ("XAUTOCLAIM", ready, nobody, nobody, 0, "0-0", "COUNT", 1),
    )
    for command in commands:
        try:
            await gateway.command(*command)
        except Refused as error:
            if isinstance(error.__cause__, NoPermissionError):
                raise

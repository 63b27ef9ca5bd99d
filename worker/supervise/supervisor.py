"""Supervisor process: start-up, signals, drain and alerts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import orjson
from anyio.abc import TaskGroup

from ...queues.errors import QueueError
from ...queues.runtime import RUNTIME
from ...queues.wording import counted
from ..log import logger
from ..runtime.children.child import Child, ChildCommand, exit_status_text, wait_any
from ..runtime.children.processes import Children, StallMonitor, health_of
from ..runtime.health.report import CombinedReport
from ..runtime.metrics.families import CHILD_CRASHES, PAUSED, PROCESSES, READY, SPARE, WORKERS, Measurements
from ..runtime.metrics.totals import Totals, together
from ..runtime.service_manager import ServiceManager
from ..runtime.webhook_posting import WebhookEvent, WebhookQueue
from .config import AppInfo, SupervisorConfig
from .crash_counter import SupervisorRegistry
from .pool import WorkerPool
from .source_files import SourceFiles

MISUSE: Final = 2
"""Exit code of a child whose app or configuration is broken."""


class Supervisor:
    """One supervisor. `await Supervisor(config).run()` returns its exit code."""

    def __init__(self, config: SupervisorConfig, service: ServiceManager | None = None) -> None:
        self._config = config
        self._service = service or ServiceManager()
        self._running: Iterable[Child] = ()
        self._registry: SupervisorRegistry | None = None
        self._pool: WorkerPool | None = None
        self._webhooks: WebhookQueue | None = None
        self.failure = ""
        """Why the first child could not start, in a sentence, once `run` has returned."""
        self._totals = Totals()
        self._namespace = ""
        self._had_terminal = has_terminal()
        self._reload_requested = False
        self._changed = anyio.Event()
        self._stop_requests = 0
        self._stopping = anyio.Event()

    def health(self) -> CombinedReport:
        """Return the health of the workers. Thread-safe."""
        return health_of(self._running, self._config.timings.heartbeat_limit, self._reasons())

    def _reasons(self) -> Iterator[str]:
        """Yield what keeps the supervisor from running, or replacing, its workers."""
        if self._stop_requests:
            yield "the supervisor is stopping all workers"
        elif self._pool is None:
            yield "the supervisor is starting"
        elif self._registry is not None and (why := self._registry.pause_reason):
            yield why
        if self._irreplaceable:
            yield f"a worker that crashes now cannot be replaced: {self._irreplaceable}"

    @property
    def _irreplaceable(self) -> str:
        return self._running.irreplaceable if isinstance(self._running, Children) else ""

    def status(self) -> str:
        """Return a line for the service manager."""
        ready = sum(report.ready for report in self.health().ordinary)
        text = f"{ready} of {counted(self._config.processes, 'worker')} ready"
        if self._stop_requests:
            return "stopping"
        if self._registry is not None and self._registry.state.paused:
            return f"paused after crashes, {text}; see 'perdure worker list'"
        return text

    def measurements(self) -> Measurements:
        """Return the sums of what all workers have counted, and what they measure now. Thread-safe."""
        counts, gauges = self._totals.copied(), together(child.gauges for child in self._children_at_work())
        roles = Counter(child.role for child in self._children_at_work() if not child.stop_requests)
        gauges |= {(WORKERS, role): roles[role] for role in ("worker", "isolated")}
        gauges[READY,] = sum(report.ready for report in self.health().reports)
        gauges[PROCESSES,] = self._config.processes
        if self._registry is not None:
            gauges[PAUSED,] = float(self._registry.state.paused)
            if not self._config.burst and self._config.sources is None:  # else no spare is kept
                gauges[SPARE,] = float(self._children.has_spare)
        return Measurements(self._namespace, counts, gauges)

    def _children_at_work(self) -> Iterator[Child]:
        return (child for child in self._running if not child.exited.is_set())

    async def run(self) -> int:
        """Supervise until a signal requests a stop or, in a burst, until all tasks are done. Return the exit code.

        0: all children exited in time. 1: a child had to be killed, or a burst was paused. If the first child fails to
        start: its exit code.

        Raises:
            QueueError: Redis cannot be reached at the start, or refused.
        """
        async with anyio.create_task_group() as background:
            self._children = Children(
                ChildCommand(self._config.command, dict(self._config.environment)),
                self._config.timings,
                background,
                on_message=self._on_message,
                on_exit=self._on_child_exit,
            )
            self._background = background
            self._running = self._children
            background.start_soon(self._service.run, lambda: True, self.status)  # its watchdog watches this loop
            with self._signals():
                code = 0
                try:
                    code = await self._until_stopped()
                finally:
                    with anyio.CancelScope(shield=True):
                        in_time = await self._drain()
                        if self._registry is not None:
                            await self._registry.close()
            background.cancel_scope.cancel()
        return code or (0 if in_time else 1)

    def reload(self) -> None:
        """Replace all children by new ones, one at a time."""
        self._reload_requested = True
        if self._pool is not None:
            self._pool.reload()

    def stop(self) -> None:
        """Drain; the second time, stop all children at once; the third time, kill them."""
        self._stop_requests += 1
        self._stopping.set()
        if self._stop_requests == 1:
            logger.info("stopping all workers; send the signal again to stop at once")
        elif self._stop_requests == 2:
            logger.warning("stopping all workers at once; send the signal again to kill them")
        for child in self._children:
            if self._stop_requests > 2:
                child.kill()
            elif child.stop_requests < self._stop_requests:
                child.stop()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._on_hangup}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_hangup(self) -> None:
        """Reload on SIGHUP, or stop if the kernel sent it because the terminal was closed."""
        if self._had_terminal and not has_terminal():
            self.stop()
        else:
            self.reload()

    async def _until_stopped(self) -> int:
        code = 0
        async with anyio.create_task_group() as work:
            work.start_soon(self._cancel_when_stopping, work)
            if (sources := self._config.sources) is not None:
                work.start_soon(self._reload_on_change, sources)
            while True:
                code = await self._supervise()
                if code != MISUSE or sources is None:
                    break
                if self.failure:
                    logger.error("{}", self.failure)
                    self.failure = ""
                logger.warning("no worker runs; a change of a source file starts one")
                code = 0  # of a stop
                await self._changed.wait()
            work.cancel_scope.cancel()
        return code

    async def _cancel_when_stopping(self, work: TaskGroup) -> None:
        await self._stopping.wait()
        work.cancel_scope.cancel()

    async def _reload_on_change(self, sources: SourceFiles) -> None:
        """Replace all children whenever source files have changed. If they cannot be watched, that is logged."""
        try:
            async for paths in sources.changes():
                more = f" and {counted(len(paths) - 1, 'other file')}" if paths[1:] else ""
                logger.info("changed: {}{}", _shown(paths[0]), more)
                self._changed.set()
                if self._registry is not None:
                    await self._registry.resume()
                self.reload()
        except OSError as error:
            logger.error("could not watch the source files: {}; name fewer folders with --reload-dir", error)

    async def _supervise(self) -> int:
        """Start the first child alone, then all others.

        A broken app or setting is so reported once, and a pause that is still in force is respected.
        """
        self._changed = anyio.Event()
        self._reload_requested = False
        first = await self._children.start("worker")
        await wait_any(first.loaded, first.exited)
        if not first.loaded.is_set():
            return self._exit_code_of(first)
        app = AppInfo.from_message(first.app_info)
        config, self._namespace = self._config, app.namespace.name
        self._children.set_grace(app.grace)
        self._webhooks = WebhookQueue(app.webhook)
        self._background.start_soon(self._webhooks.run)
        registry = self._registry = SupervisorRegistry(
            app, config.name, config.processes, self._children.infos, self._send_alert, config.timings
        )
        await registry.open()
        if registry.state.paused:
            first.stop()
        else:
            first.start_work(reports=True)
            if not await first.wait_ready():
                self._registry = None
                await registry.close()
                return self._exit_code_of(first)
            logger.info(
                "supervisor {} started: {}, process {}, namespace {} at {}",
                registry.name,
                counted(config.processes, "worker"),
                RUNTIME.pid(),
                app.namespace.name,
                app.address.described,
            )
        self._service.ready()
        self._pool = WorkerPool(config, app, registry, self._children, self._service)
        if self._reload_requested:  # before there was a pool; the first child may have loaded the old code
            self._pool.reload()
        self._background.start_soon(registry.run)
        self._background.start_soon(StallMonitor(self._children, app.stall_limit, config.timings).run)
        return await self._pool.run(None if first.stop_requests else first)

    def _exit_code_of(self, first: Child) -> int:
        """Return the exit code of a supervisor whose first child failed to start, so that a retry is pointless."""
        self.failure = first.failure
        if first.code > 0:
            return first.code
        logger.error("the first worker ended before it was ready: {}", exit_status_text(first.code))
        return 128 - first.code if first.code < 0 else 1

    # children

    def _on_message(self, child: Child, kind: str) -> None:
        if kind == "counts":
            self._totals.add(child, child.rows)
            return
        if self._pool is None:
            return
        if kind == "loaded":
            child.start_work()
        elif kind == "replace":
            self._background.start_soon(self._pool.replace, child)
        else:
            self._pool.on_message(child, kind)

    async def _on_child_exit(self, child: Child) -> None:
        """Release the tasks of a child that has crashed, and count the crash."""
        self._totals.forget(child)
        if self._pool is not None:
            self._pool.on_exit(child)
        if child.crashed:
            if child.role != "spare" and (child.ready.is_set() or child.code < 0):  # else it could not start
                self._totals.count(CHILD_CRASHES, child.role)
            child.kill_group()
            await self._report_crash(child)
        if self._registry is not None and child.counts_as_crash:
            child.crashes = await self._registry.count(child)

    async def _report_crash(self, child: Child) -> None:
        """Report to Redis that a child is dead, so that other workers claim its tasks at once."""
        if self._registry is None or not child.ready.is_set():
            return
        try:
            deliveries = (await self._registry.report(child)).deliveries
        except QueueError as error:  # Redis refused; while it is unavailable, the report is retried
            logger.error(
                "could not report the crash of worker {}: {}; its tasks wait for the lease", child.worker, error
            )
            return
        logger.warning(
            "worker {} (process {}) ended by {}: {} released to other workers",
            child.worker,
            child.pid,
            child.exit_status,
            counted(deliveries, "task"),
        )

    def _send_alert(self, event: Mapping[str, Any]) -> None:
        if self._config.alert is not None:
            self._background.start_soon(run_alert, self._config.alert, event, self._config.timings.alert_limit)
        if self._webhooks is not None:
            self._webhooks.give(WebhookEvent(event))

    async def _drain(self) -> bool:
        """Stop all children, and kill those that exceed the limit; return whether all exited in time."""
        self._stop_requests = max(1, self._stop_requests)
        self._service.stopping()
        self._children.close()
        for child in self._children:
            while child.stop_requests < min(2, self._stop_requests):
                child.stop()
        with anyio.move_on_after(self._children.stop_limit):
            for child in self._children:
                await child.exited.wait()
        late = [child for child in self._children if not child.exited.is_set()]
        for child in late:
            logger.error("worker {} (process {}) did not stop in time: killed", child.worker, child.pid)
            child.kill()
        with anyio.move_on_after(self._config.timings.final_reports):
            for child in self._children:
                await child.handled.wait()
        for child in self._children:
            if not child.exited.is_set():
                logger.error(
                    "process {} did not end after SIGKILL; it waits in the kernel, see /proc/{}/stack",
                    child.pid,
                    child.pid,
                )
        return not late and self._stop_requests < 3


def _shown(path: Path) -> str:
    """Return a path as a user of this working directory would write it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


_SECRET: Final = ("ENCRYPTION_KEYS", "WEBHOOK_URL", "WEBHOOK_SECRET", "MEMORY", "ARTIFACTS", "SUPERVISED_REDIS_URL")
"""Settings that an alert command does not get, since they may hold keys and passwords that it does not need."""


def _alert_environment() -> dict[str, str]:
    """Return the environment of an alert command, which may run `perdure` itself."""
    left_out = {f"PERDURE_{name}" for name in _SECRET}
    return {name: value for name, value in os.environ.items() if name not in left_out}


async def run_alert(command: str, event: Mapping[str, Any], limit: float) -> None:
    """Run the operator's alert command in the shell, with the event as JSON on its standard input.

    Failures are logged. The command and its child processes are killed after `limit` seconds.
    """
    try:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, stdout=2, process_group=0, env=_alert_environment()
        )
    except OSError as error:
        logger.error("could not start the alert command: {}", error)
        return
    with anyio.move_on_after(limit):
        try:
            await process.communicate(orjson.dumps(event) + b"\n")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()
    if process.returncode:
        logger.error("the alert command {!r} failed with {}", command, exit_status_text(process.returncode))

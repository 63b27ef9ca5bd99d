"""The supervisor: starts children, knows at once when one ends, and makes what it held go on elsewhere.

It imports no handler code, so that nothing of the user's can harm it: what it must know of the app, its first child
tells it. Its children end when it does, for each holds one end of a pipe of which this process holds the other.

Whether the supervisor has a terminal: losing it is a SIGHUP too, and means another thing than a reload.

Telling somebody: the operator's own command, with what there is to tell on its standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import anyio
import orjson
from anyio.abc import TaskGroup

from ...queues import QueueError
from ..log import logger
from ..runtime.health import Combined
from ..runtime.webhooks import WebhookEvent, WebhookTarget, post
from .child import Child, how_it_ended, wait_any
from .children import Children
from .config import AppInfo, SupervisorConfig
from .crash_counter import SupervisorRegistry
from .pool import WorkerPool
from .stall_monitor import StallMonitor, health_of

__all__ = ["Supervisor", "alert", "has_terminal"]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


_BOUND: Final = 30.0
"""Seconds that the command may take."""


async def alert(command: str, about: Mapping[str, Any]) -> None:
    """Run a command line in the shell, with JSON on its standard input. What goes wrong is logged, and nothing else."""
    try:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, stdout=2, process_group=0
        )
    except OSError as error:
        logger.error("the alert command cannot be started: {}", error)
        return
    with anyio.move_on_after(_BOUND):
        try:
            await process.communicate(orjson.dumps(about) + b"\n")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()
    if process.returncode:
        logger.error("the alert command {!r} failed with {}", command, process.returncode)


_LAST_REPORTS: Final = 5.0
"""Seconds at the end in which Redis may still hear of crashes; without that, tasks wait for their lease."""


class Supervisor:
    """One supervisor: `await Supervisor(plan).run()` returns its exit code."""

    def __init__(self, plan: SupervisorConfig) -> None:
        self._plan = plan
        self._all: Iterable[Child] = ()
        self._ledger: SupervisorRegistry | None = None
        self._company: WorkerPool | None = None
        self._webhook: WebhookTarget | None = None
        self._terminal = has_terminal()
        self._reload_asked = False
        self._stopped = 0
        self._stopping = anyio.Event()

    def health(self) -> Combined:
        """How the workers are, as they tell it; may be asked from any thread."""
        return health_of(self._all)

    async def run(self) -> int:
        """Supervise until a signal says stop, or with a burst until all is done. Returns the exit code.

        0: all children came to their end. 1: one had to be killed, or could not be; or a burst was paused. Where the
        first child could not even begin, what that returned. Raises `QueueError` where Redis cannot be reached then.
        """
        async with anyio.create_task_group() as tending:
            self._children = Children(self._plan.commands, tending, on_said=self._hear, on_end=self._settle)
            self._tending = tending
            self._all = self._children
            with self._signals():
                code = 0
                try:
                    code = await self._until_stopped()
                finally:
                    with anyio.CancelScope(shield=True):
                        ended = await self._drain()
                        if self._ledger is not None:
                            await self._ledger.close()
            tending.cancel_scope.cancel()
        return code or (0 if ended else 1)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._hang_up}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    async def _until_stopped(self) -> int:
        code = 0
        async with anyio.create_task_group() as work:
            work.start_soon(self._cancel_when_stopped, work)
            code = await self._supervise()
            work.cancel_scope.cancel()
        return code

    async def _cancel_when_stopped(self, work: TaskGroup) -> None:
        await self._stopping.wait()
        work.cancel_scope.cancel()

    async def _supervise(self) -> int:
        """Start the first child, which says what is wrong with the app or the settings, and once; learn of it whether
        a pause is in force; then have all the others started.
        """
        pilot = await self._children.begin("worker")
        await wait_any(pilot.loaded, pilot.gone)
        if not pilot.loaded.is_set():
            return _code_of_failure(pilot)
        facts = AppInfo.read(pilot.told)
        self._children.grant(facts.grace)
        self._webhook = facts.webhook
        ledger = self._ledger = SupervisorRegistry(
            facts, self._plan.name, self._plan.processes, self._children.infos, self._raise_alarm
        )
        await ledger.open()
        if ledger.standing.paused:
            pilot.stop()
        else:
            pilot.work()
            if not await pilot.come_up():
                return _code_of_failure(pilot)
            logger.info("supervisor {} of {} workers, process {}", ledger.name, self._plan.processes, os.getpid())
        self._company = WorkerPool(self._plan, facts, ledger, self._children)
        if self._reload_asked:  # before there was anything to reload; who has started may have the old code
            self._company.reload()
        self._tending.start_soon(ledger.run)
        self._tending.start_soon(StallMonitor(self._children, facts.stall_limit).run)
        return await self._company.run(None if pilot.stops else pilot)

    # what children say, and their end

    def _hear(self, child: Child, what: str) -> None:
        if what == "loaded" and self._company is not None:
            child.work()
        elif what == "replace" and self._company is not None:
            self._tending.start_soon(self._company.replace, child)
        elif self._company is not None:
            self._company.hear(child, what)

    async def _settle(self, child: Child) -> None:
        """Do what follows from a child's end: what it held is reported, and its crash counted."""
        if self._company is not None:
            self._company.on_exit(child)
        if child.crashed:
            child.sweep_up()
            held = await self._report(child)
            if held and self._company is not None:
                self._company.scale_up(held)
        if self._ledger is not None and child.counts:
            child.crashes = await self._ledger.count(child)

    async def _report(self, child: Child) -> int:
        """Returns how many tasks it held."""
        if self._ledger is None or not child.ready.is_set():
            return 0
        try:
            held = (await self._ledger.report(child)).deliveries
        except QueueError as error:  # Redis said no; one that is away is waited for
            logger.error(
                "the end of worker {} cannot be reported: {}; its tasks wait for the lease", child.worker, error
            )
            return 0
        logger.warning(
            "worker {} (process {}) ended by {}: {} of its tasks go on elsewhere",
            child.worker,
            child.pid,
            child.how,
            held,
        )
        return held

    def _raise_alarm(self, about: Mapping[str, Any]) -> None:
        if self._plan.alert is not None:
            self._tending.start_soon(alert, self._plan.alert, about)
        if self._webhook is not None:
            self._tending.start_soon(post, self._webhook, WebhookEvent(about))

    # signals, and the end

    def _hang_up(self) -> None:
        """SIGHUP: somebody asks for a reload, or the terminal that this was started from has been closed."""
        if self._terminal and not has_terminal():
            self.stop()
        else:
            self.reload()

    def reload(self) -> None:
        """Replace all children by new ones, one at a time."""
        self._reload_asked = True
        if self._company is not None:
            self._company.reload()

    def stop(self) -> None:
        """Drain; the second time, at once; the third time, end: SIGTERM and SIGINT."""
        self._stopped += 1
        self._stopping.set()
        if self._stopped == 1:
            logger.info("stopping all workers; again to stop at once")
        elif self._stopped == 2:
            logger.warning("stopping at once; again to end the processes")
        for child in self._children:
            if self._stopped > 2:
                child.kill()
            elif child.stops < self._stopped:
                child.stop()

    async def _drain(self) -> bool:
        """Have all children stop, wait for them, and kill those that take too long; returns whether none did."""
        self._stopped = max(1, self._stopped)
        self._children.shut()
        for child in self._children:
            while child.stops < min(2, self._stopped):
                child.stop()
        with anyio.move_on_after(self._children.patience):
            for child in self._children:
                await child.gone.wait()
        late = [child for child in self._children if not child.gone.is_set()]
        for child in late:
            logger.error("worker {} (process {}) did not end in time: it is killed", child.worker, child.pid)
            child.kill()
        with anyio.move_on_after(_LAST_REPORTS):
            for child in self._children:
                await child.settled.wait()
        for child in self._children:
            if not child.gone.is_set():
                logger.error("process {} cannot be ended, not even by SIGKILL: see what it waits for", child.pid)
        return not late and self._stopped < 3


def _code_of_failure(child: Child) -> int:
    """The exit code of a supervisor whose first child has ended before it worked: there is no use in trying again."""
    if child.code > 0:
        return child.code
    logger.error("the first worker ended before it began: {}", how_it_ended(child.code))
    return 128 - child.code if child.code < 0 else 1

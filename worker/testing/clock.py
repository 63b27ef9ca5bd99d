"""The clock of a test: a server of its own, whose time the test sets forward."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import anyio

from ...queues.durations import Duration, to_seconds
from ...queues.errors import ConfigurationError
from ...queues.runtime import RUNTIME
from ..app import App
from ..durable.waiting import WaitBoard
from ..runtime.maintenance.janitor import RUNNING
from ..runtime.shared_settings import WorkerTimings
from .fixture import PerdureFixture
from .idle import Outcomes, make_worker

if TYPE_CHECKING:
    from .timed_server import TimedServer, Work

_POLL: Final = 0.002
"""Seconds between two looks at what is left to do."""

_PARK_AFTER: Final = 0.1
"""Seconds after which a run with branches parks, in place of one: the time moves on when it has."""

_SHOWN: Final = 5
"""Tasks that an error names."""


class PerdureClock(PerdureFixture):
    """A namespace for one test on a server of its own, whose time the test sets forward.

    The time of the server flows like that of the host, plus what `advance`, `move_to` and `jump` add. A datetime that
    Perdure gets in this process is one of this clock. `time.time()`, `datetime.now()` and timeouts in this process,
    such as that of `handle.result(timeout=10)`, are not.
    """

    def __init__(self, server: TimedServer, data_dir: Path) -> None:
        super().__init__(server.url, data_dir)
        self._server = server
        self._cleaned = server.time.now()

    def __enter__(self) -> Self:
        self._wall_clock, RUNTIME.wall_clock = RUNTIME.wall_clock, self._server.time.now
        self._park_after, WaitBoard.park_after = WaitBoard.park_after, _PARK_AFTER
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        RUNTIME.wall_clock, WaitBoard.park_after = self._wall_clock, self._park_after
        super().__exit__(*raised)

    def _remove_keys(self) -> None:
        """Do nothing: the server ends with the test."""

    def now(self) -> datetime:
        """Return the time of the server."""
        return datetime.fromtimestamp(self._server.time.now(), UTC)

    def jump(self, duration: Duration) -> None:
        """Set the time forward at once: nothing is waited for, and all that became due is due together.

        Leases of connected workers last as long as before.
        """
        self._server.step(_forward(duration))

    async def advance(self, duration: Duration, *, timeout: Duration = 10.0) -> None:
        """Let a duration pass as if the test had waited: from due time to due time, in order.

        At each of them, the running workers do what is due before the time moves on. A task that sleeps again is woken
        again. Without a worker, all that became due waits for one.

        Args:
            duration: seconds or a timedelta.
            timeout: seconds that the work of one due time may take.

        Raises:
            TimeoutError: a task did not end in that time.
        """
        await self._move(_forward(duration), to_seconds(timeout, "timeout"))

    async def move_to(self, moment: datetime, *, timeout: Duration = 10.0) -> None:
        """Let the time pass until a datetime, as `advance` does. Raises `ValueError` if it has passed."""
        if moment.utcoffset() is None:
            raise ValueError(f"moment must have a time zone, got {moment}: use clock.now() + timedelta(...)")
        await self.advance(moment - self.now(), timeout=timeout)

    async def run_until_idle(
        self,
        app: App,
        *,
        wait_due: bool = False,
        allow_failures: bool = False,
        timeout: Duration = 30.0,
        concurrency: int = 16,
        queues: Sequence[str] | None = None,
    ) -> Counter[str]:
        """Run a worker until nothing is left to do, and set the time forward to the retry of a task that failed.

        Args:
            app: the app; it need not be open.
            wait_due: also set the time forward to all other tasks that are due later, until no task is left.
            allow_failures, timeout, concurrency, queues: as of `perdure.testing.run_until_idle`; the timeout is in
                seconds of the test.

        Raises:
            TaskFailed: a task became a dead letter; its cause is the error that the handler raised.
            TimeoutError: there was still something to do.
        """
        __tracebackhide__ = True
        outcomes, limit = Outcomes(), to_seconds(timeout, "timeout")
        idle = False
        async with make_worker(app, outcomes, concurrency, queues) as worker, anyio.create_task_group() as running:
            running.start_soon(worker.run)
            with anyio.move_on_after(limit):
                while (work := await self._settle(math.inf, outcomes, wait_due)).due < math.inf:
                    self._server.step_to(work.due)
                if await self._clean_up():
                    await self._settle(math.inf, outcomes)
                idle = True
            if idle:
                worker.stop()
            else:
                running.cancel_scope.cancel()
        if not allow_failures:
            outcomes.check()
        if not idle:
            raise outcomes.time_out(app, limit)
        return outcomes.states

    async def _move(self, left: float, limit: float) -> None:
        """Skip so many seconds in all; what the workers need at each due time passes besides."""
        while (work := await self._settle(limit)).served:
            if work.due - self._server.time.now() > left:
                break
            left -= self._server.step_to(work.due)
        self._server.step(left)
        await self._settle(limit)
        if await self._clean_up():
            await self._settle(limit)

    async def _clean_up(self) -> bool:
        """Let the janitor of each worker clean up, which it does once a minute. Return whether one did.

        It is due if that much time has passed by the clock of the server since the last time.
        """
        now = self._server.time.now()
        if now - self._cleaned < WorkerTimings.clean_interval:
            return False
        janitors = [janitor for janitor, loop in RUNNING.items() if loop is asyncio.get_running_loop()]
        for janitor in janitors:
            await janitor.clean()
            self._cleaned = now
        return bool(janitors)

    async def _settle(self, limit: float, outcomes: Outcomes | None = None, wait_due: bool = True) -> Work:
        """Wait until nothing is left to do now, and the outcomes of all runs are known; return what is due later.

        Without `wait_due`, that is the retries of tasks that failed. Raises `TimeoutError`.
        """
        ends = time.monotonic() + limit
        while True:
            work = self._server.work(None if wait_due or outcomes is None else outcomes.owed)
            if not (work.left and work.served) and not (outcomes is not None and outcomes.running):
                return work
            if time.monotonic() > ends:
                shown = "; ".join(work.left[:_SHOWN])
                raise TimeoutError(f"could not move the clock: after {limit:g} s {shown}")
            await anyio.sleep(_POLL)


@contextmanager
def open_clock(data_dir: Path) -> Iterator[PerdureClock]:
    """Run a server of its own, and give a namespace on it. Raises `ConfigurationError` without the extra `testing`."""
    try:
        from .timed_server import TimedServer  # imports fakeredis, an extra
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("fakeredis", "lupa"):
            raise
        raise ConfigurationError(
            f"the fixture perdure_clock needs the package {package}: pip install 'perdure[testing]'"
        ) from None
    with TimedServer() as server, PerdureClock(server, data_dir) as clock:
        yield clock


def _forward(duration: Duration) -> float:
    """Return seconds to skip. Raises `ValueError` unless they are finite and not negative."""
    seconds = to_seconds(duration, "duration")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"duration must be 0 or more seconds, got {duration}: the clock only moves forward")
    return seconds

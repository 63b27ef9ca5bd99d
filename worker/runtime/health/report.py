"""How a worker is, on four levels. A worker may well be alive and of no use.

    alive        its event loop answers
    connected    Redis answers it, and its leases are renewed
    consuming    it takes messages, or has no slot free for them
    progress     what it runs gets on, or it has nothing to run

Live is who is alive and makes progress: any other is helped by being started anew, and by nothing else. Ready is who is
well on all levels: not so a worker whose Redis is away, which starting it anew would not bring back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from ...agent import CoherenceMonitor
from ...settings import Settings
from ..executor import Executor
from ..intake import Intake
from ..quarantine_gate import QuarantineGate
from ..slots import Slots
from .deadlines import RunDeadlines
from .loop_watchdog import LoopWatchdog

__all__ = [
    "ALIVE",
    "CONNECTED",
    "CONSUMING",
    "LEVELS",
    "PROGRESS",
    "CombinedReport",
    "Health",
    "IncoherentRun",
    "Level",
    "Report",
]

ALIVE: Final = "alive"
CONNECTED: Final = "connected"
CONSUMING: Final = "consuming"
PROGRESS: Final = "progress"
LEVELS: Final = (ALIVE, CONNECTED, CONSUMING, PROGRESS)

_LONGEST_READ: Final = 20.0
"""Seconds without a turn of the intake, beyond any blocking read and its margin, after which it counts as stuck."""


_MOST_INCOHERENT: Final = 20
"""Runs that a report names, which goes to Redis every few seconds."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level. said: what is so. remedy: what a person can do, where it is not as it should be."""

    name: str
    ok: bool
    said: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class IncoherentRun:
    """An agent's run that no longer knows what it is doing. checks: those that say so; what they say, the task's log
    has, which is sealed where there are keys.
    """

    id: str
    task: str
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """How one worker is. incoherent: runs of agents, the first ones; being so is no fault of the worker's."""

    worker: str
    levels: tuple[Level, ...]
    incoherent: tuple[IncoherentRun, ...] = ()

    @property
    def live(self) -> bool:
        return all(level.ok for level in self.levels if level.name in (ALIVE, PROGRESS))

    @property
    def ready(self) -> bool:
        return all(level.ok for level in self.levels)

    @property
    def coherent(self) -> bool:
        return not self.incoherent

    def summary(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "worker": self.worker,
            "live": self.live,
            "ready": self.ready,
            "levels": [asdict(level) for level in self.levels],
            "incoherent": [asdict(one) for one in self.incoherent],
        }

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> Self:
        """The report that a summary was made of. Raises `KeyError` or `TypeError` for what is none."""
        return cls(
            str(summary["worker"]),
            tuple(
                Level(str(one["name"]), bool(one["ok"]), str(one.get("said", "")), str(one.get("remedy", "")))
                for one in summary["levels"]
            ),
            tuple(
                IncoherentRun(str(one["id"]), str(one["task"]), tuple(map(str, one["checks"])))
                for one in summary.get("incoherent", ())
            ),
        )


class CombinedReport:
    """How several workers are, as one: a supervisor's."""

    def __init__(self, reports: Iterable[Report]) -> None:
        self.reports = list(reports)

    @property
    def live(self) -> bool:
        """Whether any is, or there is none: the supervisor replaces the others by itself."""
        return not self.reports or any(report.live for report in self.reports)

    @property
    def ready(self) -> bool:
        """Whether all are, and there is at least one."""
        return bool(self.reports) and all(report.ready for report in self.reports)

    @property
    def coherent(self) -> bool:
        """Whether all are."""
        return all(report.coherent for report in self.reports)

    def summary(self) -> dict[str, Any]:
        return {
            "live": self.live,
            "ready": self.ready,
            "workers": [report.summary() for report in self.reports],
        }


class Health:
    """A worker's own look at itself. May be asked from any thread; what it reads is one value at a time."""

    def __init__(
        self,
        worker: str,
        settings: Settings,
        watchdog: LoopWatchdog,
        executor: Executor,
        slots: Slots,
        gate: QuarantineGate,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._watchdog = watchdog
        self._executor = executor
        self._slots = slots
        self._gate = gate
        self._clock = clock
        self._answered: float | None = None
        self._read_error = ""
        self._renewal_error = ""
        self._settled = 0
        self._progressed: float | None = None
        self.deadlines: RunDeadlines | None = None
        self.intake: Intake | None = None
        """Who takes messages; None before it has begun, and where nobody does."""
        self.stopping = False

    # what it is told

    def read_succeeded(self) -> None:
        """Redis has answered."""
        self._answered = self._clock()
        self._read_error = ""

    def read_failed(self, error: BaseException) -> None:
        """Redis has not."""
        self._read_error = str(error)

    def renewal_failed(self, error: BaseException | None) -> None:
        """What keeps the beat from renewing leases; None for nothing."""
        self._renewal_error = "" if error is None else str(error)

    # what it tells

    def progress(self) -> float | None:
        """Seconds since anything was begun, recorded or settled, as far as was seen; None where nothing ever was."""
        settled = self._executor.settled.total()
        if settled != self._settled:
            self._settled, self._progressed = settled, self._clock()
        moments = [run.active for run in self._executor.runs]
        if self._progressed is not None:
            moments.append(self._progressed)
        return max(0.0, self._clock() - max(moments)) if moments else None

    def report(self, *, told_to_redis: bool = False) -> Report:
        """How the worker is. told_to_redis: the report goes there, so whoever reads it knows that the way is open."""
        return Report(
            self._worker,
            (self._alive(), self._connected(told_to_redis), self._consuming(), self._progress()),
            tuple(self._incoherent_runs()),
        )

    def _incoherent_runs(self) -> Iterator[IncoherentRun]:
        confused = 0
        for run in self._executor.runs:
            monitor = run.observer(CoherenceMonitor)
            if monitor is None or not (findings := monitor.findings):
                continue
            if (confused := confused + 1) > _MOST_INCOHERENT:
                return
            yield IncoherentRun(run.id, run.envelope.task, tuple(dict.fromkeys(one.check for one in findings)))

    def _alive(self) -> Level:
        if not self._watchdog.is_slow():
            return Level(ALIVE, True, "the event loop answers")
        return Level(
            ALIVE,
            False,
            f"the event loop has not answered for {self._watchdog.lag:.1f} s",
            "a handler blocks it (the log has the stacks): put blocking work into a step with a sync function",
        )

    def _connected(self, heard: bool) -> Level:
        remedy = f"see that Redis at {self._settings.address.shown} answers; the worker reconnects by itself"
        if self._renewal_error:
            return Level(CONNECTED, False, f"leases cannot be renewed: {self._renewal_error}", remedy)
        if heard:
            return Level(CONNECTED, True, "Redis answers")
        if self._answered is None:
            return Level(CONNECTED, False, self._read_error or "it is only starting", remedy)
        silent = self._clock() - self._answered
        # While the loop is blocked nobody asks, so that nothing comes says nothing of Redis.
        if self._read_error or (silent > 2 * self._settings.heartbeat and not self._watchdog.is_slow()):
            return Level(
                CONNECTED, False, f"no answer from Redis for {silent:.1f} s {self._read_error}".rstrip(), remedy
            )
        return Level(CONNECTED, True, f"Redis answered {silent:.1f} s ago")

    def _consuming(self) -> Level:
        intake = self.intake
        if intake is None or self.stopping:
            said = "it is stopping, and takes nothing more" if self.stopping else "it takes no messages yet"
            return Level(CONSUMING, False, said)
        if intake.error:
            return Level(CONSUMING, False, f"it cannot take messages: {intake.error}", "see that Redis answers")
        if not self._slots.free:
            return Level(CONSUMING, True, f"all {self._slots.capacity} slots are taken")
        if self._gate.dedicated or not self._gate.has_room:
            return Level(CONSUMING, True, "it is there for a task whose worker died")
        since = self._clock() - intake.last_read
        if since > _LONGEST_READ:
            return Level(CONSUMING, False, f"it has not asked for messages for {since:.0f} s", "restart this worker")
        return Level(CONSUMING, True, "it reads")

    def _progress(self) -> Level:
        guard, busy = self.deadlines, self._slots.busy
        if guard is not None and guard.degraded is not None:
            return Level(PROGRESS, False, guard.degraded, "restart this worker")
        if guard is not None and not self._slots.free and all(guard.is_stuck(run) for run in self._executor.runs):
            return Level(
                PROGRESS,
                False,
                f"all {self._slots.capacity} slots are taken by runs that do nothing or do not end",
                "restart this worker, and see in the log where they hang",
            )
        since = self.progress()
        last = "" if since is None else f", something got done {since:.1f} s ago"
        return Level(PROGRESS, True, f"{busy} of {self._slots.capacity} slots run{last}" if busy else f"idle{last}")

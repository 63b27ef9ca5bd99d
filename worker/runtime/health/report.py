"""The health report of a worker, on four levels.

    alive        the event loop answers and reaches Redis, and so does the thread that renews leases
    connected    Redis answers, and leases are renewed
    consuming    the worker reads messages, or all slots are in use; not if it is short of memory
    progress     the running tasks make progress, or there are none

Live: the levels alive and progress are ok. A worker that is not live needs a restart, and only a restart helps. Ready:
all levels are ok. A worker whose Redis is unavailable is not ready, and a restart would not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from ....queues.runtime import RUNTIME

if TYPE_CHECKING:  # a supervisor reads reports only
    from ....queues.delivery.heartbeat import LeaseHeartbeat
    from ...settings import Settings
    from ..executor import Executor
    from ..intake import Intake
    from ..quarantine_gate import QuarantineGate
    from ..slots import Slots
    from .capacity import Capacity
    from .deadlines import RunDeadlines
    from .loop_watchdog import LoopWatchdog
    from .redis_contact import RedisContact

ALIVE: Final = "alive"
CONNECTED: Final = "connected"
CONSUMING: Final = "consuming"
PROGRESS: Final = "progress"
LEVELS: Final = (ALIVE, CONNECTED, CONSUMING, PROGRESS)

_MAX_READ: Final = 20.0
"""Seconds without a read after which the intake counts as stuck; longer than any blocking read."""


_READ_ONLY: Final = "READONLY"
"""Word of the error of a replica, or of a primary that was demoted."""

_READ_ONLY_REMEDY: Final = "it is a replica, or was demoted: promote it, or point the workers to the primary"

_MAX_INCOHERENT: Final = 20
"""Limit of incoherent runs in a report, because reports are stored in Redis every few seconds."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level. said: the finding. remedy: what an operator can do if `ok` is False."""

    name: str
    ok: bool
    said: str = ""
    remedy: str = ""

    @property
    def reason(self) -> str:
        """The finding and the remedy, as one sentence."""
        said = self.said or f"the worker is not {self.name}"
        return f"{said.rstrip('.')}; {self.remedy}" if self.remedy else said


@dataclass(frozen=True, slots=True)
class IncoherentRun:
    """A run of an agent that fails coherence checks.

    checks: names of the checks; their findings are in the event log.
    """

    id: str
    task: str
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one worker.

    incoherent: the first incoherent runs of agents. paused: what operators have paused of its tasks, in sentences. Both
    do not affect `live` or `ready`.
    """

    worker: str
    levels: tuple[Level, ...]
    incoherent: tuple[IncoherentRun, ...] = ()
    paused: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        return all(level.ok for level in self.levels if level.name in (ALIVE, PROGRESS))

    @property
    def ready(self) -> bool:
        return all(level.ok for level in self.levels)

    @property
    def coherent(self) -> bool:
        return not self.incoherent

    @property
    def reasons(self) -> list[str]:
        """Why the worker is not ready, and what operators have paused, in sentences."""
        return [*dict.fromkeys(level.reason for level in self.levels if not level.ok), *self.paused]

    def summary(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "worker": self.worker,
            "live": self.live,
            "ready": self.ready,
            "levels": [asdict(level) for level in self.levels],
            "incoherent": [asdict(one) for one in self.incoherent],
            "paused": list(self.paused),
        }

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> Self:
        """Return the report that a summary was made of. Raises KeyError or TypeError if it is not a summary."""
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
            tuple(map(str, summary.get("paused", ()))),
        )


class CombinedReport:
    """The reports of several workers as one: that of a supervisor.

    Args:
        ordinary: Reports of the workers that run all tasks. isolated: of those that run quarantined tasks only.
        reasons: Sentences about the supervisor itself.
    """

    def __init__(
        self, ordinary: Iterable[Report], isolated: Iterable[Report] = (), reasons: Iterable[str] = ()
    ) -> None:
        self.ordinary = list(ordinary)
        self.reports = [*self.ordinary, *isolated]
        self._reasons = list(reasons)

    @property
    def live(self) -> bool:
        """Whether an ordinary worker is live, or there is no such worker: the supervisor replaces the others."""
        return not self.ordinary or any(report.live for report in self.ordinary)

    @property
    def ready(self) -> bool:
        """Whether there are workers and all are ready."""
        return bool(self.reports) and all(report.ready for report in self.reports)

    @property
    def coherent(self) -> bool:
        """Whether all workers are coherent."""
        return all(report.coherent for report in self.reports)

    @property
    def reasons(self) -> list[str]:
        """Why the supervisor or one of its workers is not ready, and what operators have paused, in sentences."""
        paused = dict.fromkeys(text for report in self.reports for text in report.paused)
        unready = [
            f"worker {report.worker}: {level.reason}"
            for report in self.reports
            for level in report.levels
            if not level.ok
        ]
        return [*self._reasons, *unready, *paused] or ([] if self.reports else ["no worker is running"])

    def summary(self) -> dict[str, Any]:
        return {
            "live": self.live,
            "ready": self.ready,
            "workers": [report.summary() for report in self.reports],
        }


class Health:
    """The health of the worker in this process. `report` may be called from any thread."""

    def __init__(
        self,
        worker: str,
        settings: Settings,
        watchdog: LoopWatchdog,
        executor: Executor,
        slots: Slots,
        gate: QuarantineGate,
        contact: RedisContact,
        heartbeat: LeaseHeartbeat,
        deadlines: RunDeadlines,
        capacity: Capacity,
        paused: Callable[[], Sequence[str]] = tuple,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """paused: returns what operators have paused, in sentences."""
        self._worker = worker
        self._contact = contact
        self._heartbeat = heartbeat
        self._deadlines = deadlines
        self._capacity = capacity
        self._paused = paused
        self._settings = settings
        self._watchdog = watchdog
        self._executor = executor
        self._slots = slots
        self._gate = gate
        self._clock = clock or RUNTIME.monotonic
        self._answered: float | None = None
        self._read_error = ""
        self._renewal_error = ""
        self._settled = 0
        self._progressed: float | None = None
        self._intake: Intake | None = None
        self.stopping = self.draining = False

    # inputs

    def watch(self, intake: Intake) -> None:
        """Report about this intake loop from now on: the worker runs."""
        self._intake = intake

    def read_succeeded(self) -> None:
        """Record that Redis answered."""
        self._answered = self._clock()
        self._read_error = ""

    def read_failed(self, error: BaseException) -> None:
        """Record an error of Redis."""
        self._read_error = str(error)

    def renewal_failed(self, error: BaseException | None) -> None:
        """Record the error of the last lease renewal, None if it succeeded."""
        self._renewal_error = "" if error is None else str(error)

    # outputs

    def progress(self) -> float | None:
        """Return the seconds since the last start, record or settlement, None before the first one."""
        settled = self._executor.settled.total()
        if settled != self._settled:
            self._settled, self._progressed = settled, self._clock()
        moments = [run.active for run in self._executor.runs]
        if self._progressed is not None:
            moments.append(self._progressed)
        return max(0.0, self._clock() - max(moments)) if moments else None

    def report(self, *, for_redis: bool = False) -> Report:
        """Return the report. for_redis: it will be stored in Redis, so its readers know that Redis answers."""
        return Report(
            self._worker,
            (self._alive(), self._connected(for_redis), self._consuming(), self._progress()),
            tuple(self._incoherent_runs()),
            tuple(self._paused()),
        )

    def _incoherent_runs(self) -> Iterator[IncoherentRun]:
        from ...durable.run import RunChecks

        confused = 0
        for run in self._executor.runs:
            checks = run.observer(RunChecks)
            if checks is None or not (failed := checks.failed):
                continue
            if (confused := confused + 1) > _MAX_INCOHERENT:
                return
            yield IncoherentRun(run.id, run.envelope.task, tuple(failed))

    def _alive(self) -> Level:
        contact = self._contact
        if self._watchdog.is_slow():
            return Level(
                ALIVE,
                False,
                f"the event loop has not answered for {self._watchdog.lag:.1f} s",
                "a handler blocks it (the log has the stacks): move blocking code into a step with a sync function",
            )
        if contact.renewal_stopped:
            return Level(ALIVE, False, self._renewal_text(), "restart this worker; the log shows the error")
        if contact.cut_off:
            return Level(ALIVE, False, contact.text, "restart this worker")
        return Level(ALIVE, True, "the event loop answers")

    def _renewal_text(self) -> str:
        heartbeat = self._heartbeat
        if heartbeat.ended:
            return "the thread that renews leases has ended"
        return f"no lease has been renewed for {heartbeat.overdue:.1f} s {self._renewal_error}".rstrip()

    def _connected(self, for_redis: bool) -> Level:
        remedy = f"check that Redis at {self._settings.address.shown} answers; the worker reconnects by itself"
        if self._renewal_error:
            return Level(CONNECTED, False, f"leases cannot be renewed: {self._renewal_error}", remedy)
        heartbeat = self._heartbeat
        if heartbeat.ended or heartbeat.overdue > self._contact.lease:
            return Level(CONNECTED, False, self._renewal_text(), "look at the log for the error")
        if for_redis:
            return Level(CONNECTED, True, "Redis answers")
        if self._answered is None:
            return Level(CONNECTED, False, self._read_error or "the worker is starting", remedy)
        silent = self._clock() - self._answered
        # A blocked loop sends no commands, so silence says nothing about Redis.
        if self._read_error or (silent > 2 * self._settings.heartbeat and not self._watchdog.is_slow()):
            said = f"no answer from Redis for {silent:.1f} s {self._read_error}".rstrip()
            if _READ_ONLY in self._read_error:
                said, remedy = f"Redis is read-only: {self._read_error}", _READ_ONLY_REMEDY
            return Level(CONNECTED, False, said, remedy)
        return Level(CONNECTED, True, f"Redis answered {silent:.1f} s ago")

    def _consuming(self) -> Level:
        intake = self._intake
        if intake is None or self.stopping or self.draining:
            said = "the worker does not read yet"
            if self.stopping or self.draining:
                said = "the worker is stopping" if self.stopping else "the worker is draining: it takes no more tasks"
            return Level(CONSUMING, False, said)
        if intake.error:
            return Level(CONSUMING, False, f"could not read messages: {intake.error}", "check that Redis answers")
        if (limited := self._limited()) is not None:
            return limited
        if self._gate.dedicated or not self._gate.has_room:
            return Level(CONSUMING, True, "reserved for a quarantined task")
        since = self._clock() - intake.last_read
        if since > _MAX_READ:
            return Level(CONSUMING, False, f"no read for {since:.0f} s", "restart this worker")
        return Level(CONSUMING, True, "reading messages")

    def _limited(self) -> Level | None:
        """Return what keeps the worker from reading, or from reading more; None if nothing does."""
        if self._capacity.short_of_memory:
            return Level(
                CONSUMING,
                False,
                f"memory is short, no new task is read: {self._capacity.memory} is used",
                "lower --concurrency, or give the worker more memory",
            )
        if self._capacity.lags:
            said = f"up to {self._slots.usable} of {self._slots.capacity} slots are filled"
            return Level(CONSUMING, True, f"{said}, since the event loop lags by {self._capacity.lag:.1f} s")
        if not self._slots.free:
            return Level(CONSUMING, True, f"all {self._slots.capacity} slots are in use")
        return None

    def _progress(self) -> Level:
        guard, used = self._deadlines, self._slots.used
        if guard.degraded is not None:
            return Level(PROGRESS, False, guard.degraded, "restart this worker")
        runs = self._executor.runs
        if not self._slots.free and runs and all(guard.is_stuck(run) for run in runs):
            return Level(
                PROGRESS,
                False,
                f"all {self._slots.capacity} slots are used by runs that are stuck",
                "restart this worker; the log shows where they hang",
            )
        since = self.progress()
        last = "" if since is None else f", last progress {since:.1f} s ago"
        return Level(PROGRESS, True, f"{used} of {self._slots.capacity} slots in use{last}" if used else f"idle{last}")

"""The readings of one worker: its counts and gauges, for its own health port or for its supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ....queues.runtime import RUNTIME
from ...log import FirstOfEach, logger
from ..health.capacity import resident_memory
from .families import (
    LAG,
    MARGIN,
    MEMORY,
    READY,
    REDIS_AWAY,
    SLOTS,
    SLOTS_USABLE,
    SLOTS_USED,
    WORKERS,
    Key,
    Measurements,
)
from .meter import Meter

if TYPE_CHECKING:
    from ....queues.delivery.heartbeat import LeaseHeartbeat
    from ..health.capacity import Capacity
    from ..health.loop_watchdog import LoopWatchdog
    from ..health.redis_contact import RedisContact
    from ..health.report import Health
    from ..slots import Slots
    from ..supervisor_link import Link

_INTERVAL: Final = 0.9
"""Seconds between two messages to the supervisor at least."""

_ROWS: Final = 40
"""Counts in one line of the pipe: a few kilobytes."""

_LINES: Final = 8
"""Lines of one message: a full pipe would drop messages that matter more."""


class WorkerReadings:
    """Reads one worker. `read` may be called from any thread, also while the event loop is blocked."""

    def __init__(
        self,
        meter: Meter,
        namespace: str,
        slots: Slots,
        capacity: Capacity,
        contact: RedisContact,
        watchdog: LoopWatchdog,
        heartbeat: LeaseHeartbeat,
        health: Health,
    ) -> None:
        self._meter = meter
        self._namespace = namespace
        self._slots = slots
        self._capacity = capacity
        self._contact = contact
        self._watchdog = watchdog
        self._heartbeat = heartbeat
        self._health = health
        self._errors = FirstOfEach()
        self._next = 0.0
        self._sent: dict[Key, list[float]] = {}

    def read(self) -> Measurements:
        """Return what the worker has counted, and what it measures now."""
        gauges: dict[Key, float] = {(name,): value for name, value in self._gauges().items()}
        gauges[WORKERS, "worker"], gauges[READY,] = 1, float(self._health.report().ready)
        return Measurements(self._namespace, self._counts(), gauges)

    def send(self, link: Link, *, last: bool = False) -> None:
        """Send the supervisor what has changed, once a second at most. last: the worker ends, so nothing may be left.

        Each row has the whole number, so that a lost one is made good by the next. Never raises.
        """
        now = RUNTIME.monotonic()
        if now < self._next and not last:
            return
        self._next = now + _INTERVAL
        try:
            self._send(link, None if last else _LINES)
        except Exception as error:  # noqa: BLE001 - no worker ends because of a metric
            if self._errors.is_first(type(error).__name__):
                logger.opt(exception=error).warning("could not send metrics to the supervisor; the worker continues")

    def _send(self, link: Link, lines: int | None) -> None:
        changed = [(key, numbers) for key, numbers in self._counts().items() if self._sent.get(key) != numbers]
        order = {key: place for place, key in enumerate(self._sent)}  # those that were sent last come last
        changed.sort(key=lambda row: order.get(row[0], -1))
        gauges = self._gauges()
        for line in range(max(1, -(-len(changed) // _ROWS))):
            rows = changed[line * _ROWS : (line + 1) * _ROWS]
            if line == lines or not link.send("counts", rows=rows, gauges=gauges):
                return  # the rest comes with the next message
            for key, numbers in rows:
                self._sent.pop(key, None)
                self._sent[key] = numbers

    def _counts(self) -> dict[Key, list[float]]:
        counts = self._meter.copied()
        counts[REDIS_AWAY,] = [self._contact.away]
        return counts

    def _gauges(self) -> Mapping[str, float]:
        slots, heartbeat = self._slots, self._heartbeat
        gauges: dict[str, Any] = {
            SLOTS: slots.capacity,
            SLOTS_USABLE: slots.usable,
            SLOTS_USED: slots.used,
            LAG: max(self._meter.lag.value or 0.0, self._watchdog.lag),
            MEMORY: resident_memory(),
        }
        left = 1 - heartbeat.overdue / self._contact.lease  # also where no renewal succeeds
        if (margin := self._meter.margin.value) is not None or left < 1:
            gauges[MARGIN] = max(0.0, left if margin is None else min(left, margin))
        return {name: float(value) for name, value in gauges.items() if value is not None}

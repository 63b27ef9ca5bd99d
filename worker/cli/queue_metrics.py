"""Prometheus metrics of queues, limits and budgets, for `perdure queue metrics`. Needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ...queues.budgets.definition import from_amount
from ...queues.budgets.store import Ledger
from ...queues.errors import QueueError
from ...queues.inspection.views import QueueStats
from ...queues.lanes import NORMAL
from ...queues.limit_views import LimitStatus

ReadStats = Callable[[], tuple[Sequence[QueueStats], Sequence[LimitStatus], Sequence[Ledger], float]]

_LABELS: Final = ("namespace", "queue")

_GAUGES: Final[tuple[tuple[str, str, Callable[[QueueStats], float | None]], ...]] = (
    ("perdure_queue_depth", "Messages that wait for a worker.", lambda stats: stats.depth),
    ("perdure_queue_in_flight", "Messages that are delivered to a worker.", lambda stats: stats.in_flight),
    ("perdure_queue_due", "Tasks that are scheduled for later.", lambda stats: stats.due),
    (
        "perdure_queue_overdue_seconds",
        "Time since the earliest scheduled task has come due; 0 if none has.",
        lambda stats: stats.overdue,
    ),
    ("perdure_queue_limited", "Tasks that wait for limits.", lambda stats: stats.limited),
    ("perdure_queue_held", "Scheduled tasks that pauses of operators hold.", lambda stats: stats.held),
    ("perdure_queue_paused", "Whether an operator has paused the whole queue.", lambda stats: stats.pause is not None),
    ("perdure_queue_dead_letters", "Dead letters.", lambda stats: stats.dead),
    (
        "perdure_queue_oldest_age_seconds",
        "Age of the oldest message that waits for a worker; 0 without one.",
        lambda stats: stats.oldest_age or 0.0,
    ),
    (
        "perdure_queue_settled_tasks_per_second",
        "Deliveries settled by all workers per second, over the last 30 seconds.",
        lambda stats: stats.rate,
    ),
    (
        "perdure_queue_drain_time_seconds",
        "Estimated time until no task waits or runs; no sample if tasks wait or run and the rate is 0.",
        lambda stats: stats.drain_time,
    ),
    ("perdure_queue_workers", "Live workers of the queue.", lambda stats: stats.workers),
)
"""Name, help text and value of each gauge."""

_LANE_GAUGES: Final[tuple[tuple[str, str, Callable[[QueueStats], float | None]], ...]] = (
    ("perdure_queue_lane_depth", "Messages of a priority that wait for a worker.", lambda stats: stats.depth),
    (
        "perdure_queue_lane_oldest_age_seconds",
        "Age of the oldest message of a priority that waits for a worker; 0 without one.",
        lambda stats: stats.oldest_age or 0.0,
    ),
)
"""The same for the lanes of queues that have several."""


_LIMIT_GAUGES: Final[tuple[tuple[str, str, Callable[[LimitStatus], float]], ...]] = (
    ("perdure_limit_in_use", "Tokens of the limit that tasks hold, of all keys.", lambda status: status.in_use),
    ("perdure_limit_waiting", "Tasks that wait for the limit.", lambda status: status.waiting),
    (
        "perdure_limit_stopped",
        "Whether nothing starts: the limit is held, or its breaker is open.",
        lambda status: bool(status.held_until) or status.breaker == "open",
    ),
)
"""The same for limits."""

_BUDGET_GAUGES: Final[tuple[tuple[str, str, Callable[[Ledger], Mapping[str, int]]], ...]] = (
    ("perdure_budget_spent", "What was spent of a key of a named budget.", lambda ledger: ledger.spent),
    ("perdure_budget_limit", "What may be spent of it, with raises.", lambda ledger: ledger.limits),
)
"""The same for budgets, by unit."""


_SCHEDULES: Final = "Time since the earliest schedule has come due; 0 if none has."


class _Queues(Collector):
    """Collector that reads queues, limits and budgets at each scrape.

    If Redis is unavailable, it yields `perdure_up` only.
    """

    def __init__(self, namespace: str, read: ReadStats) -> None:
        self._namespace = namespace
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = "Whether Redis responds."
        try:
            found_queues, limits, ledgers, overdue = self._read()
            queues = [stats for stats in found_queues if stats.partitions or not stats.problem]
        except QueueError:
            yield GaugeMetricFamily("perdure_up", up, value=0)
            return
        yield GaugeMetricFamily("perdure_up", up, value=1)
        gauge = GaugeMetricFamily("perdure_schedule_overdue_seconds", _SCHEDULES, labels=("namespace",))
        gauge.add_metric((self._namespace,), overdue)
        yield gauge
        for name, help_text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=_LABELS)
            for stats in queues:
                if (value := value_of(stats)) is not None:
                    gauge.add_metric((self._namespace, stats.queue), value)
            yield gauge
        lanes = [(stats.queue, lane, found) for stats in queues for lane, found in stats.lanes.items()]
        several = {queue for queue, lane, _ in lanes if lane != NORMAL}
        for name, help_text, value_of in _LANE_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=(*_LABELS, "lane"))
            for queue, lane, found in lanes:
                if queue in several and (value := value_of(found)) is not None:
                    gauge.add_metric((self._namespace, queue, lane), value)
            yield gauge
        for name, help_text, value_of_limit in _LIMIT_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=("namespace", "limit"))
            for status in limits:
                gauge.add_metric((self._namespace, status.name), value_of_limit(status))
            yield gauge
        yield from self._budgets(ledgers)

    def _budgets(self, ledgers: Sequence[Ledger]) -> Iterable[GaugeMetricFamily]:
        for name, help_text, amounts_of in _BUDGET_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=("namespace", "budget", "key", "unit"))
            for ledger in ledgers:
                key, amounts = ledger.ledger.partition(":")[2], amounts_of(ledger)
                for unit in ledger.limits:
                    gauge.add_metric((self._namespace, ledger.name, key, unit), from_amount(unit, amounts.get(unit, 0)))
            yield gauge


def queue_registry(namespace: str, read: ReadStats) -> CollectorRegistry:
    """Return a registry with these gauges only.

    Args:
        read: Returns the current queues, limits, ledgers of named budgets, and the seconds for which a schedule is
            overdue; called at each scrape.
    """
    registry = CollectorRegistry()
    registry.register(_Queues(namespace, read))
    return registry


def exposition(registry: CollectorRegistry) -> str:
    """Return the gauges in Prometheus' text format."""
    return generate_latest(registry).decode()

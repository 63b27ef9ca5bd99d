"""Queues in numbers, as Prometheus reads them. Needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ...queues import QueueError, QueueStats

__all__ = ["exposition", "queue_registry"]

Look = Callable[[], Sequence[QueueStats]]

_LABELS: Final = ("namespace", "queue")

_GAUGES: Final[tuple[tuple[str, str, Callable[[QueueStats], float | None]], ...]] = (
    ("perdure_queue_depth", "Messages that no worker holds.", lambda stats: stats.depth),
    ("perdure_queue_in_flight", "Messages that a worker holds.", lambda stats: stats.in_flight),
    ("perdure_queue_due", "Tasks that wait for their time.", lambda stats: stats.due),
    ("perdure_queue_dead_letters", "Dead letters.", lambda stats: stats.dead),
    (
        "perdure_queue_oldest_age_seconds",
        "How long the oldest message that no worker holds has waited; 0 where there is none.",
        lambda stats: stats.oldest_age or 0.0,
    ),
    (
        "perdure_queue_settled_tasks_per_second",
        "Deliveries that all workers settle per second, over the last 30 seconds.",
        lambda stats: stats.rate,
    ),
    (
        "perdure_queue_drain_time_seconds",
        "Time until nothing waits or runs at the present rate; no sample where something does and the rate is 0.",
        lambda stats: stats.drain_time,
    ),
    ("perdure_queue_workers", "Workers that read the queue.", lambda stats: len(stats.consumers)),
)
"""Name, meaning, and where the value is found."""


class _Queues(Collector):
    """Looks at the queues when it is asked. Where Redis cannot be reached, `perdure_up` is all it tells."""

    def __init__(self, namespace: str, look: Look) -> None:
        self._namespace = namespace
        self._look = look

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = "Whether Redis could be asked."
        try:
            queues = self._look()
        except QueueError:
            yield GaugeMetricFamily("perdure_up", up, value=0)
            return
        yield GaugeMetricFamily("perdure_up", up, value=1)
        for name, meaning, read in _GAUGES:
            gauge = GaugeMetricFamily(name, meaning, labels=_LABELS)
            for stats in queues:
                if (value := read(stats)) is not None:
                    gauge.add_metric((self._namespace, stats.queue), value)
            yield gauge


def queue_registry(namespace: str, look: Look) -> CollectorRegistry:
    """A registry of these gauges alone. look: the queues as they are now; called anew for each scrape."""
    registry = CollectorRegistry()
    registry.register(_Queues(namespace, look))
    return registry


def exposition(registry: CollectorRegistry) -> str:
    """The gauges in Prometheus' text format."""
    return generate_latest(registry).decode()

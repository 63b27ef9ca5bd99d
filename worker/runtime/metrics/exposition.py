"""Measurements in Prometheus' text format. Needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import accumulate
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .families import BUCKETS, FAMILIES, Family, Measurements

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_BOUNDS: Final = (*map(str, BUCKETS), "+Inf")


class _Measured(Collector):
    """Collector of one reading."""

    def __init__(self, read: Callable[[], Measurements]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        measured = self._read()
        yield InfoMetricFamily(
            "perdure_build", "Version of Perdure.", {"version": version("perdure"), "namespace": measured.namespace}
        )
        values: dict[str, list[tuple[tuple[str, ...], list[float]]]] = {}
        for key, numbers in measured.counts.items():
            values.setdefault(key[0], []).append((key[1:], numbers))
        for key, number in measured.gauges.items():
            values.setdefault(key[0], []).append((key[1:], [number]))
        for name, family in FAMILIES.items():
            if name in values:
                yield _metric(family, measured.namespace, values[name])


def _metric(family: Family, namespace: str, values: Iterable[tuple[tuple[str, ...], list[float]]]) -> Metric:
    labels = ("namespace", *family.labels)
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=labels)
        for given, (total, *counts) in values:
            histogram.add_metric((namespace, *given), list(zip(_BOUNDS, accumulate(counts), strict=True)), total)
        return histogram
    made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = made(family.name, family.text, labels=labels)
    for given, (number,) in values:
        metric.add_metric((namespace, *given), number)
    return metric


def exposition(read: Callable[[], Measurements]) -> bytes:
    """Return measurements in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Measured(read))
    return generate_latest(registry)

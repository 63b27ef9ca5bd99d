"""The clock monitor: it tells a step of Redis' clock from an outage, and logs each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from perdure.queues import Namespace, Partition
from perdure.queues.delivery.leases import Touch
from perdure.queues.runtime import RUNTIME
from perdure.worker.log import logger
from perdure.worker.runtime.maintenance.promoter import ClockMonitor

LEASE = 10.0


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return the messages logged during the test."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="DEBUG")
    yield lines
    logger.remove(sink)


@pytest.fixture
def monitor() -> ClockMonitor:
    return ClockMonitor(lambda: LEASE)


def touch(clock: float, sent: float, *, received: float | None = None, gap: float = 1.0, restarted: int = 0) -> Touch:
    return Touch(clock, gap, restarted, sent, sent if received is None else received)


@pytest.mark.parametrize(("step", "text"), [(600.0, "forward by 600.0 s"), (-600.0, "back by 600.0 s")])
def test_a_step_of_the_clock_is_logged_once(
    monitor: ClockMonitor, namespace: Namespace, logged: list[str], step: float, text: str
) -> None:
    partitions = [namespace.partition("default", index) for index in range(3)]
    for partition in partitions:
        monitor.observe(partition, touch(1000.0, 5.0))
    for partition in partitions:
        monitor.observe(partition, touch(1001.0 + step, 6.0, gap=step, restarted=2))
    (line,) = logged
    assert line == (
        f"the clock of Redis was set {text}: all leases were restarted, "
        "and the tasks of lost workers are claimed in 10 s"
    )


def test_an_outage_is_no_step(monitor: ClockMonitor, partition: Partition, logged: list[str]) -> None:
    """Redis was stopped: its clock and that of this process went on alike."""
    monitor.observe(partition, touch(1000.0, 5.0))
    monitor.observe(partition, touch(1018.0, 6.0, received=23.0, gap=18.0, restarted=8))
    (line,) = logged
    assert line.startswith("no worker reached Redis for 18.0 s: all leases were restarted")
    assert monitor.restarts_end == 23.0 + LEASE


def test_a_gap_without_deliveries_is_not_logged(monitor: ClockMonitor, partition: Partition, logged: list[str]) -> None:
    monitor.observe(partition, touch(1000.0, 5.0, gap=3000.0))
    assert logged == []
    assert monitor.restarts_end == 0.0


def test_slow_and_overtaken_replies_are_no_step(monitor: ClockMonitor, partition: Partition, logged: list[str]) -> None:
    monitor.observe(partition, touch(1000.0, 5.0, received=25.0))  # stored at any time within 20 s
    monitor.observe(partition, touch(1001.0, 26.0))
    monitor.observe(partition, touch(1030.0, 55.0))
    monitor.observe(partition, touch(1010.0, 35.0, received=56.0))
    monitor.observe(partition, touch(1031.0, 56.0))
    assert logged == []


class Clocks:
    """The monotonic clock of the worker."""

    now = 0.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(RUNTIME, "monotonic", lambda: clocks.now)
    return clocks


def is_new(monitor: ClockMonitor, partition: Partition, clocks: Clocks, at: float, added: float) -> bool:
    """Return whether an entry that was added at a time of Redis is new, at a time of the worker."""
    clocks.now = at
    return monitor.is_new(partition, b"%d-0" % round(added * 1000))


def test_an_entry_is_new_by_the_clock_of_redis(monitor: ClockMonitor, namespace: Namespace, clocks: Clocks) -> None:
    partition = namespace.partition("default")
    assert not is_new(monitor, partition, clocks, 5.0, 1000.0), "the clock is not known"
    monitor.observe(partition, touch(1000.0, 5.0))
    assert not is_new(monitor, partition, clocks, 6.0, 1000.5), "it is not known for long enough"
    monitor.observe(partition, touch(1040.0, 45.0))
    assert is_new(monitor, partition, clocks, 46.0, 1040.5)
    assert not is_new(monitor, partition, clocks, 46.0, 1035.5), "it is old"
    assert not is_new(monitor, partition, clocks, 46.0, 1041.5), "its time is to come: the clock was set back"
    assert not is_new(monitor, partition, clocks, 52.0, 1046.5), "the last touch is old"


def test_no_entry_is_new_for_a_while_after_a_step(monitor: ClockMonitor, namespace: Namespace, clocks: Clocks) -> None:
    partition = namespace.partition("default")
    monitor.observe(partition, touch(1000.0, 5.0))
    monitor.observe(partition, touch(1036.0, 45.0))  # set back by 4 s
    assert not is_new(monitor, partition, clocks, 46.0, 1036.5)
    monitor.observe(partition, touch(1066.5, 75.5))
    assert is_new(monitor, partition, clocks, 76.0, 1066.8)

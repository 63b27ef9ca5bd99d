"""The rules of schedules find each violation in a journal written by hand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from perdure.queues.schedules.definition import task_id_of

from tests.chaos.checker.verdict import violations
from tests.chaos.journal import SECOND, parse
from tests.chaos.planned import planned_by

Event = tuple[float, str, dict[str, Any]]

START = 1_800_000_000_000
"""Time of Redis at the start of the run, a planned time of `beats`, in milliseconds."""


def rules(*events: Event, last: int = 40) -> set[str]:
    """Return the violated rules of a run whose schedule has fired all times up to so many seconds after the start."""
    begins = (0.0, "begins", {"lease": 2.0, "clock": START})
    schedule = {"name": "beats", "epoch": START, "last": START + last * 1000, "now": START, "firing": None}
    ends = [(90.0, "schedule", schedule), (91.0, "ends", {})]
    texts = [
        orjson.dumps({"at": round(at * SECOND), "pid": 1, "what": what, **data})
        for at, what, data in sorted([begins, *events, *ends], key=lambda event: event[0])
    ]
    return {violation.rule for violation in violations(parse(texts))}


def task(seconds: int, *, partition: int = 0, state: str = "cancelled") -> Event:
    """Return the record at the end of the task of a planned time, which is so many seconds after the start."""
    final = {"kind": "beats", "state": state, "attempts": 0, "crashes": 0, "replays": 0, "reason": None, "worker": "w"}
    final |= {"result": [], "steps": {}, "conversation": [], "unread": 0, "kept": 86_400.0, "spot": None}
    return (89.0 + partition / 100, "final", {"task": task_id_of("beats", START + seconds * 1000), **final})


def tasks(*seconds: int) -> list[Event]:
    cancelled = [(1.0, "cancel", {"task": task(each)[2]["task"]}) for each in seconds]
    return [*cancelled, *(task(each) for each in seconds)]


def fault(kind: str, since: float, until: float, seconds: float = 0.0) -> list[Event]:
    begin = {"number": round(since * 1000), "kind": kind, "pids": [], "seconds": seconds}
    return [(since, "fault", begin), (until, "fault_over", {"number": begin["number"]})]


def test_a_task_for_each_planned_time_violates_nothing() -> None:
    assert rules(*tasks(8, 16, 24, 32, 40)) == set()


def test_a_planned_time_without_a_task_is_found() -> None:
    assert rules(*tasks(8, 16, 32, 40)) == {"not fired"}


def test_the_last_planned_time_may_be_on_its_way() -> None:
    assert rules(*tasks(8, 16, 24, 32), last=39) == set()


def test_two_tasks_of_a_planned_time_are_found() -> None:
    assert rules(*tasks(8, 16, 24, 32, 40), task(16, partition=1)) == {"fired twice"}


def test_a_task_of_another_time_is_found() -> None:
    assert rules(*tasks(8, 16, 24, 32, 40), *tasks(17)) == {"fired at another time"}


def test_a_task_that_has_not_ended_is_found() -> None:
    assert rules(*tasks(8, 16, 24, 32), task(40, state="queued")) == {"lost"}


@pytest.mark.parametrize(("since", "excused"), [(20.0, True), (50.0, False)])
def test_what_redis_lost_may_be_missing(since: float, excused: bool) -> None:
    loss = [*fault("failover", since, since + 2.0), (since + 1.0, "kept", {"number": round(since * 1000), "until": 0})]
    assert ("not fired" in rules(*tasks(8, 16, 32, 40), *loss)) is not excused


def test_a_loss_is_compared_with_the_clock_of_redis() -> None:
    """The clock was set forward by 20 s at 2 s, so that the time at 24 s was reached after 4 s, before the loss."""
    loss = [*fault("failover", 22.0, 24.0), (23.0, "kept", {"number": 22_000, "until": 0})]
    clock = fault("clock", 2.0, 2.1, 20.0)
    assert "not fired" in rules(*tasks(8, 16, 32, 40), *clock, *loss)
    assert "not fired" not in rules(*tasks(8, 16, 32, 40), *loss)


@pytest.mark.parametrize(("steps", "excused"), [((600.0,), False), ((500.0, 300.0), True)])
def test_a_firing_makes_up_for_the_last_hundred(steps: tuple[float, ...], excused: bool) -> None:
    clocks = [event for at, step in enumerate(steps, 1) for event in fault("clock", float(at), at + 0.1, step)]
    assert ("not fired" in rules(*tasks(8, 16, 32, 40), *clocks)) is not excused


def test_a_task_that_was_run_by_hand_has_no_planned_time() -> None:
    assert planned_by("beats-20261127T171000Z-a1b2") is None
    assert planned_by(task_id_of("beats", START)) == ("beats", START)

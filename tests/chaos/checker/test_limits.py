"""The rules of limits find each violation in a journal written by hand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.chaos.checker.verdict import violations
from tests.chaos.journal import SECOND, Line, parse

Event = tuple[float, int, str, dict[str, Any]]

TENANT = "1-2-0"


def read(*events: Event) -> list[Line]:
    texts = [
        orjson.dumps({"at": round(at * SECOND), "pid": pid, "what": what, **data})
        for at, pid, what, data in sorted(events, key=lambda event: event[0])
    ]
    return parse(texts)


def rules(*events: Event) -> set[str]:
    begins = (0.0, 0, "begins", {"lease": 2.0})
    return {violation.rule for violation in violations(read(begins, *events, (90.0, 0, "ends", {})))}


def task(
    name: str,
    kind: str,
    limit: str,
    since: float,
    until: float | None,
    *,
    pid: int = 1,
    key: str = "",
    enqueued: float = 0.1,
    entry: float | None = None,
    state: str = "succeeded",
    runs: int = 1,
) -> list[Event]:
    """Return the lines of a task that ran from one time to another one; until: None if its process was killed."""
    run, place = f"{pid}.{name}", {"queue": "default", "partition": 0}
    told = {"task": name, "run": run, "limit": limit, "key": key, "used": 1, "step": ""}
    first = {"kind": kind, "run": run, "attempt": 1, "crashes": 0, "worker": "w"}
    final = {"kind": kind, "state": state, "attempts": 0, "crashes": 0, "replays": 0, "reason": None, "worker": "w"}
    final |= {"result": [], "steps": {}, "conversation": [], "unread": 0, "kept": 86_400.0, "spot": None}
    args = {"steps": 1, "pause": 0.1, "tenant": key}
    found: list[Event] = [
        (enqueued, 0, "enqueue", {"task": name, "kind": kind, "args": args, "delay": 0, "key": None}),
        (enqueued, 0, "acknowledged", {"task": name, "kind": kind, "key": None, **place}),
        (since, pid, "run", {"task": name, **first, **place, "entry": f"{(entry or since) * 1000:.0f}-0", "count": 1}),
        (since, pid, "holds", told),
        (since, pid, "held", {**told, "clock": since}),
        (89.0, 0, "final", {"task": name, **final}),
    ]
    if until is not None:
        found += [
            (until, pid, "held", {**told, "clock": until}),
            (until, pid, "frees", told),
            (until, pid, "returned", {"task": name, "run": run, "result": []}),
        ]
    return found


def fault(kind: str, since: float, until: float, *pids: int, **more: Any) -> list[Event]:
    begin = {"number": round(since * 1000), "kind": kind, "pids": list(pids) or None, "seconds": 1.0, **more}
    return [(since, 0, "fault", begin), (until, 0, "fault_over", {"number": begin["number"]})]


def lone(name: str, since: float, until: float | None, **more: Any) -> list[Event]:
    return task(name, "lone", "lone", since, until, **more)


def test_tasks_one_after_the_other_violate_nothing() -> None:
    assert rules(*lone("a", 1.0, 2.0), *lone("b", 2.1, 3.0)) == set()


def test_more_at_once_than_a_limit_allows_are_found() -> None:
    assert rules(*lone("a", 1.0, 3.0), *lone("b", 2.1, 3.0)) == {"above the limit"}


def test_more_of_one_key_than_a_limit_allows_are_found() -> None:
    found = [task(name, "rents", "tenants", 1.0, 3.0, key=TENANT) for name in ("a", "b", "c")]
    assert rules(*found[0], *found[1]) == set()
    assert rules(*found[0], *found[1], *found[2]) == {"above the limit"}
    other = task("d", "rents", "tenants", 1.0, 3.0, key="other")
    assert rules(*found[0], *found[1], *other) == set()


def test_a_process_that_stands_still_may_run_on() -> None:
    frozen = fault("freeze", 1.5, 5.5, 1)
    assert rules(*lone("a", 1.0, 6.0), *lone("b", 4.0, 4.5, pid=2), *frozen) == set()
    other = fault("freeze", 1.5, 5.5, 7)
    assert rules(*lone("a", 1.0, 6.0), *lone("b", 4.0, 4.5, pid=2), *other) == {"above the limit"}


def test_redis_may_have_lost_that_a_token_was_taken() -> None:
    lost = [*fault("failover", 2.0, 3.0), (2.9, 0, "kept", {"number": 2000, "until": SECOND})]
    assert "above the limit" not in rules(*lone("a", 1.0, 6.0), *lone("b", 4.0, 4.5), *lost)
    assert "above the limit" in rules(*lone("a", 1.0, 12.0), *lone("b", 10.0, 10.5), *lost)


def test_a_clock_that_is_set_and_a_server_that_is_away_excuse_nothing() -> None:
    for kind in ("clock", "redis_stop"):
        assert rules(*lone("a", 1.0, 6.0), *lone("b", 4.0, 4.5), *fault(kind, 2.0, 3.0)) == {"above the limit"}


def paced(*starts: float, early: float = 0.01) -> list[Event]:
    return [
        event
        for number, at in enumerate(starts)
        for event in task(f"p{number}", "paced", "pace", at, at + 0.05, entry=at - early)
    ]


def test_starts_above_the_rate_are_found() -> None:
    """4 at once, then one each 0.4 s."""
    assert rules(*paced(1.0, 1.0, 1.0, 1.0, 1.5, 1.9, 2.3)) == set()
    assert rules(*paced(1.0, 1.0, 1.0, 1.0, 1.01, 1.02)) == {"above the rate"}


def test_a_message_that_a_fault_delayed_was_charged_before() -> None:
    starts = paced(11.0, 11.0, 11.0, 11.0, 11.01, 11.02)
    assert rules(*starts, *fault("hold", 5.0, 10.0, 1)) == set()
    assert rules(*starts, *fault("kill", 5.0, 5.0, 3)) == {"above the rate"}


def test_starts_before_and_after_the_clock_was_set_back_are_not_compared() -> None:
    late = paced(1.0, 1.0, 1.0, 1.0)
    again = [event for number in range(2) for event in task(f"q{number}", "paced", "pace", 1.1, 1.12, entry=1.09)]
    assert rules(*late, *again) == {"above the rate"}
    back = fault("clock", 1.05, 1.06, seconds=-5)
    assert rules(*late, *again, *back) == set()


def line(name: str, since: float, until: float, enqueued: float, **more: Any) -> list[Event]:
    return task(name, "lines", "orders", since, until, key=TENANT, enqueued=enqueued, **more)


def test_a_task_that_overtakes_is_found() -> None:
    assert rules(*line("a", 1.0, 2.0, 0.1), *line("b", 2.1, 3.0, 0.2)) == set()
    assert rules(*line("a", 2.1, 3.0, 0.1), *line("b", 1.0, 2.0, 0.2)) == {"overtaken"}


def test_a_task_that_starts_before_the_last_attempt_of_an_earlier_one_is_found() -> None:
    again = {"task": "a", "kind": "lines", "run": "1.again", "attempt": 2, "crashes": 0, "worker": "w"}
    again |= {"queue": "default", "partition": 0, "entry": "4000-0", "count": 1}
    events = [*line("a", 1.0, 2.0, 0.1), *line("b", 2.1, 3.0, 0.2), (4.0, 1, "run", again)]
    assert "overtaken" in rules(*events)


def keeps(name: str, *spans: tuple[float, float]) -> list[Event]:
    found: list[Event] = []
    for number, (since, until) in enumerate(spans):
        for at, pid, what, data in task(name, "keeps", "seat", since, until, key=TENANT):
            renamed = {**data, "run": f"{data['run']}-{number}"} if "run" in data else data
            if what == "returned" and number < len(spans) - 1:
                stopped = {"task": name, "run": renamed["run"], "error": "RunStopped", "text": ""}
                found.append((at, pid, "left", stopped))
            else:
                found.append((at, pid, what, renamed))
    return found


def test_a_task_in_the_seat_of_a_parked_one_is_found() -> None:
    assert "above the limit" not in rules(*keeps("a", (1.0, 1.5), (4.0, 4.5)), *keeps("b", (5.0, 5.5), (8.0, 8.5)))
    assert "above the limit" in rules(*keeps("a", (1.0, 1.5), (4.0, 4.5)), *keeps("b", (2.0, 2.5), (8.0, 8.5)))


@pytest.mark.parametrize("what", ["token of the limit pool", "{chaos:default:0}:rings"])
def test_what_is_left_after_the_end_is_found(what: str) -> None:
    assert rules((50.0, 0, "left_over", {"seconds": 45.0, "found": [what]})) == {"leak"}


def test_tasks_that_are_cancelled_for_want_of_a_token_were_not_asked_for() -> None:
    cancelled = [event for event in lone("b", 2.1, None, state="cancelled") if event[2] not in ("run", "holds", "held")]
    assert rules(*lone("a", 1.0, 3.0), *cancelled) == set()

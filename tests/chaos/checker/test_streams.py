"""The rules of streams find each violation in a journal written by hand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.chaos.checker.counts import counted
from tests.chaos.checker.history import history
from tests.chaos.checker.verdict import violations
from tests.chaos.journal import SECOND, Line, parse

TASK = "talks-1"
TOKEN, FORMER = "2.1/step-0/1", "1.1/step-0/1"
RESULT = [TOKEN]
LOSS = (
    (6.0, "fault", {"number": 1, "kind": "failover", "pids": None, "seconds": 1.2}),
    (6.1, "kept", {"number": 1, "until": 3 * SECOND}),
    (6.2, "fault_over", {"number": 1}),
)
"""A failover that keeps what was stored until 3 s."""
KILL = (
    (0.9, "fault", {"number": 2, "kind": "kill", "pids": [1], "seconds": 0}),
    (0.9, "fault_over", {"number": 2}),
)

Event = tuple[float, str, dict[str, Any]]


def read(*events: Event) -> list[Line]:
    texts = [orjson.dumps({"at": round(at * SECOND), "pid": 1, "what": what, **data}) for at, what, data in events]
    return parse(texts)


def rules(*events: Event) -> set[str]:
    return {violation.rule for violation in violations(read(*events))}


def run(at: float, number: str, count: int) -> Event:
    place = {"queue": "default", "partition": 0, "entry": "1000-0", "count": count, "worker": "w"}
    return (at, "run", {"task": TASK, "kind": "talks", "run": number, "attempt": 1, "crashes": 0, **place})


def entry(number: int, value: Any, *, unit: str = "step-0", attempt: int = 2, key: str = "", cut: str = "") -> Any:
    return {"number": number, "unit": unit, "attempt": attempt, "key": key, "cut": cut, "value": value}


def said(token: str, number: int) -> dict[str, Any]:
    return {"token": token, "number": number}


TOKENS = [
    entry(1, said(FORMER, 0), attempt=1),
    entry(2, None, attempt=1, cut="1"),
    *(entry(3 + number, said(TOKEN, number)) for number in range(3)),
]
"""The stream of a task that was killed in its step."""
OUTPUT = [entry(1, {"body": 1}, unit="", attempt=0), entry(2, said(TOKEN, 0))]
FACTS = [entry(1, {"key": "title"}, unit="", key="k1"), entry(2, {"key": "step-0"}, unit="", key="k2")]
SHOWN = [[3 + number, said(TOKEN, number)] for number in range(3)]


def journal_of(
    tokens: list[Any] = TOKENS, output: list[Any] = OUTPUT, facts: list[Any] = FACTS, **page: Any
) -> list[Event]:
    """Return the journal of the task, of its streams, and of one page."""
    begin = {"task": TASK, "run": "2.1", "step": "step-0", "token": TOKEN}
    end = {"state": "succeeded", "number": 5, "result": RESULT}
    shown = {"stream": "tokens", "since": SECOND, "items": SHOWN, "end": end, "begin": 1, "last": None, "patience": 0}
    about: dict[str, Any] = {
        "attempts": 1,
        "crashes": 1,
        "replays": 0,
        "reason": None,
        "worker": "w",
        "steps": {"step-0": TOKEN},
    }
    about |= {"conversation": [], "unread": 0, "kept": 86_400.0, "spot": None}
    return [
        (0.1, "begins", {"lease": 2.0}),
        (0.2, "enqueue", {"task": TASK, "kind": "talks", "args": {}, "delay": 0, "key": None}),
        (0.3, "acknowledged", {"task": TASK, "kind": "talks", "queue": "default", "partition": 0, "key": None}),
        run(0.4, "1.1", 1),
        (0.5, "emits", {"task": TASK, "run": "1.1", "scope": "", "stream": "output", "number": 1}),
        (0.6, "begin", {**begin, "run": "1.1", "token": FORMER, "trial": 1, "inputs": []}),
        *KILL,
        run(4.0, "2.1", 2),
        (4.1, "emits", {"task": TASK, "run": "2.1", "scope": "", "stream": "output", "number": 1}),
        (4.2, "begin", {**begin, "trial": 1, "inputs": []}),
        (4.3, "effect", begin),
        (4.4, "value", {**begin, "durability": "sync"}),
        (4.5, "returned", {"task": TASK, "run": "2.1", "result": RESULT}),
        (5.0, "shown", {"task": TASK, **shown, **page}),
        (9.0, "final", {"task": TASK, "kind": "talks", "state": "succeeded", "result": RESULT, **about}),
        (9.1, "stream", {"task": TASK, "stream": "tokens", "entries": tokens}),
        (9.2, "stream", {"task": TASK, "stream": "output", "entries": output}),
        (9.3, "stream", {"task": TASK, "stream": "facts", "entries": facts}),
        (9.9, "ends", {}),
    ]


def test_a_sound_task_violates_nothing() -> None:
    assert rules(*journal_of()) == set()
    assert "streams: 9 items stored; pages: 1 followed, 0 loaded again" in [*counted(history(read(*journal_of())))]


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"tokens": [*TOKENS[:4], entry(9, said(TOKEN, 2))]}, "stream numbers"),
        ({"tokens": [TOKENS[0], entry(2, {"body": 1}, unit="", attempt=0), *TOKENS[2:]]}, "item doubled"),
        ({"tokens": [*TOKENS, entry(6, said(TOKEN, 2))]}, "item doubled"),
        ({"tokens": TOKENS[:4]}, "item missing"),
        ({"tokens": [*TOKENS, entry(6, said(FORMER, 1), unit="other", attempt=1)]}, "stale item"),
        ({"output": OUTPUT[1:]}, "item missing"),
        ({"output": [OUTPUT[0], entry(2, {"body": 1}, unit="", attempt=0)]}, "item doubled"),
        ({"facts": FACTS[:1]}, "item missing"),
        ({"facts": [*FACTS, entry(3, {"key": "title"}, unit="", key="k1")]}, "item doubled"),
        ({"items": SHOWN[1:]}, "item not shown"),
        ({"items": [[1, said(FORMER, 0)], *SHOWN]}, "item not shown"),
        ({"end": {"state": "succeeded", "number": 4, "result": RESULT}}, "item not shown"),
        ({"end": {"state": "dead", "number": 5, "result": None}}, "other end of a stream"),
        ({"end": {"state": "succeeded", "number": 5, "result": []}}, "other end of a stream"),
    ],
)
def test_each_violation_is_found(changed: dict[str, Any], rule: str) -> None:
    assert rule in rules(*journal_of(**changed))


def test_a_page_without_an_end_is_found() -> None:
    assert rules(*journal_of(), (8.0, "unshown", {"task": TASK})) == {"no end of a stream"}


def test_a_page_that_began_with_the_last_items_shows_those() -> None:
    assert rules(*journal_of(items=SHOWN[1:], begin=4, last=2)) == set()
    assert rules(*journal_of(items=SHOWN, begin=4, last=2)) == {"item not shown"}


def test_a_page_may_have_seen_what_redis_has_lost_since() -> None:
    other = [[number, said(FORMER, at)] for at, (number, _) in enumerate(SHOWN)]
    assert rules(*journal_of(items=other)) == {"item not shown"}
    assert "item not shown" not in rules(*journal_of(items=other), *LOSS)

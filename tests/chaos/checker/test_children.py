"""The rules of children find each violation in a journal written by hand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.chaos.checker.counts import counted
from tests.chaos.checker.history import history
from tests.chaos.checker.verdict import violations
from tests.chaos.journal import SECOND, Line, parse

PARENT = "family-1"
SPOT = f"{PARENT}/0"
GROWN = {"spot": SPOT, "token": "2.1/step-0/1"}
LOSS = (
    (2.6, "fault", {"number": 1, "kind": "failover", "pids": None, "seconds": 1.2}),
    (2.7, "kept", {"number": 1, "until": 2 * SECOND}),
    (2.8, "fault_over", {"number": 1}),
)
"""A failover that keeps what was stored until 2 s."""

Event = tuple[float, str, dict[str, Any]]


def read(*events: Event) -> list[Line]:
    texts = [orjson.dumps({"at": round(at * SECOND), "pid": 1, "what": what, **data}) for at, what, data in events]
    return parse(texts)


def rules(*events: Event) -> set[str]:
    return {violation.rule for violation in violations(read(*events))}


def run(at: float, task: str, kind: str, number: str, *, attempt: int = 1) -> Event:
    place = {"queue": "default", "partition": 0, "entry": "1000-0", "count": 1, "worker": "w"}
    return (at, "run", {"task": task, "kind": kind, "run": number, "attempt": attempt, "crashes": 0, **place})


def final(task: str, kind: str, state: str, result: Any, **more: Any) -> Event:
    shown: dict[str, Any] = {"attempts": 1, "crashes": 0, "replays": 0, "reason": None, "worker": "w", "steps": {}}
    shown |= {"conversation": [], "unread": 0, "kept": 86_400.0}
    return (9, "final", {"task": task, "kind": kind, "state": state, "result": result, **shown, **more})


def child(task: str, at: float, number: str, spot: str = SPOT, state: str = "succeeded") -> list[Event]:
    """A child whose run has the number; without a state it has not ended."""
    token = f"{number}/step-0/1"
    place = {"task": task, "run": number, "step": "step-0", "token": token}
    grown = {"spot": spot, "token": token}
    return [
        run(at, task, "leaf", number),
        (at + 0.01, "child", {"task": task, "run": number, "spot": spot}),
        (at + 0.1, "begin", {**place, "trial": 1, "inputs": []}),
        (at + 0.2, "effect", place),
        (at + 0.3, "value", {**place, "durability": "sync"}),
        (at + 0.4, "returned", {"task": task, "run": number, "result": grown}),
        final(task, "leaf", state, grown, steps={"step-0": token}, spot=spot),
    ]


def parent(grown: Any = GROWN, spot: str = SPOT) -> list[Event]:
    return [
        (0, "begins", {"lease": 2.0}),
        (1, "acknowledged", {"task": PARENT, "kind": "family", "queue": "default", "partition": 0, "key": None}),
        run(1.5, PARENT, "family", "1.1"),
        (4, "joined", {"task": PARENT, "run": "1.1", "spot": spot, "grown": grown}),
        (5, "returned", {"task": PARENT, "run": "1.1", "result": [grown["token"]]}),
        final(PARENT, "family", "succeeded", [grown["token"]]),
    ]


def failed(at: float) -> Event:
    return (at, "left", {"task": PARENT, "run": "1.1", "error": "ValueError", "text": ""})


def test_a_child_whose_result_its_parent_has_violates_nothing() -> None:
    events = [*parent(), *child("leaf-1", 2, "2.1")]
    assert rules(*events) == set()
    assert "children: 1 have run, for 1 spots; 1 results joined" in list(counted(history(read(*events))))


def test_two_children_of_one_spot() -> None:
    assert rules(*parent(), *child("leaf-1", 2, "2.1"), *child("leaf-2", 3, "2.2")) == {"child doubled"}


def test_a_failed_attempt_has_children_of_its_own() -> None:
    again = run(2.7, PARENT, "family", "1.2", attempt=2)
    ended = [one for one in parent() if one[1] not in ("joined", "returned")]
    joined = {"task": PARENT, "run": "1.2", "spot": SPOT, "grown": GROWN}
    events = [*ended, failed(2.6), again, (4, "joined", joined)]
    events += [(5, "returned", {"task": PARENT, "run": "1.2", "result": [GROWN["token"]]})]
    children = [*child("leaf-1", 3, "2.1"), *child("leaf-2", 2, "2.2", state="cancelled")]
    assert rules(*events, *children) == set()
    assert rules(*events, *children, *child("leaf-3", 3.2, "2.3")) == {"child doubled"}


@pytest.mark.parametrize(("at", "violated"), [(2.2, set()), (0.5, {"child doubled"})], ids=["lost", "kept"])
def test_a_child_that_redis_has_lost_is_spawned_again(at: float, violated: set[str]) -> None:
    former = [one for one in child("leaf-1", at, "2.2") if one[1] != "final"]
    if violated:
        former = child("leaf-1", at, "2.2")
    assert rules(*parent(), *LOSS, *former, *child("leaf-2", 3, "2.1")) == violated


def test_a_parent_that_has_the_result_of_another_child() -> None:
    other = f"{PARENT}/1"
    children = [*child("leaf-1", 2, "2.1"), *child("leaf-2", 2, "2.2", other)]
    assert rules(*parent({"spot": other, "token": "2.2/step-0/1"}), *children) == {"result of another child"}


def test_a_parent_that_has_a_result_without_a_child() -> None:
    assert rules(*parent()) == {"result of another child"}


def test_a_parent_that_has_the_result_of_a_child_that_was_cancelled() -> None:
    cancel = (2.5, "cancel", {"task": "leaf-1"})
    assert rules(*parent(), cancel, *child("leaf-1", 2, "2.1", state="cancelled")) == {"result of another child"}


@pytest.mark.parametrize(("at", "violated"), [(2, set()), (0.5, {"result of another child"})], ids=["lost", "kept"])
def test_a_child_whose_outcome_redis_has_lost_runs_again(at: float, violated: set[str]) -> None:
    """Its notice was on its way. The failover keeps what was stored until 2 s."""
    former = [one for one in child("leaf-1", at, "2.1") if one[1] not in ("final", "begin", "value")]
    again = [one for one in child("leaf-1", 3, "2.2") if one[1] != "child"]
    assert rules(*parent(), *LOSS, *former, *again) == violated


def test_a_parent_that_is_given_another_result_in_a_later_run() -> None:
    other = {"spot": SPOT, "token": "2.2/step-0/1"}
    changed = (3, "joined", {"task": PARENT, "run": "1.1", "spot": SPOT, "grown": other})
    children = [*child("leaf-1", 2, "2.1"), *child("leaf-2", 2, "2.2")]
    assert rules(*parent(), changed, *children) == {"result changed", "child doubled"}


@pytest.mark.parametrize("state", ["queued", "scheduled"])
def test_a_child_that_has_not_ended(state: str) -> None:
    events = [one for one in child("leaf-1", 2, "2.1", state=state) if one[1] != "returned"]
    assert "lost" in rules(*parent(), *events)


def test_a_child_that_never_ran_and_has_not_ended() -> None:
    assert rules(*parent(), *child("leaf-1", 2, "2.1"), final("leaf-2", "leaf", "scheduled", None, spot=SPOT)) == {
        "lost"
    }


def test_a_child_without_a_record() -> None:
    events = [one for one in child("leaf-1", 2, "2.1") if one[1] != "final"]
    assert "lost" in rules(*parent(), *events)


def test_a_child_is_cancelled_with_its_parent() -> None:
    cancelled = [one for one in child("leaf-1", 2, "2.1", state="cancelled") if one[1] != "returned"]
    events = [one for one in parent() if one[1] not in ("joined", "returned", "final")]
    end = final(PARENT, "family", "cancelled", None)
    assert rules(*events, end, *cancelled, (2.5, "cancel", {"task": PARENT})) == set()
    left = (2.5, "abandons", {"task": PARENT, "run": "1.1"})
    other = f"{PARENT}/1"
    instead = [*parent({"spot": other, "token": "2.2/step-0/1"}, other), *child("leaf-2", 3, "2.2", other)]
    assert rules(*instead, left, *cancelled) == set()
    assert rules(*instead, *cancelled) == {"cancelled unasked"}


def test_a_grandchild_is_cancelled_with_the_parent_of_its_parent() -> None:
    branch = final("branch-1", "branch", "cancelled", None, spot=SPOT)
    grandchild = final("leaf-1", "leaf", "cancelled", None, spot="branch-1/0")
    events = [one for one in parent() if one[1] not in ("joined", "returned", "final")]
    events += [final(PARENT, "family", "cancelled", None), branch, grandchild]
    assert rules(*events, (2.5, "cancel", {"task": PARENT})) == set()
    assert rules(*events) == {"cancelled unasked"}


def test_code_outside_of_steps_enqueues_again_in_each_run() -> None:
    name = "awaits-1"
    spot = f"{name}/other"
    grown = {"spot": spot, "token": "2.2/step-0/1"}
    told = [(0.0, "begins", {"lease": 2.0}), run(1.5, name, "awaits", "1.1"), run(2.5, name, "awaits", "1.2")]
    told += [(5.0, "returned", {"task": name, "run": "1.2", "result": [grown["token"]]})]
    told += [final(name, "awaits", "succeeded", [grown["token"]])]
    two = [*child("leaf-1", 2, "2.1", spot), *child("leaf-2", 3, "2.2", spot)]
    assert "child doubled" not in rules(*told, *two)
    assert "child doubled" in rules(*told, *two, *child("leaf-3", 4, "2.3", spot))

"""The rules of answers find each violation in a journal written by hand."""

from __future__ import annotations

import pytest

from tests.chaos.checker.counts import counted
from tests.chaos.checker.history import history
from tests.chaos.checker.test_children import LOSS, Event, final, read, rules, run

TASK = "asks-1"


def answer(
    at: float, nonce: str, to: str = "approval", by: str = "id", end: str = "answered", task: str = TASK
) -> list[Event]:
    call = {"task": task, "nonce": nonce}
    more = {"error": "refused"} if end == "refused" else {"by": by, "to": to}
    return [(at, "answering", {**call, "by": by, "to": to}), (at + 0.1, end, {**call, **more})]


def used(at: float, nonce: str | None, wait: str = "approval", number: str = "1.1") -> Event:
    return (at, "used", {"task": TASK, "run": number, "wait": wait, "nonce": nonce})


def asked(*events: Event, kind: str = "asks", state: str = "succeeded") -> list[Event]:
    return [
        (0, "begins", {"lease": 2.0}),
        (1, "acknowledged", {"task": TASK, "kind": kind, "queue": "default", "partition": 0, "key": None}),
        run(1.5, TASK, kind, "1.1"),
        *events,
        (7, "returned", {"task": TASK, "run": "1.1", "result": []}),
        final(TASK, kind, state, []),
    ]


def test_answers_that_are_used_once_for_their_questions_violate_nothing() -> None:
    events = asked(
        *answer(2, "a"),
        *answer(2.2, "b", end="refused"),
        used(2.5, "a"),
        *answer(3, "c", by="name"),
        used(3.5, "c", "approval#2"),
    )
    assert rules(*events) == set()
    assert "answers: 2 stored, 1 refused, 2 used" in list(counted(history(read(*events))))


def test_an_answer_by_token_is_for_the_order() -> None:
    events = asked(*answer(2, "a", "order:asks-1", "token"), used(3, "a", "order"), kind="orders")
    assert rules(*events) == set()


def test_an_answer_that_is_used_for_two_questions() -> None:
    events = asked(*answer(2, "a", by="name"), used(2.5, "a"), used(3, "a", "approval#2"))
    assert rules(*events) == {"answer used twice"}


@pytest.mark.parametrize(
    ("by", "to", "wait"),
    [("id", "approval", "approval#2"), ("name", "page", "approval"), ("token", "order:asks-1", "approval")],
)
def test_an_answer_that_is_used_for_another_question(by: str, to: str, wait: str) -> None:
    assert rules(*asked(*answer(2, "a", to, by), used(3, "a", wait))) == {"answer to another question"}


def test_an_answer_that_is_used_by_another_task() -> None:
    events = asked(*answer(2, "a", task="asks-2"), used(3, "a"))
    assert "answer to another question" in rules(*events)


def test_an_answer_that_was_refused_is_not_used() -> None:
    refused = answer(2, "a", end="refused")
    assert rules(*asked(*refused, used(3, "a"))) == {"refused answer used"}
    unsure: Event = (2.05, "unsure", {"task": TASK, "nonce": "a"})
    assert rules(*asked(*refused, unsure, used(3, "a"))) == set(), "the first call may have been stored"


def test_an_answer_that_is_lost() -> None:
    assert rules(*asked(*answer(2.1, "a"), used(3, "b"), *answer(2.5, "b"))) == {"answer lost"}
    assert rules(*asked(*answer(2.1, "a"), used(3, None), kind="expires")) == {"answer lost"}
    assert rules(*asked(*answer(2.1, "a"), kind="races")) == set(), "the time came first"
    assert rules(*asked(*answer(2.1, "a"), *LOSS, used(3, "b"), *answer(2.9, "b"))) == set(), "Redis has lost it"


def test_an_answer_that_changes_from_run_to_run() -> None:
    events = [*answer(2, "a"), *answer(2.1, "b"), used(2.2, "a"), used(3, "b")]
    assert rules(*asked(*events)) == {"answer changed"}
    assert rules(*asked(*events, *LOSS)) == set(), "Redis has lost the first"


def test_a_default_that_changes_into_an_answer() -> None:
    assert rules(*asked(used(2.2, None), *answer(2.3, "a"), used(3, "a"))) == {"answer changed"}

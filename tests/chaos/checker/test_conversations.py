"""The rules of sessions and messages find each violation in a journal written by hand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.chaos.checker.verdict import violations
from tests.chaos.journal import SECOND, parse

AGENT = "agent-1"


def rules(*lines: tuple[float, str, dict[str, Any]]) -> set[str]:
    """Return the violated rules of a journal with these lines: seconds, what, fields."""
    texts = [orjson.dumps({"at": round(at * SECOND), "pid": 1, "what": what, **data}) for at, what, data in lines]
    return {one.rule for one in violations(parse(texts))}


def session(heard: list[str], status: str = "idle", problem: str | None = None) -> set[str]:
    return rules(
        (0, "begins", {"lease": 2.0}),
        (1, "said", {"session": "s", "text": "a:1", "turn": 1}),
        (2, "said", {"session": "s", "text": "b:1", "turn": 2}),
        (3, "said", {"session": "s", "text": "a:2", "turn": 3}),
        (9, "session", {"session": "s", "status": status, "turns": 3, "heard": heard, "problem": problem}),
        (10, "ends", {}),
    )


def test_a_session_that_heard_everything_once_violates_nothing() -> None:
    assert session(["a:1", "b:1", "a:2"]) == set()
    assert session(["b:1", "a:1", "a:2"]) == set(), "the order of two senders is open"


@pytest.mark.parametrize(
    ("heard", "violated"),
    [
        (["a:1", "b:1", "b:1", "a:2"], {"heard twice"}),
        (["a:1", "a:2"], {"lost"}),
        (["a:2", "b:1", "a:1"], {"out of order"}),
    ],
)
def test_a_session_that_lost_doubled_or_reordered_messages(heard: list[str], violated: set[str]) -> None:
    assert session(heard) == violated


def test_a_session_that_stopped() -> None:
    assert session(["a:1", "b:1", "a:2"], status="failed") == {"session failed"}
    assert session(["a:1", "b:1", "a:2"], problem="unreadable") == {"session failed"}
    told = (5.0, "session_failed", {"session": "s", "error": "turn 1 failed"})
    assert rules((0, "begins", {"lease": 2.0}), told) == {"session failed"}


def test_a_session_that_does_not_exist() -> None:
    said = (1.0, "said", {"session": "s", "text": "a:1", "turn": 1})
    assert rules((0, "begins", {"lease": 2.0}), said, (9, "ends", {})) == {"lost"}


@pytest.mark.parametrize(
    ("says", "said", "violated"),
    [(4.8, 5.0, {"lost"}), (6.2, 6.4, set()), (6.9, 8.2, set()), (8.1, 8.2, {"lost"})],
    ids=["kept", "lost", "lost during the call", "stored afterwards"],
)
def test_a_message_that_a_session_did_not_hear_must_have_been_lost_by_measure(
    says: float, said: float, violated: set[str]
) -> None:
    """A failover from 7 to 8 s keeps what was stored until 6 s."""
    message = {"session": "s", "text": "a:1"}
    found = rules(
        (0, "begins", {"lease": 2.0}),
        (1, "said", {"session": "s", "text": "b:1", "turn": 1}),
        (says, "says", message),
        (said, "said", {**message, "turn": 2}),
        (7, "fault", {"number": 1, "kind": "failover", "pids": None, "seconds": 1.2}),
        (7.9, "kept", {"number": 1, "until": 6 * SECOND}),
        (8, "fault_over", {"number": 1}),
        (9, "session", {"session": "s", "status": "idle", "turns": 1, "heard": ["b:1"], "problem": None}),
        (10, "ends", {}),
    )
    assert found == violated


def conversation(turns: list[str], unread: int = 0) -> set[str]:
    final = {"kind": "agent", "state": "succeeded", "attempts": 0, "crashes": 0, "replays": 0, "reason": None}
    final |= {"worker": "w", "result": [], "steps": {}, "conversation": turns, "unread": unread, "kept": 60.0}
    run = {"run": "1.1", "kind": "agent", "attempt": 1, "crashes": 0, "entry": "1000-0", "count": 1, "worker": "w"}
    return rules(
        (0, "begins", {"lease": 2.0}),
        (1, "acknowledged", {"task": AGENT, "kind": "agent", "queue": "default", "partition": 0, "key": None}),
        (2, "sent", {"task": AGENT, "text": "(one)"}),
        (3, "sent", {"task": AGENT, "text": "(two)"}),
        (4, "run", {"task": AGENT, "queue": "default", "partition": 0, **run}),
        (5, "returned", {"task": AGENT, "run": "1.1", "result": []}),
        (6, "final", {"task": AGENT, **final}),
    )


def test_messages_that_are_in_the_conversation_violate_nothing() -> None:
    assert conversation(["from ada: (one)", "an answer", "from ada: (two)"]) == set()
    assert conversation(["from ada: (one)"], unread=1) == set()


@pytest.mark.parametrize(
    ("turns", "violated"),
    [
        (["(one)"], {"message lost"}),
        (["(one)", "(two)", "(one)"], {"message doubled"}),
        (["(two)", "(one)"], {"out of order"}),
    ],
)
def test_a_conversation_that_lacks_doubles_or_reorders_messages(turns: list[str], violated: set[str]) -> None:
    assert conversation(turns) == violated

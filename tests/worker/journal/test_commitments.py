"""Commitments and questions: fields of the state that the agent edits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from perdure import AgentState
from perdure.context import Commitment, Question
from perdure.worker.agents.journal.reducer import empty_state
from perdure.worker.agents.journal.snapshot import decode_snapshot, encode_snapshot
from perdure.worker.agents.journal.state import KEPT
from perdure.worker.agents.state_type import StateType
from pydantic import ValidationError

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def test_a_commitment_keeps_its_time_in_utc() -> None:
    local = NOON.astimezone(timezone(timedelta(hours=5)))
    state = AgentState(commitments=[Commitment(what="call", to="ada", due=local)])
    stored = state.model_dump(mode="json")["commitments"]
    made = {"what": "call", "by": "me", "to": "ada", "due": "2026-12-01T12:00:00Z", "done": False, "wait": ""}
    assert stored == [made]
    state.commitments[0].due = local + timedelta(hours=1)
    assert state.commitments[0].due.tzinfo is UTC


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        Commitment(what="call", due=datetime(2026, 12, 1))  # noqa: DTZ001 - the mistake that is refused
    with pytest.raises(ValidationError, match="timezone"):
        Commitment(what="call").due = datetime(2026, 12, 1)  # noqa: DTZ001


def test_only_open_commitments_become_due() -> None:
    commitment = Commitment(what="call", due=NOON)
    assert not commitment.is_due(NOON - timedelta(seconds=1))
    assert commitment.is_due(NOON)
    commitment.done = True
    assert not commitment.is_due(NOON)
    assert not Commitment(what="call").is_due(NOON)


def test_the_stored_fields_are_bounded_and_what_is_done_is_dropped_first() -> None:
    state_type = StateType("agent", AgentState)
    state = AgentState(
        commitments=[Commitment(what=str(number), done=number in (5, 7, 9)) for number in range(KEPT + 2)],
        questions=[Question(text=str(number)) for number in range(KEPT + 2)],
    )
    kept = state_type.load("t1", AgentState.model_validate_json(state_type.dump("t1", state)).model_dump(mode="json"))
    assert [one.what for one in kept.commitments] == [str(n) for n in range(KEPT + 2) if n not in (5, 7)]
    assert [one.text for one in kept.questions] == [str(n) for n in range(2, KEPT + 2)]
    state.commitments = [Commitment(what=str(number)) for number in range(KEPT + 2)]
    assert [one["what"] for one in state.model_dump()["commitments"]] == [str(n) for n in range(2, KEPT + 2)]


def test_a_snapshot_without_the_fields_is_read_with_their_defaults() -> None:
    older = {name: value for name, value in empty_state().items() if name not in ("commitments", "questions")}
    found = decode_snapshot("t1", encode_snapshot(older, 3, "agent")).state
    assert (found["commitments"], found["questions"]) == ([], [])

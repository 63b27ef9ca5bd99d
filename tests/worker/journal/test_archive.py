"""Archive of an agent: closed steps with their results, and whole exchanges of the conversation, leave the state."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from perdure.queues import TaskEvent
from perdure.worker.agents.journal.agent_events import Archived
from perdure.worker.agents.journal.archive import remove_oldest, retire_steps
from perdure.worker.agents.journal.json_patch import apply, diff
from perdure.worker.agents.journal.reducer import empty_state, reduce
from perdure.worker.agents.journal.state import AgentState
from perdure.worker.durable.journal.parsing import parse_event


def state_of(done: int, *, pending: int = 0, messages: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    plan = [
        {"key": f"s{n}", "title": f"step {n}", "status": "done" if n < done else "pending", "error": None}
        for n in range(done + pending)
    ]
    results = {f"s{n}": n * 10 for n in range(done)}
    return {**empty_state(), "plan": plan, "results": results, "messages": messages or []}


def said(role: str, content: str, *, calls: tuple[str, ...] = (), answers: str | None = None) -> dict[str, Any]:
    return {
        "role": role,
        "content": content,
        "tool_calls": [{"id": one, "name": "tool", "arguments": {}} for one in calls],
        "tool_call_id": answers,
        "name": None,
        "n": 1,
    }


def test_the_oldest_closed_steps_leave_with_their_results() -> None:
    before = state_of(5, pending=2)
    removed = remove_oldest(before, steps=2, messages=None, number=9)
    assert removed is not None
    assert [step["key"] for step in removed.state["plan"]] == ["s3", "s4", "s5", "s6"]
    assert removed.state["results"] == {"s3": 30, "s4": 40}
    assert removed.state["archive"] == {
        "steps": 3,
        "messages": 0,
        "ranges": [{"first": "s0", "last": "s2", "steps": 3}],
        "retired": 0,
        "base": 0,
    }
    assert orjson.loads(removed.steps["s1"]) == {"step": before["plan"][1], "n": 9, "at": 1, "result": 10}
    assert len(before["plan"]) == 7, "the given state is not changed"
    assert remove_oldest(removed.state, steps=2, messages=None) is None


def test_a_step_without_a_result_is_archived_without_one() -> None:
    state = state_of(1)
    state["plan"][0]["status"], state["results"] = "failed", {}
    removed = remove_oldest(state, steps=0, messages=None)
    assert removed is not None and orjson.loads(removed.steps["s0"]) == {"step": state["plan"][0], "n": 0, "at": 0}


def test_the_archive_has_a_bounded_number_of_ranges() -> None:
    state = state_of(1)
    for n in range(1, 500):
        state["plan"].append({"key": f"s{n}", "title": "", "status": "done", "error": None})
        removed = remove_oldest(state, steps=1, messages=None)
        assert removed is not None
        state = removed.state
    archive = state["archive"]
    assert len(archive["ranges"]) <= 20
    assert archive["steps"] == sum(one["steps"] for one in archive["ranges"]) == 499
    assert (archive["ranges"][0]["first"], archive["ranges"][-1]["last"]) == ("s0", "s498")
    assert AgentState.model_validate(state).archive.steps == 499


def test_old_messages_leave_and_the_first_instructions_stay() -> None:
    messages = [said("system", "rules"), said("user", "the task"), *(said("user", f"turn {n}") for n in range(6))]
    removed = remove_oldest(state_of(0, messages=messages), steps=None, messages=3)
    assert removed is not None
    assert [one["content"] for one in removed.state["messages"]] == ["rules", "the task", "turn 3", "turn 4", "turn 5"]
    assert removed.messages == removed.state["archive"]["messages"] == 3


@pytest.mark.parametrize("keep", range(1, 8))
def test_a_call_leaves_with_its_result(keep: int) -> None:
    messages = [
        said("user", "the task"),
        said("assistant", "", calls=("a", "b")),
        said("tool", "A", answers="a"),
        said("user", "hurry"),
        said("tool", "B", answers="b"),
        said("assistant", "", calls=("c",)),
        said("tool", "C", answers="c"),
        said("assistant", "done"),
    ]
    removed = remove_oldest(state_of(0, messages=messages), steps=None, messages=keep)
    left = messages if removed is None else removed.state["messages"]
    asked = {call["id"] for one in left for call in one["tool_calls"]}
    assert {one["tool_call_id"] for one in left if one["role"] == "tool"} == asked
    assert len(left) >= keep


def test_a_version_without_the_event_type_applies_its_changes() -> None:
    before = state_of(5)
    removed = remove_oldest(before, steps=2, messages=None)
    assert removed is not None
    event = Archived(steps=tuple(removed.steps), changes=diff(before, removed.state), own=True)
    assert reduce(before, event, 1) == removed.state
    data = orjson.loads(event.to_json())
    foreign = parse_event(TaskEvent("1-1", 1, "archived-by-another-version", None, data, number=1))
    assert apply(before, foreign.changes) == reduce(before, foreign, 1) == removed.state


def test_the_instructions_before_a_summary_stay_with_it() -> None:
    """A compaction keeps the user's first instructions before its summary."""
    messages = [
        {"role": "user", "content": "never pay", "name": None},
        {"role": "user", "content": "and hurry", "name": None},
        {"role": "user", "content": "[Summary]", "name": "summary"},
        *({"role": "assistant", "content": str(number), "name": None} for number in range(6)),
    ]
    removed = remove_oldest({**empty_state(), "messages": messages}, steps=None, messages=2)
    assert removed is not None
    assert [one["content"] for one in removed.state["messages"]] == ["never pay", "and hurry", "[Summary]", "4", "5"]
    assert (removed.first_message, removed.messages) == (3, 4)


def test_steps_without_a_record_are_kept_as_text() -> None:
    """Stored bytes that start like an encrypted value would be taken for one."""
    fields = retire_steps({}, {f"s{n}": ("done", "failed", "dropped")[n % 3] for n in range(2000)})
    assert all(re.fullmatch(rb"([0-9a-f]{16}[012])+", data) for data in fields.values())
    assert len(fields) <= 256
    assert sum(map(len, fields.values())) == 17 * 2000
    again = retire_steps(fields, {"other": "done"})
    assert [len(data) - len(fields[name]) for name, data in again.items()] == [17]

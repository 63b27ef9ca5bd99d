"""StateType applies events to fields incrementally and keeps the agent's own changes."""

from __future__ import annotations

from typing import Any

import pytest
from perdure import AgentState, PlanStep
from perdure.worker.agents.journal.state import Decision, WaitingFor
from perdure.worker.agents.state_type import StateType
from perdure.worker.errors import StateError
from pydantic import BaseModel, Field

FORM = StateType("agent", AgentState)


def stored(state: AgentState, name: str) -> Any:
    return state.model_dump(mode="json")[name]


def decision(number: int) -> dict[str, Any]:
    return {"n": number, "choice": f"choice {number}", "reasoning": "", "alternatives": []}


@pytest.fixture
def state() -> AgentState:
    return AgentState(
        plan=[PlanStep(key="a", title="first"), PlanStep(key="b", title="second")],
        decisions=[Decision.model_validate(decision(number)) for number in (1, 2)],
        results={"x": 1},
    )


def test_new_items_are_appended_and_old_ones_stay_the_same_objects(state: AgentState) -> None:
    before, held, first = stored(state, "decisions"), state.decisions, state.decisions[0]
    first.choice = "changed by the agent"
    assert FORM.apply_change(state, "decisions", before, [*before, decision(3)])
    assert state.decisions is held
    assert [one.choice for one in held] == ["changed by the agent", "choice 2", "choice 3"]
    assert held[0] is first


def test_the_oldest_item_is_dropped_for_a_new_one(state: AgentState) -> None:
    before = stored(state, "decisions")
    assert FORM.apply_change(state, "decisions", before, [before[1], decision(3)])
    assert [one.n for one in state.decisions] == [2, 3]


def test_a_changed_step_stays_the_same_object(state: AgentState) -> None:
    before, step = stored(state, "plan"), state.plan[1]
    state.plan[1].arguments["of"] = "the agent"
    state.plan.reverse()
    assert FORM.apply_change(state, "plan", before, [before[0], {**before[1], "status": "running", "attempts": 2}])
    assert (step.status, step.attempts, step.arguments) == ("running", 2, {"of": "the agent"})
    assert [one.key for one in state.plan] == ["b", "a"]


def test_new_results_are_added(state: AgentState) -> None:
    before = stored(state, "results")
    state.results["own"] = 7
    assert FORM.apply_change(state, "results", before, {**before, "y": None})
    assert state.results == {"x": 1, "own": 7, "y": None}


def test_scalar_fields_are_replaced(state: AgentState) -> None:
    assert FORM.apply_change(state, "current", None, "a")
    assert FORM.apply_change(state, "waiting_for", None, {"what": "message", "on": "", "why": ""})
    assert (state.current, state.waiting_for) == ("a", WaitingFor(what="message"))
    assert FORM.apply_change(state, "waiting_for", {"what": "message", "on": "", "why": ""}, None)
    assert state.waiting_for is None
    assert FORM.apply_change(state, "of a later version", 1, 2)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("decisions", [decision(9), decision(2)]),
        ("decisions", []),
        ("decisions", None),
        ("plan", [{"key": "c", "title": "another"}]),
        ("plan", [{"key": "c", "title": "another"}, {"key": "b", "title": "second"}]),
        ("plan", [{"key": "b", "title": "first"}, {"key": "a", "title": "second"}]),
        ("results", {}),
        ("results", None),
    ],
)
def test_changes_that_are_not_incremental_are_refused(state: AgentState, name: str, after: Any) -> None:
    whole = state.model_copy(deep=True)
    assert not FORM.apply_change(state, name, stored(state, name), after)
    assert state == whole


def test_a_step_that_the_agent_removed_is_not_changed(state: AgentState) -> None:
    before = stored(state, "plan")
    del state.plan[1]
    assert not FORM.apply_change(state, "plan", before, [before[0], {**before[1], "attempts": 2}])


def test_a_list_that_the_agent_changed_is_not_changed(state: AgentState) -> None:
    before = stored(state, "decisions")
    del state.decisions[0]
    assert not FORM.apply_change(state, "decisions", before, [*before, decision(3)])
    assert [one.n for one in state.decisions] == [2]


class Inner(BaseModel):
    depth: int = 0


class Odd(AgentState):
    number: int = 0
    numbers: list[int] = Field(default_factory=list)
    inner: Inner = Inner()
    anything: Any = None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("number", "abc", "field 'number' must be int, got 'abc'"),
        ("numbers", ["a"] * 900, r"field 'numbers' must be list\[int\], got \['a', .{,200}"),
        ("inner", Inner.model_construct(depth="x"), r"field 'inner' must be Inner, got Inner\(depth='x'\)"),
        ("anything", Inner, "field 'anything': Unable to .* as Annotated\\[..., Ephemeral\\]"),
    ],
)
def test_a_field_that_cannot_be_stored_is_named_with_the_remedy(name: str, value: Any, says: str) -> None:
    state = Odd()
    setattr(state, name, value)
    with pytest.raises(StateError, match=f"^the state of agent 'odd', task t, cannot be stored: {says}$"):
        StateType("odd", Odd).dump("t", state)

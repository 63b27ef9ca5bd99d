"""The state is the log's reduction: a pure function of what happened.

States are JSON objects here, of the shape of `AgentState`, with whatever fields a user's class adds. What an event says
by its type is applied first, then its `changes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .agent_events import ArtifactSaved, Compacted, Decided, Discovered, MessageAdded, Planned
from .event import Event
from .json_patch import BadPatch, apply
from .run_events import Received, Started, StepCompleted, StepFailed, StepStarted, Waited, WaitStarted
from .state import AgentState

__all__ = ["KEPT", "empty_state", "reduce"]

KEPT: Final = 100
"""Decisions and discoveries that the state keeps, the latest; all of them stay in the log."""

State = dict[str, Any]


def empty_state() -> State:
    """The state before anything happened."""
    return AgentState().model_dump(mode="json")


def reduce(state: State, event: Event, number: int) -> State:
    """The state after an event of this number. Pure: the state given stays as it is, and shares what did not change.

    Raises `BadPatch` for an event that does not fit the state.
    """
    rule = _RULES.get(event.type)
    try:
        if rule is not None:
            state = {**state, **rule(state, event, number)}
        changed: State = apply(state, event.changes) if event.changes else state
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BadPatch(f"event {number}, {event.type!r}, does not fit the state before it: {error}") from None
    if not isinstance(changed, dict):
        raise BadPatch(f"event {number}, {event.type!r}, makes no JSON object of the state")
    return changed


def _started(state: State, event: Started, number: int) -> State:
    return {} if event.goal is None else {"goal": event.goal}


def _planned(state: State, event: Planned, number: int) -> State:
    """What is done stays; what was open in the former plan is replaced."""
    kept = [step for step in state["plan"] if step["status"] in ("done", "failed", "dropped")] if event.again else []
    known = {step["key"] for step in kept}
    fresh = [
        {"status": "pending", "attempts": 0, "risky": False, "arguments": {}, "error": None, **step.model_dump()}
        for step in event.steps
        if step.key not in known
    ]
    return {"plan": kept + fresh, "current": None}


def _step(state: State, key: str | None, **fields: Any) -> list[State]:
    return [{**step, **fields} if step["key"] == key else step for step in state["plan"]]


def _step_started(state: State, event: StepStarted, number: int) -> State:
    if not any(step["key"] == event.step for step in state["plan"]):
        return {}  # a step within a step of the plan, or of a function
    return {"plan": _step(state, event.step, status="running", attempts=event.attempt), "current": event.step}


def _step_completed(state: State, event: StepCompleted, number: int) -> State:
    if not any(step["key"] == event.step for step in state["plan"]):
        return {}
    return {
        "plan": _step(state, event.step, status="done", error=None),
        "current": None,
        "results": {**state["results"], event.step: event.result},
    }


def _step_failed(state: State, event: StepFailed, number: int) -> State:
    if not any(step["key"] == event.step for step in state["plan"]):
        return {}
    return {"plan": _step(state, event.step, error=f"{event.error}: {event.message}")}


def _decided(state: State, event: Decided, number: int) -> State:
    decision = {
        "n": number,
        "choice": event.choice,
        "reasoning": event.reasoning,
        "alternatives": list(event.alternatives),
    }
    return {"decisions": [*state["decisions"], decision][-KEPT:]}


def _discovered(state: State, event: Discovered, number: int) -> State:
    discovery = {"n": number, "fact": event.fact, "source": event.source}
    return {"discoveries": [*state["discoveries"], discovery][-KEPT:]}


def _message_added(state: State, event: MessageAdded, number: int) -> State:
    return {"messages": [*state["messages"], {**event.message.model_dump(mode="json"), "n": number}]}


def _artifact_saved(state: State, event: ArtifactSaved, number: int) -> State:
    artifact = {"name": event.name, "hash": event.hash, "size": event.size, "media_type": event.media_type}
    others = [one for one in state["artifacts"] if one["name"] != event.name]
    return {"artifacts": [*others, artifact]}


def _compacted(state: State, event: Compacted, number: int) -> State:
    """The summary takes the place of the turns that it stands for."""
    summary: State = {
        "role": "user",
        "content": event.summary,
        "tool_calls": [],
        "tool_call_id": None,
        "name": "summary",
        "n": event.first,
    }
    return {"messages": [summary, *state["messages"][event.messages :]]}


def _waiting(state: State, event: WaitStarted, number: int) -> State:
    return {"waiting_for": {"what": event.what, "on": event.on, "why": event.why}}


def _waited(state: State, event: Waited, number: int) -> State:
    return {"waiting_for": None}


def _received(state: State, event: Received, number: int) -> State:
    return {"waiting_for": None}


_RULES: Final[dict[str, Callable[[State, Any, int], State]]] = {
    "started": _started,
    "planned": _planned,
    "step_started": _step_started,
    "step_completed": _step_completed,
    "step_failed": _step_failed,
    "decided": _decided,
    "discovered": _discovered,
    "message_added": _message_added,
    "artifact_saved": _artifact_saved,
    "compacted": _compacted,
    "waiting": _waiting,
    "waited": _waited,
    "received": _received,
}

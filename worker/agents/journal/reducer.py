"""Reduction of a log to an agent's state: a pure function of the events.

A state is a JSON object here, with the fields of `AgentState` and those that a user's class adds. The rule of the
event's type is applied first, then its `changes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ....queues.waits import wait_name
from ...durable.journal.chat import Message
from ...durable.journal.event import Event
from ...durable.journal.handoff.document import OpenPromise
from ...durable.journal.run_events import (
    Answered,
    Planned,
    Promised,
    PromiseKept,
    Received,
    Started,
    StepCompleted,
    StepFailed,
    StepStarted,
    Waited,
    WaitStarted,
)
from ...durable.promises import owed
from .agent_events import (
    ArtifactSaved,
    Compacted,
    Decided,
    Discovered,
    LogBase,
    MessageAdded,
    Withdrawn,
    WorkspaceSaved,
)
from .json_patch import BadPatch, apply
from .state import KEPT, AgentState, Commitment

State = dict[str, Any]

LOGGED_BY_CALLS: Final = ("messages", "decisions", "discoveries")
"""Fields of a state whose items the calls of a context add, each with the number of its event."""


def empty_state() -> State:
    """Return the state before the first event."""
    return AgentState().model_dump(mode="json")


def reduce(state: State, event: Event, number: int) -> State:
    """Return the state after an event. Pure: the given state is not changed, and the result shares its unchanged parts.

    Raises `BadPatch` if the event does not fit the state.
    """
    rule = _RULES.get(event.type)
    try:
        if rule is not None:
            state = {**state, **rule(state, event, number)}
        changed: State = apply(state, event.changes) if event.changes else state
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BadPatch(f"event {number}, {event.type!r}, does not fit the state before it: {error}") from None
    if not isinstance(changed, dict):
        raise BadPatch(f"event {number}, {event.type!r}, turns the state into something other than a JSON object")
    return changed


def _started(state: State, event: Started, number: int) -> State:
    if event.goal is None:
        return {}
    if event.turn is None:
        return {"goal": event.goal}
    message = event.turn.model_copy(update={"content": event.goal, "n": number})
    return {"goal": event.goal, "messages": [*state["messages"], message.model_dump(mode="json")]}


def _planned(state: State, event: Planned, number: int) -> State:
    """Keep the finished steps and replace the open ones."""
    kept = [step for step in state["plan"] if step["status"] in ("done", "failed", "dropped")] if event.again else []
    known = {step["key"] for step in kept}
    fresh = [
        {"status": "pending", "attempts": 0, "risky": False, "arguments": {}, "error": None, **step.model_dump()}
        for step in event.steps
        if step.key not in known
    ]
    planned = {step.key for step in event.steps}
    open_steps = [step for step in state["plan"] if step not in kept and step["key"] not in planned]
    former = [step for step in state.get("replaced", ()) if step["key"] not in planned]
    replaced = [{"key": step["key"], "title": step["title"], "why": event.why} for step in open_steps]
    return {"plan": kept + fresh, "current": None, "replaced": [*former, *replaced][-KEPT:]}


def _step(state: State, key: str | None, **fields: Any) -> list[State]:
    return [{**step, **fields} if step["key"] == key else step for step in state["plan"]]


def _step_started(state: State, event: StepStarted, number: int) -> State:
    if not any(step["key"] == event.step for step in state["plan"]):
        return {}  # a nested step, or a step of a function
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


def _withdrawn(state: State, event: Withdrawn, number: int) -> State:
    gone = set(event.numbers)
    return {name: [item for item in state[name] if item.get("n") not in gone] for name in LOGGED_BY_CALLS}


def _artifact_saved(state: State, event: ArtifactSaved, number: int) -> State:
    artifact = {"name": event.name, "hash": event.hash, "size": event.size, "media_type": event.media_type}
    others = [one for one in state["artifacts"] if one["name"] != event.name]
    return {"artifacts": [*others, artifact]}


def _workspace_saved(state: State, event: WorkspaceSaved, number: int) -> State:
    """Keep the paths of the files that changed last; the log has all of them."""
    named = {*event.changed, *event.removed}
    others = [file for file in state["files"] if file["path"] not in named]
    return {"files": [*others, *({"path": path, "n": number} for path in event.changed)][-KEPT:]}


def _compacted(state: State, event: Compacted, number: int) -> State:
    """Replace the messages that the summary covers. Instructions of the user stay."""
    summary = Message(role="user", content=event.summary, name="summary", n=event.first or None)
    start = [one.model_dump(mode="json") for one in (*event.kept, summary)]
    return {"messages": [*start, *state["messages"][event.messages :]]}


def _waiting(state: State, event: WaitStarted, number: int) -> State:
    """Note a wait, and that the person who is asked owes the answer."""
    awaited = {"waiting_for": {"what": event.what, "on": event.on, "why": event.why, "wait": event.wait}}
    if event.what != "answer" or not event.on:
        return awaited
    promise = owed(event.on, event.why or wait_name(event.wait), event.until, event.wait)
    return awaited | {"commitments": [*_without_wait(state, event.wait), _commitment(promise)]}


def _waited(state: State, event: Waited | Answered, number: int) -> State:
    """Note the end of a wait, whose answer is owed no more. Of several that are open, the state has the latest."""
    awaited = state["waiting_for"]
    ended = {"waiting_for": None if awaited is None or awaited.get("wait", "") == event.wait else awaited}
    left = _without_wait(state, event.wait)
    return ended if len(left) == len(state.get("commitments", ())) else ended | {"commitments": left}


def _without_wait(state: State, wait: str) -> list[Any]:
    return [made for made in state.get("commitments", ()) if not wait or made.get("wait", "") != wait]


def _commitment(promise: OpenPromise) -> State:
    made = Commitment(what=promise.what, by=promise.by, to=promise.to, due=promise.due, wait=promise.wait)
    return made.model_dump(mode="json")


def _promised(state: State, event: Promised, number: int) -> State:
    promise = OpenPromise(what=event.what, by=event.by, to=event.to, due=event.due)
    return {"commitments": [*state.get("commitments", ()), _commitment(promise)]}


def _promise_kept(state: State, event: PromiseKept, number: int) -> State:
    """Mark the first open commitment with these parties and this text as done."""
    kept = [*state.get("commitments", ())]
    for position, made in enumerate(kept):
        if not made["done"] and (made["what"], made["by"], made["to"]) == (event.what, event.by, event.to):
            kept[position] = {**made, "done": True}
            break
    return {"commitments": kept}


def _received(state: State, event: Received, number: int) -> State:
    awaited = state["waiting_for"]
    return {"waiting_for": awaited if awaited is not None and awaited.get("wait") else None}


def _log_base(state: State, event: LogBase, number: int) -> State:
    """Return the whole state: it may be the first event of the log."""
    archive = event.state["archive"]
    return {**event.state, "archive": {**archive, "base": number, "retired": archive["retired"] + event.retired}}


_RULES: Final[dict[str, Callable[[State, Any, int], State]]] = {
    "started": _started,
    "planned": _planned,
    "step_started": _step_started,
    "step_completed": _step_completed,
    "step_failed": _step_failed,
    "decided": _decided,
    "discovered": _discovered,
    "message_added": _message_added,
    "withdrawn": _withdrawn,
    "artifact_saved": _artifact_saved,
    "workspace_saved": _workspace_saved,
    "compacted": _compacted,
    "log_base": _log_base,
    "waiting": _waiting,
    "waited": _waited,
    "answered": _waited,
    "received": _received,
    "promised": _promised,
    "promise_kept": _promise_kept,
}

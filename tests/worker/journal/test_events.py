"""Event types, JSON patches, and the state that they reduce to."""

from __future__ import annotations

import copy
from typing import Any, Literal

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perdure.queues import TaskEvent
from perdure.queues.security.redaction import Redaction
from perdure.worker.agents.journal.agent_events import (
    ArtifactSaved,
    Changed,
    Compacted,
    Decided,
    Discovered,
    MessageAdded,
)
from perdure.worker.agents.journal.json_patch import BadPatch, apply, diff
from perdure.worker.agents.journal.reducer import empty_state, reduce
from perdure.worker.agents.journal.registration import register_event
from perdure.worker.agents.journal.state import KEPT, AgentState
from perdure.worker.durable.journal.chat import Message
from perdure.worker.durable.journal.event import BUILT_IN, Event
from perdure.worker.durable.journal.event_redaction import redacted
from perdure.worker.durable.journal.parsing import Foreign, Unreadable, parse_event
from perdure.worker.durable.journal.run_events import (
    Planned,
    PlannedStep,
    Received,
    Started,
    StepCompleted,
    StepFailed,
    StepStarted,
    ToolCalled,
    WaitStarted,
)
from pydantic import model_validator

FEW = settings(max_examples=60, deadline=None)

names = st.text(alphabet="a~/01\"'é ", max_size=4)
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=4)
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


def exact(document: Any) -> bytes:
    """Return canonical JSON, in which 1 and true differ and the order of names does not matter."""
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def entry(kind: str, data: Any = None, *, number: int | None = 7, problem: str | None = None) -> TaskEvent:
    return TaskEvent("5-0", 5, kind, None, data, number, problem, "t1")


# patches


@FEW
@given(documents, documents)
def test_a_patch_turns_one_document_into_the_other(before: Any, after: Any) -> None:
    untouched = copy.deepcopy((before, after))
    patch = diff(before, after)
    assert exact(apply(before, orjson.loads(orjson.dumps(patch)))) == exact(after)
    assert exact([before, after]) == exact(list(untouched))


@FEW
@given(st.lists(leaves, max_size=6), st.lists(leaves, max_size=3), st.lists(leaves, max_size=6))
def test_an_insertion_into_a_list_costs_only_the_inserted_items(
    head: list[Any], added: list[Any], tail: list[Any]
) -> None:
    assert len(diff(head + tail, head + added + tail)) == len(added)
    assert len(diff(head + added + tail, head + tail)) == len(added)


def test_names_are_escaped_in_json_pointers() -> None:
    patch = diff({"a/b": {"c~d": 1}}, {"a/b": {"c~d": 2}})
    assert patch == ({"op": "replace", "path": "/a~1b/c~0d", "value": 2},)


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/no"},
        {"op": "replace", "path": "/no", "value": 1},
        {"op": "add", "path": "no", "value": 1},
        {"op": "add", "path": "/x~2", "value": 1},
        {"op": "add", "path": "/list/3", "value": 1},
        {"op": "add", "path": "/list/-1", "value": 1},
        {"op": "replace", "path": "/list/2", "value": 1},
        {"op": "replace", "path": "/list/-", "value": 1},
        {"op": "remove", "path": "/list/01"},
        {"op": "add", "path": "/list/0/deeper", "value": 1},
        {"op": "remove", "path": ""},
        {"op": "move", "from": "/list", "path": "/x"},
        {"op": "add", "path": "/x"},
        {"path": "/x", "value": 1},
        {"op": "add", "path": 7, "value": 1},
    ],
    ids=str,
)
def test_a_patch_that_does_not_fit_is_refused(operation: dict[str, Any]) -> None:
    document = {"list": [1, 2]}
    with pytest.raises(BadPatch, match="does not fit"):
        apply(document, [operation])
    assert document == {"list": [1, 2]}


def test_items_are_added_to_and_removed_from_lists() -> None:
    patch = [
        {"op": "add", "path": "/0", "value": "a"},
        {"op": "add", "path": "/2", "value": "z"},
        {"op": "add", "path": "/-", "value": "!"},
        {"op": "remove", "path": "/1"},
    ]
    assert apply(["b"], patch) == ["a", "z", "!"]


# the state


texts = st.text(max_size=5)
steps = st.sampled_from(["read", "write", "check"])
happenings: st.SearchStrategy[Event] = st.one_of(
    st.builds(Started, goal=texts),
    st.builds(
        Planned,
        steps=st.lists(steps, unique=True).map(lambda keys: tuple(PlannedStep(key=key, title=key) for key in keys)),
        again=st.booleans(),
    ),
    st.builds(StepStarted, step=steps, attempt=st.integers(1, 3)),
    st.builds(StepCompleted, step=steps, result=documents),
    st.builds(StepFailed, step=steps, error=texts, message=texts),
    st.builds(Decided, choice=texts, alternatives=st.lists(texts, max_size=2).map(tuple)),
    st.builds(Discovered, fact=texts, source=texts),
    st.builds(MessageAdded, message=st.builds(Message, role=st.just("user"), content=texts)),
    st.builds(Compacted, first=st.just(1), last=st.just(2), messages=st.integers(0, 3), summary=texts),
    st.builds(ArtifactSaved, name=texts, hash=texts, size=st.integers(0, 9)),
    st.builds(WaitStarted, what=texts),
    st.builds(Received, number=st.integers(1, 3)),
    st.builds(
        Changed,
        changes=documents.map(lambda value: ({"op": "add", "path": "/context/x", "value": value},)),
    ),
)


def logged(event: Event, number: int) -> Event:
    """Return the event as a reader of the log sees it."""
    return parse_event(entry(event.type, orjson.loads(event.to_json()), number=number))


def fold(state: dict[str, Any], happened: list[Event], after: int = 0) -> dict[str, Any]:
    for number, event in enumerate(happened, after + 1):
        state = reduce(state, event, number)
    return state


@FEW
@given(st.lists(happenings, max_size=12), st.integers(0, 12))
def test_the_state_is_a_pure_function_of_the_log(happened: list[Event], cut: int) -> None:
    states = [empty_state()]
    for number, event in enumerate(happened, 1):
        before = exact(states[-1])
        states.append(reduce(states[-1], event, number))
        assert exact(states[-2]) == before
    parts = fold(fold(empty_state(), happened[:cut]), happened[cut:], after=min(cut, len(happened)))
    read = fold(empty_state(), [logged(event, number) for number, event in enumerate(happened, 1)])
    assert exact(parts) == exact(read) == exact(states[-1])
    assert exact(AgentState.model_validate(read).model_dump(mode="json")) == exact(read)


def test_the_state_keeps_the_latest_decisions_and_discoveries() -> None:
    state = fold(empty_state(), [Decided(choice=str(n)) for n in range(KEPT + 5)])
    assert [(one["n"], one["choice"]) for one in state["decisions"]][:: KEPT - 1] == [(6, "5"), (KEPT + 5, "104")]


def test_an_event_that_does_not_fit_the_state_is_named() -> None:
    with pytest.raises(BadPatch, match="event 3, 'decided', does not fit the state before it"):
        reduce({}, Decided(choice="a"), 3)
    whole = Changed(changes=({"op": "replace", "path": "", "value": 5},))
    with pytest.raises(BadPatch, match="event 4, 'changed', turns the state into something other than"):
        reduce(empty_state(), whole, 4)


# reading


@pytest.mark.parametrize("kind", [*BUILT_IN])
def test_every_type_is_read_as_it_was_written(kind: str) -> None:
    needed = {
        "after": "crash",
        "message": {"role": "user", "content": "x"},
        "changes": [],
        "error": "E",
        "state": {"goal": "x"},
    }
    guesses: dict[str, Any] = {}
    for name, field in BUILT_IN[kind].model_fields.items():
        if field.is_required():
            guesses[name] = needed.get(name, 3 if field.annotation is int else "text")
    event = BUILT_IN[kind](**guesses, step="s", changes=({"op": "add", "path": "/context/a", "value": [1.5, None]},))
    assert logged(event, 1) == event


def test_unreadable_events_say_where_and_why() -> None:
    cases = {
        "unknown event type 'unheard'": entry("unheard", {"a": 1}),
        "it has version 2; this version of Perdure reads 'decided' up to version 1": entry("decided", {"v": 2}),
        "its version must be an integer of 1 or more, got 'x'": entry("decided", {"v": "x"}),
        "choice: Field required": entry("decided", {"reasoning": "because"}),
        "its data must be a JSON object, got list": entry("decided", [1]),
        "not JSON: at once": entry("decided", None, problem="not JSON: at once"),
    }
    for problem, found in cases.items():
        event = parse_event(found)
        assert isinstance(event, Unreadable)
        assert f"event 7 (entry 5-0) of the log of task t1, {found.type!r}, cannot be read: {problem}" in str(event)
        assert (event.task_id, event.entry, event.number, event.data) == ("t1", "5-0", 7, found.data)


def test_a_new_field_of_a_later_version_is_ignored() -> None:
    assert parse_event(entry("decided", {"choice": "a", "mood": "good"})) == Decided(choice="a")


# application types


@register_event
class Priced(Event):
    """Application type whose version 1 had cents."""

    version = 2
    type: Literal["test_priced"] = "test_priced"
    euros: float

    @model_validator(mode="before")
    @classmethod
    def from_version_1(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "euros": data["cents"] / 100} if data.get("v") == 1 else data


def test_an_application_type_is_read_in_all_its_versions() -> None:
    new = Priced(euros=2.5)
    assert orjson.loads(new.to_json()) == {"v": 2, "euros": 2.5, "own": True}
    assert logged(new, 1) == new
    old = parse_event(entry("test_priced", {"cents": 250}))
    assert isinstance(old, Priced)
    assert (old.v, old.euros) == (1, 2.5)
    assert isinstance(parse_event(entry("test_priced", {"v": 3, "euros": 1})), Unreadable)


def test_an_unregistered_application_type_changes_the_state() -> None:
    class Weighed(Event):
        type: Literal["test_weighed"] = "test_weighed"
        grams: float

    weighed = Weighed(grams=2.5, changes=({"op": "add", "path": "/context/grams", "value": 2.5},))
    event = logged(weighed, 1)
    assert isinstance(event, Foreign)
    assert event.data["grams"] == 2.5
    assert reduce(empty_state(), event, 1) == reduce(empty_state(), weighed, 1)


def test_an_ambiguous_type_is_refused() -> None:
    class Nameless(Event):
        pass

    class Loose(Event):
        type: str = "loose"

    class Taken(Event):
        type: Literal["decided"] = "decided"

    class Odd(Event):
        type: Literal["#odd"] = "#odd"

    for kind, problem in (
        (Nameless, "must define its type"),
        (Loose, "must define its type"),
        (Taken, "already"),
        (Odd, "without '#'"),
    ):
        with pytest.raises(ValueError, match=problem):
            register_event(kind)
    assert parse_event(entry("decided", {"choice": "a"})) == Decided(choice="a")


# secrets


SECRETS = ('pa"ss\\word\n', "1234", "tool", "user")
"""A secret that JSON escapes, a number, the name of a field and the role of a message."""


def test_only_the_values_are_masked() -> None:
    redact = Redaction(SECRETS)
    called = ToolCalled(
        tool="mail",
        arguments={"password": SECRETS[0], "pin": 1234, "tool": [SECRETS[0]], "n": 51},
        result=f'{{"as text": {orjson.dumps(SECRETS[0]).decode()}}}',
        reasoning="1234 fits",
        step="tool",
        changes=({"op": "add", "path": "/results/tool", "value": {"pin": "1234"}},),
    )
    shown = redacted(called, redact)
    assert isinstance(shown, ToolCalled)
    assert shown.arguments == {"password": "*" * 10, "pin": "*" * 10, "**********": ["*" * 10], "n": 51}
    assert shown.result == '{"as text": "**********"}'
    assert (shown.reasoning, shown.step, shown.tool) == ("********** fits", "tool", "mail")
    assert shown.changes == ({"op": "add", "path": "/results/**********", "value": {"pin": "*" * 10}},)
    assert logged(shown, 1) == shown
    added = MessageAdded(message=Message(role="user", content="I am user 1234"))
    assert redacted(added, redact).message == Message(role="user", content="I am ********** **********")
    saved = ArtifactSaved(name="1234", hash="a1234b", size=1234)
    assert redacted(saved, redact) == ArtifactSaved(name="*" * 10, hash="a1234b", size=1234)


def test_an_event_without_secrets_is_returned_itself() -> None:
    event = ToolCalled(tool="mail", arguments={"a": [1, {"b": 2.5}]}, result=None)
    assert redacted(event, Redaction(SECRETS)) is event

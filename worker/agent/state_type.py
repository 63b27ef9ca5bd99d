"""The type of an agent's state: its stored, ephemeral and input fields, and incremental updates from events.

An event changes a field at the cost of what is new: items at the end of a list, steps of the plan one at a time, new
keys of an object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, Generic

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, PydanticSerializationUnexpectedValue

from ...queues import has_secret
from ..durable import type_name
from ..errors import StateMismatch, StateUnstorable, TaskDefinitionError
from ..errors.validation import first_problem
from ..journal import AgentState, Ephemeral, PlanStep
from .agent import S

__all__ = ["StateType"]

_MISSING: Final = object()

_RESERVED: Final = frozenset({"ctx", "self", "goal", "key", "fresh"})
"""Names of parameters of `AgentTask.enqueue` and of handlers, which inputs must not have."""

Read = Callable[[Any], Any]


class StateType(Generic[S]):
    """The state class of an agent. Raises `TaskDefinitionError` if it cannot be stored.

    Attributes:
        inputs: its own fields that may be passed to `enqueue`.
        ephemeral: fields that are never stored.
    """

    def __init__(self, agent: str, kind: type[S]) -> None:
        self.agent = agent
        self.kind = kind
        self.fields: Final[dict[str, FieldInfo]] = dict(kind.model_fields)
        self.ephemeral = frozenset(name for name, field in self.fields.items() if Ephemeral in field.metadata)
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        own = [name for name in self.fields if name not in AgentState.model_fields]
        self.inputs = tuple([name for name in own if name not in self.ephemeral or self._is_enqueueable(name)])
        self._check()

    def _is_enqueueable(self, name: str) -> bool:
        """Return whether values of an ephemeral field's type can be enqueued."""
        try:
            TypeAdapter(self.annotation(name))
        except PydanticUserError:
            return False
        return True

    def annotation(self, name: str) -> Any:
        """Return the declared type of a field."""
        field = self.fields[name]
        return field.annotation if name in self.ephemeral else field.rebuild_annotation()

    def _check(self) -> None:
        what = f"agent {self.agent!r}: field {{!r}} of its state {self.kind.__name__}"
        for name, field in self.fields.items():
            if name in self.inputs and name in _RESERVED:
                raise TaskDefinitionError(f"{what.format(name)} has the name of a parameter of enqueue; rename it")
            if name in self.ephemeral:
                if field.is_required():
                    raise TaskDefinitionError(f"{what.format(name)} is ephemeral and must have a default")
                if name in AgentState.model_fields:
                    raise TaskDefinitionError(f"{what.format(name)} is a field of AgentState and cannot be ephemeral")
            elif has_secret(self._adapter(name).core_schema):
                raise TaskDefinitionError(
                    f"{what.format(name)} is a secret and must not be stored; make it Annotated[..., Ephemeral] with a "
                    "default: as an input it is set again in every run"
                )

    def dump(
        self, task_id: str, state: S, names: Collection[str] | None = None, *, recalled: Collection[str] = ()
    ) -> bytes:
        """Return the stored fields as JSON, all or those in `names`, without recalled results.

        Raises `StateUnstorable`.
        """
        try:
            return self._dump(state, None if names is None else set(names), recalled)
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise StateUnstorable(task_id, self.agent, self._unstorable(state) or str(error)) from None

    def _dump(self, state: S, names: set[str] | None, recalled: Collection[str] = ()) -> bytes:
        exclude: dict[str, Any] = dict.fromkeys(self.ephemeral, True)
        if recalled:
            exclude["results"] = set(recalled)
        return state.model_dump_json(include=names, exclude=exclude, warnings="error").encode()

    def _unstorable(self, state: S) -> str | None:
        """Return which field cannot be stored, and the remedy; None if each of them can."""
        for name in [one for one in self.fields if one not in self.ephemeral]:
            try:
                self._dump(state, {name})
            except (PydanticSerializationError, ValueError, RecursionError) as error:
                value = getattr(state, name)
                if self._fits(name, value) and PydanticSerializationUnexpectedValue.__name__ not in str(error):
                    return (
                        f"field {name!r}: {error}; declare a field that must not be stored as Annotated[..., Ephemeral]"
                    )
                return f"field {name!r} must be {type_name(self.fields[name].annotation)}, got {value!r:.200}"
        return None

    def _fits(self, name: str, value: Any) -> bool:
        """Return whether a value is of the declared type of its field."""
        try:
            self._adapter(name).validate_python(value, strict=True)
        except ValidationError:
            return False
        return True

    def load(self, task_id: str, stored: dict[str, Any]) -> S:
        """Return a state from JSON, without fields that only a later version of the class has.

        Raises `StateMismatch`.
        """
        known = {name: value for name, value in stored.items() if name in self.fields and name not in self.ephemeral}
        try:
            return self.kind.model_validate_json(orjson.dumps(known))
        except ValidationError as error:
            raise StateMismatch(task_id, self.agent, first_problem(error)) from None

    def apply_change(self, state: S, name: str, before: Any, after: Any) -> bool:
        """Change a field as an event changed its stored form; return False if all of it must be assigned instead."""
        if name not in self.fields:
            return True
        try:
            return _apply_change(
                state, name, before, after, lambda part: self._adapter(name).validate_json(orjson.dumps(part))
            )
        except ValidationError:
            return False

    def assign(self, task_id: str, state: S, changed: dict[str, Any]) -> None:
        """Set fields of a state from JSON, all or none. Lists and dicts are changed in place.

        Raises `StateMismatch`.
        """
        made: dict[str, Any] = {}
        for name, value in changed.items():
            if name not in self.fields or name in self.ephemeral:
                continue
            try:
                made[name] = self._adapter(name).validate_json(orjson.dumps(value))
            except ValidationError as error:
                raise StateMismatch(task_id, self.agent, f"{name}: {first_problem(error)}") from None
        for name, new in made.items():
            match getattr(state, name), new:
                case list() as held, list():
                    held[:] = new
                case dict() as held, dict():
                    held.clear()
                    held.update(new)
                case _:
                    setattr(state, name, new)

    def _adapter(self, name: str) -> TypeAdapter[Any]:
        if name not in self._adapters:
            self._adapters[name] = TypeAdapter(self.annotation(name))
        return self._adapters[name]


def _apply_change(state: AgentState, name: str, before: Any, after: Any, read: Read) -> bool:
    """Change a field as its stored form was changed. Changes that the agent made itself stay.

    Args:
        before: the stored form before the event.
        after: the stored form after it; unchanged parts are the same objects as in `before`.
        read: converts a stored form, or a part of it, to the value that the state holds.

    Returns:
        False, with nothing changed, if the change cannot be applied incrementally.
    """
    match before, after, getattr(state, name, None):
        case list(), list(), list() as held:
            return _grow(held, before, after, read) or (name == "plan" and _update_steps(held, before, after))
        case dict(), dict(), dict() as held:
            return _add(held, before, after, read)
        case _:
            setattr(state, name, read(after))
            return True


def _grow(held: list[Any], before: list[Any], after: list[Any], read: Read) -> bool:
    """Append new items; the oldest one may have been dropped for them."""
    if len(held) != len(before):
        return False
    for dropped in (0, 1):
        stayed = len(before) - dropped
        if 0 <= stayed <= len(after) and all(
            one is other for one, other in zip(before[dropped:], after[:stayed], strict=True)
        ):
            added = read(after[stayed:])
            del held[:dropped]
            held += added
            return True
    return False


def _update_steps(held: list[PlanStep], before: list[Any], after: list[Any]) -> bool:
    """Set changed fields of existing steps. The steps stay the same objects."""
    if len(before) != len(after):
        return False
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    found = {step.key: step for step in held}
    if any(old["key"] != new["key"] or new["key"] not in found for old, new in changed):
        return False
    for old, new in changed:
        for name, value in new.items():
            if old.get(name, _MISSING) != value:
                setattr(found[new["key"]], name, value)
    return True


def _add(held: dict[str, Any], before: dict[str, Any], after: dict[str, Any], read: Read) -> bool:
    """Add or replace values of an object."""
    if not before.keys() <= after.keys():
        return False
    held.update(read({name: value for name, value in after.items() if before.get(name, _MISSING) is not value}))
    return True

"""The type of an agent's state: its stored, ephemeral and input fields, and incremental updates from events.

An event changes a field at the cost of what is new: items at the end of a list, steps of the plan one at a time, new
keys of an object.

What is stored is read back before it is written, unless the type of the field is closed under JSON, and the state holds
what was read: a resumed run sees the same. Models are stored by the names of their fields, without computed fields, and
are read by these names, whatever their aliases are.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Callable, Collection
from itertools import zip_longest
from typing import Any, Final, Generic

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, PydanticSerializationUnexpectedValue

from ...queues.json_form import as_json, encodable, is_encodable_otherwise, large_integer
from ...queues.security.secret_arguments import has_secret
from ..durable.json_types import has_computed, has_functions, has_models, is_closed, type_name, unreadable_part
from ..durable.value_loss import is_same, losses, without_computed
from ..errors import StateError, StateMismatch, TaskDefinitionError, first_problem
from ..resume_warning import warn_once
from .agent import S
from .journal.state import AgentState, Ephemeral, PlanStep

_MISSING: Final = object()

_RESERVED: Final = frozenset({"ctx", "self", "goal", "key", "fresh"})
"""Names of parameters of `AgentTask.enqueue` and of handlers, which inputs must not have."""

_BY_NAME: Final[dict[str, Any]] = {"by_alias": False, "round_trip": True, "warnings": "error"}
"""Options of the dump: keys are the names of the fields, and computed fields are left out."""

_OWN_MODELS: Final = AgentState.model_fields.keys() - {"context", "results"}
"""Fields of models whose configuration keeps all numbers."""

_REPLACED: Final = "\ufffd".encode()
"""Character in place of half a surrogate pair: what is read then differs from what was stored."""

_LARGE_NUMBER: Final = re.compile(rb"\de\+?(?:1[89]|[2-9]\d|\d{3})")
"""A number of JSON that may have been an integer of more than 64 bits, which is read as a float."""

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
        self._closed: dict[str, bool] = {}
        self._functions: dict[str, bool] = {}
        rules = kind.__pydantic_decorators__
        self._has_rules = kind.model_config != AgentState.model_config or any(
            (rules.validators, rules.field_validators, rules.root_validators, rules.model_validators)
        )
        """Whether the class itself checks or changes values of fields when it is read."""
        own = [name for name in self.fields if name not in AgentState.model_fields]
        self.inputs = tuple([name for name in own if name not in self.ephemeral or self._is_enqueueable(name)])
        self._check()
        stored = [name for name in own if name not in self.ephemeral]
        self._own_models = {name for name in stored if has_models(self._adapter(name).core_schema)}
        """Own fields with models and dataclasses, whose configurations may make null of NaN and infinities. Other
        fields have such values only until they are read back."""
        self._computed = {name for name in self._own_models if has_computed(self._adapter(name).core_schema)}
        """Own fields with dataclasses that compute fields, which the state does not read: it forbids unknown keys."""

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
            elif field.exclude:
                raise TaskDefinitionError(
                    f"{what.format(name)} is excluded from what is stored; make it Annotated[..., Ephemeral] with a "
                    "default"
                )
            elif (problem := unreadable_part(self._adapter(name).core_schema)) is not None:
                raise TaskDefinitionError(f"{what.format(name)} could not be read by a later run: {problem}")
            elif has_secret(self._adapter(name).core_schema):
                raise TaskDefinitionError(
                    f"{what.format(name)} is a secret and must not be stored; make it Annotated[..., Ephemeral] with a "
                    "default: as an input it is set again in every run"
                )

    def dump(
        self, task_id: str, state: S, names: Collection[str] | None = None, *, recalled: Collection[str] = ()
    ) -> bytes:
        """Return the stored fields as JSON, all or those in `names`, without recalled results.

        Raises `StateError`.
        """
        if names is None or "messages" in names:
            for message in state.messages:
                if getattr(message, "role", None) == "system":
                    problem = "field 'messages': the role of a stored message must be user, assistant or tool"
                    raise self._unstored(task_id, problem)
        try:
            return self._dump(state, None if names is None else set(names), recalled)
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise self._unstored(task_id, self._unstorable(state) or str(error)) from None

    def _dump(self, state: S, names: set[str] | None, recalled: Collection[str] = ()) -> bytes:
        data = self._dump_all(state, names, recalled)
        computed = self._computed if names is None else self._computed & names
        if not computed:
            return data
        stored = orjson.loads(data)
        stored |= {name: without_computed(getattr(state, name), stored[name]) for name in computed & stored.keys()}
        return orjson.dumps(stored)

    def _dump_all(self, state: S, names: set[str] | None, recalled: Collection[str]) -> bytes:
        exclude = self._excluded(recalled)
        try:
            return state.model_dump_json(include=names, exclude=exclude, **_BY_NAME).encode()
        except PydanticSerializationError as error:
            if not is_encodable_otherwise(error):
                raise
        stored = self.fields.keys() - self.ephemeral if names is None else names
        clean = state.model_copy(update={name: encodable(getattr(state, name)) for name in stored})
        return clean.model_dump_json(include=names, exclude=exclude, **_BY_NAME).encode()

    def _excluded(self, recalled: Collection[str]) -> dict[str, Any]:
        exclude: dict[str, Any] = dict.fromkeys(self.ephemeral, True)
        return exclude | {"results": set(recalled)} if recalled else exclude

    def read_back(
        self, task_id: str, state: S, stored: dict[str, Any], names: Collection[str], recalled: Collection[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return fields as JSON as it is stored, and what is read of it where that may differ from the state.

        Args:
            stored: all fields as JSON.
            names: the fields that changed.
            recalled: keys of results that are not stored.

        Raises `StateError` if a field cannot be read.
        """
        written, doubtful = {name: stored[name] for name in names}, list[str]()
        for name in names:
            data = orjson.dumps(written[name])
            if _LARGE_NUMBER.search(data) and (number := large_integer(self._dump(state, {name}, recalled))):
                raise self._unstored(task_id, _too_large(name, number))
            if not self._is_closed(name) or _REPLACED in data or not _is_exact(getattr(state, name), written[name]):
                written[name] = self._with_all_numbers(state, name, written[name])
                doubtful.append(name)
        if not doubtful:
            return written, {}
        read = self._reread(task_id, stored, {name: written[name] for name in doubtful})
        if changing := {name for name in doubtful if self._has_rules or self._has_functions(name)}:
            copy = state.model_copy(update={name: read[name] for name in changing})
            again = self.parsed(task_id, copy, self._dump(copy, changing, recalled))
            changed = {name: again[name] for name in changing if again[name] != written[name]}
            for name, value in (self._reread(task_id, stored | written, changed) if changed else {}).items():
                if not is_same(value, read[name]):
                    problem = f"field {name!r}: its validators change again what they have returned; let them return it"
                    raise self._unstored(task_id, problem)
            written |= changed
        for name in self._own_models & read.keys():
            for loss in losses(getattr(state, name), read[name]):
                warn_once(f"agent {self.agent!r}: a later run reads field {name!r} of its state differently: {loss}")
        return written, read

    def _reread(self, task_id: str, stored: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields as a later run reads them from JSON. stored: all fields. Raises `StateError`."""
        try:
            if self._has_rules:
                loaded = self._validate(stored | fields)
                return {name: getattr(loaded, name) for name in fields}
            return {name: self._read(name, orjson.dumps(value)) for name, value in fields.items()}
        except ValidationError as error:
            problem = f"it could not be read by a later run: {self._misfit(fields) or first_problem(error)}"
            raise self._unstored(task_id, problem) from None

    def parsed(self, task_id: str, state: S, data: bytes) -> dict[str, Any]:
        """Return dumped fields as JSON data, with all numbers. Raises `StateError` if one has too many digits."""
        try:
            fields: dict[str, Any] = orjson.loads(data)
        except ValueError as error:
            for name in self.fields.keys() - self.ephemeral:
                if (number := large_integer(self._dump(state, {name}))) is not None:
                    raise self._unstored(task_id, _too_large(name, number)) from None
            raise self._unstored(task_id, str(error)) from None
        for name in self._own_models & fields.keys():
            fields[name] = self._with_all_numbers(state, name, fields[name])
        return fields

    def _with_all_numbers(self, state: S, name: str, stored: Any) -> Any:
        """Return a field as JSON with NaN and infinities of models, whose own configuration makes null of them."""
        if name in _OWN_MODELS or b"null" not in orjson.dumps(stored):
            return stored
        try:
            dumped = state.model_dump(mode="json", include={name}, **_BY_NAME)
        except UnicodeEncodeError:  # half of a surrogate pair in a key
            clean = state.model_copy(update={name: encodable(getattr(state, name))})
            dumped = clean.model_dump(mode="json", include={name}, **_BY_NAME)
        found = orjson.loads(as_json(dumped))[name]
        return without_computed(getattr(state, name), found) if name in self._computed else found

    def put(self, state: S, read: dict[str, Any]) -> None:
        """Set fields to what was read of them. Lists and dicts are changed in place, as are steps of the plan."""
        for name, new in read.items():
            held = getattr(state, name)
            if (settled := _settled(held, new)) is not held:
                setattr(state, name, settled)

    def differing(self, task_id: str, state: S, recalled: Collection[str] = ()) -> list[str]:
        """Return the fields that a later run would read differently. Raises `StateError`."""
        stored = self.parsed(task_id, state, self.dump(task_id, state, recalled=recalled))
        _, read = self.read_back(task_id, state, stored, stored.keys(), recalled)
        live = {name: getattr(state, name) for name in read}
        if recalled and "results" in live:
            live["results"] = {key: result for key, result in state.results.items() if key not in recalled}
        return [name for name, new in read.items() if not is_same(live[name], new)]

    def _misfit(self, fields: dict[str, Any]) -> str | None:
        """Return the first field that its type does not read, and why."""
        for name, value in fields.items():
            try:
                self._read(name, orjson.dumps(value))
            except ValidationError as error:
                return f"field {name!r}: {first_problem(error)}"
        return None

    def _has_functions(self, name: str) -> bool:
        if name not in self._functions:
            self._functions[name] = has_functions(self._adapter(name).core_schema)
        return self._functions[name]

    def _is_closed(self, name: str) -> bool:
        if name not in self._closed:
            self._closed[name] = not self._has_rules and is_closed(self._adapter(name).core_schema)
        return self._closed[name]

    def _read(self, name: str, data: bytes) -> Any:
        try:
            return self._adapter(name).validate_json(data, by_name=True)
        except ValidationError as error:
            if not _is_too_deep(error):
                raise
        return self._adapter(name).validate_python(orjson.loads(data), by_name=True)

    def _validate(self, stored: dict[str, Any]) -> S:
        known = {name: value for name, value in stored.items() if name in self.fields and name not in self.ephemeral}
        try:
            return self.kind.model_validate_json(orjson.dumps(known), by_name=True)
        except ValidationError as error:
            if not _is_too_deep(error):
                raise
        return self.kind.model_validate(known, by_name=True)

    def _unstored(self, task_id: str, problem: str) -> StateError:
        return StateError(f"the state of agent {self.agent!r}, task {task_id}, cannot be stored: {problem}")

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
        try:
            return self._validate(stored)
        except ValidationError as error:
            raise StateMismatch(task_id, self.agent, first_problem(error)) from None

    def apply_change(self, state: S, name: str, before: Any, after: Any) -> bool:
        """Change a field as an event changed its stored form; return False if all of it must be assigned instead."""
        if name not in self.fields:
            return True
        try:
            return _apply_change(state, name, before, after, lambda part: self._read(name, orjson.dumps(part)))
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
                made[name] = self._read(name, orjson.dumps(value))
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


def _is_exact(value: Any, stored: Any) -> bool:
    """Return whether a value is what its JSON decodes to, and not equal to it only, such as an int in a float field."""
    try:
        return marshal.dumps(value, 0) == marshal.dumps(stored, 0)  # takes no subclasses; fast for long lists
    except ValueError:
        return False


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


def _settled(held: Any, new: Any) -> Any:
    """Return `new`, in the list, dict or step of the plan that is held in its place."""
    if isinstance(held, PlanStep) and isinstance(new, PlanStep):  # its progress is stored apart
        fields = vars(held)
        fields |= {name: _settled(fields.get(name), part) for name, part in vars(new).items()}
        held.__pydantic_extra__ = new.__pydantic_extra__
        return held
    if type(held) is not type(new):
        return new
    if isinstance(held, list):
        steps = {step.key: step for step in held if isinstance(step, PlanStep)}
        held[:] = [
            _settled(steps.get(part.key) if isinstance(part, PlanStep) else old, part)
            for old, part in zip_longest(held[: len(new)], new)
        ]
        return held
    if isinstance(held, dict):
        parts = {key: _settled(held.get(key), part) for key, part in new.items()}
        held.clear()
        held.update(parts)
        return held
    return new


def _is_too_deep(error: ValidationError) -> bool:
    """Return whether the parser of pydantic refused JSON that orjson reads: it takes some 200 levels."""
    return any("recursion limit" in found["msg"] for found in error.errors(include_url=False, include_input=False))


def _too_large(name: str, number: str) -> str:
    return f"field {name!r}: an integer must have at most 64 bits, got {number}; store it as text"

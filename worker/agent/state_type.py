"""The type of an agent's state: which of its fields are stored, how, and what its inputs are.

Doing to a field of a state what an event did to its stored form, without looking at all of it.

Lists grow at their end, steps of a plan change one at a time, results are added: the cost is that of what came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, Generic

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError

from ...queues import has_secret
from ..errors import StateMismatch, StateUnstorable, TaskDefinitionError
from ..journal import AgentState, Ephemeral, PlanStep
from .agent import S

__all__ = ["StateType", "follow", "problem_of"]

_MISSING: Final = object()

Read = Callable[[Any], Any]


def follow(state: AgentState, name: str, before: Any, after: Any, read: Read) -> bool:
    """Change a field as its stored form was changed; False, with nothing done, where that cannot be told from this.

    before, after: its stored forms, of which what stayed is the very same. read: makes of a stored form, or of one with
    some of its parts, what the state has. What the agent has changed itself stays.
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
    """New items at the end, for which the oldest may have gone."""
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
    """New values in fields of steps that are there. The steps stay the same objects."""
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
    """New values under some names."""
    if not before.keys() <= after.keys():
        return False
    held.update(read({name: value for name, value in after.items() if before.get(name, _MISSING) is not value}))
    return True


_RESERVED: Final = frozenset({"ctx", "self", "goal", "key", "fresh"})


class StateType(Generic[S]):
    """One agent's type of state. Raises `TaskDefinitionError` for one that cannot be kept.

    inputs: those of its own fields that may be given when a goal is enqueued. ephemeral: those that are never stored.
    """

    def __init__(self, agent: str, kind: type[S]) -> None:
        self.agent = agent
        self.kind = kind
        self.fields: Final[dict[str, FieldInfo]] = dict(kind.model_fields)
        self.ephemeral = frozenset(name for name, field in self.fields.items() if Ephemeral in field.metadata)
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        own = [name for name in self.fields if name not in AgentState.model_fields]
        self.inputs = tuple([name for name in own if name not in self.ephemeral or self._travels(name)])
        self._check()

    def _travels(self, name: str) -> bool:
        """Whether values of an ephemeral field's type can be enqueued."""
        try:
            TypeAdapter(self.annotation(name))
        except PydanticUserError:
            return False
        return True

    def annotation(self, name: str) -> Any:
        """The declared type of a field."""
        field = self.fields[name]
        return field.annotation if name in self.ephemeral else field.rebuild_annotation()

    def _check(self) -> None:
        what = f"agent {self.agent!r}: field {{!r}} of its state {self.kind.__name__}"
        for name, field in self.fields.items():
            if name in self.inputs and name in _RESERVED:
                raise TaskDefinitionError(f"{what.format(name)} has a name that enqueuing uses itself: rename it")
            if name in self.ephemeral:
                if field.is_required():
                    raise TaskDefinitionError(f"{what.format(name)} is ephemeral: give it a default to begin with")
                if name in AgentState.model_fields:
                    raise TaskDefinitionError(f"{what.format(name)} is every agent's, and always stored")
            elif has_secret(self._adapter(name).core_schema):
                raise TaskDefinitionError(
                    f"{what.format(name)} is a secret, which is stored nowhere: make it Annotated[..., Ephemeral] with "
                    "a default; as an input it is there again in every run"
                )

    def dump(self, task_id: str, state: S, names: Collection[str] | None = None) -> bytes:
        """The state's stored fields as JSON, all or those named. Raises `StateUnstorable`."""
        try:
            wanted = None if names is None else set(names)
            data = state.model_dump_json(include=wanted, exclude=set(self.ephemeral), warnings="error")
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise StateUnstorable(task_id, self.agent, str(error)) from None
        return data.encode()

    def load(self, task_id: str, stored: dict[str, Any]) -> S:
        """A state from JSON. What it holds that this class does not know, as of a later version of the agent, is left
        out. Raises `StateMismatch`.
        """
        known = {name: value for name, value in stored.items() if name in self.fields and name not in self.ephemeral}
        try:
            return self.kind.model_validate_json(orjson.dumps(known))
        except ValidationError as error:
            raise StateMismatch(task_id, self.agent, problem_of(error)) from None

    def follow(self, state: S, name: str, before: Any, after: Any) -> bool:
        """Do to a field what an event did to its stored form; False, with nothing done, where that takes all of it."""
        if name not in self.fields:
            return True
        try:
            return follow(
                state, name, before, after, lambda part: self._adapter(name).validate_json(orjson.dumps(part))
            )
        except ValidationError:
            return False

    def assign(self, task_id: str, state: S, changed: dict[str, Any]) -> None:
        """Put fields into a state, from JSON, all or none; lists and objects stay the same objects.

        Raises `StateMismatch`.
        """
        made: dict[str, Any] = {}
        for name, value in changed.items():
            if name not in self.fields or name in self.ephemeral:
                continue
            try:
                made[name] = self._adapter(name).validate_json(orjson.dumps(value))
            except ValidationError as error:
                raise StateMismatch(task_id, self.agent, f"{name}: {problem_of(error)}") from None
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


def problem_of(error: ValidationError) -> str:
    """The first thing that is wrong, and where; without what was given."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]

"""Entries of a log as the events that they are, and the types that a reader knows.

What cannot be read hides nothing else: an event of a later version, of an unknown type or with broken data becomes
`Unreadable`, which says of which task it is, where it stands and what is wrong with it.
"""

from __future__ import annotations

from collections import ChainMap
from functools import reduce
from operator import or_
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError

from ...queues import TaskEvent
from .event import BUILT_IN, Event

__all__ = ["Foreign", "Unreadable", "parse_event", "register_event"]

E = TypeVar("E", bound=Event)


class Foreign(Event):
    """An event of an application's own type, read where that application is not loaded. data: all that it says.

    What it does to the state is known all the same: of such types, it is their `changes`.
    """

    data: dict[str, Any]


class Unreadable(Event):
    """An event that this version cannot read. task_id, entry: where it is. problem: why. data: what there is of it.

    number: of those that a run numbered; None where it has none, or where that is what is broken.
    """

    task_id: str
    entry: str
    number: int | None = None
    problem: str
    data: Any = None

    def __str__(self) -> str:
        place = f"entry {self.entry}" if self.number is None else f"event {self.number} (entry {self.entry})"
        return f"{place} of the log of task {self.task_id}, {self.type!r}, cannot be read: {self.problem}"


_known: Final = ChainMap[str, type[Event]]({}, BUILT_IN)
"""Event types by name: those of the application, then those of Perdure."""


class _Union:
    """All types as one, told apart by their `type`: made when the first event is read, and anew with each new type."""

    def __init__(self) -> None:
        self._adapter: TypeAdapter[Any] | None = None

    def forget(self) -> None:
        self._adapter = None

    def validate(self, data: dict[str, Any]) -> Event:
        """Raises `ValidationError`."""
        if self._adapter is None:
            union: Any = reduce(or_, _known.values())
            self._adapter = TypeAdapter(Annotated[union, Field(discriminator="type")])
        event: Event = self._adapter.validate_python(data)
        return event


_union: Final = _Union()


def register_event(kind: type[E]) -> type[E]:
    """Make an event type of one's own known to readers of logs; a decorator.

    @register_event
    class Priced(Event):
        type: Literal["priced"] = "priced"
        amount: float

    Raises `ValueError` for a type that has no name of its own, `pydantic.errors.PydanticUserError` for fields that
    have no schema.
    """
    name = _name_of(kind)
    known = _known.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"there is an event type {name!r} already: {known.__module__}.{known.__qualname__}")
    kind.model_rebuild(raise_errors=True)
    _known[name] = kind
    _union.forget()
    return kind


def _name_of(kind: type[Event]) -> str:
    declared = kind.model_fields["type"]
    names = get_args(declared.annotation) if get_origin(declared.annotation) is Literal else ()
    if len(names) != 1 or not isinstance(names[0], str) or declared.default != names[0]:
        raise ValueError(f'{kind.__name__} has no type of its own: give it one, type: Literal["..."] = "..."')
    if not names[0] or "#" in names[0] or not names[0].isprintable():
        raise ValueError(f"the type of {kind.__name__} is {names[0]!r}: use printable characters, without '#'")
    if kind.version < 1:
        raise ValueError(f"the version of {kind.__name__} is a whole number from 1, not {kind.version!r}")
    return names[0]


def parse_event(found: TaskEvent) -> Event:
    """An entry of a log as the event that it is, or as `Unreadable`."""
    problem = found.problem or _obstacle(found)
    if problem is None:
        data = {"v": 1, **(found.data or {}), "type": found.type}
        if found.step is not None:
            data["step"] = found.step
        try:
            if found.type not in _known:
                return Foreign.model_validate(data | {"data": found.data})
            return _union.validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'.'.join(map(str, first['loc'][1:])) or 'data'}: {first['msg']}"
    return Unreadable(
        type=found.type,
        step=found.step,
        task_id=found.task_id,
        entry=found.id,
        number=found.number,
        problem=problem,
        data=found.data,
    )


def _obstacle(found: TaskEvent) -> str | None:
    """What can be seen to be wrong before the fields are looked at."""
    data: Any = {} if found.data is None else found.data
    if not isinstance(data, dict):
        return f"its data is no JSON object, but {type(data).__name__}"
    kind = _known.get(found.type)
    if kind is None:
        return None if data.get("own") is True else f"no event type is called {found.type!r}: it is of a later version"
    version = data.get("v", 1)
    if type(version) is not int or version < 1:
        return f"its version is {version!r}, which is none"
    if version > kind.version:
        return f"it has version {version}, and this version of Perdure reads {found.type!r} up to {kind.version}"
    return None

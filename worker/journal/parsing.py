"""Parsing of log entries into events, and registration of application event types.

An entry that cannot be read does not hide the others: an event of a later version, of an unknown type or with broken
data becomes `Unreadable`, which names the task, the entry and the problem.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from ...queues.event_log import TaskEvent
from ..errors import first_problem
from . import agent_events as _agent_events  # noqa: F401 - it registers its types
from . import run_events as _run_events  # noqa: F401 - it registers its types
from .event import BUILT_IN, Event

E = TypeVar("E", bound=Event)


class Foreign(Event):
    """Event of an application's type, read by a process that has not imported the application. data: all of its fields.

    Its effect on the state is known all the same: for these types, it is their `changes`.
    """

    data: dict[str, Any]


class Unreadable(Event):
    """Event that this version cannot read.

    Attributes:
        task_id: Id of the task whose log has it.
        entry: Id of its log entry.
        number: Its number; None if it has none, or if the number is what is broken.
        problem: Reason why it cannot be read.
        data: Its data as far as it could be parsed.
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


def register_event(kind: type[E]) -> type[E]:
    """Register an application's event type, so that logs with it can be read; a class decorator.

        @register_event
        class Priced(Event):
            type: Literal["priced"] = "priced"
            amount: float

    Raises `ValueError` if the class has no type name that it alone uses, and `pydantic.errors.PydanticUserError` if a
    field has no schema.
    """
    name = _name_of(kind)
    known = _known.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"event type {name!r} is already registered: {known.__module__}.{known.__qualname__}")
    kind.model_rebuild(raise_errors=True)
    _known[name] = kind
    return kind


def _name_of(kind: type[Event]) -> str:
    declared = kind.model_fields["type"]
    names = get_args(declared.annotation) if get_origin(declared.annotation) is Literal else ()
    if len(names) != 1 or not isinstance(names[0], str) or declared.default != names[0]:
        raise ValueError(f'{kind.__name__} must define its type: type: Literal["..."] = "..."')
    if not names[0] or "#" in names[0] or not names[0].isprintable():
        raise ValueError(f"type of {kind.__name__} must be printable characters without '#', got {names[0]!r}")
    if kind.version < 1:
        raise ValueError(f"version of {kind.__name__} must be an integer of 1 or more, got {kind.version!r}")
    return names[0]


def parse_event(found: TaskEvent) -> Event:
    """Return the event of a log entry, or `Unreadable`."""
    problem = found.problem or _obstacle(found)
    if problem is None:
        data = {"v": 1, **(found.data or {}), "type": found.type}
        if found.step is not None:
            data["step"] = found.step
        kind = _known.get(found.type)
        try:
            return Foreign.model_validate(data | {"data": found.data}) if kind is None else kind.model_validate(data)
        except ValidationError as error:
            problem = first_problem(error)
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
    """Return the problem of an entry that is visible before its fields are validated."""
    data: Any = {} if found.data is None else found.data
    if not isinstance(data, dict):
        return f"its data must be a JSON object, got {type(data).__name__}"
    kind = _known.get(found.type)
    if kind is None:
        return None if data.get("own") is True else f"unknown event type {found.type!r}: a later version wrote it"
    version = data.get("v", 1)
    if type(version) is not int or version < 1:
        return f"its version must be an integer of 1 or more, got {version!r}"
    if version > kind.version:
        return f"it has version {version}; this version of Perdure reads {found.type!r} up to version {kind.version}"
    return None

"""Registration of application event types."""

from __future__ import annotations

from typing import Literal, TypeVar, get_args, get_origin

from ...durable.journal.event import Event
from ...durable.journal.parsing import KNOWN
from . import agent_events as _agent_events  # noqa: F401 - an application's type must not have a name of these

E = TypeVar("E", bound=Event)


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
    known = KNOWN.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"event type {name!r} is already registered: {known.__module__}.{known.__qualname__}")
    kind.model_rebuild(raise_errors=True)
    KNOWN[name] = kind
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

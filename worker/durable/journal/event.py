"""Base class of the events in a task's log, and the registry of Perdure's own types.

Each type is a Pydantic model with its own version. A reader accepts older versions, so every field that was added later
has a default; `parsing.py` says what becomes of an event of a later version, of an unknown type or with broken data.

Schemas are built at first use: a worker that logs no events does not wait for them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

from ....queues.json_form import as_json, encodable, is_encodable_otherwise, lost_number

E = TypeVar("E", bound="Event")

Count = Annotated[int, Field(ge=0)]

BUILT_IN: Final[dict[str, type[Event]]] = {}
"""Perdure's own event types by name: those of `run_events.py` and `agent_events.py`."""


LOG_BASE: Final = "log_base"
"""Type of the event that has the whole state, with which a log may start."""

RECORDED: Final = ("step_completed", "tool_called")
"""Types of events that carry the key of their step record."""


class Event(BaseModel):
    """Base of all events. For an application's type, subclass it with a `type` and decorate it with `register_event`.

    Attributes:
        v: Version of the form in which the event was written.
        step: Key of the step in which it happened.
        changes: Changes to the state besides those that the type implies, as a JSON Patch (RFC 6902; operations add,
            remove and replace).
        own: Whether the type is an application's.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True, ser_json_inf_nan="strings")
    version: ClassVar[int] = 1
    """Version of the form that this class writes, and the latest that it reads."""
    masked: ClassVar[bool] = False
    """Whether all of its data come from the logged state, where secrets are masked already."""

    type: str
    v: int = 1
    step: str | None = None
    changes: tuple[dict[str, Any], ...] = ()
    own: bool = False

    def model_post_init(self, _context: Any, /) -> None:
        """Set `v` and `own` of an event that is created here instead of read from a log."""
        if self.version != 1 and "v" not in self.model_fields_set:
            object.__setattr__(self, "v", self.version)
        if BUILT_IN.get(self.type) is not type(self):
            object.__setattr__(self, "own", True)

    def to_json(self) -> bytes:
        """Return the event's data as JSON: all fields but its type, without those that have their default."""
        event = self
        try:
            data = self.model_dump_json(exclude={"type"}, exclude_defaults=True).encode()
        except PydanticSerializationError as error:
            if not is_encodable_otherwise(error):
                raise
            event = encodable(self)
            data = event.model_dump_json(exclude={"type"}, exclude_defaults=True).encode()
        if lost_number(dict(event), data) is not None:  # of a model in it, which has a configuration of its own
            return as_json(event.model_dump(mode="json", exclude={"type"}, exclude_defaults=True))
        return data

    def as_read(self, data: bytes) -> Self:
        """Return the event as readers of the log will see it, given its JSON: dates as text, tuples as lists."""
        return type(self).model_validate({"v": 1, **orjson.loads(data), "type": self.type})


def built_in(kind: type[E]) -> type[E]:
    """Add one of Perdure's own event types to `BUILT_IN`; a class decorator."""
    BUILT_IN[kind.model_fields["type"].default] = kind
    return kind

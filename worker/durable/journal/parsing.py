"""Parsing of log entries into events.

An entry that cannot be read does not hide the others: an event of a later version, of an unknown type or with broken
data becomes `Unreadable`, which names the task, the entry and the problem.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any, Final

from pydantic import ValidationError

from ....queues.event_log import TaskEvent
from ...errors import first_problem
from . import run_events as _run_events  # noqa: F401 - it registers its types
from .event import BUILT_IN, Event


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


KNOWN: Final = ChainMap[str, type[Event]]({}, BUILT_IN)
"""Event types by name: those of the application, then those of Perdure whose module is imported.

A reader of whole logs imports `agent_events.py`, as `registration.py` does."""


def parse_event(found: TaskEvent) -> Event:
    """Return the event of a log entry, or `Unreadable`."""
    problem = found.problem or _obstacle(found)
    if problem is None:
        data = {"v": 1, **(found.data or {}), "type": found.type}
        if found.step is not None:
            data["step"] = found.step
        kind = KNOWN.get(found.type)
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
    kind = KNOWN.get(found.type)
    if kind is None:
        return None if data.get("own") is True else f"unknown event type {found.type!r}: a later version wrote it"
    version = data.get("v", 1)
    if type(version) is not int or version < 1:
        return f"its version must be an integer of 1 or more, got {version!r}"
    if version > kind.version:
        return f"it has version {version}; this version of Perdure reads {found.type!r} up to version {kind.version}"
    return None

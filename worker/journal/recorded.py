"""Which step records a log tells of, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ...queues import TaskEvent

__all__ = ["RECORDED", "Records"]

_OWN: Final = {"message_sent": "send", "planned": "plan", "waited": "inbox"}
"""By the type of an event: what the record of the call that it tells of is named, where that is not its type."""

RECORDED: Final = ("step_completed", "tool_called")
"""Types of events that tell of the record of the step that they are about."""


class Records:
    """Where in the log each step record was written last, and each message of the inbox was read.

    Events of other types than `RECORDED` are recorded as the first, second ... of their name in their scope.
    forked: the log is that of a fork, which began with records that it does not tell of.
    """

    def __init__(self) -> None:
        self.written: dict[str, int] = {}
        self.messages: dict[int, int] = {}
        self.forked = False
        self._times: Counter[str] = Counter()

    def take(self, event: TaskEvent, position: int) -> None:
        data = event.data if isinstance(event.data, dict) else {}
        if event.type == "replayed" and data.get("fresh"):
            self.written.clear()
            self._times.clear()
            self.forked = False
        elif event.type == "forked":
            self.forked = True
        elif event.type in RECORDED and event.step is not None:
            self.written[event.step] = position
        elif event.type == "received" and isinstance(data.get("number"), int):
            self.messages[data["number"]] = position
        elif event.number is not None:
            key = self._key(event, data)
            self._times[key] += 1
            self.written[key if self._times[key] == 1 else f"{key}#{self._times[key]}"] = position

    def _key(self, event: TaskEvent, data: Mapping[str, Any]) -> str:
        name = _OWN.get(event.type, event.type)
        if event.type == "artifact_saved":
            name += f":{data.get('name')}"
        return f"{event.step}/#{name}" if event.step is not None else f"#{name}"

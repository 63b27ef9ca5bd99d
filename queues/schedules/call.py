"""The task of a schedule: its message without an id, as it is stored with the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from ..envelope import LimitUse, TaskMessage, plain_data
from ..keys import check_name
from ..partitions.route import spread
from ..unique import Unique, UniqueTask

SCHEDULE_HEADER = "schedule"
PLANNED_HEADER = "planned"
"""Headers of a schedule's tasks: the name of the schedule, and the planned time as ISO 8601."""


@dataclass(frozen=True, slots=True)
class ScheduledCall:
    """The task that a schedule enqueues: its queue, and its message, whose id is replaced at each firing.

    number: hash of the key that decides about the partition; None if nothing but the schedule does. unique: the rule
    for unique tasks, as JSON data, and digest: that of its key. expires: seconds after the planned time until which a
    task must have started; None for no deadline.
    """

    queue: str
    task: str
    envelope: bytes
    arguments: bytes
    number: int | None = None
    limits: tuple[LimitUse, ...] = ()
    unique: Mapping[str, Any] | None = None
    digest: str = ""
    expires: float | None = None

    @classmethod
    def of(
        cls, message: TaskMessage, task: str, queue: str, unique: UniqueTask | None = None, expires: float | None = None
    ) -> ScheduledCall:
        """Return the call of a message that is not encrypted. Raises `InvalidUniqueKey`."""
        rule, digest = None, ""
        if unique is not None:
            digest = unique.digest(queue, message)
            known = unique.published()
            rule = {"during": known["during"], "keep": known["keep"], "quiet": known["quiet"]}
        envelope, number = orjson.loads(message.envelope), message.number
        envelope["id"] = "0"
        place = (orjson.dumps(envelope), message.arguments, number, message.limits)
        return cls(queue, task, *place, rule, digest, expires)

    @property
    def app(self) -> str | None:
        """App whose workers run the task; None for any."""
        found: str | None = orjson.loads(self.envelope).get("app")
        return found

    @property
    def shown_arguments(self) -> Any:
        """The arguments as JSON data, without the values of secrets."""
        found = plain_data(self.arguments)
        for path in orjson.loads(self.envelope).get("secrets", ()):
            if isinstance(found, dict) and path:
                found[path[0]] = "**********"
        return found

    def encode(self) -> bytes:
        """Return what is encrypted."""
        return orjson.dumps(
            {
                "queue": self.queue,
                "task": self.task,
                "envelope": orjson.Fragment(self.envelope),
                "arguments": orjson.Fragment(self.arguments),
                "number": None if self.number is None else str(self.number),
                "limits": [list(use) for use in self.limits],
                "unique": self.unique,
                "digest": self.digest,
                "expires": self.expires,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> ScheduledCall:
        """Decode a call. Raises `ValueError`, `TypeError`, `LookupError` for what no schedule has."""
        found = orjson.loads(data)
        number = found["number"]
        return cls(
            check_name("queue", found["queue"]),
            str(found["task"]),
            orjson.dumps(found["envelope"]),
            _arguments(data),
            None if number is None else int(number),
            tuple(LimitUse(*use) for use in found["limits"]),
            found["unique"],
            found["digest"],
            found["expires"],
        )

    def partition_number(self, schedule: str) -> int:
        """Return the number that decides about the partition: tasks of one schedule are in one partition."""
        return spread(schedule) if self.number is None else self.number

    def message(self, schedule: str, task_id: str, planned: int) -> TaskMessage:
        """Return the message of a planned time, in milliseconds."""
        envelope = orjson.loads(self.envelope)
        moment = datetime.fromtimestamp(planned / 1000, UTC).isoformat()
        headers = {SCHEDULE_HEADER: schedule, PLANNED_HEADER: moment, **envelope.get("headers", {})}
        form = {**envelope, "id": task_id, "headers": headers}
        if self.expires is not None:
            form["options"] = {**envelope.get("options", {}), "expires": planned / 1000 + self.expires}
        if self.digest:
            form["unique"] = self.digest
        number = self.partition_number(schedule)
        return TaskMessage(task_id, orjson.dumps(form), self.arguments, number, True, limits=self.limits)

    @property
    def rule(self) -> UniqueTask | None:
        """The rule for unique tasks, whose key is the stored one; None without one."""
        if self.unique is None:
            return None
        rule = Unique(self.unique["during"], keep=self.unique["keep"], quiet=self.unique["quiet"])
        return _KnownKey(rule, self.task, {"": self.digest})


class _KnownKey(UniqueTask):
    """A rule with the digest of its key."""

    def digest(self, queue: str, message: TaskMessage) -> str:
        return str(self.defaults[""])


def _arguments(data: bytes) -> bytes:
    """Return the arguments as they were encoded: a decoder would change whole numbers that are too large for it."""
    from pydantic_core import from_json, to_json

    return to_json(from_json(data)["arguments"], inf_nan_mode="strings")

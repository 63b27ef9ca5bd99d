"""Schedules as operators see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from ..envelope import plain_data
from ..errors import PerdureError
from ..security.secret_arguments import SecretPaths, mask
from ..wording import iso_time
from .definition import task_id_of
from .store import ScheduledRun, StoredSchedule


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A schedule with its last and next run. Times are in milliseconds.

    state: empty if it fires, else why it does not. problem: what could not be read.
    """

    name: str
    owner: str
    app: str
    task: str
    queue: str
    when: str
    missed: str | None
    jitter: float | None
    expires: float | None
    arguments: Any
    edited: tuple[str, ...]
    state: str
    paused: Mapping[str, Any] | None
    next: int | None
    runs: tuple[ScheduledRun, ...]
    problem: str = ""
    revision: str = ""

    @classmethod
    def of(cls, stored: StoredSchedule, secrets: Mapping[str, SecretPaths] | None = None) -> ScheduleStatus:
        """Return the status of a stored schedule.

        Args:
            secrets: Secret arguments by the name of the task, as published definitions mark them; they are masked.
        """
        problems: list[str] = []

        def read(part: str, otherwise: Any = None) -> Any:
            try:
                return getattr(stored, part)
            except PerdureError as error:
                problems.append(str(error))
                return otherwise

        task = stored.text("set:task") or stored.text("task")
        when, rules, call = read("when"), read("rules"), read("call")
        following = stored.next  # a worker notes it when it looks at the schedule
        if following is None and when is not None:
            following = next(when.times(stored.last), None)
        return cls(
            stored.name,
            stored.owner,
            stored.app,
            task,
            stored.text("set:queue") or stored.text("queue"),
            "" if when is None else str(when),
            None if rules is None else rules.missed,
            None if rules is None else rules.jitter,
            None if call is None else call.expires,
            None if call is None else _masked(call.shown_arguments, (secrets or {}).get(task, ())),
            tuple(stored.edited),
            _state(stored),
            stored.paused,
            None if stored.paused is not None or not stored.published else following,
            tuple(stored.runs),
            problems[0] if problems else "",
            stored.definition_revision,
        )

    @property
    def next_task(self) -> str | None:
        """Id of the task of the next planned time."""
        return None if self.next is None else task_id_of(self.name, self.next)

    def summary(self) -> dict[str, Any]:
        """Return the schedule as plain data, times as ISO 8601."""
        return {
            "name": self.name,
            "owner": self.owner,
            "app": self.app or None,
            "task": self.task,
            "queue": self.queue,
            "when": self.when,
            "missed": self.missed,
            "jitter": self.jitter,
            "expires": self.expires,
            "arguments": self.arguments,
            "edited": list(self.edited),
            "state": self.state or "active",
            "paused": None if self.paused is None else {"by": self.paused.get("by"), "why": self.paused.get("why")},
            "next": None if self.next is None else {"planned": iso_time(self.next), "task_id": self.next_task},
            "runs": [
                {
                    "planned": iso_time(run.planned),
                    "task_id": run.task_id,
                    "queue": run.queue,
                    "at": iso_time(run.at),
                    "how": run.how,
                }
                for run in self.runs
            ],
            "problem": self.problem or None,
            "revision": self.revision,
        }


def _masked(arguments: Any, paths: SecretPaths) -> Any:
    return plain_data(mask(to_json(arguments, inf_nan_mode="strings"), paths)) if paths else arguments


def _state(stored: StoredSchedule) -> str:
    if stored.paused is not None:
        return "paused"
    if not stored.published:
        return "no worker has it"
    if stored.full:
        return "queue is full"
    return "clock was set back" if stored.ahead else ""

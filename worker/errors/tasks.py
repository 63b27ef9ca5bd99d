"""Errors of tasks, their settings, and what a handler raises to run again later."""

from __future__ import annotations

from collections.abc import Sequence

from ...queues import LONGEST, Moment, PerdureError, seconds_until

__all__ = [
    "CrashLoop",
    "Incoherent",
    "InvalidArguments",
    "LifespanError",
    "Reschedule",
    "RetryLater",
    "SettingsDiffer",
    "Snooze",
    "TaskDefinitionError",
    "TaskError",
    "TaskIdle",
    "TaskTimeout",
    "TransferError",
    "UnknownTask",
    "WrongApp",
]


class TaskError(PerdureError):
    """Base of errors in the definition or call of a task."""


class TaskDefinitionError(TaskError, TypeError):
    """A function that cannot be a task. The message names it and the remedy."""


class InvalidArguments(TaskError, ValueError):
    """Arguments that do not fit the task's handler.

    malformed: they are not a JSON object, so no handler accepts them. Others may fit the handler of other code.
    """

    def __init__(self, task: str, problem: str, *, malformed: bool = False) -> None:
        super().__init__(f"task {task!r}: {problem}")
        self.task, self.malformed = task, malformed


class TaskTimeout(TaskError, TimeoutError):
    """A run exceeded its time limit. seconds: the limit."""

    def __init__(self, task: str, seconds: float) -> None:
        super().__init__(f"task {task!r} ran longer than {seconds:g} s")
        self.task, self.seconds = task, seconds


class TaskIdle(TaskTimeout):
    """A run exceeded its idle limit: no step started or ended, and nothing was saved.

    seconds: the limit. steps: keys of the running steps, empty between steps.
    """

    def __init__(self, task: str, seconds: float, steps: Sequence[str]) -> None:
        where = f"in step {', '.join(map(repr, steps))}" if steps else "outside its steps"
        TaskError.__init__(
            self,
            f"task {task!r} made no progress for {seconds:g} s {where}: no step started or ended, and nothing was "
            "saved; save the progress of long steps (current_step().save), or raise the task's idle_timeout",
        )
        self.task, self.seconds, self.steps = task, seconds, tuple(steps)


class Incoherent(TaskError):
    """An agent failed a coherence check whose policy is to bury it. wrong: the findings, one text per check."""

    def __init__(self, task: str, wrong: Sequence[str]) -> None:
        super().__init__(f"agent {task!r} failed its coherence checks: {'; '.join(wrong)}")
        self.task, self.wrong = task, tuple(wrong)


class UnknownTask(TaskError, LookupError):
    """No handler is registered for this task on this worker."""

    def __init__(self, task: str, known: list[str]) -> None:
        super().__init__(f"no handler for task {task!r} on this worker; registered: {', '.join(known) or 'none'}")
        self.task = task


class WrongApp(TaskError, LookupError):
    """The task belongs to another app than this worker runs. owner: the app of the task. app: that of the worker."""

    def __init__(self, task: str, owner: str, app: str, queue: str) -> None:
        super().__init__(
            f"task {task!r} belongs to app {owner!r}, and this worker runs app {app!r}: start a worker of app "
            f"{owner!r} on queue {queue!r}, or give one of the apps another queue or PERDURE_NAMESPACE"
        )
        self.task, self.owner, self.app = task, owner, app


class CrashLoop(TaskError):
    """More deliveries of the task ended without an outcome than its retry policy allows."""

    def __init__(self, task: str, crashes: int, last: str = "") -> None:
        """last: exit status and step of the last crash, as far as known."""
        super().__init__(
            f"task {task!r}: {crashes} deliveries ended without an outcome (the worker died, hung, or lost its "
            f"lease); the task probably kills its workers{last and f'; last crash: {last}'}"
        )
        self.task, self.crashes = task, crashes


class Reschedule(PerdureError):
    """Base of exceptions by which a handler asks to run again later. after: seconds, a timedelta or a datetime."""

    def __init__(self, after: Moment, why: str = "") -> None:
        after = seconds_until(after, "after")
        if not 0 <= after <= LONGEST:
            raise ValueError(f"after must be 0 to {LONGEST:.0e} seconds, got {after}")
        super().__init__(why or f"run again in {after:g} s")
        self.after, self.why = after, why


class RetryLater(Reschedule):
    """Fail this attempt and run the task again after `after` seconds: `raise RetryLater(after=30)`. An attempt."""


class Snooze(Reschedule):
    """Run the task again after `after` seconds: `raise Snooze(after=3600)`. Costs no attempt."""


class LifespanError(PerdureError):
    """The lifespan of an app could not be opened or closed."""


class SettingsDiffer(PerdureError):
    """A strict worker is given another value than the one that is stored for its namespace."""


class TransferError(PerdureError):
    """A task that cannot be exported, or a file that cannot be imported."""

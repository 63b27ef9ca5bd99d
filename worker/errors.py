"""What can go wrong in a task, a step, or a worker. The whole tree:

PerdureError
├── QueueError                  queues, messages, servers: see `queues/errors.py`
├── TaskError                   how a task is defined or called
│   ├── TaskDefinitionError     a function that cannot be a task
│   ├── InvalidArguments        arguments that do not fit the task; nothing was sent
│   ├── TaskTimeout             a run took longer than it may
│   │   └── TaskIdle            ... without any step that began or ended, or anything that was saved
│   ├── UnknownTask             this worker has no handler of that name
│   └── CrashLoop               deliveries of the task ended without any outcome too often
├── StepError                   how a step is defined or called
│   ├── StepOutsideTask         a step called where no task, or another task, is running
│   ├── StepMismatch            a resumed run asked for a recorded step with other arguments
│   ├── StepTimeout             a step took longer than it may
│   ├── StepInDoubt             a risky step was cut off, and nobody can tell whether it acted
│   └── UnserialisableResult    a result that is not JSON, or not of its own type
├── StateError                  the state of an agent; none of them goes away by trying again
│   └── BadSnapshot             what is stored of it cannot be read
├── BadHandoff                  a stored handoff that cannot be read
├── Reschedule                  raised by a handler: run me again, later
│   ├── RetryLater              ... counting this attempt
│   └── Snooze                  ... not counting it
└── ConfigurationError          settings or an APP that cannot be used
"""

from __future__ import annotations

from collections.abc import Sequence

from ..queues import LONGEST, PerdureError

__all__ = [
    "BadHandoff",
    "BadSnapshot",
    "ConfigurationError",
    "CrashLoop",
    "InvalidArguments",
    "Reschedule",
    "RetryLater",
    "Snooze",
    "StateError",
    "StepError",
    "StepInDoubt",
    "StepMismatch",
    "StepOutsideTask",
    "StepTimeout",
    "TaskDefinitionError",
    "TaskError",
    "TaskIdle",
    "TaskTimeout",
    "UnknownTask",
    "UnserialisableResult",
]


class TaskError(PerdureError):
    """Base of errors in how a task is defined or called."""


class TaskDefinitionError(TaskError, TypeError):
    """A function that cannot be a task; the message names it and the remedy."""


class InvalidArguments(TaskError, ValueError):
    """Arguments that do not fit the task's handler."""

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(f"task {task!r}: {problem}")
        self.task = task


class TaskTimeout(TaskError, TimeoutError):
    """A run of the handler took longer than its timeout. seconds: the timeout."""

    def __init__(self, task: str, seconds: float) -> None:
        super().__init__(f"task {task!r} ran longer than {seconds:g} s")
        self.task = task
        self.seconds = seconds


class TaskIdle(TaskTimeout):
    """A run did nothing for longer than it may: no step began or ended, nothing was saved.

    seconds: the limit. steps: those it was in, none where it was between steps.
    """

    def __init__(self, task: str, seconds: float, steps: Sequence[str]) -> None:
        where = f"in step {', '.join(map(repr, steps))}" if steps else "outside its steps"
        TaskError.__init__(
            self,
            f"task {task!r} did nothing for {seconds:g} s {where}: no step began or ended and nothing was saved. "
            "A step that takes longer saves its progress (current_step().save), or its task has a longer idle_timeout",
        )
        self.task = task
        self.seconds = seconds
        self.steps = tuple(steps)


class UnknownTask(TaskError, LookupError):
    """A worker took a task whose name none of its handlers has."""

    def __init__(self, task: str, known: list[str]) -> None:
        super().__init__(f"no handler for task {task!r} on this worker; it knows {', '.join(known) or 'none'}")
        self.task = task


class CrashLoop(TaskError):
    """Deliveries of the task ended without any outcome more often than its retry policy allows."""

    def __init__(self, task: str, crashes: int, last: str = "") -> None:
        """last: what is known of the last crash."""
        super().__init__(
            f"task {task!r}: {crashes} deliveries ended without any outcome (the worker died, hung, or lost its "
            f"lease); it is suspected of killing its workers{last and f'; the last one: {last}'}"
        )
        self.task = task
        self.crashes = crashes


class StepError(PerdureError):
    """Base of errors in how a step is defined or called."""


class StepOutsideTask(StepError, RuntimeError):
    """A step was called where it could not be recorded."""


class StepMismatch(StepError):
    """A resumed run asked for a recorded step with other arguments than those it was recorded with."""

    def __init__(self, step: str, recorded: str, asked: str) -> None:
        super().__init__(
            f"step {step!r} was recorded with arguments {recorded} and is now asked for with {asked}: the handler or "
            "its inputs changed under a running task; give the step another name, pass on_mismatch='rerun', or replay "
            "the task from the dead letters with --fresh"
        )
        self.step = step
        self.recorded = recorded
        self.asked = asked


class StepTimeout(StepError, TimeoutError):
    """A step took longer than its timeout. seconds: the timeout."""

    def __init__(self, step: str, seconds: float) -> None:
        super().__init__(f"step {step!r} ran longer than {seconds:g} s")
        self.step = step
        self.seconds = seconds


class StepInDoubt(StepError):
    """A risky step was begun and has no result, and it says to fail rather than act twice."""

    def __init__(self, step: str, idempotency_key: str) -> None:
        super().__init__(
            f"step {step!r} was begun and has no recorded result: find out whether its effect happened "
            f"(idempotency key {idempotency_key}), then replay the task"
        )
        self.step = step
        self.idempotency_key = idempotency_key


class UnserialisableResult(StepError, TypeError):
    """A result that cannot be stored as JSON, or that is not of the type its function declares."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: its result cannot be stored: {problem}")
        self.what = what


class StateError(PerdureError):
    """Base of errors in the state of an agent. None of them goes away by trying again."""


class BadSnapshot(StateError):
    """What is stored of an agent's state cannot be read; it is left as it is."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the state of task {task_id} cannot be read: {problem}; it is left as it is")
        self.task_id = task_id
        self.problem = problem


class BadHandoff(PerdureError):
    """A stored handoff cannot be read; it is left as it is, and the event log tells the same."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the handoff of task {task_id} cannot be read: {problem}; it is left as it is")
        self.task_id = task_id
        self.problem = problem


class Reschedule(PerdureError):
    """Base of what a handler raises to be run again later. after: seconds."""

    def __init__(self, after: float, why: str = "") -> None:
        if not 0 <= after <= LONGEST:
            raise ValueError(f"after must be 0 or more seconds and at most {LONGEST:.0e}, not {after}")
        super().__init__(why or f"run again in {after:g} s")
        self.after = after
        self.why = why


class RetryLater(Reschedule):
    """This attempt failed; try again after so many seconds. Counts as an attempt.

    raise RetryLater(after=30)
    """


class Snooze(Reschedule):
    """Not now; run again after so many seconds. Costs no attempt.

    raise Snooze(after=3600)
    """


class ConfigurationError(PerdureError, ValueError):
    """Settings that contradict themselves, or an application that cannot be loaded."""

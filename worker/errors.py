"""Errors of tasks, steps, agents and workers. The tree:

PerdureError
├── QueueError                  queues, messages, servers: see `queues/errors.py`
├── TaskError                   definition or call of a task
│   ├── TaskDefinitionError     the function cannot be a task
│   ├── InvalidArguments        the arguments do not fit the task; nothing was enqueued
│   ├── TaskTimeout             a run exceeded its time limit
│   │   └── TaskIdle            a run exceeded its idle limit
│   ├── Incoherent              an agent failed a coherence check
│   ├── UnknownTask             no handler is registered for the task on this worker
│   └── CrashLoop               too many deliveries ended without an outcome
├── StepError                   definition or call of a step
│   ├── StepDefinitionError     a name, a function, its arguments or options cannot make a step
│   ├── StepOutsideTask         a step was called outside of the task that it belongs to
│   ├── StepMismatch            a resumed run called a recorded step with other arguments
│   ├── ResultMismatch          a recorded result does not fit the declared type of its step
│   ├── OrphanedSteps           a resumed run with a result did not ask for recorded steps
│   ├── StepTimeout             a step exceeded its timeout
│   ├── StepInDoubt             a risky step was interrupted and its effect is unknown
│   └── UnserialisableResult    a result is not JSON, or not of the declared type
├── ContextError                context of a model
│   ├── ContextTooLarge         a layer does not fit into its budget
│   └── CompactionFailed        the summarizer returned no usable summary
├── ArtifactError               artifacts
│   ├── BadArtifactName         the name is not valid
│   ├── ArtifactTooLarge        the artifact exceeds the size limit
│   ├── ArtifactMissing         the bytes of an artifact are not in the store
│   ├── ArtifactDamaged         the bytes do not match the recorded hash
│   └── StoreUnavailable        the store cannot be reached, is full, or refuses access
├── StateError                  state of an agent; retrying does not help
│   ├── BadSnapshot             the stored state cannot be read
│   ├── BadHistory              an event of the log is missing or cannot be read
│   ├── StateMismatch           the stored state does not fit the agent's class
│   ├── StateTooLarge           the state exceeds the size limit
│   ├── StateUnstorable         a field has no JSON form or has the wrong type
│   └── StateDrift              the state differs from the reduction of its log
├── BadHandoff                  a stored handoff document cannot be read
├── Reschedule                  raised by a handler to run the task again later
│   ├── RetryLater              counts as an attempt
│   └── Snooze                  costs no attempt
├── LifespanError               the app's lifespan cannot be opened or closed
├── SettingsDiffer              a strict worker has other settings than its namespace
└── ConfigurationError          a setting or an APP is not valid
"""

from __future__ import annotations

from collections.abc import Sequence

from ..queues import LONGEST, ConfigurationError, Moment, PerdureError, seconds_until

__all__ = [
    "ArtifactDamaged",
    "ArtifactError",
    "ArtifactMissing",
    "ArtifactTooLarge",
    "BadArtifactName",
    "BadHandoff",
    "BadHistory",
    "BadSnapshot",
    "CompactionFailed",
    "ConfigurationError",
    "ContextError",
    "ContextTooLarge",
    "CrashLoop",
    "Incoherent",
    "InvalidArguments",
    "LifespanError",
    "OrphanedSteps",
    "Reschedule",
    "ResultMismatch",
    "RetryLater",
    "SettingsDiffer",
    "Snooze",
    "StateDrift",
    "StateError",
    "StateMismatch",
    "StateTooLarge",
    "StateUnstorable",
    "StepDefinitionError",
    "StepError",
    "StepInDoubt",
    "StepMismatch",
    "StepOutsideTask",
    "StepTimeout",
    "StoreUnavailable",
    "TaskDefinitionError",
    "TaskError",
    "TaskIdle",
    "TaskTimeout",
    "UnknownTask",
    "UnserialisableResult",
]


class TaskError(PerdureError):
    """Base of errors in the definition or call of a task."""


class TaskDefinitionError(TaskError, TypeError):
    """A function that cannot be a task. The message names it and the remedy."""


class InvalidArguments(TaskError, ValueError):
    """Arguments that do not fit the task's handler."""

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(f"task {task!r}: {problem}")
        self.task = task


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


class CrashLoop(TaskError):
    """More deliveries of the task ended without an outcome than its retry policy allows."""

    def __init__(self, task: str, crashes: int, last: str = "") -> None:
        """last: exit status and step of the last crash, as far as known."""
        super().__init__(
            f"task {task!r}: {crashes} deliveries ended without an outcome (the worker died, hung, or lost its "
            f"lease); the task probably kills its workers{last and f'; last crash: {last}'}"
        )
        self.task, self.crashes = task, crashes


class StepError(PerdureError):
    """Base of errors in the definition or call of a step."""


class StepDefinitionError(StepError, ValueError):
    """A name, a function, its arguments or options cannot make a step. Retrying does not help."""


class StepOutsideTask(StepError, RuntimeError):
    """A step was called outside of a running task, or from another task, so it could not be recorded."""


class StepMismatch(StepError):
    """A resumed run called a recorded step with arguments other than the recorded ones."""

    def __init__(self, step: str, recorded: str, asked: str, *, after_new: bool = False) -> None:
        """after_new: a step before it was not recorded, as if Redis had lost its record."""
        lost = "a step before it was not recorded, so Redis has lost data, or " if after_new else ""
        super().__init__(
            f"step {step!r} was recorded with arguments {recorded} and is now called with {asked}: {lost}the "
            "handler or its inputs changed while the task was running; give the step another name or a scope, use "
            "ctx.options(on_mismatch='rerun'), or replay the task from the dead letters with --fresh"
        )
        self.step, self.recorded, self.asked = step, recorded, asked


class ResultMismatch(StepError):
    """The recorded result of a step does not fit the type that its function declares now. It did not run again."""


class OrphanedSteps(StepError):
    """A handler with `on_orphan="fail"` returned without asking for all recorded steps. The message has the remedy."""


class StepTimeout(StepError, TimeoutError):
    """A step exceeded its timeout. seconds: the timeout."""

    def __init__(self, step: str, seconds: float) -> None:
        super().__init__(f"step {step!r} ran longer than {seconds:g} s")
        self.step, self.seconds = step, seconds


class StepInDoubt(StepError):
    """A risky step was started, has no recorded result, and must not run twice (`in_doubt="fail"`)."""

    def __init__(self, step: str, idempotency_key: str) -> None:
        super().__init__(
            f"step {step!r} was started and has no recorded result: find out whether its effect happened "
            f"(idempotency key {idempotency_key}), then replay the task"
        )
        self.step, self.idempotency_key = step, idempotency_key


class UnserialisableResult(StepError, TypeError):
    """A result has no JSON form, or is not of the type that its function declares."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: its result cannot be stored: {problem}")
        self.what = what


class ContextError(PerdureError):
    """Base of errors in the context of a model."""


class ContextTooLarge(ContextError, ValueError):
    """A layer of the context does not fit. layer: its name. tokens: its size. budget: the limit in tokens."""

    def __init__(self, layer: str, tokens: int, budget: int, remedy: str) -> None:
        super().__init__(f"context layer {layer!r} has {tokens} tokens, the budget is {budget}: {remedy}")
        self.layer, self.tokens, self.budget = layer, tokens, budget


class CompactionFailed(ContextError):
    """The summarizer returned no usable summary. Nothing was replaced.

    first, last: numbers of the first and last event to summarize.
    """

    def __init__(self, task_id: str, first: int, last: int, problem: str) -> None:
        super().__init__(f"task {task_id}: events {first} to {last} could not be summarized and were kept: {problem}")
        self.task_id, self.first, self.last = task_id, first, last


class ArtifactError(PerdureError):
    """Base of errors of artifacts. The message names the artifact and its task."""


class BadArtifactName(ArtifactError, ValueError):
    """The name of an artifact is not valid."""

    def __init__(self, name: object, problem: str) -> None:
        shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:77]}..."
        super().__init__(f"artifact name {shown} is not valid: {problem}")
        self.name = name


class ArtifactTooLarge(ArtifactError, ValueError):
    """An artifact exceeds the size limit. limit: bytes."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"{what} has more than {limit} bytes: save it in parts, or raise PERDURE_ARTIFACT_LIMIT")
        self.limit = limit


class ArtifactMissing(ArtifactError, LookupError):
    """The bytes of an artifact are not in the store. hash: SHA-256 of the bytes that were saved."""

    def __init__(self, what: str, digest: str, place: str) -> None:
        super().__init__(
            f"{what}: its bytes (SHA-256 {digest}) are not in {place}: they were removed, or saved by a worker with "
            "another store (PERDURE_ARTIFACTS; workers on several hosts need a store that all of them can reach)"
        )
        self.hash = digest


class ArtifactDamaged(ArtifactError):
    """The bytes in the store differ from the saved ones. hash: SHA-256 of the bytes that were saved."""

    def __init__(self, what: str, digest: str, problem: str, place: str) -> None:
        super().__init__(
            f"{what} is damaged: object {digest} in {place} {problem}; nothing was overwritten; restore the "
            "object from a copy, or remove it and save the artifact again"
        )
        self.hash = digest


class StoreUnavailable(ArtifactError):
    """The artifact store cannot be reached, is full, or refuses access."""

    def __init__(self, what: str, verb: str, place: str, cause: BaseException) -> None:
        super().__init__(
            f"{what} cannot be {verb} the artifact store at {place}: {type(cause).__name__}: {cause}; check that the "
            "store (PERDURE_ARTIFACTS) exists, has free space, and is accessible to this process"
        )


class StateError(PerdureError):
    """Base of errors in the state of an agent. Retrying does not help."""


class BadSnapshot(StateError):
    """The stored state of an agent cannot be read. It was not changed."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the state of task {task_id} cannot be read: {problem}; it was not changed")
        self.task_id, self.problem = task_id, problem


class BadHistory(StateError):
    """An event of the log is missing, cannot be read, or does not fit the events before it."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(problem)
        self.task_id = task_id


class StateMismatch(StateError):
    """The stored state of an agent does not fit its class. It was not changed."""

    def __init__(self, task_id: str, agent: str, problem: str) -> None:
        """problem: starts with the name of the field."""
        super().__init__(
            f"the state of task {task_id} does not fit agent {agent!r}: {problem}; it was not changed. Give new "
            "fields a default, and changed fields a validator that accepts the previous form, then replay the task"
        )
        self.task_id, self.problem = task_id, problem


class StateTooLarge(StateError):
    """The state of an agent exceeds the size limit. size, limit: bytes of JSON."""

    def __init__(self, task_id: str, agent: str, size: int, limit: int, largest: Sequence[tuple[str, int]]) -> None:
        """largest: fields with their bytes, largest first."""
        fields = ", ".join(f"{name} ({bytes_:,} bytes)" for name, bytes_ in largest)
        super().__init__(
            f"the state of agent {agent!r}, task {task_id}, has {size:,} bytes, the limit is {limit:,}; largest "
            f"fields: {fields}. Store large data in artifacts or files and keep a reference in the state"
        )
        self.size, self.limit = size, limit


class StateUnstorable(StateError, TypeError):
    """A field of an agent's state has no JSON form, or a value of the wrong type."""

    def __init__(self, task_id: str, agent: str, problem: str) -> None:
        super().__init__(
            f"the state of agent {agent!r}, task {task_id}, cannot be stored: {problem}. Declare a field "
            "that must not be stored as Annotated[..., Ephemeral]"
        )


class StateDrift(StateError):
    """The state of an agent differs from the reduction of its event log: a change was not logged."""

    def __init__(self, task_id: str, number: int, differences: Sequence[str]) -> None:
        """number: the first event after which they differ. differences: paths of the differing values."""
        super().__init__(
            f"the state of task {task_id} differs from its event log since event {number}: {', '.join(differences)}"
        )
        self.number = number


class BadHandoff(PerdureError):
    """A stored handoff document cannot be read. It was not changed; the event log has the same facts."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the handoff document of task {task_id} cannot be read: {problem}; it was not changed")
        self.task_id, self.problem = task_id, problem


class Reschedule(PerdureError):
    """Base of exceptions by which a handler asks to run again later. after: seconds, a timedelta or a datetime."""

    def __init__(self, after: Moment, why: str = "") -> None:
        after = seconds_until(after)
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

"""What can go wrong in a task, a step, or a worker. The whole tree:

PerdureError
├── QueueError                  queues, messages, servers: see `queues/errors.py`
├── TaskError                   how a task is defined or called
│   ├── TaskDefinitionError     a function that cannot be a task
│   ├── InvalidArguments        arguments that do not fit the task; nothing was sent
│   ├── TaskTimeout             a run took longer than it may
│   │   └── TaskIdle            ... without any step that began or ended, or anything that was saved
│   ├── Incoherent              an agent no longer knows what it is doing
│   ├── UnknownTask             this worker has no handler of that name
│   └── CrashLoop               deliveries of the task ended without any outcome too often
├── StepError                   how a step is defined or called
│   ├── StepOutsideTask         a step called where no task, or another task, is running
│   ├── StepMismatch            a resumed run asked for a recorded step with other arguments
│   ├── StepTimeout             a step took longer than it may
│   ├── StepInDoubt             a risky step was cut off, and nobody can tell whether it acted
│   └── UnserialisableResult    a result that is not JSON, or not of its own type
├── ContextError                what a model is to be given
│   ├── ContextTooLarge         ... does not fit into its window
│   └── CompactionFailed        ... could not be made shorter
├── ArtifactError               what cannot be saved, or not be had again
│   ├── BadArtifactName         a name that no artifact can have
│   ├── ArtifactTooLarge        more bytes than an artifact may have
│   ├── ArtifactMissing         nothing of this name was saved, or its bytes are gone
│   ├── ArtifactDamaged         its bytes are not those that were saved
│   └── StoreUnavailable        the store cannot be reached, is full, or refuses
├── StateError                  the state of an agent; none of them goes away by trying again
│   ├── BadSnapshot             what is stored of it cannot be read
│   ├── BadHistory              the log does not tell it: an event is missing, or cannot be read
│   ├── StateMismatch           what is stored of it does not fit the agent's class
│   ├── StateTooLarge           it has grown over the size limit
│   ├── StateUnstorable         it holds what has no JSON form, or is not of its field's type
│   └── StateDrift              it is not what its log comes to
├── BadHandoff                  a stored handoff that cannot be read
├── Reschedule                  raised by a handler: run me again, later
│   ├── RetryLater              ... counting this attempt
│   └── Snooze                  ... not counting it
├── LifespanError               the app's lifespan cannot be opened or closed
└── ConfigurationError          settings or an APP that cannot be used
"""

from __future__ import annotations

from collections.abc import Sequence

from ..queues import LONGEST, ConfigurationError, PerdureError

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
    "Reschedule",
    "RetryLater",
    "Snooze",
    "StateDrift",
    "StateError",
    "StateMismatch",
    "StateTooLarge",
    "StateUnstorable",
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


class Incoherent(TaskError):
    """A check found that an agent no longer knows what it is doing. wrong: what was found, by checks."""

    def __init__(self, task: str, wrong: Sequence[str]) -> None:
        super().__init__(f"agent {task!r} no longer knows what it is doing: {'; '.join(wrong)}")
        self.task = task
        self.wrong = tuple(wrong)


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


class ContextError(PerdureError):
    """Base of errors in what a model is to be given."""


class ContextTooLarge(ContextError, ValueError):
    """What a model must be told does not fit. layer: which part. tokens, budget: what that takes, and may take."""

    def __init__(self, layer: str, tokens: int, budget: int, remedy: str) -> None:
        super().__init__(f"the layer {layer!r} of the context takes {tokens} tokens and may take {budget}: {remedy}")
        self.layer = layer
        self.tokens = tokens
        self.budget = budget


class CompactionFailed(ContextError):
    """The summarizer gave no summary that can be used. Nothing was replaced.

    first, last: numbers of the events whose turns were to be summarized.
    """

    def __init__(self, task_id: str, first: int, last: int, problem: str) -> None:
        super().__init__(
            f"task {task_id}: events {first} to {last} could not be summarized, and stay as they are: {problem}"
        )
        self.task_id = task_id
        self.first = first
        self.last = last


class ArtifactError(PerdureError):
    """Base of what goes wrong with artifacts; the message names the artifact and its task."""


class BadArtifactName(ArtifactError, ValueError):
    """A name that no artifact can have."""

    def __init__(self, name: object, problem: str) -> None:
        shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:77]}..."
        super().__init__(f"no artifact can be called {shown}: {problem}")
        self.name = name


class ArtifactTooLarge(ArtifactError, ValueError):
    """More bytes than an artifact may have. limit: that many."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"{what} has more than {limit} bytes: save it in parts, or raise PERDURE_ARTIFACT_LIMIT")
        self.limit = limit


class ArtifactMissing(ArtifactError, LookupError):
    """Its bytes are not where they were put. hash: of the bytes that were saved."""

    def __init__(self, what: str, digest: str, place: str) -> None:
        super().__init__(
            f"{what}: its bytes (SHA-256 {digest}) are not in {place}: they were removed, or were saved by a worker "
            "with another store (PERDURE_ARTIFACTS; workers on several hosts need a place that all of them reach)"
        )
        self.hash = digest


class ArtifactDamaged(ArtifactError):
    """Its bytes are not those that were saved. hash: of those that were."""

    def __init__(self, what: str, digest: str, problem: str, place: str) -> None:
        super().__init__(
            f"{what} is damaged: object {digest} in {place} {problem}; nothing was overwritten: put a good copy in its "
            "place, or remove it and save the artifact again"
        )
        self.hash = digest


class StoreUnavailable(ArtifactError):
    """The store of artifacts cannot be reached, is full, or refuses."""

    def __init__(self, what: str, verb: str, place: str, cause: BaseException) -> None:
        super().__init__(
            f"{what} cannot be {verb} the store of artifacts at {place}: {type(cause).__name__}: {cause}; see that the "
            "place (PERDURE_ARTIFACTS) is there, has room, and is this process's to use"
        )


class StateError(PerdureError):
    """Base of errors in the state of an agent. None of them goes away by trying again."""


class BadSnapshot(StateError):
    """What is stored of an agent's state cannot be read; it is left as it is."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the state of task {task_id} cannot be read: {problem}; it is left as it is")
        self.task_id = task_id
        self.problem = problem


class BadHistory(StateError):
    """A task's log does not tell its state: an event is missing, cannot be read, or does not fit what came before."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(problem)
        self.task_id = task_id


class StateMismatch(StateError):
    """What is stored of an agent's state does not fit its class any more; it is left as it is."""

    def __init__(self, task_id: str, agent: str, problem: str) -> None:
        """problem: begins with the field."""
        super().__init__(
            f"the state of task {task_id} does not fit agent {agent!r} any more: {problem}; it is left as it is. Give "
            "fields that came later a default, and fields that changed a validator that takes the former form, and "
            "replay the task"
        )
        self.task_id = task_id
        self.problem = problem


class StateTooLarge(StateError):
    """An agent's state has grown over the size limit. size, limit: bytes of JSON."""

    def __init__(self, task_id: str, agent: str, size: int, limit: int, largest: Sequence[tuple[str, int]]) -> None:
        """largest: fields, with their bytes, the largest first."""
        fields = ", ".join(f"{name} ({bytes_:,} bytes)" for name, bytes_ in largest)
        super().__init__(
            f"the state of agent {agent!r}, task {task_id}, has {size:,} bytes, and {limit:,} is the limit; its "
            f"largest fields: {fields}. Keep large data in artifacts or files, and its place in the state"
        )
        self.size = size
        self.limit = limit


class StateUnstorable(StateError, TypeError):
    """An agent's state holds what has no JSON form, or is not of its field's type."""

    def __init__(self, task_id: str, agent: str, problem: str) -> None:
        super().__init__(
            f"the state of agent {agent!r}, task {task_id}, cannot be stored: {problem}. A field that is not to be "
            "stored is Annotated[..., Ephemeral]"
        )


class StateDrift(StateError):
    """An agent's state is not what its log comes to: it was changed where the log does not tell."""

    def __init__(self, task_id: str, number: int, differences: Sequence[str]) -> None:
        """number: of the first event after which they differ. differences: the places."""
        super().__init__(
            f"the state of task {task_id} is not what its log comes to since event {number}: {', '.join(differences)}"
        )
        self.number = number


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


class LifespanError(PerdureError):
    """The lifespan of an app could not be opened or closed."""

    def __init__(self, app: str, act: str, cause: str) -> None:
        super().__init__(f"could not {act} the lifespan of app {app!r}: {cause}")

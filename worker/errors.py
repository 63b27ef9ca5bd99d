"""Errors of tasks, steps, agents, memories and workers. The tree:

PerdureError
├── QueueError                  queues, messages, servers: see `queues/errors.py`
├── TaskError                   definition or call of a task
│   ├── TaskDefinitionError     the function cannot be a task
│   ├── InvalidArguments        the arguments do not fit the task; nothing was enqueued
│   ├── TaskTimeout             a run exceeded its time limit
│   │   └── TaskIdle            a run exceeded its idle limit
│   ├── Incoherent              an agent failed a coherence check
│   ├── BudgetExceeded          a budget of the task is used up
│   ├── UnknownTask             no handler is registered for the task on this worker
│   ├── TaskExpired             no worker had started the task by its deadline
│   ├── WrongApp                the task belongs to another app than this worker runs
│   ├── SpawnRefused            a child cannot be spawned or joined here; nothing was enqueued
│   ├── ChildFailed             a spawned child ended without a result
│   └── CrashLoop               too many deliveries ended without an outcome
├── StepError                   definition or call of a step
│   ├── StepDefinitionError     a name, a function, its arguments or options cannot make a step
│   ├── StepOutsideTask         a step was called outside of the task that it belongs to
│   ├── StepMismatch            a resumed run called a recorded step with other arguments
│   │   └── StepOutOfOrder      a new step came before recorded ones
│   ├── ResultMismatch          a recorded result does not fit the declared type of its step
│   │   └── ResolutionMismatch  a person's result for a step in doubt does not fit it
│   ├── OrphanedSteps           a resumed run with a result did not ask for recorded steps
│   ├── StepTimeout             a step exceeded its timeout
│   │   └── StepStillRunning    the function of an earlier try still runs in its thread
│   ├── StepExited              a step called sys.exit() or raised KeyboardInterrupt
│   ├── StepInDoubt             a risky step was interrupted and its effect is unknown
│   ├── StepResolvedAsFailed    a person decided that an interrupted risky step failed
│   └── UnserialisableResult    a result is not JSON, or not of the declared type
├── ContextError                context of a model; no usable summary
│   └── ContextTooLarge         a layer does not fit into its budget
├── ArtifactError               artifacts
│   ├── BadArtifactName         the name is not valid
│   ├── ArtifactTooLarge        the artifact exceeds the size limit
│   ├── ArtifactMissing         the bytes of an artifact are not in the store
│   ├── ArtifactDamaged         the bytes do not match the recorded hash
│   └── StoreUnavailable        the store cannot be reached, is full, or refuses access
├── WorkspaceError              workspaces of tasks, and shared ones
│   ├── WorkspaceTooLarge       a file or the whole workspace exceeds a limit
│   └── FileConflict            a shared file has another version than the caller expected
├── StateError                  an agent's state cannot be stored or changed, or differs from its log
│   ├── BadSnapshot             the stored state cannot be read
│   ├── BadHistory              an event of the log is missing or cannot be read
│   ├── StateMismatch           the stored state does not fit the agent's class
│   └── StateTooLarge           the state exceeds the size limit
├── IdentityError               the identity of an agent is too large or cannot be read
│   └── IdentityConflict        it has another version than the caller expected
├── MemoryStoreError            the store of long-term memories
│   ├── InvalidMemory           a value that cannot be stored as a memory
│   ├── MemoryStoreUnavailable  it cannot be opened, reached or locked in time
│   │   └── MemoryStoreMissing  there is no store at that place
│   ├── MemoryStoreDamaged      its file is damaged; nothing was changed
│   ├── NotAMemoryStore         the place holds other data, or a store of a later version
│   ├── VectorsUnavailable      an embedder is set, but vectors cannot be stored
│   ├── EmbedderMismatch        the store's vectors are another embedder's
│   └── EmbedderFailed          the embedder raised, or returned no valid embeddings
├── WaitError                   a wait for an answer ended without one
│   ├── WaitTimedOut            its time has passed, and it has no default
│   ├── WaitClosed              the handler has closed it
│   └── TokenTaken              another open wait has its token
├── BadHandoff                  a stored handoff document cannot be read
├── Reschedule                  raised by a handler to run the task again later
│   ├── RetryLater              counts as an attempt
│   └── Snooze                  costs no attempt
├── LifespanError               the app's lifespan cannot be opened or closed
├── TransferError               a task cannot be exported, or a file cannot be imported
├── SettingsDiffer              a strict worker has other settings than its namespace
└── ConfigurationError          a setting, an address, a key or an APP is not valid: see `queues/errors.py`

`RunStopped` is a BaseException: it says that a run ends, and that nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..deadletter.error_text import error_text
from ..queues.defaults import MAX_SECONDS
from ..queues.doubts import failure_text, resolve_command
from ..queues.durations import Moment, seconds_until
from ..queues.errors import PerdureError, TaskCancelled, TaskFailed
from ..queues.wording import shortened


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


class RunStopped(BaseException):
    """A call of a handler has ended its run: the task waits, a successor continues it, or it is incoherent.

    It is raised in the handler's own asyncio task, or in the thread of a plain handler, and must not be swallowed: the
    task waits whatever the handler makes of it. `ctx.stopping` has the reason.
    """


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


class BudgetExceeded(TaskError):
    """A budget of the task is used up, and the task becomes a dead letter, or a person refused to raise the budget.

    budget: which one. used: what is used of it. denied_by: name of the person who refused, empty without one.
    """

    def __init__(self, budget: str, ledger: str, used: str, denied_by: str = "") -> None:
        denied = f", and {denied_by} refused to raise it" if denied_by else ""
        super().__init__(f"{budget} is used up ({used}){denied}")
        self.budget, self.ledger, self.used, self.denied_by = budget, ledger, used, denied_by


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


class TaskExpired(TaskError):
    """No worker had started the task by its deadline. late: seconds after it."""

    def __init__(self, task: str, late: float) -> None:
        super().__init__(
            f"task {task!r} was to start by its deadline, which passed {late:.1f} s before a worker took it"
        )
        self.late = late


class WrongApp(TaskError, LookupError):
    """The task belongs to another app than this worker runs. owner: the app of the task. app: that of the worker."""

    def __init__(self, task: str, owner: str, app: str, queue: str) -> None:
        super().__init__(
            f"task {task!r} belongs to app {owner!r}, and this worker runs app {app!r}: start a worker of app "
            f"{owner!r} on queue {queue!r}, or give one of the apps another queue or PERDURE_NAMESPACE"
        )
        self.task, self.owner, self.app = task, owner, app


class SpawnRefused(TaskError, ValueError):
    """A child that cannot be spawned or joined. Retrying does not help."""


class ChildFailed(TaskError):
    """A child ended without a result: it is a dead letter, or was cancelled.

    task_id: of the child. number: position of the child in its `gather` or `as_completed`, from 0; else 0. error: the
    `TaskFailed` or `TaskCancelled` of the child.
    """

    def __init__(self, task_id: str, error: TaskFailed | TaskCancelled, number: int = 0) -> None:
        super().__init__(f"child {error}")
        self.task_id, self.error, self.number = task_id, error, number


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
        if not 0 <= after <= MAX_SECONDS:
            raise ValueError(f"after must be 0 to {MAX_SECONDS:.0e} seconds, got {after}")
        super().__init__(why or f"run again in {after:g} s")
        self.after, self.why = after, why


class RetryLater(Reschedule):
    """Fail this attempt and run the task again after `after` seconds: `raise RetryLater(after=30)`. An attempt."""


class Snooze(Reschedule):
    """Run the task again after `after` seconds: `raise Snooze(after=3600)`. Costs no attempt."""


class LifespanError(PerdureError):
    """The lifespan of an app could not be opened or closed."""


class SettingsDiffer(PerdureError):
    """A strict worker's setting differs from the stored one."""


class TransferError(PerdureError):
    """A task that cannot be exported, or a file that cannot be imported."""


class StepError(PerdureError):
    """Base of errors in the definition or call of a step."""


class StepDefinitionError(StepError, ValueError):
    """A name, a function, its arguments or options cannot make a step. Retrying does not help."""


class StepOutsideTask(StepError, RuntimeError):
    """A step was called outside of a running task, or from another task, so it could not be recorded."""


class StepMismatch(StepError):
    """A resumed run called a recorded step with other arguments, or asked another question than the answered one."""

    def __init__(
        self, step: str, recorded: str, asked: str, *, after_new: bool = False, question: bool = False
    ) -> None:
        """Create the error.

        Args:
            after_new: A step before it was not recorded, as if Redis had lost its record.
            question: The step is a question, `recorded` and `asked` name the person and its text.
        """
        what = f"step {step!r} was recorded with arguments {recorded} and is now called with {asked}"
        remedy = "give the step another name or a scope, use ctx.options(on_mismatch='rerun')"
        if question:
            what = f"question {recorded} is recorded with its answer, and the handler now asks {asked} in its place"
            remedy = (
                "ask again with ctx.options(on_mismatch='rerun').ask(...), give a question whose text differs in each "
                "run a name, ctx.ask(..., name=...), put a new question into a scope"
            )
        lost = "a step before it was not recorded, so Redis has lost data, or " if after_new else ""
        super().__init__(
            f"{what}: {lost}the handler or its inputs changed while the task was running; {remedy}, or replay the task "
            "from the dead letters with --fresh"
        )
        self.step, self.recorded, self.asked = step, recorded, asked


class StepOutOfOrder(StepMismatch):
    """A new step came before recorded ones of its scope, in a task with `strict_order=True`. It did not run."""

    def __init__(self, step: str, recorded: str) -> None:
        """recorded: the step that should have come first."""
        StepError.__init__(
            self,
            f"step {step!r} is new, but step {recorded!r} of its scope was recorded by an earlier run and has not been "
            "called yet, and the task has strict_order=True: call the new step after the recorded ones, give it a "
            "scope (concurrent branches need one each), branch by ctx.version, or replay the task from the "
            "dead letters with --fresh",
        )
        self.step, self.recorded, self.asked = step, recorded, ""


class WaitError(PerdureError):
    """A wait for an answer ended without one."""


class WaitTimedOut(WaitError, TimeoutError):
    """The time of a wait has passed without an answer, and it has no default."""

    def __init__(self, wait: str, who: str = "") -> None:
        super().__init__(f"wait {wait!r}{f' for {who}' if who else ''} timed out without an answer")
        self.wait, self.who = wait, who


class WaitClosed(WaitError):
    """The handler has closed the wait that it awaits."""

    def __init__(self, wait: str) -> None:
        super().__init__(f"wait {wait!r} was closed: await it before wait.close()")
        self.wait = wait


class TokenTaken(WaitError, ValueError):
    """Another open wait has this token. task_id, wait: its place."""

    def __init__(self, token: str, task_id: str, wait: str) -> None:
        super().__init__(
            f"token must be that of one open wait, got {token!r}, which wait {wait!r} of task {task_id} has: "
            "answer or close that one first, or use another token"
        )
        self.token, self.task_id, self.wait = token, task_id, wait


class ResultMismatch(StepError):
    """The recorded result of a step does not fit the type that its function declares now. It did not run again."""


class ResolutionMismatch(ResultMismatch):
    """A person's result for a step in doubt does not fit the type that its function declares. It did not run."""

    def __init__(self, task_id: str, step: str, problem: str) -> None:
        super().__init__(
            f"step {step!r} was resolved with a result that does not fit: {problem}; replace it: "
            f"{resolve_command(task_id, step)}; then replay the task"
        )
        self.task_id, self.step = task_id, step


class OrphanedSteps(StepError):
    """A handler with `on_orphan="fail"` returned without asking for all recorded steps. The message has the remedy."""


class StepTimeout(StepError, TimeoutError):
    """A step exceeded its timeout. seconds: the timeout."""

    def __init__(self, step: str, seconds: float) -> None:
        super().__init__(f"step {step!r} ran longer than {seconds:g} s")
        self.step, self.seconds = step, seconds


class StepStillRunning(StepTimeout):
    """A plain function still runs in the thread of an earlier try of its step, so it was not called again.

    step: its key. seconds: since that try was given up.
    """

    def __init__(self, step: str, seconds: float) -> None:
        StepError.__init__(
            self,
            f"step {step!r} was not called again: its function still runs in a thread, which cannot be stopped, "
            f"{seconds:.1f} s after its step timed out or was cancelled; give the function a time-out of its own, such "
            "as that of its client, or make it async",
        )
        self.step, self.seconds = step, seconds


class StepExited(StepError):
    """A step raised SystemExit or KeyboardInterrupt, which would end the worker. It is not retried.

    step: its key. raised: what it raised.
    """

    def __init__(self, step: str, raised: BaseException) -> None:
        super().__init__(
            f"step {step!r} raised {type(raised).__name__}({error_text(raised)}), which would end the worker: raise an "
            "exception in its place, or run the program in a process of its own"
        )
        self.step, self.raised = step, raised


class StepInDoubt(StepError):
    """A risky step was started, has no recorded result, and must not run twice (`in_doubt="fail"`).

    A person decides what it did: `perdure task resolve`, or `TaskHandle.resolve_step`.
    """

    def __init__(self, step: str, idempotency_key: str, arguments: str = "") -> None:
        """arguments: their text, for people."""
        task_id = idempotency_key.removesuffix(f":{step}")
        called = f" with arguments {arguments}" if arguments else ""
        super().__init__(
            f"step {step!r} was started{called} and has no recorded result: find out whether its effect happened "
            f"(idempotency key {idempotency_key}), then run: {resolve_command(task_id, step)}; then replay the task"
        )
        self.step, self.idempotency_key, self.arguments = step, idempotency_key, arguments


class StepResolvedAsFailed(StepError):
    """A risky step was cut off, and a person decided that it failed: `perdure task resolve ID STEP --failed TEXT`.

    text: of the person.
    """

    def __init__(self, step: str, text: str) -> None:
        super().__init__(failure_text(step, text))
        self.step, self.text = step, text


class RecordedFailure(Exception):
    """Failure of a step that is raised again from its record: the handler of an earlier run has continued after it.

    It is also an instance of the original class, if that is imported, or of the first of its base classes that is. Its
    text, its `args` and the attributes that are JSON data are those of the original; any other attribute raises
    AttributeError. It is no `PerdureError`, so that `except` clauses catch it as they have caught the original.
    """

    _perdure_step: str
    _perdure_text: str
    _perdure_repr: str | None
    _perdure_lost: Collection[str]

    def __init_subclass__(cls, **options: object) -> None:
        """Call nothing of the original class."""

    def __str__(self) -> str:
        return self._perdure_text

    def __repr__(self) -> str:
        shown = self._perdure_repr
        return f"{type(self).__name__}({self._perdure_text!r})" if shown is None else shown

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own.get("_perdure_lost", ()):
            raise AttributeError(_not_stored(type(self).__name__, own["_perdure_step"], name))
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> NoReturn:
        step = object.__getattribute__(self, "__dict__").get("_perdure_step", "")
        raise AttributeError(_not_stored(type(self).__name__, step, name))


def _not_stored(error: str, step: str, name: str) -> str:
    return (
        f"{error!r} has no attribute {name!r}: it is raised from the record of step {step!r}, which has its text and "
        "the attributes that are JSON data; let the step return what the handler needs of others"
    )


class UnserialisableResult(StepError, TypeError):
    """A result has no JSON form, is not of the type that its function declares, or cannot be read back.

    data: the JSON of a result that cannot be read back; misread: its part that is read back as another type.
    """

    def __init__(self, what: str, problem: str, data: bytes | None = None, misread: Any = None) -> None:
        super().__init__(f"{what}: its result cannot be stored: {problem}")
        self.what, self.data, self.misread = what, data, misread


class ArtifactError(PerdureError):
    """Base of errors of artifacts. The message names the artifact and its task."""


class BadArtifactName(ArtifactError, ValueError):
    """The name of an artifact is not valid."""

    def __init__(self, name: object, problem: str) -> None:
        super().__init__(f"artifact name {shortened(repr(name), 80)} is not valid: {problem}")
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
    """The bytes in the store differ from the saved ones. hash: SHA-256 of the bytes that were saved.

    The message tells nothing of what was found instead, which may be another user's.
    """

    def __init__(self, what: str, digest: str, place: str) -> None:
        super().__init__(
            f"{what} is damaged: object {digest} in {place} does not have the bytes that were saved; nothing was "
            "overwritten; restore the object from a copy, or remove it and save the artifact again"
        )
        self.hash = digest


class StoreUnavailable(ArtifactError):
    """The artifact store cannot be reached, is full, or refuses access."""

    def __init__(self, what: str, verb: str, place: str, cause: BaseException) -> None:
        super().__init__(
            f"{what} cannot be {verb} the artifact store at {place}: {type(cause).__name__}: {cause}; check that the "
            "store (PERDURE_ARTIFACTS) exists, has free space, and is accessible to this process"
        )


class WorkspaceError(PerdureError):
    """Base of errors of workspaces: a file that cannot be saved or restored, a folder that cannot be used."""


class WorkspaceTooLarge(WorkspaceError, ValueError):
    """A file or the whole workspace exceeds a limit. Retrying does not help."""


class FileConflict(WorkspaceError):
    """A file of a shared workspace has another version than the caller expected.

    Attributes:
        expected: Version that the caller expected; 0 for a file that should not exist.
        version: Version that the file has; 0 if it does not exist.
    """

    def __init__(self, workspace: str, path: str, expected: int, version: int, by: str) -> None:
        now = (
            f"version {version}, written by {by or 'an unnamed writer'}" if version else "no version: it does not exist"
        )
        super().__init__(
            f"file {path!r} of shared workspace {workspace!r} was expected to have version {expected} and has {now}; "
            "read it again and repeat the change"
        )
        self.expected = expected
        self.version = version


class ContextError(PerdureError):
    """Base of errors in the context of a model. Raised itself if a summarizer returned no usable summary."""


class ContextTooLarge(ContextError, ValueError):
    """A layer of the context does not fit. layer: its name. tokens: its size. budget: the limit in tokens."""

    def __init__(self, layer: str, tokens: int, budget: int, remedy: str) -> None:
        super().__init__(f"context layer {layer!r} has {tokens} tokens, the budget is {budget}: {remedy}")
        self.layer, self.tokens, self.budget = layer, tokens, budget


class StateError(PerdureError):
    """Error in the state of an agent: it cannot be stored or changed, or differs from its log. Not retried."""


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
    """The state of an agent exceeds the size limit. size, limit: bytes of JSON. largest: largest fields, as text."""

    def __init__(self, task_id: str, agent: str, size: int, limit: int, largest: Sequence[tuple[str, int]]) -> None:
        """largest: fields with their bytes, largest first."""
        fields = ", ".join(f"{name} ({bytes_:,} bytes)" for name, bytes_ in largest)
        super().__init__(
            f"the state of agent {agent!r}, task {task_id}, has {size:,} bytes, the limit is {limit:,}; largest "
            f"fields: {fields}. Store large data in artifacts or files and keep a reference in the state; run: perdure "
            f"task compact {task_id}, or raise PERDURE_PAYLOAD_LIMIT of the workers"
        )
        self.size, self.limit, self.largest = size, limit, fields


class BadHandoff(PerdureError):
    """A stored handoff document cannot be read. It was not changed; the event log has the same facts."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the handoff document of task {task_id} cannot be read: {problem}; it was not changed")
        self.task_id, self.problem = task_id, problem


class IdentityError(PerdureError):
    """The identity of an agent is too large, or its stored form cannot be read."""


class IdentityConflict(IdentityError):
    """The stored identity has another version than the caller expected; nothing was changed.

    Attributes:
        expected: Version that the caller expected; 0 for none.
        version: Version that is stored; 0 for none.
    """

    def __init__(self, agent: str, expected: int, version: int) -> None:
        super().__init__(
            f"the identity of agent {agent!r} was expected to have version {expected} and has {version}; read it again "
            "and repeat the change"
        )
        self.expected = expected
        self.version = version


class MemoryStoreError(PerdureError):
    """Base of the errors of the memory store."""


class InvalidMemory(MemoryStoreError, ValueError):
    """A value cannot be stored as a memory; the message names the field. Nothing was stored."""


class MemoryStoreUnavailable(MemoryStoreError):
    """The store cannot be opened or reached, or another process holds its lock for too long. A retry may help."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"memory store {store}: {problem}")
        self.store = store


class MemoryStoreMissing(MemoryStoreUnavailable):
    """There is no store at that place, and the call only reads."""


class MemoryStoreDamaged(MemoryStoreError):
    """The store's file is damaged. Nothing in it was changed."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(
            f"memory store {store} is damaged ({problem}); nothing was changed; stop its users, save what is readable "
            "with 'perdure memory export --salvage', move the file away and import them with 'perdure memory add "
            "--file', or restore a backup"
        )
        self.store = store


class NotAMemoryStore(MemoryStoreError):
    """The place holds other data, or a store that a later version wrote. Nothing in it was changed."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"{store} {problem}; nothing was changed; set PERDURE_MEMORY to another place")
        self.store = store


class VectorsUnavailable(MemoryStoreError):
    """An embedder is set, and this store cannot hold vectors."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(
            f"memory store {store} cannot hold vectors: {problem}; unset PERDURE_EMBEDDER to search by words only"
        )
        self.store = store


class EmbedderMismatch(MemoryStoreError):
    """The vectors in the store are another embedder's than the one that is set, so they cannot be compared."""

    def __init__(self, store: str, stored: tuple[str, int], given: tuple[str, int]) -> None:
        """Describe the mismatch. stored, given: name and dimension."""
        super().__init__(
            f"memory store {store} has vectors of embedder {stored[0]!r} with {stored[1]} dimensions, but "
            f"{given[0]!r} with {given[1]} is set; embed all memories again with 'perdure memory reembed', or set "
            "another store with PERDURE_MEMORY"
        )
        self.store = store
        self.stored = stored
        self.given = given


class EmbedderFailed(MemoryStoreError):
    """The embedder raised, or did not return one vector of its dimension per text."""

    def __init__(self, embedder: str, problem: str) -> None:
        super().__init__(f"embedder {embedder!r}: {problem}")
        self.embedder = embedder


def first_problem(error: ValidationError) -> str:
    """Return the first problem of an error: `FIELD: TEXT`, or its text alone if it is of the whole value."""
    return describe_problem(error.errors(include_url=False, include_input=False)[0])


def describe_problem(problem: ErrorDetails) -> str:
    """Return one problem of an error, see `first_problem`."""
    where = ".".join(str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what

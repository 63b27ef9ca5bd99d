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
│   ├── WrongApp                the task belongs to another app than this worker runs
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
├── ContextError                context of a model
│   ├── ContextTooLarge         a layer does not fit into its budget
│   └── CompactionFailed        the summarizer returned no usable summary
├── ArtifactError               artifacts
│   ├── BadArtifactName         the name is not valid
│   ├── ArtifactTooLarge        the artifact exceeds the size limit
│   ├── ArtifactMissing         the bytes of an artifact are not in the store
│   ├── ArtifactDamaged         the bytes do not match the recorded hash
│   └── StoreUnavailable        the store cannot be reached, is full, or refuses access
├── WorkspaceError              workspaces of tasks, and shared ones
│   ├── WorkspaceTooLarge       a file or the whole workspace exceeds a limit
│   └── FileConflict            a shared file has another version than the caller expected
├── StateError                  state of an agent; retrying does not help
│   ├── BadSnapshot             the stored state cannot be read
│   ├── BadHistory              an event of the log is missing or cannot be read
│   ├── StateMismatch           the stored state does not fit the agent's class
│   ├── StateTooLarge           the state exceeds the size limit
│   ├── StateBusy               a worker has the task, or it has ended
│   ├── StateUnstorable         a field has no JSON form, or cannot be read back
│   └── StateDrift              the state differs from its log, or from what a later run reads
├── IdentityError               the identity of an agent is too large or cannot be read
│   └── IdentityConflict        it has another version than the caller expected
├── BadHandoff                  a stored handoff document cannot be read
├── Reschedule                  raised by a handler to run the task again later
│   ├── RetryLater              counts as an attempt
│   └── Snooze                  costs no attempt
├── LifespanError               the app's lifespan cannot be opened or closed
├── TransferError               a task cannot be exported, or a file cannot be imported
├── SettingsDiffer              a strict worker has other settings than its namespace
└── ConfigurationError          a setting or an APP is not valid
"""

from __future__ import annotations

from ...queues import ConfigurationError
from . import agents, artifacts, steps, tasks, workspaces
from .agents import (
    BadHandoff,
    BadHistory,
    BadSnapshot,
    CompactionFailed,
    ContextError,
    ContextTooLarge,
    IdentityConflict,
    IdentityError,
    StateBusy,
    StateDrift,
    StateError,
    StateMismatch,
    StateTooLarge,
    StateUnstorable,
)
from .artifacts import (
    ArtifactDamaged,
    ArtifactError,
    ArtifactMissing,
    ArtifactTooLarge,
    BadArtifactName,
    StoreUnavailable,
)
from .steps import (
    OrphanedSteps,
    ResolutionMismatch,
    ResultMismatch,
    StepDefinitionError,
    StepError,
    StepExited,
    StepInDoubt,
    StepMismatch,
    StepOutOfOrder,
    StepOutsideTask,
    StepResolvedAsFailed,
    StepStillRunning,
    StepTimeout,
    UnserialisableResult,
)
from .tasks import (
    CrashLoop,
    Incoherent,
    InvalidArguments,
    LifespanError,
    Reschedule,
    RetryLater,
    SettingsDiffer,
    Snooze,
    TaskDefinitionError,
    TaskError,
    TaskIdle,
    TaskTimeout,
    TransferError,
    UnknownTask,
    WrongApp,
)
from .workspaces import FileConflict, WorkspaceError, WorkspaceTooLarge

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
    "FileConflict",
    "IdentityConflict",
    "IdentityError",
    "Incoherent",
    "InvalidArguments",
    "LifespanError",
    "OrphanedSteps",
    "Reschedule",
    "ResolutionMismatch",
    "ResultMismatch",
    "RetryLater",
    "SettingsDiffer",
    "Snooze",
    "StateBusy",
    "StateDrift",
    "StateError",
    "StateMismatch",
    "StateTooLarge",
    "StateUnstorable",
    "StepDefinitionError",
    "StepError",
    "StepExited",
    "StepInDoubt",
    "StepMismatch",
    "StepOutOfOrder",
    "StepOutsideTask",
    "StepResolvedAsFailed",
    "StepStillRunning",
    "StepTimeout",
    "StoreUnavailable",
    "TaskDefinitionError",
    "TaskError",
    "TaskIdle",
    "TaskTimeout",
    "TransferError",
    "UnknownTask",
    "UnserialisableResult",
    "WorkspaceError",
    "WorkspaceTooLarge",
    "WrongApp",
]

for _module in (tasks, steps, artifacts, workspaces, agents):
    for _name in _module.__all__:  # dead letters and logs name an error by its public place
        getattr(_module, _name).__module__ = __name__

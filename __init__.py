"""A runtime for AI agents and other long jobs on Redis Streams.

Public names are imported on first use (PEP 562), so that `import perdure` is fast. Names that only the models of agents
need are in `perdure.context`, those of the long-term memory in `perdure.memory`, those for tests in `perdure.testing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .deadletter import Retry
    from .queues import (
        DecryptionError,
        HandOffRefused,
        InboxFull,
        LeaseLost,
        NotReplicated,
        PayloadTooLarge,
        PerdureError,
        Producer,
        ServerFull,
        State,
        StillRunning,
        TaskCancelled,
        TaskEnded,
        TaskExists,
        TaskFailed,
        TaskHandle,
        TaskNotFound,
        Unavailable,
    )
    from .queues.sessions import SessionFailed, SessionFull, SessionNotFound
    from .worker.agent import Agent, Coherence
    from .worker.agent.context import ContextBuilder
    from .worker.app import App
    from .worker.durable import (
        AlreadyDone,
        Context,
        EnqueueCall,
        Middleware,
        Settlement,
        StepCall,
        current_context,
        current_step,
    )
    from .worker.durable.sync import SyncContext
    from .worker.errors import (
        ArtifactError,
        ContextError,
        FileConflict,
        InvalidArguments,
        RetryLater,
        Snooze,
        StateError,
        StepInDoubt,
        StepMismatch,
        StepResolvedAsFailed,
        StepStillRunning,
        StepTimeout,
        WorkspaceError,
    )
    from .worker.identity import Identity
    from .worker.journal import (
        AgentState,
        Artifact,
        Ephemeral,
        Event,
        Handoff,
        PlanStep,
        Resumption,
        register_event,
    )
    from .worker.log import configure_logging, use_stdlib_logging
    from .worker.resume_warning import ResumeWarning
    from .worker.runtime.worker import Worker
    from .worker.session import Session, TurnHandle
    from .worker.settings import Settings

__all__ = [
    "Agent",
    "AgentState",
    "AlreadyDone",
    "App",
    "Artifact",
    "ArtifactError",
    "Coherence",
    "Context",
    "ContextBuilder",
    "ContextError",
    "DecryptionError",
    "EnqueueCall",
    "Ephemeral",
    "Event",
    "FileConflict",
    "HandOffRefused",
    "Handoff",
    "Identity",
    "InboxFull",
    "InvalidArguments",
    "LeaseLost",
    "Middleware",
    "NotReplicated",
    "PayloadTooLarge",
    "PerdureError",
    "PlanStep",
    "Producer",
    "ResumeWarning",
    "Resumption",
    "Retry",
    "RetryLater",
    "ServerFull",
    "Session",
    "SessionFailed",
    "SessionFull",
    "SessionNotFound",
    "Settings",
    "Settlement",
    "Snooze",
    "State",
    "StateError",
    "StepCall",
    "StepInDoubt",
    "StepMismatch",
    "StepResolvedAsFailed",
    "StepStillRunning",
    "StepTimeout",
    "StillRunning",
    "SyncContext",
    "TaskCancelled",
    "TaskEnded",
    "TaskExists",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TurnHandle",
    "Unavailable",
    "Worker",
    "WorkspaceError",
    "configure_logging",
    "current_context",
    "current_step",
    "register_event",
    "use_stdlib_logging",
]

_HOMES = {
    "Agent": ".worker.agent",
    "AgentState": ".worker.journal",
    "AlreadyDone": ".worker.durable",
    "App": ".worker.app",
    "Artifact": ".worker.journal",
    "ArtifactError": ".worker.errors",
    "Coherence": ".worker.agent",
    "Context": ".worker.durable",
    "ContextBuilder": ".worker.agent.context",
    "ContextError": ".worker.errors",
    "DecryptionError": ".queues",
    "EnqueueCall": ".worker.durable",
    "Ephemeral": ".worker.journal",
    "Event": ".worker.journal",
    "FileConflict": ".worker.errors",
    "HandOffRefused": ".queues",
    "Handoff": ".worker.journal",
    "HashingEmbedder": ".worker.memory",  # for PERDURE_EMBEDDER=perdure:HashingEmbedder; public in perdure.memory
    "Identity": ".worker.identity",
    "InboxFull": ".queues",
    "InvalidArguments": ".worker.errors",
    "LeaseLost": ".queues",
    "Middleware": ".worker.durable",
    "NotReplicated": ".queues",
    "PayloadTooLarge": ".queues",
    "PerdureError": ".queues",
    "PlanStep": ".worker.journal",
    "Producer": ".queues",
    "ResumeWarning": ".worker.resume_warning",
    "Resumption": ".worker.journal",
    "Retry": ".deadletter",
    "RetryLater": ".worker.errors",
    "ServerFull": ".queues",
    "Session": ".worker.session",
    "SessionFailed": ".queues.sessions",
    "SessionFull": ".queues.sessions",
    "SessionNotFound": ".queues.sessions",
    "Settings": ".worker.settings",
    "Settlement": ".worker.durable",
    "Snooze": ".worker.errors",
    "State": ".queues",
    "StateError": ".worker.errors",
    "StepCall": ".worker.durable",
    "StepInDoubt": ".worker.errors",
    "StepMismatch": ".worker.errors",
    "StepResolvedAsFailed": ".worker.errors",
    "StepStillRunning": ".worker.errors",
    "StepTimeout": ".worker.errors",
    "StillRunning": ".queues",
    "SyncContext": ".worker.durable.sync",
    "TaskCancelled": ".queues",
    "TaskEnded": ".queues",
    "TaskExists": ".queues",
    "TaskFailed": ".queues",
    "TaskHandle": ".queues",
    "TaskNotFound": ".queues",
    "TurnHandle": ".worker.session",
    "Unavailable": ".queues",
    "Worker": ".worker.runtime.worker",
    "WorkspaceError": ".worker.errors",
    "configure_logging": ".worker.log",
    "current_context": ".worker.durable",
    "current_step": ".worker.durable",
    "register_event": ".worker.journal",
    "use_stdlib_logging": ".worker.log",
}

if not TYPE_CHECKING:  # with __getattr__, a type checker accepts any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""A runtime for AI agents and other long jobs on Redis Streams.

Public names are imported on first use (PEP 562), so that `import perdure` is fast. Names that only the models of agents
need are in `perdure.context`, those of the long-term memory in `perdure.memory`, those for tests in `perdure.testing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .deadletter.policy import Retry
    from .queues.budgets.definition import Budget
    from .queues.errors import (
        DecryptionError,
        HandOffRefused,
        InboxFull,
        LeaseLost,
        NotReplicated,
        PayloadTooLarge,
        PerdureError,
        QueueFull,
        ServerFull,
        SessionFailed,
        SessionFull,
        SessionNotFound,
        StillRunning,
        StoreConflict,
        StoreError,
        StoreFenced,
        StreamTrimmed,
        TaskCancelled,
        TaskEnded,
        TaskExists,
        TaskFailed,
        TaskNotFound,
        Unavailable,
    )
    from .queues.handle import TaskHandle
    from .queues.limits.definition import Breaker, Limit, Rate
    from .queues.producer import Producer
    from .queues.records import State
    from .queues.schedules.definition import Cron, Every
    from .queues.streams import StreamItem
    from .queues.unique import Unique
    from .worker.agents.agent import Agent, Plan
    from .worker.agents.coherence.findings import Coherence
    from .worker.agents.context.builder import ContextBuilder
    from .worker.agents.identity import Identity
    from .worker.agents.journal.registration import register_event
    from .worker.agents.journal.state import AgentState, Artifact, Ephemeral, PlanStep
    from .worker.app import App
    from .worker.context import Context, current_context
    from .worker.durable.budget_left import BudgetLeft
    from .worker.durable.ended_task import EndedTask
    from .worker.durable.first import First
    from .worker.durable.journal.event import Event
    from .worker.durable.journal.handoff.document import Handoff
    from .worker.durable.journal.resumption import Resumption
    from .worker.durable.steps.current import AlreadyDone, StepCall, current_step
    from .worker.durable.stop_reasons import Stop
    from .worker.errors import (
        ArtifactError,
        ChildFailed,
        ContextError,
        FileConflict,
        InvalidArguments,
        RecordedFailure,
        RetryLater,
        RunStopped,
        Snooze,
        SpawnRefused,
        StateError,
        StepInDoubt,
        StepMismatch,
        StepResolvedAsFailed,
        StepStillRunning,
        StepTimeout,
        WorkspaceError,
    )
    from .worker.log import configure_logging, use_stdlib_logging
    from .worker.middleware import EnqueueCall, Middleware, Settlement
    from .worker.resume_warning import ResumeWarning
    from .worker.runtime.worker import Worker
    from .worker.session import Session, TurnHandle
    from .worker.settings import Settings
    from .worker.store import Store, StoreBatch, StoreEntry
    from .worker.sync_context import SyncContext

__all__ = [
    "Agent",
    "AgentState",
    "AlreadyDone",
    "App",
    "Artifact",
    "ArtifactError",
    "Breaker",
    "Budget",
    "BudgetLeft",
    "ChildFailed",
    "Coherence",
    "Context",
    "ContextBuilder",
    "ContextError",
    "Cron",
    "DecryptionError",
    "EndedTask",
    "EnqueueCall",
    "Ephemeral",
    "Event",
    "Every",
    "FileConflict",
    "First",
    "HandOffRefused",
    "Handoff",
    "Identity",
    "InboxFull",
    "InvalidArguments",
    "LeaseLost",
    "Limit",
    "Middleware",
    "NotReplicated",
    "PayloadTooLarge",
    "PerdureError",
    "Plan",
    "PlanStep",
    "Producer",
    "QueueFull",
    "Rate",
    "RecordedFailure",
    "ResumeWarning",
    "Resumption",
    "Retry",
    "RetryLater",
    "RunStopped",
    "ServerFull",
    "Session",
    "SessionFailed",
    "SessionFull",
    "SessionNotFound",
    "Settings",
    "Settlement",
    "Snooze",
    "SpawnRefused",
    "State",
    "StateError",
    "StepCall",
    "StepInDoubt",
    "StepMismatch",
    "StepResolvedAsFailed",
    "StepStillRunning",
    "StepTimeout",
    "StillRunning",
    "Stop",
    "Store",
    "StoreBatch",
    "StoreConflict",
    "StoreEntry",
    "StoreError",
    "StoreFenced",
    "StreamItem",
    "StreamTrimmed",
    "SyncContext",
    "TaskCancelled",
    "TaskEnded",
    "TaskExists",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TurnHandle",
    "Unavailable",
    "Unique",
    "Worker",
    "WorkspaceError",
    "configure_logging",
    "current_context",
    "current_step",
    "register_event",
    "use_stdlib_logging",
]

_HOMES = {
    "Agent": ".worker.agents.agent",
    "AgentState": ".worker.agents.journal.state",
    "AlreadyDone": ".worker.durable.steps.current",
    "App": ".worker.app",
    "Artifact": ".worker.agents.journal.state",
    "ArtifactError": ".worker.errors",
    "Breaker": ".queues.limits.definition",
    "ChildFailed": ".worker.errors",
    "Coherence": ".worker.agents.coherence.findings",
    "Context": ".worker.context",
    "ContextBuilder": ".worker.agents.context.builder",
    "ContextError": ".worker.errors",
    "Budget": ".queues.budgets.definition",
    "BudgetLeft": ".worker.durable.budget_left",
    "Cron": ".queues.schedules.definition",
    "DecryptionError": ".queues.errors",
    "EndedTask": ".worker.durable.ended_task",
    "EnqueueCall": ".worker.middleware",
    "Ephemeral": ".worker.agents.journal.state",
    "Event": ".worker.durable.journal.event",
    "Every": ".queues.schedules.definition",
    "FileConflict": ".worker.errors",
    "First": ".worker.durable.first",
    "HandOffRefused": ".queues.errors",
    "Handoff": ".worker.durable.journal.handoff.document",
    "HashingEmbedder": ".worker.memory.embedders",  # for PERDURE_EMBEDDER; public in perdure.memory
    "Identity": ".worker.agents.identity",
    "InboxFull": ".queues.errors",
    "InvalidArguments": ".worker.errors",
    "LeaseLost": ".queues.errors",
    "Limit": ".queues.limits.definition",
    "Middleware": ".worker.middleware",
    "NotReplicated": ".queues.errors",
    "PayloadTooLarge": ".queues.errors",
    "PerdureError": ".queues.errors",
    "QueueFull": ".queues.errors",
    "Plan": ".worker.agents.agent",
    "PlanStep": ".worker.agents.journal.state",
    "Producer": ".queues.producer",
    "Rate": ".queues.limits.definition",
    "ResumeWarning": ".worker.resume_warning",
    "Resumption": ".worker.durable.journal.resumption",
    "Retry": ".deadletter.policy",
    "RecordedFailure": ".worker.errors",
    "RetryLater": ".worker.errors",
    "RunStopped": ".worker.errors",
    "ServerFull": ".queues.errors",
    "Session": ".worker.session",
    "SessionFailed": ".queues.errors",
    "SessionFull": ".queues.errors",
    "SessionNotFound": ".queues.errors",
    "Settings": ".worker.settings",
    "Settlement": ".worker.middleware",
    "Snooze": ".worker.errors",
    "SpawnRefused": ".worker.errors",
    "State": ".queues.records",
    "StateError": ".worker.errors",
    "StepCall": ".worker.durable.steps.current",
    "StepInDoubt": ".worker.errors",
    "StepMismatch": ".worker.errors",
    "StepResolvedAsFailed": ".worker.errors",
    "StepStillRunning": ".worker.errors",
    "StepTimeout": ".worker.errors",
    "StillRunning": ".queues.errors",
    "Stop": ".worker.durable.stop_reasons",
    "Store": ".worker.store",
    "StoreBatch": ".worker.store",
    "StoreConflict": ".queues.errors",
    "StoreEntry": ".worker.store",
    "StoreError": ".queues.errors",
    "StoreFenced": ".queues.errors",
    "StreamItem": ".queues.streams",
    "StreamTrimmed": ".queues.errors",
    "SyncContext": ".worker.sync_context",
    "TaskCancelled": ".queues.errors",
    "TaskEnded": ".queues.errors",
    "TaskExists": ".queues.errors",
    "TaskFailed": ".queues.errors",
    "TaskHandle": ".queues.handle",
    "TaskNotFound": ".queues.errors",
    "TurnHandle": ".worker.session",
    "Unavailable": ".queues.errors",
    "Unique": ".queues.unique",
    "Worker": ".worker.runtime.worker",
    "WorkspaceError": ".worker.errors",
    "configure_logging": ".worker.log",
    "current_context": ".worker.context",
    "current_step": ".worker.durable.steps.current",
    "register_event": ".worker.agents.journal.registration",
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

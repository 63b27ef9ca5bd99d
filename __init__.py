"""Perdure: a runtime for AI agents and other long jobs, on Redis Streams.

The public names are imported when they are first used (PEP 562), so that what needs few of them starts fast.
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
        TaskFailed,
        TaskHandle,
        TaskNotFound,
        Unavailable,
    )
    from .worker.agent import Agent, Coherence
    from .worker.agent.context import (
        CompactionRequest,
        ContextBuilder,
        Prompt,
        from_anthropic,
        from_openai,
        to_anthropic,
        to_openai,
    )
    from .worker.app import App
    from .worker.durable import AlreadyDone, Context, current_step
    from .worker.errors import (
        ArtifactError,
        ContextError,
        InvalidArguments,
        RetryLater,
        Snooze,
        StateError,
        StepInDoubt,
        StepMismatch,
        StepTimeout,
    )
    from .worker.journal import (
        AgentState,
        Artifact,
        Ephemeral,
        Event,
        Handoff,
        Message,
        PlanStep,
        Resumption,
        ToolCall,
        register_event,
    )
    from .worker.memory import HashingEmbedder, MemoryStoreError, NewMemory
    from .worker.runtime import Worker
    from .worker.settings import Settings

__all__ = [
    "Agent",
    "AgentState",
    "AlreadyDone",
    "App",
    "Artifact",
    "ArtifactError",
    "Coherence",
    "CompactionRequest",
    "Context",
    "ContextBuilder",
    "ContextError",
    "DecryptionError",
    "Ephemeral",
    "Event",
    "HandOffRefused",
    "Handoff",
    "HashingEmbedder",
    "InboxFull",
    "InvalidArguments",
    "LeaseLost",
    "MemoryStoreError",
    "Message",
    "NewMemory",
    "NotReplicated",
    "PayloadTooLarge",
    "PerdureError",
    "PlanStep",
    "Producer",
    "Prompt",
    "Resumption",
    "Retry",
    "RetryLater",
    "ServerFull",
    "Settings",
    "Snooze",
    "State",
    "StateError",
    "StepInDoubt",
    "StepMismatch",
    "StepTimeout",
    "StillRunning",
    "TaskCancelled",
    "TaskEnded",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "ToolCall",
    "Unavailable",
    "Worker",
    "current_step",
    "from_anthropic",
    "from_openai",
    "register_event",
    "to_anthropic",
    "to_openai",
]

_HOMES = {
    "Agent": ".worker.agent",
    "AgentState": ".worker.journal",
    "App": ".worker.app",
    "Artifact": ".worker.journal",
    "ArtifactError": ".worker.errors",
    "DecryptionError": ".queues",
    "Coherence": ".worker.agent",
    "Context": ".worker.durable",
    "ContextBuilder": ".worker.agent.context",
    "ContextError": ".worker.errors",
    "Ephemeral": ".worker.journal",
    "Event": ".worker.journal",
    "HandOffRefused": ".queues",
    "Handoff": ".worker.journal",
    "AlreadyDone": ".worker.durable",
    "HashingEmbedder": ".worker.memory",
    "InboxFull": ".queues",
    "InvalidArguments": ".worker.errors",
    "LeaseLost": ".queues",
    "MemoryStoreError": ".worker.memory",
    "Message": ".worker.journal",
    "NewMemory": ".worker.memory",
    "NotReplicated": ".queues",
    "CompactionRequest": ".worker.agent.context",
    "PayloadTooLarge": ".queues",
    "PerdureError": ".queues",
    "PlanStep": ".worker.journal",
    "Producer": ".queues",
    "Prompt": ".worker.agent.context",
    "Resumption": ".worker.journal",
    "Retry": ".deadletter",
    "RetryLater": ".worker.errors",
    "ServerFull": ".queues",
    "Settings": ".worker.settings",
    "Snooze": ".worker.errors",
    "State": ".queues",
    "StateError": ".worker.errors",
    "StepInDoubt": ".worker.errors",
    "StepMismatch": ".worker.errors",
    "StepTimeout": ".worker.errors",
    "StillRunning": ".queues",
    "TaskCancelled": ".queues",
    "TaskEnded": ".queues",
    "TaskFailed": ".queues",
    "TaskHandle": ".queues",
    "TaskNotFound": ".queues",
    "ToolCall": ".worker.journal",
    "Unavailable": ".queues",
    "Worker": ".worker.runtime",
    "current_step": ".worker.durable",
    "from_anthropic": ".worker.agent.context",
    "from_openai": ".worker.agent.context",
    "register_event": ".worker.journal",
    "to_anthropic": ".worker.agent.context",
    "to_openai": ".worker.agent.context",
}

if not TYPE_CHECKING:  # a type checker that saw this would believe in any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

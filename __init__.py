"""Perdure: a runtime for AI agents and other long jobs, on Redis Streams.

The public names are imported when they are first used (PEP 562), so that what needs few of them starts fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .deadletter import Retry
    from .queues import (
        CannotOpen,
        HandOffRefused,
        LeaseLost,
        NotReplicated,
        PayloadTooLarge,
        PerdureError,
        Producer,
        ServerFull,
        State,
        TaskCancelled,
        TaskFailed,
        TaskHandle,
        TaskNotFound,
        Unavailable,
    )
    from .worker.agent import Agent, Coherence
    from .worker.app import App
    from .worker.durable import Context, Happened, current_step
    from .worker.errors import InvalidArguments, RetryLater, Snooze, StepInDoubt, StepMismatch, StepTimeout
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
    from .worker.memory import NewMemory
    from .worker.runtime import Worker
    from .worker.settings import Settings

__all__ = [
    "Agent",
    "AgentState",
    "App",
    "Artifact",
    "CannotOpen",
    "Coherence",
    "Context",
    "Ephemeral",
    "Event",
    "HandOffRefused",
    "Handoff",
    "Happened",
    "InvalidArguments",
    "LeaseLost",
    "NewMemory",
    "NotReplicated",
    "PayloadTooLarge",
    "PerdureError",
    "PlanStep",
    "Producer",
    "Resumption",
    "Retry",
    "RetryLater",
    "ServerFull",
    "Settings",
    "Snooze",
    "State",
    "StepInDoubt",
    "StepMismatch",
    "StepTimeout",
    "TaskCancelled",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "Unavailable",
    "Worker",
    "current_step",
    "register_event",
]

_HOMES = {
    "Agent": ".worker.agent",
    "AgentState": ".worker.journal",
    "App": ".worker.app",
    "Artifact": ".worker.journal",
    "CannotOpen": ".queues",
    "Coherence": ".worker.agent",
    "Context": ".worker.durable",
    "Ephemeral": ".worker.journal",
    "Event": ".worker.journal",
    "HandOffRefused": ".queues",
    "Handoff": ".worker.journal",
    "Happened": ".worker.durable",
    "InvalidArguments": ".worker.errors",
    "LeaseLost": ".queues",
    "NotReplicated": ".queues",
    "PayloadTooLarge": ".queues",
    "PerdureError": ".queues",
    "NewMemory": ".worker.memory",
    "PlanStep": ".worker.journal",
    "Producer": ".queues",
    "Resumption": ".worker.journal",
    "Retry": ".deadletter",
    "RetryLater": ".worker.errors",
    "ServerFull": ".queues",
    "Settings": ".worker.settings",
    "Snooze": ".worker.errors",
    "State": ".queues",
    "StepInDoubt": ".worker.errors",
    "StepMismatch": ".worker.errors",
    "StepTimeout": ".worker.errors",
    "TaskCancelled": ".queues",
    "TaskFailed": ".queues",
    "TaskHandle": ".queues",
    "TaskNotFound": ".queues",
    "Unavailable": ".queues",
    "Worker": ".worker.runtime",
    "current_step": ".worker.durable",
    "register_event": ".worker.journal",
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

"""Perdure: a runtime for AI agents and other long jobs, on Redis Streams."""

from .deadletter import Retry
from .queues import (
    LeaseLost,
    PayloadTooLarge,
    PerdureError,
    Producer,
    State,
    TaskCancelled,
    TaskFailed,
    TaskHandle,
    TaskNotFound,
    Unavailable,
)
from .worker.app import App
from .worker.durable import Context, Happened, current_step
from .worker.errors import InvalidArguments, RetryLater, Snooze, StepInDoubt, StepMismatch, StepTimeout
from .worker.runtime import Worker
from .worker.settings import Settings

__all__ = [
    "App",
    "Context",
    "Happened",
    "InvalidArguments",
    "LeaseLost",
    "PayloadTooLarge",
    "PerdureError",
    "Producer",
    "Retry",
    "RetryLater",
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
]

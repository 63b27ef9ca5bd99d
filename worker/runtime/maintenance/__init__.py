"""Background duties of a worker: promotion, clean-up, partition assignment and registration."""

from __future__ import annotations

from .janitor import Janitor
from .partitions import AssignmentWatcher
from .promoter import Promoter
from .registration import Registration, StepHeartbeat, describe

__all__ = ["AssignmentWatcher", "Janitor", "Promoter", "Registration", "StepHeartbeat", "describe"]

"""Durable steps: the run, its record, and what a handler sees of them."""

from .codec import Codec, codec_of
from .context import Context
from .continuation import successor_of
from .run import ParkReason, Run, StopReason
from .step import CURRENT_RUN, AlreadyDone, Durability, Step, StepOptions, current_step
from .step_keys import forgotten
from .task_artifacts import Artifacts, artifact_store
from .task_memory import TaskMemory, store_findings
from .threads import Threads

__all__ = [
    "CURRENT_RUN",
    "AlreadyDone",
    "Artifacts",
    "Codec",
    "Context",
    "Durability",
    "ParkReason",
    "Run",
    "Step",
    "StepOptions",
    "StopReason",
    "TaskMemory",
    "Threads",
    "artifact_store",
    "codec_of",
    "current_step",
    "forgotten",
    "store_findings",
    "successor_of",
]

"""Durable steps: the run, its record, and what a handler sees of them."""

from .codec import Codec, codec_of
from .context import Context
from .continuation import successor_of
from .middleware import CallNext, Chain, EnqueueCall, Middleware, Settlement, StepCall, build_chain
from .observer import RunObserver
from .run import Run
from .step import CURRENT_RUN, AlreadyDone, Durability, Step, StepOptions, current_step
from .step_keys import forgotten
from .stop_reasons import STOP_RULES, ParkReason, StopReason, StopRule, counters_after, stop_of_event
from .task_artifacts import Artifacts, artifact_store
from .task_memory import TaskMemory, store_findings
from .threads import Threads

__all__ = [
    "CURRENT_RUN",
    "STOP_RULES",
    "AlreadyDone",
    "Artifacts",
    "CallNext",
    "Chain",
    "Codec",
    "Context",
    "Durability",
    "EnqueueCall",
    "Middleware",
    "ParkReason",
    "Run",
    "RunObserver",
    "Settlement",
    "Step",
    "StepCall",
    "StepOptions",
    "StopReason",
    "StopRule",
    "TaskMemory",
    "Threads",
    "artifact_store",
    "build_chain",
    "codec_of",
    "counters_after",
    "current_step",
    "forgotten",
    "stop_of_event",
    "store_findings",
    "successor_of",
]

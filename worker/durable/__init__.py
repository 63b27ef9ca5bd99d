"""Durable steps: the run, its record, and what a handler sees of them."""

from .codec import Codec, codec_of
from .context import Context
from .continuation import successor_of
from .patience import until_available
from .run import Ending, Parked, Run
from .step import CURRENT_RUN, Durability, Happened, Step, StepOptions, current_step
from .step_keys import forgotten
from .task_artifacts import Artifacts, artifact_store
from .task_memory import Remembering, keep_findings
from .threads import Threads

__all__ = [
    "CURRENT_RUN",
    "Artifacts",
    "Codec",
    "Context",
    "Durability",
    "Ending",
    "Happened",
    "Parked",
    "Remembering",
    "Run",
    "Step",
    "StepOptions",
    "Threads",
    "artifact_store",
    "codec_of",
    "current_step",
    "forgotten",
    "keep_findings",
    "successor_of",
    "until_available",
]

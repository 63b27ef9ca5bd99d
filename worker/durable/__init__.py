"""Durable steps: the run, its record, and what a handler sees of them."""

from .codec import Codec, codec_of
from .context import Context
from .ending import Ending, Parked
from .handing import successor_of
from .keeping import Artifacts, artifact_store
from .keys import forgotten
from .patience import until_available
from .remembering import Remembering, keep_findings
from .run import Run
from .step import CURRENT_RUN, Durability, Happened, Step, StepOptions, current_step
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

"""Durable steps: the run, its record, and what a handler sees of them."""

from .codec import Codec, codec_of
from .context import Context
from .patience import until_available
from .remembering import Remembering, keep_findings
from .run import Ending, Run
from .step import CURRENT_RUN, Durability, Happened, Step, StepOptions, current_step
from .threads import Threads

__all__ = [
    "CURRENT_RUN",
    "Codec",
    "Context",
    "Durability",
    "Ending",
    "Happened",
    "Remembering",
    "Run",
    "Step",
    "StepOptions",
    "Threads",
    "codec_of",
    "current_step",
    "keep_findings",
    "until_available",
]

"""Durable steps: the run, its record, and what a handler sees of them."""

from .codec import Codec, codec_of
from .context import Context
from .patience import until_available
from .run import Ending, Parked, Run
from .step import CURRENT_RUN, Durability, Happened, Step, StepOptions, current_step
from .threads import Threads

__all__ = [
    "CURRENT_RUN",
    "Codec",
    "Context",
    "Durability",
    "Ending",
    "Happened",
    "Parked",
    "Run",
    "Step",
    "StepOptions",
    "Threads",
    "codec_of",
    "current_step",
    "until_available",
]

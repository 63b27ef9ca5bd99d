"""Why a run was ended from outside, or ended itself before its handler was done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Ending", "Parked"]


class Ending(Enum):
    """Why a run was ended from outside."""

    LOST = "lost"
    """Its lease has passed to another worker."""
    CANCELLED = "cancelled"
    """Somebody asked for its cancellation."""
    HANDED_OFF = "handed_off"
    """The worker is stopping."""
    TIMED_OUT = "timed_out"
    """It took longer than it may."""
    IDLE = "idle"
    """It did nothing for longer than it may."""
    INCOHERENT = "incoherent"
    """Its agent no longer knows what it is doing; the run's `fault` says so."""
    HANDED_ON = "handed_on"
    """Another task goes on with it."""
    PARKED = "parked"
    """It waits for something, and gives its slot away meanwhile."""


@dataclass(frozen=True, slots=True)
class Parked:
    """What a run waits for. delay: seconds until it goes on without. waits: what, such as "message".

    seen: the number of the last message to its inbox that it knows of: a later one is what it waits for.
    """

    delay: float
    waits: str
    seen: int

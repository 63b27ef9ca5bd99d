"""Whether an agent still knows what it is doing: checks of its state and of what it did lately, and what follows."""

from .checks import View, find
from .findings import STANDING, Standing, StandingFinding, standing_findings
from .monitor import Watch, watching
from .settings import Coherence

__all__ = [
    "STANDING",
    "Coherence",
    "Standing",
    "StandingFinding",
    "View",
    "Watch",
    "find",
    "standing_findings",
    "watching",
]

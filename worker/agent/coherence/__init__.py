"""Whether an agent still knows what it is doing: checks of its state and of what it did lately, and what follows."""

from .checks import find
from .settings import Coherence
from .standing import STANDING, Standing, StandingFinding, standing_findings
from .view import View
from .watch import Watch, watching

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

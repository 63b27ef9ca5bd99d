"""Whether an agent still knows what it is doing: checks of its state and of what it did lately, and what follows."""

from .checks import CHECKS, Finding, find
from .settings import Coherence, Policy
from .standing import STANDING, Standing, StandingFinding, standing_findings
from .view import View
from .watch import Watch, watching

__all__ = [
    "CHECKS",
    "STANDING",
    "Coherence",
    "Finding",
    "Policy",
    "Standing",
    "StandingFinding",
    "View",
    "Watch",
    "find",
    "standing_findings",
    "watching",
]

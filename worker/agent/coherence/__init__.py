"""Whether an agent still knows what it is doing: checks of its state and of what it did lately, and what follows."""

from .checks import View, run_checks
from .findings import STANDING, StoredFinding, StoredFindings, stored_findings
from .monitor import CoherenceMonitor, watching
from .settings import Coherence

__all__ = [
    "STANDING",
    "Coherence",
    "CoherenceMonitor",
    "StoredFinding",
    "StoredFindings",
    "View",
    "run_checks",
    "stored_findings",
    "watching",
]

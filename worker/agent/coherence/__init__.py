"""Coherence of agents: checks of the state and of recent tool calls, and the policies that follow a finding.

| module | content |
|---|---|
| `settings.py` | `Coherence`: limits of the checks, and a policy for each |
| `checks.py` | six pure checks, and the `View` that they read |
| `findings.py` | findings that hold, as stored in the checkpoint |
| `monitor.py` | runs the checks at step boundaries and in between, and carries out policies |

Checks read the reduction of the event log, never the state that the agent is changing. A finding is logged once for as
long as it holds, in the write that stores it. See docs/explanation/coherence.md.
"""

from .checks import View, run_checks
from .findings import FINDINGS, StoredFinding, StoredFindings, stored_findings
from .monitor import CoherenceMonitor
from .settings import Coherence

__all__ = [
    "FINDINGS",
    "Coherence",
    "CoherenceMonitor",
    "StoredFinding",
    "StoredFindings",
    "View",
    "run_checks",
    "stored_findings",
]

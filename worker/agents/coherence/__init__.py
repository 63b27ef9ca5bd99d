"""Coherence of agents and functions: checks of the state and of recent calls, and the policies that follow.

| module | content |
|---|---|
| `checks.py` | the pure checks, and the `View` that they read |
| `findings.py` | findings that hold, as stored in the checkpoint |
| `monitor.py` | runs the checks at step boundaries and in between, asks the judge, and carries out policies |

Checks read the reduction of the event log, never the state that the agent is changing. A finding is logged once for as
long as it holds, in the write that stores it.
"""

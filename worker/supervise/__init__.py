"""Supervisor: one process that runs several workers as child processes.

The supervisor imports no handler code, so user code cannot harm it. Its first child imports the app and reports the
settings that the supervisor needs. When a child ends, the supervisor reports to Redis which worker died, so that other
workers claim its deliveries at once instead of after the lease, and starts a replacement.

    config.py           settings of a supervisor, its time limits, and the app's settings that the first child reports
    child.py            one child process, its two pipes, and how it ended
    children.py         all child processes: start, terminate, handle their exit; the spare
    pool.py             WorkerPool and WorkerSlot: which children to run; restart, replace, reload
    quarantine_pool.py  children that run quarantined tasks, one task per process
    local_quarantine.py the same children for a worker without a supervisor
    crash_counter.py    registration, crash count and pause in Redis
    stall_monitor.py    children that stopped responding; health of all children
    supervisor.py       start-up, signals, drain, alerts

Before you change it:

- The other end of the pipes is worker/runtime/supervisor_link.py, which has the table of messages. Both ends ignore
  unknown messages, because children that start after a reload may run a newer version than the supervisor. Add
  messages; do not rename or reuse them.
- A child stops at the end of file on its pipe, which means that the supervisor is gone. A child therefore inherits only
  its own two descriptors: a copy of another child's pipe would keep that pipe open.
- Crashes of ordinary children without progress count towards the pause. Those of quarantine children do not: their task
  is the cause.
"""

from .config import SupervisorConfig
from .local_quarantine import LocalQuarantine
from .supervisor import Supervisor

__all__ = ["LocalQuarantine", "Supervisor", "SupervisorConfig"]

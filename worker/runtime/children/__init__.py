"""Child processes of a supervisor, which run workers.

    child.py             one child process, its messages, and how it ended
    processes.py         all child processes: start, terminate, handle their exit; the spare
    quarantine_pool.py   children that run quarantined tasks, one task per process

Before you change it:

- The other end of the pipes is worker/runtime/supervisor_link.py, which has the table of messages. Both ends ignore
  unknown messages, because children that start after a reload may run a newer version than the supervisor. Add
  messages; do not rename or reuse them.
- A child stops at the end of file on its pipe, which means that its parent is gone. A child therefore inherits only its
  own two descriptors: a copy of another child's pipe would keep that pipe open.
"""

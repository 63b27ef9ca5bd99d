"""Replay suite: every handler is stopped at every write and retried after every call, and must go the way it went.

`journal.py` has the journal of external calls and of what handlers see, `rehearsal.py` the tool that disturbs a task
and compares, `handlers.py` the handlers, `process.py` a worker process that is killed.
"""

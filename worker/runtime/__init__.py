"""The runtime: from messages to handlers and back. `worker.py` has the worker.

This module imports nothing: a supervisor uses only `children`, and imports no app, agents or journal.
"""

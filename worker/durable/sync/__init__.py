"""Handlers that are plain functions: the thread in which they run, and their synchronous context.

    session.py    ThreadSession: the calls between a handler's thread and the event loop
    context.py    SyncContext: the public `ctx` of such a handler
    parts.py      memory, artifacts and resume information of that context

The handler runs in a thread. Each method of its context passes the call of the same name to the handler's asyncio task,
and blocks until it has returned. So steps have the same names, records and hooks as those of an async handler.
"""

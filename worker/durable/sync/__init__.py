"""Handlers that are plain functions: the thread in which they run, and their synchronous context.

    blocking.py   synchronous form of an object
    session.py    ThreadSession: the calls between a handler's thread and the event loop

The handler runs in a thread. Each method of its context passes the call of the same name to the handler's asyncio task,
and blocks until it has returned. So steps have the same names, records and hooks as those of an async handler.
"""

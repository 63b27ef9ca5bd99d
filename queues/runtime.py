"""Functions of the operating system that Perdure uses: clocks, randomness, threads, and the end of a process.

Sleeping and connections of asynchronous code belong to the event loop, so they need no function here. A simulation
replaces the fields of `RUNTIME` and runs on an event loop of its own (tests/simulation).
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import uuid_utils

__all__ = ["RUNTIME", "BackgroundThread", "Runtime", "ThreadEvent"]


class ThreadEvent(Protocol):
    """The part of `threading.Event` that threads of Perdure use."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class BackgroundThread(Protocol):
    """The part of `threading.Thread` that Perdure uses."""

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


def _thread(target: Callable[[], None], name: str) -> BackgroundThread:
    return threading.Thread(target=target, name=name, daemon=True)


def _task_id() -> str:
    return str(uuid_utils.uuid7())


@dataclass(slots=True)
class Runtime:
    """Functions of the operating system, one set per process.

    Attributes:
        monotonic: Returns seconds of a clock that is never set; intervals within this process.
        wall_clock: Returns seconds since 1970; only for what is compared with times outside of Redis.
        uniform: Returns a random number between two, for jitter and shares of load.
        token: Returns a random hexadecimal text of so many bytes, for names that must not repeat.
        task_id: Returns the id of a new task: a UUID of version 7 (RFC 9562), so that ids sort by time.
        thread: Returns a thread, not yet started, that runs a function and does not keep the process alive.
        event: Returns an event that threads can wait for.
        sync_connection: Class of the connections of synchronous clients; None for the one that the address needs.
        host: Returns the name of this machine.
        pid: Returns the id of this process.
        exit: Ends this process at once, without cleaning up.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    uniform: Callable[[float, float], float] = random.uniform
    token: Callable[[int], str] = secrets.token_hex
    task_id: Callable[[], str] = _task_id
    thread: Callable[[Callable[[], None], str], BackgroundThread] = _thread
    event: Callable[[], ThreadEvent] = threading.Event
    sync_connection: type[Any] | None = None
    host: Callable[[], str] = socket.gethostname
    pid: Callable[[], int] = os.getpid
    exit: Callable[[int], None] = os._exit


RUNTIME: Final = Runtime()
"""The functions that this process uses."""

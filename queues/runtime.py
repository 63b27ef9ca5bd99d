"""Functions of the operating system that Perdure uses: clocks, randomness, threads, and processes.

Sleeping and connections of asynchronous code belong to the event loop, so they need no function here. A simulation
replaces the fields of `RUNTIME` and runs on an event loop of its own (tests/simulation).
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

import uuid_utils


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


class ChildProcess(Protocol):
    """A process that this one has started, with a pipe in each direction. Only `wait` waits."""

    @property
    def pid(self) -> int: ...

    def start_reading(self, on_data: Callable[[bytes], None]) -> None:
        """Pass all bytes that the process sends to `on_data`, in the running event loop."""
        ...

    def send(self, data: bytes) -> None:
        """Send bytes. They are dropped if the process has ended, or if it does not read and the pipe is full."""
        ...

    async def wait(self) -> int:
        """Return the exit code, after all that the process has sent was passed on. Negative: a signal ended it."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        ...

    def kill_group(self) -> None:
        """Kill the processes that it has started."""
        ...


StartProcess = Callable[[Sequence[str], Mapping[str, str], str], Awaitable[ChildProcess]]
"""Starts a process that leads a session of its own: command, additional environment variables, role as a worker."""


def _thread(target: Callable[[], None], name: str) -> BackgroundThread:
    return threading.Thread(target=target, name=name, daemon=True)


def _cpus() -> int:
    return os.cpu_count() or 1


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
        sleep: Blocks the calling thread for so many seconds.
        cpus: Returns the number of processors.
        set_signal_handler: Sets the handler of a signal of this process, and returns the former one.
        start_process: Starts a child process; None for that of the operating system (worker/runtime/children).
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
    exit: Callable[[int], NoReturn] = os._exit
    sleep: Callable[[float], None] = time.sleep
    cpus: Callable[[], int] = _cpus
    set_signal_handler: Callable[[int, Any], Any] = signal.signal
    start_process: StartProcess | None = None


RUNTIME: Final = Runtime()
"""The functions that this process uses."""

"""A supervised worker's end of the line to its supervisor.

Both directions carry lines of JSON, over two inherited pipes that are named in the environment:
`PERDURE_SUPERVISED=role:read-fd:write-fd`. What a worker has written is in the pipe's buffer also when it is killed
in the next instant. Where the supervisor ends, for whatever reason, the worker reads the end of the file, and stops.

    worker says              when
    ready                    it is connected and begins to work; names its id, queues and server
    alive                    every second, from the beat's thread: how long the event loop has not answered
    suspects                 it knows of tasks that must run alone, which it leaves to others
    begins, step, ends       in isolation: which task it runs, in which step it is
    idle                     in isolation: it finds no more suspects
    replace                  it is no longer fit for work (threads that do not end): another one should take its place

    supervisor says          meaning
    isolate                  look for suspects now
    stop                     stop gracefully; said twice, at once
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

import orjson

__all__ = ["SUPERVISED", "Link", "Role"]

SUPERVISED: Final = "PERDURE_SUPERVISED"
"""The environment variable that makes a worker a supervised one."""

Role = Literal["worker", "isolated"]


class Link:
    """The line. What a worker says may be said from any thread, and never waits or fails for long."""

    def __init__(self, role: Role, read: int, write: int) -> None:
        """read, write: file descriptors, which the link owns from now on."""
        self.role: Role = role
        self._read = read
        self._write = write
        self._saying = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The line to the supervisor that started this process; None where nobody supervises it."""
        told = environment.get(SUPERVISED)
        if told is None:
            return None
        role, read, write = told.split(":")
        return cls("isolated" if role == "isolated" else "worker", int(read), int(write))

    def say(self, what: str, **more: Any) -> None:
        """Tell the supervisor. One that is gone hears nothing, which `listen` finds out."""
        line = orjson.dumps({"say": what, **more}) + b"\n"
        with self._saying, contextlib.suppress(OSError):
            os.write(self._write, line)

    def listen(self, on_told: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        """Hear the supervisor, in a thread of its own, where both callbacks are called."""
        threading.Thread(target=self._hear, args=(on_told, on_gone), name="perdure link", daemon=True).start()

    def _hear(self, on_told: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        with os.fdopen(self._read, "rb") as lines:
            for line in lines:
                on_told(orjson.loads(line)["say"])
        on_gone()

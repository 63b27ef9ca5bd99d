"""A supervised worker's end of the line to its supervisor.

Both directions carry lines of JSON, over two inherited pipes that are named in the environment:
`PERDURE_SUPERVISED=role:read-fd:write-fd`. What a worker has written is in the pipe's buffer also when it is killed
in the next instant. Where the supervisor ends, for whatever reason, the worker reads the end of the file, and stops.

    worker says              when
    loaded                   its app is imported; tells what the supervisor needs to know, and waits for `work`
    ready                    it is connected and begins to work; names its id and its queues
    alive                    every second, from the beat's thread: how long the event loop has not answered
    suspects                 it knows of tasks that must run alone, which it leaves to others
    begins, step, ends       in isolation: which task it runs, in which step it is
    idle                     in isolation: it finds no more suspects
    replace                  it is no longer fit for work (threads that do not end): another one should take its place

    supervisor says          meaning
    work                     connect and begin
    isolate                  look for suspects now
    stop                     stop gracefully; said twice, at once

A word that is not known is passed over: the two ends may be of different versions after a reload.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal, Self

import orjson

__all__ = ["SUPERVISED", "Role", "SupervisorLink"]

SUPERVISED: Final = "PERDURE_SUPERVISED"
"""The environment variable that makes a worker a supervised one."""

Role = Literal["worker", "isolated"]


class SupervisorLink:
    """The line. What a worker says may be said from any thread, and never waits or fails."""

    def __init__(self, role: Role, read: int, write: int) -> None:
        """read, write: file descriptors, which the link owns from now on."""
        self.role: Role = role
        self._read = read
        self._write = write
        self._lock = threading.Lock()
        self._unsent = b""
        os.set_blocking(write, False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self | None:
        """The line to the supervisor that started this process; None where nobody supervises it.

        Programs that this process starts are not supervised: neither the variable nor the pipes reach them.
        """
        told = environment.pop(SUPERVISED, None)
        if told is None:
            return None
        role, read, write = told.split(":")
        for descriptor in (int(read), int(write)):
            os.set_inheritable(descriptor, False)
        return cls("isolated" if role == "isolated" else "worker", int(read), int(write))

    def say(self, what: str, **more: Any) -> None:
        """Tell the supervisor. One that is gone hears nothing, which `listen` finds out; to one that does not listen
        (it is frozen) nothing more is said once the pipe is full.
        """
        line = orjson.dumps({"say": what, **more}) + b"\n"
        with self._lock:
            if self._flush():
                self._unsent = line
                self._flush()

    def _flush(self) -> bool:
        """Write what is left of the last line, for lines must not mix; returns whether nothing is."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._write, self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent = b""
        return True

    def listen(self, on_command: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        """Hear the supervisor, in a thread of its own, where both callbacks are called."""
        threading.Thread(target=self._receive, args=(on_command, on_gone), name="perdure link", daemon=True).start()

    def _receive(self, on_told: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        with os.fdopen(self._read, "rb") as lines:
            for line in lines:
                on_told(orjson.loads(line)["say"])
        on_gone()

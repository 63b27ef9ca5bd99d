"""The worker's end of the pipes to its supervisor.

Both directions carry lines of JSON, over two inherited pipes whose descriptors are in the environment:
`PERDURE_SUPERVISED=role:read-fd:write-fd`. A line that a worker wrote stays in the pipe even if the worker is killed
right after. When the supervisor ends, the worker reads the end of the file and stops.

    message of the worker    meaning
    loaded                   the app is imported; carries what the supervisor needs; the worker waits for `work`
    failed                   the worker cannot start; carries the reason, which the supervisor logs
    ready                    the worker is connected and starts; carries its id and queues
    alive                    sent every second by the watchdog's thread: lag of the event loop, health
    counts                   metrics that have changed; sent once a second, by the same thread, if they are wanted
    progress                 the first task was settled or the first step recorded; sent once
    suspects                 there are quarantined tasks that this worker leaves to others
    begins, step, ends       quarantine: which task runs, and which of its steps
    survived                 quarantine: the task has survived the probation time and continues as an ordinary one
    idle                     quarantine: no quarantined task is left
    replace                  the worker is degraded (threads or handlers that do not end) and should be replaced

    message of the supervisor
    work                     connect and start, in this role; `reports` of one worker: log findings for all workers
    isolate                  look for quarantined tasks now
    stop                     stop gracefully; sent twice: stop at once

Unknown messages are ignored: after a reload the two ends may be of different versions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final, Literal, Protocol, Self, cast

import orjson

from ...queues.runtime import RUNTIME

SUPERVISED: Final = "PERDURE_SUPERVISED"
"""Environment variable that a supervisor sets for its workers."""

Role = Literal["worker", "isolated", "spare"]
"""Role of a worker process: `worker` runs ordinary tasks, `isolated` one quarantined task at a time. A `spare` has
imported the app, and waits until it gets one of the other two.
"""


class Link(Protocol):
    """Connection of a worker to its supervisor, which starts quarantine workers. Any thread may send."""

    @property
    def role(self) -> Role: ...

    @property
    def reports(self) -> bool:
        """Whether the worker logs findings that its siblings would repeat, such as settings of the server."""
        ...

    def send(self, what: str, **more: Any) -> bool:
        """Send a message. Return whether it was taken."""
        ...


class ParentPipe(Protocol):
    """A worker's ends of the two pipes to the process that has started it."""

    def write(self, data: bytes) -> int:
        """Write as many bytes as the pipe takes, and return their number.

        Raises:
            BlockingIOError: The pipe is full.
            OSError: The parent has ended.
        """
        ...

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that the parent sends, until it ends. Blocks the calling thread."""
        ...


class InheritedPipe:
    """Ends that the worker has inherited as file descriptors."""

    def __init__(self, read: int, write: int) -> None:
        """Take over the file descriptors `read` and `write`."""
        self._read = read
        self._write = write
        os.set_blocking(write, False)

    def write(self, data: bytes) -> int:
        return os.write(self._write, data)

    def lines(self) -> Iterator[bytes]:
        with os.fdopen(self._read, "rb") as lines:
            yield from lines


class SupervisorLink:
    """A pair of pipes to the supervisor. Any thread may send; sending never blocks or fails."""

    def __init__(self, role: Role, pipe: ParentPipe) -> None:
        self.role: Role = role
        self.reports = False
        self._pipe = pipe
        self._lock = threading.Lock()
        self._unsent = b""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self | None:
        """Return the link to the supervisor that started this process, or None if there is no supervisor.

        The variable is removed and the pipes are not inheritable, so child processes have no link.
        """
        value = environment.pop(SUPERVISED, None)
        if value is None:
            return None
        role, read, write = value.split(":")
        for descriptor in (int(read), int(write)):
            os.set_inheritable(descriptor, False)
        return cls(cast("Role", role), InheritedPipe(int(read), int(write)))

    def send(self, what: str, **more: Any) -> bool:
        """Send a message. Return whether it was taken.

        It is dropped if the supervisor has ended, which `listen` reports, or if the pipe is full.
        """
        line = orjson.dumps({"say": what, **more}) + b"\n"
        with self._lock:
            if not self._flush():
                return False
            self._unsent = line
            self._flush()
            return True

    def _flush(self) -> bool:
        """Write the rest of the last line. Return whether all of it was written."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._pipe.write(self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent = b""
        return True

    def listen(self, on_command: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        """Receive messages in a separate thread, which calls both callbacks."""
        RUNTIME.thread(lambda: self._receive(on_command, on_gone), "perdure link").start()

    def _receive(self, on_command: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        for line in self._pipe.lines():
            message = orjson.loads(line)
            if "role" in message:
                self.role, self.reports = message["role"], message.get("reports", False)
            on_command(message["say"])
        on_gone()

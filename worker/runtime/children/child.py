"""One child process of a supervisor or worker: its messages, its state, and how it ended.

The other end of the pipes, with the table of messages, is worker/runtime/supervisor_link.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

import anyio
import orjson

from ....queues.runtime import RUNTIME, ChildProcess
from ....queues.supervisors import ChildInfo
from ..supervisor_link import Role
from .app_command import ChildCommand
from .piped_process import start_process

_LONGEST: Final = 1 << 20
"""Longest line in bytes that is accepted from a child; longer input is dropped."""


class MessageReader:
    """Decoder of the lines of JSON that a child sends.

    Args:
        on_message: Called with the kind and the other fields of each message.
    """

    def __init__(self, on_message: Callable[[str, dict[str, Any]], None]) -> None:
        self._on_message = on_message
        self._partial = bytearray()

    def feed(self, data: bytes) -> None:
        first, *rest = data.split(b"\n")
        self._partial += first  # in place: a line may come byte by byte
        for part in rest:
            self._dispatch(self._partial)
            self._partial = bytearray(part)
        if len(self._partial) > _LONGEST:
            self._partial.clear()

    def _dispatch(self, line: bytearray) -> None:
        try:
            message = orjson.loads(line)
            kind = message.pop("say")
        except (ValueError, TypeError, AttributeError, KeyError):
            return  # user code shares the descriptor and may write anything
        if isinstance(kind, str):
            self._on_message(kind, message)


async def wait_any(*events: anyio.Event) -> None:
    """Return when one of the events is set."""
    async with anyio.create_task_group() as waiters:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            waiters.cancel_scope.cancel()

        for event in events:
            waiters.start_soon(wait, event)


def exit_status_text(code: int) -> str:
    """Return an exit code as text: 'exit code 1', or the name of the signal, 'SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


OnMessage = Callable[["Child", str], None]
"""Callback for the kind of each message of a child, after the child has updated its own state."""


class Child:
    """A worker process, as its supervisor sees it.

    Events mark its life: `loaded` (app imported), `ready` (connected and working), `exited` (process ended), and
    `handled` (the supervisor has done everything that follows from the exit).
    """

    def __init__(self, role: Role, process: ChildProcess, on_message: OnMessage) -> None:
        self.role: Role = role
        self.pid = process.pid
        self.code = 0
        """Exit code after `exited`; negative: the signal that ended the process."""
        self.loaded = anyio.Event()
        self.ready = anyio.Event()
        self.exited = anyio.Event()
        self.handled = anyio.Event()
        self.app_info: Mapping[str, Any] = {}
        """Fields of the `loaded` message."""
        self.worker = ""
        self.queues: tuple[str, ...] = ()
        self.steps: dict[str, str] = {}
        """Quarantined tasks that it runs: the current step by task id."""
        self.searching = True
        """Whether it looks for a quarantined task at the moment."""
        self.stop_requests = 0
        self.progressed = False
        """Whether it has settled a task or recorded a step."""
        self.survived = False
        """Whether its quarantined task has survived the probation time: then it takes up no place."""
        self.outdated = False
        """Whether a reload replaces it when its task has ended."""
        self.stalled = ""
        """Why the stall monitor killed it; empty if it did not."""
        self.crashes = 0
        """Crashes within the window, this one included, after `handled`."""
        self.started_at = self.idle_since = RUNTIME.monotonic()
        self.last_heartbeat: float | None = None
        self.loop_lag = 0.0
        self.health: Mapping[str, Any] = {}
        """Its latest health report."""
        self._on_message = on_message
        self._process = process
        process.start_reading(MessageReader(self._receive).feed)

    # process

    @classmethod
    async def start(cls, role: Role, command: ChildCommand, on_message: OnMessage) -> Self:
        """Start a process.

        It leads its own session, so a Ctrl-C in the terminal reaches only the supervisor, which forwards it.

        Raises:
            OSError: The operating system could not create the process.
        """
        start = RUNTIME.start_process or start_process
        return cls(role, await start(command.arguments, command.environment, role), on_message)

    async def wait(self) -> None:
        """Wait until the process has exited, and read its last messages."""
        self.code = await self._process.wait()
        self.exited.set()

    async def wait_ready(self) -> bool:
        """Wait until the child is ready or has exited; return whether it is ready."""
        await wait_any(self.ready, self.exited)
        return self.ready.is_set()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """Kill the processes that the tasks of an exited child have started: those tasks run again elsewhere."""
        self._process.kill_group()

    async def abort(self, why: str, limit: float) -> None:
        """End a child that does not respond: it dumps its stacks to the log and dies of that, or is killed.

        Args:
            limit: Seconds for the dump.
        """
        self.stalled = why
        self._process.send_signal(signal.SIGABRT)  # faulthandler catches it without the interpreter
        with anyio.move_on_after(limit):
            await self.exited.wait()
        if not self.exited.is_set():
            self.kill()

    # state

    @property
    def exit_status(self) -> str:
        """Exit code or signal as text. Valid after `exited`."""
        return f"{self.stalled}, {exit_status_text(self.code)}" if self.stalled else exit_status_text(self.code)

    @property
    def crashed(self) -> bool:
        """Whether it ended with an error or by a signal. Valid after `exited`."""
        return self.code != 0

    @property
    def counts_as_crash(self) -> bool:
        """Whether its exit counts towards the pause: an ordinary child that was ready, or was killed by a signal.

        Progress excuses a crash. A child that exits with an error before it is ready has failed to start, and the start
        is retried.
        """
        failed = self.crashed and self.role == "worker" and (self.ready.is_set() or self.code < 0)
        return failed and not self.progressed

    @property
    def busy(self) -> bool:
        """Whether it runs a quarantined task."""
        return bool(self.steps)

    @property
    def idle(self) -> bool:
        """Whether it runs no quarantined task and does not look for one."""
        return not self.steps and not self.searching

    @property
    def info(self) -> ChildInfo:
        if self.stop_requests:
            state = "stopping"
        elif not (self.loaded if self.role == "spare" else self.ready).is_set():
            state = "starting"
        elif self.role == "spare":
            state = "idle"
        elif self.role == "isolated":
            state = "busy" if self.busy else "idle"
        else:
            state = "working"
        return ChildInfo(self.pid, self.role, state, self.worker)

    # messages to the child

    def start_work(self, *, reports: bool = False) -> None:
        """Send the child `work` with its role. A spare continues to wait. reports: see `Link`."""
        if self.role != "spare":
            self._send("work", role=self.role, reports=reports)

    def assign(self, role: Role) -> None:
        """Give a spare its role. If it is still loading, it starts to work when it has loaded."""
        self.role = role
        self.started_at = RUNTIME.monotonic()
        if self.loaded.is_set():
            self.start_work()

    def check_quarantine(self) -> None:
        self.searching = True
        self._send("isolate")

    def stop(self) -> None:
        """Stop gracefully; the second time, at once."""
        self.stop_requests += 1
        self._send("stop")

    def _send(self, kind: str, **more: Any) -> None:
        self._process.send(orjson.dumps({"say": kind, **more}) + b"\n")

    # messages from the child

    def _receive(self, kind: str, message: dict[str, Any]) -> None:
        with suppress(TypeError, ValueError):  # from another version, or written by user code
            self._update(kind, message)
            self._on_message(self, kind)

    def _update(self, kind: str, message: dict[str, Any]) -> None:
        match kind:
            case "loaded":
                self.app_info = message
                self.loaded.set()
            case "ready":
                self.worker = str(message.get("worker", ""))
                self.queues = tuple(map(str, message.get("queues", ())))
                self.last_heartbeat = RUNTIME.monotonic()  # a task may hold the interpreter lock before the first one
                self.ready.set()
            case "alive":
                self.last_heartbeat = RUNTIME.monotonic()
                self.loop_lag = float(message.get("lag") or 0.0)
                self.health = dict(message.get("health") or {})
            case "progress":
                self.progressed = True
            case "begins":
                self.steps[str(message.get("id"))] = ""
                self.searching = False
            case "survived":
                self.survived = bool(self.steps)
            case "step":
                self.steps[str(message.get("id"))] = str(message.get("step"))
            case "ends":
                self.steps.pop(str(message.get("id")), None)
                self.survived = False
                self.searching = True  # it looks for the next one without a request
            case "idle":
                self.searching = False
            case _:
                pass

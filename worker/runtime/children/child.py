"""One child process of a supervisor or worker: its messages, its state, and how it ended.

The other end of the pipes, with the table of messages, is worker/runtime/supervisor_link.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

import anyio
import orjson

from ....queues.runtime import RUNTIME, ChildProcess
from ....queues.supervisors import ChildInfo
from ..supervisor_link import SUPERVISED, Role

_MAX_LENGTH: Final = 1 << 20
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
        if len(self._partial) > _MAX_LENGTH:
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
        self.draining = False
        """Whether an operator has drained it: it exits when its tasks have ended, and no other child replaces it."""
        self.progressed = False
        """Whether it has settled a task or recorded a step."""
        self.survived = False
        """Whether its quarantined task has survived the probation time: then it takes up no place."""
        self.outdated = False
        """Whether a reload replaces it when its task has ended."""
        self.failure = ""
        """Why it could not start, in a sentence with the remedy; empty if it has not said so."""
        self.stalled = ""
        """Why the stall monitor killed it; empty if it did not."""
        self.crashes = 0
        """Crashes within the window, this one included, after `handled`."""
        self.started_at = self.idle_since = RUNTIME.monotonic()
        self.last_heartbeat: float | None = None
        self.loop_lag = 0.0
        self.health: Mapping[str, Any] = {}
        """Its latest health report."""
        self.rows: Any = ()
        """Counts of its last message, and gauges; see runtime/metrics."""
        self.gauges: Mapping[str, Any] = {}
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
        elif self.draining:
            state = "draining"
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
            case "draining":
                self.draining = True
            case "alive":
                self.last_heartbeat = RUNTIME.monotonic()
                self.loop_lag = float(message.get("lag") or 0.0)
                self.health = dict(message.get("health") or {})
            case "failed":
                self.failure = str(message.get("why", ""))
            case "counts":
                self.rows, self.gauges = message.get("rows"), dict(message.get("gauges") or {})
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


_CHUNK: Final = 65_536
_READS: Final = 16
"""Chunks that are read at once: a pipe holds 1 MiB at most."""


class ChildPipe:
    """Two pipes to a child: one to send, one to receive. Neither direction blocks."""

    def __init__(self) -> None:
        self._on_data: Callable[[bytes], None] = lambda data: None
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        self.child_ends = (child_reads, child_writes)
        """File descriptors for the child to inherit. Call `close_child_ends` after the child has started."""
        for own in (self._read, self._write):
            os.set_blocking(own, False)
        self._open = True

    def close_child_ends(self) -> None:
        """Close the child's descriptors in this process. Only then does the child's exit cause an end of file."""
        for descriptor in self.child_ends:
            os.close(descriptor)

    def start_reading(self, on_data: Callable[[bytes], None]) -> None:
        """Pass all bytes that the child sends to `on_data`."""
        self._on_data = on_data
        asyncio.get_running_loop().add_reader(self._read, self.read_available)

    def send(self, data: bytes) -> None:
        """Send bytes. They are dropped if the child has exited, or if the pipe is full because the child is stuck."""
        with suppress(OSError):
            os.write(self._write, data)

    def read_available(self) -> None:
        """Read and pass on the bytes that the pipe holds, up to a limit: user code may write without end."""
        for _ in range(_READS):
            try:
                data = os.read(self._read, _CHUNK)
            except BlockingIOError:
                return
            if not data:  # end of file: not a proof of exit, and missing if a grandchild inherited the descriptor
                asyncio.get_running_loop().remove_reader(self._read)
                return
            self._on_data(data)

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._read)
            os.close(self._read)
            os.close(self._write)


class PipedProcess:
    """A process of the operating system; see `ChildProcess` in queues/runtime.py."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: ChildPipe) -> None:
        self.pid = process.pid
        self._process = process
        self._pipe = pipe
        self.start_reading = pipe.start_reading
        self.send = pipe.send

    async def wait(self) -> int:
        code = await self._process.wait()
        self._pipe.read_available()  # the exit may be noticed before the last messages are read
        self._pipe.close()
        return code

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def start_process(arguments: Sequence[str], environment: Mapping[str, str], role: str) -> PipedProcess:
    """Start a process that inherits two pipes, whose descriptors are in its environment.

    Raises:
        OSError: The operating system could not create the process.
    """
    pipe = ChildPipe()
    read, write = pipe.child_ends
    try:
        with anyio.CancelScope(shield=True):
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=pipe.child_ends,
                start_new_session=True,  # a process group, too; uvloop knows no process_group
                env=os.environ | environment | {SUPERVISED: f"{role}:{read}:{write}"},
            )
    except BaseException:
        pipe.close()
        raise
    finally:
        pipe.close_child_ends()
    return PipedProcess(process, pipe)


WORKER_COMMAND: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "perdure.worker.cli", "worker", "run")
"""-P: the working directory is not on the import path, as for the installed program."""

_REDIS_URL: Final = "PERDURE_SUPERVISED_REDIS_URL"
"""Environment variable by which a command passes --redis-url on: all users would see its password on a command line."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Command line of a child, and environment variables in addition to those of this process."""

    arguments: Sequence[str]
    environment: MutableMapping[str, str] = field(default_factory=dict, repr=False)


def pass_redis_url(url: str | None) -> dict[str, str]:
    """Return the environment by which the children of a command get its option --redis-url."""
    return {} if url is None else {_REDIS_URL: url}


def passed_redis_url(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the option --redis-url of the command that started this process, and remove it from the environment."""
    return environment.pop(_REDIS_URL, None)


_METRICS: Final = "PERDURE_SUPERVISED_METRICS"
"""Environment variable by which a supervisor asks its children for counts."""


def pass_metrics(*, wanted: bool) -> dict[str, str]:
    """Return the environment by which children learn that their supervisor wants counts."""
    return {_METRICS: "1"} if wanted else {}


def passed_metrics(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether the supervisor of this process wants counts; child processes are not asked."""
    return environment.pop(_METRICS, None) is not None


@dataclass(frozen=True, slots=True)
class SupervisorTimings:
    """Intervals and time limits of a supervisor, in seconds.

    Args:
        register_interval: between two registrations in Redis; a lifted pause takes effect after at most this time.
        registration_ttl: after which a supervisor that no longer registers counts as gone.
        start_limit: for a child to get ready or to end. Importing an app may be slow.
        stop_margin: that a stopping child has beyond the app's grace, to release its tasks and exit.
        abort_limit: that a stalled child has to write its stacks to the log after SIGABRT.
        final_reports: during a drain, to report crashes to Redis. Later, tasks wait for their lease.
        last_reply: for Redis to answer when the supervisor deregisters. Later, its registration expires.
        shortest_run: of a child. One that exits sooner is replaced after this delay, even after exit code 0.
        burst_poll: between two checks whether the quarantined tasks of a burst are done.
        idle_limit: after which a quarantine child without a task is terminated.
        idle_poll: between two checks for idle quarantine children.
        heartbeat_interval: between two heartbeats of a healthy child, and between two checks of the stall monitor.
        heartbeat_limit: without a heartbeat, after which a child is reported as not alive.
        frozen_after: since the last check of the stall monitor if the supervisor itself was frozen; at most half of the
            stall limit.
        alert_limit: for the alert command.
    """

    register_interval: float = 1.5
    registration_ttl: float = 15.0
    start_limit: float = 600.0
    stop_margin: float = 10.0
    abort_limit: float = 2.0
    final_reports: float = 5.0
    last_reply: float = 1.0
    shortest_run: float = 1.0
    burst_poll: float = 0.2
    idle_limit: float = 60.0
    idle_poll: float = 5.0
    heartbeat_interval: float = 1.0
    heartbeat_limit: float = 5.0
    frozen_after: float = 5.0
    alert_limit: float = 30.0


def delay_after(failures: int, delays: Sequence[float]) -> float:
    """Return the delay after a number of failures in a row: the first, second and so on; the last one repeats."""
    return delays[min(failures, len(delays)) - 1] if failures > 0 else 0.0

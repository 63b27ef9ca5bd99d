"""Child processes of the simulated world, and their pipes: bytes in order, with a latency, until one end dies."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import TYPE_CHECKING, Final

from ..loop import Machine
from ..threads import block

if TYPE_CHECKING:
    from ..world import World

__all__ = ["ChildEnd", "SimulatedProcess"]

_LATENCY: Final = (0.00001, 0.0002)
"""Seconds that bytes travel from one process to another one of its host."""


class _Direction:
    """One pipe: it delivers in order, in a context of the machine that reads."""

    def __init__(self, world: World, name: bytes, context: Context) -> None:
        self._world = world
        self._name = name
        self._context = context
        self._last = 0.0

    def send(self, deliver: Callable[..., None], data: bytes) -> None:
        loop = self._world.loop
        self._world.network.sent.update(b"%b%r %b" % (self._name, loop.now, data))
        least, most = _LATENCY
        self._last = max(self._last, loop.now + least + (most - least) * loop.random.random())
        loop.call_at(self._last, deliver, data, context=self._context)


class SimulatedProcess:
    """A started process, as its parent has it; see `ChildProcess` in queues/runtime.py."""

    def __init__(self, world: World, parent: Machine, machine: Machine) -> None:
        self.parent, self.machine = parent, machine
        self.pid = machine.number
        self._world = world
        self._on_data: Callable[[bytes], None] = lambda data: None
        self._code: asyncio.Future[int] = world.loop.create_future()
        self._up = _Direction(world, b"%d^" % machine.number, world.loop.context_of(parent))
        self.end = ChildEnd(world, self)

    def start_reading(self, on_data: Callable[[bytes], None]) -> None:
        self._on_data = on_data

    def send(self, data: bytes) -> None:
        if not self.machine.dead:
            self.end.take(data)

    async def wait(self) -> int:
        return await self._code

    def send_signal(self, number: int) -> None:
        if number == signal.SIGABRT:
            self._world.checks.supervisors.aborted(self.machine)
        self._world.send_signal(self.machine, number)

    def kill_group(self) -> None:
        """Do nothing: tasks of the simulation start no processes."""

    def receive(self, data: bytes) -> None:
        """Take bytes of the child."""
        self._up.send(self._on_data, data)

    def ended(self, code: int) -> None:
        """Let the parent know, after all that the process has sent, that it has ended."""
        self._up.send(lambda data: self._code.set_result(int(data)), b"%d" % code)

    def orphan(self) -> None:
        """Let the process read the end of the file, since its parent has ended."""
        self.end.take(b"")


class ChildEnd:
    """Ends of the pipes that a child has; see `ParentPipe` in worker/runtime/supervisor_link.py."""

    def __init__(self, world: World, process: SimulatedProcess) -> None:
        self._world = world
        self._process = process
        # not the context of a thread: the bytes arrive whatever blocks
        context = world.loop.context_of(process.machine, "pipe")
        self._down = _Direction(world, b"%dv" % process.machine.number, context)
        self._lines: deque[bytes] = deque()
        self._partial = b""
        self._ended = False
        self._wake: Callable[..., None] | None = None

    def write(self, data: bytes) -> int:
        if self._process.parent.dead:
            raise BrokenPipeError
        self._process.receive(data)
        return len(data)

    def lines(self) -> Iterator[bytes]:
        while True:
            while self._lines:
                yield self._lines.popleft()
            if self._ended:
                return
            block(self._world.loop, self._arrange)

    def take(self, data: bytes) -> None:
        """Take bytes of the parent; none are the end of the file."""
        self._down.send(self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines += lines
        self._ended = self._ended or not data
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def _arrange(self, resume: Callable[..., None]) -> None:
        self._wake = resume

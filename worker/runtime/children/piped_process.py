"""Child processes of the operating system, each with a pipe in each direction."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import anyio

from ..supervisor_link import SUPERVISED

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

"""`perdure drop`: look at a folder again and again until a signal."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import anyio
import typer
from anyio.abc import TaskStatus

from ....queues.errors import NotOpen, Unavailable
from ....queues.producer import Producer
from ...settings import load_settings
from ...workspace.shared_workspace import SharedWorkspace
from ..support.connection import ConnectionOptions
from ..support.errors import Failed, Misuse
from ..support.options import in_duration
from ..support.output import AsJson, note, print_json_lines, print_text
from ..support.runner import command
from .folder import REST, FileOutcome
from .intake import DropFolder

_LOCK: Final = ".perdure-drop.lock"

_POLL: Final = 1.0
"""Seconds between two looks."""

_LOOKS: Final = 3
"""Looks of `--once` at a file that changes."""

_INTERRUPTED: Final = 130


@command
async def drop(
    place: ConnectionOptions,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder.", show_default=False)],
    *,
    once: Annotated[bool, typer.Option("--once", help="Take the files that are there, and exit.")] = False,
    poll: Annotated[
        float | None, in_duration("Time between two looks at the folder. Default: 1s.", positive=True)
    ] = None,
    json: AsJson = False,
) -> None:
    """Make tasks of the files in a folder, each exactly once.

    DIR/QUEUE/NAME.json has one task, as a line of 'perdure enqueue --file':
    {"task": "audit", "args": {"root": "src"}}. DIR/QUEUE/NAME.jsonl has one
    in each line. The ids go to stdout. A file is moved to
    DIR/QUEUE/processed, an invalid one to DIR/QUEUE/rejected, with its error
    in NAME.error.txt.

    DIR/agents/AGENT/SESSION/NAME.txt is a message of that session, and
    DIR/shared/NAME has the files of that shared workspace, both ways.

    A file is taken when it has not changed for a second. Hidden files, *.tmp
    and *.part are left: write under such a name, and rename the file when it
    is complete. While Redis is away, files wait. SIGTERM or Ctrl-C ends the
    command after the file in hand.

    Example: perdure drop /srv/inbox
    """
    if not folder.is_dir():
        raise Misuse(f"DIR must be a folder, got {str(folder)!r}: create it, and in it a folder for each queue")

    def report(found: FileOutcome) -> None:
        note(found.message)
        if json:
            print_json_lines([found.data])
        elif found.id is not None:
            print_text(found.id)

    with _locked(folder):
        async with anyio.create_task_group() as group:
            stop = _Stop(group.cancel_scope)
            await group.start(stop.watch)
            producer, settings = place.producer(), load_settings(**place.overrides())
            writer = f"perdure drop on {socket.gethostname()}"
            workspace = partial(SharedWorkspace, producer.gateway, settings, by=writer)
            dropped = DropFolder(folder, producer, note, report, stop.is_asked, workspace)
            await _run(producer, dropped, stop, poll=poll or _POLL, once=once)
            group.cancel_scope.cancel()
    if stop.forced:
        raise typer.Exit(_INTERRUPTED)


class _Stop:
    """Requests to stop: the first signal ends the command after the file in hand, the second one at once.

    Attributes:
        forced: Whether there was a second one.
    """

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._asked = anyio.Event()
        self.forced = False

    def is_asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self, seconds: float) -> None:
        """Wait for a request, at most so long."""
        with anyio.move_on_after(seconds):
            await self._asked.wait()

    async def watch(self, *, task_status: TaskStatus[None]) -> None:
        """Receive signals; in a thread, there are none."""
        if threading.current_thread() is not threading.main_thread():
            task_status.started()
            return
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                if self._asked.is_set():
                    self.forced = True
                    self._scope.cancel()
                self._asked.set()


async def _run(producer: Producer, folder: DropFolder, stop: _Stop, *, poll: float, once: bool) -> None:
    """Look at the folder until a request to stop. Raises `Failed` if files wait at the end of `once`."""
    looks, is_open, away = 0, False, False
    async with AsyncExitStack() as stack:
        while not stop.is_asked():
            try:
                if not is_open:
                    await stack.enter_async_context(producer)
                    is_open = True
                await folder.look()
            except NotOpen:
                raise
            except Unavailable as error:
                if once:
                    raise
                if not away:
                    note(f"{error}; files wait")
                away = True
            else:
                if away:
                    note("Redis is there: files are taken")
                away, looks = False, looks + 1
                if once and (not folder.rest.restless or looks == _LOOKS):
                    break
            await stop.wait(REST if once else poll)
    changing = folder.rest.restless
    if once and (left := folder.waiting + changing):
        why = f", {changing} of them because they change" if changing else ""
        raise Failed(f"files that wait: {left}{why}; the next command takes them")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process. Raises `Failed` if another command has it."""
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Failed(f"could not write {path}: {error.strerror}; the command needs to write into the folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Failed(f"another perdure drop works on {folder}: end it first") from None
    except OSError as error:  # a file system without locks
        note(f"could not lock {path}: {error.strerror}; let no other perdure drop work on the folder")
    try:
        yield
    finally:
        os.close(lock)

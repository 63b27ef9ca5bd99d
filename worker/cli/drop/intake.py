"""One look at a drop folder: the files that rest become tasks and messages, and are moved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from ....queues.errors import (
    ConfigurationError,
    PerdureError,
    QueueFull,
    SessionError,
    SessionFailed,
    SessionFull,
    Unavailable,
)
from ....queues.keys import check_name
from ....queues.producer import Producer
from ....queues.sessions.record import check_session_id
from ....queues.wording import counted
from ...workspace.manifest import shown_path
from ...workspace.shared_workspace import SharedWorkspace
from ..support.connection import warn_unserved
from ..support.errors import Failed
from ..support.options import problem
from . import messages, tasks
from .folder import FileChanged, FileOutcome, Folder, Notes, NothingPublished, Rest, TakenFile, folders
from .shared import SharedFolder
from .tasks import Stopped, TaskIntake

AGENTS: Final = "agents"
SHARED: Final = "shared"

_REMEDY: Final = "; if it was not complete: write it under a name that ends in .part, and rename it when it is complete"

_WAITS: Final = (QueueFull, SessionFull, SessionFailed, NothingPublished)
"""Errors for which a file waits, and with it the later ones of its folder."""

_REJECTS: Final = (Failed, ValueError, SessionError)
"""Errors for which a file is rejected."""


@dataclass
class DropFolder:
    """The drop folder.

    Attributes:
        root: Its path.
        show: Prints a message.
        report: Prints what became of a file.
        stopping: Returns whether the command was asked to stop.
        workspace: Returns the shared workspace of a name. Raises `ValueError`.
        rest: Files that change.
        waiting: Number of files that wait since the last look, for a reason that a message names.
    """

    root: Path
    producer: Producer
    show: Callable[[str], None]
    report: Callable[[FileOutcome], None]
    stopping: Callable[[], bool]
    workspace: Callable[[str], SharedWorkspace]
    rest: Rest = field(default_factory=Rest)
    waiting: int = 0

    def __post_init__(self) -> None:
        self._notes = Notes(self.show)
        self._tasks = TaskIntake(self.producer, self.stopping)
        self._workspaces: dict[str, SharedFolder] = {}
        self._served = set[str]()
        """Queues of sessions for which it was checked that a worker serves them."""

    async def look(self) -> None:
        """Look at all folders, and settle the files that rest. Raises `Unavailable`."""
        self._notes.begin()
        self.rest.begin()
        self.waiting = 0
        for name in self._folders("", "DIR/QUEUE/"):
            if self.stopping():
                return
            if name == AGENTS:
                await self._agents()
            elif name == SHARED:
                await self._shared()
            else:
                await self._queue(name)

    def _folders(self, path: str, inside: str) -> list[str]:
        try:
            return folders(self.root, path, self._notes, inside)
        except OSError as error:
            self._notes.say(shown_path(path) or str(self.root), f"could not be read: {error.strerror or error}")
            return []

    async def _queue(self, name: str) -> None:
        try:
            check_name("queue", name)
        except ValueError as error:
            self._notes.say(shown_path(name), f"it is left there: {error}")
        else:
            await self._files(Folder(self.root, name), tasks.ENDS, partial(self._enqueue, name))

    async def _agents(self) -> None:
        for agent in self._folders(AGENTS, f"DIR/{AGENTS}/AGENT/SESSION/"):
            for session_id in self._folders(path := f"{AGENTS}/{agent}", f"DIR/{AGENTS}/AGENT/SESSION/"):
                try:
                    check_session_id(session_id)
                    if not agent.isprintable():
                        raise ValueError(
                            f"the name of an agent must have printable characters, got {shown_path(agent)}"
                        )
                except ValueError as error:
                    self._notes.say(shown_path(f"{path}/{session_id}"), f"it is left there: {error}")
                    continue
                send = partial(self._send, agent, session_id)
                await self._files(Folder(self.root, f"{path}/{session_id}"), messages.ENDS, send)

    async def _shared(self) -> None:
        for name in self._folders(SHARED, f"DIR/{SHARED}/NAME/"):
            path = f"{SHARED}/{name}"
            try:
                if name not in self._workspaces:
                    files = self.workspace(name)
                    self._workspaces[name] = SharedFolder(self.root, path, files, self._notes, self.report)
                self.waiting += await self._workspaces[name].sync(self.rest)
            except Unavailable:
                raise
            except (ValueError, OSError, PerdureError) as error:
                self._wait(path, f"it is not copied: {_reason(error)}")

    async def _files(
        self, folder: Folder, ends: tuple[str, ...], settle: Callable[[TakenFile], Awaitable[FileOutcome]]
    ) -> None:
        """Settle the files of a folder, those that an earlier command has taken first. Raises `Unavailable`."""
        try:
            taken, resting = folder.taken(), folder.names(ends, self.rest, self._notes)
        except OSError as error:
            self._notes.say(shown_path(folder.path), f"could not be read: {error.strerror or error}")
            return
        for name in taken:
            if self.stopping() or not await self._settle(folder, name, settle):
                return
        for name in resting:
            if self.stopping():
                return
            try:
                if not folder.take(name):
                    continue
            except OSError as error:
                self._wait(f"{folder.path}/{name}", f"it is left there, it could not be taken: {_reason(error)}")
                continue
            if not await self._settle(folder, name, settle):
                return

    async def _settle(self, folder: Folder, name: str, settle: Callable[[TakenFile], Awaitable[FileOutcome]]) -> bool:
        """Settle a file that was taken; return whether the next one of the folder may follow. Raises `Unavailable`."""
        path = f"{folder.path}/{name}"
        try:
            with folder.open(name) as file:
                try:
                    report = await settle(file)
                except _WAITS as error:
                    self._wait(path, f"it waits: {error}")
                    return False
                except ConfigurationError:
                    raise
                except _REJECTS as error:
                    report = self._reject(file, error)
                else:
                    folder.process(name, file.digest)
                self.report(report)
        except Unavailable:
            raise
        except Stopped:
            return False
        except FileChanged:
            self.rest.restless += 1
        except OSError as error:
            self._wait(path, f"it waits in {folder.path}/.taken: {_reason(error)}")
        except PerdureError as error:
            self._wait(path, f"it waits: {error}")
        except Exception as error:  # noqa: BLE001 - one file must not keep the others waiting
            self._wait(path, f"it waits, because of an unexpected error: {type(error).__name__}: {error}")
        return True

    def _wait(self, path: str, why: str) -> None:
        self.waiting += 1
        self._notes.say(shown_path(path), why)

    def _reject(self, file: TakenFile, error: Exception) -> FileOutcome:
        reason = problem(error) if isinstance(error, ValueError) else str(error)
        if "not JSON" in reason:
            reason += _REMEDY
        kept = shown_path(file.folder.reject(file.name, file.digest, reason))
        data = {"file": file.shown, "outcome": "rejected", "reason": reason, "kept": kept}
        return FileOutcome(data, f"{file.shown}: rejected: {reason}")

    async def _enqueue(self, queue: str, file: TakenFile) -> FileOutcome:
        found = await self._tasks.enqueue(file, queue)
        known = found.existed == found.tasks
        data = {
            "file": file.shown,
            "outcome": "existed" if known else "enqueued",
            "queue": queue,
            "id": found.id,
            "tasks": found.tasks,
            "existed": found.existed,
        }
        if not file.name.endswith(".jsonl"):
            what = f"task {found.id} {'exists already on' if known else 'enqueued on'} queue {queue}"
        else:
            before = f", {found.existed:,} of which existed already" if found.existed else ""
            what = f"{counted(found.tasks, 'task')} enqueued on queue {queue}{before}; ids {found.id}-1, ..."
        return FileOutcome(data, f"{file.shown}: {what}", found.id)

    async def _send(self, agent: str, session_id: str, file: TakenFile) -> FileOutcome:
        turn, queue, app = await messages.send(self.producer, file, agent, session_id)
        if queue not in self._served:
            await warn_unserved(self.producer, {queue: set()}, app=app)
            self._served.add(queue)
        data = {
            "file": file.shown,
            "outcome": "sent",
            "agent": agent,
            "session": session_id,
            "turn": turn.number,
            "id": str(turn),
        }
        return FileOutcome(
            data, f"{file.shown}: sent as turn {turn.number} of session {session_id!r} of {agent!r}", str(turn)
        )


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

"""Synchronous forms of the objects that a context returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .agents.journal.state import Artifact
from .agents.resume_info import Part, ResumeInfo
from .artifacts.task_artifacts import Artifacts
from .durable.answers import Wait
from .durable.journal.event import Event
from .durable.journal.handoff.document import Handoff
from .durable.sync.blocking import Blocking, blocking
from .durable.sync.session import call_in_loop
from .durable.values import Values
from .memory.task_memory import TaskMemory
from .store import Store, StoreBatch, StoreEntry
from .workspace.shared_workspace import SharedWorkspace
from .workspace.task_workspace import Workspace


class SyncMemory(Blocking[TaskMemory]):
    """Long-term memories of the agent or task; see `TaskMemory`."""

    @property
    def owner(self) -> str:
        """Name of the agent or task that owns the memories."""
        return self._wrapped.owner

    add = blocking(TaskMemory.add)
    search = blocking(TaskMemory.search)
    profile = blocking(TaskMemory.profile)
    touch = blocking(TaskMemory.touch)
    forget = blocking(TaskMemory.forget)


class SyncValues(Blocking[Values]):
    """Named values of the running task; see `Values`."""

    get = blocking(Values.get)
    set = blocking(Values.set)


class SyncWorkspace(Blocking[Workspace]):
    """Folder of the running task, whose files are saved with each step; see `Workspace`."""

    @property
    def path(self) -> Path:
        """The folder. It exists while the run lasts."""
        return self._wrapped.path

    save = blocking(Workspace.save)


class SyncSharedWorkspace(Blocking[SharedWorkspace]):
    """Files that several tasks change; see `SharedWorkspace`."""

    @property
    def name(self) -> str:
        return self._wrapped.name

    write = blocking(SharedWorkspace.write)
    remove = blocking(SharedWorkspace.remove)
    find = blocking(SharedWorkspace.find)
    read = blocking(SharedWorkspace.read)
    list = blocking(SharedWorkspace.list)


class SyncStore(Blocking[Store]):
    """Entries of a namespace of the key-value store; see `Store`."""

    @property
    def name(self) -> tuple[str, ...]:
        return self._wrapped.name

    put = blocking(Store.put)
    delete = blocking(Store.delete)
    get = blocking(Store.get)
    entry = blocking(Store.entry)
    get_many = blocking(Store.get_many)
    clear = blocking(Store.clear)

    def list(
        self,
        prefix: str = "",
        *,
        after: str = "",
        reverse: bool = False,
        limit: int | None = None,
        values: bool = True,
        type: Any = None,
    ) -> Sequence[StoreEntry]:
        """Return entries, see `Store.list`."""

        async def read() -> Sequence[StoreEntry]:
            found = self._wrapped.list(prefix, after=after, reverse=reverse, limit=limit, values=values, type=type)
            return [entry async for entry in found]

        return call_in_loop(read)

    @contextmanager
    def batch(self) -> Iterator[StoreBatch]:
        """Return changes that are done together or not at all, see `Store.batch`."""
        batch = self._wrapped.batch()
        yield batch
        call_in_loop(batch.send)


class SyncArtifacts(Blocking[Artifacts]):
    """Artifacts of the running task; see `Artifacts`."""

    save = blocking(Artifacts.save)
    list = blocking(Artifacts.list)
    read = blocking(Artifacts.read)
    fetch = blocking(Artifacts.fetch)
    path = blocking(Artifacts.path)

    def chunks(self, artifact: str | Artifact) -> Iterator[bytes]:
        """Yield the bytes in chunks. The hash is verified after the last one. Raises as `read` does."""
        found = self._wrapped.chunks(artifact)

        async def read() -> bytes | None:
            return await anext(found, None)

        while (chunk := call_in_loop(read)) is not None:
            yield chunk


class SyncResumeInfo(Blocking[ResumeInfo]):
    """Information about the work so far: `for name, part in ctx.resume_info()`; see `ResumeInfo`."""

    def __iter__(self) -> Iterator[Part]:
        async def read() -> list[Part]:
            return [part async for part in self._wrapped]

        return iter(call_in_loop(read))

    @property
    def handoff(self) -> Handoff | None:
        """Handoff document of the previous run, or one drafted from the log; None in a first run."""
        return self._wrapped.handoff

    messages = blocking(ResumeInfo.messages)
    state = blocking(ResumeInfo.state)

    def history(self) -> list[Event]:
        """Return all events of the task, the oldest first."""

        async def read() -> list[Event]:
            return [event async for event in self._wrapped.history()]

        return call_in_loop(read)


class SyncWait(Blocking[Wait[Any]]):
    """An open wait for an answer; see `Wait`."""

    @property
    def id(self) -> str:
        return self._wrapped.id

    @property
    def token(self) -> str | None:
        return self._wrapped.token

    @property
    def by(self) -> str | None:
        """The name that the sender of the answer gave; None without an answer."""
        return self._wrapped.by

    result = blocking(Wait.result)
    close = blocking(Wait.close)

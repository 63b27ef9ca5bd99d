"""Workspace of the running task: `ctx.workspace`.

The files are saved with each step: those that changed go to the artifact store, and one entry of the checkpoint names
the manifest, in the act that records the step. A resumed run gets a new folder with the files of its last recorded step
before the handler is called, so what a step that was cut off has left is not in it.

A run that dies after the files were stored and before the step is recorded leaves bytes without a link, which the
collector removes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from ...queues import (
    Entry,
    Gateway,
    Kind,
    Namespace,
    Partition,
    checkpoint_fields,
    checkpoint_fields_of_all,
    retry_while_unavailable,
    walk_events,
)
from ...queues.sessions import session_data
from ..artifacts import ArtifactStore, artifact_store
from ..errors import ArtifactError, StoreUnavailable, WorkspaceError
from ..errors.validation import first_problem
from ..journal import decode_snapshot
from ..journal.agent_events import WorkspaceSaved, saved_link
from ..log import log_wait, logger
from ..settings import Settings
from ..workspace import (
    Manifest,
    SavedFile,
    Scanner,
    decode_manifest,
    encode_manifest,
    make_folder,
    remove_folder,
)
from .run import Run

__all__ = [
    "FolderOnly",
    "Workspace",
    "restore_workspace",
    "task_workspace_files",
    "workspace_hashes",
    "workspace_link",
    "workspace_of",
]

WORKSPACE: Final = "#workspace"
"""Checkpoint key of the manifest of a task's workspace."""

_AT_ONCE: Final = 8
"""Files that are saved or restored at the same time."""

_NAMED: Final = 50
"""Changed files that an event names."""


class WorkspaceLink(BaseModel):
    """Link of a task to its manifest. hash, size: of the manifest. files, bytes: of the workspace."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = 1
    hash: str
    size: int
    files: int = 0
    bytes: int = 0


class Change(NamedTuple):
    """Files that were saved since the last change. number: order of the scans."""

    number: int
    link: WorkspaceLink
    changed: tuple[str, ...]
    removed: tuple[str, ...]


class Workspace:
    """Folder of the running task, whose files are saved with each step.

    Not saved are symbolic links, empty folders, what tools make again (`__pycache__`, `.venv`, `node_modules` and so
    on), and what the patterns in `.perdureignore` match.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        self._run = run
        self._settings = settings
        self._folder: Path | None = None
        self._files: Manifest = {}
        self._scanner: Scanner | None = None
        self._scanning = asyncio.Lock()
        self._scans = 0
        self._put = 0
        self._warned = False

    @property
    def path(self) -> Path:
        """The folder. It exists while the run lasts. Raises `WorkspaceError`."""
        if self._folder is None:
            settings = self._settings
            place = Path(settings.workspaces).expanduser() if settings.workspaces else Path(tempfile.gettempdir())
            self._folder = make_folder(place, self._run.id)
            self._scanner = Scanner(
                self._what,
                self._folder,
                most_bytes=settings.workspace_limit,
                most_files=settings.workspace_files,
                largest=settings.artifact_limit,
            )
        return self._folder

    async def save(self) -> None:
        """Save the changed files now; each step does so when it is recorded.

        Raises `WorkspaceTooLarge`, `WorkspaceError`, `StoreUnavailable`, `LeaseLost`.
        """
        await self._run.check_stopped()
        if (change := await self.find_change()) is not None:
            await self._run.recorder.put(*self.entries(change, None), wait=True)

    async def find_change(self) -> Change | None:
        """Save the files that have changed; return their link, which `entries` puts into the checkpoint.

        Raises as `save`.
        """
        if self._scanner is None:
            return None
        async with self._scanning:
            scan = await anyio.to_thread.run_sync(self._scanner.scan)
            if scan.skipped and not self._warned:
                self._warned = True
                logger.bind(id=self._run.id).warning(
                    "workspace: {} symbolic links or special files are not saved, such as {!r}",
                    len(scan.skipped),
                    scan.skipped[0],
                )
            saved: dict[str, SavedFile] = {}
            store = await self._store()

            async def keep(path: str) -> None:
                try:
                    stored = await store.save(self._file(path), self.path / path, self._run.touch)
                except ArtifactError as error:
                    if isinstance(error.__cause__, FileNotFoundError) and not isinstance(error, StoreUnavailable):
                        return  # removed since the scan
                    raise
                saved[path] = SavedFile(stored.hash, stored.size, scan.signatures[path][1])

            await _each(scan.changed, keep)
            self._scanner.saved(scan, saved)
            files = {**scan.known, **saved}
            former = self._files
            if files == former:
                return None
            data = encode_manifest(files)
            stored = await store.save(f"the manifest of {self._what}", data)
            self._files = files
            self._scans += 1
            size = sum(file.size for file in files.values())
            return Change(
                self._scans,
                WorkspaceLink(hash=stored.hash, size=stored.size, files=len(files), bytes=size),
                tuple(sorted(path for path, file in files.items() if former.get(path) != file)),
                tuple(sorted(former.keys() - files.keys())),
            )

    def entries(self, change: Change | None, step: str | None) -> list[Entry]:
        """Return the entries of a change. They must be put at once.

        None are needed if a later scan, which found these files too, has put its own.
        """
        if change is None or change.number < self._put:
            return []
        self._put = change.number
        data = change.link.model_dump_json().encode()
        self._run.history.saved[WORKSPACE] = data
        event = WorkspaceSaved(
            changed=change.changed[:_NAMED],
            removed=change.removed[:_NAMED],
            more=max(0, len(change.changed) - _NAMED) + max(0, len(change.removed) - _NAMED),
            files=change.link.files,
            size=change.link.bytes,
            manifest=change.link.hash,
            manifest_size=change.link.size,
            step=step,
        )
        return [Entry(Kind.SAVED, WORKSPACE, data), self._run.next_entry(event)]

    async def restore(self, data: bytes) -> None:
        """Fill the folder with the files of a link. Raises `WorkspaceError`, `ArtifactError`."""
        link = _decode(f"task {self._run.id}", data)
        store = await self._store()
        what = f"the manifest of {self._what}"
        files = decode_manifest(self._what, await store.read(what, link.hash, link.size))
        folder = self.path

        async def fetch(path: str) -> None:
            file, to = files[path], folder / path
            await anyio.to_thread.run_sync(partial(to.parent.mkdir, parents=True, exist_ok=True))
            await store.fetch(self._file(path), file.hash, file.size, to)
            await anyio.to_thread.run_sync(_restored, to, 0o755 if file.executable else 0o644)
            self._run.touch()

        await _each(files, fetch)
        self._files = files
        if self._scanner is not None:
            scan = await anyio.to_thread.run_sync(self._scanner.scan)
            self._scanner.saved(scan, {path: files[path] for path in scan.changed if path in files})
        logger.bind(task=self._run.envelope.task, id=self._run.id).info(
            "restored the workspace: {} files, {:,} bytes", link.files, link.bytes
        )

    async def close(self) -> None:
        """Remove the folder."""
        folder, self._folder, self._scanner = self._folder, None, None
        if folder is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_folder, folder)

    @property
    def _what(self) -> str:
        return f"the workspace of task {self._run.id}"

    def _file(self, path: str) -> str:
        return f"file {path!r} of {self._what}"

    async def _store(self) -> ArtifactStore:
        run = self._run
        return await retry_while_unavailable(
            lambda: artifact_store(run.gateway, self._settings),
            on_wait=log_wait(f"artifacts of task {run.id}", run.touch),
        )


class FolderOnly(Workspace):
    """A workspace whose files are not saved, for tests without a server."""

    async def find_change(self) -> Change | None:
        return None


def workspace_of(run: Run) -> Workspace:
    """Return the workspace of a run, made at its first use."""
    if run.workspace is None:
        run.workspace = Workspace(run, run.settings)
    workspace: Workspace = run.workspace
    return workspace


async def restore_workspace(run: Run, inherited: bytes | None = None) -> None:
    """Restore the workspace that earlier runs of a task saved, if they saved one. Raises as `Workspace.restore`.

    inherited: link of files that the task starts with, unless earlier runs of it have saved others.
    """
    await run.history.read_unfinished(WORKSPACE)
    data = run.history.saved.get(WORKSPACE)
    if inherited is not None:
        data = inherited if data is None else None  # its own were restored before the handler was called
    if data is not None:
        await workspace_of(run).restore(data)


def workspace_link(run: Run) -> bytes | None:
    """Return the link that the runs of a task saved last; None if they saved none."""
    link: bytes | None = run.history.saved.get(WORKSPACE)
    return link


async def workspace_hashes(gateway: Gateway, namespace: Namespace, store: ArtifactStore) -> AsyncIterator[str]:
    """Yield the hashes that the workspaces of all tasks and sessions link: of their manifests and the files in these.

    Those of all points in the log of a task are linked, since a fork may start from any. With them come the artifacts
    in the states of sessions, which outlive the tasks of their turns.

    Raises `WorkspaceError`, `ArtifactError`, `BadSnapshot` if one cannot be read: then it is not known what it links.
    """
    async for partition, task_id, saved in checkpoint_fields_of_all(gateway, namespace, WORKSPACE):
        if not saved:
            continue
        links = dict.fromkeys(saved.values())
        async for event in walk_events(gateway, partition, task_id):  # a fork may start from any of them
            if isinstance(event.data, dict) and (past := saved_link(event.type, event.data)) is not None:
                links[orjson.dumps(past)] = None
        for data in links:
            async for digest in _hashes(f"task {task_id}", data, store):
                yield digest
    async for session, state, link in session_data(gateway, namespace):
        if link is not None:
            async for digest in _hashes(f"session {session}", link, store):
                yield digest
        if state is not None:
            for artifact in decode_snapshot(f"session {session}", state).state.get("artifacts", ()):
                yield artifact["hash"]


async def _hashes(owner: str, data: bytes, store: ArtifactStore) -> AsyncIterator[str]:
    link, what = _decode(owner, data), f"the workspace of {owner}"
    yield link.hash
    for file in decode_manifest(what, await store.read(what, link.hash, link.size)).values():
        yield file.hash


async def task_workspace_files(
    gateway: Gateway, partition: Partition, task_id: str, store: ArtifactStore
) -> AsyncIterator[tuple[str, SavedFile]]:
    """Yield the manifest of a task's workspace and its files, each with its name for errors."""
    for data in (await checkpoint_fields(gateway, partition, task_id, WORKSPACE)).values():
        link, what = _decode(f"task {task_id}", data), f"the workspace of task {task_id}"
        yield f"the manifest of {what}", SavedFile(link.hash, link.size)
        manifest = await store.read(f"the manifest of {what}", link.hash, link.size)
        for path, file in decode_manifest(what, manifest).items():
            yield f"file {path!r} in {what}", file


def _decode(owner: str, data: bytes) -> WorkspaceLink:
    try:
        link = WorkspaceLink.model_validate_json(data)
    except ValidationError as error:
        raise WorkspaceError(f"could not read the workspace of {owner}: {first_problem(error)}") from None
    if link.v > 1:
        raise WorkspaceError(
            f"the workspace of {owner} has version {link.v}; this version of Perdure reads up to 1: update it"
        )
    return link


def _restored(file: Path, mode: int) -> None:
    """Set the mode and the times of a restored file: a later write then changes its time, however soon it comes."""
    file.chmod(mode)
    earlier = time.time() - 1
    os.utime(file, (earlier, earlier))


async def _each(paths: Iterable[str], act: Callable[[str], Awaitable[None]]) -> None:
    """Act on all files, some at the same time. Raises the first error, after what was started has ended."""
    left = iter(paths)

    async def work() -> None:
        for path in left:
            await act(path)

    for result in await asyncio.gather(*[work() for _ in range(_AT_ONCE)], return_exceptions=True):
        if result is not None:
            raise result

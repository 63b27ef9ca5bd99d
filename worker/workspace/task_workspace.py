"""Workspace of the running task: `ctx.workspace`.

The files are saved with each step: those that changed go to the artifact store, and one entry of the checkpoint names
the manifest, in the act that records the step. A resumed run gets a new folder with the files of its last recorded step
before the handler is called, so what a step that was cut off has left is not in it.

A run that dies after the files were stored and before the step is recorded leaves bytes without a link, which the
collector removes.

A step that ran is recorded, also if its files cannot be saved: with a mark, and the run saves them before it continues.
It waits for a store that is away, and parks if a limit is exceeded. The folder of a run that ends before that is kept,
and the next run takes it over and saves its files before it calls the handler.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NoReturn, TypeVar

import anyio
import anyio.to_thread
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import message_after
from ...queues.event_log import walk_events
from ...queues.inspection.views import checkpoint_fields, checkpoint_fields_of_all
from ...queues.keys import Namespace, Partition
from ...queues.regular_files import NotRegular, open_below
from ...queues.runtime import RUNTIME
from ...queues.sessions.record import session_data
from ...queues.transport.backoff import Backoff, retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.wording import listed
from ..agents.journal.agent_events import WorkspaceSaved, saved_link
from ..agents.journal.snapshot import decode_snapshot
from ..artifacts.store import ArtifactStore, artifact_store
from ..durable.journal.run_events import Waited, WaitStarted
from ..durable.journal.step_record import UNSAVED, WORKSPACE
from ..durable.run import Run
from ..durable.step_files import Change, Found, WorkspaceLink
from ..durable.steps.calls import add_folder
from ..durable.stop_reasons import ParkReason
from ..errors import ArtifactTooLarge, RunStopped, StoreUnavailable, WorkspaceError, WorkspaceTooLarge, first_problem
from ..log import log_wait, logger
from ..settings import Settings
from .folders import (
    check_folder_name,
    finish_folder,
    keep_folder,
    lay_out_folder,
    make_folder,
    release_folder,
    remove_folder,
    take_folder,
)
from .manifest import Limits, Manifest, SavedFile, decode_manifest, encode_manifest, shown_path
from .scan import Scanner

WORKSPACE_ROOM: Final = "workspace"
"""Kind of the wait of a task whose files exceed a limit."""

_AT_ONCE: Final = 8
"""Files that are saved or restored at the same time."""

_NAMED: Final = 50
"""Changed files that an event names."""

_SKIPPED: Final = 20
"""Files that a warning names."""

_SOONEST: Final = 5.0
_LATEST: Final = 60.0
"""Seconds after which a task whose files exceed a limit looks whether it was raised: first, and at most."""

T = TypeVar("T")


class _Mark(BaseModel):
    """Mark of a step whose files are not saved yet.

    Attributes:
        folder, host: Folder of the run, and the host that has it.
        step: The step, if one has left the files.
        why: What prevents it.
        tries: How often the task was parked for it; None before the first time.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    folder: str
    host: str
    step: str | None
    why: str
    tries: Annotated[int, Field(ge=0)] | None = None


class Workspace:
    """Folder of the running task, whose files are saved with each step.

    With them are saved their permissions, symbolic links, as they are, and empty folders. Not saved are sockets and
    other special files, what tools make again (`__pycache__`, `.venv`, `node_modules` and so on), and what the patterns
    in `.perdureignore` match.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        self._run = run
        self._settings = settings
        self._folder: Path | None = None
        self._files = Manifest()
        self._scanner: Scanner | None = None
        self._scanning = asyncio.Lock()
        self._scans = 0
        self._put = 0
        self._behind = 0
        """Number of the last scan whose files could not be saved; 0 if a later one has saved them."""
        self._warned: set[str] = set()

    @property
    def path(self) -> Path:
        """The folder. It exists while the run lasts. Raises `WorkspaceError`."""
        if self._folder is None:
            return self._use(make_folder(self._place, self._run.id))
        return self._folder

    @property
    def _place(self) -> Path:
        place = self._settings.workspaces
        return Path(place).expanduser() if place else Path(tempfile.gettempdir())

    def _use(self, folder: Path) -> Path:
        self._folder = folder
        add_folder(self._run, folder)
        self._scanner = Scanner(self._what, folder, self._limits)
        return folder

    @property
    def _limits(self) -> Limits:
        settings = self._settings
        return Limits(settings.workspace_limit, settings.workspace_files, settings.artifact_limit)

    async def save(self) -> None:
        """Save the changed files now; each step does so when it is recorded.

        Raises `WorkspaceTooLarge`, `WorkspaceError`, `StoreUnavailable`, `LeaseLost`.
        """
        await self._run.check_stopped()
        if entries := self.entries(await self.find_change(), None):
            await self._run.recorder.put(*entries, wait=True)

    async def find_step_change(self) -> Found:
        """Save the files that a step has changed. Its record must be put whatever the outcome, with `entries`."""
        try:
            return await self.find_change()
        except (Exception, RunStopped, asyncio.CancelledError) as problem:  # noqa: BLE001 - the step ran: its record decides
            return Found(max(1, self._scans), problem=problem)

    async def find_change(self) -> Found:
        """Save the files that have changed; `entries` puts their link into the checkpoint. Raises as `save`."""
        if self._scanner is None:
            return Found(0)
        async with self._scanning:
            self._scans += 1
            return Found(self._scans, await self._change(self._scanner))

    async def _change(self, scanner: Scanner) -> Change | None:
        scan = await anyio.to_thread.run_sync(scanner.scan)
        self._warn_of(scan.skipped)
        saved: dict[str, SavedFile] = {}
        store = await self._store()

        async def keep(path: str) -> None:
            try:
                file = await anyio.to_thread.run_sync(open_below, self.path, path)
            except (FileNotFoundError, NotADirectoryError, NotRegular):
                return  # removed since the scan, or replaced by a link, which is not followed
            except OSError as error:
                raise WorkspaceError(f"could not read {self._file(path)}: {error.strerror}") from error
            with file:
                stored = await store.save(self._file(path), file, self._run.touch)
            saved[path] = SavedFile(stored.hash, stored.size, scan.signatures[path][1])

        await _each(scan.changed, keep)
        files = Manifest.of({**scan.known, **saved}, scan.links, scan.folders)
        self._limits.check_all(self._what, files)  # some may have grown since the scan
        scanner.saved(scan, saved)
        former = self._files
        if files == former:
            return None
        data = encode_manifest(files)
        self._limits.check_manifest(self._what, len(data))
        stored = await store.save(f"the manifest of {self._what}", data)
        self._files = files
        link = WorkspaceLink(hash=stored.hash, size=stored.size, files=files.number, bytes=files.size)
        return Change(link, *files.changed_since(former))

    def _warn_of(self, skipped: Sequence[str]) -> None:
        """Log which files are not saved, each once."""
        new = sorted(set(skipped) - self._warned)
        if not new:
            return
        self._warned.update(new)
        named = listed([repr(shown_path(path)) for path in new], _SKIPPED)
        logger.bind(id=self._run.id).warning(
            "workspace: these special files, and names that are too long or too deep in folders, are not saved: {}",
            named,
        )

    def entries(self, found: Found, step: str | None) -> list[Entry]:
        """Return the entries of a change, or of the mark that the files of a step are not saved. They must be put.

        None are needed for a change if a later scan, which found these files too, has put its own.
        """
        if found.problem is not None:
            return self._mark(found.number, step, found.problem)
        history, change, entries = self._run.history, found.change, list[Entry]()
        if change is not None and found.number >= self._put:
            self._put = found.number
            data = change.link.model_dump_json().encode()
            history.saved[WORKSPACE] = data
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
            entries = [Entry(Kind.SAVED, WORKSPACE, data), self._run.next_entry(event)]
        if found.number > self._behind > 0:
            self._behind = 0
            history.saved.pop(UNSAVED, None)
            entries.append(Entry(Kind.DROP, UNSAVED, b""))
        return entries

    # files that could not be saved

    def _mark(self, number: int, step: str | None, problem: BaseException) -> list[Entry]:
        run, folder, self._behind = self._run, self.path, number
        keep_folder(folder, keep=True)
        why = str(problem) or "the run was stopped meanwhile"
        logger.bind(id=run.id).warning("step {} is recorded, and its files could not be saved yet: {}", step, why)
        if UNSAVED in run.history.saved:  # of an earlier step
            return []
        return [self._saved_mark(_Mark(folder=folder.name, host=RUNTIME.host(), step=step, why=why))]

    def _saved_mark(self, mark: _Mark) -> Entry:
        data = self._run.history.saved[UNSAVED] = mark.model_dump_json().encode()
        return Entry(Kind.SAVED, UNSAVED, data)

    def _read_mark(self) -> _Mark:
        return _decode_mark(self._what, self._run.history.saved[UNSAVED])

    async def catch_up(self, found: Found, *, nested: bool = False) -> None:
        """Save the files of recorded steps that were not saved with them, before the handler continues.

        nested: the step is a part of another one, which saves them.

        Parks the task while a limit is exceeded. Raises `WorkspaceError`, `ArtifactError`, `LeaseLost`, and
        `CancelledError` if the run was stopped.
        """
        if found.cut_off and found.problem is not None:
            raise found.problem
        if not nested:
            await self._save_unsaved()

    async def take_up(self) -> None:
        """Take over the folder of an earlier run, which the mark names, and save its files. Raises as `catch_up`."""
        mark, place = self._read_mark(), self._place
        folder = await anyio.to_thread.run_sync(take_folder, place, mark.folder)
        if folder is None:
            lost = WorkspaceError(
                f"{self._what}: the files of step {mark.step!r} could not be saved ({mark.why}), and their "
                f"folder {mark.folder!r} of host {mark.host} is not in {str(place)!r} on this host: run a "
                "worker there, or give it to this one (PERDURE_WORKSPACES), then replay the task; or start from an "
                f"earlier step: perdure task fork {self._run.id} --at STEP"
            )
            if mark.tries is not None and mark.host != RUNTIME.host():
                await self._park(lost)
            raise lost
        self._use(folder)
        self._behind = self._scans = 1
        if (link := self._run.history.saved.get(WORKSPACE)) is not None:
            self._files = await self._while_away(partial(self._manifest, _decode(f"task {self._run.id}", link)))
        await self._save_unsaved()

    async def _save_unsaved(self) -> None:
        run = self._run
        while self._behind:
            mark = self._read_mark()
            try:
                found = await self._while_away(self.find_change)
            except (WorkspaceTooLarge, ArtifactTooLarge) as error:
                await self._park(error)
            entries = self.entries(found, mark.step)
            ended = [] if mark.tries is None else [run.next_entry(Waited())]
            await run.recorder.put(*entries, *ended, wait=True)

    async def _park(self, error: Exception) -> NoReturn:
        """Park the task until a limit is raised, or the folder is there; it looks again from time to time."""
        run = self._run
        mark = self._read_mark()
        tries, why = mark.tries or 0, str(error)
        entries = [] if tries and mark.why == why else [run.next_entry(WaitStarted(what=WORKSPACE_ROOM, why=why))]
        if entries:
            logger.bind(task=run.envelope.task, id=run.id).error("parked until its files can be saved: {}", why)
        mark = mark.model_copy(update={"tries": tries + 1, "why": why})
        await run.recorder.put(self._saved_mark(mark), *entries, wait=True)
        delay = min(_LATEST, _SOONEST * 2.0 ** min(tries, 10))
        mail = message_after(max(run.history.mail, run.recorder.mail))
        await run.park(ParkReason(delay, WORKSPACE_ROOM, (mail,)))

    async def _while_away(self, act: Callable[[], Awaitable[T]]) -> T:
        """Repeat an act while the artifact store is away, as a run does while Redis is."""
        run, delays = self._run, Backoff().delays()
        while True:
            try:
                return await act()
            except StoreUnavailable as error:
                logger.bind(id=run.id).warning("could not reach the artifact store: {}; trying again", error)
            run.touch()
            if run.stopping:
                await run.boundary()
            await anyio.sleep(next(delays))

    # the start and the end of a run

    async def restore(self, data: bytes) -> None:
        """Fill the folder with the files of a link. Raises `WorkspaceError`, `ArtifactError`."""
        link = _decode(f"task {self._run.id}", data)
        await self._while_away(partial(self._restore, link))
        logger.bind(task=self._run.envelope.task, id=self._run.id).info(
            "restored the workspace: {} files, {:,} bytes", link.files, link.bytes
        )

    async def _restore(self, link: WorkspaceLink) -> None:
        self._limits.check_manifest(self._what, link.size)
        manifest = await self._manifest(link)
        self._limits.check_all(self._what, manifest)
        store, folder, files = await self._store(), self.path, manifest.files
        await anyio.to_thread.run_sync(lay_out_folder, folder, manifest)

        async def fetch(path: str) -> None:
            file, to = files[path], folder / path
            await store.fetch(self._file(path), file.hash, file.size, to)
            await anyio.to_thread.run_sync(_restored, to, file.mode)
            self._run.touch()

        await _each(files, fetch)
        await anyio.to_thread.run_sync(finish_folder, folder, manifest)
        self._files = manifest
        if self._scanner is not None:
            scan = await anyio.to_thread.run_sync(self._scanner.scan)
            self._scanner.saved(scan, {path: files[path] for path in scan.changed if path in files})

    async def _manifest(self, link: WorkspaceLink) -> Manifest:
        store = await self._store()
        data = await store.read(f"the manifest of {self._what}", link.hash, link.size)
        return decode_manifest(self._what, data)

    async def close(self, *, keep: bool = False) -> None:
        """Remove the folder. keep: not if it has files that are not saved; another run takes it over."""
        folder, self._folder, self._scanner = self._folder, None, None
        if folder is not None:
            end = release_folder if keep and self._behind else remove_folder
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(end, folder)

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

    async def find_change(self) -> Found:
        return Found(0)


def workspace_of(run: Run) -> Workspace:
    """Return the workspace of a run, made at its first use."""
    files = run.files
    if not isinstance(files, Workspace):
        files = run.files = Workspace(run, run.settings)
    return files


async def restore_workspace(run: Run, inherited: bytes | None = None) -> None:
    """Restore the workspace that earlier runs of a task saved, if they saved one. Raises as `Workspace.restore`.

    inherited: link of files that the task starts with, unless earlier runs of it have saved others.
    """
    await run.history.read_unfinished(WORKSPACE)
    await run.history.read_unfinished(UNSAVED)
    if inherited is None and UNSAVED in run.history.saved:
        await workspace_of(run).take_up()
        return
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
    for file in decode_manifest(what, await store.read(what, link.hash, link.size)).files.values():
        yield file.hash


async def task_workspace_files(
    gateway: Gateway, partition: Partition, task_id: str, store: ArtifactStore
) -> AsyncIterator[tuple[str, SavedFile]]:
    """Yield the manifest of a task's workspace and its files, each with its name for errors."""
    for data in (await checkpoint_fields(gateway, partition, task_id, WORKSPACE)).values():
        link, what = _decode(f"task {task_id}", data), f"the workspace of task {task_id}"
        yield f"the manifest of {what}", SavedFile(link.hash, link.size)
        manifest = await store.read(f"the manifest of {what}", link.hash, link.size)
        for path, file in decode_manifest(what, manifest).files.items():
            yield f"file {path!r} in {what}", file


def check_workspace_field(task_id: str, key: str, data: bytes) -> None:
    """Check a checkpoint field that leads to files of a workspace. Raises `WorkspaceError`; other fields are valid."""
    if key == WORKSPACE:
        _decode(f"task {task_id}", data)
    elif key == UNSAVED:
        check_folder_name(_decode_mark(f"the workspace of task {task_id}", data).folder)


def check_saved_link(kind: str, data: bytes) -> None:
    """Check the link that an event of this type has, if it has one. Raises `WorkspaceError`, `ValueError`."""
    if kind in ("forked", "workspace_saved"):
        link = saved_link(kind, orjson.loads(data))
        if link is not None:
            _decode("the event", orjson.dumps(link))


def _decode_mark(what: str, data: bytes) -> _Mark:
    try:
        return _Mark.model_validate_json(data)
    except ValidationError as error:
        raise WorkspaceError(f"could not read which files of {what} are not saved: {first_problem(error)}") from None


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

"""Shared workspaces in a drop folder: `DIR/shared/NAME/` has the files of the shared workspace NAME, both ways.

A hidden file there notes version and hash of each file as both sides had it last. What has changed since on one side
only is copied to the other, removals too: into the workspace by a write that requires the noted version, into the
folder after the file there was found unchanged. What has changed on both sides is kept twice: the file of the folder
as `NAME.conflict`, and that of the workspace under its name. If the hidden file is gone, as with the whole folder,
nothing counts as removed.

    dies between a copy and its note         both sides have the same bytes: the next look notes them
    another program writes meanwhile         the write is refused (`FileConflict`), and the next look sees both changes
    dies after a file was made a conflict    the file is missing, and the workspace has another one: it is copied
    the workspace has expired                it has another birth: nothing that was noted counts, and files are written
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field, ValidationError

from ....queues.errors import PerdureError, Unavailable
from ....queues.private_files import replaced_file
from ....queues.regular_files import kind_of, open_below, open_folder_below, read_regular
from ...errors import FileConflict
from ...workspace.manifest import shown_path
from ...workspace.shared_workspace import SharedFile, SharedWorkspace
from .folder import (
    UNFINISHED,
    FileChanged,
    FileOutcome,
    Notes,
    Rest,
    Signature,
    exists,
    hash_of,
    list_names,
    open_in,
)

STATE: Final = ".perdure-drop.json"
_NEW: Final = ".perdure-drop.new"

_STATE_BYTES: Final = 1 << 26
_DEEPEST: Final = 64
_CONFLICT: Final = re.compile(r"\.conflict(-[0-9a-f]{8})?$")


class _Known(BaseModel):
    """A file as both sides had it last."""

    version: int
    hash: str
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, version: int, digest: str, state: Signature) -> _Known:
        return cls(version=version, hash=digest, **state._asdict())

    @property
    def state(self) -> Signature:
        return Signature(self.inode, self.size, self.mtime_ns)


class _Noted(BaseModel):
    """Content of the hidden file. born: see `WorkspaceSnapshot`."""

    born: str = ""
    files: dict[str, _Known] = Field(default_factory=dict)


class SharedFolder:
    """The folder of a shared workspace."""

    def __init__(
        self,
        root: Path,
        path: str,
        workspace: SharedWorkspace,
        notes: Notes,
        report: Callable[[FileOutcome], None],
    ) -> None:
        """path: from the drop folder, with `/` between names."""
        self._root = root
        self._path = path
        self._files = workspace
        self._notes = notes
        self._report = report
        self._rest = Rest()
        self._noted = _Noted()
        self._noted_state: Signature | None = None
        self._written = b""

    async def sync(self, rest: Rest) -> int:
        """Copy what has changed; return the number of files that wait for a reason that a message names.

        Raises:
            Unavailable: Redis is away.
            OSError: The folder cannot be read or written to.
            PerdureError: The workspace cannot be read.
        """
        self._rest, waiting = rest, 0
        snapshot, here = await self._files.snapshot(), self._scan()
        self._load()
        if self._noted.born not in ("", snapshot.born):
            self._noted.files.clear()
        self._noted.born = snapshot.born
        try:
            for path in sorted(here.keys() | snapshot.files.keys() | self._noted.files.keys()):
                if path in snapshot.files and snapshot.files[path] is None:
                    continue
                if any(is_left(name) for name in path.split("/")):
                    self._say(path, "it is in the workspace only: files with such names are left alone")
                    continue
                try:
                    await self._sync(path, here.get(path), snapshot.files.get(path))
                except Unavailable:
                    raise
                except (FileChanged, FileConflict, FileNotFoundError):  # another program was faster: see the next look
                    rest.restless += 1
                except (OSError, PerdureError) as error:
                    waiting += 1
                    reason = error.strerror if isinstance(error, OSError) else None
                    self._say(path, f"it is not copied: {reason or error}")
        finally:
            self._save()
        return waiting

    async def _sync(self, path: str, here: Signature | None, there: SharedFile | None) -> None:
        """Copy a file if it has changed. here: its state in the folder. there: the file of the workspace."""
        known = self._noted.files.get(path)
        version = 0 if there is None else there.version
        changed_there = version != (0 if known is None else known.version)
        if here is None:
            if there is None:
                self._noted.files.pop(path, None)
            elif changed_there:
                await self._fetch(path, there, None)
            elif self._rest.of((self._path, path), None):
                await self._files.remove(path, expected=version)
                del self._noted.files[path]
                self._tell(path, "removed from", "removed_there", version)
            return
        if known is not None and known.state == here and not changed_there:
            return
        if not self._rest.of((self._path, path), here):
            return
        digest = self._hash(path, here)
        if there is not None and there.hash == digest:
            self._noted.files[path] = _Known.of(version, digest, here)
        elif known is None or known.hash != digest:
            if changed_there and there is not None:
                await self._keep_both(path, here, there)
            else:
                await self._write(path, here, version)
        elif there is not None:
            await self._fetch(path, there, here)
        else:
            self._remove(path, here, known.version)

    async def _write(self, path: str, here: Signature, version: int) -> None:
        with open_below(self._root, f"{self._path}/{path}") as file:
            stored = await self._files.write(path, file, expected=version)
            self._noted.files[path] = _Known.of(stored.version, stored.hash, here)
            # a change while it was read has another state than the one that is noted: the next look sees it
        self._tell(path, "written to", "written", stored.version)

    async def _fetch(self, path: str, there: SharedFile, here: Signature | None) -> None:
        """Copy a file into the folder. here: the state that it must have there; None if there must be none."""
        data = await self._files.read(there)
        with self._open() as top, self._parent(path) as (place, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(_NEW, flags, 0o666, dir_fd=top), "wb") as file:
                file.write(data)
            state = Signature.of(os.stat(_NEW, dir_fd=top, follow_symlinks=False))
            try:
                _check(place, name, here)
                os.rename(_NEW, name, src_dir_fd=top, dst_dir_fd=place)
            except BaseException:
                os.unlink(_NEW, dir_fd=top)
                raise
        self._noted.files[path] = _Known.of(there.version, there.hash, state)
        self._tell(path, "copied from", "copied", there.version)

    def _remove(self, path: str, here: Signature, version: int) -> None:
        with self._parent(path) as (place, name):
            _check(place, name, here)
            os.unlink(name, dir_fd=place)
        del self._noted.files[path]
        self._tell(path, "removed here, as in", "removed_here", version)

    async def _keep_both(self, path: str, here: Signature, there: SharedFile) -> None:
        with self._parent(path) as (place, name):
            kept = f"{name}.conflict"
            if exists(place, kept):
                kept += f"-{self._hash(path, here)[:8]}"
            _check(place, name, here)
            os.rename(name, kept, src_dir_fd=place, dst_dir_fd=place)
        self._tell(path, f"changed here and there, and kept here as {shown_path(kept)}; in", "conflict", there.version)
        await self._fetch(path, there, None)

    def _hash(self, path: str, here: Signature) -> str:
        """Return the hash of a file. Raises `FileChanged`."""
        known = self._noted.files.get(path)
        if known is not None and known.state == here:
            return known.hash
        with open_below(self._root, f"{self._path}/{path}") as file:
            digest = hash_of(file)
            if Signature.of(os.fstat(file.fileno())) != here:
                raise FileChanged
            return digest

    def _scan(self) -> dict[str, Signature]:
        """Return the files of the folder, by path. Raises `OSError`: what cannot be read must not count as removed."""
        found: dict[str, Signature] = {}

        def scan(place: int, prefix: str, depth: int) -> None:
            for name in list_names(place):
                if is_left(name):
                    continue
                path = f"{prefix}{name}"
                try:
                    state = os.stat(name, dir_fd=place, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(state.st_mode):
                    found[path] = Signature.of(state)
                elif not stat.S_ISDIR(state.st_mode):
                    self._say(path, f"it is left there: it must be a regular file, and is {kind_of(state)}")
                elif depth == _DEEPEST:
                    self._say(path, f"it is left there: a file must be in at most {_DEEPEST} folders")
                else:
                    below = open_in(place, name)
                    try:
                        scan(below, f"{path}/", depth + 1)
                    finally:
                        os.close(below)

        with self._open() as place:
            scan(place, "", 1)
        return found

    def _load(self) -> None:
        """Read what is noted, if another program has changed it."""
        path = self._root / self._path / STATE
        try:
            state = Signature.of(path.lstat())
            if state == self._noted_state:
                return
            self._noted = _Noted.model_validate_json(read_regular(path, _STATE_BYTES, links=False))
            self._noted_state = state
        except FileNotFoundError:
            self._noted = _Noted()
        except ValidationError:
            self._noted = _Noted()
            self._say(STATE, "it cannot be read: files that differ are kept twice")
        self._written = self._noted.model_dump_json().encode()

    def _save(self) -> None:
        data = self._noted.model_dump_json().encode()
        if data != self._written:
            path = self._root / self._path / STATE
            with replaced_file(path) as file:
                file.write(data)
            self._written, self._noted_state = data, Signature.of(path.lstat())

    @contextmanager
    def _open(self) -> Iterator[int]:
        place = open_folder_below(self._root, self._path)
        try:
            yield place
        finally:
            os.close(place)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a file, which is made if it is not there; give it and the name. No part may be a link."""
        *parents, name = path.split("/")
        place = open_folder_below(self._root, self._path)
        try:
            for parent in parents:
                with suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=place)
                outer, place = place, open_in(place, parent)
                os.close(outer)
            yield place, name
        finally:
            os.close(place)

    def _say(self, path: str, text: str) -> None:
        self._notes.say(shown_path(f"{self._path}/{path}"), text)

    def _tell(self, path: str, what: str, outcome: str, version: int) -> None:
        shown = shown_path(f"{self._path}/{path}")
        data = {"file": shown, "outcome": outcome, "workspace": self._files.name, "version": version}
        self._report(FileOutcome(data, f"{shown}: {what} shared workspace {self._files.name!r}"))


def is_left(name: str) -> bool:
    """Return whether files and folders of a name are on one side only."""
    return name.startswith(".") or name.endswith(UNFINISHED) or _CONFLICT.search(name) is not None


def _check(place: int, name: str, wanted: Signature | None) -> None:
    """Raise `FileChanged` if a file is not in the state in which a look has found it."""
    try:
        found = Signature.of(os.stat(name, dir_fd=place, follow_symlinks=False))
    except FileNotFoundError:
        found = None
    if found != wanted:
        raise FileChanged

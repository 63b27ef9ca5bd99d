"""Files of a drop folder: which of them rest, and their moves to `.taken`, `processed` and `rejected`.

All folders are opened without following links, and a move names its folders by descriptors: a link that another program
puts into the place of a folder leads nowhere.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ....queues.regular_files import kind_of, open_below, open_folder_below
from ....queues.runtime import RUNTIME
from ...workspace.manifest import shown_path
from ..support.errors import Failed
from ..support.options import MAX_LINE

TAKEN: Final = ".taken"
PROCESSED: Final = "processed"
REJECTED: Final = "rejected"

REST: Final = 1.0
"""Seconds between two looks in which a file must not change."""

UNFINISHED: Final = (".tmp", ".part")
_CHUNK: Final = 1 << 20
_LONGEST: Final = 200
"""Characters of a file's name that the name of its error file repeats: the system allows 255 bytes."""


class FileChanged(Exception):
    """A file has changed while it was read."""


class NothingPublished(Exception):
    """No worker has published its tasks, so nothing says whether a file is valid."""

    def __init__(self) -> None:
        super().__init__("no worker has published its tasks yet: start one")


class Signature(NamedTuple):
    """State of a file by its metadata: a write changes it, a move does not."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Signature:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class Rest:
    """Looks at things that change, to find those that rest: two looks, at least `REST` seconds apart, see the same."""

    def __init__(self, seconds: float = REST) -> None:
        self._seconds = seconds
        self._before: dict[Hashable, tuple[object, float]] = {}
        self._seen: dict[Hashable, tuple[object, float]] = {}
        self.restless = 0

    def begin(self) -> None:
        """Begin a look. What the one before has not seen is forgotten."""
        self._before, self._seen, self.restless = self._seen, {}, 0

    def of(self, key: Hashable, state: object) -> bool:
        """Return whether a thing rests. state: it rests while this is equal."""
        now = RUNTIME.monotonic()
        before = self._before.get(key)
        since = before[1] if before is not None and before[0] == state else now
        self._seen[key] = (state, since)
        rests = now - since >= self._seconds
        self.restless += not rests
        return rests


class Notes:
    """Messages that are printed once for as long as each look repeats them."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._before: dict[str, str] = {}
        self._said: dict[str, str] = {}

    def begin(self) -> None:
        """Begin a look."""
        self._before, self._said = self._said, {}

    def say(self, subject: str, text: str) -> None:
        """Print a message about a subject, unless the look before has said the same of it."""
        if self._before.get(subject) != text and self._said.get(subject) != text:
            self._show(f"{subject}: {text}")
        self._said[subject] = text

    def __len__(self) -> int:
        return len(self._said)


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """Outcome of a file.

    Attributes:
        data: For programs.
        message: For people.
        id: Id of the task; None without one.
    """

    data: dict[str, Any]
    message: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the drop folder, whose files are taken. path: from the drop folder, with `/` between names."""

    root: Path
    path: str

    def names(self, ends: tuple[str, ...], rest: Rest, notes: Notes) -> list[str]:
        """Return the names of the files that rest, in the order of their last change.

        Others are left where they are, with a message. Hidden and unfinished files have none. Raises `OSError`.

        Args:
            ends: Ends of the names of files that are taken.
        """
        found: list[tuple[int, str]] = []
        with self._open() as place:
            for name in list_names(place):
                if name.startswith(".") or name.endswith(UNFINISHED) or name in (PROCESSED, REJECTED):
                    continue
                shown = shown_path(f"{self.path}/{name}")
                try:
                    state = os.stat(name, dir_fd=place, follow_symlinks=False)
                    if not stat.S_ISREG(state.st_mode):
                        notes.say(shown, f"it is left there: it must be a regular file, and is {kind_of(state)}")
                    elif not name.endswith(ends):
                        notes.say(shown, f"it is left there: its name must end in {' or '.join(ends)}")
                    elif rest.of((self.path, name), Signature.of(state)):
                        found.append((state.st_mtime_ns, name))
                except FileNotFoundError:  # its writer has renamed it
                    continue
        return [name for _, name in sorted(found)]

    def taken(self) -> list[str]:
        """Return the names of the files that were taken and not settled, in the order of their last change."""
        with self._open() as place, suppress(FileNotFoundError):
            below = open_in(place, TAKEN)
            try:
                states = [(os.stat(name, dir_fd=below, follow_symlinks=False), name) for name in list_names(below)]
            finally:
                os.close(below)
            return [name for state, name in sorted(states, key=lambda one: (one[0].st_mtime_ns, one[1]))]
        return []

    def take(self, name: str) -> bool:
        """Move a file to `.taken`; return whether it was there. Raises `OSError` if it cannot be read or moved."""
        try:
            open_below(self.root, f"{self.path}/{name}").close()
            with self._open() as place, _made(place, TAKEN) as taken:
                if exists(taken, name):  # an earlier file of this name is in hand
                    return False
                os.rename(name, name, src_dir_fd=place, dst_dir_fd=taken)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> TakenFile:
        """Open a file in `.taken`. Raises `OSError`, `FileChanged`."""
        file = open_below(self.root, f"{self.path}/{TAKEN}/{name}")
        try:
            return TakenFile(self, name, file)
        except BaseException:
            file.close()
            raise

    def process(self, name: str, digest: str) -> None:
        """Move a file from `.taken` to `processed`."""
        with self._open() as place, _made(place, TAKEN) as taken, _made(place, PROCESSED) as processed:
            _move(taken, name, processed, _free_name(processed, name, digest))

    def reject(self, name: str, digest: str, reason: str) -> str:
        """Move a file from `.taken` to `rejected`, with its reason beside it; return its path from the drop folder.

        The reason is written first: every rejected file has one, also if the command is killed in between.
        """
        with self._open() as place, _made(place, TAKEN) as taken, _made(place, REJECTED) as rejected:
            kept = _free_name(rejected, name, digest)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            error = os.open(f"{kept[:_LONGEST]}.error.txt", flags, 0o666, dir_fd=rejected)
            with os.fdopen(error, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{reason}\n")
            _move(taken, name, rejected, kept)
        return f"{self.path}/{REJECTED}/{kept}"

    @contextmanager
    def _open(self) -> Iterator[int]:
        place = open_folder_below(self.root, self.path)
        try:
            yield place
        finally:
            os.close(place)


class TakenFile:
    """An open file in `.taken`, with its identity.

    Attributes:
        shown: Its path from the drop folder, before it was taken.
        digest: Digest of path, size, time of the last change and bytes.
    """

    def __init__(self, folder: Folder, name: str, file: IO[bytes]) -> None:
        self.folder, self.name, self.file = folder, name, file
        self.path = f"{folder.path}/{name}"
        self.shown = shown_path(self.path)
        self._state = Signature.of(os.fstat(file.fileno()))
        content = hash_of(file)
        self.check_unchanged()
        what = f"{self._state.size} {self._state.mtime_ns} {content} ".encode() + os.fsencode(self.path)
        self.digest = hashlib.blake2b(what, digest_size=16).hexdigest()
        file.seek(0)

    def read(self) -> bytes:
        """Return all bytes. Raises `Failed` for a file that is too large, `FileChanged`."""
        if self._state.size > MAX_LINE:
            raise Failed(f"it has more than {MAX_LINE:,} bytes")
        self.file.seek(0)
        data = self.file.read(self._state.size)
        self.check_unchanged()
        return data

    def check_unchanged(self) -> None:
        """Raise `FileChanged` if the file was written to since it was opened."""
        if Signature.of(os.fstat(self.file.fileno())) != self._state:
            raise FileChanged

    def __enter__(self) -> TakenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def folders(root: Path, path: str, notes: Notes, inside: str) -> list[str]:
    """Return the names of the folders in a folder, without hidden ones. Files are left there, with a message.

    inside: where files belong. Raises `OSError`.
    """
    found: list[str] = []
    place = open_folder_below(root, path)
    try:
        for name in sorted(list_names(place)):
            with suppress(FileNotFoundError):
                state = os.stat(name, dir_fd=place, follow_symlinks=False)
                if name.startswith(".") or name.endswith(UNFINISHED):
                    continue
                if stat.S_ISDIR(state.st_mode):
                    found.append(name)
                    continue
                regular = stat.S_ISREG(state.st_mode)
                why = f"files belong into {inside}" if regular else f"it must be a folder, and is {kind_of(state)}"
                notes.say(shown_path(f"{path}/{name}".lstrip("/")), f"it is left there: {why}")
    finally:
        os.close(place)
    return found


def list_names(place: int) -> list[str]:
    """Return the names in an open folder."""
    return os.listdir(place)


def hash_of(file: IO[bytes]) -> str:
    """Return the SHA-256 of the rest of a file in hexadecimal."""
    content = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        content.update(chunk)
    return content.hexdigest()


@contextmanager
def _made(place: int, name: str) -> Iterator[int]:
    """Open a folder, which is made if it is not there."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=place)
    made = open_in(place, name)
    try:
        yield made
    finally:
        os.close(made)


def open_in(place: int, name: str) -> int:
    """Open a folder in an open one. Raises `OSError`, also for a link."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)


def exists(place: int, name: str) -> bool:
    """Return whether a folder has a name."""
    try:
        os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _free_name(place: int, name: str, digest: str) -> str:
    """Return the name of a file; if another file has it, with a part of its digest before the end."""
    if not exists(place, name):
        return name
    stem, dot, end = name.rpartition(".")
    return f"{stem[:_LONGEST]}-{digest[:12]}{dot}{end}"


def _move(source: int, name: str, target: int, kept: str) -> None:
    with suppress(FileNotFoundError):  # a second command that works on the folder has moved it
        os.rename(name, kept, src_dir_fd=source, dst_dir_fd=target)

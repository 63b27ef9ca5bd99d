"""Opening of files that another program or user may have made, or may replace at any time.

A name may lead to a device, a pipe, a socket or a link instead of the file that is expected: reading it would hang, or
fill the memory, or print what another user owns. The functions here open regular files only, never wait, and read no
more than a limit. They raise `OSError`, as `open` does, with the reason as its `strerror`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Final

_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
_FOLDER: Final = getattr(os, "O_DIRECTORY", 0)

_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotRegular(OSError):
    """The name does not lead to a regular file."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it must be a regular file, and is {kind}", path)


def open_regular(path: str | Path, *, links: bool = True, limit: int | None = None) -> IO[bytes]:
    """Open a regular file to read.

    Args:
        links: Follow symbolic links.
        limit: Largest size in bytes, by its metadata; `read_regular` checks what is read.

    Raises:
        OSError: `NotRegular` for anything but a regular file.
    """
    shown = os.fspath(path)
    _check(Path(path).stat(follow_symlinks=links), shown)  # so that no device is opened, which may have an effect
    return _opened(_descriptor(shown, _FLAGS | (0 if links else _NO_LINK)), shown, limit)


def read_regular(path: str | Path, limit: int, *, links: bool = True) -> bytes:
    """Return the bytes of a regular file of at most so many bytes. Raises `OSError`, see `open_regular`."""
    with open_regular(path, links=links, limit=limit) as file:
        return read_bounded(file, limit, os.fspath(path))


def read_bounded(file: IO[bytes], limit: int, shown: str) -> bytes:
    """Return what is left of a file. Raises `OSError` if it has more bytes than the limit."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_large(shown, limit)
    return data


def open_below(folder: Path, path: str, *, limit: int | None = None) -> IO[bytes]:
    """Open a regular file in a folder, where no part of its path may be a link. The folder itself may be one.

    path: from the folder, with `/` between names. limit: see `open_regular`. Raises `OSError`.
    """
    if os.open not in os.supports_dir_fd:  # Windows
        return open_regular(folder / path, links=False, limit=limit)
    parent, _, name = path.rpartition("/")
    place = open_folder_below(folder, parent)
    try:
        _check(os.stat(name, dir_fd=place, follow_symlinks=False), path)
        return _opened(_descriptor(name, _FLAGS | _NO_LINK, path, place), path, limit)
    finally:
        os.close(place)


def open_folder_below(folder: Path, path: str) -> int:
    """Return a descriptor of a folder within another one, where no part of the path may be a link. Raises `OSError`.

    path: from the folder, with `/` between names; empty for the folder itself, which may be a link.
    """
    names = path.split("/") if path else []
    if any(name in ("", ".", "..") for name in names):
        raise OSError(errno.EINVAL, "its path must stay within the folder", path)
    place = os.open(folder, _FLAGS | _FOLDER)
    for name in names:
        outer = place
        try:
            place = _descriptor(name, _FLAGS | _FOLDER | _NO_LINK, path, outer)
        finally:
            os.close(outer)
    return place


def kind_of(found: os.stat_result) -> str:
    """Return the kind of what is no regular file, such as "a symbolic link"."""
    return next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), "none")


def _descriptor(name: str, flags: int, shown: str | None = None, place: int | None = None) -> int:
    shown = name if shown is None else shown
    try:
        return os.open(name, flags) if place is None else os.open(name, flags, dir_fd=place)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegular(shown, "a symbolic link") from None
        if error.errno == errno.ENXIO:
            raise NotRegular(shown, "a socket or a device") from None
        raise


def _opened(descriptor: int, shown: str, limit: int | None) -> IO[bytes]:
    """Return the file of a descriptor, which is closed if it cannot be used."""
    try:
        found = os.fstat(descriptor)
        _check(found, shown)
        if limit is not None and found.st_size > limit:
            raise _too_large(shown, limit)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check(found: os.stat_result, shown: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotRegular(shown, kind_of(found))


def _too_large(shown: str, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {limit:,} bytes", shown)

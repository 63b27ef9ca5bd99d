"""Protocol of artifact backends. All methods are called in threads and may block.

Layout: the object with hash `abcdef...` is the file `ab/cdef...`; uploads in progress are in `incoming/`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

import anyio.to_thread

from ...queues.regular_files import open_regular
from ...queues.transport.value_store import is_sha256
from ..errors import ArtifactError

INCOMING: Final = "incoming"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Object in a store. size: bytes. modified: seconds since the epoch, by the store's clock."""

    hash: str
    size: int
    modified: float


class Upload(Protocol):
    """Upload in progress, under a temporary name."""

    def write(self, data: bytes | memoryview) -> None: ...

    def keep(self, digest: str, size: int) -> None:
        """Rename the upload to its hash.

        An object that is there already with the same bytes gets a new modification time. Raises `WrongSize` if it has
        another size, so that it cannot have the same bytes.
        """
        ...

    def discard(self) -> None:
        """Remove the temporary file. May be called twice, and after `keep`."""
        ...


class ArtifactBackend(Protocol):
    """Place that stores objects.

    Raises `FileNotFoundError` for a missing object, and any other exception if it is unreachable.
    """

    @property
    def shown(self) -> str:
        """Location without credentials."""
        ...

    def upload(self) -> Upload: ...

    def open(self, digest: str, size: int) -> IO[bytes]:
        """Open an object to read, from its first byte. Raises `WrongSize` if it is known to have another size.

        Raises `NotRegular` if something else is in its place. The file can be read again after `seek(0)`.
        """
        ...

    def path(self, digest: str) -> Path | None:
        """Return the file of an object; None if the place is not a local folder."""
        ...

    def objects(self) -> Iterator[StoredObject]:
        """Yield all objects, ordered by hash; read in pieces, so that memory does not grow with their number."""
        ...

    def remove(self, digest: str, before: float) -> bool:
        """Delete an object unless it was modified at that time or later, which is checked immediately before."""
        ...

    def remove_stale_uploads(self, before: float) -> int:
        """Delete unfinished uploads that were started before that time; return their number."""
        ...


class WrongSize(Exception):
    """The object under this hash has another size."""


def path_of(digest: str) -> str:
    """Return the path of an object within the store. Raises `ValueError` for anything but a hash."""
    if not is_sha256(digest):
        raise ValueError("the name of an object must be a SHA-256 in hexadecimal")
    return f"{digest[:2]}/{digest[2:]}"


CHUNK: Final = 1 << 20
"""Size of a read or write in bytes."""

Data = bytes | bytearray | memoryview | str | Path | IO[bytes] | AsyncIterator[bytes]
"""Bytes; text, saved as UTF-8; a `Path` of a regular file; an open binary file, sync or async; a stream of bytes."""


async def chunks_of(what: str, data: Data) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield the data in chunks. what: names the artifact in errors. Raises `ArtifactError`."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]
    elif isinstance(data, Path):
        file = await _in_thread(what, data, open_regular, data)
        try:
            while chunk := await _in_thread(what, data, file.read, CHUNK):
                yield chunk
        finally:
            file.close()
    elif isinstance(data, AsyncIterator):
        async for chunk in data:
            yield _checked(what, chunk)
    elif callable(read := getattr(data, "read", None)):
        while chunk := await _read(what, data, read):
            yield _checked(what, chunk)
    else:
        raise ArtifactError(
            f"{what}: data must be bytes, text, a Path, a binary file or an async iterator of bytes, "
            f"got {type(data).__name__}"
        )


async def _read(what: str, data: Any, read: Any) -> Any:
    if inspect.iscoroutinefunction(read):
        return await read(CHUNK)
    chunk = await _in_thread(what, data, read, CHUNK)
    return await chunk if inspect.isawaitable(chunk) else chunk


async def _in_thread(what: str, data: Any, function: Any, *args: Any) -> Any:
    """Call a method of a file in a thread. A failure is blamed on the data, not on the store."""
    try:
        return await anyio.to_thread.run_sync(function, *args)
    except (OSError, ValueError) as error:
        named = data if isinstance(data, Path) else getattr(data, "name", data)
        problem = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{what}: could not read {str(named)!r}: {problem}") from error


def _checked(what: str, chunk: object) -> bytes | memoryview:
    if not isinstance(chunk, bytes | bytearray | memoryview):
        raise ArtifactError(f"{what}: data must come as bytes, got {type(chunk).__name__}; open files with 'rb'")
    return chunk if isinstance(chunk, bytes) else memoryview(chunk).cast("B")

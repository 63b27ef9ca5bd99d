"""Protocol of artifact backends. All methods are called in threads and may block.

Layout: the object with hash `abcdef...` is the file `ab/cdef...`; uploads in progress are in `incoming/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

from ...queues.transport.value_store import is_sha256

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

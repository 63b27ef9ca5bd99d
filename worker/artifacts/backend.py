"""What a place must be able to do to be a store of artifacts. All of it is called in threads, and may block.

Layout: the object with hash `abcdef...` is the file `ab/cdef...`; what is being written is in `incoming/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

__all__ = ["INCOMING", "ArtifactBackend", "Object", "Upload", "is_hash", "path_of"]

INCOMING: Final = "incoming"

_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Object:
    """What is in a store under a hash. size: bytes. modified: seconds since the epoch, by the store's clock."""

    hash: str
    size: int
    modified: float


class Upload(Protocol):
    """Something that is being written, under a temporary name."""

    def write(self, data: bytes | memoryview) -> None: ...

    def keep(self, digest: str, size: int) -> None:
        """Give it the name of its hash. What is there already, with the same bytes, counts as new from now on.

        `WrongSize` where what is there has another size, so that it cannot be the same.
        """
        ...

    def discard(self) -> None:
        """Nothing of it stays under the temporary name. May be called twice, and after `keep`."""
        ...


class ArtifactBackend(Protocol):
    """A place. Raises `FileNotFoundError` for what is not there, and whatever it raises where it cannot be reached."""

    @property
    def shown(self) -> str:
        """Where it is, without any password."""
        ...

    def draft(self) -> Upload: ...

    def open(self, digest: str) -> IO[bytes]: ...

    def path(self, digest: str) -> Path | None:
        """The file, where the place is a local folder."""
        ...

    def objects(self) -> Iterator[Object]:
        """All that is there, in the order of the hashes; in pieces, so that memory does not grow with their number."""
        ...

    def remove(self, digest: str, before: float) -> bool:
        """Delete an object unless it was modified at that time or later, which is looked up here and now."""
        ...

    def remove_drafts(self, before: float) -> int:
        """Delete what was begun before that time and never kept; returns how many."""
        ...


class WrongSize(Exception):
    """Under this hash there is something of another size."""

    def __init__(self, size: int) -> None:
        super().__init__(f"there is an object of {size} bytes under this hash")
        self.size = size


def path_of(digest: str) -> str:
    """Where in the store an object is."""
    return f"{digest[:2]}/{digest[2:]}"


def is_hash(text: str) -> bool:
    """Whether it is a SHA-256 in hexadecimal: whatever else lies in a store is none of ours."""
    return len(text) == 64 and set(text) <= _HEX

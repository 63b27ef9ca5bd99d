"""A store of artifacts: bytes under their own hash (SHA-256), checked whenever they are read.

Which names artifacts can have: those that can be a file's wherever somebody fetches them to.

From the setting to the store: a folder, or a URL.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
import unicodedata
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import anyio
import anyio.to_thread

from ..errors import (
    ArtifactDamaged,
    ArtifactError,
    ArtifactMissing,
    ArtifactTooLarge,
    BadArtifactName,
    ConfigurationError,
    StoreUnavailable,
)
from .backend import ArtifactBackend, Object, WrongSize
from .chunks import CHUNK, Data, chunks_of
from .local import LocalBackend

__all__ = ["ArtifactStore", "Kept", "Stored", "check_artifact_name", "open_store"]

R = TypeVar("R")

_AT_ONCE = 1000
"""Objects that are listed between two chances for others to run."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What was saved. hash: SHA-256 in hexadecimal. size: bytes."""

    hash: str
    size: int


Kept = Object


class ArtifactStore:
    """Saves and reads in pieces, in threads: memory does not grow with what is saved, and the event loop goes on.

    Every method takes `what`, which names the artifact (and its task) in errors.
    """

    def __init__(self, shelf: ArtifactBackend, *, limit: int) -> None:
        """limit: bytes that one artifact may have."""
        self._shelf = shelf
        self.limit = limit

    @property
    def shown(self) -> str:
        """Where it is, without any password."""
        return self._shelf.shown

    async def save(self, what: str, data: Data, on_progress: Callable[[], None] = lambda: None) -> Stored:
        """Store bytes. What is there already is safe from the collector for its grace.

        on_progress: hears of each piece. Cancelled or killed at any moment, it leaves nothing under the hash that is
        not complete.
        Raises `ArtifactTooLarge`, `StoreUnavailable`, `ArtifactDamaged`; `ArtifactError` for data that cannot be read.
        """
        digest, size = hashlib.sha256(), 0
        draft = await self._call(what, "written to", self._shelf.draft)
        try:

            def take(chunk: bytes | memoryview) -> None:
                digest.update(chunk)
                draft.write(chunk)

            async for chunk in chunks_of(what, data):
                size += len(chunk)
                if size > self.limit:
                    raise ArtifactTooLarge(what, self.limit)
                await self._call(what, "written to", take, chunk)
                on_progress()
            stored = Stored(digest.hexdigest(), size)
            try:
                await self._call(what, "written to", draft.keep, stored.hash, size)
            except WrongSize as wrong:
                self._damaged(what, stored.hash, f"has {wrong.size} bytes there, and {size} when it is saved")
        finally:
            with anyio.CancelScope(shield=True), suppress(StoreUnavailable):  # what is left of it is collected later
                await self._call(what, "written to", draft.discard)
        return stored

    async def chunks(self, what: str, digest: str, size: int) -> AsyncIterator[bytes]:
        """The bytes, a piece at a time. That they are the right ones is known when the last piece has come.

        Raises `ArtifactMissing`, `ArtifactDamaged` (at the end, or as soon as there are too many), `StoreUnavailable`.
        """
        try:
            file = await self._call(what, "read from", self._shelf.open, digest)
        except FileNotFoundError:
            raise ArtifactMissing(what, digest, self.shown) from None
        found, seen = hashlib.sha256(), 0
        try:
            while chunk := await self._call(what, "read from", file.read, CHUNK):
                seen += len(chunk)
                if seen > size:
                    self._damaged(what, digest, f"has more than its {size} bytes")
                found.update(chunk)
                yield chunk
        finally:
            file.close()
        if found.hexdigest() != digest:
            self._damaged(what, digest, f"has {seen} bytes with the hash {found.hexdigest()}, where {size} were saved")

    async def read(self, what: str, digest: str, size: int) -> bytes:
        """All of the bytes, once they are known to be the right ones. Raises as `chunks` does."""
        return b"".join([chunk async for chunk in self.chunks(what, digest, size)])

    async def fetch(self, what: str, digest: str, size: int, to: Path) -> None:
        """Put the bytes into a file, which is replaced only by all of the right ones. Raises as `chunks` does, and
        `ArtifactError` where the file cannot be written.
        """
        try:
            number, name = await anyio.to_thread.run_sync(lambda: tempfile.mkstemp(dir=to.parent, prefix=".fetched-"))
        except OSError as error:
            raise ArtifactError(f"{what} cannot be written to {str(to)!r}: {error}") from error
        fetched = anyio.Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                async for chunk in self.chunks(what, digest, size):
                    await anyio.to_thread.run_sync(file.write, chunk)
            await fetched.replace(to)
        except OSError as error:
            raise ArtifactError(f"{what} cannot be written to {str(to)!r}: {error}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await fetched.unlink(missing_ok=True)

    async def path(self, what: str, digest: str, size: int) -> Path:
        """The file that has the bytes, once they are known to be the right ones: of a local folder only.

        Raises as `chunks` does, and `ArtifactError` where the store is elsewhere.
        """
        path = self._shelf.path(digest)
        if path is None:
            raise ArtifactError(f"{what} is no file of this machine, it is in {self.shown}: fetch it to a path instead")
        async for _ in self.chunks(what, digest, size):
            pass
        return path

    # collecting

    async def objects(self) -> AsyncIterator[Kept]:
        """All that is there, in the order of the hashes. Raises `StoreUnavailable`."""
        what = "what is in the store"
        found = await self._call(what, "read from", self._shelf.objects)

        def page() -> list[Kept]:
            return [one for one, _ in zip(found, range(_AT_ONCE), strict=False)]

        while objects := await self._call(what, "read from", page):
            for one in objects:
                yield one

    async def remove(self, digest: str, grace: float) -> bool:
        """Delete an object unless it was saved, or saved again, within the grace (seconds). Returns whether it did."""
        try:
            return await self._call(f"object {digest}", "removed from", self._shelf.remove, digest, time.time() - grace)
        except FileNotFoundError:
            return False

    async def remove_drafts(self, grace: float) -> int:
        """Delete what was begun longer ago than that and never completed; returns how many."""
        before = time.time() - grace
        return await self._call("what was never completed", "removed from", self._shelf.remove_drafts, before)

    async def _call(self, what: str, verb: str, function: Callable[..., R], *args: Any) -> R:
        """Call in a thread. Whatever the place raises, a file that is not there apart, is its being unavailable."""
        try:
            return await anyio.to_thread.run_sync(function, *args)
        except (FileNotFoundError, WrongSize) as error:
            if verb == "written to" and isinstance(error, FileNotFoundError):
                raise StoreUnavailable(what, verb, self.shown, error) from error
            raise
        except Exception as error:
            raise StoreUnavailable(what, verb, self.shown, error) from error

    def _damaged(self, what: str, digest: str, problem: str) -> NoReturn:
        raise ArtifactDamaged(what, digest, problem, self.shown)


_LONGEST: Final = 200
"""Bytes of a name in UTF-8. Most file systems take 255, and a temporary name is longer than the name itself."""

_APART: Final = "/\\#"
"""Parts of paths, and what numbers the records of one name."""


def check_artifact_name(name: object) -> str:
    """The name, where an artifact can have it; `BadArtifactName` with the rule where not."""
    if not isinstance(name, str):
        raise BadArtifactName(name, f"it is a {type(name).__name__}, and a name is text")
    if not name or len(name.encode("utf-8", "surrogatepass")) > _LONGEST:
        raise BadArtifactName(name, f"a name has 1 to {_LONGEST} bytes in UTF-8")
    for char in name:
        if char in _APART:
            raise BadArtifactName(name, f"it has a {char!r}: a name is no path, and has none of {' '.join(_APART)}")
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            raise BadArtifactName(name, f"it has a control character, {char!r}")
    if name in (".", "..") or name != name.strip():
        raise BadArtifactName(name, "it stands for a folder, or begins or ends with white space")
    return name


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def open_store(place: str, folder: str, *, limit: int) -> ArtifactStore:
    """The store of one deployment. place: a folder, or a URL as fsspec takes it. folder: the deployment's, within.

    limit: bytes that one artifact may have. Nothing is written yet. Raises `ConfigurationError`.
    """
    shelf: ArtifactBackend = (
        _remote(place, folder) if _URL.match(place) else LocalBackend(Path(place).expanduser() / folder)
    )
    return ArtifactStore(shelf, limit=limit)


def _remote(url: str, folder: str) -> ArtifactBackend:
    shown = re.sub(r"//[^/@]*@", "//", url.partition("?")[0])
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec is an extra

        from .object_store import ObjectStoreBackend
    except ImportError:
        raise ConfigurationError(
            f"artifacts at {shown} need a package that is not installed: pip install 'perdure[artifacts]'"
        ) from None
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"artifacts cannot be kept at {shown} (PERDURE_ARTIFACTS): {error}") from None
    return ObjectStoreBackend(files, f"{root.rstrip('/')}/{folder}", f"{shown.rstrip('/')}/{folder}")

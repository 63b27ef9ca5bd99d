"""Store of artifacts: bytes under their own hash (SHA-256), which is checked on every read.

An artifact name must be valid as a file name on any system. `open_store` picks the backend: a folder or a URL.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
import unicodedata
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from ...queues.errors import ConfigurationError
from ...queues.keys import Namespace
from ...queues.presence import deployment_id
from ...queues.regular_files import NotRegular
from ...queues.security.redaction import Redaction
from ...queues.security.urls import url_secrets
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.transport.value_store import is_sha256
from ..errors import (
    ArtifactDamaged,
    ArtifactError,
    ArtifactMissing,
    ArtifactTooLarge,
    BadArtifactName,
    StoreUnavailable,
)
from ..settings import Settings
from .backend import CHUNK, ArtifactBackend, Data, StoredObject, WrongSize, chunks_of
from .local import LocalBackend

R = TypeVar("R")

_PAGE = 1000
"""Number of objects per call to a thread while the objects are listed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Hash and size of saved bytes. hash: SHA-256 in hexadecimal. size: bytes."""

    hash: str
    size: int


class ArtifactStore:
    """Store that saves and reads in chunks and in threads: memory use is bounded, and the event loop is not blocked.

    Every method takes `what`, the name of the artifact and its task in errors.
    """

    def __init__(self, backend: ArtifactBackend, *, limit: int) -> None:
        """Wrap a backend. limit: largest size of an artifact in bytes."""
        self._backend = backend
        self.limit = limit

    @property
    def shown(self) -> str:
        """Location without credentials."""
        return self._backend.shown

    async def save(self, what: str, data: Data, on_progress: Callable[[], None] = lambda: None) -> Stored:
        """Store bytes. Bytes that are stored already get a new grace from the collector.

        If it is cancelled or killed, no incomplete object is left under the hash.

        Args:
            on_progress: Called after each chunk.

        Raises:
            ArtifactTooLarge, StoreUnavailable, ArtifactDamaged
            ArtifactError: The data cannot be read.
        """
        digest, size = hashlib.sha256(), 0
        upload = await self._open(what, "written to", self._backend.upload, lambda upload: upload.discard())
        try:

            def take(chunk: bytes | memoryview) -> None:
                digest.update(chunk)
                upload.write(chunk)

            async with aclosing(chunks_of(what, data)) as chunks:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self.limit:
                        raise ArtifactTooLarge(what, self.limit)
                    await self._call(what, "written to", take, chunk)
                    on_progress()
            stored = Stored(digest.hexdigest(), size)
            try:
                await self._call(what, "written to", upload.keep, stored.hash, size)
            except WrongSize:
                raise ArtifactDamaged(what, stored.hash, self.shown) from None
        finally:
            with anyio.CancelScope(shield=True), suppress(StoreUnavailable):  # the collector removes the rest
                await self._call(what, "written to", upload.discard)
        return stored

    async def chunks(self, what: str, digest: str, size: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes in chunks. They are read twice: all are verified before the first one is yielded.

        Raises:
            ArtifactError: The hash is not valid.
            ArtifactMissing, ArtifactDamaged, StoreUnavailable
        """
        async with self._opened(what, digest, size) as file:
            async for _ in self._verified(what, digest, size, file):
                pass
            await self._call(what, "read from", file.seek, 0)
            async with aclosing(self._verified(what, digest, size, file)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def read(self, what: str, digest: str, size: int) -> bytes:
        """Return all bytes, verified. Raises as `chunks` does."""
        async with self._opened(what, digest, size) as file:
            return b"".join([chunk async for chunk in self._verified(what, digest, size, file)])

    @asynccontextmanager
    async def _opened(self, what: str, digest: str, size: int) -> AsyncIterator[IO[bytes]]:
        if not is_sha256(digest):
            raise ArtifactError(f"could not read {what}: its hash must be a SHA-256 in hexadecimal; save it again")
        try:
            file = await self._open(
                what, "read from", lambda: self._backend.open(digest, size), lambda file: file.close()
            )
        except FileNotFoundError:
            raise ArtifactMissing(what, digest, self.shown) from None
        except (WrongSize, NotRegular):
            raise ArtifactDamaged(what, digest, self.shown) from None
        try:
            yield file
        finally:
            file.close()

    async def _verified(self, what: str, digest: str, size: int, file: IO[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes in chunks. Raises `ArtifactDamaged` after the last one, or as soon as there are too many."""
        found, seen = hashlib.sha256(), 0
        while chunk := await self._call(what, "read from", file.read, CHUNK):
            seen += len(chunk)
            if seen > size:
                break
            found.update(chunk)
            yield chunk
        if seen != size or found.hexdigest() != digest:
            raise ArtifactDamaged(what, digest, self.shown)

    async def fetch(self, what: str, digest: str, size: int, to: Path) -> None:
        """Write the verified bytes to a file, which is replaced atomically.

        Raises as `chunks` does, and `ArtifactError` if the file cannot be written.
        """
        try:
            number, name = await anyio.to_thread.run_sync(lambda: tempfile.mkstemp(dir=to.parent, prefix=".fetched-"))
        except OSError as error:
            raise ArtifactError(f"could not write {what} to {str(to)!r}: {error}") from error
        fetched = anyio.Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                async with self._opened(what, digest, size) as source:
                    async for chunk in self._verified(what, digest, size, source):
                        await anyio.to_thread.run_sync(file.write, chunk)
            await fetched.replace(to)
        except OSError as error:
            raise ArtifactError(f"could not write {what} to {str(to)!r}: {error}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await fetched.unlink(missing_ok=True)

    async def path(self, what: str, digest: str, size: int) -> Path:
        """Return the file with the bytes after verifying them; for a local folder only.

        Raises as `chunks` does, and `ArtifactError` if the store is not a local folder.
        """
        async with self._opened(what, digest, size) as file:
            path = self._backend.path(digest)
            if path is None:
                raise ArtifactError(f"{what} is not in a local folder but in {self.shown}; copy it with fetch()")
            async for _ in self._verified(what, digest, size, file):
                pass
        return path

    # collection

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield all objects, ordered by hash. Raises `StoreUnavailable`."""
        what = "the list of objects"
        found = await self._call(what, "read from", self._backend.objects)

        def page() -> list[StoredObject]:
            return [one for one, _ in zip(found, range(_PAGE), strict=False)]

        while objects := await self._call(what, "read from", page):
            for one in objects:
                yield one

    async def remove(self, digest: str, grace: float) -> bool:
        """Delete an object unless it was saved within the grace (seconds). Return whether it was deleted."""
        try:
            return await self._call(
                f"object {digest}", "removed from", self._backend.remove, digest, time.time() - grace
            )
        except FileNotFoundError:
            return False

    async def remove_stale_uploads(self, grace: float) -> int:
        """Delete unfinished uploads that are older than the grace (seconds); return their number."""
        before = time.time() - grace
        return await self._call("unfinished uploads", "removed from", self._backend.remove_stale_uploads, before)

    async def _open(self, what: str, verb: str, opens: Callable[[], R], close: Callable[[R], object]) -> R:
        """Call a function in a thread. A cancelled caller does not get what the thread opens, so it is closed."""
        opened, abandoned = list[R](), threading.Event()

        def call() -> R:
            found = opens()
            opened.append(found)
            if abandoned.is_set():
                close(found)
            return found

        try:
            return await self._call(what, verb, call)
        except BaseException:
            abandoned.set()
            for one in opened:
                with anyio.CancelScope(shield=True), suppress(StoreUnavailable):
                    await self._call(what, verb, close, one)
            raise

    async def _call(self, what: str, verb: str, function: Callable[..., R], *args: Any) -> R:
        """Call a function in a thread. Any exception but a missing file means that the store is unavailable."""
        try:
            return await anyio.to_thread.run_sync(function, *args)
        except (FileNotFoundError, WrongSize, NotRegular) as error:
            if verb == "written to" and isinstance(error, FileNotFoundError):
                raise StoreUnavailable(what, verb, self.shown, error) from error
            raise
        except Exception as error:
            raise StoreUnavailable(what, verb, self.shown, error) from error


_MAX_LENGTH: Final = 200
"""Largest size of a name in UTF-8 bytes. Most file systems allow 255, and temporary names are longer than the name."""

_SEPARATORS: Final = "/\\#"
"""Separators of paths, and the separator in step keys."""


def check_artifact_name(name: object) -> str:
    """Return a valid artifact name. Raises `BadArtifactName`, which states the rule."""
    if not isinstance(name, str):
        raise BadArtifactName(name, f"a name must be text, got {type(name).__name__}")
    if not name or len(name.encode("utf-8", "surrogatepass")) > _MAX_LENGTH:
        raise BadArtifactName(name, f"a name must have 1 to {_MAX_LENGTH} bytes in UTF-8")
    for char in name:
        if char in _SEPARATORS:
            raise BadArtifactName(name, f"a name must not contain any of {' '.join(_SEPARATORS)}, got {char!r}")
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            raise BadArtifactName(name, f"a name must not contain control characters, got {char!r}")
    if name in (".", "..") or name != name.strip():
        raise BadArtifactName(name, "a name must not be that of a folder, nor begin or end with white space")
    return name


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def open_store(place: str, folder: str, *, limit: int) -> ArtifactStore:
    """Return the store of one deployment. Nothing is written yet.

    Args:
        place: Folder, or URL in the form that fsspec takes.
        folder: Folder of the deployment within the place.
        limit: Largest size of an artifact in bytes.

    Raises `ConfigurationError`.
    """
    backend: ArtifactBackend = (
        _remote(place, folder) if _URL.match(place) else LocalBackend(Path(place).expanduser() / folder)
    )
    return ArtifactStore(backend, limit=limit)


def shown_place(url: str) -> str:
    """Return the URL of a store without credentials; a password may contain `/`, `?` and `@`."""
    scheme, mark, rest = url.partition("://")
    credentials, _, place = rest.rpartition("@")
    if "/" in credentials and ":" not in credentials:  # the @ is in the path
        place = rest
    return (scheme + mark + place).partition("?")[0]


def _remote(url: str, folder: str) -> ArtifactBackend:
    shown, hidden = shown_place(url), Redaction([url, *url_secrets(url)])
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec is an extra

        from .object_store import ObjectStoreBackend
    except ImportError:
        raise ConfigurationError(
            f"artifacts at {shown} need the package fsspec: pip install 'perdure[artifacts]'"
        ) from None
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise ConfigurationError(
            f"could not open artifacts at {shown} (PERDURE_ARTIFACTS): {hidden(str(error))}"
        ) from None
    return ObjectStoreBackend(files, f"{root.rstrip('/')}/{folder}", f"{shown.rstrip('/')}/{folder}")


_stores: WeakKeyDictionary[Gateway, ArtifactStore] = WeakKeyDictionary()
"""Artifact store by gateway; a worker has one."""


async def artifact_store(gateway: Gateway, settings: Settings) -> ArtifactStore:
    """Return the artifact store of this deployment. Raises `ConfigurationError`."""
    store = _stores.get(gateway)
    if store is None:
        namespace = Namespace(settings.namespace)
        folder = f"{namespace.name}-{await deployment_id(gateway, namespace)}"
        store = _stores[gateway] = open_store(settings.artifact_place, folder, limit=settings.artifact_limit)
    return store


def store_large_values(gateway: Gateway, settings: Settings) -> None:
    """Let a gateway store the largest values in the artifact store, which every worker must reach."""
    gateway.value_store = _LargeValues(gateway, settings)


class _LargeValues:
    """The artifact store as the value store of a gateway. Its errors are those of artifacts."""

    def __init__(self, gateway: Gateway, settings: Settings) -> None:
        self._gateway = gateway
        self._settings = settings
        self.above = max(settings.large_limit, settings.payload_limit)
        self.shown = shown_place(settings.artifacts)

    async def save(self, what: str, data: bytes) -> None:
        await (await self._store()).save(what, data)

    async def read(self, what: str, digest: str, size: int) -> bytes:
        return await (await self._store()).read(what, digest, size)

    async def _store(self) -> ArtifactStore:
        return await retry_while_unavailable(partial(artifact_store, self._gateway, self._settings))

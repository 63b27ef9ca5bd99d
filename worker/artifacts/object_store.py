"""Artifact backend in any file system of fsspec: object stores, SFTP, WebDAV. Needs the extra `artifacts`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from ...queues.transport.value_store import is_sha256
from .backend import INCOMING, StoredObject, Upload, WrongSize, path_of


class ObjectStoreBackend:
    """Backend in a file system of fsspec.

    A finished upload is moved to its place; an object store copies it there, which is atomic as well. Such a store
    cannot set modification times, so bytes that are saved again are written again. No lock covers the moment between
    the collector's check of an object and its deletion.
    """

    def __init__(self, files: AbstractFileSystem, root: str, shown: str) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self._shown = shown

    @property
    def shown(self) -> str:
        return self._shown

    def upload(self) -> Upload:
        self._files.makedirs(self._at(INCOMING), exist_ok=True)
        return _RemoteUpload(self._files, self._root)

    def open(self, digest: str, size: int) -> IO[bytes]:
        file: Any = self._files.open(self._at(path_of(digest)), "rb")
        if isinstance(found := getattr(file, "size", None), int) and found != size:
            file.close()
            raise WrongSize
        return cast("IO[bytes]", file)

    def path(self, digest: str) -> Path | None:
        return None

    def objects(self) -> Iterator[StoredObject]:
        for folder in self._listed(self._root):
            first = folder["name"].rstrip("/").rpartition("/")[2]
            for found in self._listed(self._at(first)) if len(first) == 2 else ():
                digest = first + found["name"].rpartition("/")[2]
                if is_sha256(digest):
                    with suppress(FileNotFoundError):
                        yield StoredObject(digest, int(found["size"]), self._modified(found["name"]))

    def remove(self, digest: str, before: float) -> bool:
        path = self._at(path_of(digest))
        self._files.invalidate_cache()
        if self._modified(path) >= before:
            return False
        self._files.rm_file(path)
        return True

    def remove_stale_uploads(self, before: float) -> int:
        removed = 0
        for found in self._listed(self._at(INCOMING)):
            with suppress(FileNotFoundError):
                if self._modified(found["name"]) < before:
                    self._files.rm_file(found["name"])
                    removed += 1
        return removed

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _modified(self, path: str) -> float:
        return float(self._files.modified(path).timestamp())

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        self._files.invalidate_cache()
        try:
            return sorted(self._files.ls(folder, detail=True), key=lambda found: str(found["name"]))
        except FileNotFoundError:
            return []


class _RemoteUpload:
    def __init__(self, files: AbstractFileSystem, root: str) -> None:
        self._files = files
        self._root = root
        self._path = f"{root}/{INCOMING}/{uuid.uuid4().hex}"
        self._file: Any = files.open(self._path, "wb")
        self._moved = False

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(bytes(data))

    def keep(self, digest: str, size: int) -> None:
        self._file.close()
        path = f"{self._root}/{path_of(digest)}"
        self._files.invalidate_cache()
        try:
            found = int(self._files.info(path)["size"])
        except FileNotFoundError:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        else:
            if found != size:
                raise WrongSize
        self._files.mv(self._path, path)
        self._moved = True

    def discard(self) -> None:
        if not self._moved:
            self._moved = True
            with suppress(Exception):  # the collector removes the rest
                self._file.close()
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path)

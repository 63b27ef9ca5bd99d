"""Shared workspace: files that several tasks and programs change, each with a version that a change can require.

The bytes are in the artifact store under their hash; Redis has path, version and hash. Bytes are stored first, so a
writer that dies in between leaves bytes without a link, which the collector removes.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Final, NamedTuple
from weakref import WeakKeyDictionary

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...queues.junk import report_once
from ...queues.keys import Namespace, Partition
from ...queues.security.encryption import TaskCipher
from ...queues.transport.gateway import Gateway
from ...queues.transport.scripts import pairs, queue_script
from ...queues.transport.value_store import Sha256
from ..artifacts.backend import Data
from ..artifacts.store import artifact_store
from ..durable.handler_task import HandlerTask
from ..durable.steps.current import Step, step_here
from ..errors import FileConflict, WorkspaceError, WorkspaceTooLarge, first_problem
from ..settings import Settings
from .manifest import check_path

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

_PUT: Final = queue_script("put_file")


class SharedFile(BaseModel):
    """File of a shared workspace.

    Attributes:
        path: From the workspace, with `/` between names.
        version: Grows with each write; a version is never used again.
        hash: SHA-256 of the bytes, in hexadecimal.
        size: Bytes.
        by: Who wrote it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    version: int = 0
    hash: Sha256
    size: Annotated[int, Field(ge=0)]
    by: str = ""

    @property
    def at(self) -> datetime:
        """When it was written, by the Redis clock: versions follow it."""
        return datetime.fromtimestamp(self.version / 1000, UTC)


class WorkspaceSnapshot(NamedTuple):
    """State of a shared workspace.

    Attributes:
        born: Text that no other workspace of the name has had, before it expired; empty if there is no workspace.
        files: By path; None for one that cannot be read.
    """

    born: str
    files: Mapping[str, SharedFile | None]


class SharedWorkspace:
    """Files by path, with compare-and-set per file: a write can require the version that its writer has read."""

    def __init__(
        self, gateway: Gateway, settings: Settings, name: str, *, by: str = "", run: HandlerTask | None = None
    ) -> None:
        """Name a workspace; nothing is sent. Raises `ValueError`.

        Args:
            by: writer that its files name.
            run: the run that writes; after it was stopped, its changes are refused.
        """
        namespace = Namespace(settings.namespace)
        self.name = name
        self._key = namespace.workspace(name)
        self._index = namespace.workspaces
        self._cipher = _cipher_of(gateway, namespace, name)
        self._gateway = gateway
        self._settings = settings
        self._by = by
        self._run = run

    async def write(self, path: str, data: Data, *, expected: int | None = None) -> SharedFile:
        """Write a file; return it with its new version.

        Within a step, a call that is repeated because the step was cut off has no effect if it was done, also if
        another writer has changed the file since, as long as no more than 100 changes of the workspace followed.

        Args:
            path: From the workspace, with `/` between names.
            data: As for an artifact: bytes, text (UTF-8), a `Path` or a stream.
            expected: The version that the file must have; 0 if it must not exist; None for any.

        Raises:
            FileConflict: The file has another version.
            WorkspaceTooLarge: The workspace has too many files.
            WorkspaceError: The path is not valid.
            ArtifactTooLarge, StoreUnavailable
        """
        await self._check_change(path)
        store = await artifact_store(self._gateway, self._settings)
        stored = await store.save(self._what(path), data)
        file = SharedFile(path=path, hash=stored.hash, size=stored.size, by=self._by)
        data = self._cipher.encrypt(_kind(path), file.model_dump_json(exclude={"version"}).encode())
        version = await self._put(path, expected, stored.hash, data)
        return file.model_copy(update={"version": version})

    async def remove(self, path: str, *, expected: int | None = None) -> None:
        """Remove a file. One that does not exist is no error. Raises `FileConflict`, `WorkspaceError`."""
        await self._check_change(path)
        await self._put(path, expected, "removed", b"")

    async def find(self, path: str) -> SharedFile | None:
        """Return a file with its version, None if it does not exist."""
        self._check(path)
        held = await self._gateway.command("HGET", self._key, f"f:{path}")
        return None if held is None else _decode(self._cipher, self.name, path, held)

    async def read(self, path: str | SharedFile) -> bytes:
        """Return the bytes of a file, verified by their hash. Raises `WorkspaceError` if there is no such file."""
        found = await self.find(path) if isinstance(path, str) else path
        if found is None:
            raise WorkspaceError(f"shared workspace {self.name!r} has no file {path!r}")
        store = await artifact_store(self._gateway, self._settings)
        return await store.read(self._what(found.path), found.hash, found.size)

    async def list(self) -> list[SharedFile]:
        """Return the files, sorted by path. One that cannot be read is left out with a warning."""
        found = (await self.snapshot()).files
        return sorted((file for file in found.values() if file is not None), key=lambda file: file.path)

    async def snapshot(self) -> WorkspaceSnapshot:
        """Return the files by their paths. Each that cannot be read is reported once."""
        fields = pairs(await self._gateway.command("HGETALL", self._key))
        found: dict[str, SharedFile | None] = {}
        for name, held in fields.items():
            if name.startswith(b"f:"):
                path = name[2:].decode(errors="backslashreplace")
                try:
                    found[path] = _decode(self._cipher, self.name, path, held)
                except WorkspaceError as error:
                    report_once(f"{error}; it is left out of lists")
                    found[path] = None
        return WorkspaceSnapshot(fields.get(b"born", b"").decode(errors="replace"), found)

    async def _put(self, path: str, expected: int | None, what: str, file: bytes) -> int:
        """Change a file once. what: names the change among those of the file."""
        settings, step = self._settings, step_here()
        change, act, done = f"{self.name}/{path}/{what}", uuid.uuid4(), Counter[str]()
        if step is not None:  # the n-th such change of the step has the same id in each run of it
            done = _done.setdefault(step, done)
            act = uuid.uuid5(_ACTS, f"{step.idempotency_key}/{change}/{done[change]}")
        answer, number, *held = await self._gateway.run(
            _PUT,
            [self._key, self._index],
            [
                path,
                "" if expected is None else str(expected),
                str(act),
                settings.workspace_files,
                round(settings.workspace_ttl * 1000),
                self.name,
                file,
            ],
        )
        if answer == b"conflict":
            there = b"%b - %b" % (number, held[0]) if held and held[0] else None
            by = "" if there is None else _decode(self._cipher, self.name, path, there).by
            raise FileConflict(self.name, path, expected or 0, int(number), by)
        if answer == b"full":
            raise WorkspaceTooLarge(
                f"shared workspace {self.name!r} has {int(number):,} files, the most that it may have: remove some, "
                "or raise PERDURE_WORKSPACE_FILES"
            )
        done[change] += 1
        return int(number)

    async def _check_change(self, path: str) -> None:
        self._check(path)
        if self._run is not None:
            await self._run.check_stopped()

    def _check(self, path: str) -> None:
        if (problem := _problem_of(path)) is not None:
            raise WorkspaceError(f"{self._what(path)} cannot be used: {problem}")

    def _what(self, path: str) -> str:
        return f"file {path!r} of shared workspace {self.name!r}"


_ACTS: Final = uuid.UUID("8f0c2f9e-4f1b-4d5e-9c57-0f6f7f6f3b52")
"""Name space of the ids of writes within steps (RFC 9562, version 5)."""

_done: WeakKeyDictionary[Step, Counter[str]] = WeakKeyDictionary()
"""Changes that running steps have made."""


async def shared_hashes(gateway: Gateway, namespace: Namespace) -> AsyncIterator[str]:
    """Yield the hashes of the files of all shared workspaces. Raises `WorkspaceError`, `DecryptionError`."""
    for name in await gateway.command("ZRANGE", namespace.workspaces, 0, -1):
        shown = name.decode()
        cipher = _cipher_of(gateway, namespace, shown)
        for field, held in pairs(await gateway.command("HGETALL", namespace.workspace(shown))).items():
            if field.startswith(b"f:"):
                yield _decode(cipher, shown, field[2:].decode(errors="backslashreplace"), held).hash


def _cipher_of(gateway: Gateway, namespace: Namespace, workspace: str) -> TaskCipher:
    return gateway.encryptor.of(Partition(namespace.name, "~workspaces", 0), workspace)


def _kind(path: str) -> str:
    """Return the kind of a file's data, which cannot be decrypted under another path."""
    return f"file:{path}"


def _problem_of(path: str) -> str | None:
    """Return what is wrong with a path, None if it is valid: it is a name for people and programs, so it is text."""
    if (problem := check_path(path)) is not None:
        return problem
    if any("\ud800" <= char <= "\udfff" for char in path):
        return "its name is not valid UTF-8"
    return "its name contains a control character" if _CONTROL.search(path) else None


def _decode(cipher: TaskCipher, workspace: str, path: str, held: bytes) -> SharedFile:
    try:
        if (problem := _problem_of(path)) is not None:
            raise ValueError(problem)
        version, _, stored = held.split(b" ", 2)
        data = orjson.loads(cipher.decrypt(_kind(path), stored))
        return SharedFile.model_validate({**data, "path": path, "version": int(version)})
    except (ValueError, TypeError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise WorkspaceError(f"could not read file {path!r} of shared workspace {workspace!r}: {problem}") from None

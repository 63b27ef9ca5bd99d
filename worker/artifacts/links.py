"""Links from tasks to artifacts, and the search for artifacts without one.

A link is a field of the checkpoint per artifact name, so no log has to be read for it.

Orphans are artifacts of runs that died before they linked them, and of tasks that are no longer kept: objects that are
older than the grace and that no task links. The search runs in batches. It lists a batch of old objects first, and then
reads all links and removes the linked ones from it. Memory is bounded by the batch, and every link that was written
before the reading started is seen.

A link that is written during the search is safe too: the writer saved the bytes just before, which gives even existing
bytes a new modification time, and `ArtifactStore.remove` checks that time before it deletes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...queues.inspection.views import checkpoint_fields, checkpoint_fields_of_all
from ...queues.keys import Namespace, Partition
from ...queues.transport.gateway import Gateway
from ...queues.transport.value_store import Sha256
from ..errors import ArtifactError, first_problem
from .backend import StoredObject
from .store import ArtifactStore, check_artifact_name

_FIELDS: Final = "#artifact:"

VERSION: Final = 1


class _Version(BaseModel):
    """Version of a link, of which a later one may have other fields."""

    v: int = VERSION


class ArtifactLink(BaseModel):
    """Link of a task to an artifact. hash: SHA-256 in hexadecimal. size: bytes. n: number of its event."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = VERSION
    name: str
    hash: Sha256
    size: Annotated[int, Field(ge=0)]
    media_type: str
    n: int = 0

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, task_id: str, name: str, data: bytes) -> ArtifactLink:
        """Read a stored link. Raises `ArtifactError`, which names the task and the artifact."""
        check_artifact_name(name)
        try:
            version = _Version.model_validate_json(data).v
            if version > VERSION:
                raise ArtifactError(
                    f"the link of task {task_id} to artifact {name!r} has version {version}; this version of Perdure "
                    f"reads up to {VERSION}: update it"
                )
            link = cls.model_validate_json(data)
        except ValidationError as error:
            raise ArtifactError(
                f"could not read the link of task {task_id} to artifact {name!r}: {first_problem(error)}"
            ) from None
        if link.name != name:
            raise ArtifactError(f"the link of task {task_id} to artifact {name!r} is the link of another artifact")
        return link


def field_of(name: str) -> str:
    """Return the checkpoint field of an artifact's link."""
    return _FIELDS + name


def links_among(task_id: str, saved: Mapping[str, bytes], damaged: list[str] | None = None) -> list[ArtifactLink]:
    """Return the links in a task's checkpoint, in the order in which they were written.

    damaged: receives the problems of unreadable links. Without it they raise `ArtifactError`.
    """
    found = []
    for field, data in saved.items():
        if field.startswith(_FIELDS):
            try:
                found.append(ArtifactLink.decode(task_id, field.removeprefix(_FIELDS), data))
            except ArtifactError as error:
                if damaged is None:
                    raise
                damaged.append(str(error))
    return sorted(found, key=lambda link: (link.n, link.name))


async def task_links(
    gateway: Gateway, partition: Partition, task_id: str, damaged: list[str] | None = None
) -> list[ArtifactLink]:
    """Return a task's links. damaged: see `links_among`. Raises `ArtifactError`, `DecryptionError`."""
    return links_among(task_id, await checkpoint_fields(gateway, partition, task_id, _FIELDS), damaged)


async def all_links(
    gateway: Gateway, namespace: Namespace, damaged: list[str] | None = None
) -> AsyncIterator[tuple[Partition, str, list[ArtifactLink]]]:
    """Yield the links of every task in the namespace. Tasks without links are included, for progress reports.

    damaged: see `links_among`. Raises `ArtifactError` or `DecryptionError` for a link that cannot be read.
    """
    async for partition, task_id, saved in checkpoint_fields_of_all(gateway, namespace, _FIELDS):
        yield partition, task_id, links_among(task_id, saved, damaged)


_BATCH: Final = 100_000
"""Number of objects that are compared with the links at once; about 20 MB."""


async def orphans(
    store: ArtifactStore, links: Callable[[], AsyncIterator[str]], *, grace: float, batch: int = _BATCH
) -> AsyncIterator[StoredObject]:
    """Yield the objects that are older than the grace and not linked.

    Args:
        links: Returns the linked hashes; called again for each batch. Its exceptions end the search, so that an
            unreadable link never makes an orphan.
        grace: Seconds.
    """
    before = time.time() - grace
    old: dict[str, StoredObject] = {}
    async for one in store.objects():
        if one.modified < before:
            old[one.hash] = one
        if len(old) == batch:
            for orphan in await _unlinked(old, links):
                yield orphan
            old = {}
    for orphan in await _unlinked(old, links):
        yield orphan


async def _unlinked(old: dict[str, StoredObject], links: Callable[[], AsyncIterator[str]]) -> list[StoredObject]:
    if old:
        async for digest in links():
            old.pop(digest, None)
    return list(old.values())

"""Links from tasks to artifacts: a field of the checkpoint for each name, so that no log has to be read for it.

Finding what nothing links: artifacts of runs that died before they could, and of tasks that are no longer kept.

An object is an orphan when it is older than the grace and no task that is kept links it. The objects are gone through
in batches: first a batch of old ones is listed, then all links are read and taken off it. So memory is bounded by the
batch, and a link that was made before the reading began is seen.

A link that is made meanwhile is no danger either. Whoever makes one has saved the bytes just before, and that gives
even bytes that were there already a new time, which `ArtifactStore.remove` looks at again before it deletes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from ...queues import Gateway, Namespace, Partition, checkpoint_fields, checkpoint_fields_of_all
from ..errors import ArtifactError
from .store import ArtifactStore, Kept

__all__ = ["ArtifactLink", "all_links", "field_of", "links_among", "orphans", "task_links"]

_FIELDS: Final = "#artifact:"

VERSION: Final = 1


class ArtifactLink(BaseModel):
    """What a task keeps of an artifact. hash: SHA-256 in hexadecimal. size: bytes. n: the number of its event."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = VERSION
    name: str
    hash: str
    size: int
    media_type: str
    n: int = 0

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, task_id: str, name: str, data: bytes) -> ArtifactLink:
        """Raises `ArtifactError`, which names the task and the artifact."""
        try:
            link = cls.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise ArtifactError(f"the link of task {task_id} to artifact {name!r} cannot be read: {problem}") from None
        if link.v > VERSION:
            raise ArtifactError(
                f"the link of task {task_id} to artifact {name!r} has version {link.v}, and this version of perdure "
                f"reads up to {VERSION}: update it"
            )
        return link


def field_of(name: str) -> str:
    """The field of the checkpoint that has the link of an artifact."""
    return _FIELDS + name


def links_among(task_id: str, saved: Mapping[str, bytes]) -> list[ArtifactLink]:
    """The links among what is saved in a task's checkpoint, in the order in which they were made."""
    found = [
        ArtifactLink.decode(task_id, field.removeprefix(_FIELDS), data)
        for field, data in saved.items()
        if field.startswith(_FIELDS)
    ]
    return sorted(found, key=lambda link: (link.n, link.name))


async def task_links(gateway: Gateway, partition: Partition, task_id: str) -> list[ArtifactLink]:
    """What a task links. Raises `ArtifactError`, `DecryptionError`."""
    return links_among(task_id, await checkpoint_fields(gateway, partition, task_id, _FIELDS))


async def all_links(gateway: Gateway, namespace: Namespace) -> AsyncIterator[tuple[Partition, str, list[ArtifactLink]]]:
    """Of every task of the namespace that is kept, what it links; also of those that link nothing, for the progress.

    Raises `ArtifactError` or `DecryptionError` for a link that cannot be read.
    """
    async for partition, task_id, saved in checkpoint_fields_of_all(gateway, namespace, _FIELDS):
        yield partition, task_id, links_among(task_id, saved)


_BATCH: Final = 100_000
"""Objects that are compared with the links at once: some 20 MB."""


async def orphans(
    store: ArtifactStore, links: Callable[[], AsyncIterator[str]], *, grace: float, batch: int = _BATCH
) -> AsyncIterator[Kept]:
    """What is older than the grace (seconds) and not linked. links: the hashes that are, read anew for each batch.

    Whatever `links` raises ends it, so that nothing is taken for an orphan because a link could not be read.
    """
    before = time.time() - grace
    old: dict[str, Kept] = {}
    async for one in store.objects():
        if one.modified < before:
            old[one.hash] = one
        if len(old) == batch:
            for orphan in await _unlinked(old, links):
                yield orphan
            old = {}
    for orphan in await _unlinked(old, links):
        yield orphan


async def _unlinked(old: dict[str, Kept], links: Callable[[], AsyncIterator[str]]) -> list[Kept]:
    if old:
        async for digest in links():
            old.pop(digest, None)
    return list(old.values())

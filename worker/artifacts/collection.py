"""Finding what nothing links: artifacts of runs that died before they could, and of tasks that are no longer kept.

An object is an orphan when it is older than the grace and no task that is kept links it. The objects are gone through
in batches: first a batch of old ones is listed, then all links are read and taken off it. So memory is bounded by the
batch, and a link that was made before the reading began is seen.

A link that is made meanwhile is no danger either. Whoever makes one has saved the bytes just before, and that gives
even bytes that were there already a new time, which `ArtifactStore.remove` looks at again before it deletes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from .store import ArtifactStore, Kept

__all__ = ["orphans"]

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

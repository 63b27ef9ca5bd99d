"""The memory store over a database: search by words and by meaning at once, decay, and everything that is the same.

Several rankings of the same things made into one.

Reciprocal rank fusion: G. V. Cormack, C. L. A. Clarke, S. Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and
individual Rank Learning Methods", SIGIR 2009. It needs ranks only, so that a bm25 and a cosine, which have no common
scale, can be put together; k = 60 is the authors' constant.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from uuid_utils import uuid7

from .backend import Backend, Known, Where
from .embedders import Embedder, Vector, embed
from .errors import MemoryStoreUnavailable
from .memory import FoundMemory, Memory, NewMemory, strength
from .pruning import Policy, Pruning
from .text import digest, words

__all__ = ["RANK_CONSTANT", "HybridStore", "fuse"]

RANK_CONSTANT: Final = 60


def fuse(rankings: Iterable[Sequence[str]]) -> dict[str, float]:
    """The score of each id: the sum of 1 / (60 + rank) over the rankings that it is in, ranks from 1."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, one in enumerate(ranking, 1):
            scores[one] = scores.get(one, 0.0) + 1 / (RANK_CONSTANT + rank)
    return scores


_PAGE: Final = 500
_BATCH: Final = 64
"""Texts that are embedded together."""

_DEPTH: Final = 5
"""How many times as many as are wanted are ranked, for decay to choose from."""

_LEAST_DEPTH: Final = 50

Names = str | Collection[str] | None


class HybridStore:
    """Long-term memories. Open it before use (`async with store:`).

    Where `owner` or `type` filters, None is any and several are any of them; `tags` must all be there.
    """

    def __init__(
        self, backend: Backend, embedder: Embedder | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: seconds since 1970."""
        self._backend = backend
        self._embedder = embedder
        self._clock = clock

    @property
    def place(self) -> str:
        """Where it is, without a password."""
        return self._backend.store

    @property
    def _known(self) -> Known | None:
        return None if self._embedder is None else Known(self._embedder.name, self._embedder.dimension)

    async def open(self, *, create: bool = True) -> None:
        """Open the store; with `create`, make it where there is none. Raises `MemoryStoreError`."""
        await self._backend.open(self._known, create=create)

    async def open_for_reembedding(self) -> None:
        """Open it whosoever's vectors it has."""
        await self._backend.open(None, create=False)

    async def close(self) -> None:
        await self._backend.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # remembering

    async def add(self, memory: NewMemory, *, owner: str = "", key: str | None = None) -> Memory:
        """Remember; returns the memory as it is stored.

        One of the same owner and type that says the same (the same wording but for case, spaces and end marks, or a
        cosine similarity of 0.92) is updated instead. With a key that is known, nothing happens.
        """
        if key is not None and (known := await self._backend.known(key)) is not None:
            return known  # and nothing is paid for its embedding again
        now = self._clock()
        times = {"created": now, "accessed": now, "updated": now}
        whole = Memory.model_validate({**memory.model_dump(), **times, "id": str(uuid7()), "owner": owner, "key": key})
        [vector] = await self._embed([whole.text])
        return await self._backend.add(whole, digest(whole.text), vector, key)

    async def restore(self, memories: Sequence[Memory]) -> int:
        """Store exported memories unchanged, except those that are there already (by id or by wording).

        Returns how many were stored.
        """
        stored = 0
        for at in range(0, len(memories), _BATCH):
            some = memories[at : at + _BATCH]
            vectors = await self._embed([one.text for one in some])
            rows = [(one, digest(one.text), vector) for one, vector in zip(some, vectors, strict=True)]
            stored += await self._backend.restore(rows)
        return stored

    async def touch(self, ids: Sequence[str], *, owner: Names = None, key: str | None = None) -> int:
        """Count a use of these memories, so that they stay strong for longer. Returns how many of them there are."""
        return await self._backend.touch(ids, Where.of(owner, None, ()), self._clock(), key)

    async def forget(self, ids: Sequence[str], *, owner: Names = None) -> int:
        """Remove memories for good. Returns how many there were."""
        return await self._backend.forget(ids, Where.of(owner, None, ()))

    # finding

    async def search(
        self, query: str, *, owner: Names = None, type: Names = None, tags: Collection[str] = (), limit: int = 10
    ) -> builtins.list[FoundMemory]:
        """Return the memories that fit best, by words and (with an embedder) by meaning, weighed with their strength.

        Changes nothing: `touch` those that were of use.
        """
        if limit < 1 or not query.strip():
            return []
        where, depth = Where.of(owner, type, tags), max(_LEAST_DEPTH, _DEPTH * limit)
        texts = await self._backend.by_words(asked, where, depth) if (asked := words(query)) else []
        [vector] = await self._embed([query])
        near = [] if vector is None else await self._backend.by_vector(vector, where, depth)
        near = [one for one in near if one.similarity > 0]  # what is at a right angle has nothing to do with it
        scores = fuse([texts, [one.id for one in near]])
        text_ranks = {one: rank for rank, one in enumerate(texts, 1)}
        vector_ranks = {one.id: (rank, one.similarity) for rank, one in enumerate(near, 1)}
        now = self._clock()
        found = []
        for memory in (await self._backend.get(builtins.list(scores))).values():
            if (score := scores[memory.id] * strength(memory, now)) > 0:
                rank, similarity = vector_ranks.get(memory.id, (None, None))
                found.append(
                    FoundMemory(
                        memory=memory,
                        score=score,
                        text_rank=text_ranks.get(memory.id),
                        vector_rank=rank,
                        similarity=similarity,
                    )
                )
        found.sort(key=lambda one: (-one.score, one.memory.id))
        return found[:limit]

    async def get(self, ids: Sequence[str]) -> builtins.list[Memory]:
        """Return the memories that are there, in the order of the ids."""
        there = await self._backend.get(ids)
        return [there[one] for one in dict.fromkeys(ids) if one in there]

    async def list(
        self, *, owner: Names = None, type: Names = None, tags: Collection[str] = (), limit: int = 50
    ) -> builtins.list[Memory]:
        """Return memories, the newest first."""
        page = await self._backend.page(Where.of(owner, type, tags), limit, newest=True)
        return [memory for _, memory in page]

    async def export(
        self, *, owner: Names = None, type: Names = None, tags: Collection[str] = ()
    ) -> AsyncIterator[Memory]:
        """Yield all memories, in the order in which they were stored."""
        where, after = Where.of(owner, type, tags), 0
        while page := await self._backend.page(where, _PAGE, after=after):
            after = page[-1][0]
            for _, memory in page:
                yield memory

    async def count(self, *, owner: Names = None, type: Names = None, tags: Collection[str] = ()) -> int:
        return await self._backend.count(Where.of(owner, type, tags))

    # keeping it in order

    async def prune(
        self,
        policy: Policy,
        *,
        owner: Names = None,
        type: Names = None,
        tags: Collection[str] = (),
        dry_run: bool = False,
    ) -> builtins.list[str]:
        """Remove what the policy says; returns the ids, the weakest first. dry_run: remove nothing."""
        pruning = Pruning(policy, self._clock())
        async for memory in self.export(owner=owner, type=type, tags=tags):
            pruning.look(memory)
        gone = pruning.verdict()
        if not dry_run:
            for at in range(0, len(gone), _PAGE):
                await self._backend.prune(gone[at : at + _PAGE])
        return [one for one, _ in gone]

    async def reembed(self) -> AsyncIterator[int]:
        """Embed all memories that have no vector of the configured embedder, and make it the store's.

        Yields how many were embedded, from time to time. Interrupted, it can be called again to continue; until it has
        ended, the store belongs to the former embedder.
        """
        known = self._known
        if known is None:
            raise MemoryStoreUnavailable(self.place, "no embedder is set: name one with PERDURE_EMBEDDER")
        # A memory that was added meanwhile has a larger number; one whose text was changed meanwhile has lost its new
        # vector, so it is looked for again until nothing is left. What has no vector at all is passed once only.
        done, again = 0, True
        while again:
            again, after = False, 0
            while page := await self._backend.without_vector(known, after, _BATCH):
                after = page[-1][0]
                vectors = await self._embed([text for _, text in page])
                rows = [(number, text, v) for (number, text), v in zip(page, vectors, strict=True) if v is not None]
                await self._backend.put_vectors(known, rows)
                again = again or bool(rows)
                done += len(rows)
                yield done
        await self._backend.change_embedder(known)

    async def lacks_vectors(self) -> bool:
        """Whether there are memories that search by meaning does not see, though an embedder is set."""
        return self._known is not None and bool(await self._backend.without_vector(self._known, 0, 1))

    async def _embed(self, texts: builtins.list[str]) -> builtins.list[Vector | None]:
        return [None] * len(texts) if self._embedder is None else await embed(self._embedder, texts)

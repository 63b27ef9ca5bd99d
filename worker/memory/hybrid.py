"""Memory store over a database: search by words and by vectors, weighted by strength; merging and pruning.

The two rankings are combined by reciprocal rank fusion (G. V. Cormack, C. L. A. Clarke, S. Buettcher, "Reciprocal Rank
Fusion outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009). It needs ranks only, so that a BM25
score and a cosine, which have no common scale, can be combined; k = 60 is the authors' constant.
"""

from __future__ import annotations

import builtins
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from uuid_utils import uuid7

from ...queues.errors import ConfigurationError
from ...queues.keys import belongs_to, owner_of_tenant, tenant_of
from ..errors import MemoryStoreUnavailable
from .backend import EmbedderIdentity, Near, SqlBackend, Where
from .embedders import Embedder, Vector, embed
from .memory import MAX_TEXT_LENGTH, FoundMemory, Memory, NewMemory, RelatedMemory, strength
from .text import UNRELATED, content_words, digest, has_words, normal

RANK_CONSTANT: Final = 60


def fuse(rankings: Iterable[Sequence[str]]) -> dict[str, float]:
    """Return a score per id: the sum of 1 / (60 + rank) over the rankings that contain it, ranks from 1."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, one in enumerate(ranking, 1):
            scores[one] = scores.get(one, 0.0) + 1 / (RANK_CONSTANT + rank)
    return scores


def _digest(memory: Memory) -> str:
    return digest(memory.text, memory.subject, memory.source)


def _has_all(memory: Memory, words: Collection[str]) -> bool:
    return has_words(" ".join((memory.text, *memory.tags)), words)


_PAGE: Final = 500
_BATCH: Final = 64
"""Number of texts that are embedded together."""

_DEPTH: Final = 5
"""Ranked memories per requested one, so that strength can reorder them."""

_LEAST_DEPTH: Final = 50

Names = str | Collection[str] | None


class HybridStore:
    """Store of long-term memories. Open it before use (`async with store:`).

    In the filters `owner`, `type` and `subject`, None matches all and several values match any of them; all `tags` must
    be present. The subject "" has the agents' own memories, which belong to no profile. With `tenant` only the
    memories of owners of this tenant match.
    """

    def __init__(
        self, backend: SqlBackend, embedder: Embedder | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Wrap a backend. clock: returns seconds since 1970."""
        self._backend = backend
        self._embedder = embedder
        self._clock = clock
        self._floor: float | None = None

    @property
    def place(self) -> str:
        """Location without a password."""
        return self._backend.store

    @property
    def _known(self) -> EmbedderIdentity | None:
        return None if self._embedder is None else EmbedderIdentity(self._embedder.name, self._embedder.dimension)

    async def open(self, *, create: bool = True) -> None:
        """Open the store; with `create`, create it if it does not exist. Raises `MemoryStoreError`."""
        await self._backend.open(self._known, create=create)

    async def open_for_reembedding(self) -> None:
        """Open the store whichever embedder its vectors belong to."""
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

    # writing

    async def add(self, memory: NewMemory, *, owner: str = "", key: str | None = None) -> Memory:
        """Store a memory; return it as it is stored.

        An equal memory of the same owner, subject, type and source is updated instead: one whose text has the same
        normal form, see `text.normal`. The memories that its `links` name are linked back to it. A known key makes this
        a no-op. The key of an owner of a tenant is one of this tenant.
        """
        if key is not None and (tenant := tenant_of(owner)) is not None and not belongs_to(tenant, key):
            key = owner_of_tenant(tenant, key)
        if key is not None and (known := await self._backend.known(key)) is not None:
            return known  # without embedding the text again
        now = self._clock()
        times = {"created": now, "accessed": now, "updated": now}
        whole = Memory.model_validate({**memory.model_dump(), **times, "id": str(uuid7()), "owner": owner, "key": key})
        [vector] = await self._embed([whole.text])
        return await self._backend.add(whole, _digest(whole), vector, key)

    async def restore(self, memories: Sequence[Memory]) -> int:
        """Store exported memories unchanged, except those that exist (by id or by text). Return their number."""
        stored = 0
        for at in range(0, len(memories), _BATCH):
            some = memories[at : at + _BATCH]
            vectors = await self._embed([one.text for one in some])
            rows = [(one, _digest(one), vector) for one, vector in zip(some, vectors, strict=True)]
            stored += await self._backend.restore(rows)
        return stored

    async def touch(
        self, ids: Sequence[str], *, owner: Names = None, tenant: str | None = None, key: str | None = None
    ) -> int:
        """Count a use of these memories, so that they stay strong for longer. Return how many of them exist."""
        return await self._backend.touch(ids, Where.of(owner, tenant=tenant), self._clock(), key)

    async def forget(
        self, ids: Sequence[str], *, owner: Names = None, tenant: str | None = None, key: str | None = None
    ) -> int:
        """Remove memories permanently. Return how many existed. key: a repeated call with it returns the same."""
        return await self._backend.forget(ids, Where.of(owner, tenant=tenant), self._clock(), key)

    # reading

    async def search(
        self,
        query: str,
        *,
        owner: Names = None,
        tenant: str | None = None,
        type: Names = None,
        tags: Collection[str] = (),
        subject: Names = "",
        limit: int = 10,
        floor: float | None = None,
    ) -> builtins.list[FoundMemory]:
        """Return the memories that match best, by words and (with an embedder) by vectors, weighted by their strength.

        With an embedder, a memory matches if its similarity is above the floor and not far below the best one, or if it
        has all content words of the query: one shared word is often chance. Without an embedder, or if the memory has
        no vector, one is enough. Of linked memories the newest is returned, with the others in `related`. Nothing is
        changed: call `touch` for those that were useful.

        Args:
            query: Text, of which the first 32,768 characters count.
            subject: Profile to search; "" for the agents' own memories, so that no profile is found by mistake.
            floor: Similarity from which vectors match; None for the embedder's own, see `calibrated_floor`.
        """
        if floor is not None and not -1 <= floor <= 1:
            raise ValueError(f"floor must be a cosine, -1 to 1, got {floor!r}")
        if limit < 1 or not query.strip():
            return []
        query = query[:MAX_TEXT_LENGTH]
        where, depth = Where.of(owner, type, tags, subject, tenant), max(_LEAST_DEPTH, _DEPTH * limit)
        asked = content_words(query)
        worded = await self._backend.by_words(asked, where, depth) if asked else []
        near = await self._near(query, where, depth, floor)
        vector_ranks = {one.id: (rank, one.similarity) for rank, one in enumerate(near, 1)}
        memories = await self._backend.get([*vector_ranks, *(one.id for one in worded if one.id not in vector_ranks)])
        texts = [
            one.id
            for one in worded
            if one.id in memories and (one.id in vector_ranks or not one.embedded or _has_all(memories[one.id], asked))
        ]
        text_ranks = {one: rank for rank, one in enumerate(texts, 1)}
        scores = fuse([texts, builtins.list(vector_ranks)])
        now = self._clock()
        found = []
        for memory in memories.values():
            if (score := scores.get(memory.id, 0.0) * strength(memory, now)) > 0:
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
        return (await self._with_notes(found))[:limit]

    async def _near(self, query: str, where: Where, depth: int, floor: float | None) -> builtins.list[Near]:
        [vector] = await self._embed([query])
        if vector is None or self._embedder is None or self._known is None:
            return []
        if floor is None:
            if self._floor is None:
                self._floor = await calibrated_floor(self._embedder)
            floor = self._floor
        return relevant(await self._backend.by_vector(self._known, vector, where, depth), floor)

    async def _with_notes(self, found: Sequence[FoundMemory]) -> builtins.list[FoundMemory]:
        wanted = {one.memory.id for one in found} | {link.id for one in found for link in one.memory.links}
        known = await self._backend.get(sorted(wanted))
        return with_notes(found, {name: one for name, one in known.items() if one.importance > 0})

    async def profile(
        self, subject: str, *, owner: Names = None, tenant: str | None = None, limit: int = 50
    ) -> builtins.list[FoundMemory]:
        """Return the memories about a subject, the most important first.

        The order depends on neither time nor use, so that a prompt that starts with them stays the same until one is
        added, changed or removed.
        """
        memories = [one async for one in self.export(owner=owner, tenant=tenant, subject=subject) if one.importance > 0]
        memories.sort(key=lambda one: (-one.importance, one.created, one.id))
        return (await self._with_notes([FoundMemory(memory=one, score=one.importance) for one in memories]))[:limit]

    async def get(self, ids: Sequence[str], *, tenant: str | None = None) -> builtins.list[Memory]:
        """Return the memories that exist, in the order of the ids."""
        there = await self._backend.get(ids)
        return [there[one] for one in dict.fromkeys(ids) if one in there and belongs_to(tenant, there[one].owner)]

    async def list(
        self,
        *,
        owner: Names = None,
        tenant: str | None = None,
        type: Names = None,
        tags: Collection[str] = (),
        subject: Names = None,
        limit: int = 50,
    ) -> builtins.list[Memory]:
        """Return memories, the newest first."""
        page = await self._backend.page(Where.of(owner, type, tags, subject, tenant), limit, newest=True)
        return [memory for _, memory in page]

    async def export(
        self,
        *,
        owner: Names = None,
        tenant: str | None = None,
        type: Names = None,
        tags: Collection[str] = (),
        subject: Names = None,
    ) -> AsyncIterator[Memory]:
        """Yield all memories, in the order in which they were stored."""
        where, after = Where.of(owner, type, tags, subject, tenant), 0
        while page := await self._backend.page(where, _PAGE, after=after):
            after = page[-1][0]
            for _, memory in page:
                yield memory

    async def count(
        self,
        *,
        owner: Names = None,
        tenant: str | None = None,
        type: Names = None,
        tags: Collection[str] = (),
        subject: Names = None,
    ) -> int:
        return await self._backend.count(Where.of(owner, type, tags, subject, tenant))

    # maintenance

    async def prune(
        self,
        policy: Policy,
        *,
        owner: Names = None,
        tenant: str | None = None,
        type: Names = None,
        tags: Collection[str] = (),
        subject: Names = None,
        dry_run: bool = False,
    ) -> builtins.list[str]:
        """Remove memories by a policy; return their ids, the weakest first. dry_run: remove nothing."""
        pruning = Pruning(policy, self._clock())
        async for memory in self.export(owner=owner, tenant=tenant, type=type, tags=tags, subject=subject):
            pruning.add(memory)
        gone = pruning.plan()
        if not dry_run:
            for at in range(0, len(gone), _PAGE):
                await self._backend.prune(gone[at : at + _PAGE])
        return [one for one, _ in gone]

    async def reembed(self) -> AsyncIterator[int]:
        """Embed all memories that have no vector of the configured embedder, then record it as the store's embedder.

        Yields the number embedded so far, from time to time. After an interruption, call it again to continue; until it
        ends, the store belongs to the previous embedder.
        """
        known = self._known
        if known is None:
            raise MemoryStoreUnavailable(self.place, "no embedder is set; set PERDURE_EMBEDDER")
        # A memory added meanwhile has a larger number. One whose text changed meanwhile has lost its new vector, so the
        # search is repeated until it finds nothing to embed. A text without any vector is skipped.
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
        """Return whether an embedder is set and some memories have no vector of it."""
        return self._known is not None and bool(await self._backend.without_vector(self._known, 0, 1))

    async def _embed(self, texts: builtins.list[str]) -> builtins.list[Vector | None]:
        return [None] * len(texts) if self._embedder is None else await embed(self._embedder, texts)


_MAX: Final = 5
"""Largest number of older memories in the note of a result."""


def with_notes(found: Sequence[FoundMemory], known: Mapping[str, Memory]) -> list[FoundMemory]:
    """Replace linked results by the newest memory of their group, with the others as its note.

    Args:
        found: Results, the best first.
        known: Memories of the results and of their links, by id. Links to other memories are ignored.
    """
    groups = _groups(known.values())
    results: dict[str, FoundMemory] = {}
    shown: set[int] = set()
    for one in found:
        group = groups[one.memory.id]
        if id(group) not in shown:
            shown.add(id(group))
            newest = max(group, key=lambda memory: (memory.updated, memory.created, memory.id))
            rest = sorted((memory for memory in group if memory.id != newest.id), key=lambda memory: -memory.updated)
            related = tuple(_related(newest, memory) for memory in rest[:_MAX])
            results[newest.id] = one.model_copy(update={"memory": newest, "related": related})
    return list(results.values())


def _groups(memories: Iterable[Memory]) -> dict[str, list[Memory]]:
    """Return, for each id, the memories that are linked to it directly or by others, itself among them.

    Imported memories may have links to memories of another scope. They are ignored.
    """
    groups: dict[str, list[Memory]] = {}
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    every = list(memories)
    for memory in every:
        groups[memory.id] = [memory]
        same[*memory.scope, normal(memory.text)].append(memory.id)
    pairs = [(memory.id, link.id) for memory in every for link in memory.links]
    pairs += [(ids[0], other) for ids in same.values() for other in ids[1:]]
    for one, other in pairs:
        if other in groups and groups[one] is not groups[other] and groups[one][0].scope == groups[other][0].scope:
            # the smaller group joins the larger one, so that no memory moves more often than the logarithm of all
            smaller, larger = sorted((groups[one], groups[other]), key=len)
            larger += smaller
            groups.update((memory.id, larger) for memory in smaller)
    return groups


def _related(newest: Memory, other: Memory) -> RelatedMemory:
    how: Literal["supersedes", "conflicts", "same"] = "supersedes"  # also if the two are linked by others only
    links = [link.relation for link in newest.links if link.id == other.id]
    links += [link.relation for link in other.links if link.id == newest.id]
    if normal(other.text) == normal(newest.text) or "same" in links:
        how = "same"
    elif "conflicts" in links:
        how = "conflicts"
    return RelatedMemory(relation=how, id=other.id, text=other.text, source=other.source, updated=other.updated)


def relevant(near: Sequence[Near], floor: float) -> list[Near]:
    """Return the memories that match: above the floor, and in the upper half between it and the best similarity.

    One threshold is too low for a query with a clear answer and too high for one without, so a good result raises it.

    Args:
        near: Memories, the most similar first.
        floor: Similarity up to which a memory is unrelated. Orthogonal and opposite vectors always are.
    """
    if not near:
        return []
    floor = max(0.0, floor)
    least = (floor + near[0].similarity) / 2
    return [one for one in near if one.similarity > floor and one.similarity >= least]


async def calibrated_floor(embedder: Embedder) -> float:
    """Return the embedder's `floor`; without one, the largest similarity among 16 unrelated sentences."""
    known = getattr(embedder, "floor", None)
    if isinstance(known, int | float):
        return float(known)
    vectors = [vector for vector in await embed(embedder, list(UNRELATED)) if vector is not None]
    return max((_cosine(one, other) for at, one in enumerate(vectors) for other in vectors[:at]), default=0.0)


def _cosine(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Conditions under which a memory is removed; one of them suffices.

    Attributes:
        below: Its strength (see `memory.py`) is less than this.
        unused: Its last use is more than this many days ago.
        most: Its owner and type have this many stronger ones.
    """

    below: float | None = None
    unused: float | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.below is None and self.unused is None and self.most is None:
            raise ConfigurationError(
                "a pruning policy must set below (strength), unused (days) or most (number per owner and type)"
            )
        for name in ("below", "unused", "most"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{name} of a pruning policy must be 0 or more, got {value}")


@dataclass(frozen=True, slots=True)
class _Ranked:
    strength: float
    id: str
    accessed: float


class Pruning:
    """Plan of a prune over a stream of memories; keeps only what it needs of each."""

    def __init__(self, policy: Policy, now: float) -> None:
        self._policy = policy
        self._now = now
        self._removed: list[_Ranked] = []
        self._kept: dict[tuple[str, str], list[_Ranked]] = defaultdict(list)

    def add(self, memory: Memory) -> None:
        policy = self._policy
        ranked = _Ranked(strength(memory, self._now), memory.id, memory.accessed)
        weak = policy.below is not None and ranked.strength < policy.below
        if weak or (policy.unused is not None and self._now - memory.accessed > policy.unused * _DAY):
            self._removed.append(ranked)
        elif policy.most is not None:
            self._kept[memory.owner, memory.type].append(ranked)

    def plan(self) -> list[tuple[str, float]]:
        """Return the ids of the memories to remove, each with the time of its last use, the weakest first."""
        removed = list(self._removed)
        for kept in self._kept.values():
            kept.sort(key=lambda one: (one.strength, one.accessed, one.id), reverse=True)
            removed += kept[self._policy.most :]
        removed.sort(key=lambda one: one.strength)
        return [(one.id, one.accessed) for one in removed]

"""Protocol of the databases behind a memory store: SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from .embedders import Vector
from .memory import Memory, MemoryLink, Relation

KEY_LIFETIME: Final = 90 * 86_400.0
"""Lifetime of an idempotency key in seconds: longer than any task or dead letter is kept by default."""


def forgotten_key(key: str, memory_id: str) -> str:
    """Return the key that tells that a call with `key` has removed this memory."""
    return f"{key}:forgot:{memory_id}"


@dataclass(frozen=True, slots=True)
class Where:
    """Filter of memories: any of these owners, types and subjects, all of these tags. None matches all."""

    owners: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    tags: tuple[str, ...] = ()
    subjects: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        owner: str | Collection[str] | None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
        subject: str | Collection[str] | None = None,
    ) -> Where:
        return cls(_several(owner), _several(type), tuple(tags), _several(subject))


def _several(one: str | Collection[str] | None) -> tuple[str, ...] | None:
    return (one,) if isinstance(one, str) else None if one is None else tuple(one)


class Near(NamedTuple):
    """Id of a memory and its similarity to the query."""

    id: str
    similarity: float


class WordMatch(NamedTuple):
    """Id of a memory with words of the query, and whether it has a vector of the store's embedder too."""

    id: str
    embedded: bool


def links_to(memory: Memory) -> dict[str, MemoryLink]:
    """Return the links of the other memories back to this one, by their ids."""
    back: dict[Relation, Relation] = {"supersedes": "superseded_by", "superseded_by": "supersedes"}
    return {link.id: MemoryLink(back.get(link.relation, link.relation), memory.id) for link in memory.links}


class EmbedderIdentity(NamedTuple):
    """Name and dimension of an embedder, as a store records them."""

    name: str
    dimension: int

    @property
    def label(self) -> str:
        """Label of its vectors in the database."""
        return f"{self.name}/{self.dimension}"


class Backend(Protocol):
    """Database of a memory store. Each call is one transaction; `store` is its name in errors.

    All methods raise `MemoryStoreUnavailable` and `MemoryStoreDamaged`.
    """

    @property
    def store(self) -> str: ...

    async def open(self, embedder: EmbedderIdentity | None, *, create: bool) -> None:
        """Open the database, and record the first embedder of a store. create: create a missing one.

        Raises `MemoryStoreMissing`, `NotAMemoryStore`, `VectorsUnavailable`, `EmbedderMismatch`.
        """
        ...

    async def close(self) -> None: ...

    async def add(self, memory: Memory, digest: str, vector: Vector | None, key: str | None) -> Memory:
        """Store a memory unless the key is known.

        Merge it into the one with its digest, owner and type; store its links in the linked memories of its scope too.
        """
        ...

    async def known(self, key: str) -> Memory | None:
        """Return the memory that was written with this key."""
        ...

    async def restore(self, memories: Sequence[tuple[Memory, str, Vector | None]]) -> int:
        """Store memories unchanged, except those whose id or text (per owner, type) is known. Return their number."""
        ...

    async def by_words(self, words: Sequence[str], where: Where, limit: int) -> list[WordMatch]:
        """Return the memories with any of the words, the best first, except those of importance 0."""
        ...

    async def by_vector(self, vector: Vector, where: Where, limit: int) -> list[Near]:
        """Return the memories with the nearest vectors, the nearest first, except those of importance 0."""
        ...

    async def get(self, ids: Sequence[str]) -> dict[str, Memory]: ...

    async def page(self, where: Where, limit: int, *, after: int = 0, newest: bool = False) -> list[tuple[int, Memory]]:
        """Return memories in the order in which they were stored, with their numbers, from after number `after`."""
        ...

    async def count(self, where: Where) -> int: ...

    async def touch(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        """Count one use of each memory, unless the key is known. Return how many of them exist."""
        ...

    async def forget(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        """Remove memories. Return how many existed, also those that a call with the same key has removed before."""
        ...

    async def prune(self, unused: Sequence[tuple[str, float]]) -> int:
        """Remove memories that were not used since: ids, each with the time of its last use when it was read."""
        ...

    async def without_vector(self, known: EmbedderIdentity, after: int, limit: int) -> list[tuple[int, str]]:
        """Return numbers and texts of memories without a vector of that embedder."""
        ...

    async def put_vectors(self, known: EmbedderIdentity, vectors: Sequence[tuple[int, str, Vector]]) -> None:
        """Store vectors of another embedder, given by number and text; skip those whose text has changed."""
        ...

    async def change_embedder(self, known: EmbedderIdentity) -> None:
        """Record this embedder as the store's, and delete the vectors of others."""
        ...

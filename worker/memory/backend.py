"""What a database does for a memory store. There is one for SQLite and one for PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from .embedders import Vector
from .memory import Memory

__all__ = ["KEY_LIFETIME", "SAME", "Backend", "Known", "Near", "Where"]

SAME: Final = 0.92
"""Cosine similarity from which on two memories of one type and owner are the same."""

KEY_LIFETIME: Final = 90 * 86_400.0
"""Seconds for which an idempotency key is known: longer than any task or dead letter is kept by default."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which memories: of one of these owners, of one of these types, with all of these tags. None: of any."""

    owners: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    tags: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, owner: str | Collection[str] | None, type: str | Collection[str] | None, tags: Collection[str]
    ) -> Where:
        return cls(_several(owner), _several(type), tuple(tags))


def _several(one: str | Collection[str] | None) -> tuple[str, ...] | None:
    return (one,) if isinstance(one, str) else None if one is None else tuple(one)


class Near(NamedTuple):
    """A memory's id, and how like the query it is."""

    id: str
    similarity: float


class Known(NamedTuple):
    """The embedder whose vectors a store has."""

    name: str
    dimension: int

    @property
    def label(self) -> str:
        """By which its vectors are told from others."""
        return f"{self.name}/{self.dimension}"


class Backend(Protocol):
    """A database. Each call is one transaction; `store` is how errors name it.

    All of them raise `MemoryStoreUnavailable`, `MemoryStoreDamaged`.
    """

    @property
    def store(self) -> str: ...

    async def open(self, embedder: Known | None, *, create: bool) -> None:
        """Open it, and make it where there is none and `create`; the first embedder of a store becomes its own.

        Raises `MemoryStoreMissing`, `NotAMemoryStore`, `VectorsUnavailable`, `EmbedderMismatch`.
        """
        ...

    async def close(self) -> None: ...

    async def add(self, memory: Memory, digest: str, vector: Vector | None, key: str | None) -> Memory:
        """Store it, unless the key is known; merge it into one of its owner and type that is the same."""
        ...

    async def known(self, key: str) -> Memory | None:
        """What was written with this key."""
        ...

    async def restore(self, memories: Sequence[tuple[Memory, str, Vector | None]]) -> int:
        """Store memories as they are, except those whose id or whose wording (of owner and type) is known."""
        ...

    async def by_words(self, words: Sequence[str], where: Where, limit: int) -> list[str]:
        """Ids of those with any of the words, the best first."""
        ...

    async def by_vector(self, vector: Vector, where: Where, limit: int) -> list[Near]:
        """Those whose vectors are nearest, the nearest first."""
        ...

    async def get(self, ids: Sequence[str]) -> dict[str, Memory]: ...

    async def page(self, where: Where, limit: int, *, after: int = 0, newest: bool = False) -> list[tuple[int, Memory]]:
        """In the order in which they were stored, each with its number; those with larger ones than `after`."""
        ...

    async def count(self, where: Where) -> int: ...

    async def touch(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        """Count one use of each, unless the key is known. Returns how many there are."""
        ...

    async def forget(self, ids: Sequence[str], where: Where) -> int: ...

    async def prune(self, unused: Sequence[tuple[str, float]]) -> int:
        """Remove those that were not accessed since: ids, each with the time of its last access as it was read."""
        ...

    async def without_vector(self, known: Known, after: int, limit: int) -> list[tuple[int, str]]:
        """Numbers and texts of memories that have no vector of that embedder."""
        ...

    async def put_vectors(self, known: Known, vectors: Sequence[tuple[int, str, Vector]]) -> None:
        """Store vectors beside those of the store's embedder: by number and text, unless the text has changed."""
        ...

    async def change_embedder(self, known: Known) -> None:
        """From now on the store's vectors are this embedder's; those of others go."""
        ...

"""What can go wrong with a memory store. The whole tree:

PerdureError
└── MemoryStoreError            the store of long-term memories
    ├── InvalidMemory           what cannot be a memory; nothing was stored
    ├── MemoryStoreUnavailable  it cannot be opened, reached or locked in time
    │   └── MemoryStoreMissing  there is none at that place
    ├── MemoryStoreDamaged      its file is broken; nothing was changed
    ├── NotAMemoryStore         something else is at that place, or what a later version wrote
    ├── VectorsUnavailable      an embedder is set where vectors cannot be stored
    ├── EmbedderMismatch        the store's vectors are another embedder's
    └── EmbedderFailed          the embedder raised, or returned what are no embeddings
"""

from __future__ import annotations

from ...queues import PerdureError

__all__ = [
    "EmbedderFailed",
    "EmbedderMismatch",
    "InvalidMemory",
    "MemoryStoreDamaged",
    "MemoryStoreError",
    "MemoryStoreMissing",
    "MemoryStoreUnavailable",
    "NotAMemoryStore",
    "VectorsUnavailable",
]


class MemoryStoreError(PerdureError):
    """Base of errors of the store of long-term memories."""


class InvalidMemory(MemoryStoreError, ValueError):
    """What was to be remembered cannot be a memory; the message names the field."""


class MemoryStoreUnavailable(MemoryStoreError):
    """The store cannot be opened or reached, or another process holds its lock for too long. Trying again may help."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"memory store {store}: {problem}")
        self.store = store


class MemoryStoreMissing(MemoryStoreUnavailable):
    """There is no store at that place, and it was only to be read."""


class MemoryStoreDamaged(MemoryStoreError):
    """The store's file is broken. Nothing in it was changed."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(
            f"memory store {store} is damaged ({problem}); nothing was changed: stop its users, save what can be read "
            "with 'perdure memory export --salvage', move the file away, and take it in with 'perdure memory add "
            "--file', or put a backup in its place"
        )
        self.store = store


class NotAMemoryStore(MemoryStoreError):
    """Something else is at the store's place, or a store that a later version wrote. Nothing in it was changed."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"{store} {problem}; nothing was changed: name another place with PERDURE_MEMORY")
        self.store = store


class VectorsUnavailable(MemoryStoreError):
    """An embedder is set, and this store cannot hold vectors."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(
            f"memory store {store} cannot hold vectors: {problem}; without PERDURE_EMBEDDER it is searched by words"
        )
        self.store = store


class EmbedderMismatch(MemoryStoreError):
    """The vectors in the store are another embedder's than the one that is set: they cannot be compared."""

    def __init__(self, store: str, stored: tuple[str, int], given: tuple[str, int]) -> None:
        """stored, given: name and dimension."""
        super().__init__(
            f"memory store {store} has vectors of embedder {stored[0]!r} with {stored[1]} dimensions, and the one that "
            f"is set is {given[0]!r} with {given[1]}: embed all memories anew with 'perdure memory reembed', or name "
            "another store with PERDURE_MEMORY"
        )
        self.store = store
        self.stored = stored
        self.given = given


class EmbedderFailed(MemoryStoreError):
    """The embedder raised, or returned something else than one vector of its dimension for each text."""

    def __init__(self, embedder: str, problem: str) -> None:
        super().__init__(f"embedder {embedder!r}: {problem}")
        self.embedder = embedder

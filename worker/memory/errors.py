"""Errors of the memory store. The tree:

PerdureError
└── MemoryStoreError            the store of long-term memories
    ├── InvalidMemory           a value that cannot be stored as a memory
    ├── MemoryStoreUnavailable  it cannot be opened, reached or locked in time
    │   └── MemoryStoreMissing  there is no store at that place
    ├── MemoryStoreDamaged      its file is damaged; nothing was changed
    ├── NotAMemoryStore         the place holds other data, or a store of a later version
    ├── VectorsUnavailable      an embedder is set, but vectors cannot be stored
    ├── EmbedderMismatch        the store's vectors are another embedder's
    └── EmbedderFailed          the embedder raised, or returned no valid embeddings
"""

from __future__ import annotations

from ...queues.errors import PerdureError

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
    """Base of the errors of the memory store."""


class InvalidMemory(MemoryStoreError, ValueError):
    """A value cannot be stored as a memory; the message names the field. Nothing was stored."""


class MemoryStoreUnavailable(MemoryStoreError):
    """The store cannot be opened or reached, or another process holds its lock for too long. A retry may help."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"memory store {store}: {problem}")
        self.store = store


class MemoryStoreMissing(MemoryStoreUnavailable):
    """There is no store at that place, and the call only reads."""


class MemoryStoreDamaged(MemoryStoreError):
    """The store's file is damaged. Nothing in it was changed."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(
            f"memory store {store} is damaged ({problem}); nothing was changed; stop its users, save what is readable "
            "with 'perdure memory export --salvage', move the file away and import them with 'perdure memory add "
            "--file', or restore a backup"
        )
        self.store = store


class NotAMemoryStore(MemoryStoreError):
    """The place holds other data, or a store that a later version wrote. Nothing in it was changed."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"{store} {problem}; nothing was changed; set PERDURE_MEMORY to another place")
        self.store = store


class VectorsUnavailable(MemoryStoreError):
    """An embedder is set, and this store cannot hold vectors."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(
            f"memory store {store} cannot hold vectors: {problem}; unset PERDURE_EMBEDDER to search by words only"
        )
        self.store = store


class EmbedderMismatch(MemoryStoreError):
    """The vectors in the store are another embedder's than the one that is set, so they cannot be compared."""

    def __init__(self, store: str, stored: tuple[str, int], given: tuple[str, int]) -> None:
        """Describe the mismatch. stored, given: name and dimension."""
        super().__init__(
            f"memory store {store} has vectors of embedder {stored[0]!r} with {stored[1]} dimensions, but "
            f"{given[0]!r} with {given[1]} is set; embed all memories again with 'perdure memory reembed', or set "
            "another store with PERDURE_MEMORY"
        )
        self.store = store
        self.stored = stored
        self.given = given


class EmbedderFailed(MemoryStoreError):
    """The embedder raised, or did not return one vector of its dimension per text."""

    def __init__(self, embedder: str, problem: str) -> None:
        super().__init__(f"embedder {embedder!r}: {problem}")
        self.embedder = embedder

"""Long-term memories: what an agent knows beyond a single task, in SQLite or PostgreSQL.

The package knows nothing of steps, events and agents; `ctx.memory` is in worker/memory/task_memory.py.

    memory.py         Memory: its fields, strength, merge of two equal ones
    hybrid.py         HybridStore: add, search, prune, reembed
    backend.py        tables and statements of both databases; one call is one transaction
    sqlite.py         SQLite, for the workers of one host; salvage of a damaged file
    sqlite_driver.py  a connection, by apsw or sqlite3; translation of errors
    postgres.py       PostgreSQL, for the workers of several hosts
    embedders.py      Embedder protocol, calls of embedders, HashingEmbedder
    text.py           normal form of a text, words of a query
    factory.py        settings to a store; the one store of a process

Writes carry idempotency keys, since a step that is cut off runs again. The vectors of a store belong to one embedder;
`reembed` changes it while the store stays in use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import (
    EmbedderFailed,
    EmbedderMismatch,
    InvalidMemory,
    MemoryStoreDamaged,
    MemoryStoreError,
    MemoryStoreMissing,
    MemoryStoreUnavailable,
    NotAMemoryStore,
    VectorsUnavailable,
)
from .factory import LazyMemoryStore, make_store
from .memory import FoundMemory, Memory, MemoryLink, NewMemory, RelatedMemory, new_memory, strength

if TYPE_CHECKING:
    from .embedders import Embedder, HashingEmbedder
    from .hybrid import HybridStore, Policy
    from .sqlite import Salvage, SqliteBackend

__all__ = [
    "Embedder",
    "EmbedderFailed",
    "EmbedderMismatch",
    "FoundMemory",
    "HashingEmbedder",
    "HybridStore",
    "InvalidMemory",
    "LazyMemoryStore",
    "Memory",
    "MemoryLink",
    "MemoryStoreDamaged",
    "MemoryStoreError",
    "MemoryStoreMissing",
    "MemoryStoreUnavailable",
    "NewMemory",
    "NotAMemoryStore",
    "Policy",
    "RelatedMemory",
    "Salvage",
    "SqliteBackend",
    "VectorsUnavailable",
    "make_store",
    "new_memory",
    "strength",
]

# Imported on first use: a worker starts without them, and many never open a store.
_HOMES = {
    "Embedder": ".embedders",
    "HashingEmbedder": ".embedders",
    "HybridStore": ".hybrid",
    "Policy": ".hybrid",
    "Salvage": ".sqlite",
    "SqliteBackend": ".sqlite",
}

if not TYPE_CHECKING:  # with __getattr__, a type checker accepts any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value

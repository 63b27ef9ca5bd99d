"""What outlives tasks: an agent's long-term knowledge."""

from .decay import strength
from .embedder import Embedder
from .errors import (
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
from .hashing import HashingEmbedder
from .hybrid import HybridStore
from .memory import Found, Memory, NewMemory, new_memory
from .opening import Keeper, make_store
from .pruning import Policy
from .salvage import Salvage
from .sqlite import SqliteBackend

__all__ = [
    "Embedder",
    "EmbedderFailed",
    "EmbedderMismatch",
    "Found",
    "HashingEmbedder",
    "HybridStore",
    "InvalidMemory",
    "Keeper",
    "Memory",
    "MemoryStoreDamaged",
    "MemoryStoreError",
    "MemoryStoreMissing",
    "MemoryStoreUnavailable",
    "NewMemory",
    "NotAMemoryStore",
    "Policy",
    "Salvage",
    "SqliteBackend",
    "VectorsUnavailable",
    "make_store",
    "new_memory",
    "strength",
]

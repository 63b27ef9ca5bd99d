"""What outlives tasks: an agent's long-term knowledge."""

from .embedders import Embedder, HashingEmbedder
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
from .factory import LazyMemoryStore, make_store
from .hybrid import HybridStore
from .memory import FoundMemory, Memory, NewMemory, new_memory, strength
from .pruning import Policy
from .sqlite.backend import SqliteBackend
from .sqlite.salvage import Salvage

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

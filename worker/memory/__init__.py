"""What outlives tasks: an agent's long-term knowledge."""

from .decay import DECAY, HALF_LIFE, strength
from .embedder import Embedder, load_embedder
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
from .fusion import RANK_CONSTANT, fuse
from .hashing import HashingEmbedder
from .hybrid import HybridStore
from .memory import LONGEST_TEXT, Found, Memory, NewMemory, new_memory
from .opening import Keeper, make_store
from .pruning import Policy
from .salvage import Salvage
from .sqlite import SqliteBackend

__all__ = [
    "DECAY",
    "HALF_LIFE",
    "LONGEST_TEXT",
    "RANK_CONSTANT",
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
    "fuse",
    "load_embedder",
    "make_store",
    "new_memory",
    "strength",
]

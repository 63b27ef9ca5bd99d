"""Long-term memory: what is stored and found, the embedder protocol, and the errors of the store."""

from .worker.errors import (
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
from .worker.memory.embedders import Embedder, HashingEmbedder
from .worker.memory.memory import FoundMemory, Memory, MemoryLink, NewMemory, RelatedMemory

__all__ = [
    "Embedder",
    "EmbedderFailed",
    "EmbedderMismatch",
    "FoundMemory",
    "HashingEmbedder",
    "InvalidMemory",
    "Memory",
    "MemoryLink",
    "MemoryStoreDamaged",
    "MemoryStoreError",
    "MemoryStoreMissing",
    "MemoryStoreUnavailable",
    "NewMemory",
    "NotAMemoryStore",
    "RelatedMemory",
    "VectorsUnavailable",
]

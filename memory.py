"""Long-term memory: what is stored and found, the embedder protocol, and the errors of the store."""

from .worker.memory import (
    Embedder,
    EmbedderFailed,
    EmbedderMismatch,
    FoundMemory,
    HashingEmbedder,
    InvalidMemory,
    Memory,
    MemoryLink,
    MemoryStoreDamaged,
    MemoryStoreError,
    MemoryStoreMissing,
    MemoryStoreUnavailable,
    NewMemory,
    NotAMemoryStore,
    RelatedMemory,
    VectorsUnavailable,
)

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

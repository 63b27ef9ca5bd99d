"""The store of memories, as agents and people use it."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Collection, Sequence
from types import TracebackType
from typing import Protocol, Self

from .memory import Found, Memory, NewMemory
from .pruning import Policy

__all__ = ["MemoryStore"]


class MemoryStore(Protocol):
    """Long-term memories. Open it before use (`async with store:`).

    Where `owner` or `type` filters, None is any and several are any of them; `tags` must all be there.
    """

    async def open(self, *, create: bool = True) -> None:
        """Raises `MemoryStoreError` of several kinds. create: make it where there is none."""
        ...

    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def add(self, memory: NewMemory, *, owner: str = "", key: str | None = None) -> Memory:
        """Remember; returns the memory as it is stored.

        One of the same owner and type that says the same (the same wording but for case, spaces and end marks, or a
        cosine similarity of 0.92) is updated instead. With a key that is known, nothing happens.
        """
        ...

    async def search(
        self,
        query: str,
        *,
        owner: str | Collection[str] | None = None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
        limit: int = 10,
    ) -> builtins.list[Found]:
        """The memories that fit best, by words and (with an embedder) by meaning, weighed with their strength.

        Changes nothing: `touch` those that were of use.
        """
        ...

    async def get(self, ids: Sequence[str]) -> builtins.list[Memory]:
        """Those that are there, in the order of the ids."""
        ...

    async def touch(
        self, ids: Sequence[str], *, owner: str | Collection[str] | None = None, key: str | None = None
    ) -> int:
        """They were of use: they stay strong for longer. Returns how many of them there are."""
        ...

    async def forget(self, ids: Sequence[str], *, owner: str | Collection[str] | None = None) -> int:
        """Remove them for good. Returns how many there were."""
        ...

    async def list(
        self,
        *,
        owner: str | Collection[str] | None = None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
        limit: int = 50,
    ) -> builtins.list[Memory]:
        """The newest first."""
        ...

    def export(
        self,
        *,
        owner: str | Collection[str] | None = None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
    ) -> AsyncIterator[Memory]:
        """All, in the order in which they were stored."""
        ...

    async def count(
        self,
        *,
        owner: str | Collection[str] | None = None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
    ) -> int: ...

    async def restore(self, memories: Sequence[Memory]) -> int:
        """Store what was exported, as it was; what is there already (by id or by wording) is left alone.

        Returns how many were stored.
        """
        ...

    async def prune(
        self,
        policy: Policy,
        *,
        owner: str | Collection[str] | None = None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
        dry_run: bool = False,
    ) -> builtins.list[str]:
        """Remove what the policy says; returns the ids, the weakest first. dry_run: remove nothing."""
        ...

    def reembed(self) -> AsyncIterator[int]:
        """Embed all memories that have no vector of the embedder that is set, and make it the store's.

        Yields how many were embedded, from time to time. Broken off, it goes on where it was; until it has ended the
        store is that of the former embedder.
        """
        ...

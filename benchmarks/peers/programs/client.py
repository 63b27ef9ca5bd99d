"""What a peer's module gives: its client, behind the few calls that are measured."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, cast

__all__ = ["AsyncClient", "BlockingClient", "Peer", "load"]


class AsyncClient(Protocol):
    """A connected client; handles are the peer's own."""

    async def enqueue(self, task: str, *arguments: Any) -> Any:
        """Enqueue one task; returns once the peer says that it is enqueued."""

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Enqueue many tasks in the peer's bulk call, if its module says that it has one."""

    async def ready(self, handle: Any) -> bool:
        """Whether its result can be read; does not wait for it."""

    async def read(self, handle: Any) -> Any:
        """The result of a task that is ready."""


class BlockingClient(Protocol):
    """The same of a peer whose client blocks."""

    def enqueue(self, task: str, *arguments: Any) -> Any:
        """Enqueue one task."""

    def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Enqueue many tasks."""

    def ready(self, handle: Any) -> bool:
        """Whether its result can be read."""

    def read(self, handle: Any) -> Any:
        """The result of a task that is ready."""


class Peer(Protocol):
    """A module named `on_...`. BLOCKING: which kind of client it connects. BULK: whether that has a bulk call."""

    BLOCKING: bool
    BULK: bool

    def connect(self) -> AbstractAsyncContextManager[AsyncClient] | AbstractContextManager[BlockingClient]:
        """The client, connected on entry."""


def load(module: str) -> Peer:
    """The module of this package with that name."""
    return cast("Peer", importlib.import_module(f".{module}", __package__))

"""The interface of the `on_...` modules: a client with the measured calls."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, cast

__all__ = ["AsyncClient", "BlockingClient", "Peer", "load"]


class AsyncClient(Protocol):
    """A connected client; the project defines the type of handles."""

    async def enqueue(self, task: str, *arguments: Any) -> Any:
        """Enqueue one task; return when the project reports that it is enqueued."""

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Enqueue many tasks with the project's bulk call; only if the module sets BULK."""

    async def ready(self, handle: Any) -> bool:
        """Return whether the result can be read, without waiting."""

    async def read(self, handle: Any) -> Any:
        """Return the result of a task that is ready."""


class BlockingClient(Protocol):
    """A connected client with blocking calls."""

    def enqueue(self, task: str, *arguments: Any) -> Any:
        """Enqueue one task."""

    def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Enqueue many tasks."""

    def ready(self, handle: Any) -> bool:
        """Return whether the result can be read."""

    def read(self, handle: Any) -> Any:
        """Return the result of a task that is ready."""


class Peer(Protocol):
    """A module named `on_...`.

    BLOCKING: whether its client blocks. BULK: whether its client has a bulk call. RESULTS: whether results are kept; if
    not, `ready` returns whether the task has succeeded.
    """

    BLOCKING: bool
    BULK: bool
    RESULTS: bool

    def connect(self) -> AbstractAsyncContextManager[AsyncClient] | AbstractContextManager[BlockingClient]:
        """Return the client, connected on entry."""


def load(module: str) -> Peer:
    """Import a module of this package by name."""
    return cast("Peer", importlib.import_module(f".frameworks.{module}", __package__))

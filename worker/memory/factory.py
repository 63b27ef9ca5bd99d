"""Memory store of a process: created from the settings, opened on first use."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from ...queues.errors import ConfigurationError
from ..errors import MemoryStoreUnavailable
from ..log import logger
from ..settings import POSTGRES, Settings

if TYPE_CHECKING:
    from .hybrid import HybridStore

_FILE = "memory.sqlite3"


def is_postgres(place: str) -> bool:
    return place.startswith(POSTGRES)


def store_path(settings: Settings) -> Path:
    """Return the file of a SQLite store."""
    if settings.memory:
        return Path(settings.memory).expanduser()
    return settings.data_folder / _FILE


def make_store(settings: Settings, *, clock: Callable[[], float] = time.time) -> HybridStore:
    """Return the store that the settings name, not yet open. Raises `ConfigurationError`, `VectorsUnavailable`."""
    # imported here, since many workers never open a store
    from .embedders import load_embedder
    from .hybrid import HybridStore
    from .sqlite import SqliteBackend

    embedder = load_embedder(settings.embedder) if settings.embedder else None
    if is_postgres(settings.memory):
        try:
            from .postgres import PostgresBackend  # imports psycopg, an extra
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("psycopg", "psycopg_pool"):
                raise
            raise ConfigurationError(
                f"memories in PostgreSQL need the package {error.name}: pip install 'perdure[postgres]'"
            ) from None
        return HybridStore(PostgresBackend(settings.memory), embedder, clock=clock)
    return HybridStore(SqliteBackend(store_path(settings)), embedder, clock=clock)


class LazyMemoryStore:
    """The one memory store of a process: opened on first use, closed when the worker ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store: HybridStore | None = None
        self._opening = anyio.Lock()
        self._closed = False

    def exists(self) -> bool:
        """Return whether there is a store: an open one, one that the settings name, or a file of this host."""
        return self._store is not None or bool(self._settings.memory) or store_path(self._settings).exists()

    async def get(self) -> HybridStore:
        """Return the open store. Raises `MemoryStoreError`, `ConfigurationError`; the next call tries again."""
        async with self._opening:
            if self._closed:
                raise MemoryStoreUnavailable("of this worker", "it is closed: the worker has ended")
            if self._store is None:
                store = make_store(self._settings)
                await store.open()
                if await store.lacks_vectors():
                    logger.warning(
                        "memory store {} has memories without a vector, which are only found by words; "
                        "embed them with 'perdure memory reembed'",
                        store.place,
                    )
                self._store = store
            return self._store

    async def close(self) -> None:
        async with self._opening:
            self._closed = True
            store, self._store = self._store, None
            if store is not None:
                await store.close()

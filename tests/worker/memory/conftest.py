"""Stores on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from perdure.worker.memory import HybridStore, SqliteBackend
from perdure.worker.memory.postgres import PostgresBackend

from tests.support.memory_stores import Stores
from tests.support.servers.postgres import PostgresServer, find_postgres

POSTGRES = "postgres"
BACKENDS = ["sqlite", *([POSTGRES] if find_postgres() else [])]


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the place of an empty store, as PERDURE_MEMORY names it."""
    if request.param == POSTGRES:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return server.new_database()
    return str(tmp_path / "memory.sqlite3")


@pytest.fixture
def stores(place: str) -> Stores:
    return Stores(lambda: PostgresBackend(place) if "://" in place else SqliteBackend(Path(place)))


@pytest.fixture
async def store(stores: Stores) -> AsyncIterator[HybridStore]:
    async with stores() as store:
        yield store

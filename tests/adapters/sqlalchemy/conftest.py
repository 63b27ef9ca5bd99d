"""Databases of the tests, one for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure.integrations.sqlalchemy import SqlOutbox

from tests.adapters.sqlalchemy.shop import Base, open_engine
from tests.support.servers.postgres import PostgresServer, find_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = find_postgres()
    if programs is None:
        pytest.skip("pgserver has no PostgreSQL for this host")
    server = PostgresServer(programs).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a database with the tables of the shop, which also names the journal of the test."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'shop.db'}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.new_database().replace("postgresql:", "postgresql+psycopg:")
    monkeypatch.setenv("SHOP_JOURNAL", str(tmp_path / "journal.txt"))
    engine = open_engine(url)
    Base.metadata.create_all(engine)
    SqlOutbox(engine).table.create(engine)
    return url

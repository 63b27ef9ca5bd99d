"""Faults of a PostgreSQL memory store: server unavailable, extension missing, privileges missing."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from perdure.worker.memory import HybridStore, MemoryStoreUnavailable, NotAMemoryStore, VectorsUnavailable, postgres
from perdure.worker.memory.postgres import PostgresBackend

from tests.support.memory_stores import Numbers, remember
from tests.support.servers.postgres import PostgresServer, find_postgres
from tests.support.workers import wait_until

pytestmark = pytest.mark.skipif(find_postgres() is None, reason="there is no PostgreSQL wheel for this host")


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


async def test_a_restarted_server_is_used_again(url: str, postgres_server: PostgresServer) -> None:
    async with HybridStore(PostgresBackend(url), Numbers()) as store:
        await remember(store, "1 before")
        postgres_server.restart()
        await remember(store, "2 after")
        assert (await store.search("1"))[0].memory.text == "1 before"


async def test_without_the_extension_only_words_are_searched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_EXTENSION", "not_installed")
    with pytest.raises(VectorsUnavailable, match="the server has no pgvector; install it"):
        await HybridStore(PostgresBackend(url), Numbers()).open()
    async with HybridStore(PostgresBackend(url)) as store:
        await remember(store, "1 of many")
        assert len(await store.search("many")) == 1
        await store.forget([(await store.list())[0].id])


async def test_a_missing_privilege_for_the_extension_is_reported(url: str) -> None:
    role = "limited_" + url.partition("?")[0].rpartition("_")[2]
    run(url, f"CREATE ROLE {role} LOGIN", f"GRANT CREATE ON SCHEMA public TO {role}")
    limited = url.replace("user=postgres", f"user={role}")
    with pytest.raises(VectorsUnavailable, match="CREATE EXTENSION vector"):
        await HybridStore(PostgresBackend(limited), Numbers()).open()
    run(url, "CREATE EXTENSION vector")
    async with HybridStore(PostgresBackend(limited), Numbers()) as store:
        await remember(store, "1 of all")
        assert (await store.search("1"))[0].vector_rank == 1


async def test_a_missing_privilege_for_tables_is_reported(url: str) -> None:
    role = "poor_" + url.partition("?")[0].rpartition("_")[2]
    run(url, f"CREATE ROLE {role} LOGIN")
    with pytest.raises(MemoryStoreUnavailable, match="its user lacks a privilege: permission denied for schema public"):
        await HybridStore(PostgresBackend(url.replace("user=postgres", f"user={role}"))).open()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://user:secret@localhost:1/x", r"postgresql://localhost:1/x: could not be reached: .*refused"),
        ("postgresql://user:secret@localhost:1/x?nonsense=1", "of PERDURE_MEMORY: its URL could not be read"),
        ("postgresql://user:P secret@localhost:1/x", "of PERDURE_MEMORY: its URL could not be read: .* as %20"),
        ("postgresql://user:secret@localhost:sec ret/x", "of PERDURE_MEMORY: its URL could not be read"),
        ("postgresql:///x?host=/nowhere&password=secret", r"could not be reached: .*No such file"),
    ],
)
async def test_an_unavailable_server_is_named_without_its_password(url: str, says: str) -> None:
    with pytest.raises(MemoryStoreUnavailable, match=says) as away:
        await HybridStore(PostgresBackend(url)).open()
    assert "secret" not in str(away.value)


async def test_tables_of_a_later_version_are_not_changed(url: str) -> None:
    run(url, "CREATE TABLE perdure_memory_format (version integer)", "INSERT INTO perdure_memory_format VALUES (2)")
    with pytest.raises(NotAMemoryStore, match=r"later version of Perdure \(format 2\)"):
        await HybridStore(PostgresBackend(url)).open()


async def test_a_lock_held_for_too_long_is_reported(url: str) -> None:
    async with HybridStore(PostgresBackend(url, wait=0.2)) as store:
        [one] = await remember(store, "x")
        with psycopg.connect(url) as other:
            other.execute("SELECT 1 FROM perdure_memories FOR UPDATE")
            with pytest.raises(MemoryStoreUnavailable, match="another process has held a lock"):
                await store.touch([one.id])
        assert await store.touch([one.id]) == 1


async def test_a_memory_that_is_forgotten_during_its_repetition_is_stored_again(url: str) -> None:
    async with HybridStore(PostgresBackend(url)) as store:
        [first] = await remember(store, "x")
        with psycopg.connect(url) as other, psycopg.connect(url, autocommit=True) as watcher:
            other.execute("DELETE FROM perdure_memories")
            adding = asyncio.create_task(remember(store, "x"))

            async def waits() -> object:
                return watcher.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone()

            await wait_until(waits, "wait for the lock")
            other.commit()
        [again] = await adding
        assert again.id != first.id
        assert await store.list() == [again]

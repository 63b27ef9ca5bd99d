"""Memory backend in PostgreSQL, for workers on several hosts: words by tsvector, vectors by pgvector.

The tables are in the first schema of the connection's `search_path`. The table of vectors is created when an embedder
is first set, since pgvector needs a privilege to install.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool

from ..errors import (
    MemoryStoreDamaged,
    MemoryStoreMissing,
    MemoryStoreUnavailable,
    NotAMemoryStore,
    VectorsUnavailable,
)
from .backend import Dialect, SqlBackend, Transaction

R = TypeVar("R")
Connection = AsyncConnection[tuple[Any, ...]]

_VERSION: Final = 1

_EXTENSION: Final = "vector"
"""Name of the pgvector extension."""

_LOCK: Final = 0x50445243_4D454D00
"""Lock of the creation of tables: concurrent IF NOT EXISTS statements fail."""

_DIALECT: Final = Dialect(
    memories="perdure_memories",
    keys="perdure_memory_keys",
    vectors="perdure_memory_vectors",
    embedder="perdure_memory_embedder",
    number="bigint",
    generated="GENERATED ALWAYS AS IDENTITY",
    real="double precision",
    texts="text[]",
    vector="vector",
    options="",
    json=frozenset({"metadata", "links"}),
    among="= ANY(?)",
    has_tags="memories.tags @> ?::text[]",
    words="websearch_to_tsquery('english', ?) AS asked ON words @@ asked",
    rank="ts_rank(words, asked, 1) DESC",
    indexed_words="to_tsvector('english', ?)",
    given_vector="?::vector",
    valid="vectors.embedder = ? AND vector_dims(embedding) = ?",
    distance="embedding <=> ?::vector",
    for_update="FOR UPDATE",
    lock="SELECT pg_advisory_xact_lock(hashtextextended(?, 0))",
    array=list,
    packed=lambda vector: f"[{','.join(map(repr, vector))}]",
)

_FORMAT: Final = (
    "ALTER TABLE perdure_memories ADD COLUMN words tsvector NOT NULL",
    "CREATE INDEX perdure_memories_words ON perdure_memories USING gin (words)",
    "CREATE TABLE perdure_memory_format (version integer NOT NULL)",
    f"INSERT INTO perdure_memory_format VALUES ({_VERSION})",
)


@asynccontextmanager
async def translated_errors(store: str, wait: float) -> AsyncIterator[None]:
    """Translate errors of psycopg in a block. wait: seconds that a lock was waited for."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise MemoryStoreUnavailable(
            store, f"another process has held a lock for {wait:g} s; try again, or find the process (pg_locks)"
        ) from error
    except (psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted) as error:
        raise MemoryStoreDamaged(store, _one_line(error)) from error
    except psycopg.OperationalError as error:
        raise MemoryStoreUnavailable(store, f"could not be reached: {_one_line(error)}") from error
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
        raise MemoryStoreUnavailable(store, f"its user lacks a privilege: {_one_line(error)}") from error
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:  # an error in our own statement: a bug
            raise
        raise MemoryStoreUnavailable(store, f"its URL could not be read: {_one_line(error)}") from error


def _url_problem(error: Exception) -> str:
    """Return what is wrong with a URL, without its parts: psycopg quotes them, a password too."""
    before, quoted, rest = _one_line(error).partition('"')
    problem = f"{before}its value{rest.rpartition(chr(34))[2]}" if quoted else before
    return f"{problem}; write spaces and special characters of a password as %20, %2F, ..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_WAIT: Final = 10.0
"""Time limit of a connection attempt, and of a wait for a lock, in seconds."""

_CONNECTIONS: Final = 4
"""Largest number of connections of a process."""


class PostgresBackend(SqlBackend):
    """PostgreSQL database with a small connection pool."""

    def __init__(self, url: str, *, wait: float = _WAIT) -> None:
        super().__init__(_DIALECT)
        self._url = url
        self._wait = wait
        self._pool: AsyncConnectionPool[Connection] | None = None

    @property
    def store(self) -> str:
        """Host and database of the URL, which may contain a password."""
        try:
            parts = conninfo_to_dict(self._url)
        except psycopg.Error:
            return "of PERDURE_MEMORY"
        host = parts.get("host") or "localhost"
        port = f":{parts['port']}" if "port" in parts else ""
        return f"postgresql://{host}{port}/{parts.get('dbname') or ''}"

    async def _connect(self, *, create: bool) -> None:
        try:
            conninfo_to_dict(self._url)
        except psycopg.Error as error:
            raise MemoryStoreUnavailable(self.store, f"its URL could not be read: {_url_problem(error)}") from None
        timeout = math.ceil(self._wait)
        async with translated_errors(self.store, self._wait):
            # connect once without the pool, which would report a time-out without the cause
            async with await AsyncConnection.connect(self._url, connect_timeout=timeout) as connection:
                await self._configure(connection)
                await self._make_tables(connection, create=create)
            self._pool = AsyncConnectionPool(
                self._url,
                min_size=1,
                max_size=_CONNECTIONS,
                timeout=self._wait,
                open=False,
                kwargs={"connect_timeout": timeout},
                check=AsyncConnectionPool.check_connection,  # the server may have been restarted
                configure=self._configure,
            )
            await self._pool.open()

    async def _configure(self, connection: Connection) -> None:
        await _fetch(connection, f"SET lock_timeout = {round(self._wait * 1000)}")
        await connection.commit()

    async def _make_tables(self, connection: Connection, *, create: bool) -> None:
        await _fetch(connection, "SELECT pg_advisory_xact_lock(?)", [_LOCK])
        if not await _exists(connection, "perdure_memory_format"):
            if not create:
                problem = "it does not exist in this database; 'perdure memory add' creates it"
                raise MemoryStoreMissing(self.store, problem)
            for statement in (*_DIALECT.tables(), *_FORMAT):
                await _fetch(connection, statement)
        [(version,)] = await _fetch(connection, "SELECT max(version) FROM perdure_memory_format")
        if version not in (None, _VERSION):
            raise NotAMemoryStore(self.store, f"was written by a later version of Perdure (format {version})")
        self._has_vectors = await _exists(connection, _DIALECT.vectors)

    async def _prepare_vectors(self) -> None:
        """Create the table of vectors if it is missing, and the extension, which needs a privilege."""
        if self._has_vectors:
            return
        async with self._transaction() as connection:
            await _fetch(connection, "SELECT pg_advisory_xact_lock(?)", [_LOCK])
            if not await _exists(connection, _DIALECT.vectors):
                try:
                    await _fetch(connection, f"CREATE EXTENSION IF NOT EXISTS {_EXTENSION}")
                except psycopg.errors.InsufficientPrivilege:
                    raise VectorsUnavailable(
                        self.store,
                        "this user cannot create the pgvector extension; have an administrator run "
                        "'CREATE EXTENSION vector'",
                    ) from None
                except (psycopg.errors.UndefinedFile, psycopg.errors.FeatureNotSupported):
                    raise VectorsUnavailable(
                        self.store, "the server has no pgvector; install it (postgresql-NN-pgvector)"
                    ) from None
                await _fetch(connection, _DIALECT.vector_table())
        self._has_vectors = True

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        if self._pool is None:
            raise RuntimeError(f"memory store {self.store} is not open")
        async with translated_errors(self.store, self._wait), self._pool.connection() as connection:
            yield connection

    async def _run(self, transaction: Transaction[R], *, write: bool) -> R:
        async with self._transaction() as connection:
            try:
                statement = next(transaction)
                while True:
                    statement = transaction.send(await _fetch(connection, *statement))
            except StopIteration as end:
                result: R = end.value
                return result


async def _fetch(connection: Connection, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Run a statement with `?` for its values; return its rows."""
    cursor = await connection.execute(statement.replace("?", "%s").encode(), values)
    return [] if cursor.description is None else await cursor.fetchall()


async def _exists(connection: Connection, table: str) -> bool:
    return bool(await _fetch(connection, "SELECT 1 WHERE to_regclass(?) IS NOT NULL", [table]))

"""Tables of a PostgreSQL store, in the first schema of the connection's `search_path`."""

from __future__ import annotations

from typing import Any, Final, LiteralString

from psycopg import AsyncConnection, errors, sql

from ..backend import EmbedderIdentity
from ..errors import EmbedderMismatch, MemoryStoreMissing, NotAMemoryStore, VectorsUnavailable
from ..text import digest

Connection = AsyncConnection[tuple[Any, ...]]

_VERSION: Final = 1

_ADDED: Final[tuple[LiteralString, ...]] = (
    "ALTER TABLE perdure_memories ADD COLUMN IF NOT EXISTS subject text NOT NULL DEFAULT ''",
    "ALTER TABLE perdure_memories ADD COLUMN IF NOT EXISTS links text NOT NULL DEFAULT '[]'",
)
"""Columns that stores of the first releases lack. They are optional for those releases, so the version stays."""

_EXTENSION: Final = "vector"
"""Name of the pgvector extension."""

_LOCK: Final = 0x50445243_4D454D00
"""Lock of the creation of tables: concurrent IF NOT EXISTS statements fail."""

_TABLES: Final[tuple[LiteralString, ...]] = (
    """
    CREATE TABLE perdure_memories (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        owner text NOT NULL,
        type text NOT NULL,
        digest text NOT NULL,
        text text NOT NULL,
        former text[] NOT NULL,
        tags text[] NOT NULL,
        metadata text NOT NULL,
        source text NOT NULL,
        importance double precision NOT NULL,
        key text,
        created double precision NOT NULL,
        accessed double precision NOT NULL,
        updated double precision NOT NULL,
        accesses bigint NOT NULL,
        subject text NOT NULL DEFAULT '',
        links text NOT NULL DEFAULT '[]',
        words tsvector NOT NULL,
        UNIQUE (owner, type, digest)
    )
    """,
    "CREATE INDEX perdure_memories_words ON perdure_memories USING gin (words)",
    """
    CREATE TABLE perdure_memory_keys (
        key text PRIMARY KEY,
        memory text REFERENCES perdure_memories (id) ON DELETE CASCADE,
        at double precision NOT NULL
    )
    """,
    "CREATE INDEX perdure_memory_keys_at ON perdure_memory_keys (at)",
    "CREATE INDEX perdure_memory_keys_memory ON perdure_memory_keys (memory)",
    "CREATE TABLE perdure_memory_format (version integer NOT NULL)",
    """
    CREATE TABLE perdure_memory_embedder (
        one integer PRIMARY KEY CHECK (one = 1), name text NOT NULL, dimension integer NOT NULL
    )
    """,
)

# Without a dimension: while memories are embedded again, the vectors of two embedders are stored side by side.
_VECTORS: Final[LiteralString] = """
    CREATE TABLE perdure_memory_vectors (
        number bigint NOT NULL REFERENCES perdure_memories (number) ON DELETE CASCADE,
        embedder text NOT NULL,
        embedding vector NOT NULL,
        PRIMARY KEY (number, embedder)
    )
"""


async def prepare(connection: Connection, store: str, *, create: bool) -> bool:
    """Create the missing tables, in a transaction. Return whether the table of vectors exists.

    Raises `MemoryStoreMissing`, `NotAMemoryStore`.
    """
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
    if not await _exists(connection, "perdure_memory_format"):
        if not create:
            raise MemoryStoreMissing(store, "it does not exist in this database; 'perdure memory add' creates it")
        for statement in _TABLES:
            await connection.execute(statement)
        await connection.execute("INSERT INTO perdure_memory_format VALUES (%s)", (_VERSION,))
    row = await (await connection.execute("SELECT max(version) FROM perdure_memory_format")).fetchone()
    if row is not None and row[0] != _VERSION:
        raise NotAMemoryStore(store, f"was written by a later version of Perdure (format {row[0]})")
    await _add_columns(connection)
    return await _exists(connection, "perdure_memory_vectors")


async def _add_columns(connection: Connection) -> None:
    """Upgrade a store of an earlier release: add the missing columns, and the source to the digests."""
    names = "SELECT 1 FROM pg_attribute WHERE attrelid = 'perdure_memories'::regclass AND attname = 'links'"
    if await (await connection.execute(names)).fetchone() is not None:
        return
    for statement in _ADDED:
        await connection.execute(statement)
    rows = await connection.execute("SELECT number, text, source FROM perdure_memories WHERE source <> ''")
    for number, text, source in await rows.fetchall():
        value = digest(text, source=source)
        await connection.execute("UPDATE perdure_memories SET digest = %s WHERE number = %s", (value, number))


async def prepare_vectors(connection: Connection, store: str) -> None:
    """Create the table of vectors if it is missing, and the extension, which needs a privilege.

    Raises `VectorsUnavailable`.
    """
    if await _exists(connection, "perdure_memory_vectors"):
        return
    try:
        async with connection.transaction():
            await connection.execute(sql.SQL("CREATE EXTENSION IF NOT EXISTS {}").format(sql.Identifier(_EXTENSION)))
    except errors.InsufficientPrivilege:
        raise VectorsUnavailable(
            store, "this user cannot create the pgvector extension; have an administrator run 'CREATE EXTENSION vector'"
        ) from None
    except (errors.UndefinedFile, errors.FeatureNotSupported):
        raise VectorsUnavailable(store, "the server has no pgvector; install it (postgresql-NN-pgvector)") from None
    await connection.execute(_VECTORS)


async def check_embedder(connection: Connection, store: str, embedder: EmbedderIdentity) -> None:
    """Check that the store's vectors are this embedder's. Raises `EmbedderMismatch`."""
    row = await (await connection.execute("SELECT name, dimension FROM perdure_memory_embedder")).fetchone()
    if row is not None and EmbedderIdentity(*row) != embedder:
        raise EmbedderMismatch(store, EmbedderIdentity(*row), embedder)


async def _exists(connection: Connection, table: str) -> bool:
    row = await (await connection.execute("SELECT to_regclass(%s)", (table,))).fetchone()
    return row is not None and row[0] is not None

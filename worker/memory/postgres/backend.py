"""Memory backend in PostgreSQL, for workers on several hosts: words by tsvector, vectors by pgvector."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool

from ..backend import KEY_LIFETIME, EmbedderIdentity, Near, Where, WordMatch, forgotten_key, links_to
from ..embedders import Vector
from ..errors import MemoryStoreDamaged, MemoryStoreUnavailable, VectorsUnavailable
from ..memory import Memory, linked, merged
from .schema import check_embedder, prepare, prepare_vectors


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


class PostgresBackend:
    """PostgreSQL database with a small connection pool.

    Every method is one transaction. Adding to the same owner and type is serialised by a transaction lock
    (pg_advisory_xact_lock): two transactions could not see, and so not link, each other's similar memories.
    """

    def __init__(self, url: str, *, wait: float = _WAIT) -> None:
        self._url = url
        self._wait = wait
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._embedder: EmbedderIdentity | None = None
        self._vectors = False

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

    async def open(self, embedder: EmbedderIdentity | None, *, create: bool) -> None:
        try:
            conninfo_to_dict(self._url)
        except psycopg.Error as error:
            raise MemoryStoreUnavailable(self.store, f"its URL could not be read: {_url_problem(error)}") from None
        async with translated_errors(self.store, self._wait):
            # connect once without the pool, which would report a time-out without the cause
            async with await AsyncConnection.connect(self._url, connect_timeout=math.ceil(self._wait)) as connection:
                await self._configure(connection)
                self._vectors = await prepare(connection, self.store, create=create)
                if embedder is not None:
                    await prepare_vectors(connection, self.store)
                    await check_embedder(connection, self.store, embedder)
                    await connection.execute(
                        "INSERT INTO perdure_memory_embedder VALUES (1, %s, %s) ON CONFLICT DO NOTHING", embedder
                    )
                    self._vectors = True
            self._embedder = embedder
            self._pool = AsyncConnectionPool(
                self._url,
                min_size=1,
                max_size=_CONNECTIONS,
                timeout=self._wait,
                open=False,
                kwargs={"connect_timeout": math.ceil(self._wait)},
                check=AsyncConnectionPool.check_connection,  # the server may have been restarted
                configure=self._configure,
            )
            await self._pool.open()

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def _configure(self, connection: Connection) -> None:
        milliseconds = sql.Literal(round(self._wait * 1000))
        await connection.execute(sql.SQL("SET lock_timeout = {}").format(milliseconds))
        await connection.commit()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        if self._pool is None:
            raise RuntimeError(f"memory store {self.store} is not open")
        async with translated_errors(self.store, self._wait), self._pool.connection() as connection:
            yield connection

    # writing

    async def add(self, memory: Memory, digest: str, vector: Vector | None, key: str | None) -> Memory:
        async with self._transaction() as connection:
            if key is not None:
                await lock(connection, "key", key)  # writers with the same key take turns
                if (known := await by_key(connection, key)) is not None:
                    return known
            await lock(connection, memory.owner, memory.type)
            if (number := await by_digest(connection, memory, digest)) is not None:
                stored = await merge(connection, number, memory)
            else:
                stored = memory
                number = await insert(connection, stored, digest)
                if number is None:
                    raise AssertionError(f"memory {memory.id} appeared while its lock was held")
                await link_back(connection, stored)
            await self._put_vector(connection, number, vector)
            await remember_key(connection, key, stored.id, memory.created)
            return stored

    async def _put_vector(self, connection: Connection, number: int, vector: Vector | None) -> None:
        """Store the vector of the current text, and delete those of earlier texts and other embedders."""
        if self._vectors:
            await connection.execute("DELETE FROM perdure_memory_vectors WHERE number = %s", (number,))
        if self._embedder is not None:
            await check_embedder(connection, self.store, self._embedder)
            if vector is not None:
                put: LiteralString = "INSERT INTO perdure_memory_vectors VALUES (%s, %s, %s::vector)"
                await connection.execute(put, (number, self._label, written(vector)))

    async def known(self, key: str) -> Memory | None:
        async with self._transaction() as connection:
            return await by_key(connection, key)

    async def restore(self, memories: Sequence[tuple[Memory, str, Vector | None]]) -> int:
        stored = 0
        async with self._transaction() as connection:
            # the same lock order in all transactions, so that they cannot deadlock
            for owner, type_ in sorted({(memory.owner, memory.type) for memory, _, _ in memories}):
                await lock(connection, owner, type_)
            for memory, digest, vector in memories:
                if (number := await insert(connection, memory, digest)) is not None:
                    await self._put_vector(connection, number, vector)
                    stored += 1
        return stored

    async def touch(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        condition, values = condition_of(where)
        async with self._transaction() as connection:
            if key is not None:
                await lock(connection, "key", key)
                if await fetch(connection, "SELECT 1 FROM perdure_memory_keys WHERE key = %s", (key,)):
                    wanted = sql.SQL("SELECT id FROM perdure_memories AS memories WHERE {} AND id = ANY(%s)")
                    return len(await fetch(connection, wanted.format(condition), (*values, list(ids))))
            held = await hold(connection, condition, values, ids)
            await connection.execute(
                "UPDATE perdure_memories SET accesses = accesses + 1, accessed = greatest(accessed, %s) "
                "WHERE id = ANY(%s)",
                (now, held),
            )
            await remember_key(connection, key, None, now)
            return len(held)

    async def forget(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        condition, values = condition_of(where)
        async with self._transaction() as connection:
            held = await hold(connection, condition, values, ids)
            await connection.execute("DELETE FROM perdure_memories WHERE id = ANY(%s)", (held,))
            if key is None:
                return len(held)
            keys = [forgotten_key(key, one) for one in dict.fromkeys(ids)]
            wanted = "SELECT key FROM perdure_memory_keys WHERE key = ANY(%s)"
            known = {row[0] for row in await fetch(connection, wanted, (keys,))}
            for one in held:
                if (name := forgotten_key(key, one)) not in known:
                    known.add(name)
                    await remember_key(connection, name, None, now)
            return len(known)

    async def prune(self, unused: Sequence[tuple[str, float]]) -> int:
        ids, times = [one for one, _ in unused], [at for _, at in unused]
        async with self._transaction() as connection:
            await hold(connection, sql.Composed([sql.SQL("true")]), [], ids)
            gone = await connection.execute(
                """
                DELETE FROM perdure_memories USING unnest(%s::text[], %s::double precision[]) AS unused (id, accessed)
                WHERE perdure_memories.id = unused.id AND perdure_memories.accessed = unused.accessed
                """,
                (ids, times),
            )
            return gone.rowcount

    # reading

    async def by_words(self, words: Sequence[str], where: Where, limit: int) -> list[WordMatch]:
        condition, values = condition_of(where)
        asked = " or ".join(f'"{word}"' for word in words)  # a word has letters and digits only
        query = sql.SQL(
            """
            SELECT id, {} FROM perdure_memories AS memories, websearch_to_tsquery('english', %s) AS asked
            WHERE words @@ asked AND importance > 0 AND {} ORDER BY ts_rank(words, asked, 1) DESC, number LIMIT %s
            """
        ).format(self._has_vector, condition)
        async with self._transaction() as connection:
            rows = await fetch(connection, query, (asked, *values, limit))
        return [WordMatch(*row) for row in rows]

    @property
    def _has_vector(self) -> sql.Composable:
        if self._embedder is None:  # the table of vectors may be missing
            return sql.SQL("false")
        owned = "EXISTS (SELECT 1 FROM perdure_memory_vectors AS v WHERE v.number = memories.number AND embedder = {})"
        return sql.SQL(owned).format(sql.Literal(self._label))

    async def by_vector(self, vector: Vector, where: Where, limit: int) -> list[Near]:
        condition, values = condition_of(where)
        query = sql.SQL(
            """
            SELECT id, embedding <=> %s::vector AS distance
            FROM perdure_memory_vectors JOIN perdure_memories AS memories USING (number)
            WHERE embedder = %s AND importance > 0 AND {} ORDER BY distance, number LIMIT %s
            """
        )
        async with self._transaction() as connection:
            if self._embedder is not None:
                await check_embedder(connection, self.store, self._embedder)
            rows = await fetch(connection, query.format(condition), (written(vector), self._label, *values, limit))
        return [Near(one, 1 - distance) for one, distance in rows]

    async def get(self, ids: Sequence[str]) -> dict[str, Memory]:
        query = sql.SQL("SELECT {} FROM perdure_memories AS memories WHERE id = ANY(%s)").format(COLUMNS)
        async with self._transaction() as connection:
            return {one.id: one for one in map(memory_of, await fetch(connection, query, (list(ids),)))}

    async def page(self, where: Where, limit: int, *, after: int = 0, newest: bool = False) -> list[tuple[int, Memory]]:
        condition, values = condition_of(where)
        query = sql.SQL(
            "SELECT number, {} FROM perdure_memories AS memories WHERE {} AND number > %s ORDER BY number {} LIMIT %s"
        ).format(COLUMNS, condition, sql.SQL("DESC" if newest else "ASC"))
        async with self._transaction() as connection:
            rows = await fetch(connection, query, (*values, after, limit))
        return [(row[0], memory_of(row[1:])) for row in rows]

    async def count(self, where: Where) -> int:
        condition, values = condition_of(where)
        query = sql.SQL("SELECT count(*) FROM perdure_memories AS memories WHERE {}").format(condition)
        async with self._transaction() as connection:
            [(number,)] = await fetch(connection, query, values)
        return int(number)

    # change of the embedder

    async def without_vector(self, known: EmbedderIdentity, after: int, limit: int) -> list[tuple[int, str]]:
        query: LiteralString = """
            SELECT number, text FROM perdure_memories AS memories WHERE number > %s AND NOT EXISTS (
                SELECT 1 FROM perdure_memory_vectors AS vectors
                WHERE vectors.number = memories.number AND embedder = %s
            ) ORDER BY number LIMIT %s
        """
        async with self._transaction() as connection:
            await prepare_vectors(connection, self.store)
            self._vectors = True
            return [(row[0], row[1]) for row in await fetch(connection, query, (after, known.label, limit))]

    async def put_vectors(self, known: EmbedderIdentity, vectors: Sequence[tuple[int, str, Vector]]) -> None:
        put: LiteralString = """
            INSERT INTO perdure_memory_vectors
            SELECT number, %s, %s::vector FROM perdure_memories WHERE number = %s AND text = %s
            ON CONFLICT (number, embedder) DO UPDATE SET embedding = excluded.embedding
        """
        async with self._transaction() as connection, connection.cursor() as cursor:
            await cursor.executemany(
                put, [(known.label, written(vector), number, text) for number, text, vector in vectors]
            )

    async def change_embedder(self, known: EmbedderIdentity) -> None:
        async with self._transaction() as connection:
            await connection.execute(
                """
                INSERT INTO perdure_memory_embedder VALUES (1, %s, %s)
                ON CONFLICT (one) DO UPDATE SET name = excluded.name, dimension = excluded.dimension
                """,
                known,
            )
            await connection.execute("DELETE FROM perdure_memory_vectors WHERE embedder <> %s", (known.label,))
        self._embedder = known

    @property
    def _label(self) -> str:
        if self._embedder is None:
            raise VectorsUnavailable(self.store, "no embedder is set")
        return self._embedder.label


Connection = AsyncConnection[tuple[Any, ...]]

_FIELDS: Final[tuple[LiteralString, ...]] = (
    "id", "owner", "type", "text", "former", "tags", "metadata", "source",
    "importance", "key", "created", "accessed", "updated", "accesses", "subject", "links",
)  # fmt: skip
COLUMNS: Final = sql.SQL(", ").join(sql.Identifier("memories", name) for name in _FIELDS)
_CHANGED: Final[tuple[LiteralString, ...]] = (
    "text", "former", "tags", "metadata", "importance", "accessed", "updated", "accesses", "links",
)  # fmt: skip


_ALL: Final = sql.Composed([sql.SQL("true")])


async def fetch(connection: Connection, query: LiteralString | sql.Composed, values: Sequence[Any]) -> list[Any]:
    return await (await connection.execute(query, values)).fetchall()


async def lock(connection: Connection, *names: str) -> None:
    """Hold the lock with these names until the end of the transaction."""
    what = "\x1f".join(("perdure memory", *names))
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (what,))


async def hold(connection: Connection, condition: sql.Composed, values: list[Any], ids: Sequence[str]) -> list[str]:
    """Lock the matching memories, always in the same order, so that transactions cannot deadlock; return their ids."""
    query = sql.SQL("SELECT id FROM perdure_memories AS memories WHERE {} AND id = ANY(%s) ORDER BY id FOR UPDATE")
    return [row[0] for row in await fetch(connection, query.format(condition), (*values, list(ids)))]


async def by_key(connection: Connection, key: str) -> Memory | None:
    query = sql.SQL(
        "SELECT {} FROM perdure_memory_keys AS keys JOIN perdure_memories AS memories ON memories.id = keys.memory "
        "WHERE keys.key = %s"
    ).format(COLUMNS)
    rows = await fetch(connection, query, (key,))
    return memory_of(rows[0]) if rows else None


async def by_digest(connection: Connection, memory: Memory, digest: str) -> int | None:
    same: LiteralString = "SELECT number FROM perdure_memories WHERE owner = %s AND type = %s AND digest = %s"
    rows = await fetch(connection, same, (memory.owner, memory.type, digest))
    return int(rows[0][0]) if rows else None


_WORDS: Final = sql.SQL("to_tsvector('english', %s)")


async def insert(connection: Connection, memory: Memory, digest: str) -> int | None:
    """Insert a memory; return its number, None if its id, or its text for its owner and type, exists."""
    query = sql.SQL(
        "INSERT INTO perdure_memories ({}, digest, words) VALUES ({}, %s, {}) ON CONFLICT DO NOTHING RETURNING number"
    ).format(
        sql.SQL(", ").join(map(sql.Identifier, _FIELDS)), sql.SQL(", ").join([sql.Placeholder()] * len(_FIELDS)), _WORDS
    )
    values = [_value(memory, name) for name in _FIELDS]
    rows = await fetch(connection, query, (*values, digest, _searched(memory)))
    return int(rows[0][0]) if rows else None


async def merge(connection: Connection, number: int, memory: Memory) -> Memory:
    query = sql.SQL("SELECT {} FROM perdure_memories AS memories WHERE number = %s").format(COLUMNS)
    [row] = await fetch(connection, query, (number,))
    before = memory_of(row)  # its id and links are changed only under the lock of the owner and type
    # FOR UPDATE: `touch` holds no such lock
    await hold(connection, _ALL, [], [before.id, *(link.id for link in (*before.links, *memory.links))])
    [row] = await fetch(connection, query, (number,))
    whole = merged(memory_of(row), memory)
    setting = sql.SQL(", ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in _CHANGED)
    await connection.execute(
        sql.SQL("UPDATE perdure_memories SET {}, words = {} WHERE number = %s").format(setting, _WORDS),
        (*(_value(whole, name) for name in _CHANGED), _searched(whole), number),
    )
    await link_back(connection, whole)
    return whole


async def link_back(connection: Connection, memory: Memory) -> None:
    """Store in the linked memories of its scope their links to this one."""
    if not memory.links:
        return
    back = links_to(memory)
    held = await hold(connection, _ALL, [], list(back))
    query = sql.SQL("SELECT {} FROM perdure_memories AS memories WHERE id = ANY(%s)").format(COLUMNS)
    for other in map(memory_of, await fetch(connection, query, (held,))):
        if other.scope == memory.scope:
            value = _value(linked(other, [back[other.id]]), "links")
            await connection.execute("UPDATE perdure_memories SET links = %s WHERE id = %s", (value, other.id))


async def remember_key(connection: Connection, key: str | None, memory_id: str | None, now: float) -> None:
    if key is not None:
        await connection.execute("DELETE FROM perdure_memory_keys WHERE at < %s", (now - KEY_LIFETIME,))
        await connection.execute("INSERT INTO perdure_memory_keys VALUES (%s, %s, %s)", (key, memory_id, now))


def _searched(memory: Memory) -> str:
    return " ".join((memory.text, *memory.tags))


def _value(memory: Memory, name: str) -> Any:
    value = getattr(memory, name)
    return json.dumps(value) if name in ("metadata", "links") else list(value) if isinstance(value, tuple) else value


def memory_of(row: Sequence[Any]) -> Memory:
    """Return the memory of a row of COLUMNS."""
    named = dict(zip(_FIELDS, row, strict=True))
    read = {name: json.loads(named[name]) for name in ("metadata", "links")}
    return Memory.model_validate({**named, **read})


def condition_of(where: Where) -> tuple[sql.Composed, list[Any]]:
    """Return a filter as SQL with its values; true if it matches all."""
    parts, values = [sql.SQL("true")], []
    if where.owners is not None:
        parts.append(sql.SQL("memories.owner = ANY(%s)"))
        values.append(list(where.owners))
    if where.types is not None:
        parts.append(sql.SQL("memories.type = ANY(%s)"))
        values.append(list(where.types))
    if where.subjects is not None:
        parts.append(sql.SQL("memories.subject = ANY(%s)"))
        values.append(list(where.subjects))
    if where.tags:
        parts.append(sql.SQL("memories.tags @> %s::text[]"))
        values.append(list(where.tags))
    return sql.SQL(" AND ").join(parts), values


def written(vector: Vector) -> str:
    return f"[{','.join(map(repr, vector))}]"

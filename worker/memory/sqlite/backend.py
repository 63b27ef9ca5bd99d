"""Memory backend in a SQLite file, for the workers of one host."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from ..backend import KEY_LIFETIME, EmbedderIdentity, Near, Where, WordMatch, forgotten_key, links_to
from ..embedders import Vector
from ..memory import Memory, linked, merged
from .driver import Database
from .schema import check_embedder, open_store_file

R = TypeVar("R")

_WAIT: Final = 10.0
"""Time limit of a wait for the file's lock in seconds."""


_VALID: Final = "embedder = ? AND length(embedding) = ?"
"""Condition of an embedder's vectors. A damaged one is ignored until `reembed` replaces it."""


def _label_and_size(embedder: EmbedderIdentity) -> tuple[str, int]:
    return embedder.label, 4 * embedder.dimension


class SqliteBackend:
    """SQLite file with one connection, used by one thread at a time; the event loop never waits for the disk.

    Every method is one transaction. Transactions that write take the write lock first (BEGIN IMMEDIATE), so two
    processes that add the same memory at once take turns.
    """

    def __init__(self, path: Path, *, wait: float = _WAIT) -> None:
        self._path = path
        self._wait = wait
        self._database: Database | None = None
        self._embedder: EmbedderIdentity | None = None
        self._one = anyio.CapacityLimiter(1)

    @property
    def store(self) -> str:
        return str(self._path)

    async def open(self, embedder: EmbedderIdentity | None, *, create: bool) -> None:
        def opening(_: object = None) -> Database:
            database = open_store_file(self._path, self._wait, create=create)
            try:
                if embedder is not None:
                    database.need_vectors()
                    with database.transaction():
                        check_embedder(database, embedder)
                        database.run("INSERT OR IGNORE INTO embedder VALUES (1, ?, ?)", *embedder)
            except BaseException:
                database.close()
                raise
            return database

        self._database = await anyio.to_thread.run_sync(opening, limiter=self._one)
        self._embedder = embedder

    async def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            await anyio.to_thread.run_sync(database.close, limiter=self._one)

    async def _in_thread(self, work: Callable[[Database], R]) -> R:
        """Run work in a thread. A cancellation waits for its end, so that no work outlives the call."""
        database = self._database
        if database is None:
            raise RuntimeError(f"memory store {self.store} is not open")
        return await anyio.to_thread.run_sync(work, database, limiter=self._one)

    # writing

    async def add(self, memory: Memory, digest: str, vector: Vector | None, key: str | None) -> Memory:
        def adding(database: Database) -> Memory:
            with database.transaction():
                if key is not None and (known := by_key(database, key)) is not None:
                    return known
                number, stored = self._store(database, memory, digest)
                self._put_vector(database, number, vector)
                remember_key(database, key, stored.id, memory.created)
                return stored

        return await self._in_thread(adding)

    def _store(self, database: Database, memory: Memory, digest: str) -> tuple[int, Memory]:
        """Merge the memory into an equal one, else insert it with its links. Return it with its number."""
        if (number := by_digest(database, memory, digest)) is not None:
            return number, merge(database, number, memory)
        number = insert(database, memory, digest)
        link_back(database, memory)
        return number, memory

    def _put_vector(self, database: Database, number: int, vector: Vector | None) -> None:
        """Store the vector of the current text, and delete those of earlier texts and other embedders."""
        database.run("DELETE FROM vectors WHERE number = ?", number)
        if self._embedder is not None:
            check_embedder(database, self._embedder)
            if vector is not None:
                database.run("INSERT INTO vectors VALUES (?, ?, ?)", number, self._label, packed(vector))

    async def known(self, key: str) -> Memory | None:
        return await self._in_thread(lambda database: by_key(database, key))

    async def restore(self, memories: Sequence[tuple[Memory, str, Vector | None]]) -> int:
        def restoring(database: Database) -> int:
            stored = 0
            with database.transaction():
                for memory, digest, vector in memories:
                    if number_of(database, memory.id) is None and by_digest(database, memory, digest) is None:
                        self._put_vector(database, insert(database, memory, digest), vector)
                        stored += 1
            return stored

        return await self._in_thread(restoring)

    async def touch(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        def touching(database: Database) -> int:
            condition, values = condition_of(where)
            with database.transaction():
                known = key is not None and bool(database.run("SELECT 1 FROM keys WHERE key = ?", key))
                if known:
                    wanted = f"SELECT id FROM memories WHERE {condition} AND id IN ({marks(ids)})"  # noqa: S608 - marks
                    return len(database.run(wanted, *values, *ids))
                touched = database.run(
                    f"""
                    UPDATE memories SET accesses = accesses + 1, accessed = max(accessed, ?)
                    WHERE {condition} AND id IN ({marks(ids)}) RETURNING id
                    """,  # noqa: S608 - marks
                    now,
                    *values,
                    *ids,
                )
                remember_key(database, key, None, now)
                return len(touched)

        return await self._in_thread(touching)

    async def forget(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> int:
        def forgetting(database: Database) -> int:
            condition, values = condition_of(where)
            with database.transaction():
                gone = f"DELETE FROM memories WHERE {condition} AND id IN ({marks(ids)}) RETURNING id"  # noqa: S608
                removed = [row[0] for row in database.run(gone, *values, *ids)]
                if key is None:
                    return len(removed)
                for one in removed:
                    remember_key(database, forgotten_key(key, one), None, now)
                keys = [forgotten_key(key, one) for one in dict.fromkeys(ids)]
                return len(database.run(f"SELECT 1 FROM keys WHERE key IN ({marks(keys)})", *keys))  # noqa: S608 - marks

        return await self._in_thread(forgetting)

    async def prune(self, unused: Sequence[tuple[str, float]]) -> int:
        def pruning(database: Database) -> int:
            with database.transaction():
                gone = "DELETE FROM memories WHERE id = ? AND accessed = ? RETURNING id"
                return sum(len(database.run(gone, *one)) for one in unused)

        return await self._in_thread(pruning)

    # reading

    async def by_words(self, words: Sequence[str], where: Where, limit: int) -> list[WordMatch]:
        condition, values = condition_of(where)
        asked = " OR ".join(f'"{word}"' for word in words)  # a word has letters and digits only
        sql = f"""
            SELECT id, EXISTS (SELECT 1 FROM vectors WHERE vectors.number = memories.number AND {_VALID})
            FROM words JOIN memories ON number = words.rowid
            WHERE words MATCH ? AND importance > 0 AND {condition} ORDER BY words.rank, number LIMIT ?
        """  # noqa: S608 - the condition has marks only
        rows = await self._in_thread(lambda database: database.run(sql, *self._vectors, asked, *values, limit))
        return [WordMatch(one, bool(embedded)) for one, embedded in rows]

    async def by_vector(self, vector: Vector, where: Where, limit: int) -> list[Near]:
        condition, values = condition_of(where)
        sql = f"""
            SELECT id, vec_distance_cosine(embedding, ?) AS distance FROM vectors JOIN memories USING (number)
            WHERE {_VALID} AND importance > 0 AND {condition}
            ORDER BY distance NULLS LAST, number LIMIT ?
        """  # noqa: S608 - the condition has marks only

        def nearest(database: Database) -> list[tuple[str, float | None]]:
            if self._embedder is not None:
                check_embedder(database, self._embedder)
            rows = database.run(sql, packed(vector), *self._vectors, *values, limit)
            return [(name, distance) for name, distance in rows]

        return [Near(name, 1 - distance) for name, distance in await self._in_thread(nearest) if distance is not None]

    async def get(self, ids: Sequence[str]) -> dict[str, Memory]:
        sql = f"SELECT {COLUMNS} FROM memories WHERE id IN ({marks(ids)})"  # noqa: S608 - marks only
        return {one.id: one for one in map(memory_of, await self._in_thread(lambda database: database.run(sql, *ids)))}

    async def page(self, where: Where, limit: int, *, after: int = 0, newest: bool = False) -> list[tuple[int, Memory]]:
        condition, values = condition_of(where)
        order = "DESC" if newest else "ASC"
        sql = f"""
            SELECT number, {COLUMNS} FROM memories WHERE {condition} AND number > ? ORDER BY number {order} LIMIT ?
        """  # noqa: S608 - the condition has marks only
        rows = await self._in_thread(lambda database: database.run(sql, *values, after, limit))
        return [(row[0], memory_of(row[1:])) for row in rows]

    async def count(self, where: Where) -> int:
        condition, values = condition_of(where)
        sql = f"SELECT count(*) FROM memories WHERE {condition}"  # noqa: S608 - the condition has marks only
        [(number,)] = await self._in_thread(lambda database: database.run(sql, *values))
        return int(number)

    # change of the embedder

    async def without_vector(self, known: EmbedderIdentity, after: int, limit: int) -> list[tuple[int, str]]:
        sql = f"""
            SELECT number, text FROM memories
            WHERE number > ? AND number NOT IN (SELECT number FROM vectors WHERE {_VALID}) ORDER BY number LIMIT ?
        """  # noqa: S608 - own names
        rows = await self._in_thread(lambda database: database.run(sql, after, *_label_and_size(known), limit))
        return [(number, text) for number, text in rows]

    async def put_vectors(self, known: EmbedderIdentity, vectors: Sequence[tuple[int, str, Vector]]) -> None:
        def putting(database: Database) -> None:
            database.need_vectors()
            put = "INSERT OR REPLACE INTO vectors SELECT number, ?, ? FROM memories WHERE number = ? AND text = ?"
            with database.transaction():
                for number, text, vector in vectors:
                    database.run(put, known.label, packed(vector), number, text)

        await self._in_thread(putting)

    async def change_embedder(self, known: EmbedderIdentity) -> None:
        def changing(database: Database) -> None:
            database.need_vectors()
            with database.transaction():
                database.run("INSERT OR REPLACE INTO embedder VALUES (1, ?, ?)", *known)
                database.run("DELETE FROM vectors WHERE embedder <> ?", known.label)

        await self._in_thread(changing)
        self._embedder = known

    @property
    def _label(self) -> str:
        return "" if self._embedder is None else self._embedder.label

    @property
    def _vectors(self) -> tuple[str, int]:
        """Values of the condition `_VALID`."""
        return ("", 0) if self._embedder is None else _label_and_size(self._embedder)


_FIELDS: Final = (
    "id", "owner", "type", "text", "former", "tags", "metadata", "source",
    "importance", "key", "created", "accessed", "updated", "accesses", "subject", "links",
)  # fmt: skip
_CHANGED: Final = (
    "text", "former", "tags", "metadata", "importance", "accessed", "updated", "accesses", "links",
)  # fmt: skip
_AS_JSON: Final = frozenset({"former", "tags", "metadata", "links"})
COLUMNS: Final = ", ".join(f"memories.{name}" for name in _FIELDS)


def memory_of(row: Sequence[Any]) -> Memory:
    """Return the memory of a row of COLUMNS."""
    named = zip(_FIELDS, row, strict=True)
    return Memory.model_validate({name: json.loads(value) if name in _AS_JSON else value for name, value in named})


def _value(memory: Memory, name: str) -> Any:
    value = getattr(memory, name)
    return json.dumps(value, ensure_ascii=False) if name in _AS_JSON else value


def insert(database: Database, memory: Memory, digest: str) -> int:
    names, marks = ", ".join((*_FIELDS, "digest")), ", ".join("?" * (len(_FIELDS) + 1))
    values = [_value(memory, name) for name in _FIELDS]
    sql = f"INSERT INTO memories ({names}) VALUES ({marks}) RETURNING number"  # noqa: S608 - own names
    [(number,)] = database.run(sql, *values, digest)
    return int(number)


def merge(database: Database, number: int, memory: Memory) -> Memory:
    [row] = database.run(f"SELECT {COLUMNS} FROM memories WHERE number = ?", number)  # noqa: S608 - own names
    whole = merged(memory_of(row), memory)
    values = [_value(whole, name) for name in _CHANGED]
    setting = ", ".join(f"{name} = ?" for name in _CHANGED)
    database.run(f"UPDATE memories SET {setting} WHERE number = ?", *values, number)  # noqa: S608 - own names
    link_back(database, whole)
    return whole


def link_back(database: Database, memory: Memory) -> None:
    """Store in the linked memories of its scope their links to this one."""
    for one, link in links_to(memory).items():
        for row in database.run(f"SELECT {COLUMNS} FROM memories WHERE id = ?", one):  # noqa: S608 - own names
            if (other := memory_of(row)).scope == memory.scope:
                links = _value(linked(other, [link]), "links")
                database.run("UPDATE memories SET links = ? WHERE id = ?", links, one)


def number_of(database: Database, memory_id: str) -> int | None:
    rows = database.run("SELECT number FROM memories WHERE id = ?", memory_id)
    return int(rows[0][0]) if rows else None


def by_digest(database: Database, memory: Memory, digest: str) -> int | None:
    same = "SELECT number FROM memories WHERE owner = ? AND type = ? AND digest = ?"
    rows = database.run(same, memory.owner, memory.type, digest)
    return int(rows[0][0]) if rows else None


def by_key(database: Database, key: str) -> Memory | None:
    sql = f"SELECT {COLUMNS} FROM keys JOIN memories ON id = memory WHERE keys.key = ?"  # noqa: S608 - own names
    rows = database.run(sql, key)
    return memory_of(rows[0]) if rows else None


def remember_key(database: Database, key: str | None, memory_id: str | None, now: float) -> None:
    if key is not None:
        database.run("DELETE FROM keys WHERE at < ?", now - KEY_LIFETIME)
        database.run("INSERT OR REPLACE INTO keys VALUES (?, ?, ?)", key, memory_id, now)


def condition_of(where: Where) -> tuple[str, list[str]]:
    """Return a filter as SQL with its values; true if it matches all."""
    parts = ["1"]
    values: list[str] = []
    for column, names in (("owner", where.owners), ("type", where.types), ("subject", where.subjects)):
        if names is not None:
            parts.append(f"memories.{column} IN ({marks(names)})")
            values += names
    for tag in where.tags:
        parts.append("EXISTS (SELECT 1 FROM json_each(memories.tags) WHERE value = ?)")
        values.append(tag)
    return " AND ".join(parts), values


def marks(names: Sequence[str]) -> str:
    return ", ".join("?" * len(names))


def packed(vector: Vector) -> bytes:
    return array("f", vector).tobytes()

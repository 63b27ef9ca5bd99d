"""SQL of the memory store: one set of tables and statements for SQLite and PostgreSQL.

A transaction is a generator: it yields statements with `?` for values, receives their rows, and returns its result. So
it has one text, although `SqliteBackend` runs it in a thread and `PostgresBackend` on the event loop. `Dialect` has the
parts of the statements that differ.

Rows and advisory locks are always locked in the same order, so transactions cannot deadlock.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import anyio

from ...queues.keys import owner_of_tenant
from ..errors import EmbedderMismatch
from .embedders import Vector
from .memory import Memory, MemoryLink, Relation, linked, merged
from .text import contradict

P = ParamSpec("P")
R = TypeVar("R")

Rows = list[tuple[Any, ...]]
Transaction = Generator[tuple[str, Sequence[Any]], Rows, R]

_SIMILAR: Final = 0.5
"""Cosine from which a memory is compared with a new one, to find out whether they contradict each other."""

_CANDIDATES: Final = 20
"""Number of similar memories that are compared."""

KEY_LIFETIME: Final = 90 * 86_400.0
"""Lifetime of an idempotency key in seconds: longer than any task or dead letter is kept by default."""


@dataclass(frozen=True, slots=True)
class Where:
    """Filter of memories: any of these owners, types and subjects, all of these tags. None matches all.

    tenant: only those whose owner is one of this tenant.
    """

    owners: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    tags: tuple[str, ...] = ()
    subjects: tuple[str, ...] | None = None
    tenant: str | None = None

    @classmethod
    def of(
        cls,
        owner: str | Collection[str] | None,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
        subject: str | Collection[str] | None = None,
        tenant: str | None = None,
    ) -> Where:
        return cls(_several(owner), _several(type), tuple(tags), _several(subject), tenant)


def _several(names: str | Collection[str] | None) -> tuple[str, ...] | None:
    return (names,) if isinstance(names, str) else None if names is None else tuple(names)


class Near(NamedTuple):
    """Id of a memory and its similarity to the query."""

    id: str
    similarity: float


class WordMatch(NamedTuple):
    """Id of a memory with words of the query, and whether it has a vector of the store's embedder too."""

    id: str
    embedded: bool


class EmbedderIdentity(NamedTuple):
    """Name and dimension of an embedder, as a store records them."""

    name: str
    dimension: int

    @property
    def label(self) -> str:
        """Label of its vectors in the database."""
        return f"{self.name}/{self.dimension}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Parts of the statements that differ between databases; `?` stands for a value.

    Attributes:
        memories: Table; `keys`, `vectors` and `embedder` are the others.
        number: Type of a number; `real`, `texts` and `vector` are other types of columns.
        generated: End of the definition of a number that the database gives.
        options: End of a CREATE TABLE whose primary key is a text.
        json: Columns whose lists and objects are stored as JSON texts.
        among: Condition of a column that equals one of `array(texts)`.
        has_tags: Condition of memories with all of the tags `array(tags)`.
        words: Table of the matches of a query of words; `rank` orders them, the best first.
        indexed_words: Value of the column `words`, from the searched text; None if a trigger fills an index.
        given_vector: Value of a vector, from `packed(vector)`.
        valid: Condition of the vectors with a label and a dimension.
        distance: Cosine distance of a stored and a given vector.
        for_update: End of a SELECT that locks its rows.
        lock: SELECT that takes the lock with a name until the end of the transaction; None if the database has one
            writer.
    """

    memories: str
    keys: str
    vectors: str
    embedder: str
    number: str
    generated: str
    real: str
    texts: str
    vector: str
    options: str
    json: frozenset[str]
    among: str
    has_tags: str
    words: str
    rank: str
    indexed_words: str | None
    given_vector: str
    valid: str
    distance: str
    for_update: str
    lock: str | None
    array: Callable[[Iterable[str]], Any]
    packed: Callable[[Vector], Any]

    def tables(self) -> tuple[str, ...]:
        """Return the statements that create the tables, except the table of vectors and the index of words."""
        return (
            f"""
            CREATE TABLE {self.memories} (
                number {self.number} PRIMARY KEY {self.generated},
                id TEXT NOT NULL UNIQUE,
                owner TEXT NOT NULL,
                type TEXT NOT NULL,
                digest TEXT NOT NULL,
                text TEXT NOT NULL,
                former {self.texts} NOT NULL,
                tags {self.texts} NOT NULL,
                metadata TEXT NOT NULL,
                source TEXT NOT NULL,
                importance {self.real} NOT NULL,
                key TEXT,
                created {self.real} NOT NULL,
                accessed {self.real} NOT NULL,
                updated {self.real} NOT NULL,
                accesses {self.number} NOT NULL,
                subject TEXT NOT NULL DEFAULT '',
                links TEXT NOT NULL DEFAULT '[]',
                UNIQUE (owner, type, digest)
            )
            """,
            f"""
            CREATE TABLE {self.keys} (
                key TEXT PRIMARY KEY,
                memory TEXT REFERENCES {self.memories} (id) ON DELETE CASCADE,
                at {self.real} NOT NULL
            ) {self.options}
            """,
            f"CREATE INDEX {self.keys}_at ON {self.keys} (at)",
            f"CREATE INDEX {self.keys}_memory ON {self.keys} (memory)",
            f"""
            CREATE TABLE {self.embedder} (
                one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL, dimension INTEGER NOT NULL
            )
            """,
        )

    def vector_table(self) -> str:
        # without a dimension: while memories are embedded again, the vectors of two embedders are stored side by side
        return f"""
            CREATE TABLE {self.vectors} (
                number {self.number} NOT NULL REFERENCES {self.memories} (number) ON DELETE CASCADE,
                embedder TEXT NOT NULL,
                embedding {self.vector} NOT NULL,
                PRIMARY KEY (number, embedder)
            )
        """


_FIELDS: Final = (
    "id", "owner", "type", "text", "former", "tags", "metadata", "source",
    "importance", "key", "created", "accessed", "updated", "accesses", "subject", "links",
)  # fmt: skip
_CHANGED: Final = (
    "text", "former", "tags", "metadata", "importance", "accessed", "updated", "accesses", "links",
)  # fmt: skip
COLUMNS: Final = ", ".join(f"memories.{name}" for name in _FIELDS)


def memory_of(dialect: Dialect, row: Sequence[Any]) -> Memory:
    """Return the memory of a row of COLUMNS."""
    named = zip(_FIELDS, row, strict=True)
    return Memory.model_validate({name: json.loads(value) if name in dialect.json else value for name, value in named})


def _reads(
    transaction: Callable[Concatenate[Any, P], Transaction[R]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Turn a generator of statements that only read into an async method that runs them."""
    return _method(transaction, write=False)


def _writes(
    transaction: Callable[Concatenate[Any, P], Transaction[R]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Turn a generator of statements into an async method that runs them as one transaction."""
    return _method(transaction, write=True)


def _method(
    transaction: Callable[Concatenate[Any, P], Transaction[R]], *, write: bool
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    @functools.wraps(transaction)
    async def run(self: SqlBackend, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(transaction(self, *args, **kwargs), write=write)

    return run


class SqlBackend(ABC):
    """Database of a memory store. Each call is one transaction.

    All methods raise `MemoryStoreUnavailable` and `MemoryStoreDamaged`.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._embedder: EmbedderIdentity | None = None
        self._has_vectors = False
        """Whether the table of vectors exists."""

    @property
    @abstractmethod
    def store(self) -> str:
        """Name in errors, without a password."""

    @abstractmethod
    async def _connect(self, *, create: bool) -> None:
        """Connect, check the format, and create missing tables."""

    @abstractmethod
    async def _prepare_vectors(self) -> None:
        """Make sure that vectors can be stored. Raises `VectorsUnavailable`."""

    @abstractmethod
    async def _run(self, transaction: Transaction[R], *, write: bool) -> R:
        """Run the statements of a transaction; return its result."""

    @abstractmethod
    async def close(self) -> None: ...

    async def open(self, embedder: EmbedderIdentity | None, *, create: bool) -> None:
        """Open the database, and record the first embedder of a store. create: create a missing one.

        Raises `MemoryStoreMissing`, `NotAMemoryStore`, `VectorsUnavailable`, `EmbedderMismatch`.
        """
        await self._connect(create=create)
        try:
            if embedder is not None:
                await self._prepare_vectors()
                await self._record_embedder(embedder)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise
        self._embedder = embedder

    @_writes
    def _record_embedder(self, embedder: EmbedderIdentity) -> Transaction[None]:
        yield from self._recorded_embedder(embedder)

    def _recorded_embedder(self, embedder: EmbedderIdentity) -> Transaction[None]:
        """Record the first embedder of a store. Raises `EmbedderMismatch` if it has another one."""
        yield from self._check_embedder(embedder)
        yield f"INSERT INTO {self._dialect.embedder} VALUES (1, ?, ?) ON CONFLICT DO NOTHING", embedder

    def _check_embedder(self, embedder: EmbedderIdentity) -> Transaction[None]:
        """Check that the store's vectors are this embedder's, within the transaction that uses them."""
        for row in (yield f"SELECT name, dimension FROM {self._dialect.embedder}", ()):
            if (stored := EmbedderIdentity(*row)) != embedder:
                raise EmbedderMismatch(self.store, stored, embedder)

    # writing

    @_writes
    def add(self, memory: Memory, digest: str, vector: Vector | None, key: str | None) -> Transaction[Memory]:
        """Store a memory unless the key is known.

        Merge it into the one with its digest, owner and type. Link it to the similar ones of its scope that state the
        opposite, and store its links in the linked memories too.
        """
        if key is not None:
            yield from self._lock("key", key)  # writers with the same key take turns
            if (known := (yield from self._by_key(key))) is not None:
                return known
        yield from self._lock(memory.owner, memory.type)
        stored = None
        while stored is None:  # again if an equal memory is forgotten between the two statements
            number = yield from self._insert(memory, digest)
            stored = (yield from self._merge(memory, digest)) if number is None else (number, memory)
        number, whole = stored
        if vector is not None:
            whole = yield from self._link_conflicts(number, whole, vector)
        yield from self._link_back(whole)
        yield from self._put_vector(number, vector)
        if key is not None:
            yield from self._remember([key], whole.id, memory.created)
        return whole

    def _lock(self, *names: str) -> Transaction[None]:
        """Hold the lock with these names until the end of the transaction.

        Additions to one owner and type take turns: two transactions could not see, and so not link, each other's
        memories.
        """
        if self._dialect.lock is not None:
            yield self._dialect.lock, ["\x1f".join(("perdure memory", *names))]

    def _by_key(self, key: str) -> Transaction[Memory | None]:
        dialect = self._dialect
        sql = f"""
            SELECT {COLUMNS} FROM {dialect.keys} AS keys JOIN {dialect.memories} AS memories
            ON memories.id = keys.memory WHERE keys.key = ?
        """
        rows = yield sql, [key]
        return memory_of(dialect, rows[0]) if rows else None

    def _written(self, memory: Memory, names: Iterable[str]) -> dict[str, tuple[str, Any]]:
        """Return columns with their placeholders and values."""
        columns: dict[str, tuple[str, Any]] = {}
        for name in names:
            value = getattr(memory, name)
            if name in self._dialect.json:
                value = json.dumps(value, ensure_ascii=False)
            columns[name] = "?", list(value) if isinstance(value, tuple) else value
        if self._dialect.indexed_words is not None:
            columns["words"] = self._dialect.indexed_words, " ".join((memory.text, *memory.tags))
        return columns

    def _insert(self, memory: Memory, digest: str) -> Transaction[int | None]:
        """Insert a memory; return its number, None if its id, or its text for its owner and type, exists."""
        columns = {**self._written(memory, _FIELDS), "digest": ("?", digest)}
        marks = ", ".join(mark for mark, _ in columns.values())
        sql = f"""
            INSERT INTO {self._dialect.memories} ({", ".join(columns)}) VALUES ({marks})
            ON CONFLICT DO NOTHING RETURNING number
        """
        rows = yield sql, [value for _, value in columns.values()]
        return int(rows[0][0]) if rows else None

    def _merge(self, memory: Memory, digest: str) -> Transaction[tuple[int, Memory] | None]:
        """Merge a memory into the stored one with its digest; return the number and the result, None if it is gone."""
        same = f"""
            SELECT number, {COLUMNS} FROM {self._dialect.memories} AS memories
            WHERE owner = ? AND type = ? AND digest = ?
        """
        key = memory.owner, memory.type, digest
        rows = yield same, key
        links = [link.id for _, *row in rows for link in memory_of(self._dialect, row).links]
        # its links are changed under the lock of the owner and type only, but `touch` and `forget` take no such lock
        yield from self._hold([*(row[1] for row in rows), *links, *(link.id for link in memory.links)])
        if not (rows := (yield same, key)):
            return None
        [(number, *row)] = rows
        whole = merged(memory_of(self._dialect, row), memory)
        columns = self._written(whole, _CHANGED)
        setting = ", ".join(f"{name} = {mark}" for name, (mark, _) in columns.items())
        values = [value for _, value in columns.values()]
        yield f"UPDATE {self._dialect.memories} SET {setting} WHERE number = ?", [*values, number]
        return int(number), whole

    def _link_conflicts(self, number: int, memory: Memory, vector: Vector) -> Transaction[Memory]:
        """Link a memory to similar ones of its scope that state the opposite; return it with these links."""
        if self._embedder is None:
            return memory
        where = Where.of(memory.owner, memory.type, (), memory.subject)
        near = yield from self._by_vector(self._embedder, vector, where, _CANDIDATES)
        linked_already = {memory.id, *(link.id for link in memory.links)}
        close = [one.id for one in near if one.similarity >= _SIMILAR and one.id not in linked_already]
        others = (yield from self._get(close)).values() if close else ()
        found = [MemoryLink("conflicts", other.id) for other in others if contradict(memory.text, other.text)]
        if not found:
            return memory
        whole = linked(memory.model_copy(update={"links": ()}), [*found, *memory.links])  # the caller's are kept first
        links = self._written(whole, ["links"])["links"][1]
        yield f"UPDATE {self._dialect.memories} SET links = ? WHERE number = ?", [links, number]
        return whole

    def _link_back(self, memory: Memory) -> Transaction[None]:
        """Store in the linked memories of its scope their links to this one."""
        if not memory.links:
            return
        back: dict[Relation, Relation] = {"supersedes": "superseded_by", "superseded_by": "supersedes"}
        yield from self._hold([link.id for link in memory.links])
        others = yield from self._get([link.id for link in memory.links])
        for link in memory.links:
            if (other := others.get(link.id)) is not None and other.scope == memory.scope:
                changed = linked(other, [MemoryLink(back.get(link.relation, link.relation), memory.id)])
                links = self._written(changed, ["links"])["links"][1]
                yield f"UPDATE {self._dialect.memories} SET links = ? WHERE id = ?", [links, other.id]

    def _put_vector(self, number: int, vector: Vector | None) -> Transaction[None]:
        """Store the vector of the current text, and delete those of earlier texts and other embedders."""
        if self._has_vectors:
            yield f"DELETE FROM {self._dialect.vectors} WHERE number = ?", [number]
        if self._embedder is not None:
            yield from self._check_embedder(self._embedder)
            if vector is not None:
                put = f"INSERT INTO {self._dialect.vectors} VALUES (?, ?, {self._dialect.given_vector})"
                yield put, [number, self._embedder.label, self._dialect.packed(vector)]

    def _remember(self, keys: Iterable[str], memory_id: str | None, now: float) -> Transaction[None]:
        table = self._dialect.keys
        yield f"DELETE FROM {table} WHERE at < ?", [now - KEY_LIFETIME]
        for key in keys:
            sql = f"""
                INSERT INTO {table} VALUES (?, ?, ?)
                ON CONFLICT (key) DO UPDATE SET memory = excluded.memory, at = excluded.at
            """
            yield sql, [key, memory_id, now]

    @_reads
    def known(self, key: str) -> Transaction[Memory | None]:
        """Return the memory that was written with this key."""
        return (yield from self._by_key(key))

    @_writes
    def restore(self, memories: Sequence[tuple[Memory, str, Vector | None]]) -> Transaction[int]:
        """Store memories unchanged, except those whose id or text (per owner, type) is known. Return their number."""
        for owner, type_ in sorted({(memory.owner, memory.type) for memory, _, _ in memories}):
            yield from self._lock(owner, type_)
        stored = 0
        for memory, digest, vector in memories:
            if (number := (yield from self._insert(memory, digest))) is not None:
                yield from self._put_vector(number, vector)
                stored += 1
        return stored

    def _hold(self, ids: Sequence[str], where: Where | None = None) -> Transaction[dict[str, float]]:
        """Lock the matching memories; return their ids with the times of their last uses."""
        condition, values = self._condition(where or Where())
        sql = f"""
            SELECT id, accessed FROM {self._dialect.memories} AS memories
            WHERE {condition} AND id {self._dialect.among} ORDER BY id {self._dialect.for_update}
        """
        rows = yield sql, [*values, self._dialect.array(ids)]
        return dict(rows)

    @_writes
    def touch(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> Transaction[int]:
        """Count one use of each memory, unless the key is known. Return how many of them exist."""
        if key is not None:
            yield from self._lock("key", key)
        known = key is not None and (yield f"SELECT 1 FROM {self._dialect.keys} WHERE key = ?", [key])
        held = yield from self._hold(ids, where)
        if not known:
            sql = f"""
                UPDATE {self._dialect.memories} SET accesses = accesses + 1,
                accessed = CASE WHEN accessed < ? THEN ? ELSE accessed END WHERE id {self._dialect.among}
            """
            yield sql, [now, now, self._dialect.array(held)]
            if key is not None:
                yield from self._remember([key], None, now)
        return len(held)

    @_writes
    def forget(self, ids: Sequence[str], where: Where, now: float, key: str | None) -> Transaction[int]:
        """Remove memories. Return how many existed, also those that a call with the same key has removed before."""
        held = yield from self._hold(ids, where)
        yield from self._delete(held)
        if key is None:
            return len(held)
        keys = {name: f"{key}:forgot:{name}" for name in ids}  # a key for each memory that a call with `key` removes
        yield from self._remember([keys[name] for name in held], None, now)
        known = f"SELECT 1 FROM {self._dialect.keys} WHERE key {self._dialect.among}"
        return len((yield known, [self._dialect.array(keys.values())]))

    @_writes
    def prune(self, unused: Sequence[tuple[str, float]]) -> Transaction[int]:
        """Remove memories that were not used since: ids, each with the time of its last use when it was read."""
        held = yield from self._hold([name for name, _ in unused])
        gone = [name for name, accessed in unused if held.get(name) == accessed]
        yield from self._delete(gone)
        return len(gone)

    def _delete(self, ids: Iterable[str]) -> Transaction[None]:
        gone = f"DELETE FROM {self._dialect.memories} WHERE id {self._dialect.among}"
        yield gone, [self._dialect.array(ids)]

    # reading

    def _condition(self, where: Where) -> tuple[str, list[Any]]:
        """Return a filter as SQL with its values; true if it matches all."""
        parts, values = ["true"], []
        for column, names in (("owner", where.owners), ("type", where.types), ("subject", where.subjects)):
            if names is not None:
                parts.append(f"memories.{column} {self._dialect.among}")
                values.append(self._dialect.array(names))
        if where.tags:
            parts.append(self._dialect.has_tags)
            values.append(self._dialect.array(where.tags))
        if where.tenant is not None:
            first = owner_of_tenant(where.tenant, "")
            parts.append("substr(memories.owner, 1, ?) = ?")
            values += [len(first), first]
        return " AND ".join(parts), values

    @_reads
    def by_words(self, words: Sequence[str], where: Where, limit: int) -> Transaction[list[WordMatch]]:
        """Return the memories with any of the words, the best first, except those of importance 0."""
        dialect = self._dialect
        condition, values = self._condition(where)
        has_vector, identity = "false", list[Any]()  # the table of vectors may be missing
        if self._embedder is not None:
            vectors = f"{dialect.vectors} AS vectors WHERE vectors.number = memories.number AND {dialect.valid}"
            has_vector = f"EXISTS (SELECT 1 FROM {vectors})"
            identity = [self._embedder.label, self._embedder.dimension]
        asked = " OR ".join(f'"{word}"' for word in words)  # a word has letters and digits only
        sql = f"""
            SELECT id, {has_vector} FROM {dialect.memories} AS memories JOIN {dialect.words}
            WHERE importance > 0 AND {condition} ORDER BY {dialect.rank}, number LIMIT ?
        """
        rows = yield sql, [*identity, asked, *values, limit]
        return [WordMatch(name, bool(embedded)) for name, embedded in rows]

    @_reads
    def by_vector(self, known: EmbedderIdentity, vector: Vector, where: Where, limit: int) -> Transaction[list[Near]]:
        """Return the memories with the nearest vectors, the nearest first, except those of importance 0."""
        return (yield from self._by_vector(known, vector, where, limit))

    def _by_vector(self, known: EmbedderIdentity, vector: Vector, where: Where, limit: int) -> Transaction[list[Near]]:
        dialect = self._dialect
        condition, values = self._condition(where)
        yield from self._check_embedder(known)
        sql = f"""
            SELECT id, {dialect.distance} AS distance
            FROM {dialect.vectors} AS vectors JOIN {dialect.memories} AS memories USING (number)
            WHERE {dialect.valid} AND importance > 0 AND {condition} ORDER BY distance NULLS LAST, number LIMIT ?
        """
        rows = yield sql, [dialect.packed(vector), known.label, known.dimension, *values, limit]
        return [Near(name, 1 - distance) for name, distance in rows if distance is not None]

    @_reads
    def get(self, ids: Sequence[str]) -> Transaction[dict[str, Memory]]:
        return (yield from self._get(ids))

    def _get(self, ids: Sequence[str]) -> Transaction[dict[str, Memory]]:
        found = f"SELECT {COLUMNS} FROM {self._dialect.memories} AS memories WHERE id {self._dialect.among}"
        rows = yield found, [self._dialect.array(ids)]
        return {memory.id: memory for memory in (memory_of(self._dialect, row) for row in rows)}

    @_reads
    def page(
        self, where: Where, limit: int, *, after: int = 0, newest: bool = False
    ) -> Transaction[list[tuple[int, Memory]]]:
        """Return memories in the order in which they were stored, with their numbers, from after number `after`."""
        condition, values = self._condition(where)
        sql = f"""
            SELECT number, {COLUMNS} FROM {self._dialect.memories} AS memories
            WHERE {condition} AND number > ? ORDER BY number {"DESC" if newest else "ASC"} LIMIT ?
        """
        rows = yield sql, [*values, after, limit]
        return [(number, memory_of(self._dialect, row)) for number, *row in rows]

    @_reads
    def count(self, where: Where) -> Transaction[int]:
        condition, values = self._condition(where)
        [(number,)] = yield f"SELECT count(*) FROM {self._dialect.memories} AS memories WHERE {condition}", values
        return int(number)

    # change of the embedder

    async def without_vector(self, known: EmbedderIdentity, after: int, limit: int) -> list[tuple[int, str]]:
        """Return numbers and texts of memories without a vector of that embedder."""
        await self._prepare_vectors()
        return await self._without_vector(known, after, limit)

    @_reads
    def _without_vector(self, known: EmbedderIdentity, after: int, limit: int) -> Transaction[list[tuple[int, str]]]:
        sql = f"""
            SELECT number, text FROM {self._dialect.memories} AS memories WHERE number > ? AND NOT EXISTS
            (SELECT 1 FROM {self._dialect.vectors} AS vectors WHERE vectors.number = memories.number
            AND {self._dialect.valid}) ORDER BY number LIMIT ?
        """
        rows = yield sql, [after, known.label, known.dimension, limit]
        return [(number, text) for number, text in rows]

    @_writes
    def put_vectors(self, known: EmbedderIdentity, vectors: Sequence[tuple[int, str, Vector]]) -> Transaction[None]:
        """Store vectors of another embedder, given by number and text; skip those whose text has changed."""
        put = f"""
            INSERT INTO {self._dialect.vectors}
            SELECT number, ?, {self._dialect.given_vector} FROM {self._dialect.memories} WHERE number = ? AND text = ?
            ON CONFLICT (number, embedder) DO UPDATE SET embedding = excluded.embedding
        """
        for number, text, vector in vectors:
            yield put, [known.label, self._dialect.packed(vector), number, text]

    async def change_embedder(self, known: EmbedderIdentity) -> None:
        """Record this embedder as the store's, and delete the vectors of others."""
        await self._change_embedder(known)
        self._embedder = known

    @_writes
    def _change_embedder(self, known: EmbedderIdentity) -> Transaction[None]:
        sql = f"""
            INSERT INTO {self._dialect.embedder} VALUES (1, ?, ?)
            ON CONFLICT (one) DO UPDATE SET name = excluded.name, dimension = excluded.dimension
        """
        yield sql, known
        yield f"DELETE FROM {self._dialect.vectors} WHERE embedder <> ?", [known.label]

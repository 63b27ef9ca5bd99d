"""Rows of PostgreSQL: statements of the transactions in backend.py, and conversion to `Memory`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection, sql

from ..backend import KEY_LIFETIME, Where, links_to
from ..embedders import Vector
from ..memory import Memory, linked, merged

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

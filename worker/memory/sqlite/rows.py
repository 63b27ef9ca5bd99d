"""Rows of SQLite: statements of the transactions in backend.py, and conversion to `Memory`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any, Final

from ..backend import KEY_LIFETIME, Where, links_to
from ..embedders import Vector
from ..memory import Memory, linked, merged
from .driver import Database

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

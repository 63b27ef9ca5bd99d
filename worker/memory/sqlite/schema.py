"""Tables of a SQLite store, and the opening of its file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from ..backend import EmbedderIdentity
from ..errors import EmbedderMismatch, MemoryStoreMissing, MemoryStoreUnavailable, NotAMemoryStore
from ..text import digest
from .driver import Database, open_database

_APPLICATION: Final = 0x5044524D
"""Application id in the file's header (`PDRM`), which distinguishes a store from other databases."""

_VERSION: Final = 1

_ADDED: Final = {"subject": "TEXT NOT NULL DEFAULT ''", "links": "TEXT NOT NULL DEFAULT '[]'"}
"""Columns that stores of the first releases lack. They are optional for those releases, so the version stays."""

_TABLES: Final = (
    """
    CREATE TABLE memories (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        type TEXT NOT NULL,
        digest TEXT NOT NULL,
        text TEXT NOT NULL,
        former TEXT NOT NULL,
        tags TEXT NOT NULL,
        metadata TEXT NOT NULL,
        source TEXT NOT NULL,
        importance REAL NOT NULL,
        key TEXT,
        created REAL NOT NULL,
        accessed REAL NOT NULL,
        updated REAL NOT NULL,
        accesses INTEGER NOT NULL,
        subject TEXT NOT NULL DEFAULT '',
        links TEXT NOT NULL DEFAULT '[]',
        UNIQUE (owner, type, digest)
    )
    """,
    # the memories that a new one may equal, in table order, so that the search reads no page twice
    "CREATE INDEX memories_owner_type ON memories (owner, type)",
    """
    CREATE TABLE keys (
        key TEXT PRIMARY KEY,
        memory TEXT REFERENCES memories (id) ON DELETE CASCADE,
        at REAL NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX keys_at ON keys (at)",
    "CREATE INDEX keys_memory ON keys (memory)",
    """
    CREATE TABLE vectors (
        number INTEGER NOT NULL REFERENCES memories (number) ON DELETE CASCADE,
        embedder TEXT NOT NULL,
        embedding BLOB NOT NULL,
        PRIMARY KEY (number, embedder)
    )
    """,
    "CREATE TABLE embedder (one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL, dimension INTEGER NOT NULL)",
    """
    CREATE VIRTUAL TABLE words USING fts5 (
        text, tags, content = 'memories', content_rowid = 'number', tokenize = 'porter unicode61 remove_diacritics 2'
    )
    """,
    """
    CREATE TRIGGER memories_added AFTER INSERT ON memories BEGIN
        INSERT INTO words (rowid, text, tags) VALUES (new.number, new.text, new.tags);
    END
    """,
    """
    CREATE TRIGGER memories_removed AFTER DELETE ON memories BEGIN
        INSERT INTO words (words, rowid, text, tags) VALUES ('delete', old.number, old.text, old.tags);
    END
    """,
    """
    CREATE TRIGGER memories_changed AFTER UPDATE OF text, tags ON memories BEGIN
        INSERT INTO words (words, rowid, text, tags) VALUES ('delete', old.number, old.text, old.tags);
        INSERT INTO words (rowid, text, tags) VALUES (new.number, new.text, new.tags);
    END
    """,
)


def open_store_file(path: Path, wait: float, *, create: bool) -> Database:
    """Open a store; turn an empty or missing file into one. Files of other applications are not changed."""
    _prepare(path, create=create)
    database = open_database(path, wait)
    try:
        if database.run("PRAGMA application_id") != [(_APPLICATION,)] and not _blank(database):
            raise NotAMemoryStore(str(path), "is a database, but not a memory store")
        if (version := _version(database)) > _VERSION:
            raise NotAMemoryStore(str(path), f"was written by a later version of Perdure (format {version})")
        _use_log(database, wait)
        database.run("PRAGMA foreign_keys = ON")
        database.run("PRAGMA synchronous = FULL")  # the memories of a recorded step survive a power loss
        _make_tables(database)
        _add_columns(database)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(path: Path, *, create: bool) -> None:
    try:
        if not create and not path.exists():
            raise MemoryStoreMissing(str(path), "it does not exist; 'perdure memory add' creates it")
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise MemoryStoreUnavailable(str(path), f"could not be opened: {error.strerror}") from error


def _blank(database: Database) -> bool:
    return not database.run("SELECT 1 FROM sqlite_schema LIMIT 1")


def _use_log(database: Database, wait: float) -> None:
    """Switch to the write-ahead log, so that readers and a writer do not block each other.

    SQLite does not wait if two processes switch at once, so this retries.
    """
    until = time.monotonic() + wait
    while database.run("PRAGMA journal_mode") != [("wal",)]:
        try:
            database.run("PRAGMA journal_mode = WAL")
        except MemoryStoreUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _make_tables(database: Database) -> None:
    if _version(database) == _VERSION:
        return
    with database.transaction():
        if _version(database) == _VERSION:  # another process was faster
            return
        for statement in _TABLES:
            database.run(statement)
        database.run(f"PRAGMA application_id = {_APPLICATION}")
        database.run(f"PRAGMA user_version = {_VERSION}")


def _add_columns(database: Database) -> None:
    """Upgrade a store of an earlier release: add the missing columns, and the source to the digests."""
    if not missing_columns(database):
        return
    with database.transaction():
        for name in missing_columns(database):  # another process may have been faster
            database.run(f"ALTER TABLE memories ADD COLUMN {name} {_ADDED[name]}")
            if name == "subject":
                for number, text, source in database.run(
                    "SELECT number, text, source FROM memories WHERE source <> ''"
                ):
                    value = digest(text, source=source)
                    database.run("UPDATE memories SET digest = ? WHERE number = ?", value, number)


def missing_columns(database: Database) -> list[str]:
    there = {row[1] for row in database.run("PRAGMA table_info(memories)")}
    return [name for name in _ADDED if name not in there]


def _version(database: Database) -> int:
    [(version,)] = database.run("PRAGMA user_version")
    return int(version)


def known_embedder(database: Database) -> EmbedderIdentity | None:
    """Return the embedder that the store's vectors belong to."""
    rows = database.run("SELECT name, dimension FROM embedder")
    return EmbedderIdentity(*rows[0]) if rows else None


def check_embedder(database: Database, embedder: EmbedderIdentity) -> None:
    """Check that the store's vectors are this embedder's, within the transaction that uses them.

    Raises `EmbedderMismatch`.
    """
    stored = known_embedder(database)
    if stored is not None and stored != embedder:
        raise EmbedderMismatch(str(database.path), stored, embedder)

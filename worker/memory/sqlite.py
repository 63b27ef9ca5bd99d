"""Memory backend in a SQLite file, for the workers of one host; salvage of a damaged file.

Words are found with FTS5, vectors with sqlite-vec if it is installed. Several processes may use a file at once; one
process must open it with one SQLite library only (see sqlite_driver.py). A damaged file is never changed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from ..errors import MemoryStoreDamaged, MemoryStoreError, MemoryStoreMissing, MemoryStoreUnavailable, NotAMemoryStore
from ..log import logger
from .backend import COLUMNS, Dialect, SqlBackend, Transaction, memory_of
from .memory import Memory
from .sqlite_driver import Database

with suppress(ModuleNotFoundError):  # Windows
    import fcntl

R = TypeVar("R")

_WAIT: Final = 10.0
"""Time limit of a wait for the file's lock in seconds."""

_APPLICATION: Final = 0x5044524D
"""Application id in the file's header (`PDRM`), which distinguishes a store from other databases."""

_VERSION: Final = 1

_DIALECT: Final = Dialect(
    memories="memories",
    keys="keys",
    vectors="vectors",
    embedder="embedder",
    number="INTEGER",
    generated="AUTOINCREMENT",
    real="REAL",
    texts="TEXT",
    vector="BLOB",
    options="WITHOUT ROWID",
    json=frozenset({"former", "tags", "metadata", "links"}),
    among="IN (SELECT value FROM json_each(?))",
    has_tags="""
        NOT EXISTS (
            SELECT 1 FROM json_each(?) AS asked WHERE asked.value NOT IN (SELECT value FROM json_each(memories.tags))
        )
    """,
    words="words(?) AS asked ON asked.rowid = number",
    rank="asked.rank",
    indexed_words=None,
    given_vector="?",
    valid="vectors.embedder = ? AND length(embedding) = 4 * ?",  # a damaged one is ignored until `reembed` replaces it
    distance="vec_distance_cosine(embedding, ?)",
    for_update="",
    lock=None,
    array=lambda texts: json.dumps(list(texts)),
    packed=lambda vector: array("f", vector).tobytes(),
)

_WORDS: Final = (
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


class SqliteBackend(SqlBackend):
    """SQLite file with one connection, used by one thread at a time; the event loop never waits for the disk.

    Transactions that write take the write lock first (BEGIN IMMEDIATE), so two processes that add the same memory at
    once take turns.
    """

    def __init__(self, path: Path, *, wait: float = _WAIT) -> None:
        super().__init__(_DIALECT)
        self._path = path
        self._wait = wait
        self._create = False
        self._is_open = False
        self._database: _StoreFile | None = None
        """None while the file that was moved or replaced could not be opened again."""
        self._one = anyio.CapacityLimiter(1)

    @property
    def store(self) -> str:
        return str(self._path)

    async def _connect(self, *, create: bool) -> None:
        self._create = create
        self._database = await anyio.to_thread.run_sync(self._opened, limiter=self._one)
        self._is_open = self._has_vectors = True

    async def _prepare_vectors(self) -> None:
        await anyio.to_thread.run_sync(lambda: self._connected().need_vectors(), limiter=self._one)

    async def close(self) -> None:
        file, self._database, self._is_open = self._database, None, False
        if file is not None:
            await anyio.to_thread.run_sync(file.database.close, limiter=self._one)

    def _opened(self) -> _StoreFile:
        return _StoreFile(open_store_file(self._path, self._wait, create=self._create), self._path)

    def _connected(self) -> Database:
        """Return a connection to the file that is at the path now; called in the thread."""
        if not self._is_open:
            raise RuntimeError(f"memory store {self.store} is not open")
        file = self._database
        if file is not None and file.is_elsewhere():
            logger.warning("memory file {} was moved or replaced: the one that is there now is used", self.store)
            self._database = None
            file.leave()
        if self._database is None:
            file = self._opened()
            try:
                if self._embedder is not None:
                    file.database.need_vectors()
                    with file.database.transaction():
                        file.database.follow(self._recorded_embedder(self._embedder))
            except BaseException:
                file.database.close()
                raise
            self._database = file
        return self._database.database

    async def _run(self, transaction: Transaction[R], *, write: bool) -> R:
        """Run a transaction in a thread. A cancellation waits for its end, so that no work outlives the call."""

        def run() -> R:
            database = self._connected()
            if not write:
                return database.follow(transaction)
            with database.transaction():
                result = database.follow(transaction)
            if self._database is not None and self._database.is_elsewhere():
                raise MemoryStoreUnavailable(self.store, "it was moved or replaced while it was written to; try again")
            return result

        return await anyio.to_thread.run_sync(run, limiter=self._one)


class _StoreFile:
    """Open store, and the identities of its files: of the database, its write-ahead log, and the index of that."""

    def __init__(self, database: Database, path: Path) -> None:
        self.database = database
        self._path = path
        self._files = {suffix: _identity(path, suffix) for suffix in ("", *_BESIDE)}

    def is_elsewhere(self) -> bool:
        """Return whether another file, or none, is at the path now."""
        return _identity(self._path, "") != self._files[""]

    def leave(self) -> None:
        """Close the file, wherever it is, with all that was written, and leave nothing of it at the path.

        SQLite would take a log that was left there for that of the file that is there now. Processes take turns, so
        that none removes the log that another one has just created.
        """
        with suppress(MemoryStoreError):
            self.database.run("PRAGMA wal_checkpoint(TRUNCATE)")
        self.database.close()
        with suppress(OSError), _locked(self._path.parent):
            for suffix in _BESIDE:
                if self._files[suffix] is not None and _identity(self._path, suffix) == self._files[suffix]:
                    Path(f"{self._path}{suffix}").unlink()


_BESIDE: Final = ("-wal", "-shm")


def _identity(path: Path, suffix: str) -> tuple[int, int] | None:
    try:
        found = os.stat(f"{path}{suffix}")  # noqa: PTH116 - called for each statement
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def open_store_file(path: Path, wait: float, *, create: bool) -> Database:
    """Open a store; turn an empty or missing file into one. Files of other applications are not changed."""
    _prepare(path, create=create)
    database = Database(path, wait)
    try:
        if database.run("PRAGMA application_id") != [(_APPLICATION,)] and not _blank(database):
            raise NotAMemoryStore(str(path), "is a database, but not a memory store")
        if (version := _version(database)) > _VERSION:
            raise NotAMemoryStore(str(path), f"was written by a later version of Perdure (format {version})")
        _use_log(database, wait)
        database.run("PRAGMA foreign_keys = ON")
        database.run("PRAGMA synchronous = FULL")  # the memories of a recorded step survive a power loss
        _make_tables(database)
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
        for statement in (*_DIALECT.tables(), _DIALECT.vector_table(), *_WORDS):
            database.run(statement)
        database.run(f"PRAGMA application_id = {_APPLICATION}")
        database.run(f"PRAGMA user_version = {_VERSION}")


def _version(database: Database) -> int:
    [(version,)] = database.run("PRAGMA user_version")
    return int(version)


class Salvage:
    """Readable memories of a damaged file, one by one, from a copy, so that the file is not changed.

    Only the memories on a damaged page are lost, since each is read by its number.

    Attributes:
        lost: Number of memories that could not be read, known after the iteration.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lost = 0

    def __iter__(self) -> Iterator[Memory]:
        """Yield the memories.

        Raises:
            MemoryStoreMissing, MemoryStoreUnavailable
            MemoryStoreDamaged: No memory can be read.
        """
        if not self._path.exists():
            raise MemoryStoreMissing(str(self._path), "it does not exist")
        with tempfile.TemporaryDirectory(prefix="perdure-salvage-") as folder:
            copy = Path(folder) / self._path.name
            try:
                for suffix in ("", "-wal"):
                    if (part := Path(f"{self._path}{suffix}")).exists():
                        shutil.copy(part, f"{copy}{suffix}")
            except OSError as error:
                raise MemoryStoreUnavailable(str(self._path), f"could not be copied: {error.strerror}") from error
            database = Database(copy, 0)
            try:
                yield from self._read(database)
            finally:
                database.close()

    def _read(self, database: Database) -> Iterator[Memory]:
        for number in range(1, self._last(database) + 1):
            try:
                rows = database.run(f"SELECT {COLUMNS} FROM memories WHERE number = ?", number)
                found = [memory_of(_DIALECT, row) for row in rows]
            except (MemoryStoreError, ValueError, TypeError):  # the page or its content is damaged
                self.lost += 1
            else:
                yield from found

    def _last(self, database: Database) -> int:
        """Return an upper bound of the numbers, which two tables know."""
        for question in ("SELECT seq FROM sqlite_sequence WHERE name = 'memories'", "SELECT max(number) FROM memories"):
            try:
                rows = database.run(question)
            except MemoryStoreDamaged:
                continue
            except MemoryStoreError:
                break
            return int(rows[0][0] or 0) if rows else 0
        raise MemoryStoreDamaged(str(self._path), "no memory could be read")

"""Connection to a SQLite file: by apsw, which can load the vector extension, else by Python's sqlite3.

A process must open a file by one SQLite library only, since each drops the other's locks when it closes the file. So
the installed packages decide which one it is, never the request.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from ..errors import MemoryStoreDamaged, MemoryStoreError, MemoryStoreUnavailable, NotAMemoryStore, VectorsUnavailable
from .backend import Transaction

R = TypeVar("R")

_INSTALL: Final = "pip install 'perdure[vectors]'"

# Primary result codes, https://www.sqlite.org/rescode.html
_BUSY, _LOCKED, _CORRUPT, _FOREIGN = 5, 6, 11, 26
_PROBLEMS: Final = {8: "it is read-only", 10: "its disk failed", 13: "its disk is full", 14: "could not be opened"}


class _Connection(Protocol):
    """Connection of either library."""

    def execute(self, sql: str, values: Any, /) -> Any: ...
    def close(self) -> None: ...


def _connect_by_apsw(path: Path, wait: float) -> tuple[_Connection, bool]:
    """Return a connection, and whether the vector functions are available."""
    import apsw  # of the extra `vectors`

    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_timeout(round(wait * 1000))
    if find_spec("sqlite_vec") is None:
        return connection, False
    import sqlite_vec  # type: ignore[import-untyped]  # has no type information

    connection.enable_load_extension(True)
    connection.load_extension(sqlite_vec.loadable_path())
    connection.enable_load_extension(False)
    return connection, True


def _connect_by_sqlite3(path: Path, wait: float) -> _Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=wait,
        isolation_level=None,
        check_same_thread=False,  # `SqliteBackend` uses one thread at a time
    )


class Database:
    """Open SQLite file. Its errors are translated to those of the memory store."""

    def __init__(self, path: Path, wait: float) -> None:
        """Open an existing file. wait: seconds to wait for its lock."""
        self.path = path
        self._wait = wait
        with _translated_errors(path, wait):
            if find_spec("apsw") is None:
                self._connection, self._vectors = _connect_by_sqlite3(path, wait), False
            else:
                self._connection, self._vectors = _connect_by_apsw(path, wait)

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with _translated_errors(self.path, self._wait):
            return list(self._connection.execute(sql, values))

    def follow(self, transaction: Transaction[R]) -> R:
        """Run the statements of a transaction; return its result."""
        try:
            statement, values = next(transaction)
            while True:
                statement, values = transaction.send(self.run(statement, *values))
        except StopIteration as end:
            result: R = end.value
            return result

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block as a transaction with the write lock; other processes can read meanwhile."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with _translated_errors(self.path, self._wait):
                try:
                    self._connection.execute("ROLLBACK", ())
                except Exception as error:  # SQLite has already rolled back after some errors
                    if "no transaction" not in str(error):
                        raise
            raise

    def need_vectors(self) -> None:
        """Raise `VectorsUnavailable` if the vector functions are missing."""
        if not self._vectors:
            raise VectorsUnavailable(str(self.path), f"it needs the packages apsw and sqlite-vec: {_INSTALL}")

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _translated_errors(path: Path, wait: float) -> Iterator[None]:
    try:
        yield
    except MemoryStoreError:
        raise
    except Exception as error:
        translated = _translate(path, wait, error)
        if translated is None:
            raise
        raise translated from error


def _translate(path: Path, wait: float, error: Exception) -> MemoryStoreError | None:
    """Return the error of the memory store for a library error; None if the file is not its cause."""
    code = getattr(error, "sqlite_errorcode", None) or getattr(error, "result", None)
    primary = code & 0xFF if isinstance(code, int) else 0
    if primary == _CORRUPT:
        return MemoryStoreDamaged(str(path), str(error))
    if primary == _FOREIGN:
        return NotAMemoryStore(str(path), "is not a SQLite database, or its first page is damaged")
    problem = _PROBLEMS.get(primary)
    if primary in (_BUSY, _LOCKED):
        problem = f"another process has held its lock for {wait:g} s; try again, or find the process (lsof)"
    elif "no such module: fts5" in str(error):
        problem = f"the SQLite of this Python has no FTS5: {_INSTALL}"
    elif problem is not None:
        problem = f"{problem} ({error})"
    return None if problem is None else MemoryStoreUnavailable(str(path), problem)

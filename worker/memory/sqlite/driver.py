"""One connection to a SQLite file: by apsw, which can load the vectors' extension, else by Python's own module.

One process must open a file by one SQLite library only (each forgets the locks of the other as it closes the file), so
which one it is depends on what is installed, never on what is asked for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from ..errors import MemoryStoreDamaged, MemoryStoreError, MemoryStoreUnavailable, NotAMemoryStore, VectorsUnavailable

__all__ = ["Database", "Driver", "open_database"]

_MISSING: Final = "install perdure[vectors]"

# Primary result codes, https://www.sqlite.org/rescode.html
_BUSY, _LOCKED, _CORRUPT, _FOREIGN = 5, 6, 11, 26
_PROBLEMS: Final = {8: "it may not be written to", 10: "its disk fails", 13: "its disk is full", 14: "cannot be opened"}


class Driver(Protocol):
    """A connection of either library."""

    vectors: bool
    """Whether the vectors' functions are there."""

    def run(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]: ...
    def close(self) -> None: ...


class _Apsw:
    def __init__(self, path: Path, wait: float) -> None:
        import apsw  # of the extra `vectors`

        self._connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        self._connection.set_busy_timeout(round(wait * 1000))
        self.vectors = find_spec("sqlite_vec") is not None
        if self.vectors:
            import sqlite_vec  # type: ignore[import-untyped]  # it says nothing of its types

            self._connection.enable_load_extension(True)
            self._connection.load_extension(sqlite_vec.loadable_path())
            self._connection.enable_load_extension(False)

    def run(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        self._connection.close()


class _Standard:
    vectors = False

    def __init__(self, path: Path, wait: float) -> None:
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=wait,
            isolation_level=None,
            check_same_thread=False,  # one thread at a time, see `SqliteBackend`
        )

    def run(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        self._connection.close()


class Database:
    """An open file. What goes wrong in it is told in our errors."""

    def __init__(self, path: Path, driver: Driver, wait: float) -> None:
        self.path = path
        self._driver = driver
        self._wait = wait

    @property
    def vectors(self) -> bool:
        return self._driver.vectors

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with _told(self.path, self._wait):
            return self._driver.run(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Others may read meanwhile, and none may write."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with _told(self.path, self._wait):
                try:
                    self._driver.run("ROLLBACK", ())
                except Exception as error:  # some errors have rolled it back already
                    if "no transaction" not in str(error):
                        raise
            raise

    def need_vectors(self) -> None:
        """Raises `VectorsUnavailable`."""
        if not self.vectors:
            raise VectorsUnavailable(str(self.path), _MISSING)

    def close(self) -> None:
        self._driver.close()


def open_database(path: Path, wait: float) -> Database:
    """Open a file that is there. wait: seconds for which others may hold its lock."""
    with _told(path, wait):
        driver: Driver = _Apsw(path, wait) if find_spec("apsw") is not None else _Standard(path, wait)
    return Database(path, driver, wait)


@contextmanager
def _told(path: Path, wait: float) -> Iterator[None]:
    try:
        yield
    except MemoryStoreError:
        raise
    except Exception as error:
        told = _translate(path, wait, error)
        if told is None:
            raise
        raise told from error


def _translate(path: Path, wait: float, error: Exception) -> MemoryStoreError | None:
    """What the library's error means; None where it is not the file's fault."""
    code = getattr(error, "sqlite_errorcode", None) or getattr(error, "result", None)
    primary = code & 0xFF if isinstance(code, int) else 0
    if primary == _CORRUPT:
        return MemoryStoreDamaged(str(path), str(error))
    if primary == _FOREIGN:
        return NotAMemoryStore(str(path), "is no SQLite database, or its first page is damaged")
    problem = _PROBLEMS.get(primary)
    if primary in (_BUSY, _LOCKED):
        problem = f"another process has held its lock for {wait:g} s: try again, or find who uses it (lsof)"
    elif "no such module: fts5" in str(error):
        problem = f"the SQLite of this Python cannot search for words: {_MISSING}"
    elif problem is not None:
        problem = f"{problem} ({error})"
    return None if problem is None else MemoryStoreUnavailable(str(path), problem)

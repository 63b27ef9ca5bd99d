"""Salvage of a damaged SQLite store: its readable memories, from a copy, so that the file is not changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import MemoryStoreDamaged, MemoryStoreError, MemoryStoreMissing, MemoryStoreUnavailable
from ..memory import Memory
from .backend import COLUMNS, memory_of
from .driver import Database, open_database
from .schema import missing_columns


class Salvage:
    """Readable memories of a damaged file, one by one.

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
            database = open_database(copy, 0)
            try:
                yield from self._read(database)
            finally:
                database.close()

    def _read(self, database: Database) -> Iterator[Memory]:
        columns = COLUMNS  # a copy of an earlier release's store lacks some, and is too damaged to be upgraded
        for name in missing_columns(database):
            columns = columns.replace(f"memories.{name}", "'[]'" if name == "links" else "''")
        for number in range(1, self._last(database) + 1):
            try:
                rows = database.run(f"SELECT {columns} FROM memories WHERE number = ?", number)  # noqa: S608 - own names
                found = [memory_of(row) for row in rows]
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

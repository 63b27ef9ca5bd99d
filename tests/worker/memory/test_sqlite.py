"""Faults of a SQLite memory store: file locked, damaged, of another application, of a later version."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perdure.worker.errors import EmbedderMismatch
from perdure.worker.memory import (
    HashingEmbedder,
    HybridStore,
    Memory,
    MemoryStoreDamaged,
    MemoryStoreError,
    MemoryStoreUnavailable,
    NotAMemoryStore,
    Salvage,
    SqliteBackend,
    VectorsUnavailable,
    new_memory,
    sqlite,
    sqlite_driver,
)
from perdure.worker.memory.backend import EmbedderIdentity
from perdure.worker.memory.sqlite_driver import Database

from tests.support.memory_stores import Angles, Numbers, remember


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "memory.sqlite3"


def store_at(path: Path, *, wait: float = 10.0) -> HybridStore:
    return HybridStore(SqliteBackend(path, wait=wait))


async def filled(path: Path, count: int) -> None:
    async with store_at(path) as store:
        long = " and so on" * 40
        await store.restore(
            [
                Memory(text=f"memory {n}:{long}", id=f"id-{n}", created=n, accessed=n, updated=n, tags=("t",))
                for n in range(count)
            ]
        )


def content(path: Path) -> dict[str, str]:
    """Return the folder's files, except the one that only lists readers (-shm)."""
    return {
        one.name: hashlib.sha256(one.read_bytes()).hexdigest()
        for one in path.parent.iterdir()
        if not one.name.endswith("-shm") and one.stat().st_size
    }


def break_page_with(path: Path, text: bytes) -> None:
    """Overwrite the page of the file in which the text occurs first."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    start = data.index(text) // size * size
    data[start : start + size] = b"\xde" * size
    path.write_bytes(data)


async def test_the_file_and_its_folder_are_private(path: Path) -> None:
    async with store_at(path) as store:
        await remember(store, "x")
        for one in path.parent.iterdir():
            assert stat.S_IMODE(one.stat().st_mode) == 0o600, one
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_locked_file_can_be_read_and_says_why_it_cannot_be_written(path: Path) -> None:
    await filled(path, 1)
    async with store_at(path, wait=0.05) as store:
        other = Database(path, 1)
        other.run("BEGIN IMMEDIATE")
        assert len(await store.search("memory")) == 1
        with pytest.raises(MemoryStoreUnavailable, match=r"another process has held its lock for 0\.05 s") as refused:
            await remember(store, "x")
        assert str(path) in str(refused.value)
        other.run("ROLLBACK")
        other.close()
        await remember(store, "x")
        assert await store.count() == 2


async def test_a_damaged_page_is_reported_and_nothing_is_overwritten(path: Path) -> None:
    await filled(path, 300)
    break_page_with(path, b"memory 150:")
    before = content(path)
    async with store_at(path) as store:
        assert len(await store.list(limit=10)) == 10  # other pages are readable
        assert len(await store.get(["id-1", "id-299"])) == 2
        for use in (store.list(limit=300), store.get(["id-150"]), store.touch(["id-150"]), store.forget(["id-150"])):
            with pytest.raises(MemoryStoreDamaged, match="perdure memory export --salvage") as damaged:
                await use
            assert str(path) in str(damaged.value)
    assert content(path) == before


async def test_memories_on_undamaged_pages_are_salvaged(path: Path) -> None:
    await filled(path, 300)
    break_page_with(path, b"memory 150:")
    before = content(path)
    salvage = Salvage(path)
    found = list(salvage)
    assert content(path) == before
    assert 1 <= salvage.lost <= 40
    assert len(found) == 300 - salvage.lost
    assert found[0].id == "id-0"
    assert found[-1].id == "id-299"
    assert "id-150" not in {one.id for one in found}
    async with store_at(path.parent / "new.sqlite3") as new:
        assert await new.restore(found) == len(found)


async def test_all_memories_of_an_undamaged_file_are_salvaged(path: Path) -> None:
    async with store_at(path) as store:
        await remember(store, "one", "two")
        [three] = await remember(store, "three")
        await store.forget([three.id])
        salvage = Salvage(path)  # the write-ahead log is not checkpointed: the store is open
        assert [one.text for one in salvage] == ["one", "two"]
        assert salvage.lost == 0


async def test_a_file_without_readable_memories_is_reported(path: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryStoreError, match="it does not exist"):
        list(Salvage(path))
    other = tmp_path / "text"
    other.write_text("not a database at all " * 100)
    with pytest.raises(MemoryStoreError, match="text"):
        list(Salvage(other))


def empty(path: Path) -> None:
    path.touch()


def foreign_text(path: Path) -> None:
    path.write_text("Dear diary, " * 100)


def foreign_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text)")
    connection.commit()
    connection.close()


def later_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA application_id = 0x5044524D")
    connection.execute("PRAGMA user_version = 2")
    connection.execute("CREATE TABLE memories (text)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (foreign_text, "not a SQLite database"),
        (foreign_database, "is a database, but not a memory store"),
        (later_version, r"written by a later version of Perdure \(format 2\)"),
    ],
)
async def test_files_of_other_applications_are_not_changed(make: Callable[[Path], None], says: str, path: Path) -> None:
    path.parent.mkdir()
    make(path)
    before = content(path)
    with pytest.raises(NotAMemoryStore, match=says) as refused:
        await store_at(path).open()
    assert str(path) in str(refused.value)
    assert "PERDURE_MEMORY" in str(refused.value)
    assert content(path) == before


async def test_an_impossible_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "memory.sqlite3", tmp_path):
        with pytest.raises(MemoryStoreUnavailable, match="could not be opened") as refused:
            await store_at(path).open()
        assert str(path) in str(refused.value)


async def test_without_the_extra_only_words_are_searched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_driver, "find_spec", lambda name: None)
    async with store_at(path, wait=0.05) as store:
        [one] = await remember(store, "The deploy failed")
        await remember(store, "the DEPLOY failed!")
        assert [found.memory.id for found in await store.search("deploys")] == [one.id]
        assert await store.touch([one.id], key="k") == 1
        other = Database(path, 1)
        other.run("BEGIN IMMEDIATE")
        with pytest.raises(MemoryStoreUnavailable, match="held its lock"):
            await remember(store, "x")
        other.close()
        assert await store.count() == 1
    with pytest.raises(
        VectorsUnavailable, match=r"needs the packages apsw and sqlite-vec: pip install 'perdure\[vectors\]'; unset"
    ):
        await HybridStore(SqliteBackend(path), Angles()).open()
    foreign_text(path)
    with pytest.raises(NotAMemoryStore):
        await store_at(path).open()


async def test_a_store_works_with_and_without_the_extra_in_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HybridStore(SqliteBackend(path), Numbers()) as store:
        [one] = await remember(store, "1 of all")
    with monkeypatch.context() as without:
        without.setattr(sqlite_driver, "find_spec", lambda name: None)
        async with store_at(path) as store:
            await store.add(new_memory("1 of all!"))  # deletes the vector of the earlier text
            await store.forget([one.id])
            await remember(store, "2 of all")
    async with HybridStore(SqliteBackend(path), Numbers()) as store:
        assert [found.memory.text for found in await store.search("2")] == ["2 of all"]
        assert await store.search("1") == []


def move(path: Path, how: str, backup: Path) -> Path:
    """Move a file away, with or without its log, or replace or remove it; return where it is."""
    away = path.with_name("away.sqlite3")
    if how == "replaced":
        os.link(path, away)
        backup.replace(path)
    else:
        for suffix in ("", "-wal", "-shm") if how == "moved whole" else ("",):
            Path(f"{path}{suffix}").rename(f"{away}{suffix}")
    if how == "removed":
        away.unlink()
    return away


def replace(path: Path, data: bytes | None) -> None:
    path.unlink()
    if data is not None:
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["moved", "moved whole", "replaced", "removed"])
async def test_a_file_that_was_moved_or_replaced_is_noticed(path: Path, how: str) -> None:
    """Also by a second process, whose connection is to the old file. No memory is lost that was stored before."""
    async with HybridStore(SqliteBackend(path)) as store, HybridStore(SqliteBackend(path)) as other:
        await remember(store, *(f"before {number}" for number in range(300)))
        assert await other.count() == 300
        backup = path.with_name("backup.sqlite3")
        async with HybridStore(SqliteBackend(backup)) as saved:
            await remember(saved, "from the backup")
        away = move(path, how, backup)
        await remember(store, "after")
        await remember(other, "after by another")
        expected = {"after", "after by another", *(["from the backup"] if how == "replaced" else [])}
        assert {memory.text for memory in await store.list()} == expected
        assert {memory.text for memory in await other.list()} == expected
    async with HybridStore(SqliteBackend(path)) as store:
        assert {memory.text for memory in await store.list()} == expected, "another process finds them"
    if how != "removed":
        async with HybridStore(SqliteBackend(away)) as store:
            assert await store.count() == 300


async def test_a_file_that_is_moved_while_it_is_written_to_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is in the file that was moved: the caller tries again."""
    async with HybridStore(SqliteBackend(path)) as store:
        run = Database.run

        def moved(self: Database, sql: str, *values: Any) -> list[tuple[Any, ...]]:
            if sql == "COMMIT":
                move(path, "moved", path)
            return run(self, sql, *values)

        monkeypatch.setattr(Database, "run", moved)
        with pytest.raises(MemoryStoreUnavailable, match="moved or replaced while it was written to"):
            await store.add(new_memory("x"), key="k")
        monkeypatch.undo()
        await store.add(new_memory("x"), key="k")
        assert await store.count() == 1


async def test_a_store_is_used_again_once_its_file_can_be_opened(path: Path) -> None:
    async with HybridStore(SqliteBackend(path), HashingEmbedder()) as store:
        await remember(store, "x")
        replace(path, b"not a store" * 100)
        for _ in range(2):
            with pytest.raises(NotAMemoryStore):
                await store.count()
        replace(path, None)
        async with HybridStore(SqliteBackend(path), Angles()) as other:
            await remember(other, "y")
        with pytest.raises(EmbedderMismatch):
            await remember(store, "z")
        replace(path, None)
        await remember(store, "z")
        assert [memory.text for memory in await store.list()] == ["z"]


async def test_forgotten_memories_leave_no_rows(path: Path) -> None:
    async with HybridStore(SqliteBackend(path), Numbers()) as store:
        memory = await store.add(new_memory("1 secret"), key="t:s")
        await store.forget([memory.id])
        database = Database(path, 1)
        for table in ("memories", "keys", "vectors"):
            assert database.run(f"SELECT count(*) FROM {table}") == [(0,)], table
        assert database.run("SELECT count(*) FROM words WHERE words MATCH 'secret'") == [(0,)]
        database.close()


@pytest.mark.parametrize("damaged", [b"", b"abc", b"\0" * 4, b"\0" * 400, b"\xff\xff\xff\x7f" * 100, "no vector"])
async def test_a_damaged_vector_is_ignored_and_replaced_by_reembedding(path: Path, damaged: bytes | str) -> None:
    async with HybridStore(SqliteBackend(path), Numbers()) as store:
        await remember(store, "1 damaged", "2 whole")
        database = Database(path, 1)
        database.run("UPDATE vectors SET embedding = ? WHERE number = 1", damaged)
        database.close()
        assert [found.memory.text for found in await store.search("2")] == ["2 whole"]
        assert [found.vector_rank for found in await store.search("damaged")] == [None]
        await remember(store, "1 added")
        if len(damaged) != 400:  # of the right size: not recognised
            assert await store.lacks_vectors()
            assert [count async for count in store.reembed()] == [1]
            assert {found.memory.text for found in await store.search("1")} == {"1 damaged", "1 added"}


async def test_a_long_query_is_cut(path: Path) -> None:
    embedder = Numbers()
    async with HybridStore(SqliteBackend(path), embedder) as store:
        await remember(store, "1 of all")
        assert len(await store.search("1 " + "all of them " * 10_000)) == 1
    assert len(embedder.asked[-1]) == 32_768


async def test_a_vector_of_a_text_that_has_changed_is_not_stored(path: Path) -> None:
    known = EmbedderIdentity("numbers", 100)
    backend = SqliteBackend(path)
    async with HybridStore(backend) as store:
        await remember(store, "1 as it is now")
        [(number, text)] = await backend.without_vector(known, 0, 10)
        for wording, left in (("1 as it was", 1), (text, 0)):
            await backend.put_vectors(known, [(number, wording, [1.0] * 100)])
            assert len(await backend.without_vector(known, 0, 10)) == left


async def test_concurrent_creation_of_tables_succeeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled(path, 1)
    version = sqlite._version
    before = [0, 0]  # versions read before the lock: the other process has not committed

    def look(database: Database) -> int:
        return before.pop() if before else version(database)

    monkeypatch.setattr(sqlite, "_version", look)
    async with store_at(path) as second:
        assert await second.count() == 1
    assert not before


async def test_opening_waits_for_another_process_that_creates_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    empty(path)
    first = Database(path, 1)
    first.run("BEGIN IMMEDIATE")
    waits = threading.Event()

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            waits.set()
            time.sleep(seconds)

    monkeypatch.setattr(sqlite, "time", Clock)
    second = store_at(path)
    opening = asyncio.create_task(second.open())
    waiting = asyncio.create_task(asyncio.to_thread(waits.wait, 30))
    done, _ = await asyncio.wait([opening, waiting], return_when="FIRST_COMPLETED")
    assert done == {waiting}
    first.run("ROLLBACK")
    first.close()
    await opening
    await second.close()

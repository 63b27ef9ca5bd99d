"""Artifact stores in a folder and through fsspec: every save is complete or leaves nothing."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import fsspec  # type: ignore[import-untyped]
import pytest
from perdure.queues.errors import ConfigurationError
from perdure.worker.artifacts import local
from perdure.worker.artifacts.links import orphans
from perdure.worker.artifacts.store import ArtifactStore, check_artifact_name, open_store
from perdure.worker.errors import (
    ArtifactDamaged,
    ArtifactError,
    ArtifactMissing,
    ArtifactTooLarge,
    BadArtifactName,
    StoreUnavailable,
)

LIMIT = 100_000_000
LONG_AGO = time.time() - 86_400.0


class Place:
    """Store under test, with access to its files."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url, "perdure-1", limit=LIMIT)
        self.files, root = fsspec.url_to_fs(url)
        self.root = f"{root}/perdure-1"

    def names(self) -> list[str]:
        found = [name.removeprefix(self.root).lstrip("/") for name in self.files.find(self.root)]
        return sorted(name for name in found if name != "lock")

    def path(self, digest: str) -> str:
        return f"{self.root}/{digest[:2]}/{digest[2:]}"

    def replace(self, digest: str, data: bytes) -> None:
        self.files.rm_file(self.path(digest))
        self.files.pipe_file(self.path(digest), data)

    def age(self, digest: str) -> None:
        """Make an object old."""
        if self.files.protocol == "memory":
            file = self.files.store[self.path(digest)]
            file.modified = file.modified.fromtimestamp(LONG_AGO, file.modified.tzinfo)
        else:
            os.utime(self.path(digest), (LONG_AGO, LONG_AGO))


@pytest.fixture(params=["folder", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "memory":
        yield Place(f"memory://{tmp_path.name}")
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    else:
        yield Place(f"file://{tmp_path}/kept" if request.param == "file" else f"{tmp_path}/kept")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def stream(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def found_orphans(store: ArtifactStore, *linked: str, **options: Any) -> list[str]:
    async def links() -> AsyncIterator[str]:
        for one in linked:
            yield one

    return [orphan.hash async for orphan in orphans(store, links, grace=3600.0, **options)]


async def test_saved_bytes_are_read_back_by_their_hash(place: Place, tmp_path: Path) -> None:
    stored = await place.store.save("a", b"bytes")
    await place.store.fetch("a", stored.hash, stored.size, tmp_path / "fetched")
    assert (stored.hash, stored.size) == (sha(b"bytes"), 5)
    assert place.names() == [f"{stored.hash[:2]}/{stored.hash[2:]}"]
    assert await place.store.read("a", stored.hash, stored.size) == b"bytes"
    assert (tmp_path / "fetched").read_bytes() == b"bytes"


async def test_the_same_bytes_are_stored_once_and_count_as_new(place: Place) -> None:
    stored = await place.store.save("a", b"bytes")
    place.age(stored.hash)
    assert await found_orphans(place.store) == [stored.hash]
    await place.store.save("b", b"bytes")
    assert len(place.names()) == 1
    assert await found_orphans(place.store) == []


async def test_the_age_is_checked_again_before_a_deletion(place: Place) -> None:
    stored = await place.store.save("a", b"bytes")
    place.age(stored.hash)
    assert await found_orphans(place.store) == [stored.hash]
    await place.store.save("a", b"bytes")  # a run that is about to link the bytes
    assert not await place.store.remove(stored.hash, 3600.0)
    place.age(stored.hash)
    assert await place.store.remove(stored.hash, 3600.0)
    assert not await place.store.remove(stored.hash, 3600.0)
    assert place.names() == []


async def test_orphans_are_old_and_unlinked_in_every_batch(place: Place) -> None:
    stored = [(await place.store.save("a", b"%d" % number)).hash for number in range(7)]
    for digest in stored[:6]:
        place.age(digest)
    place.files.pipe_file(f"{place.root}/notes.txt", b"not ours")
    assert await found_orphans(place.store, stored[0], stored[3], batch=2) == sorted(
        [stored[1], stored[2], stored[4], stored[5]]
    )


async def test_a_store_that_was_never_used_has_nothing(place: Place) -> None:
    assert await found_orphans(place.store) == []
    assert await place.store.remove_stale_uploads(0.0) == 0


async def test_changed_bytes_are_reported_as_damaged(place: Place, tmp_path: Path) -> None:
    stored = await place.store.save("a", b"bytes")
    (tmp_path / "fetched").write_bytes(b"earlier")
    for other in (b"byteS", b"byte", b"bytes and more", b""):
        place.replace(stored.hash, other)
        with pytest.raises(ArtifactDamaged, match=rf"artifact 'r' of task t is damaged: object {stored.hash}"):
            await place.store.read("artifact 'r' of task t", stored.hash, stored.size)
        with pytest.raises(ArtifactDamaged):
            await place.store.fetch("a", stored.hash, stored.size, tmp_path / "fetched")
        assert place.files.cat_file(place.path(stored.hash)) == other
    assert (tmp_path / "fetched").read_bytes() == b"earlier"
    assert set(os.listdir(tmp_path)) <= {"fetched", "kept"}  # noqa: PTH208


async def test_a_truncated_object_is_reported_and_not_overwritten(place: Place) -> None:
    stored = await place.store.save("a", b"bytes")
    place.replace(stored.hash, b"byt")
    with pytest.raises(ArtifactDamaged, match="does not have the bytes that were saved"):
        await place.store.save("a", b"bytes")
    assert place.files.cat_file(place.path(stored.hash)) == b"byt"
    assert len(place.names()) == 1


async def test_missing_bytes_are_reported(place: Place) -> None:
    stored = await place.store.save("a", b"bytes")
    place.files.rm_file(place.path(stored.hash))
    with pytest.raises(ArtifactMissing, match=rf"a: its bytes \(SHA-256 {stored.hash}\) are not in"):
        await place.store.read("a", stored.hash, stored.size)


async def test_a_broken_stream_leaves_nothing(place: Place) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield b"some"
        assert len(place.names()) == 1  # under its temporary name
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        await place.store.save("a", breaks())
    assert place.names() == []


async def test_a_cancelled_save_leaves_nothing(place: Place) -> None:
    started = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"some"
        started.set()
        await anyio.sleep_forever()

    saving = asyncio.create_task(place.store.save("a", endless()))
    await started.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert place.names() == []


@pytest.mark.parametrize("ended", [True, False])
async def test_a_save_that_is_cancelled_while_it_opens_its_file_leaves_nothing(place: Place, ended: bool) -> None:
    """The thread that opens the file cannot be cancelled. ended: it has ended before the save ends."""
    backend: Any = place.store._backend
    upload, opened, cancelled = backend.upload, threading.Event(), threading.Event()
    uploads: list[Any] = []

    def slow() -> Any:
        if not ended:
            opened.set()
            cancelled.wait(10.0)
        uploads.append(upload())
        if ended:
            opened.set()
        return uploads[0]

    backend.upload = slow
    saving = asyncio.create_task(place.store.save("a", b"some"))
    while not opened.is_set():  # noqa: ASYNC110 - set by a thread
        await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    cancelled.set()
    with anyio.fail_after(10.0):
        in_memory = place.files.protocol == "memory"  # its files have no descriptor
        while not uploads or place.names() or not (in_memory or uploads[0]._file.closed):  # noqa: ASYNC110 - by a thread
            await asyncio.sleep(0.001)


async def test_the_upload_of_a_killed_process_is_collected(place: Place) -> None:
    upload: Any = place.store._backend.upload()
    upload.write(b"some")
    upload._file.close()
    assert await place.store.remove_stale_uploads(3600.0) == 0
    assert await place.store.remove_stale_uploads(-1.0) == 1
    assert place.names() == []


async def test_every_kind_of_source_stores_the_same_bytes(place: Place, tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    file = tmp_path / "data"
    file.write_bytes(data)
    async with await anyio.open_file(file, "rb") as opened:
        sources = [
            data,
            bytearray(data),
            memoryview(data),
            file,
            io.BytesIO(data),
            stream(data[:7], b"", data[7:]),
            opened,
        ]
        assert {(await place.store.save("a", source)).hash for source in sources} == {sha(data)}  # type: ignore[arg-type]
    assert (await place.store.save("a", "Größe")).hash == sha("Größe".encode())
    assert (await place.store.save("a", b"")).hash == sha(b"")


def pipe_in(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (lambda folder: folder / "missing", "could not read .*No such file"),
        (lambda folder: folder, "could not read .*it must be a regular file, and is a folder"),
        (pipe_in, "could not read .*it must be a regular file, and is a pipe"),
        (lambda folder: Path("/dev/zero"), "could not read .*it must be a regular file, and is a device"),
        (lambda folder: io.StringIO("text"), "must come as bytes, got str; open files with 'rb'"),
        (lambda folder: 17, "data must be bytes, .* got int"),
    ],
)
async def test_invalid_data_is_refused(
    place: Place, tmp_path: Path, source: Callable[[Path], Any], problem: str
) -> None:
    with pytest.raises(ArtifactError, match=f"artifact 'r' of task t.*{problem}"):
        await place.store.save("artifact 'r' of task t", source(tmp_path))
    assert place.names() == []


async def test_a_save_over_the_limit_is_refused_at_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), "perdure-1", limit=10)
    asked: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            asked.append(1)
            yield b"four"

    progress: list[int] = []
    with pytest.raises(ArtifactTooLarge, match="a has more than 10 bytes"):
        await store.save("a", pieces(), lambda: progress.append(1))
    assert (len(asked), len(progress)) == (3, 2)
    assert (await store.save("a", b"0123456789")).size == 10


async def test_memory_use_does_not_grow_with_the_size(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), "perdure-1", limit=LIMIT)
    piece = os.urandom(1 << 20)
    tracemalloc.start()
    try:
        stored = await store.save("a", stream(*[piece] * 48))
        async for _ in store.chunks("a", stored.hash, stored.size):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stored.size == 48 << 20
    assert peak < 8 << 20


async def test_a_local_object_is_a_read_only_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "kept"), "perdure-1", limit=LIMIT)
    stored = await store.save("a", b"bytes")
    path = await store.path("a", stored.hash, stored.size)
    before = path.stat()
    await store.save("a", b"bytes")
    assert path.stat().st_ino == before.st_ino
    assert before.st_mode & 0o777 == 0o400
    assert path.parent.stat().st_mode & 0o777 == (tmp_path / "kept" / "perdure-1").stat().st_mode & 0o777 == 0o700


async def test_only_a_local_store_has_paths() -> None:
    store = open_store("memory://paths", "perdure-1", limit=LIMIT)
    stored = await store.save("a", b"bytes")
    with pytest.raises(ArtifactError, match="not in a local folder but in memory://paths/perdure-1; copy it"):
        await store.path("a", stored.hash, stored.size)
    fsspec.filesystem("memory").store.clear()


async def test_saving_and_collecting_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either order, the saved object exists afterwards."""
    place = Place(str(tmp_path))
    stored = await place.store.save("a", b"bytes")
    place.age(stored.hash)
    unlink = Path.unlink
    saving: list[asyncio.Future[Any]] = []
    loop = asyncio.get_running_loop()

    def late(path: Path, missing_ok: bool = False) -> None:
        if path == Path(place.path(stored.hash)):  # checked, and not deleted yet
            saving.append(asyncio.run_coroutine_threadsafe(place.store.save("a", b"bytes"), loop))  # type: ignore[arg-type]
            time.sleep(0.1)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", late)
    assert await place.store.remove(stored.hash, 3600.0)
    await asyncio.wrap_future(saving[0])
    assert await place.store.read("a", stored.hash, stored.size) == b"bytes"


async def test_an_unusable_store_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store(str(tmp_path / "file"), "perdure-1", limit=LIMIT)
    with pytest.raises(StoreUnavailable, match=r"a cannot be written to the artifact store at .*file/perdure-1"):
        await store.save("a", b"bytes")
    full = Place(str(tmp_path / "kept"))

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local._LocalUpload, "write", no_room)
    with pytest.raises(StoreUnavailable, match=r"No space left on device; check that the store \(PERDURE_ARTIFACTS\)"):
        await full.store.save("a", b"bytes")
    assert full.names() == []


def test_an_invalid_place_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"could not open artifacts at nowhere://bucket \(PERDURE_ARTIFACTS\)"):
        open_store("nowhere://user:secret@bucket?key=secret", "perdure-1", limit=LIMIT)

    monkeypatch.setitem(sys.modules, "fsspec.core", None)  # as if it were not installed
    with pytest.raises(ConfigurationError, match=r"pip install 'perdure\[artifacts\]'"):
        open_store("s3://bucket", "perdure-1", limit=LIMIT)


@pytest.mark.parametrize("name", ["report.md", "Bericht über Größe", "a" * 200, "..."])
def test_valid_names_are_accepted(name: str) -> None:
    assert check_artifact_name(name) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "1 to 200 bytes"),
        ("ä" * 101, "1 to 200 bytes"),
        ("../etc/passwd", "must not contain any of .* got '/'"),
        ("a\\b", "must not contain any of"),
        ("report#2", "must not contain any of .* got '#'"),
        ("..", "must not be that of a folder"),
        (" a", "nor begin or end with white space"),
        ("a\nb", "control character"),
        ("a\x1b[31m", "control character"),
        ("a\u202eb", "control character"),
        ("a\ud800", "control character"),
        (b"a", "must be text, got bytes"),
    ],
)
def test_invalid_names_are_refused_with_the_rule(name: Any, problem: str) -> None:
    with pytest.raises(BadArtifactName, match=problem):
        check_artifact_name(name)


SECRET = b"another user's file"


NO_HASHES = ["../../../secret", "", "ab", "g" * 64, "A" * 64, "a" * 63, "a" * 64 + "\n", "../" + "a" * 61]


@pytest.mark.parametrize("digest", NO_HASHES)
async def test_only_a_hash_names_an_object(place: Place, tmp_path: Path, digest: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    await place.store.save("a", b"bytes")
    with pytest.raises(ArtifactError, match="its hash must be a SHA-256 in hexadecimal") as raised:
        await place.store.read("a", digest, len(SECRET))
    assert not isinstance(raised.value, StoreUnavailable), "a run would wait for the store"
    assert sha(SECRET) not in str(raised.value)


def plant(file: Path, kind: str, elsewhere: Path) -> None:
    """Put something else in the place of an object."""
    file.unlink()
    match kind:
        case "link":
            file.symlink_to(elsewhere / "secret")
        case "device":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "folder link":
            (elsewhere / file.name).write_bytes(b"bytes")
            file.parent.rmdir()
            file.parent.symlink_to(elsewhere)


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder", "folder link"])
@pytest.mark.timeout(30)
async def test_only_regular_files_are_objects(tmp_path: Path, kind: str) -> None:
    place = Place(f"{tmp_path}/kept")
    stored = await place.store.save("a", b"bytes")
    (tmp_path / "secret").write_bytes(SECRET)
    plant(Path(place.path(stored.hash)), kind, tmp_path)
    seen = set()
    for size in (5, len(SECRET), 300_000_000):
        with pytest.raises(ArtifactDamaged, match="does not have the bytes that were saved") as raised:
            await place.store.read("a", stored.hash, size)
        seen.add(str(raised.value))
        with pytest.raises(ArtifactDamaged):
            await place.store.fetch("a", stored.hash, size, tmp_path / "fetched")
        with pytest.raises(ArtifactDamaged):
            await place.store.path("a", stored.hash, size)
    assert len(seen) == 1, "the message tells nothing of what was found"
    assert not (tmp_path / "fetched").exists()
    if kind != "folder link":
        assert [found.hash async for found in place.store.objects()] == []


async def test_no_byte_is_yielded_before_all_are_verified(place: Place) -> None:
    data = b"x" * 5_000_000
    stored = await place.store.save("a", data)
    place.replace(stored.hash, data[:-1] + b"y")
    seen = []
    with pytest.raises(ArtifactDamaged):
        async for chunk in place.store.chunks("a", stored.hash, stored.size):
            seen.append(chunk)  # noqa: PERF401 - it raises
    assert seen == []
    place.replace(stored.hash, data)
    assert b"".join([chunk async for chunk in place.store.chunks("a", stored.hash, stored.size)]) == data

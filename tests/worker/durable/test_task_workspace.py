"""Workspaces: files are saved with the steps, and a resumed run finds those of its last recorded step."""

from __future__ import annotations

import hashlib
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, TaskFailed
from perdure.worker.agents.journal.forks import fork
from perdure.worker.artifacts.backend import INCOMING, Upload
from perdure.worker.artifacts.links import orphans
from perdure.worker.artifacts.local import LocalBackend
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.errors import WorkspaceError
from perdure.worker.workspace.manifest import Manifest, SavedFile, encode_manifest
from perdure.worker.workspace.scan import FolderScan, Scanner
from perdure.worker.workspace.shared_workspace import SharedWorkspace
from perdure.worker.workspace.task_workspace import workspace_hashes

from tests.support.workers import bounded, history, work_off

pytestmark = pytest.mark.integration


class Crash(Exception):
    """Ends an attempt as a crash would: the next run starts from the checkpoint."""


@pytest.fixture
def app(settings: Settings, tmp_path: Path) -> App:
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / "running")}
    return App("test", settings=settings.model_copy(update=places))


def found(folder: Path) -> dict[str, str]:
    """Return the files below a folder and their contents."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def running(tmp_path: Path) -> list[str]:
    """Return the folders of runs that are left."""
    return [path.name for path in (tmp_path / "running").glob("*/*") if path.is_dir()]


async def test_a_resumed_run_finds_the_files_of_its_last_recorded_step(app: App, tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []
    folders: list[Path] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def build(ctx: Context) -> dict[str, str]:
        folder = ctx.workspace.path
        folders.append(folder)
        seen.append(found(folder))

        def write() -> None:
            (folder / "src").mkdir(exist_ok=True)
            (folder / "src" / "a.txt").write_text("one")
            (folder / "run.sh").write_text("true")
            (folder / "run.sh").chmod(0o755)
            (folder / "old.txt").write_text("old")

        def change() -> None:
            (folder / "src" / "a.txt").write_text("two")
            (folder / "old.txt").unlink()

        await ctx.step("write", write)
        await ctx.step("change", change)
        (folder / "half.txt").write_text("not recorded")
        if ctx.attempt == 1:
            raise Crash
        assert (folder / "run.sh").stat().st_mode & 0o777 == 0o755
        (folder / "half.txt").unlink()
        return found(folder)

    async with app:
        handle = await build.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == {"src/a.txt": "two", "run.sh": "true"}
        events = [event.data for event in await history(handle) if event.type == "workspace_saved"]
    assert seen == [{}, {"src/a.txt": "two", "run.sh": "true"}]
    assert folders[0] == folders[1], "its path may be in files, such as the scripts of a virtual environment"
    assert not running(tmp_path), "the folders are removed when the runs end"
    first, second = events
    assert (first["changed"], first["files"]) == (["old.txt", "run.sh", "src/a.txt"], 3)
    assert (second["changed"], second["removed"], second["files"]) == (["src/a.txt"], ["old.txt"], 2)


async def test_a_step_that_changes_no_file_stores_nothing(app: App) -> None:
    @app.task
    async def idle(ctx: Context) -> None:
        (ctx.workspace.path / "a.txt").write_text("a")
        await ctx.step("first", lambda: None)
        await ctx.step("second", lambda: None)

    async with app:
        handle = await idle.enqueue()
        await work_off(app)
        await bounded(handle.result())
        assert [event.type for event in await history(handle)].count("workspace_saved") == 1


async def test_a_change_within_one_tick_of_the_clock_is_saved(app: App) -> None:
    """Two versions of equal size, written so soon after each other that the file system gives them one time."""

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def twice(ctx: Context) -> str:
        file = ctx.workspace.path / "a.txt"
        if ctx.attempt == 2:
            return file.read_text()
        file.write_text("one")
        same = file.stat()
        await ctx.step("first", lambda: None)
        file.write_text("two")
        os.utime(file, ns=(same.st_atime_ns, same.st_mtime_ns))
        await ctx.step("second", lambda: None)
        raise Crash

    async with app:
        handle = await twice.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "two"


async def test_the_files_of_parallel_steps_are_all_saved(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def fan(ctx: Context) -> list[str]:
        folder = ctx.workspace.path
        if ctx.attempt == 2:
            return sorted(found(folder))

        def write(number: int) -> None:
            (folder / f"{number}.txt").write_text(str(number))

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(ctx.step, f"write-{number}", write, number)
        raise Crash

    async with app:
        handle = await fan.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == sorted(f"{number}.txt" for number in range(12))


async def test_an_agent_resumes_with_its_files(app: App) -> None:
    class Writer(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("a", "b")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> list[str]:
            before = sorted(found(ctx.workspace.path))
            (ctx.workspace.path / f"{step.key}.txt").write_text(step.key)
            if step.key == "b" and ctx.attempt == 1:
                raise Crash
            return before

        async def finish(self, ctx: Context, state: AgentState) -> dict[str, Any]:
            return {"found": state.results["b"], "files": sorted(found(ctx.workspace.path))}

    writer = app.agent(Writer, retry=Retry(max_attempts=2, base=0.0))
    async with app:
        handle = await writer.enqueue("write files")
        await work_off(app)
        assert await bounded(handle.result()) == {"found": ["a.txt"], "files": ["a.txt", "b.txt"]}


def tree(folder: Path) -> dict[bytes, object]:
    """Return what is below a folder: the target of a link, or the mode of a folder or file and its bytes."""
    shown = dict[bytes, object]()
    for root, folders, files in os.walk(os.fsencode(folder)):
        for name in folders + files:
            path = os.path.join(root, name)  # noqa: PTH118 - names of any bytes
            key = os.path.relpath(path, os.fsencode(folder))
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                shown[key] = os.readlink(path).replace(os.fsencode(folder), b"FOLDER")  # noqa: PTH115
            else:
                data = b"" if stat.S_ISDIR(mode) else Path(os.fsdecode(path)).read_bytes()
                shown[key] = (oct(mode & 0o7777), data)
    return shown


def fill(folder: Path, outside: Path) -> None:
    for path, mode in {"a.txt": 0o644, "run.sh": 0o755, "key": 0o600, "read-only": 0o444, "group": 0o660}.items():
        (folder / path).write_text(path)
        (folder / path).chmod(mode)
    for path, mode in {"empty/deep": 0o755, "private": 0o700, "sealed": 0o555}.items():
        (folder / path).mkdir(parents=True)
        (folder / path).chmod(mode)
    (folder / "private" / "key").write_text("key")
    (folder / "sealed").chmod(0o755)
    (folder / "sealed" / "b.txt").write_text("b")
    (folder / "sealed").chmod(0o555)
    (folder / "only-ignored" / "__pycache__").mkdir(parents=True)
    for name in (b"new\nline", b"foo\x80", b"\x1b[31m"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("odd")
    for path, target in {
        "link.txt": "a.txt",
        "empty/up": "../private",
        "here": str(folder / "run.sh"),
        "self": str(folder),
        "outside": str(outside),
        "outside.txt": str(outside / "secret.txt"),
        "escape": "../../secret.txt",
        "missing": "none",
    }.items():
        (folder / path).symlink_to(target)


async def test_a_resumed_run_finds_links_modes_empty_folders_and_any_names(app: App, tmp_path: Path) -> None:
    """Links that lead out of the folder are restored as they are, and neither read nor written through."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    seen: list[dict[bytes, object]] = []

    @app.task(retry=Retry(max_attempts=3, base=0.0))
    async def mixed(ctx: Context) -> None:
        folder = ctx.workspace.path
        if ctx.attempt == 1:
            await ctx.step("fill", fill, folder, outside)
            (folder / "only-ignored" / "__pycache__").rmdir()
        seen.append(tree(folder))
        if ctx.attempt < 3:
            raise Crash

    async with app:
        handle = await mixed.enqueue()
        await work_off(app)
        await bounded(handle.result())
        (event,) = [event.data for event in await history(handle) if event.type == "workspace_saved"]
        store = await artifact_store(app.producer.gateway, app.settings)
        hashes = {digest async for digest in workspace_hashes(app.producer.gateway, app.producer.namespace, store)}
    assert len(seen[0]) > 20
    assert seen == [seen[0]] * 3
    assert {"foo\\x80", "new\\x0aline", "outside", "empty/deep/", "private/"} <= {*event["changed"]}
    assert hashlib.sha256(b"secret").hexdigest() not in hashes
    assert tree(outside) == {b"secret.txt": ("0o644", b"secret")}
    assert not running(tmp_path), "also folders that their owner may not write to are removed"


async def test_a_folder_that_becomes_empty_and_a_link_that_changes_are_saved(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def change(ctx: Context) -> dict[str, object]:
        folder = ctx.workspace.path
        if ctx.attempt == 2:
            return {os.fsdecode(path): str(found) for path, found in tree(folder).items()}
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1")
        (folder / "link").symlink_to("one")
        await ctx.step("first", lambda: None)
        (folder / "refs" / "main").unlink()
        await ctx.step("second", lambda: None)
        (folder / "link").unlink()
        (folder / "link").symlink_to("two")
        await ctx.step("third", lambda: None)
        raise Crash

    async with app:
        handle = await change.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == {"refs": "('0o755', b'')", "link": "b'two'"}


async def test_ignored_files_are_not_saved(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def mixed(ctx: Context) -> list[str]:
        folder = ctx.workspace.path
        if ctx.attempt == 2:
            return sorted(found(folder))
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "a.pyc").write_text("code")
        (folder / ".perdureignore").write_text("# own\n*.log\nbuild/out\n")
        (folder / "x.log").write_text("log")
        (folder / "build").mkdir()
        (folder / "build" / "out").write_text("made")
        (folder / "build" / "kept").write_text("kept")
        await ctx.step("first", lambda: None)
        raise Crash

    async with app:
        handle = await mixed.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == [".perdureignore", "build/kept"]


async def test_the_collector_keeps_the_files_of_workspaces(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def build(ctx: Context) -> None:
        file = ctx.workspace.path / "a.txt"
        file.write_text("first version")
        await ctx.step("first", lambda: None)
        file.write_text("second version, which replaces it")
        await ctx.step("second", lambda: None)
        raise Crash

    async with app:
        await build.enqueue()
        await work_off(app)
        gateway, namespace = app.producer.gateway, app.producer.namespace
        store = await artifact_store(gateway, app.settings)
        unlinked = await store.save("x", b"bytes of nothing")
        linked = {digest async for digest in workspace_hashes(gateway, namespace, store)}
        left = {
            orphan.hash
            async for orphan in orphans(store, lambda: workspace_hashes(gateway, namespace, store), grace=-1.0)
        }
        everything = {found.hash async for found in store.objects()}
    assert len(linked) == 4, "two manifests, each with its file: a fork may start from the first"
    assert left == everything - linked == {unlinked.hash}


async def test_a_file_is_not_left_out_when_the_store_fails(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store whose own file is missing is not a file of the workspace that was removed."""
    keep = LocalBackend.upload
    failed: list[bool] = []

    def upload(self: LocalBackend) -> Upload:
        made = keep(self)
        if not failed:
            failed.append(True)
            for path in (self._root / INCOMING).iterdir():
                path.unlink()
        return made

    monkeypatch.setattr(LocalBackend, "upload", upload)
    contents: list[dict[str, str]] = []

    @app.task(retry=Retry(max_attempts=3, base=0.0))
    async def write(ctx: Context) -> None:
        folder = ctx.workspace.path
        await ctx.step("write", lambda: (folder / "a.txt").write_text("a"))
        contents.append(found(folder))
        if len(contents) == 1:
            raise Crash

    async with app:
        handle = await write.enqueue()
        await work_off(app)
        await bounded(handle.result())
    assert contents == [{"a.txt": "a"}, {"a.txt": "a"}]


async def test_a_file_that_comes_back_is_saved_again(app: App, tmp_path: Path) -> None:
    """While a file was away, the collector may have removed its bytes."""

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def build(ctx: Context) -> str:
        folder = ctx.workspace.path
        if ctx.attempt == 2:
            return (folder / "out" / "a.txt").read_text()
        (folder / "out").mkdir()
        (folder / "out" / "a.txt").write_text("a")
        await anyio.sleep(0.15)  # until its times tell a later change
        await ctx.step("first", lambda: None)
        (folder / "out").rename(tmp_path / "away")
        await ctx.step("second", lambda: None)
        store = await artifact_store(app.producer.gateway, app.settings)
        links = partial(workspace_hashes, app.producer.gateway, app.producer.namespace, store)
        for one in [orphan async for orphan in orphans(store, links, grace=-1)]:
            assert await store.remove(one.hash, -1)
        (tmp_path / "away").rename(folder / "out")
        await ctx.step("third", lambda: None)
        raise Crash

    async with app:
        handle = await build.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "a"


async def test_a_fork_has_the_files_of_its_recorded_steps(app: App) -> None:
    @app.task
    async def build(ctx: Context) -> str:
        folder = ctx.workspace.path
        await ctx.step("write", lambda: (folder / "a.txt").write_text("a"))
        await ctx.step("look", lambda: None)
        return "a.txt" if (folder / "a.txt").exists() else "no file"

    async with app:
        handle = await build.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == "a.txt"
        whole, later, before = [await fork(app.producer, handle.id, at=at) for at in (None, "write", 0)]
        assert (whole.steps, later.steps, before.steps) == (2, 1, 0)
        await work_off(app)
        for forked in (whole, later, before):
            assert await bounded(forked.handle.result()) == "a.txt"


async def test_a_fork_has_the_files_of_the_step_that_it_starts_after(app: App) -> None:
    """Also if later ones were saved, the collector ran, or the fork is one of a fork."""

    @app.task
    async def build(ctx: Context) -> list[str]:
        folder = ctx.workspace.path
        first = sorted(path.name for path in folder.iterdir())
        for name in ("a", "b", "c"):
            await ctx.step(name, (folder / name).write_text, "bytes of " + name)
        await ctx.step("remove", (folder / "b").unlink)
        return first

    async with app:
        handle = await build.enqueue()
        await work_off(app)
        gateway, namespace = app.producer.gateway, app.producer.namespace
        store = await artifact_store(gateway, app.settings)
        async for orphan in orphans(store, lambda: workspace_hashes(gateway, namespace, store), grace=-1.0):
            await store.remove(orphan.hash, -1.0)

        async def first_files(source: str, at: int | str | None) -> tuple[str, list[str]]:
            forked = (await fork(app.producer, source, at=at)).handle
            await work_off(app)
            return forked.id, await bounded(forked.result())

        assert (await first_files(handle.id, "c"))[1] == ["a", "b", "c"]
        assert (await first_files(handle.id, 0))[1] == []
        second, files = await first_files(handle.id, "b")
        assert files == ["a", "b"]
        assert (await first_files(second, 0))[1] == ["a", "b"]
        assert (await first_files(second, "c"))[1] == ["a", "b", "c"]


async def test_a_step_that_runs_again_repeats_no_write_to_a_shared_workspace(app: App) -> None:
    shown: list[bytes] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def build(ctx: Context) -> None:
        async def write() -> None:
            files = ctx.shared_workspace("team")
            for text in ("x", "y", "x"):
                await files.write("a.txt", text)
            shown.append(await files.read("a.txt"))
            if len(shown) == 1:
                await app.shared_workspace("team").write("a.txt", "newer")
                raise Crash

        await ctx.step("write", write)

    async with app:
        handle = await build.enqueue()
        await work_off(app)
        await bounded(handle.result())
    assert shown == [b"x", b"newer"]


def rows(number: int, size: int) -> bytes:
    """Return a manifest of so many files of this size."""
    return encode_manifest(Manifest({f"f{at}": SavedFile("0" * 64, size) for at in range(number)}))


@pytest.mark.parametrize(
    ("manifest", "link", "problem"),
    [
        pytest.param(rows(101, 1), {}, "more than 100 files", id="files"),
        pytest.param(rows(3, 500_000), {}, "more than 1,000,000 bytes", id="bytes"),
        pytest.param(rows(1, 10**15), {}, "more than 600,000; list it", id="file"),
        pytest.param(rows(1, 1), {"size": 10**15}, "its manifest has 1,000,000,000,000,000 bytes", id="manifest"),
        pytest.param(rows(1, 1), {"size": 5}, "does not have the bytes that were saved", id="size"),
        pytest.param(rows(1, 1), {"size": -5}, "size: Input should be greater", id="no size"),
        pytest.param(rows(1, 1), {"hash": "../" * 10 + "etc/passwd"}, "hash: String should match", id="hash"),
        pytest.param(b'{"v":1,"files":[["a","0",1,420]]}', {}, "file 'a' has no hash or no size", id="file's hash"),
    ],
)
async def test_a_restore_keeps_to_the_limits_of_a_save(
    settings: Settings, tmp_path: Path, manifest: bytes, link: dict[str, Any], problem: str
) -> None:
    limits = {"workspace_files": 100, "workspace_limit": 1_000_000, "artifact_limit": 600_000}
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / "running")}
    app = App("test", settings=settings.model_copy(update=places | limits))

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def planted(ctx: Context) -> None:
        assert ctx.attempt == 1
        (ctx.workspace.path / "a.txt").write_text("a")
        await ctx.step("first", lambda: None)
        store = await artifact_store(app.producer.gateway, app.settings)
        stored = await store.save("a manifest", manifest)
        data = {"hash": stored.hash, "size": stored.size} | link
        steps = app.producer.namespace.partition("test").steps(ctx.task_id)
        await app.producer.gateway.command("HSET", steps, "s:#workspace", orjson.dumps(data))
        raise Crash

    async with app:
        handle = await planted.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed, match=problem):
            await bounded(handle.result())


async def test_the_folder_that_a_mark_names_is_one_of_a_run(app: App, tmp_path: Path) -> None:
    """A checkpoint that another program changed must not let a run adopt, save and then remove a folder."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "a.txt").write_text("a")
    mark = {"folder": "../../victim", "host": "h", "step": "first", "why": "?"}

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def planted(ctx: Context) -> None:
        assert ctx.attempt == 1
        (ctx.workspace.path / "a.txt").write_text("a")
        await ctx.step("first", lambda: None)
        steps = app.producer.namespace.partition("test").steps(ctx.task_id)
        await app.producer.gateway.command("HSET", steps, "s:#unsaved", orjson.dumps(mark))
        raise Crash

    async with app:
        handle = await planted.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed, match="is not the name of its folder"):
            await bounded(handle.result())
    assert (victim / "a.txt").read_text() == "a"


async def test_a_file_that_becomes_a_link_after_the_scan_is_not_saved(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    scan = Scanner.scan

    def scanned(self: Scanner) -> FolderScan:
        found = scan(self)
        for folder in (tmp_path / "running").glob("*/*"):
            if (folder / "a.txt").is_file():
                (folder / "a.txt").unlink()
                (folder / "a.txt").symlink_to(secret)
                (folder / "below").rename(folder / "moved")
                (folder / "below").symlink_to(tmp_path)
        return found

    monkeypatch.setattr(Scanner, "scan", scanned)

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def raced(ctx: Context) -> list[str]:
        if ctx.attempt == 2:
            return sorted(found(ctx.workspace.path))
        folder = ctx.workspace.path
        (folder / "below").mkdir()
        for path in ("a.txt", "b.txt", "below/secret.txt"):
            (folder / path).write_text(path)
        await ctx.step("first", lambda: None)
        raise Crash

    async with app:
        handle = await raced.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["b.txt"]
    assert not any(file.read_bytes() == b"secret" for file in (tmp_path / "store").glob("*/??/*"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["device", "pipe"])
async def test_a_hostile_ignore_file_ends_the_task_with_its_reason(app: App, kind: str) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def hostile(ctx: Context) -> None:
        ignore = ctx.workspace.path / ".perdureignore"
        if kind == "device":
            ignore.symlink_to("/dev/zero")
        else:
            os.mkfifo(ignore)
        await ctx.step("first", lambda: None)

    async with app:
        handle = await hostile.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed, match=r"could not read \.perdureignore: it must be a regular file"):
            await bounded(handle.result())


@pytest.mark.parametrize("change", [{"hash": "../" * 10 + "etc/hostname"}, {"hash": 5}, {"size": -1}, {"size": "x"}])
async def test_a_damaged_file_of_a_shared_workspace_hides_no_other(app: App, change: dict[str, Any]) -> None:
    async with app:
        shared = SharedWorkspace(app.producer.gateway, app.settings, "team")
        await shared.write("good.txt", "good")
        await shared.write("bad.txt", "bad")
        key = app.producer.namespace.workspace("team")
        version, by, data = (await app.producer.gateway.command("HGET", key, "f:bad.txt")).split(b" ", 2)
        damaged = b"%b %b %b" % (version, by, orjson.dumps(orjson.loads(data) | change))
        await app.producer.gateway.command("HSET", key, "f:bad.txt", damaged, "f:\xff", damaged, "f:../x", damaged)
        assert [file.path for file in await shared.list()] == ["good.txt"]
        assert await shared.read("good.txt") == b"good"
        with pytest.raises(WorkspaceError, match=r"could not read file 'bad\.txt' of shared workspace 'team'"):
            await shared.read("bad.txt")

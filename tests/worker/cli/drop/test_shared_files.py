"""`DIR/shared/NAME/`: the files of a shared workspace, both ways, by `perdure drop`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Settings
from perdure.queues import Unavailable
from perdure.worker.cli.drop.folder import FileOutcome, Rest
from perdure.worker.cli.drop.intake import DropFolder
from perdure.worker.cli.drop.shared import STATE
from perdure.worker.workspace.shared_workspace import SharedWorkspace

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


class Shared:
    """A shared workspace, its folder, and what was said and reported."""

    def __init__(self, root: Path, app: App, settings: Settings) -> None:
        self.root, self.app, self.settings = root, app, settings
        self.place = root / "shared" / "site"
        self.place.mkdir(parents=True)
        self.files = self.workspace("site")
        self.notes: list[str] = []
        self.reports: list[FileOutcome] = []
        self.folder = self.started()

    def workspace(self, name: str) -> SharedWorkspace:
        return SharedWorkspace(self.app.producer.gateway, self.settings, name, by="test")

    def started(self) -> DropFolder:
        """Return what a new command has."""
        report = self.reports.append
        return DropFolder(
            self.root, self.app.producer, self.notes.append, report, lambda: False, self.workspace, Rest(0)
        )

    async def look(self) -> list[tuple[str, str]]:
        """Look once; return outcomes and names of the files that were copied."""
        del self.reports[:]
        await self.folder.look()
        return [(one.data["outcome"], one.data["file"].removeprefix("shared/site/")) for one in self.reports]

    async def there(self) -> dict[str, str]:
        """Return the content of the workspace."""
        return {file.path: (await self.files.read(file)).decode() for file in await self.files.list()}

    def here(self) -> dict[str, str]:
        """Return the content of the folder, without the hidden file of the command."""
        files = [path for path in self.place.rglob("*") if path.is_file() and path.name != STATE]
        return {str(path.relative_to(self.place)): path.read_text() for path in files}


@pytest.fixture
async def shared(app: App, settings: Settings, tmp_path: Path) -> Shared:
    """An empty shared workspace, and its folder."""
    settings = settings.model_copy(update={"artifacts": str(tmp_path / "store"), "artifact_limit": 1000})
    (tmp_path / "store").mkdir()
    (tmp_path / "drop").mkdir()
    return Shared(tmp_path / "drop", app, settings)


async def test_files_are_copied_both_ways(shared: Shared) -> None:
    (shared.place / "notes").mkdir()
    (shared.place / "notes" / "a.md").write_text("from here")
    await shared.files.write("pages/b.md", "from there")
    assert await shared.look() == [("written", "notes/a.md"), ("copied", "pages/b.md")]
    assert await shared.there() == shared.here() == {"notes/a.md": "from here", "pages/b.md": "from there"}
    assert await shared.look() == []
    (shared.place / "notes" / "a.md").write_text("changed here")
    await shared.files.write("pages/b.md", "changed there")
    assert await shared.look() == [("written", "notes/a.md"), ("copied", "pages/b.md")]
    assert await shared.there() == shared.here() == {"notes/a.md": "changed here", "pages/b.md": "changed there"}
    (shared.place / "notes" / "a.md").unlink()
    await shared.files.remove("pages/b.md")
    assert await shared.look() == [("removed_there", "notes/a.md"), ("removed_here", "pages/b.md")]
    assert await shared.there() == shared.here() == {}
    assert await shared.look() == []
    assert shared.notes == []


async def test_a_conflict_keeps_both(shared: Shared) -> None:
    for number in range(2):
        (shared.place / "a.md").write_text(f"here {number}")
        await shared.files.write("a.md", f"there {number}")
        assert await shared.look() == [("conflict", "a.md"), ("copied", "a.md")]
    assert await shared.there() == {"a.md": "there 1"}
    kept = shared.here()
    assert kept.pop("a.md") == "there 1"
    assert kept.pop("a.md.conflict") == "here 0"
    assert list(kept.values()) == ["here 1"]
    assert await shared.look() == []


@pytest.mark.parametrize("new", [False, True])
async def test_a_change_while_a_file_is_copied_is_a_conflict(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    """Another program writes the file while that of the workspace is being read."""
    if not new:
        (shared.place / "a.md").write_text("first")
        await shared.look()
    await shared.files.write("a.md", "there")
    read = SharedWorkspace.read

    async def slow(files: SharedWorkspace, path: Any) -> bytes:
        (shared.place / "a.md").write_text("written meanwhile")
        return await read(files, path)

    monkeypatch.setattr(SharedWorkspace, "read", slow)
    assert await shared.look() == []
    monkeypatch.undo()
    assert shared.here() == {"a.md": "written meanwhile"}
    assert shared.folder.rest.restless == 1
    assert await shared.look() == [("conflict", "a.md"), ("copied", "a.md")]
    assert shared.here() == {"a.md": "there", "a.md.conflict": "written meanwhile"}


async def test_a_write_of_another_agent_while_a_file_is_written_is_a_conflict(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared.place / "a.md").write_text("here")
    write, other = SharedWorkspace.write, shared.workspace("site")

    async def late(files: SharedWorkspace, path: str, data: Any, *, expected: int | None = None) -> Any:
        await write(other, path, "there")
        return await write(files, path, data, expected=expected)

    monkeypatch.setattr(SharedWorkspace, "write", late)
    assert await shared.look() == []
    monkeypatch.undo()
    assert await shared.look() == [("conflict", "a.md"), ("copied", "a.md")]
    assert shared.here() == {"a.md": "there", "a.md.conflict": "here"}


async def test_a_change_wins_over_a_removal(shared: Shared) -> None:
    for name in ("a.md", "b.md"):
        await shared.files.write(name, "first")
    await shared.look()
    (shared.place / "a.md").write_text("changed here")
    await shared.files.remove("a.md")
    (shared.place / "b.md").unlink()
    await shared.files.write("b.md", "changed there")
    assert await shared.look() == [("written", "a.md"), ("copied", "b.md")]
    assert await shared.there() == shared.here() == {"a.md": "changed here", "b.md": "changed there"}


async def test_equal_files_are_no_conflict(shared: Shared) -> None:
    (shared.place / "a.md").write_text("the same")
    await shared.files.write("a.md", "the same")
    assert await shared.look() == []
    (shared.place / "a.md").write_text("changed")
    assert await shared.look() == [("written", "a.md")]


async def test_nothing_is_removed_if_the_folder_or_the_workspace_is_gone(shared: Shared) -> None:
    (shared.place / "a.md").write_text("kept")
    await shared.look()
    (shared.place / STATE).unlink()  # as if the folder were removed, and made again
    (shared.place / "a.md").unlink()
    assert await shared.look() == [("copied", "a.md")]
    namespace = shared.app.producer.namespace
    for expired in (namespace.workspace("site"), namespace.workspaces):
        await shared.app.producer.gateway.command("DEL", expired)
    await shared.files.write("b.md", "of the new workspace")
    assert await shared.look() == [("written", "a.md"), ("copied", "b.md")]
    assert await shared.there() == shared.here() == {"a.md": "kept", "b.md": "of the new workspace"}


async def test_files_of_no_concern_are_left(shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "outside").mkdir()
    for name in (".hidden", "a.tmp", "a.part"):
        (shared.place / name).write_text("x")
    (shared.place / "link.md").symlink_to(tmp_path / "secret")
    (shared.place / "folder").symlink_to(tmp_path / "outside")
    os.mkfifo(shared.place / "pipe")
    await shared.files.write(".git/config", "x")
    await shared.files.write("folder/x.md", "x")
    for _ in range(2):
        assert await shared.look() == []
    assert list((tmp_path / "outside").iterdir()) == []
    assert sorted(await shared.there()) == [".git/config", "folder/x.md"]
    assert sorted(note.partition(": ")[0] for note in shared.notes) == [
        "shared/site/.git/config",
        "shared/site/folder",
        "shared/site/folder/x.md",
        "shared/site/link.md",
        "shared/site/pipe",
    ]


async def test_a_file_that_is_too_large_waits(shared: Shared) -> None:
    (shared.place / "a.md").write_text("x" * 2000)
    (shared.place / "b.md").write_text("b")
    assert await shared.look() == [("written", "b.md")]
    assert shared.folder.waiting == 1
    assert "shared/site/a.md: it is not copied" in shared.notes[0]


async def test_a_folder_that_names_no_workspace_is_left(shared: Shared) -> None:
    (shared.root / "shared" / "a b").mkdir()
    assert await shared.look() == []
    assert shared.notes[0].startswith("shared/a b: it is not copied: workspace must")


@pytest.mark.parametrize("point", range(6))
async def test_a_command_that_dies_loses_no_file(shared: Shared, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
    """The process dies at each change of the folder; the next command ends with the same files on both sides."""
    for name in ("a.md", "b.md", "c.md"):
        await shared.files.write(name, "first")
    await shared.look()
    (shared.place / "a.md").write_text("here")
    await shared.files.write("a.md", "there")
    await shared.files.write("b.md", "there")
    await shared.files.remove("c.md")
    (shared.place / "d.md").write_text("new")
    left = [point]

    def dying(act: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise Unavailable("killed")
            left[0] -= 1
            return act(*args, **options)

        return call

    for name in ("rename", "unlink"):
        monkeypatch.setattr(f"os.{name}", dying(getattr(os, name)))
    monkeypatch.setattr("perdure.worker.cli.drop.shared.replaced_file", dying(None))
    with pytest.raises(Unavailable):
        await shared.look()
    monkeypatch.undo()
    shared.folder = shared.started()
    for _ in range(2):
        await shared.look()
    here = shared.here()
    assert here.pop("a.md.conflict") == "here"
    assert here == await shared.there() == {"a.md": "there", "b.md": "there", "d.md": "new"}

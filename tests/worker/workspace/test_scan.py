"""Scan of a folder that changes meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from perdure.queues.regular_files import open_folder_below
from perdure.worker.errors import WorkspaceError, WorkspaceTooLarge
from perdure.worker.workspace import scan
from perdure.worker.workspace.manifest import Limits, SavedLink
from perdure.worker.workspace.scan import Scanner


def scanner(folder: Path, *, files: int = 10) -> Scanner:
    return Scanner("the workspace", folder, Limits(bytes=100_000, files=files, file_bytes=100_000))


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file now")


def link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/etc")


@pytest.mark.parametrize("change", [shutil.rmtree, replace, link])
def test_a_folder_that_is_gone_or_replaced_when_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """As package managers, git and servers do: they remove folders beside the step that is recorded."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "a.txt").write_text("a")
    (tmp_path / "kept.txt").write_text("kept")
    opened = open_folder_below

    def open_folder(folder: Path, path: str) -> int:
        if path == "gone":
            change(tmp_path / "gone")
        return opened(folder, path)

    monkeypatch.setattr(scan, "open_folder_below", open_folder)
    assert scanner(tmp_path).scan().changed == ["kept.txt"]


def test_a_workspace_whose_own_folder_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="could not read its folder"):
        scanner(tmp_path / "gone").scan()


def plant(folder: Path, kind: str) -> None:
    """Put something else in the place of the ignore file."""
    file = folder / ".perdureignore"
    match kind:
        case "device":
            file.symlink_to("/dev/zero")
        case "link":
            file.symlink_to(folder / "other")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "large":
            file.write_bytes(b"#" * 65_537)
        case "patterns":
            file.write_text("".join(f"{number}\n" for number in range(1_001)))
        case "wildcards":
            file.write_text("*a" * 1_001)
        case "matchers":
            file.write_text("".join(f"a*{number}\n" for number in range(201)))


@pytest.mark.parametrize("kind", ["device", "link", "pipe", "folder", "large", "patterns", "wildcards", "matchers"])
def test_an_ignore_file_that_cannot_be_used_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    """What it would have listed must not be saved."""
    (tmp_path / "other").write_text("*.log")
    plant(tmp_path, kind)
    with pytest.raises(WorkspaceError, match=r"could not (read|use) \.perdureignore: .+; (replace|shorten)"):
        scanner(tmp_path).scan()


def test_patterns_match_names_and_paths(tmp_path: Path) -> None:
    patterns = ["*.log", "plain", "out/*.o", "a?c", "[xy]1", "/top", "docs/", "**/deep", "s*p*t"]
    (tmp_path / ".perdureignore").write_text("# comment\n\n" + "\n".join(patterns))
    for path in ("x.log", "plain", "out/a.o", "abc", "x1", "z1", "top", "docs", "a/deep", "script", "kept"):
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    found = scanner(tmp_path).scan().changed
    assert sorted(found) == [".perdureignore", "kept", "z1"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "patterns", [["**/" * 60 + "x"], ["*a" * 500 + "b"], ["a*" * 500 + "/b"], [f"*{n}*a" for n in range(200)]]
)
def test_hostile_patterns_take_bounded_time(tmp_path: Path, patterns: list[str]) -> None:
    (tmp_path / ".perdureignore").write_text("\n".join(patterns))
    folder = tmp_path
    for _ in range(3):
        folder = folder / ("a" * 255)
        folder.mkdir()
    for number in range(8):
        (folder / f"{'a' * 200}{number}").write_text("")
    assert len(scanner(tmp_path).scan().changed) == 9


def test_what_is_too_deep_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(70):
        folder = folder / "d"
        folder.mkdir()
    (folder / "a.txt").write_text("a")
    (tmp_path / "kept.txt").write_text("kept")
    found = scanner(tmp_path, files=100).scan()
    assert found.changed == ["kept.txt"]
    assert found.skipped


def test_links_are_read_and_never_followed(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("key")
    for name, target in {
        "beside": "lib",
        "out": str(tmp_path / "secret"),
        "up": "../secret/key",
        "own": f"{folder}/lib",
        "root": str(folder),
        "escape": f"{folder}/../secret",
        "none": "missing",
        "circle": "circle",
    }.items():
        (folder / name).symlink_to(target)
    found = scanner(folder).scan()
    assert found.changed == []
    assert found.links == {
        "beside": SavedLink("lib"),
        "out": SavedLink(str(tmp_path / "secret")),
        "up": SavedLink("../secret/key"),
        "own": SavedLink("lib", inside=True),
        "root": SavedLink("", inside=True),
        "escape": SavedLink(f"{folder}/../secret"),
        "none": SavedLink("missing"),
        "circle": SavedLink("circle"),
    }


def test_names_of_any_bytes_are_found(tmp_path: Path) -> None:
    names = [b"new\nline", b"foo\x80", b"back\\slash", b"\x01\x7f", b"caf\xc3\xa9", b"tab\t "]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("a")
    found = scanner(tmp_path).scan()
    assert sorted(map(os.fsencode, found.changed)) == sorted(names)
    assert found.skipped == []


def test_the_folders_and_links_of_a_workspace_are_limited(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / f"d{number}").mkdir()
    with pytest.raises(WorkspaceTooLarge, match="more than 10 folders"):
        scanner(tmp_path).scan()
    for number in range(11):
        (tmp_path / f"d{number}").rmdir()
        (tmp_path / f"l{number}").symlink_to("a")
    with pytest.raises(WorkspaceTooLarge, match="more than 10 files"):
        scanner(tmp_path).scan()


def test_lock_files_of_git_are_left_out(tmp_path: Path) -> None:
    """The process that holds one does not survive a restore, and git refuses to work while it is there."""
    for path in (".git/index.lock", ".git/refs/heads/main.lock", "sub/.git/HEAD.lock", ".git/index", "uv.lock"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert sorted(scanner(tmp_path).scan().changed) == [".git/index", "uv.lock"]


def test_what_tools_make_again_is_saved_if_the_ignore_file_says_so(tmp_path: Path) -> None:
    for path in (".venv/pyvenv.cfg", "node_modules/a.js"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("")
    (tmp_path / ".perdureignore").write_text("!.venv/\n")
    assert sorted(scanner(tmp_path).scan().changed) == [".perdureignore", ".venv/pyvenv.cfg"]
    (tmp_path / ".perdureignore").write_text("!*.log\n")
    with pytest.raises(WorkspaceError, match=r"'!' takes out one of __pycache__, .+, got '\*\.log'"):
        scanner(tmp_path).scan()

"""Folders that dead processes have left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from perdure.worker.errors import WorkspaceError
from perdure.worker.workspace.folders import make_folder, remove_folder, take_folder

DIES = """
import os, sys
from pathlib import Path
from perdure.worker.workspace.folders import keep_folder, make_folder
place = Path(sys.argv[1])
for task in ("kept", "other"):
    folder = make_folder(place, task)
    (folder / "a.txt").write_text(task)
    print(folder.name, flush=True)
    keep_folder(folder, keep=task == "kept")
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def left(tmp_path: Path) -> list[str]:
    """Return the names of two folders of a killed process; the first one has a mark."""
    found = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], capture_output=True, text=True, check=False)
    return found.stdout.split()


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("*/*") if path.is_dir())


def test_a_folder_with_unsaved_files_of_a_killed_process_is_taken_over(tmp_path: Path, left: list[str]) -> None:
    kept, other = left
    assert names(tmp_path) == sorted(left)
    mine = make_folder(tmp_path, "mine")
    assert names(tmp_path) == sorted([kept, mine.name])
    folder = take_folder(tmp_path, kept)
    assert folder == mine.parent / kept
    assert (folder / "a.txt").read_text() == "kept"
    assert take_folder(tmp_path, kept) == folder, "it is found again"
    assert take_folder(tmp_path, other) is None
    remove_folder(folder)
    assert names(tmp_path) == [mine.name]
    assert not list(mine.parent.glob("*.unsaved"))


def test_a_folder_that_was_not_taken_over_is_removed_after_a_month(tmp_path: Path, left: list[str]) -> None:
    assert len(left) == 2
    for mark in tmp_path.glob("*/*.unsaved"):
        os.utime(mark, (0, 0))
    mine = make_folder(tmp_path, "mine")
    assert names(tmp_path) == [mine.name]


@pytest.mark.parametrize("name", ["../../secret", "..", "/etc", "secret", "", ".x-abcdefgh", "a-abcdefgh/../../x"])
def test_only_a_folder_of_a_run_is_taken_over(tmp_path: Path, name: str) -> None:
    """The name comes from a checkpoint, and the folder is removed after the run."""
    secret = tmp_path / "secret"
    secret.mkdir()
    place = tmp_path / "place"
    make_folder(place, "mine")
    with pytest.raises(WorkspaceError, match="is not the name of its folder"):
        take_folder(place, name)
    assert secret.is_dir()


def test_a_link_in_the_place_of_a_folder_is_not_taken_over(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    place = tmp_path / "place"
    make_folder(place, "mine")
    (place / "perdure-workspaces-other").mkdir()
    (place / "perdure-workspaces-other" / "task-abcdefgh").symlink_to(secret)
    assert take_folder(place, "task-abcdefgh") is None
    assert secret.is_dir()

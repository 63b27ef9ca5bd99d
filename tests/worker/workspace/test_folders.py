"""Folders that dead processes have left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from perdure.worker.errors import WorkspaceError
from perdure.worker.workspace import folders
from perdure.worker.workspace.folders import make_folder, release_folder, remove_folder, take_folder

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
    assert folder is not None
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


TURN = "turn-0123456789abcdef0123456789abcdef-1795736802366"


def test_a_task_and_a_session_have_one_path(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "task")
    assert make_folder(tmp_path, "other") != folder
    (folder / "a.txt").write_text("a")
    remove_folder(folder)
    assert make_folder(tmp_path, "task") == folder
    assert list(folder.iterdir()) == []
    turn = make_folder(tmp_path, f"{TURN}.1")
    remove_folder(turn)
    assert make_folder(tmp_path, f"{TURN}.2") == turn
    assert turn.name.startswith(TURN)


def test_a_folder_that_another_run_has_is_not_used(tmp_path: Path) -> None:
    """Such as the run of a frozen worker, which writes on when it continues; also one in this process."""
    first = make_folder(tmp_path, "task")
    second = make_folder(tmp_path, "task")
    assert second != first
    other = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], capture_output=True, text=True, check=False)
    assert len(other.stdout.split()) == 2
    assert first.is_dir(), "another process removes no folder of a live one"
    assert second.is_dir()
    remove_folder(second)
    assert first.is_dir()


def test_a_folder_in_which_a_left_program_works_is_not_used(tmp_path: Path, left: list[str]) -> None:
    """It would write into the files of the new run, under the same path."""
    found = next(tmp_path.glob(f"*/{left[1]}"))
    with subprocess.Popen(["sleep", "60"], cwd=found) as program:
        try:
            folder = make_folder(tmp_path, "other")
            assert folder != found
            assert folder.is_dir()
        finally:
            program.kill()
    remove_folder(folder)
    assert make_folder(tmp_path, "other") == found


def test_a_folder_with_unsaved_files_is_left_to_the_run_that_takes_it_over(tmp_path: Path, left: list[str]) -> None:
    """As of a turn that failed, while the session continues with the next one."""
    folder = make_folder(tmp_path, "kept")
    assert folder.name != left[0]
    found = take_folder(tmp_path, left[0])
    assert found is not None
    assert (found / "a.txt").read_text() == "kept"
    release_folder(found)
    remove_folder(found)
    remove_folder(folder)
    assert make_folder(tmp_path, "kept") == found


def test_a_name_leads_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder of a frozen run was moved, the next turn of the session, which has its path, gets another name."""
    first = make_folder(tmp_path, f"{TURN}.1")
    (first / "a.txt").write_text("of turn 1")
    monkeypatch.setattr(folders, "_locks", {})  # as in another process
    moved = take_folder(tmp_path, first.name)
    assert moved is not None
    assert (moved.name, moved.parent == first.parent) == (first.name, False)
    second = make_folder(tmp_path, f"{TURN}.2")
    assert second.name != first.name
    assert take_folder(tmp_path, first.name) == moved
    assert (moved / "a.txt").read_text() == "of turn 1"


def test_a_shared_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    shared = make_folder(tmp_path, "task").parent
    shared.chmod(0o777)
    folder = make_folder(tmp_path, "second")
    assert folder.parent != shared
    assert folder.parent.stat().st_mode & 0o777 == 0o700

"""Scan of a folder that changes meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perdure.worker.errors import WorkspaceError
from perdure.worker.workspace import Scanner


def scanner(folder: Path) -> Scanner:
    return Scanner("the workspace", folder, most_bytes=1000, most_files=10, largest=1000)


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file now")


@pytest.mark.parametrize("change", [shutil.rmtree, replace])
def test_a_folder_that_is_gone_or_a_file_when_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """As package managers, git and servers do: they remove folders beside the step that is recorded."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "a.txt").write_text("a")
    (tmp_path / "kept.txt").write_text("kept")
    read = os.scandir

    def scandir(path: Any) -> Any:
        if isinstance(path, Path) and path.name == "gone":
            monkeypatch.undo()
            change(path)
        return read(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert scanner(tmp_path).scan().changed == ["kept.txt"]


def test_a_workspace_whose_own_folder_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="could not read its folder"):
        scanner(tmp_path / "gone").scan()

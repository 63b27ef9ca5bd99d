"""Files that the demo reports on, and the text of its report."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from perdure.worker.cli.demo import describe, list_files, render


def test_files_are_sorted_and_relative(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "a/b/c", "a.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list_files(str(tmp_path), 10) == ["a.bin", "a/b/c", "a/z.py", "b.txt"]


def test_a_limit_takes_files_evenly_spread(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").touch()
    assert list_files(str(tmp_path), 3) == ["0", "3", "6"]
    assert list_files(str(tmp_path), 10) == [f"{number}" for number in range(10)]
    assert list_files(str(tmp_path / "missing"), 3) == []


def test_what_cannot_be_read_or_printed_is_left_out(tmp_path: Path) -> None:
    for folder in (".hidden", "__pycache__", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for name in (os.fsdecode(b"\xff"), "a\nb", "a\x1b[31m"):
        (tmp_path / name).touch()
    with (tmp_path / "large").open("wb") as file:
        file.truncate((16 << 20) + 1)
    (tmp_path / "kept").touch()
    assert list_files(str(tmp_path), 100) == ["kept"]


def test_a_row_has_digest_words_and_bytes(tmp_path: Path) -> None:
    data = b"one two\nthree\n\xff"
    (tmp_path / "file").write_bytes(data)
    assert describe(str(tmp_path), "file").split() == [hashlib.sha256(data).hexdigest(), "4", "15", "file"]


def test_the_report_has_one_row_per_file() -> None:
    lines = render("a\nfolder", ["row 1", "row 2"]).splitlines()
    assert lines == [r"2 files of 'a\nfolder': SHA-256, words, bytes, path", "row 1", "row 2"]

"""Files that another program has made: links, pipes, sockets and devices are not opened, and nothing waits."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure.queues.regular_files import NotRegular, open_below, open_folder_below, open_regular, read_regular

KINDS = ("link", "device", "pipe", "socket", "folder")


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Path]:
    """A folder with one file of each kind."""
    folder = tmp_path / "odd"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "file").write_bytes(b"12345")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "elsewhere").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        place = Path.cwd()
        os.chdir(folder)  # the path of a socket is short
        try:
            bound.bind("socket")
        finally:
            os.chdir(place)
        yield folder


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened_below_a_folder(odd: Path, kind: str) -> None:
    with pytest.raises(NotRegular, match="it must be a regular file, and is a"):
        open_below(odd, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "link"])
def test_only_regular_files_are_opened_by_their_path(odd: Path, kind: str) -> None:
    with pytest.raises(NotRegular, match="it must be a regular file, and is a"):
        read_regular(odd / kind, 100)


def test_links_are_followed_only_if_that_is_asked_for(odd: Path) -> None:
    assert read_regular(odd / "link", 100) == b"secret"
    with pytest.raises(NotRegular):
        open_regular(odd / "link", links=False)


def test_no_part_of_a_path_leads_out_of_the_folder(odd: Path) -> None:
    for path in ("elsewhere/secret", "../secret", "folder/../../secret", "/etc/passwd", "./file", "folder//x"):
        with pytest.raises(OSError, match=r"Not a directory|must stay within the folder"):
            open_below(odd, path)
    with pytest.raises(NotADirectoryError):
        open_folder_below(odd, "elsewhere")


def test_a_file_is_bounded_by_its_size_and_by_what_is_read(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_regular(odd / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(odd / "file", 4)
    real = os.fstat

    def before_it_grew(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[6] = 0  # st_size
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", before_it_grew)
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(odd / "file", 4)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket"])
def test_a_file_that_is_replaced_before_it_is_opened_is_refused(
    odd: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    real = os.open

    def replaced(path: str, flags: int, **options: int) -> int:
        if path == "file":
            (odd / "file").unlink()
            (odd / kind).rename(odd / "file")
        return real(path, flags, **options)

    monkeypatch.setattr(os, "open", replaced)
    monkeypatch.setattr(os, "supports_dir_fd", {replaced})
    with pytest.raises(NotRegular):
        open_below(odd, "file")


def test_no_descriptor_is_left_open(odd: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for path in (*KINDS, "elsewhere/secret", "missing", "folder/missing", "a/b/c"):
        with pytest.raises(OSError):
            open_below(odd, path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

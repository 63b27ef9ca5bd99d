"""Which files are audited: the Python files below a folder, the same ones in the same order each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ....queues import PerdureError

__all__ = ["UnusableFolder", "list_files"]

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages"})


class UnusableFolder(PerdureError, ValueError):
    """The folder to audit is missing, is no folder, or may not be read."""

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(f"{root!r} {reason}: name a folder that holds Python files")
        self.root = root


def list_files(root: str, limit: int | None = None) -> list[str]:
    """The Python files below a folder: sorted POSIX paths, relative to it.

    Left out are hidden folders, `__pycache__`, `site-packages`, folders behind symbolic links (so that loops
    end), folders that may not be read, links that lead nowhere, and names that are not UTF-8, which cannot
    travel as JSON.

    A `limit` takes that many files, spread evenly over the list, the same ones each time.

    Raises `UnusableFolder` if `root` is no readable folder, and `ValueError` for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: ask for at least one file, or leave it out for all")
    files = sorted(_python_files(_readable_folder(root)))
    if limit is None or limit >= len(files):
        return files
    return [files[index * len(files) // limit] for index in range(limit)]


def _readable_folder(root: str) -> Path:
    folder = Path(root)
    try:
        with os.scandir(folder):
            return folder
    except FileNotFoundError:
        raise UnusableFolder(root, "does not exist") from None
    except NotADirectoryError:
        raise UnusableFolder(root, "is a file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnusableFolder(root, f"cannot be read ({reason})") from error


def _python_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and _is_file(path):
                relative = path.relative_to(root).as_posix()
                if relative.isascii() or _is_unicode(relative):
                    yield relative


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # it is there and may not be looked at: the audit of the file says so
        return True


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

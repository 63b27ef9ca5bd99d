"""Source files of an app in development: which ones are watched, and their changes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from ...queues.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files below some folders whose names match a pattern, without those of tools and environments.

    Args:
        folders: Absolute paths.
        patterns: Of file names, such as `*.py`.
    """

    folders: Sequence[Path]
    patterns: Sequence[str]

    def check(self) -> None:
        """Raise `ConfigurationError` if the files cannot be watched."""
        if find_spec("watchfiles") is None:
            raise ConfigurationError("--reload needs the package watchfiles: pip install 'perdure[reload]'")
        for folder in self.folders:
            if not folder.is_dir():
                raise ConfigurationError(f"--reload-dir must be a folder, got {folder}")

    async def changes(self) -> AsyncIterator[list[Path]]:
        """Yield the paths of the files that were changed, added or removed together, sorted.

        Raises:
            OSError: The system cannot watch so many folders.
        """
        from watchfiles import Change, DefaultFilter, awatch

        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts the changes of each moment
        skip = DefaultFilter()  # __pycache__, .git, .venv, node_modules, and files of editors

        def watched(change: Change, path: str) -> bool:
            return skip(change, path) and any(fnmatch(Path(path).name, pattern) for pattern in self.patterns)

        async for found in awatch(*self.folders, watch_filter=watched):
            yield sorted({Path(path) for _, path in found})

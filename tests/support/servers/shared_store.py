"""A folder as an artifact store that every worker reaches: `shared://` URLs of fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

__all__ = ["objects", "shared_url"]


class _SharedFolder(LocalFileSystem):  # type: ignore[misc]
    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("shared://")))


fsspec.register_implementation("shared", _SharedFolder)


def shared_url(folder: Path) -> str:
    """Return the URL of a folder, which need not exist."""
    return f"shared://{folder}"


def objects(folder: Path) -> list[Path]:
    """Return the files of the objects in a store."""
    return sorted(path for path in folder.glob("*/??/*") if path.is_file())

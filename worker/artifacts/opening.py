"""From the setting to the store: a folder, or a URL."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .folder import Folder
from .shelf import Shelf
from .store import ArtifactStore

__all__ = ["open_store"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def open_store(place: str, folder: str, *, limit: int) -> ArtifactStore:
    """The store of one deployment. place: a folder, or a URL as fsspec takes it. folder: the deployment's, within.

    limit: bytes that one artifact may have. Nothing is written yet. Raises `ConfigurationError`.
    """
    shelf: Shelf = _remote(place, folder) if _URL.match(place) else Folder(Path(place).expanduser() / folder)
    return ArtifactStore(shelf, limit=limit)


def _remote(url: str, folder: str) -> Shelf:
    shown = re.sub(r"//[^/@]*@", "//", url.partition("?")[0])
    try:
        core: Any = import_module("fsspec.core")
        remote: Any = import_module(".remote", __package__)
    except ImportError:
        raise ConfigurationError(
            f"artifacts at {shown} need a package that is not installed: pip install 'perdure[artifacts]'"
        ) from None
    try:
        files, root = core.url_to_fs(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"artifacts cannot be kept at {shown} (PERDURE_ARTIFACTS): {error}") from None
    shelf: Shelf = remote.Remote(files, f"{root.rstrip('/')}/{folder}", f"{shown.rstrip('/')}/{folder}")
    return shelf

"""Which names artifacts can have: those that can be a file's wherever somebody fetches them to."""

from __future__ import annotations

import unicodedata
from typing import Final

from ..errors import BadArtifactName

__all__ = ["check_artifact_name"]

_LONGEST: Final = 200
"""Bytes of a name in UTF-8. Most file systems take 255, and a temporary name is longer than the name itself."""

_APART: Final = "/\\#"
"""Parts of paths, and what numbers the records of one name."""


def check_artifact_name(name: object) -> str:
    """The name, where an artifact can have it; `BadArtifactName` with the rule where not."""
    if not isinstance(name, str):
        raise BadArtifactName(name, f"it is a {type(name).__name__}, and a name is text")
    if not name or len(name.encode("utf-8", "surrogatepass")) > _LONGEST:
        raise BadArtifactName(name, f"a name has 1 to {_LONGEST} bytes in UTF-8")
    for char in name:
        if char in _APART:
            raise BadArtifactName(name, f"it has a {char!r}: a name is no path, and has none of {' '.join(_APART)}")
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            raise BadArtifactName(name, f"it has a control character, {char!r}")
    if name in (".", "..") or name != name.strip():
        raise BadArtifactName(name, "it stands for a folder, or begins or ends with white space")
    return name

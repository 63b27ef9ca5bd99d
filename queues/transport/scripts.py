"""Loading of Lua scripts: one file per atomic act, named by its content.

A worker calls a script by the SHA-1 of its text (EVALSHA), so two versions of Perdure share a server without
sharing scripts. A line `-- include: NAME` at the top of a file puts NAME.lua in front of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Script", "load_script", "loaded_scripts", "pairs", "queue_script"]

_PRELUDES = Path(__file__).parents[1] / "lua"
_INCLUDE = "-- include: "
_loaded: dict[Path, Script] = {}


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic act: its name, its text and the digest Redis knows it by."""

    name: str
    source: str
    sha: str


def load_script(path: Path) -> Script:
    """Read a script file with the prelude it asks for."""
    body = path.read_text("utf-8")
    first = body.split("\n", 1)[0]
    if first.startswith(_INCLUDE):
        prelude = (_PRELUDES / f"{first.removeprefix(_INCLUDE).strip()}.lua").read_text("utf-8")
        body = prelude + body
    digest = hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()
    script = _loaded[path] = Script(path.stem, body, digest)
    return script


def loaded_scripts() -> list[Script]:
    """Every script that was read so far."""
    return list(_loaded.values())


def queue_script(name: str) -> Script:
    """A script of this room."""
    return load_script(_PRELUDES / f"{name}.lua")


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """A flat field-value reply as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))

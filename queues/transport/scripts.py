"""Lua scripts: one file per atomic act.

A script is called by the SHA-1 of its source (EVALSHA), so two versions of Perdure can share a server. No process
sends the source with a call (EVAL): workers and operators load the scripts, and producers need no right to do so. A
first line `-- include: NAME, NAME` puts the sources of these files in front, or where the script has the line
`-- preludes`: each call creates their functions, so what needs none of them, and is frequent, ends before that line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PRELUDES = Path(__file__).parents[1] / "lua"
_INCLUDE = "-- include: "
_HERE = "\n-- preludes\n"
_loaded: dict[Path, Script] = {}


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its name, its source and the digest by which Redis knows it."""

    name: str
    source: str
    sha: str


def load_script(path: Path) -> Script:
    """Read a script file and the preludes that it includes."""
    body = path.read_text("utf-8")
    preludes = "".join((_PRELUDES / f"{name}.lua").read_text("utf-8") for name in _included(body))
    before, here, after = body.partition(_HERE)
    body = before + "\n" + preludes + after if here else preludes + body
    digest = hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()
    script = _loaded[path] = Script(path.stem, body, digest)
    return script


def _included(source: str) -> list[str]:
    """Return the names of the preludes that a source includes."""
    first = source.split("\n", 1)[0]
    if not first.startswith(_INCLUDE):
        return []
    return [name.strip() for name in first.removeprefix(_INCLUDE).split(",")]


def loaded_scripts() -> list[Script]:
    """Return every script that this process has read."""
    return list(_loaded.values())


def queue_script(name: str) -> Script:
    """Read a script of the queues package."""
    return load_script(_PRELUDES / f"{name}.lua")


def queue_scripts() -> list[Script]:
    """Return every script of the queues package, which producers use, and the others that this process has read."""
    for path in _queue_paths():
        if path not in _loaded:
            load_script(path)
    return loaded_scripts()


@cache
def _queue_paths() -> list[Path]:
    """Return the files of the queues package that are scripts and no preludes."""
    sources = {path: path.read_text("utf-8") for path in sorted(_PRELUDES.glob("*.lua"))}
    preludes = {name for source in sources.values() for name in _included(source)}
    return [path for path in sources if path.stem not in preludes]


def milliseconds(time: Sequence[bytes]) -> int:
    """Return the reply of TIME in milliseconds since the epoch."""
    seconds, micros = time
    return int(seconds) * 1000 + int(micros) // 1000


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return a flat field-value reply as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))

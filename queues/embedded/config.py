"""The configuration the embedded server runs with."""

from __future__ import annotations

import os
from pathlib import Path

from .directory import DataDirectory

__all__ = ["write_config"]

TEMPLATE = b"""\
# Written by Perdure at every start: changes made here are lost.
port 0
unixsocket %(socket)b
unixsocketperm 700
dir %(directory)b
logfile %(log)b
daemonize no
# Every acknowledged write is on the disk. With `everysec` Redis puts off even the write to the file
# for up to two seconds while an fsync runs: killed then, it would lose what it has acknowledged.
appendonly yes
appendfsync always
aof-load-truncated yes
save ""
# A task is never thrown away to make room.
maxmemory-policy noeviction
"""


def write_config(directory: DataDirectory, socket: Path) -> None:
    """Write the configuration of a server on `socket` into the data directory."""
    directory.config.touch(mode=0o600)
    directory.config.write_bytes(
        TEMPLATE % {b"socket": _quoted(socket), b"directory": _quoted(directory.path), b"log": _quoted(directory.log)}
    )


def _quoted(path: Path) -> bytes:
    # Redis reads "..." with \\, \" and \xHH; all other bytes stand for themselves.
    return b'"%b"' % b"".join(
        b"\\x%02x" % byte if byte < 0x20 or byte in b'"\\' else bytes([byte]) for byte in os.fsencode(path)
    )

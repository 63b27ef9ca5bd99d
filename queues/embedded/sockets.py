"""Where the server's unix socket is, and one question and answer over it."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

from ..errors import EmbeddedServerError
from .directory import DataDirectory

__all__ = ["ask", "is_ready", "place_socket", "socket_path"]

LONGEST = 107 if sys.platform == "linux" else 103  # bytes; sun_path without its closing zero
PATIENCE = 1.0  # seconds for one answer
NAME = "redis.sock"


def socket_path(directory: DataDirectory) -> Path:
    """In the data directory, or, where that path is too long for a socket, in a short temporary one."""
    near = directory.path / NAME
    if len(os.fsencode(near)) <= LONGEST:
        return near
    digest = hashlib.sha256(os.fsencode(directory.path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"perdure-{os.geteuid()}-{digest}" / NAME


def place_socket(directory: DataDirectory) -> Path:
    """Make the directory of a new server's socket; a stale socket in it the server replaces by itself.

    Raises:
        EmbeddedServerError: the short temporary directory belongs to somebody else, or is still too long.
    """
    path = socket_path(directory)
    if len(os.fsencode(path)) > LONGEST:
        raise EmbeddedServerError(
            f"{path} is too long for a socket ({LONGEST} bytes at most): "
            "name a shorter data directory, or a shorter TMPDIR"
        )
    if path.parent == directory.path:
        return path
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        found = path.parent.lstat()  # not stat: a link made by somebody else is theirs
    except OSError as error:
        raise EmbeddedServerError(f"no socket can be made at {path}: {error}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EmbeddedServerError(
            f"{path.parent} should be a directory of user {os.geteuid()} alone, but is not: "
            "remove it, or name a shorter data directory"
        )
    return path


def ask(path: Path, command: str) -> str | None:
    """The reply to an inline command, an error reply with its leading minus; None if none came."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(os.fspath(path))
            connection.sendall(command.encode() + b"\r\n")
            with connection.makefile("rb") as stream:
                head = stream.readline().rstrip().decode(errors="replace")
                if head.startswith("$"):
                    return stream.read(int(head[1:])).decode(errors="replace")
    except OSError:
        return None
    return head or None


def is_ready(path: Path) -> bool:
    """Whether the server at `path` has read its data and takes commands."""
    reply = ask(path, "PING")
    return reply is not None and not reply.startswith("-LOADING")

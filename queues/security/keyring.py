"""The deployment's keys: 32 random bytes in base64, one or several, of which the first one encrypts."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..errors import ConfigurationError
from ..regular_files import open_regular, read_bounded

_BYTES: Final = 32
_FILE_BYTES: Final = 65_536
_SEPARATOR = re.compile(r"[\s,]+")
_URL_SAFE = str.maketrans("-_", "+/")


def generate_key() -> str:
    """Return a new key."""
    return base64.b64encode(os.urandom(_BYTES)).decode()


def key_id(key: bytes) -> bytes:
    """Return four bytes that identify a key and do not disclose it."""
    return hashlib.sha256(b"perdure key id\0" + key).digest()[:4]


class KeyRing:
    """The deployment's keys, by their ids."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = {key_id(key): key for key in keys}
        if len(self.keys) < len(set(keys)):
            raise ConfigurationError("two keys have the same id by chance: generate another one")
        self.first = key_id(keys[0])

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(key.hex() for key in self.keys)

    def derive(self, key: bytes, label: bytes, context: bytes) -> bytes:
        """Return the key of one task, from the key of this id. label: what it is for.

        It is one block of the KDF in counter mode with HMAC-SHA-256 (NIST SP 800-108r1, 4.1).
        """
        block = b"\x00\x00\x00\x01" + label + b"\0" + context + b"\x00\x00\x01\x00"
        return hmac.digest(self.keys[key], block, hashlib.sha256)


def read_keys(text: str, source: str) -> list[bytes]:
    """Parse keys separated by commas or white space. Raises `ConfigurationError`, which names the source only."""
    found: list[bytes] = []
    for number, word in enumerate(filter(None, _SEPARATOR.split(text)), 1):
        try:
            key = base64.b64decode(word.translate(_URL_SAFE), validate=True)
        except binascii.Error:
            key = b""
        if len(key) != _BYTES:
            raise ConfigurationError(
                f"{source}: key {number} must be {_BYTES} bytes in base64; generate one with 'perdure keys generate'"
            )
        found.append(key)
    return list(dict.fromkeys(found))


def read_key_file(path: Path) -> list[bytes]:
    """Read keys from a file, one per line; a line that begins with # is a comment. Raises `ConfigurationError`."""
    source = f"key file {path}"
    lines = read_lines(path, source, secret=True)
    keys = read_keys("\n".join(line for line in lines if not line.lstrip().startswith("#")), source)
    if not keys:
        raise ConfigurationError(f"{source} holds no key; generate one with 'perdure keys generate'")
    return keys


def read_lines(path: Path, source: str, *, secret: bool) -> list[str]:
    """Return the lines of a file of keys. secret: not all users may read it. Raises `ConfigurationError`."""
    forbidden = stat.S_IWOTH | (stat.S_IROTH if secret else 0)
    may = "readable or writable" if secret else "writable"
    try:
        with open_regular(path, limit=_FILE_BYTES) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & forbidden:
                raise ConfigurationError(
                    f"{source} must not be {may} by all users (mode {mode:04o}): chmod {'600' if secret else '644'} "
                    f"{path}"
                )
            return read_bounded(file, _FILE_BYTES, str(path)).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise ConfigurationError(f"could not read {source}: {error.strerror or error}") from None

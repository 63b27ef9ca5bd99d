"""Keys of encryption as people write them down: 32 random bytes in base64, one or several, the first one in use."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..errors import InvalidKey
from .encryption import NO_KEYS, Encryptor

__all__ = ["generate_key", "key_id", "make_encryptor", "read_key_file", "read_keys"]

_BYTES: Final = 32
_BETWEEN = re.compile(r"[\s,]+")
_URL_SAFE = str.maketrans("-_", "+/")


def generate_key() -> str:
    """A new key."""
    return base64.b64encode(os.urandom(_BYTES)).decode()


def key_id(key: bytes) -> bytes:
    """Four bytes that name a key without telling it."""
    return hashlib.sha256(b"perdure key id\0" + key).digest()[:4]


def read_keys(text: str, source: str) -> list[bytes]:
    """Keys apart by commas or white space. Raises `InvalidKey`, which names source and place, never the text."""
    found: list[bytes] = []
    for number, word in enumerate(filter(None, _BETWEEN.split(text)), 1):
        try:
            key = base64.b64decode(word.translate(_URL_SAFE), validate=True)
        except binascii.Error:
            key = b""
        if len(key) != _BYTES:
            raise InvalidKey(
                f"{source}: key {number} is not {_BYTES} bytes in base64: 'perdure keys generate' makes one"
            )
        found.append(key)
    return list(dict.fromkeys(found))


def read_key_file(path: Path) -> list[bytes]:
    """Keys from a file, one per line; a line that begins with # is a comment. Raises `InvalidKey`."""
    source = f"key file {path}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise InvalidKey(f"{source} is open to everybody on this machine (mode {mode:04o}): chmod 600 {path}")
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        raise InvalidKey(f"{source} cannot be read: {error.strerror or error}") from None
    keys = read_keys("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")), source)
    if not keys:
        raise InvalidKey(f"{source} holds no key: 'perdure keys generate' makes one")
    return keys


def make_encryptor(text: str, path: Path | None, *, required: bool = False) -> Encryptor:
    """The sealer that settings ask for: keys as text or in a file. Raises `InvalidKey`."""
    if text.strip() and path is not None:
        raise InvalidKey("PERDURE_ENCRYPTION_KEYS and PERDURE_ENCRYPTION_KEY_FILE are both set: leave one of them out")
    keys: Sequence[bytes] = read_key_file(path) if path is not None else read_keys(text, "PERDURE_ENCRYPTION_KEYS")
    return Encryptor(keys, required=required) if keys or required else NO_KEYS

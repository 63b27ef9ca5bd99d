"""Data that is signed with the key of a task and not encrypted; see `encryption`."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

_SIZE: Final = 32


class Signer:
    """Signing and verification with one task's key: HMAC-SHA-256 (RFC 2104) over the data and what it is bound to."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encrypt(self, data: bytes, associated: bytes) -> bytes:
        """Return the signature and the data."""
        return self._digest(data, associated) + data

    def decrypt(self, data: bytes, associated: bytes) -> bytes | None:
        """Return the data; None if it or the associated data was changed."""
        given, signed = data[:_SIZE], data[_SIZE:]
        return signed if hmac.compare_digest(given, self._digest(signed, associated)) else None

    def _digest(self, data: bytes, associated: bytes) -> bytes:
        # the length says where the associated data ends
        return hmac.digest(self._key, b"%d " % len(associated) + associated + data, hashlib.sha256)

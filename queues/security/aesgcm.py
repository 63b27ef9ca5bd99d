"""AES-256-GCM with keys derived for each task; see `encryption`. Only this and `ed25519` import `cryptography`."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import ConfigurationError
from .keyring import key_id

_NONCE: Final = 12
_LABEL: Final = b"perdure task key\0"


class Cipher:
    """Encryption and decryption with one task's key."""

    __slots__ = ("_aead",)

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)

    def encrypt(self, data: bytes, associated: bytes) -> bytes:
        """Return nonce, ciphertext and tag."""
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, data, associated)

    def decrypt(self, data: bytes, associated: bytes) -> bytes | None:
        """Return the plain data; None if the ciphertext or the associated data was changed."""
        try:
            return self._aead.decrypt(data[:_NONCE], data[_NONCE:], associated)
        except InvalidTag:
            return None


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

    def cipher(self, key: bytes, context: bytes) -> Cipher:
        """Return the cipher of one task for the key of this id.

        The task's key is one block of the KDF in counter mode with HMAC-SHA-256 (NIST SP 800-108r1, 4.1).
        """
        block = b"\x00\x00\x00\x01" + _LABEL + context + b"\x00\x00\x01\x00"
        return Cipher(hmac.digest(self.keys[key], block, hashlib.sha256))

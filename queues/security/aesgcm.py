"""AES-256-GCM with the key of a task; see `encryption`. Only this and `ed25519` import `cryptography`."""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE: Final = 12


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

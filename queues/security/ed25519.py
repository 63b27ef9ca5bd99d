"""Ed25519 signatures (RFC 8032); see `approvers`. Only this and `aesgcm` import `cryptography`."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def public_key(seed: bytes) -> bytes:
    """Return the public key, 32 bytes, of a private one: a seed of 32 bytes (RFC 8032, 5.1.5)."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(seed: bytes, data: bytes) -> bytes:
    """Return the signature of data: 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign(data)


def is_signed(key: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether a signature of data is valid under a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True

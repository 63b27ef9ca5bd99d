"""Encryption of stored data, secret arguments and redaction."""

from __future__ import annotations

from .encryption import (
    ERROR,
    MARK,
    MESSAGE,
    NO_CIPHER,
    NO_KEYS,
    RESULT,
    Encryptor,
    TaskCipher,
    arguments_field,
    event_field,
    is_encrypted,
)
from .keyring import generate_key, make_encryptor
from .redaction import Redaction
from .secret_arguments import (
    ANY,
    DEEPEST,
    MASK,
    MOST_MARKS,
    SECRET,
    SecretPaths,
    contains_mask,
    has_secret,
    marked_values,
    mask,
    read_secret_paths,
    restore_masked,
    unwrap_secrets,
)

__all__ = [
    "ANY",
    "DEEPEST",
    "ERROR",
    "MARK",
    "MASK",
    "MESSAGE",
    "MOST_MARKS",
    "NO_CIPHER",
    "NO_KEYS",
    "RESULT",
    "SECRET",
    "Encryptor",
    "Redaction",
    "SecretPaths",
    "TaskCipher",
    "arguments_field",
    "contains_mask",
    "event_field",
    "generate_key",
    "has_secret",
    "is_encrypted",
    "make_encryptor",
    "marked_values",
    "mask",
    "read_secret_paths",
    "restore_masked",
    "unwrap_secrets",
]

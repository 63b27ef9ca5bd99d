"""Encryption of stored data, secret arguments and redaction.

Two independent mechanisms. Encryption hides the data of tasks from Redis and its operators; it is on when the process
has keys. Secret arguments and redaction keep single values out of listings, logs and errors, with or without keys.

    module              contents
    encryption          format of encrypted data; `Encryptor` of a deployment, `TaskCipher` of a task
    aesgcm              the cipher and the derivation of task keys; the only import of `cryptography`
    keyring             keys as text and in files
    secret_arguments    paths of secrets among a task's arguments; masking, unwrapping, restoring
    redaction           removal of a task's secrets from text
    urls                URLs without their passwords

The format of encrypted data and the kinds (`arguments_field` and its like) are stored: a change needs a new version
byte, and older data must stay readable. Kinds are part of the associated data, so renaming a step or a task makes its
data undecryptable. `aesgcm` is imported on first use only, since `cryptography` is an extra.
"""

from __future__ import annotations

from .encryption import (
    ERROR,
    MARK,
    MESSAGE,
    NO_CIPHER,
    NO_KEYS,
    PROGRESS,
    RESULT,
    RESULT_CHUNKS,
    Encryptor,
    TaskCipher,
    argument_chunks,
    arguments_field,
    event_field,
    inputs_field,
    is_encrypted,
    make_encryptor,
    step_chunks,
)
from .keyring import generate_key
from .redaction import Redaction
from .secret_arguments import (
    ANY,
    DEEPEST,
    MASK,
    MOST_SECRET_PATHS,
    SECRET,
    SecretPaths,
    contains_mask,
    has_secret,
    mask,
    names_beside,
    path_exists,
    read_secret_paths,
    restore_masked,
    schema_secrets,
    secret_values,
    unwrap_secrets,
)
from .urls import has_credentials, shown_url, url_secrets

__all__ = [
    "ANY",
    "DEEPEST",
    "ERROR",
    "MARK",
    "MASK",
    "MESSAGE",
    "MOST_SECRET_PATHS",
    "NO_CIPHER",
    "NO_KEYS",
    "PROGRESS",
    "RESULT",
    "RESULT_CHUNKS",
    "SECRET",
    "Encryptor",
    "Redaction",
    "SecretPaths",
    "TaskCipher",
    "argument_chunks",
    "arguments_field",
    "contains_mask",
    "event_field",
    "generate_key",
    "has_credentials",
    "has_secret",
    "inputs_field",
    "is_encrypted",
    "make_encryptor",
    "mask",
    "names_beside",
    "path_exists",
    "read_secret_paths",
    "restore_masked",
    "schema_secrets",
    "secret_values",
    "shown_url",
    "step_chunks",
    "unwrap_secrets",
    "url_secrets",
]

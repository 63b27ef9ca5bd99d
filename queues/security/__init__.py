"""Encryption of stored data, secret arguments and redaction.

Two independent mechanisms. Encryption hides the data of tasks from Redis and its operators; it is on when the process
has keys. Secret arguments and redaction keep single values out of listings, logs and errors, with or without keys.

    module              contents
    encryption          format of encrypted data; `Encryptor` of a deployment, `TaskCipher` of a task
    aesgcm              the cipher
    keyring             keys as text and in files, and the derivation of task keys
    hash_chain          the hash chain over the events of a task, which shows that entries are missing
    approvers           keys and groups of those whose signature an answer needs
    ed25519             their signatures
    secret_arguments    paths of secrets among a task's arguments; masking, unwrapping, restoring
    redaction           removal of a task's secrets from text
    urls                URLs without their passwords

The format of encrypted data and the kinds (`arguments_field` and its like) are stored: a change needs a new version
byte, and older data must stay readable. Kinds are part of the associated data, so renaming a step or a task makes its
data undecryptable. `aesgcm` and `ed25519` are imported on first use only, since `cryptography` is an extra.
"""

"""Where the queues are when nobody says: the environment, else the embedded server."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import BadAddress
from .security import Encryptor, make_encryptor
from .transport import Address, Replication

__all__ = ["default_address", "default_data_dir", "default_encryptor", "default_namespace", "default_replication"]


def default_namespace() -> str:
    """PERDURE_NAMESPACE, else `perdure`."""
    return os.environ.get("PERDURE_NAMESPACE") or "perdure"


def default_data_dir() -> Path:
    """PERDURE_DATA_DIR, else `perdure` in the user's data folder (XDG Base Directory Specification)."""
    given = os.environ.get("PERDURE_DATA_DIR")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "perdure"


def default_address(url: str | None = None, data_dir: Path | None = None) -> Address:
    """The URL given, else PERDURE_REDIS_URL, else the embedded server; `BadAddress` where it cannot be read.

    data_dir: of the embedded server, else the default one.
    """
    text = url or os.environ.get("PERDURE_REDIS_URL") or "embedded:"
    return Address.parse(text, data_dir=lambda: data_dir or default_data_dir())


def default_encryptor() -> Encryptor:
    """With the keys of PERDURE_ENCRYPTION_KEYS or PERDURE_ENCRYPTION_KEY_FILE; without any, data stays plain.

    Raises `InvalidKey`.
    """
    file = os.environ.get("PERDURE_ENCRYPTION_KEY_FILE")
    return make_encryptor(
        os.environ.get("PERDURE_ENCRYPTION_KEYS", ""),
        Path(file).expanduser() if file else None,
        required=os.environ.get("PERDURE_ENCRYPTION_REQUIRED", ""),
    )


def default_replication() -> Replication:
    """PERDURE_REPLICAS and PERDURE_REPLICATION_TIMEOUT (seconds); `BadAddress` where they are no numbers for it."""
    default = Replication()
    try:
        replicas = int(os.environ.get("PERDURE_REPLICAS") or default.replicas)
        return Replication(replicas, float(os.environ.get("PERDURE_REPLICATION_TIMEOUT") or default.timeout))
    except ValueError as error:
        raise BadAddress(f"PERDURE_REPLICAS, PERDURE_REPLICATION_TIMEOUT: {error}") from None

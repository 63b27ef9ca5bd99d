"""Store outside of Redis for the largest values: the protocol that the artifact store of a deployment fulfils."""

from __future__ import annotations

import re
from typing import Annotated, Final, Protocol

from pydantic import Field

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Name of stored bytes: their SHA-256 in hexadecimal. It becomes a path, so that it must be nothing else."""

_FORM: Final = re.compile(r"[0-9a-f]{64}")


def is_sha256(name: object) -> bool:
    """Return whether a value is the name of stored bytes."""
    return isinstance(name, str) and _FORM.fullmatch(name) is not None


class ValueStore(Protocol):
    """Store that every worker reaches. Its objects are named by their SHA-256; it deletes those without a task.

    Both methods raise an error that names the store and the remedy.

    Attributes:
        above: Values of more bytes are stored here, others in Redis.
        shown: Location without credentials.
    """

    above: int
    shown: str

    async def save(self, what: str, data: bytes) -> None:
        """Store bytes, or renew the age of those that are stored already. what: their name in errors."""

    async def read(self, what: str, digest: str, size: int) -> bytes:
        """Return the bytes with this SHA-256 and this size, verified."""
        ...

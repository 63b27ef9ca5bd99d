"""Large values: cut into chunks, which are fields of a hash, so that no command holds up Redis for long.

A value above the payload limit is stored in chunks first, and then a reference in its place. A reference is one line
that begins with `#`, which no JSON does. It has the digest of the chunks, so that damage is noticed, and by which their
fields are named: a value that is stored again after a crash takes no more space.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import orjson

from ..errors import LargeValueLost
from .backoff import retry_while_unavailable
from .gateway import Gateway

__all__ = ["CHUNK_BYTES", "REFERENCE", "LargeValue", "bytes_as_json", "cut", "read_large"]

CHUNK_BYTES: Final = 512 * 1024
"""Size of a chunk: Redis stores or returns one in less than a millisecond."""

REFERENCE: Final = b"#"
"""First byte of a reference."""


class LargeValue(NamedTuple):
    """Reference to a value in chunks.

    Attributes:
        digest: Hash of the place and the content.
        size: Bytes of the value before encryption.
        chunks: Number of chunks.
        raw: Whether the chunks are the bytes that the function returned, else they are JSON.
    """

    digest: str
    size: int
    chunks: int
    raw: bool = False

    def encode(self) -> bytes:
        """Return the stored form."""
        return REFERENCE + orjson.dumps(self._asdict())

    @staticmethod
    def decode(data: bytes) -> LargeValue | None:
        """Return the reference in stored data, None if that is a value. Raises `LargeValueLost` if it is damaged."""
        if data[:1] != REFERENCE:
            return None
        try:
            found = orjson.loads(data[1:])
            return LargeValue(str(found["digest"]), int(found["size"]), int(found["chunks"]), found["raw"] is True)
        except (ValueError, LookupError, TypeError):
            raise LargeValueLost("a large value", "its reference is damaged") from None

    @property
    def shown(self) -> str:
        """The value for a listing, which does not read it."""
        return f"({self.size:,} bytes, stored in {self.chunks} chunks)"


def cut(place: str, stored: bytes, *, size: int, raw: bool = False) -> tuple[LargeValue, Sequence[bytes]]:
    """Return the reference to a value, and its chunks.

    Args:
        place: What the value belongs to within its task, such as the key of a step: equal values have fields of their
            own, so that one can be deleted.
        stored: The value, encrypted if keys are set.
        size, raw: See `LargeValue`.
    """
    chunks = [stored[start : start + CHUNK_BYTES] for start in range(0, len(stored), CHUNK_BYTES)]
    return LargeValue(_digest(place, stored), size, len(chunks), raw), chunks


async def read_large(
    gateway: Gateway,
    key: str,
    field: str,
    place: str,
    value: LargeValue,
    decrypt: Callable[[bytes], bytes],
    what: str,
) -> bytes:
    """Read a value chunk by chunk, and return it as JSON. Repeated until Redis answers.

    Args:
        key: The hash.
        field: Beginning of the names of the fields.
        place: See `cut`.
        what: Names the value and its task in an error.

    Raises:
        LargeValueLost: A chunk is missing, or is not what was stored.
        DecryptionError: It cannot be decrypted.
    """
    found: list[bytes] = []
    for number in range(value.chunks):
        chunk = await retry_while_unavailable(partial(gateway.command, "HGET", key, f"{field}{number}"))
        if chunk is None:
            raise LargeValueLost(what, f"chunk {number + 1} of {value.chunks} is missing")
        found.append(chunk)
    stored = b"".join(found)
    if _digest(place, stored) != value.digest:
        raise LargeValueLost(what, "its chunks were changed")
    data = await asyncio.to_thread(decrypt, stored)
    return bytes_as_json(data) if value.raw else data


def _digest(place: str, stored: bytes) -> str:
    found = hashlib.blake2b(place.encode("utf-8", "surrogatepass") + b"\0", digest_size=12)
    found.update(stored)
    return found.hexdigest()


def bytes_as_json(value: bytes) -> bytes:
    """Return bytes that are not text as JSON."""
    return b'{"base64":"%b"}' % base64.b64encode(value)

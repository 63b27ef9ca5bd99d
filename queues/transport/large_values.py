"""Large values: cut into chunks, which are fields of a hash, so that no command holds up Redis for long.

A value above the payload limit is stored in chunks first, and then a reference in its place. A reference is one line
that begins with `#`, which no JSON does. It has the digest of the chunks, so that damage is noticed, and by which their
fields are named: a value that is stored again after a crash takes no more space.

If the gateway has a value store, the largest values are its objects, encrypted as chunks are. In Redis there is one
chunk then, the link. Its name contains the hash of the object, so that the objects of live tasks can be listed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import orjson

from ..errors import ConfigurationError, LargeValueLost
from .backoff import retry_while_unavailable
from .gateway import Gateway
from .value_store import ValueStore

CHUNK_BYTES: Final = 512 * 1024
"""Size of a chunk: Redis stores or returns one in less than a millisecond."""

REFERENCE: Final = b"#"
"""First byte of a reference."""

_DIGEST: Final = 24
"""Characters of a digest."""

_OBJECT: Final = 64
"""Characters of the SHA-256 of an object, which follow those of the digest."""

LINKS: Final = f"*:{'?' * (_DIGEST + _OBJECT)}:0"
"""Pattern of the fields that link objects. It may match others."""

_REFERENCED: Final = re.compile(rf"[0-9a-f]{{{_DIGEST}}}(?:[0-9a-f]{{{_OBJECT}}})?")
"""Digest in a reference, with the name of the object if there is one."""

_LINK: Final = re.compile(rf"(?:args|c|result):[0-9a-f]{{{_DIGEST}}}([0-9a-f]{{{_OBJECT}}}):0")


class LargeValue(NamedTuple):
    """Reference to a value in chunks, or in the value store.

    Attributes:
        digest: Hash of the place and the content; with an object, followed by the object's SHA-256.
        size: Bytes of the value before encryption.
        chunks: Number of chunks; 1 with an object.
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
            value = LargeValue(found["digest"], int(found["size"]), int(found["chunks"]), found["raw"] is True)
            if _REFERENCED.fullmatch(value.digest) is None or value.size < 0 or value.chunks < 0:
                raise ValueError
        except (ValueError, LookupError, TypeError, OverflowError):
            raise LargeValueLost("a large value", "its reference is damaged") from None
        return value

    @property
    def object(self) -> str | None:
        """Name of the object in the value store, its SHA-256; None for a value in chunks."""
        return self.digest[_DIGEST:] or None

    @property
    def shown(self) -> str:
        """The value for a listing, which does not read it."""
        where = f"stored in {self.chunks} chunks" if self.object is None else "stored in the artifact store"
        return f"({self.size:,} bytes, {where})"

    def field(self, kind: str, number: int) -> str:
        """Return the field of a chunk. kind: `args`, `c`, or `result`, of which a task has one."""
        named = kind != "result" or self.object is not None
        return f"{kind}:{self.digest}:{number}" if named else f"{kind}:{number}"


class CutValue(NamedTuple):
    """A value to be stored: the reference, its chunks, and the object that must be saved before them, if any."""

    reference: LargeValue
    chunks: Sequence[bytes]
    object: bytes | None = None

    async def save_object(self, gateway: Gateway, what: str) -> None:
        """Save the object, if there is one. what: the value and its task in an error."""
        if self.object is not None and gateway.value_store is not None:
            await gateway.value_store.save(what, self.object)


def cut(place: str, stored: bytes, *, size: int, raw: bool = False, store: ValueStore | None = None) -> CutValue:
    """Return the reference to a value, and its chunks or its object.

    Args:
        place: What the value belongs to within its task, such as the key of a step: equal values have fields of their
            own, so that one can be deleted.
        stored: The value, encrypted if keys are set.
        size, raw: See `LargeValue`.
        store: Store of values that are too large for Redis, if there is one.
    """
    if store is not None and size > store.above:
        name = hashlib.sha256(stored).hexdigest()
        link = orjson.dumps({"size": len(stored), "store": store.shown})
        return CutValue(LargeValue(_digest(place, name.encode()) + name, size, 1, raw), [link], stored)
    chunks = [stored[start : start + CHUNK_BYTES] for start in range(0, len(stored), CHUNK_BYTES)]
    return CutValue(LargeValue(_digest(place, stored), size, len(chunks), raw), chunks)


async def read_large(
    gateway: Gateway,
    key: str,
    kind: str,
    place: str,
    value: LargeValue,
    decrypt: Callable[[bytes], bytes],
    what: str,
) -> bytes:
    """Read a value chunk by chunk, or its object, and return it as JSON. Repeated until Redis answers.

    Args:
        key: The hash.
        kind: See `LargeValue.field`.
        place: See `cut`.
        what: Names the value and its task in an error.

    Raises:
        LargeValueLost: A chunk is missing, or is not what was stored.
        DecryptionError: It cannot be decrypted.
        ConfigurationError: It is in a value store, and this process has none.
        PerdureError: The value store cannot be reached, or has lost it.
    """
    found: list[bytes] = []
    for number in range(value.chunks):
        field = value.field(kind, number)
        chunk = await retry_while_unavailable(partial(gateway.command, "HGET", key, field))
        if chunk is None:
            raise LargeValueLost(what, f"chunk {number + 1} of {value.chunks} is missing")
        found.append(chunk)
    stored = b"".join(found)
    if value.object is not None:
        stored = await _read_object(gateway, value.object, stored, what)
    elif _digest(place, stored) != value.digest:
        raise LargeValueLost(what, "its chunks were changed")
    data = await asyncio.to_thread(decrypt, stored)
    return bytes_as_json(data) if value.raw else data


async def _read_object(gateway: Gateway, name: str, link: bytes, what: str) -> bytes:
    try:
        form = orjson.loads(link)
        size, shown = int(form["size"]), str(form["store"])
    except (ValueError, LookupError, TypeError, OverflowError):
        raise LargeValueLost(what, "its link to the artifact store was changed") from None
    store = gateway.value_store
    if store is None:
        raise ConfigurationError(
            f"could not read {what}: it is in the artifact store {shown}; set PERDURE_ARTIFACTS of this process to it"
        )
    return await store.read(what, name, size)


def linked_object(field: str) -> str | None:
    """Return the name of the object that a field links, None for any other field."""
    found = _LINK.fullmatch(field)
    return None if found is None else found[1]


def _digest(place: str, stored: bytes) -> str:
    found = hashlib.blake2b(place.encode("utf-8", "surrogatepass") + b"\0", digest_size=_DIGEST // 2)
    found.update(stored)
    return found.hexdigest()


def bytes_as_json(value: bytes) -> bytes:
    """Return bytes that are not text as JSON."""
    return b'{"base64":"%b"}' % base64.b64encode(value)

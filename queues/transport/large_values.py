"""Large values: cut into chunks, which are fields of a hash, so that no command holds up Redis for long.

A value above the payload limit is stored in chunks first, and then a reference in its place. A reference is one line
that begins with `#`, which no JSON does. It has the digest of the chunks, so that damage is noticed, and by which their
fields are named: a value that is stored again after a crash takes no more space.

If the gateway has a value store, the largest values are its objects, encrypted as chunks are. In Redis there is one
chunk then, the link. Its name contains the hash of the object, so that the objects of live tasks can be listed.

Pages of the fields of a hash, complete also if another server process answers for the later ones.

Each server process puts the fields of a hash in another order, so a cursor of HSCAN means nothing to the server that
answers after a restart, a failover or a resharding: it would leave out fields. So each page is read together with the
`run_id` of the server (https://redis.io/docs/latest/commands/info/), and if that has changed, the scan starts again.

Uploads: data of a task that is not stored yet, written in portions to keys with a TTL.

The script that stores the task renames them to keys of the task (see upload.lua). So the task has all of them or none,
no command holds up Redis for long, and what is left of a caller that dies expires.

Large arguments: stored in chunks before their task, whose record they become part of when it is stored.

The chunks are written to a key with a TTL, the upload. The script that stores the task renames the upload to the task's
record, so the chunks belong to the task from then on, and expire with it. The message has a reference in their place.
The object of arguments in the value store is saved before their upload, which has the link to it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from ..errors import ConfigurationError, LargeValueLost
from ..keys import Partition
from ..security.encryption import TaskCipher, argument_chunks, arguments_field
from ..security.secret_arguments import SecretPaths
from .backoff import retry_while_unavailable
from .gateway import Gateway
from .pipelining import Argument
from .scripts import pairs, queue_script
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


_PAGE: Final = queue_script("hash_page")


class ScanCursor(NamedTuple):
    """Position of a scan. process: `run_id` of the server, empty if it is unknown."""

    process: bytes
    position: bytes

    @property
    def is_end(self) -> bool:
        """Whether all fields have been read. A scan at its start is not."""
        return self.position == b"0"


SCAN_START: Final = ScanCursor(b"", b"")


async def scan_page(
    gateway: Gateway, key: str, cursor: ScanCursor, pattern: str, count: int
) -> tuple[ScanCursor, dict[bytes, bytes]]:
    """Return the next cursor, and the fields of a page. A field may be in several pages.

    count: number of fields of the hash that the server looks at.
    """
    process, position, found = await gateway.run(_PAGE, [key], [cursor.position or 0, pattern, count])
    if cursor.position and process != cursor.process:
        return SCAN_START, {}
    return ScanCursor(process, position), pairs(found)


UPLOAD_ATTEMPTS: Final = 3
"""Attempts to store a task before its uploads are gone."""

_CHUNK = queue_script("upload_chunk")
_EVENTS = queue_script("upload_events")

_TTL: Final = 600_000
"""Milliseconds for which an upload is kept after its last portion."""

_PORTION: Final = 1_000
"""Largest number of arguments of a portion: Redis adds them in less than a millisecond."""


class FieldUpload:
    """Upload of fields of a hash. Repeated, it changes nothing.

    Attributes:
        count: Number of fields.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self.key = key
        self.count = 0
        self._gateway = gateway
        self._portion: list[Argument] = []
        self._size = 0

    async def put(self, name: Argument, value: Argument) -> None:
        """Add a field."""
        self.count += 1
        await self._add([name, value])

    async def flush(self) -> None:
        """Write the last portion."""
        if self._portion:
            await self._gateway.run(_CHUNK, [self.key], [_TTL, *self._portion])
            self._portion, self._size = [], 0

    async def _add(self, part: list[Argument]) -> None:
        self._portion += part
        self._size += sum(len(one) for one in part if isinstance(one, bytes))
        if self._size >= CHUNK_BYTES or len(self._portion) >= _PORTION:
            await self.flush()


class LogUpload(FieldUpload):
    """Upload of the entries of a log, in their order.

    Attributes:
        count: Number of entries.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        super().__init__(gateway, key)
        self._written = 0

    async def add(self, entry: str, fields: Mapping[str, Argument]) -> None:
        """Add an entry. entry: its id; `*` for the time of Redis."""
        self.count += 1
        await self._add([entry, len(fields), *(part for pair in fields.items() for part in pair)])

    async def flush(self) -> None:
        """Write the last portion."""
        if self._portion:
            await self._gateway.run(_EVENTS, [self.key], [_TTL, self._written, *self._portion])
            self._portion, self._size, self._written = [], 0, self.count


LARGE_ARGUMENTS: Final = 2
"""Data format that a worker must know to read large arguments."""

_PLACE: Final = "args"


class LargeArguments(NamedTuple):
    """Arguments of a task that is not stored yet."""

    task_id: str
    value: CutValue

    @property
    def reference(self) -> LargeValue:
        """The reference to the arguments."""
        return self.value.reference

    @property
    def stored(self) -> bytes:
        """The arguments as they are stored."""
        return b"".join(self.value.chunks) if self.value.object is None else self.value.object

    async def upload(self, gateway: Gateway, key: str) -> None:
        """Store the object, if there is one, and the chunks one by one."""
        await self.value.save_object(gateway, f"the arguments of task {self.task_id}")
        upload = FieldUpload(gateway, key)
        for number, chunk in enumerate(self.value.chunks):
            await upload.put(self.reference.field(_PLACE, number), chunk)
        await upload.flush()


def cut_arguments(
    cipher: TaskCipher, task_id: str, task: str, secrets: SecretPaths, arguments: bytes, store: ValueStore | None
) -> LargeArguments:
    """Cut arguments, as JSON, encrypted if keys are set. store: see `cut`."""
    stored = cipher.encrypt(argument_chunks(task, secrets), arguments)
    return LargeArguments(task_id, cut(_PLACE, stored, size=len(arguments), store=store))


async def store_with_upload(
    gateway: Gateway,
    partition: Partition,
    large: LargeArguments | None,
    store: Callable[[Sequence[str]], Awaitable[Any]],
) -> Any:
    """Store one task, after the upload of its large arguments if it has any; return the answer of its script.

    Args:
        store: Runs the script with the upload among its keys. The answer is None if the upload is not complete.

    Raises:
        LargeValueLost: The upload expired, again and again, before the task was stored.
    """
    if large is None:
        return await store(())
    upload = partition.upload(large.task_id, large.reference.digest)
    for attempt in range(UPLOAD_ATTEMPTS):
        # Most scripts leave a task alone that is stored already; one that replaces it asks for the upload.
        if attempt or not await gateway.command("EXISTS", partition.record(large.task_id)):
            await large.upload(gateway, upload)
        answer = await store([upload])
        if answer is not None:
            return answer
    raise LargeValueLost(f"the arguments of task {large.task_id}", "their chunks expired before the task was stored")


async def read_arguments(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    task: str,
    secrets: SecretPaths,
    stored: bytes,
) -> bytes:
    """Return stored arguments as decrypted JSON, large ones from their chunks.

    Args:
        task: Name of the task.
        secrets: Paths of its secrets, as its envelope has them.

    Raises:
        DecryptionError: They cannot be decrypted.
        LargeValueLost: A chunk is missing or damaged.
    """
    cipher = gateway.encryptor.of(partition, task_id)
    reference = LargeValue.decode(stored)
    if reference is None:
        return cipher.decrypt(arguments_field(task, secrets), stored)
    decrypt = partial(cipher.decrypt, argument_chunks(task, secrets))
    what = f"the arguments of task {task_id}"
    return await read_large(gateway, partition.record(task_id), _PLACE, _PLACE, reference, decrypt, what)

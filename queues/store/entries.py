"""Entries of a namespace of the key-value store: read, listed, and changed in atomic batches.

The fence of a task and the idempotency of batches are in lua/store.lua and lua/store_write.lua. A value above the
payload limit is stored in chunks before the batch that refers to them, under a key that the batch renames.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from ..envelope import check_size
from ..errors import LargeValueLost, StoreConflict, StoreError, StoreFenced, StoreFull
from ..junk import report_once
from ..keys import Namespace
from ..transport.gateway import Gateway
from ..transport.large_values import FieldUpload, LargeValue, cut, read_large
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from .names import Name, StoreNames, shown_name

MAX_KEY: Final = 1024
"""Most bytes of a key."""

MAX_CHANGES: Final = 1000
"""Most changes of a batch."""

MAX_ENTRIES: Final = 100_000
"""Most entries of a namespace."""

MAX_TTL_MS: Final = 100 * 366 * 86_400_000
"""Longest TTL of an entry in milliseconds."""

_PAGE: Final = 200
"""Keys that a page of a list looks at."""

_PAGE_BYTES: Final = 512 * 1024
"""Bytes of values after which a page of a list ends."""

_BATCHES: Final = (3_600_000, 100_000)
"""Milliseconds for which a namespace knows the id of a batch, and the most of them."""

_ACTS: Final = (7 * 86_400_000, 10_000)
"""The same for ids of batches of steps, which may be repeated after days."""

_ATTEMPTS: Final = 3
"""Attempts to store a batch before its uploads have expired, or to read a large value that is replaced meanwhile."""

_READ: Final = queue_script("store_read")
_LIST: Final = queue_script("store_list")
_WRITE: Final = queue_script("store_write")

Form = Literal["j", "b"]
"""Form of a value: JSON, or bytes. In upper case it is stored as a reference to chunks."""

_FORMS: Final[dict[bytes, Form]] = {b"j": "j", b"J": "j", b"b": "b", b"B": "b"}


class Fence(NamedTuple):
    """Token of a delivery, with which its run uses namespaces.

    Attributes:
        task_id: the task.
        entry: entry id of its message.
        delivery: number of the delivery.
    """

    task_id: str = ""
    entry: bytes = b"0-0"
    delivery: int = 0

    @property
    def arguments(self) -> list[Argument]:
        """Arguments of scripts, see store.lua."""
        milliseconds, _, number = self.entry.partition(b"-")
        return [self.task_id, milliseconds, number or 0, self.delivery]


NO_FENCE: Final = Fence()
"""The token of a program that runs no task."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as it is stored. data: JSON or bytes, None in a list without values. expires: ms, 0 for never."""

    key: str
    version: int
    expires: int
    form: Form
    data: bytes | None = field(repr=False)


class EntryChange(NamedTuple):
    """A change of a batch.

    Attributes:
        act: what it does; `prefix` deletes the keys that begin with `key`.
        key: of the entry.
        expected: version that the entry must have, 0 for none; None for any.
        ttl_ms: milliseconds after which the entry expires; 0 for never.
        form, data: the value.
    """

    act: Literal["put", "delete", "check", "prefix"]
    key: str
    expected: int | None = None
    ttl_ms: int = 0
    form: Form = "j"
    data: bytes = b""


class NamespaceEntries:
    """Entries of one namespace."""

    def __init__(
        self, gateway: Gateway, namespace: Namespace, name: Name, names: StoreNames, *, payload_limit: int, limit: int
    ) -> None:
        """Args:
        payload_limit: bytes of a value above which it is stored in chunks.
        limit: most bytes of a value.
        """
        self._gateway = gateway
        self._keys = namespace.store(name)
        self._cipher = gateway.encryptor.of(self._keys.place, self._keys.digest)
        self._name = name
        self._names = names
        self._shown = shown_name(name)
        self._payload_limit = payload_limit
        self._limit = limit

    async def read(self, keys: Sequence[str], fence: Fence = NO_FENCE) -> list[StoredEntry | None]:
        """Return entries, as they are at one moment; None for each that does not exist.

        Raises `StoreFenced`, `StoreError`, `DecryptionError`.
        """
        await self._names.check()
        for attempt in range(_ATTEMPTS):
            args = [*fence.arguments, *(check_key(key) for key in keys)]
            found = self._checked(await self._gateway.run(_READ, [self._keys.entries, *self._fence_keys], args), fence)
            try:
                return [
                    None if one is None else await self._decode(key, one) for key, one in zip(keys, found, strict=True)
                ]
            except LargeValueLost as error:  # it may have been replaced between the two reads
                if attempt + 1 == _ATTEMPTS:
                    problem = str(error).partition("; replay")[0]
                    raise StoreError(f"{problem}; store the entry again, or delete it") from None
        raise AssertionError

    async def scan(
        self,
        prefix: str = "",
        *,
        after: str = "",
        reverse: bool = False,
        values: bool = True,
        limit: int | None = None,
        fence: Fence = NO_FENCE,
    ) -> AsyncIterator[StoredEntry]:
        """Yield entries sorted by the bytes of their keys, page by page.

        Args:
            prefix: what their keys begin with.
            after: key after which the list continues, in its order.
            reverse: the last key first.
            values: with their values.
            limit: most entries.
        """
        await self._names.check()
        low = b"[" + prefix.encode() if prefix else b"-"
        high = b"(" + prefix.encode() + b"\xff" if prefix else b"+"
        if after:
            edge = b"(" + check_key(after)
            low, high = (low, edge) if reverse else (edge, high)
        left = limit
        keys = [self._keys.entries, self._keys.names, *self._fence_keys]
        while left is None or left > 0:
            page = _PAGE if left is None else min(left, _PAGE)
            args: list[Argument] = [
                *fence.arguments,
                low,
                high,
                "1" if reverse else "",
                page,
                _PAGE_BYTES,
                "1" if values else "",
            ]
            cursor, *found = self._checked(await self._gateway.run(_LIST, keys, args), fence)
            for key, packed in zip(found[::2], found[1::2], strict=True):
                entry = await self._listed(key, packed, values, fence)
                if entry is not None:
                    yield entry
            left = None if left is None else left - len(found) // 2
            if not cursor:
                return
            low, high = (low, b"(" + cursor) if reverse else (b"(" + cursor, high)

    async def write(
        self, changes: Sequence[EntryChange], *, batch: str = "", act: str = "", fence: Fence = NO_FENCE
    ) -> int:
        """Execute changes, all or none. Return the version that the entries have from then on.

        Args:
            batch: id under which the changes are done once; by default, one of this call.
            act: id of the act of a step, which may make other changes when it is repeated.

        Raises:
            StoreConflict: an entry has another version than expected.
            StoreFull: the namespace has the most entries.
            StoreFenced: a later run of the task has used the namespace.
            PayloadTooLarge: a value is larger than the limit.
            StoreError: there are too many changes.
        """
        if len(changes) > MAX_CHANGES:
            raise StoreError(
                f"batch of namespace {self._shown!r} has {len(changes):,} changes, over the limit of {MAX_CHANGES:,}: "
                "make several batches"
            )
        await self._names.check()
        keep, most = _ACTS if act else _BATCHES
        batch = batch or uuid.uuid4().hex
        keys = [self._keys.entries, self._keys.names, self._keys.expiries, *self._fence_keys]
        keys.append(self._keys.acts if act else self._keys.batches)
        args: list[Argument] = [*fence.arguments, batch, act, keep, most, MAX_ENTRIES]
        uploads = []
        for number, change in enumerate(changes):
            encoded, upload = self._encode(change, f"{batch}.{number}")
            args += encoded
            if upload is not None:
                uploads.append(upload)
        if not self._names.is_added(self._name) and any(change.act == "put" for change in changes):
            await self._names.add(self._name)
        for _ in range(_ATTEMPTS):
            for upload in uploads:
                await upload.store(self._gateway)
            answer, *rest = await self._gateway.run(_WRITE, keys, args)
            if answer != b"upload":
                break
        else:
            raise StoreError(
                f"could not store a large value in namespace {self._shown!r}: its upload expires too early"
            )
        return await self._answered(answer, rest, changes, fence)

    async def _answered(self, answer: bytes, rest: list[bytes], changes: Sequence[EntryChange], fence: Fence) -> int:
        if answer == b"fenced":
            raise StoreFenced(fence.task_id, self._shown)
        if answer == b"conflict":
            key, version = rest[0].decode(), int(rest[1])
            expected = next(change.expected for change in changes if change.key == key and change.expected is not None)
            raise StoreConflict(self._shown, key, expected, version)
        if answer == b"full":
            raise StoreFull(self._shown, int(rest[0]))
        if rest[1]:
            await self._names.add(self._name)
        return int(rest[0])

    @property
    def _fence_keys(self) -> tuple[str, str]:
        return self._keys.fences, self._keys.users

    def _checked(self, reply: list[Any], fence: Fence) -> list[Any]:
        if reply[0] == b"fenced":
            raise StoreFenced(fence.task_id, self._shown)
        return reply[1:]

    def _encode(self, change: EntryChange, upload: str) -> tuple[list[Argument], _Upload | None]:
        key = check_key(change.key) if change.act != "prefix" else change.key.encode()
        expected = "" if change.expected is None else change.expected
        if change.act != "put":
            return [change.act, key, expected, 0, "", b"", ""], None
        what = self._what(change.key)
        check_size(what, len(change.data), self._limit, "large_limit")
        sealed = self._cipher.encrypt(_kind(change.form, change.key), change.data)
        head: list[Argument] = ["put", key, expected, change.ttl_ms]
        if len(change.data) <= self._payload_limit:
            return [*head, change.form, sealed, ""], None
        value = cut(change.key, sealed, size=len(change.data))
        stored = upload.encode() + b" " + value.reference.encode()
        return [*head, change.form.upper(), stored, upload], _Upload(
            self._keys.upload(upload), value.reference, value.chunks
        )

    async def _listed(self, name: bytes, packed: bytes, values: bool, fence: Fence) -> StoredEntry | None:
        """Return an entry of a list; None for one that is gone, or that another program has changed."""
        try:
            return await self._listed_entry(name.decode(), packed, values, fence)
        except (UnicodeDecodeError, StoreError) as error:
            report_once(f"an entry of namespace {self._shown!r} is left out of lists: {name!r}: {error}")
            return None

    async def _listed_entry(self, key: str, packed: bytes, values: bool, fence: Fence) -> StoredEntry | None:
        if not values:
            return self._head(key, packed)
        try:
            return await self._decode(key, packed)
        except LargeValueLost:  # it was replaced or deleted since the page was read
            (entry,) = await self.read([key], fence)
            return entry

    def _head(self, key: str, packed: bytes) -> StoredEntry:
        try:
            version, expires, form, _ = packed.split(b" ", 3)
            return StoredEntry(key, int(version), int(expires), _FORMS[form], None)
        except (ValueError, LookupError):
            raise self._damaged(key) from None

    def _damaged(self, key: str) -> StoreError:
        return damaged_entry(key, self._shown)

    async def _decode(self, key: str, packed: bytes) -> StoredEntry:
        entry = self._head(key, packed)
        form, data = packed.split(b" ", 3)[2:]
        kind = _kind(entry.form, key)
        if form.islower():
            return replace(entry, data=self._cipher.decrypt(kind, data))
        upload, _, reference = data.partition(b" ")
        try:
            value = LargeValue.decode(reference)
        except LargeValueLost:
            value = None
        if value is None:
            raise self._damaged(key)
        found = await read_large(
            self._gateway,
            self._keys.value(upload.decode(errors="replace")),
            "c",
            key,
            value,
            lambda stored: self._cipher.decrypt(kind, stored),
            self._what(key),
        )
        return replace(entry, data=found)

    def _what(self, key: str) -> str:
        return f"entry {key!r} of namespace {self._shown!r}"


def damaged_entry(key: str, shown: str) -> StoreError:
    """Return the error of an entry that no version of Perdure has written. shown: its namespace."""
    return StoreError(f"could not read entry {key!r} of namespace {shown!r}: another program has changed it; delete it")


class _Upload(NamedTuple):
    """Chunks of a large value that are stored before their entry."""

    key: str
    reference: LargeValue
    chunks: Sequence[bytes]

    async def store(self, gateway: Gateway) -> None:
        upload = FieldUpload(gateway, self.key)
        for number, chunk in enumerate(self.chunks):
            await upload.put(self.reference.field("c", number), chunk)
        await upload.flush()


def check_key(key: object) -> bytes:
    """Return the bytes of a key. Raises `ValueError`."""
    try:
        data = key.encode() if isinstance(key, str) else b""
    except UnicodeEncodeError:
        data = b""
    if not 1 <= len(data) <= MAX_KEY:
        raise ValueError(f"key of the store must be text of 1 to {MAX_KEY:,} bytes in UTF-8, got {key!r}")
    return data


def digest_changes(changes: Sequence[EntryChange]) -> str:
    """Return a hash of changes."""
    digest = hashlib.blake2b(digest_size=16)
    for change in changes:
        for part in (change.act, change.key, repr((change.expected, change.ttl_ms, change.form))):
            digest.update(b"%d:%b" % (len(part), part.encode()))
        digest.update(b"%d:%b" % (len(change.data), change.data))
    return digest.hexdigest()


def as_time(milliseconds: int) -> datetime:
    """Return a time of Redis' clock."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _kind(form: Form, key: str) -> str:
    """Return the kind of a value, which cannot be decrypted under another key or in another form."""
    return f"entry:{form}:{key}"

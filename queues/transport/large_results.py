"""Large results of steps: read into the records that refer to them, and cut again where a task is copied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from ..errors import UnreadableRecord
from ..keys import Partition
from ..security.encryption import TaskCipher, step_chunks
from .gateway import Gateway
from .large_values import SCAN_START, LargeValue, cut, read_large, scan_page
from .pipelining import Argument

_PAGE: Final = 512
"""Largest number of fields of a checkpoint that are read at once."""

_PAGE_BYTES: Final = 1 << 20
"""Size of a page that is aimed at, by the size of the one before."""

_MAX_SCANNED: Final = 8 * _PAGE
"""Fields of a page of which few match: it costs no transfer."""


async def scan_fields(gateway: Gateway, key: str, pattern: str) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the fields of a hash whose names match, each once, and their values. It reads about a megabyte at once.

    Raises `UnreadableRecord` for a name that is not UTF-8.
    """
    cursor, count = SCAN_START, _PAGE // 8
    seen: set[bytes] = set()  # a field may be returned twice
    while not cursor.is_end:
        cursor, page = await scan_page(gateway, key, cursor, pattern, count)
        for name, value in page.items():
            if name not in seen:
                seen.add(name)
                yield _decoded(key, name), value
        size = sum(map(len, page.values()))
        wanted = _PAGE_BYTES * count // size if size else _MAX_SCANNED
        count = max(8, min(2 * count, wanted, _MAX_SCANNED))


def _decoded(key: str, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        problem = f"the name of a field must be UTF-8, got {name[:80]!r}"
        raise UnreadableRecord(key, problem, "delete the field") from None


async def recorded_results(gateway: Gateway, partition: Partition, task_id: str) -> dict[str, bytes]:
    """Return the decrypted step records of a task, by key, with large results in place of the references to them.

    Raises `DecryptionError`, and as `read_large` does.
    """
    return {key: record async for key, record in scan_results(gateway, partition, task_id)}


async def scan_results(gateway: Gateway, partition: Partition, task_id: str) -> AsyncIterator[tuple[str, bytes]]:
    """Yield what `recorded_results` returns, one record in memory at a time."""
    cipher, checkpoint = gateway.encryptor.of(partition, task_id), partition.steps(task_id)
    async for name, value in scan_fields(gateway, checkpoint, "d:*"):
        key = name.removeprefix("d:")
        head, _, result = (record := cipher.decrypt(name, value)).partition(b"\n")
        if (large := LargeValue.decode(result)) is not None:
            what = f"the result of step {key!r} of task {task_id}"
            decrypt = partial(cipher.decrypt, step_chunks(key))
            record = b"%b\n%b" % (head, await read_large(gateway, checkpoint, "c", key, large, decrypt, what))
        yield key, record


async def stored_record(
    gateway: Gateway, cipher: TaskCipher, task_id: str, key: str, record: bytes, limit: int
) -> list[Argument]:
    """Return the fields of a step record and their values, a large result in chunks. limit: bytes of a record."""
    fields: list[Argument] = []
    if len(record) > limit:
        head, _, result = record.partition(b"\n")
        stored = cipher.encrypt(step_chunks(key), result)
        value = cut(key, stored, size=len(result), store=gateway.value_store)
        await value.save_object(gateway, f"the result of step {key!r} of task {task_id}")
        for number, chunk in enumerate(value.chunks):
            fields += (value.reference.field("c", number), chunk)
        record = b"%b\n%b" % (head, value.reference.encode())
    return [*fields, f"d:{key}", cipher.encrypt(f"d:{key}", record)]

"""Large results of steps: read into the records that refer to them, and cut again where a task is copied."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from ..keys import Partition
from ..security import TaskCipher, step_chunks
from .gateway import Argument, Gateway
from .large_values import LargeValue, cut, read_large
from .scripts import pairs

__all__ = ["recorded_results", "stored_record"]

_PAGE: Final = 512
"""Fields of a checkpoint that are read at once."""


async def recorded_results(gateway: Gateway, partition: Partition, task_id: str) -> dict[str, bytes]:
    """Return the decrypted step records of a task, by key, with large results in place of the references to them.

    Raises `DecryptionError`, and as `read_large` does.
    """
    cipher, checkpoint = gateway.encryptor.of(partition, task_id), partition.steps(task_id)
    fields: dict[bytes, bytes] = {}
    cursor: Any = None
    while cursor != b"0":
        cursor, page = await gateway.command("HSCAN", checkpoint, cursor or 0, "MATCH", "d:*", "COUNT", _PAGE)
        fields.update(pairs(page))
    found: dict[str, bytes] = {}
    for name, value in fields.items():
        key = name[2:].decode()
        head, _, result = (record := cipher.decrypt(f"d:{key}", value)).partition(b"\n")
        if (large := LargeValue.decode(result)) is not None:
            what = f"the result of step {key!r} of task {task_id}"
            decrypt = partial(cipher.decrypt, step_chunks(key))
            record = b"%b\n%b" % (head, await read_large(gateway, checkpoint, "c", key, large, decrypt, what))
        found[key] = record
    return found


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

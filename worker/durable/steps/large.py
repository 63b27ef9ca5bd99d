"""Large results: those above the payload limit are stored in chunks, with a reference in their place.

Those above the limit of large ones are objects of the artifact store, if all workers reach it. Their one chunk is the
link. A run that ends before it stores the link leaves an object that `perdure artifacts gc` deletes.

The chunks are entries of the checkpoint like any other: fenced, numbered, and stored before the entry or the outcome
that refers to them. So Redis never has a reference without its chunks, also after it has lost its last second. A run
that ends in between leaves chunks in the keys of its task, which are deleted with the task.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.errors import PayloadTooLarge
from ....queues.security.encryption import RESULT_CHUNKS, TaskCipher, step_chunks
from ....queues.transport.large_values import CutValue, LargeValue, cut, read_large
from ..run import Run

_BASE64: Final = b'{"base64":'


async def store_step_result(run: Run, key: str, data: bytes, value: Any, size: int) -> bytes:
    """Store the result of a step in chunks, and return the reference for its record.

    Args:
        data, value: The result as JSON, and as the step returns it.
        size: Bytes of the record.

    Raises:
        PayloadTooLarge: It is over the limit of large results.
        ArtifactError: The artifact store did not take it.
        LeaseLost, EntriesLost: See `CheckpointWriter`.
    """
    _check(run, f"the record of step {key!r}", size)
    what = f"the result of step {key!r} of task {run.id}"
    return await _store(run, step_chunks(key), key, Kind.CHUNK, data, value, what)


async def store_task_result(run: Run, data: bytes, value: Any) -> bytes:
    """Store the task's result in chunks, and return the reference for the outcome. See `store_step_result`."""
    _check(run, "the result", len(data))
    return await _store(run, RESULT_CHUNKS, "", Kind.RESULT_CHUNK, data, value, f"the result of task {run.id}")


async def read_step_result(run: Run, key: str, reference: bytes) -> bytes:
    """Return the result that a step's record refers to, as JSON. Raises `LargeValueLost`, `DecryptionError`."""
    value = LargeValue.decode(reference)
    if value is None:
        return reference
    field = run.delivery.partition.steps(run.id)
    what = f"the result of step {key!r} of task {run.id}"
    decrypt = partial(_cipher(run).decrypt, step_chunks(key))
    data = await read_large(run.gateway, field, "c", key, value, decrypt, what)
    run.touch()
    return data


def _check(run: Run, what: str, size: int) -> None:
    limit = max(run.settings.largest_value, run.payload_limit)
    if size > limit:
        raise PayloadTooLarge(what, size, limit, "large_limit")


async def _store(run: Run, kind: str, place: str, entry: Kind, data: bytes, value: Any, what: str) -> bytes:
    raw = type(value) is bytes and data.startswith(_BASE64)
    stored = await asyncio.to_thread(_prepare, run, kind, place, value if raw else data, raw=raw)
    await stored.save_object(run.gateway, what)
    field = "c" if entry is Kind.CHUNK else "result"
    async with run.recorder.large_values:
        for number, chunk in enumerate(stored.chunks):
            name = stored.reference.field(field, number).removeprefix(f"{field}:")
            await run.recorder.put(Entry(entry, name, chunk), wait=True)
            run.touch()
    return stored.reference.encode()


def _prepare(run: Run, kind: str, place: str, data: bytes, *, raw: bool) -> CutValue:
    stored = _cipher(run).encrypt(kind, data)
    return cut(place, stored, size=len(data), raw=raw, store=run.gateway.value_store)


def _cipher(run: Run) -> TaskCipher:
    return run.gateway.encryptor.of(run.delivery.partition, run.id)

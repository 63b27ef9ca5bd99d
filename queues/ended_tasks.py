"""Outcome of a task that has ended, and a copy of such a task for reading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import orjson

from .derived_tasks import TaskPast, past_uploads, upload_past
from .envelope import DEFAULT_PAYLOAD_LIMIT, TASK_ID_PATTERN, Envelope, TaskMessage
from .errors import LargeValueLost, TaskExists, UnreadableRecord
from .keys import Namespace, Partition
from .partitions.route import registered_retention, spread
from .partitions.router import PartitionRouter
from .records import State
from .runtime import RUNTIME
from .security.encryption import ERROR, PROGRESS, RESULT, RESULT_CHUNKS, TaskCipher
from .transport.gateway import Gateway
from .transport.large_values import UPLOAD_ATTEMPTS, FieldUpload, LargeValue, cut, read_large
from .transport.pipelining import Argument
from .transport.scripts import queue_script

_STORE = queue_script("store_ended")

_COUNT: Final = re.compile(rb"[0-9]{1,15}")
_ID: Final = re.compile(TASK_ID_PATTERN[1:-1].encode())
_TEXT: Final = re.compile(rb"[^\x00-\x1f]{1,256}")

OUTCOME_FIELDS: Final[Mapping[str, re.Pattern[bytes]]] = {
    **dict.fromkeys(("at", "finished", "ran", "progress_at"), _COUNT),
    **dict.fromkeys(("attempts", "crashes", "replays", "returned", "unread", "unused_answers", "edited"), _COUNT),
    **dict.fromkeys(("handed_to", "replaced_by"), _ID),
    **dict.fromkeys(("worker", "reason", "dropped"), _TEXT),
}
"""Fields of a record that are not encrypted, and that a copy of an ended task keeps, and their values."""

SEALED_FIELDS: Final = {"result": RESULT, "error": ERROR, "progress": PROGRESS}
"""Encrypted fields that a copy keeps, and the kinds as which they are encrypted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a task that has ended.

    Attributes:
        state: `SUCCEEDED`, `DEAD` or `CANCELLED`.
        fields: Those of `OUTCOME_FIELDS`.
        sealed: Those of `SEALED_FIELDS`, decrypted: a large result as a whole.
    """

    state: State
    fields: Mapping[str, bytes]
    sealed: Mapping[str, bytes] = field(repr=False)


async def read_outcome(gateway: Gateway, partition: Partition, task_id: str, state: State) -> Outcome:
    """Return the outcome of a task. state: that of the task, which has ended.

    Raises:
        UnreadableRecord: A field of the record is damaged.
        DecryptionError: The outcome cannot be decrypted.
        LargeValueLost: A part of a large result is missing.
    """
    record, cipher = partition.record(task_id), gateway.encryptor.of(partition, task_id)
    names = (*OUTCOME_FIELDS, *SEALED_FIELDS)
    read = zip(names, await gateway.command("HMGET", record, *names), strict=True)
    found: dict[str, bytes] = {name: value for name, value in read if value is not None}
    fields = {name: found[name] for name in OUTCOME_FIELDS if name in found}
    for name, value in fields.items():
        if not OUTCOME_FIELDS[name].fullmatch(value):
            raise UnreadableRecord(record, f"{name} is not valid: {value[:80]!r}")
    sealed = {name: cipher.decrypt(kind, found[name]) for name, kind in SEALED_FIELDS.items() if name in found}
    if (large := LargeValue.decode(sealed.get("result", b""))) is not None:
        decrypt, what = partial(cipher.decrypt, RESULT_CHUNKS), f"the result of task {task_id}"
        sealed["result"] = await read_large(gateway, record, "result", "", large, decrypt, what)
    for name, data in sealed.items():
        try:
            orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise UnreadableRecord(record, f"{name} must be JSON: {error}") from None
    return Outcome(state, fields, sealed)


async def store_ended(
    gateway: Gateway,
    namespace: Namespace,
    queue: str,
    task_id: str,
    *,
    envelope: bytes,
    arguments: bytes,
    past: TaskPast,
    outcome: Outcome,
    retention: float,
) -> Partition:
    """Store a copy of a task that has ended, encrypted for this deployment; return its partition. It does not run.

    What it has left is uploaded in portions. The task appears at the end, with all of it; see store_ended.lua. A dead
    one has a dead letter, which may be replayed.

    Args:
        retention: Seconds for which the task is kept.

    Raises:
        TaskExists: The id belongs to another task.
        LargeValueLost: The uploads expired, again and again, before the task was stored.
    """
    token = f"import {RUNTIME.token(8)}"
    cipher = gateway.encryptor.of(namespace.partition(queue), task_id)
    plain = TaskMessage(task_id, envelope, arguments, spread(task_id), own_id=True)
    message = plain.encrypted(cipher, store=gateway.value_store)
    fields: dict[str, Argument] = {"state": outcome.state.value, **outcome.fields}
    fields |= {"events": past.events, "entries": past.entries}
    fields |= {} if past.format is None else {"format": past.format}
    payload: dict[str, Argument] = {"env": message.envelope, "args": message.arguments}
    letter: dict[str, Argument] = {}
    if outcome.state is State.DEAD:
        letter = {**_letter(task_id, Envelope.decode(envelope).task, outcome, cipher), **payload}
    else:
        fields |= payload
    outcome_fields = await _stored_outcome(gateway, task_id, outcome, cipher)

    async def store(partition: Partition) -> bool:
        keys = [partition.record(task_id), partition.steps(task_id), partition.log(task_id), partition.inbox(task_id)]
        others = [partition.closed, partition.timeline, partition.retentions, partition.dead]
        kept = (round(retention * 1000), registered_retention(retention))
        for _ in range(UPLOAD_ATTEMPTS):
            record = FieldUpload(gateway, partition.upload(task_id, f"{RUNTIME.token(8)}.record"))
            steps, log, inbox = past_uploads(gateway, partition, task_id)
            head = await upload_past(gateway, cipher, task_id, past, steps, log, inbox)
            for name, value in {**fields, **outcome_fields, **({"head": head} if head else {})}.items():
                await record.put(name, value)
            await record.flush()
            if message.large is not None:
                await message.large.upload(gateway, record.key)
                record.count += len(message.large.value.chunks)
            uploads = (record, steps, log, inbox)
            args: list[Argument] = [token, task_id, *kept, *(upload.count for upload in uploads)]
            args += [part for pair in letter.items() for part in pair]
            answer = await gateway.run(_STORE, [*keys, *(upload.key for upload in uploads), *others], args)
            if answer == 0:
                raise TaskExists(task_id)
            if answer is not None:
                return bool(answer == 1)
        raise LargeValueLost(f"the past of task {task_id}", "parts of it expired before the task was stored")

    return await PartitionRouter(gateway, namespace, queue, plain.lane).place(spread(task_id), store)


async def _stored_outcome(gateway: Gateway, task_id: str, outcome: Outcome, cipher: TaskCipher) -> dict[str, Argument]:
    """Return the encrypted fields of a record, a large result in chunks."""
    found: dict[str, Argument] = {}
    for name, data in outcome.sealed.items():
        stored = data
        if name == "result" and len(data) > DEFAULT_PAYLOAD_LIMIT:
            value = cut("", cipher.encrypt(RESULT_CHUNKS, data), size=len(data), store=gateway.value_store)
            await value.save_object(gateway, f"the result of task {task_id}")
            found |= {value.reference.field("result", number): chunk for number, chunk in enumerate(value.chunks)}
            stored = value.reference.encode()
        found[name] = cipher.encrypt(SEALED_FIELDS[name], stored)
    return found


def _letter(task_id: str, task: str, outcome: Outcome, cipher: TaskCipher) -> dict[str, Argument]:
    """Return the fields of a dead letter, as bury.lua writes them, without the message."""
    evidence = outcome.sealed.get("error", b'{"error":"?","message":"","traceback":""}')
    letter: dict[str, Argument] = {"id": task_id, "task": task, "evidence": cipher.encrypt(ERROR, evidence)}
    missing = {"reason": b"unknown", "attempts": b"0", "crashes": b"0", "worker": b"", "at": b"0"}
    return letter | {name: outcome.fields.get(name, value) for name, value in missing.items()}

"""The inbox of a task: messages that others send it, in order, each of them once.

It lies in the task's record, so that it has the record's life, and whatever is done with a message is one atomic act
with everything else of the task. Fields of the record:

    m:N        the message of number N, from 1: when it was sent (ms of Redis' clock), a space, JSON (or sealed JSON)
    mail       the number of the last one that was sent
    used       all up to this number were used
    mi:DIGEST  the number that the message of this id was given (the digest is of the id), for as many as an inbox holds
    mn:N       the digest of the id of message N
    waits      what the task waits for, while it is scheduled; a message makes it due

A message is sent by `send_message.lua`, and leaves in the act of `write_checkpoint.lua` that records its use.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
from pydantic_core import PydanticSerializationError, to_json

from .envelope import DEFAULT_PAYLOAD_LIMIT, check_size, new_task_id
from .errors import DecryptionError, InboxError, InboxFull, TaskEnded, TaskNotFound
from .inspection import find_task
from .keys import Namespace, Partition
from .records import State
from .security import MESSAGE, TaskCipher
from .transport import Gateway, queue_script

__all__ = [
    "MOST_MESSAGES",
    "InboxMessage",
    "Sent",
    "drop_message",
    "forward_messages",
    "last_message",
    "read_inbox",
    "send_message",
]

_SEND = queue_script("send_message")

MOST_MESSAGES: Final = 1000
"""Messages that an inbox holds, and ids that it knows."""

_PAGE: Final = 32
"""Messages that are read together: one may have as many bytes as a payload."""

_ANY_SIZE: Final = 1 << 62
"""Of what was sent before, the size was seen to then."""

_BESIDES: Final = 256
"""Bytes that may be added to a message in what its reader records of it."""

_MOVES: Final = 128
"""How often a message follows a task that was handed on to another: more often than that can be."""


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """A message. number: its place in the inbox, from 1. sender: what the sender calls itself; of a task, its id.

    content: JSON data. at: when it was sent, in milliseconds of Redis' clock since the epoch. problem: why it cannot be
    read, where it cannot.
    """

    number: int
    id: str
    sender: str
    content: Any
    at: int
    problem: str | None = None

    def summary(self) -> dict[str, Any]:
        """The message as plain data, for programs."""
        told = {"number": self.number, "id": self.id, "sender": self.sender, "content": self.content, "at": self.at}
        return told if self.problem is None else told | {"problem": self.problem}


class Sent(NamedTuple):
    """What became of a message: who has it, its number there, and the state that this task was in."""

    task_id: str
    number: int
    state: State


async def send_message(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    content: Any,
    *,
    sender: str = "",
    message_id: str | None = None,
    limit: int = DEFAULT_PAYLOAD_LIMIT,
) -> Sent:
    """Put a message into a task's inbox; to that of the task which goes on, where it was handed on to another.

    content: JSON data, pydantic models included. message_id: sent again under the same id, it is there once. limit:
    bytes that it may have. Raises `TaskNotFound`, `TaskEnded`, `InboxFull`, `PayloadTooLarge`, and `TypeError` for what
    is no JSON.
    """
    message_id = message_id or new_task_id()
    data = _encode(message_id, sender, content, limit)
    digest = hashlib.blake2b(message_id.encode(), digest_size=12).hexdigest()
    known: Partition | None = partition
    for _ in range(_MOVES):
        if known is None:
            break
        sealed = gateway.encryptor.of(known, task_id).encrypt(MESSAGE, data)
        keys = [known.record(task_id), known.due, known.nudge]
        answer, *told = await gateway.run(_SEND, keys, [task_id, digest, sealed, MOST_MESSAGES])
        match answer:
            case b"sent":
                return Sent(task_id, int(told[0]), State(told[1].decode()))
            case b"ended":
                raise TaskEnded(task_id, told[0].decode())
            case b"full":
                raise InboxFull(task_id, int(told[0]))
            case b"missing":
                break
        task_id = told[0].decode()
        known = await find_task(gateway, Namespace(known.namespace), task_id)
    raise TaskNotFound(task_id, f"namespace {partition.namespace!r}")


def _encode(message_id: str, sender: str, content: Any, limit: int) -> bytes:
    try:
        data = to_json({"id": message_id, "sender": sender, "content": content}, inf_nan_mode="strings")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"a message is JSON data, and this is none: {error}") from None
    check_size("the message", len(data) + _BESIDES, limit)
    return data


async def read_inbox(gateway: Gateway, partition: Partition, task_id: str) -> AsyncIterator[InboxMessage]:
    """The messages that were not used yet, in order, page by page; of a task that is not known, none."""
    record, seal = partition.record(task_id), gateway.encryptor.of(partition, task_id)
    used, mail = (int(value or 0) for value in await gateway.command("HMGET", record, "used", "mail"))
    for start in range(used + 1, mail + 1, _PAGE):
        numbers = range(start, min(start + _PAGE, mail + 1))
        found = await gateway.command("HMGET", record, *(f"m:{number}" for number in numbers))
        for number, stored in zip(numbers, found, strict=True):
            if stored is not None:
                yield _message(number, stored, seal)


def _message(number: int, stored: bytes, seal: TaskCipher) -> InboxMessage:
    """A message as it is stored; one that is broken hides no other."""
    at, _, data = stored.partition(b" ")
    sent = int(at) if at.isdigit() else 0
    try:
        told = orjson.loads(seal.decrypt(MESSAGE, data))
        return InboxMessage(number, str(told["id"]), str(told["sender"]), told["content"], sent)
    except DecryptionError as error:
        problem = str(error)
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        problem = f"it is no message: {error}"
    return InboxMessage(number, "", "", None, sent, problem)


async def last_message(gateway: Gateway, partition: Partition, task_id: str) -> tuple[int, int]:
    """The number of the last message that was sent to a task, and the time on Redis' clock, in milliseconds."""
    record = partition.record(task_id)
    mail, time = await gateway.pipeline([("HGET", record, "mail"), ("TIME",)], node_of=record)
    return int(mail or 0), int(time[0]) * 1000 + int(time[1]) // 1000


async def forward_messages(
    gateway: Gateway, partition: Partition, task_id: str, to: Partition, to_id: str
) -> list[InboxMessage]:
    """Put the messages that a task has not read into the inbox of the one that goes on in its place.

    Returns those that could not be moved: broken ones, and what would not fit. Asked again, it moves none twice. Where
    the task was marked as `Kind.MOVED` before, and is settled after this, no message is lost whenever it is sent.
    """
    left: list[InboxMessage] = []
    full = False
    async for message in read_inbox(gateway, partition, task_id):
        if message.problem is not None or full:
            left.append(message)
            continue
        told = {"sender": message.sender, "message_id": message.id}
        try:
            await send_message(gateway, to, to_id, message.content, **told, limit=_ANY_SIZE)
        except InboxError:
            left.append(message)
            full = True
        else:
            await drop_message(gateway, partition, task_id, message.number)
    return left


async def drop_message(gateway: Gateway, partition: Partition, task_id: str, number: int) -> bool:
    """Take a message out of an inbox unused; whether it was there."""
    return bool(await gateway.command("HDEL", partition.record(task_id), f"m:{number}", repeatable=False))

"""The inbox of a task: messages to it, in order, each stored once.

An inbox is a hash of its own, so that a sender needs no right to write the task's record. It has the record's lifetime:
each script that gives the record a TTL gives it to the inbox, too. Fields:

    m:N        message with the number N: the time of the send (ms of Redis' clock), a space, JSON (or encrypted JSON)
    n:P        number of the P-th message, from 1, a space, and the digest of its id
    id:DIGEST  number of the message with this id
    sent       messages that were sent; n: and id: exist for the last ones, for as many as an inbox holds
    bytes      upper bound of the size of the unread messages
    used       the first messages that were all used
    last       number of the last message
    given      last number that a sender was given to encrypt its message for

and those of the waits and the values of the task, see waits.py and values.py.

A number is the time of the send, or the number after the last one. So a server that has lost its last writes does not
give one of their numbers to another message, and a run that has used the lost one does not skip the other.

A message is encrypted for its number, so a copy of it under another number cannot be decrypted. Its sender asks the
script for a number first. The script gives no number twice, and stores a message only after those that it has: if
another one was stored under a later number meanwhile, the sender encrypts its message again, for a new number. A sender
whose reply is lost sends again under the same message id, and gets the number of what is stored. The digest of that id
would not do in place of the number: a run would have to know all ids that it has ever used. Numbers grow, so a run
knows what it has used by the last number and the few before it that it has left (worker/durable/messaging.py).
Without a key there is nothing to bind, and a message takes one call.

`send_message.lua` stores a message and wakes the task if its record says so (fields `waits` and `wakes`, see park.lua).
The call of `write_checkpoint.lua` that records the use of a message removes it.

Any client with the right to send may write anything into an inbox. So `read_inbox.lua` reads only what the inbox lists,
page by page, and no message that is larger than its reader takes. One that cannot be read stays, with its problem.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic_core import PydanticSerializationError

from .envelope import DEFAULT_LARGE_LIMIT, DEFAULT_PAYLOAD_LIMIT, check_size, new_task_id, plain_data
from .errors import DecryptionError, InboxFull, NoKey, Refused, TaskEnded, TaskNotFound
from .event_log import read_last_events
from .inspection.views import find_task
from .json_form import as_json
from .junk import count_of
from .keys import Namespace, Partition
from .records import State
from .security.encryption import TaskCipher, message_field
from .transport.gateway import Gateway
from .transport.scripts import milliseconds, queue_script

_SEND = queue_script("send_message")
_READ = queue_script("read_inbox")

MAX_MESSAGES: Final = 1000
"""Messages that an inbox holds, and message ids that it remembers."""

INBOX_BYTES: Final = DEFAULT_LARGE_LIMIT
"""Largest size of the unread messages of an inbox together, in bytes."""

CORRECTION: Final = "correction"
"""Kind of a message that corrects the state of an agent; its content has JSON data by path."""

_PAGE: Final = 32
"""Messages that are read at once."""

_PAGE_BYTES: Final = 4 * 1024 * 1024
"""Size of the messages that are read at once, in bytes; one message may be larger."""

_STORED: Final = 256
"""Bytes that the time and the encryption of a stored message may add to it."""

_SHOWN_SENDER: Final = 200
"""Characters that are kept of the sender of a message that cannot be read."""

_ANY_SIZE: Final = 1 << 48
"""Limit for messages that were checked when they were first sent."""

_OVERHEAD: Final = 256
"""Bytes that the step record of a received message may add to it."""

_LATEST: Final = 30
"""Events of a log that are read to find the wait of a task."""

_TRIES: Final = 1000
"""Numbers that a sender asks for, each after another message was stored under a later one."""

_REDIRECTS: Final = 128
"""Successors that a message follows: more than a chain can have."""


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """A message in an inbox.

    Attributes:
        number: Number of the message; it grows with each message, not by one. 0 for what no sender wrote.
        sender: Name of the sender; the id of a task that sent it, set by the system. With a problem: what the message
            claims, if anything.
        content: JSON data.
        at: Time of the send, in milliseconds of Redis' clock since the epoch.
        problem: Why the message cannot be read, if it cannot. It stays in the inbox, and no read returns it.
        kind: `CORRECTION`, or empty for a message that the handler reads.
    """

    number: int
    id: str
    sender: str
    content: Any
    at: int
    problem: str | None = None
    kind: str = ""

    def summary(self) -> dict[str, Any]:
        """Return the message as plain data."""
        shown: dict[str, Any] = {
            "number": self.number,
            "id": self.id,
            "sender": self.sender,
            "content": self.content,
            "at": self.at,
        }
        if self.kind:
            shown["kind"] = self.kind
        return shown if self.problem is None else shown | {"problem": self.problem}


class ActingTask(NamedTuple):
    """A task that a worker runs, whose handler, steps and tools call here, in threads too."""

    namespace: str
    queue: str
    id: str


ACTING_TASK: Final[ContextVar[ActingTask | None]] = ContextVar("perdure_acting_task", default=None)
"""The task whose handler calls here; None outside of tasks."""


def acting_sender(what: str, given: str) -> str:
    """Return the sender of a message or an answer: in a task its id, elsewhere the one that is given.

    Raises `ValueError` if a task names another sender than itself.
    """
    task = ACTING_TASK.get()
    if task is None:
        return given
    if given not in ("", task.id):
        raise ValueError(
            f"the sender of {what} from task {task.id} must be the task itself, got {given!r}: leave the sender out"
        )
    return task.id


class Sent(NamedTuple):
    """Receipt of a message: the task that has it, its number there, and the state of that task.

    waits_on: The sender for which the task waits, if the message is from another one and so is not what it waits for.
    """

    task_id: str
    number: int
    state: State
    waits_on: str | None = None


async def send_message(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    content: Any,
    *,
    sender: str = "",
    message_id: str | None = None,
    limit: int = DEFAULT_PAYLOAD_LIMIT,
    kind: str = "",
    hint: bool = False,
    passes_on: bool = False,
) -> Sent:
    """Send a message to a task's inbox, or to that of its last successor.

    Args:
        content: JSON data, pydantic models included.
        sender: Name of the sender. A message from a task's handler has the id of that task.
        message_id: A message that is sent again under the same id is stored once.
        limit: Largest size in bytes.
        kind: See `InboxMessage`.
        passes_on: Whether the message comes from another sender, whose name it keeps.
        hint: Find out whether a waiting task waits for another sender, with one more read.

    Raises:
        TaskNotFound: There is no such task.
        TaskEnded: The task has ended.
        InboxFull: The inbox is full.
        NoKey: The task's data is encrypted, and this process has no key.
        PayloadTooLarge: The message is over the limit.
        TypeError: The content is not JSON.
        ValueError: A task names another sender than itself.
    """
    message_id = message_id or new_task_id()
    sender = sender if passes_on else acting_sender("a message", sender)
    data = _encode(message_id, sender, content, limit, kind)
    digest = hashlib.blake2b(message_id.encode(), digest_size=12).hexdigest()
    known: Partition | None = partition
    for _ in range(_REDIRECTS):
        if known is None:
            break
        answer, *rest = await _store(gateway, known, task_id, digest, data)
        match answer:
            case b"sent":
                sent = Sent(task_id, int(rest[0]), State(rest[1].decode()))
                if not hint or sent.state is not State.WAITING:
                    return sent
                expected = await _expected_sender(gateway, known, task_id)
                return sent if expected in ("", sender) else sent._replace(waits_on=expected)
            case b"ended":
                raise TaskEnded(task_id, rest[0].decode())
            case b"full":
                raise InboxFull(task_id, int(rest[0]), int(rest[1]), most=(MAX_MESSAGES, INBOX_BYTES))
            case b"encrypted":
                raise NoKey(f"a message to task {task_id}", "the task")
            case b"missing":
                break
        task_id = rest[0].decode()
        known = await find_task(gateway, Namespace(known.namespace), task_id)
    raise TaskNotFound(task_id, f"namespace {partition.namespace!r} on {gateway.address.shown}")


async def _store(gateway: Gateway, partition: Partition, task_id: str, digest: str, data: bytes) -> list[bytes]:
    """Store a message, encrypted for its number if there is a key. Return the reply of the script."""
    keys = [partition.record(task_id), partition.inbox(task_id), partition.due, partition.nudge]
    cipher = gateway.encryptor.of(partition, task_id)
    stored, number = (b"", "") if gateway.encryptor.active else (data, "")
    for _ in range(_TRIES):
        reply: list[bytes] = await gateway.run(
            _SEND, keys, [task_id, digest, stored, number, MAX_MESSAGES, INBOX_BYTES]
        )
        if reply[0] != b"number":
            return reply
        number = reply[1].decode()
        stored = cipher.encrypt(message_field(int(number)), data)
    raise Refused(f"could not send to task {task_id}: {_TRIES} times others were faster; send the message again")


async def _expected_sender(gateway: Gateway, partition: Partition, task_id: str) -> str:
    """Return the sender for which a parked task waits; empty if it takes any, or if this user may not read its log.

    Its log says what it waits for before the task is parked. If several calls wait, this knows none of their senders.
    """
    try:
        events = await read_last_events(gateway, partition, task_id, _LATEST)
    except Refused:
        return ""
    waits = [event for event in events if event.type in ("waiting", "waited", "received", "answered")]
    data = [event.data if isinstance(event.data, dict) else {} for event in waits[:2] if event.type == "waiting"]
    if len(data) != 1 or data[0].get("what") != "message":
        return ""
    return str(data[0].get("on") or "")


def _encode(message_id: str, sender: str, content: Any, limit: int, kind: str) -> bytes:
    try:
        fields = {"id": message_id, "sender": sender, "content": content} | ({"kind": kind} if kind else {})
        data = as_json(fields)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"message content must be JSON-serialisable: {error}") from None
    check_size("the message", len(data) + _OVERHEAD, limit)
    return data


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a correction without changes, or with an empty path."""
    if not changes or not all(changes):
        raise ValueError(f"changes must be JSON data by the path of a field, at least one, got {changes!r}")


async def send_correction(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    changes: Mapping[str, Any],
    *,
    confirm: bool = False,
    **options: Any,
) -> Sent:
    """Send a correction of an agent's state to its inbox. See `TaskHandle.correct`, and `send_message` for options."""
    if changes or not confirm:
        check_changes(changes)
    return await send_message(gateway, partition, task_id, dict(changes), kind=CORRECTION, **options)


async def read_inbox(
    gateway: Gateway, partition: Partition, task_id: str, *, largest: int = _ANY_SIZE
) -> AsyncIterator[InboxMessage]:
    """Yield the messages that were not used yet, in order, page by page. None for an unknown task.

    What cannot be read has a `problem`. The last item has the number 0 if the inbox has fields that no sender wrote.

    Args:
        largest: Largest size of a message in bytes; a larger one is not read.
    """
    inbox, cipher = partition.inbox(task_id), gateway.encryptor.of(partition, task_id)
    after, left, foreign = b"", INBOX_BYTES, 0
    while True:
        limits = (MAX_MESSAGES, _PAGE, min(left, _PAGE_BYTES), min(left, largest) + _STORED)
        after, foreign, *page = await gateway.run(_READ, [inbox], [after, *limits])
        for number, stored in zip(page[::2], page[1::2], strict=True):
            if isinstance(stored, int):
                limit = f"its reader takes {largest:,}"
                if stored <= largest + _STORED:
                    limit = f"the messages before it have most of the {INBOX_BYTES:,} that an inbox holds"
                yield InboxMessage(int(number), "", "", None, 0, f"it has {stored:,} bytes, and {limit}")
                continue
            left = max(0, left - len(stored))
            yield _message(int(number), stored, cipher)
        if not after:
            break
    if foreign:
        problem = f"the key {inbox} has at least {foreign:,} fields that no sender wrote; they are ignored"
        yield InboxMessage(0, "", "", None, 0, problem)


def _message(number: int, stored: bytes, cipher: TaskCipher) -> InboxMessage:
    """Decode a stored message. A broken message hides no other."""
    at, _, data = stored.partition(b" ")
    sent = count_of(at)
    sender = ""
    try:
        if not sent:
            raise ValueError("it has no time")
        fields = plain_data(cipher.decrypt(message_field(number), data))
        problem, sender = _problem(fields), _claimed_sender(fields)
        if problem is None:
            return InboxMessage(
                number, fields["id"], fields["sender"], fields["content"], sent, None, fields.get("kind", "")
            )
    except DecryptionError as error:
        problem = str(error)
        with suppress(ValueError):
            sender = _claimed_sender(plain_data(data))
    except ValueError as error:
        problem = f"could not decode the message: {error}"
    return InboxMessage(number, "", sender, None, sent, problem)


_FIELDS: Final = {"id", "sender", "content"}


def _problem(fields: Any) -> str | None:
    """Return why decoded JSON is not a message that this version reads; None if it is."""
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
        return "could not decode the message: it must be a JSON object with id, sender and content"
    if unknown := fields.keys() - _FIELDS - {"kind"}:
        return f"could not decode the message: it has unknown fields ({', '.join(map(repr, sorted(unknown)))[:200]})"
    if not all(isinstance(fields[name], str) for name in ("id", "sender")) or not fields["id"]:
        return "could not decode the message: its id and its sender must be texts"
    if fields.get("kind", "") not in ("", CORRECTION):
        return f"could not decode the message: its kind must be {CORRECTION!r} or missing"
    return None


def _claimed_sender(fields: Any) -> str:
    """Return the sender that a message names, whether it can be read or not."""
    sender = fields.get("sender") if isinstance(fields, dict) else None
    return sender[:_SHOWN_SENDER] if isinstance(sender, str) else ""


async def last_message(gateway: Gateway, partition: Partition, task_id: str) -> tuple[int, int]:
    """Return the number of the last message to a task, and the time of Redis in milliseconds."""
    inbox = partition.inbox(task_id)
    last, time = await gateway.pipeline([("HGET", inbox, "last"), ("TIME",)], node_of=inbox)
    return count_of(last), milliseconds(time)


async def forward_messages(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    to: Partition,
    to_id: str,
    *,
    is_used: Callable[[int], bool],
) -> list[InboxMessage]:
    """Move the messages that a task has not used into the inbox of its successor. Idempotent.

    is_used: whether the task has used a message with a number: a copy of that is left.

    If `Kind.TRANSFERRED` was written before, and the task is settled after this, no message is lost, whenever it is
    sent.

    Returns:
        The messages that could not be moved: broken ones, and those that do not fit.
    """
    left: list[InboxMessage] = []
    full = False
    async for message in read_inbox(gateway, partition, task_id):
        if message.problem is not None or full or is_used(message.number):
            left += [message] if message.number else []
            continue
        try:
            await send_message(
                gateway,
                to,
                to_id,
                message.content,
                sender=message.sender,
                message_id=message.id,
                limit=_ANY_SIZE,
                kind=message.kind,
                passes_on=True,
            )
        except (InboxFull, TaskEnded):
            left.append(message)
            full = True
        else:
            await drop_message(gateway, partition, task_id, message.number)
    return left


async def drop_message(gateway: Gateway, partition: Partition, task_id: str, number: int) -> bool:
    """Remove a message from an inbox without using it. Return whether it was there."""
    return bool(await gateway.command("HDEL", partition.inbox(task_id), f"m:{number}", repeatable=False))

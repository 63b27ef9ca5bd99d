"""Named values of a task, which its handler and pages read and write while it runs.

They are fields of the task's inbox (see inbox.py), so that they have its lifetime, and that a page needs no right to
write the task's record:

    v:NAME   number of the last change of the value, a space, JSON (or encrypted JSON, of the kind `value:NAME`)
    values   names of the values, in the order in which they were first set
    changed  number of the last change of any value
    o:NAME   number of the last change of the value by a page
    updates  digests of the ids of the last 32 updates of pages, the latest first, with commas

A number is the time of the change (ms of Redis' clock), or the number after the last one. Names are not encrypted.

A page sets a value by `update_value.lua`, the run by an entry of `write_checkpoint.lua` (`Kind.VALUE`). The later
change counts: what the run sets is written up to a second later, with its age. The successor of a task begins with its
values (`enqueue_successor.lua`), and gets those that were changed since.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
from pydantic_core import PydanticSerializationError

from .envelope import new_task_id, plain_data
from .errors import DecryptionError, NoKey, TaskEnded, TaskNotFound, UnreadableRecord, ValueRefused
from .inspection.views import find_task
from .json_form import as_json
from .junk import count_of
from .keys import Namespace, Partition, check_name, is_name
from .records import State
from .security.encryption import TaskCipher
from .transport.gateway import Gateway
from .transport.scripts import queue_script

_READ = queue_script("read_values")
_UPDATE = queue_script("update_value")

MAX_VALUES: Final = 64
"""Values of a task."""

VALUE_BYTES: Final = 64 * 1024
"""Largest size of the JSON of a value, in bytes."""

_STORED: Final = 1024
"""Bytes that the number, the name of the sender and the encryption of a stored value may add to it."""

_SENDER: Final = 200
"""Characters of the name of a sender."""

_REDIRECTS: Final = 128
"""Successors that an update follows: more than a chain can have."""


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A named value of a task.

    Attributes:
        by: Name of the person or program that has set it; empty if it gave none. The handler is "handler".
        number: Number of the change. It grows with each change of a value of the task, not by one.
        at: Time of the change, in milliseconds of Redis' clock since the epoch.
        problem: Why the value cannot be read, if it cannot.
    """

    name: str
    value: Any
    by: str
    number: int
    problem: str | None = None

    @property
    def at(self) -> int:
        return self.number

    def summary(self) -> dict[str, Any]:
        """Return the value as plain data."""
        shown: dict[str, Any] = {"name": self.name, "value": self.value, "by": self.by, "at": self.at}
        return shown if self.problem is None else shown | {"problem": self.problem}


class ValueReceipt(NamedTuple):
    """Receipt of an update: the task that has the value, the number of the change, and the state of that task."""

    task_id: str
    number: int
    state: State


HANDLER: Final = "handler"
"""Name of the sender of a value that the handler has set."""


def encode_value(name: str, value: Any, by: str) -> bytes:
    """Return a value in its plain stored form.

    Raises:
        ValueError: The name is not valid.
        TypeError: The value is not JSON.
        ValueRefused: It is too large.
    """
    check_name("name of a value", name)
    sender: object = by
    if not isinstance(sender, str) or len(sender) > _SENDER:
        raise ValueError(f"by must be a text of at most {_SENDER} characters, got {by!r:.300}")
    try:
        encoded = as_json(value)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"value {name!r} must be JSON-serialisable: {error}") from None
    if len(encoded) > VALUE_BYTES:
        raise ValueRefused(
            f"value {name!r} has {len(encoded):,} bytes of JSON, over the limit of {VALUE_BYTES:,}: save an artifact, "
            "and set its name"
        )
    return orjson.dumps({"value": orjson.Fragment(encoded), "by": by})


def value_kind(name: str) -> str:
    """Return the kind as which a value is encrypted."""
    return f"value:{name}"


def _decode(name: str, stored: bytes | int, cipher: TaskCipher) -> NamedValue:
    """Return a stored value. Raises `DecryptionError`, and ValueError for what no version has written."""
    if isinstance(stored, int):
        raise ValueError(f"it has {stored:,} bytes")
    number, _, data = stored.partition(b" ")
    fields = plain_data(cipher.decrypt(value_kind(name), data))
    if not isinstance(fields, dict) or "value" not in fields or not isinstance(fields.get("by"), str):
        raise ValueError("it must be a JSON object with a value and the name of its sender")
    return NamedValue(name, fields["value"], fields["by"], count_of(number))


def _readable(name: str, stored: bytes | int, cipher: TaskCipher, inbox: str) -> NamedValue:
    """Return a stored value. Raises `DecryptionError`, `UnreadableRecord`."""
    try:
        return _decode(name, stored, cipher)
    except ValueError as error:
        raise UnreadableRecord(inbox, f"value {name!r}: {error}", "set the value again") from None


def _shown(name: str, stored: bytes | int, cipher: TaskCipher, _inbox: str = "") -> NamedValue:
    """Return a stored value, or its problem: a broken one hides no other."""
    try:
        return _decode(name, stored, cipher)
    except DecryptionError as error:
        problem = str(error)
    except ValueError as error:
        problem = f"could not decode the value: {error}"
    number = 0 if isinstance(stored, int) else count_of(stored.partition(b" ")[0])
    return NamedValue(name, None, "", number, problem)


async def _read(gateway: Gateway, partition: Partition, task_id: str, after: int, name: str) -> list[Any]:
    limit = VALUE_BYTES + _STORED
    found: list[Any] = await gateway.run(_READ, [partition.inbox(task_id)], [after, name, limit])
    return found


async def read_value(gateway: Gateway, partition: Partition, task_id: str, name: str) -> NamedValue | None:
    """Return a value of a task, perhaps with a problem; None if it was not set."""
    _, *found = await _read(gateway, partition, task_id, 0, name)
    return _shown(name, found[1], gateway.encryptor.of(partition, task_id)) if found else None


async def read_changes(
    gateway: Gateway, partition: Partition, task_id: str, *, after: int = 0, strict: bool = False
) -> tuple[int, list[NamedValue]]:
    """Return the number of the last change, and the values that were changed after a number, in the order of changes.

    strict: Raise `DecryptionError`, `UnreadableRecord` for a value that cannot be read.
    """
    last, *found = await _read(gateway, partition, task_id, after, "")
    cipher = gateway.encryptor.of(partition, task_id)
    pairs = [(name.decode("utf-8", "replace"), stored) for name, stored in zip(found[::2], found[1::2], strict=True)]
    inbox, decode = partition.inbox(task_id), _readable if strict else _shown
    values = [decode(name, stored, cipher, inbox) for name, stored in pairs if is_name(name)]
    return count_of(last), sorted(values, key=lambda value: value.number)


async def read_names(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[str]:
    """Return the names of the values of a task."""
    names = await gateway.command("HGET", partition.inbox(task_id), "values")
    return (names or b"").decode("utf-8", "replace").split()


async def read_task_values(
    gateway: Gateway, partition: Partition, task_id: str, *, strict: bool = False
) -> list[NamedValue]:
    """Return the values of a task, or of its last successor, in the order of their last changes.

    Raises `TaskNotFound`, and see `read_changes`.
    """
    known: Partition | None = partition
    for _ in range(_REDIRECTS):
        if known is None:
            break
        task, (_, values) = await asyncio.gather(  # in one round trip
            gateway.command("HMGET", known.record(task_id), "state", "handed_to"),
            read_changes(gateway, known, task_id, strict=strict),
        )
        if task[0] is None:
            break
        if task[1] is None:
            return values
        task_id = task[1].decode()
        known = await find_task(gateway, Namespace(partition.namespace), task_id)
    raise TaskNotFound(task_id, f"namespace {partition.namespace!r} on {gateway.address.shown}")


async def update_value(
    gateway: Gateway, partition: Partition, task_id: str, name: str, value: Any, *, by: str = ""
) -> ValueReceipt:
    """Set a value of a task, or of its last successor.

    Raises:
        TaskNotFound: There is no such task.
        TaskEnded: The task has succeeded, or was cancelled.
        ValueRefused: The value is too large, or the task has as many values as it may have.
        NoKey: The task's data is encrypted, and this process has no key.
        TypeError: The value is not JSON.
        ValueError: The name is not valid.
    """
    data, update_id = encode_value(name, value, by), new_task_id()
    known: Partition | None = partition
    for _ in range(_REDIRECTS):
        if known is None:
            break
        answer, *rest = await _update(gateway, known, task_id, name, data, update_id)
        match answer:
            case b"set":
                return ValueReceipt(task_id, int(rest[0]), State(rest[1].decode()))
            case b"ended":
                raise TaskEnded(task_id, rest[0].decode(), "takes no more values")
            case b"full":
                raise ValueRefused(
                    f"task {task_id} has {int(rest[0])} values, the most that a task may have: set one of them in "
                    f"place of {name!r}, or put several into one value"
                )
            case b"encrypted":
                raise NoKey(f"a value to task {task_id}", "the task")
            case b"missing":
                break
        task_id = rest[0].decode()
        known = await find_task(gateway, Namespace(known.namespace), task_id)
    raise TaskNotFound(task_id, f"namespace {partition.namespace!r} on {gateway.address.shown}")


async def _update(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    name: str,
    data: bytes,
    update_id: str,
    number: int | str = "",
) -> list[bytes]:
    stored = gateway.encryptor.of(partition, task_id).encrypt(value_kind(name), data)
    digest = hashlib.blake2b(update_id.encode(), digest_size=12).hexdigest()
    keys = [partition.record(task_id), partition.inbox(task_id)]
    found: list[bytes] = await gateway.run(_UPDATE, keys, [name, stored, digest, MAX_VALUES, number])
    return found


async def forward_values(gateway: Gateway, partition: Partition, task_id: str, to: Partition, to_id: str) -> None:
    """Give a successor the values that were changed after it was stored. Idempotent: it has the later ones already."""
    _, values = await read_changes(gateway, partition, task_id)
    for value in values:
        if value.problem is None:
            data = encode_value(value.name, value.value, value.by)
            await _update(gateway, to, to_id, value.name, data, f"{task_id} {value.number}", value.number)


def copied_values(values: Sequence[NamedValue], cipher: TaskCipher) -> list[str | bytes]:
    """Return the fields of an inbox, and their values, with which another task has the same values."""
    kept = [value for value in values if value.problem is None]
    fields: list[str | bytes] = []
    for value in kept:
        data = cipher.encrypt(value_kind(value.name), encode_value(value.name, value.value, value.by))
        fields += (f"v:{value.name}", b"%d %b" % (value.number, data))
    if kept:
        fields += ("values", " ".join(value.name for value in kept), "changed", str(kept[-1].number))
    return fields

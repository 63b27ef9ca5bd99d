"""Archive of an agent: the closed steps and the old messages that leave its state, and the records of those steps.

A state that keeps everything grows with each step, and so does the cost of each checkpoint. So the oldest closed steps
and messages leave it, with an event `archived` that counts them. The log keeps them all. The step and its result are
also stored as a record of their own, which a lookup by the step's key finds, and which a resumed run does not read.

Log and records would grow without end. So when an event `log_base` has stored the whole state, the events before the
former one and the records of the steps that they archived are retired. Of such a step, a hash of the key is kept: it
must not run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

import orjson

from ....queues.keys import Partition
from ....queues.transport.gateway import Gateway
from ....queues.transport.large_values import SCAN_START, scan_page
from .state import Archive, ArchivedSteps

ARCHIVED: Final = "#step:"
"""Prefix of the records of archived steps among the chunks of a checkpoint (`c:`), which a resumed run leaves out."""

_CLOSED: Final = ("done", "failed", "dropped")

_MAX_RANGES: Final = 20
"""Ranges of step keys that an archive has at most."""

_RETIRED: Final = "c:#retired:"
"""Prefix of the fields with the hashes of the keys of steps whose records were dropped, and their statuses."""

_DIGEST: Final = 16
"""Hexadecimal digits of such a hash, and then one for the status: text is never taken for an encrypted value."""

RETIRED_FIELDS: Final = tuple([f"{_RETIRED}{number:02x}" for number in range(256)])
"""All of these fields, by the first byte of the hash: a lookup reads one of them, and their number does not grow."""

_PER_LOOKUP: Final = 200
"""Records that are looked up in one round trip."""

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Removed:
    """Steps and messages that leave a state, and the state without them.

    Attributes:
        steps: Records of the steps by key, as JSON: the step as the plan had it, its `result` if it has one, `n`, the
            number of the event that archives it, and `at`, the number of the steps that were archived before it.
        messages: How many messages left, and the index of the first one.
    """

    state: State
    steps: dict[str, bytes]
    messages: int
    first_message: int


def remove_oldest(state: State, *, steps: int | None, messages: int | None, number: int = 0) -> Removed | None:
    """Return what leaves a state so that it keeps so many closed steps and messages; None if nothing leaves.

    number: of the event that archives them.

    Open steps stay. So do the first instructions of a conversation: system messages at its start, and the messages of
    the user before a summary, with it, or else the first message of the user. A call of a tool leaves with its result.
    None: all steps, or all messages, stay.
    """
    closed = [step for step in state["plan"] if step["status"] in _CLOSED]
    gone = {step["key"]: step for step in closed[: max(0, len(closed) - steps)]} if steps is not None else {}
    first, end = (0, 0) if messages is None else _old_messages(state["messages"], messages)
    if not gone and first == end:
        return None
    results = state["results"]
    archive = Archive.model_validate(state["archive"])
    records = {
        key: orjson.dumps({"step": step, "n": number, "at": at} | ({"result": results[key]} if key in results else {}))
        for at, (key, step) in enumerate(gone.items(), archive.steps)
    }
    archive.steps += len(gone)
    archive.messages += end - first
    archive.ranges = _ranges(archive.ranges, list(gone))
    after = {
        **state,
        "plan": [step for step in state["plan"] if step["key"] not in gone],
        "results": {key: result for key, result in results.items() if key not in gone},
        "messages": [*state["messages"][:first], *state["messages"][end:]],
        "archive": archive.model_dump(mode="json"),
    }
    return Removed(after, records, end - first, first)


def _old_messages(messages: Sequence[State], keep: int) -> tuple[int, int]:
    """Return the indexes of the first old message and of the first that stays after it."""
    head = sum(1 for _ in takewhile(lambda one: one["role"] in ("system", "user") and not _sums_up(one), messages))
    if head < len(messages) and _sums_up(messages[head]):  # a compaction keeps the instructions before its summary
        head += 1
    else:
        head = sum(1 for _ in takewhile(lambda one: one["role"] == "system", messages))
        head += head < len(messages) and messages[head]["role"] == "user"
    end = max(head, len(messages) - keep)
    has_result = False  # before the next answer of the assistant: results of earlier calls count up to it
    for message in takewhile(lambda one: one["role"] != "assistant", messages[end:]):
        has_result = has_result or message["role"] == "tool"
    while end > head and has_result:
        end -= 1
        has_result = messages[end]["role"] != "assistant"
    return head, end


def _sums_up(message: State) -> bool:
    return bool(message.get("name") == "summary")


def _ranges(former: Sequence[ArchivedSteps], keys: Sequence[str]) -> list[ArchivedSteps]:
    """Add the keys of steps as a range; where there are too many ranges, the older half becomes one."""
    if not keys:
        return list(former)
    found = [*former, ArchivedSteps(first=keys[0], last=keys[-1], steps=len(keys))]
    if len(found) > _MAX_RANGES:
        old = found[: _MAX_RANGES // 2]
        found[: len(old)] = [ArchivedSteps(first=old[0].first, last=old[-1].last, steps=sum(one.steps for one in old))]
    return found


def archived_field(key: str) -> str:
    """Return the field of a checkpoint that has the record of an archived step."""
    return f"c:{ARCHIVED}{key}"


async def read_archived_step(gateway: Gateway, partition: Partition, task_id: str, key: str) -> State | None:
    """Return the record of an archived step: `step` and, if it has one, `result`. Raises `DecryptionError`."""
    field = archived_field(key)
    data = await gateway.command("HGET", partition.steps(task_id), field)
    if data is None:
        return None
    found: State = orjson.loads(gateway.encryptor.of(partition, task_id).decrypt(field, data))
    return found


async def archived_steps(gateway: Gateway, partition: Partition, task_id: str) -> dict[str, bytes]:
    """Return the decrypted records of all archived steps, by key. Raises `DecryptionError`."""
    cipher, found = gateway.encryptor.of(partition, task_id), dict[str, bytes]()
    cursor, steps = SCAN_START, partition.steps(task_id)
    while not cursor.is_end:
        cursor, page = await scan_page(gateway, steps, cursor, archived_field("*"), _PER_LOOKUP)
        for name, data in page.items():
            field = name.decode()
            found[field.removeprefix(archived_field(""))] = cipher.decrypt(field, data)
    return found


async def archived_since(gateway: Gateway, partition: Partition, task_id: str, number: int) -> list[str]:
    """Return the keys of the steps that events from this number on have archived. Raises `DecryptionError`."""
    found = await archived_steps(gateway, partition, task_id)
    return [key for key, record in found.items() if orjson.loads(record).get("n", 0) >= number]


async def archived_keys(
    gateway: Gateway, partition: Partition, task_id: str, keys: Sequence[str], *, retired: bool
) -> set[str]:
    """Return which of these steps are archived. retired: whether to look among those without a record, too.

    Raises `DecryptionError`.
    """
    found: set[str] = set()
    for at in range(0, len(keys), _PER_LOOKUP):
        page = keys[at : at + _PER_LOOKUP]
        answers = await gateway.pipeline(
            [("HEXISTS", partition.steps(task_id), archived_field(key)) for key in page],
            node_of=partition.steps(task_id),
        )
        found.update(key for key, answer in zip(page, answers, strict=True) if answer)
    others = [key for key in keys if key not in found] if retired else []
    return found | (await retired_keys(gateway, partition, task_id, others)).keys()


async def retired_keys(gateway: Gateway, partition: Partition, task_id: str, keys: Sequence[str]) -> dict[str, str]:
    """Return the statuses of those steps among these whose records were dropped. Raises `DecryptionError`."""
    digests = {key: _digest(key) for key in keys}
    fields = await retired_fields(gateway, partition, task_id, {_field(digest) for digest in digests.values()})
    found: dict[str, str] = {}
    for key, digest in digests.items():
        data = fields.get(_field(digest), b"")
        for at in range(0, len(data), _DIGEST + 1):
            if data[at : at + _DIGEST] == digest:
                found[key] = _CLOSED[int(data[at + _DIGEST : at + _DIGEST + 1])]
    return found


async def retired_fields(
    gateway: Gateway, partition: Partition, task_id: str, fields: Collection[str] = RETIRED_FIELDS
) -> dict[str, bytes]:
    """Return what is kept of steps whose records were dropped, by field. Raises `DecryptionError`."""
    names = sorted(fields)
    if not names:
        return {}
    cipher = gateway.encryptor.of(partition, task_id)
    values = await gateway.command("HMGET", partition.steps(task_id), *names)
    found = zip(names, values, strict=True)
    return {name: cipher.decrypt(name, value) for name, value in found if value is not None}


def retire_steps(fields: Mapping[str, bytes], statuses: Mapping[str, str]) -> dict[str, bytes]:
    """Return the fields that change when steps, given with their statuses, lose their records."""
    changed: dict[str, bytes] = {}
    for key, status in statuses.items():
        digest = _digest(key)
        name = _field(digest)
        before = changed.get(name, fields.get(name, b""))
        changed[name] = before + digest + b"%d" % _CLOSED.index(status)
    return changed


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=_DIGEST // 2).hexdigest().encode()


def _field(digest: bytes) -> str:
    return f"{_RETIRED}{digest[:2].decode()}"

"""The checkpoint of a task, as Redis keeps it: step records by key, opaque to this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import orjson

from ..errors import LeaseLost
from ..event_log import TaskEvent, opened_events, read_last_events
from ..keys import Partition
from ..security import TaskCipher, event_field
from ..transport import Argument, Gateway, pairs, queue_script
from .leases import Delivery
from .settlement import Counters

__all__ = ["Entry", "History", "Kind", "last_step", "load_history", "recorded_steps", "touch_step", "write_entries"]

_RECORD = queue_script("write_checkpoint")
_NOTE = queue_script("touch_step")


class Kind(StrEnum):
    """What a write into the checkpoint says of its step."""

    DONE = "done"
    INTENT = "intent"
    SAVED = "saved"
    DONE_WITH_EVENT = "mark"
    """Done, and an event that goes along tells of it."""
    EVENT = "event"
    """One entry of the event log: `step` is its type, `value` its number, `log` its data."""
    DROP = "drop"
    """What is kept of the step goes: it is part of something larger that is recorded in the same act."""
    CONSUMED = "taken"
    """A message of the inbox was used: `step` is its number there."""
    TRANSFERRED = "moved"
    """Another task goes on in the place of this one, and is to have the messages that come: `value` is its id."""


class Entry(NamedTuple):
    """One write into the checkpoint. log: JSON that goes to the event log with a DONE or an EVENT."""

    kind: Kind
    step: str
    value: bytes
    log: bytes = b"{}"

    def encrypted(self, seal: TaskCipher) -> Entry:
        """The entry as it is stored. Once only: written again, it must be the same."""
        if self.kind is Kind.EVENT:
            return self._replace(log=seal.encrypt(event_field(int(self.value)), self.log))
        if self.kind not in _FIELD_PREFIX:
            return self
        return self._replace(value=seal.encrypt(f"{_FIELD_PREFIX[self.kind]}:{self.step}", self.value))


_FIELD_PREFIX = {Kind.DONE: "d", Kind.DONE_WITH_EVENT: "d", Kind.INTENT: "i", Kind.SAVED: "s"}
"""What the names of a step hash's fields begin with."""


@dataclass(slots=True)
class History:
    """What earlier runs of a task left: counters, step records, intents without a result, progress within steps.

    events: the number of the last event that a run wrote into the log. mail: that of the last message that was sent
    to its inbox. suspect: its worker died, and nobody knows yet whether it was the cause. excused: crashes that no
    longer count against it. enqueued: when it was first, in milliseconds; None where that is the time of its message.
    crash: what is known of the last one.
    """

    counters: Counters = field(default_factory=Counters)
    done: dict[str, bytes] = field(default_factory=dict)
    intents: dict[str, bytes] = field(default_factory=dict)
    saved: dict[str, bytes] = field(default_factory=dict)
    events: int = 0
    mail: int = 0
    cancel: bool = False
    quarantined: bool = False
    forgiven_crashes: int = 0
    enqueued: int | None = None
    crash: Mapping[str, Any] = field(default_factory=dict)
    latest: Sequence[TaskEvent] = ()
    alive_at: int | None = None
    read_at: int = 0

    @property
    def counted_crashes(self) -> int:
        """Crashes that count against the task: those since it last got further."""
        return self.counters.crashes - self.forgiven_crashes

    def decrypt(self, seal: TaskCipher) -> None:
        """Open what is sealed. Raises `DecryptionError`."""
        for shelf, records in (("d", self.done), ("i", self.intents), ("s", self.saved)):
            for step, value in records.items():
                records[step] = seal.decrypt(f"{shelf}:{step}", value)


async def write_entries(
    gateway: Gateway, delivery: Delivery, task_id: str, entries: Sequence[Entry], *, replicated: bool = False
) -> bool:
    """Write entries in one atomic act. Returns whether the task's cancellation was requested; raises `LeaseLost`.

    replicated: return only when replicas have them, and raise `NotReplicated` where too few do in time.
    """
    partition = delivery.partition
    keys = [partition.ready, partition.record(task_id), partition.steps(task_id), partition.log(task_id)]
    args: list[Argument] = [*delivery.fence]
    for entry in entries:
        args += (entry.kind, entry.step, entry.value, entry.log)
    if replicated:
        answer = await gateway.run_replicated(_RECORD, keys, args, partition.mark)
    else:
        answer = await gateway.run(_RECORD, keys, args)
    if not answer:
        raise LeaseLost(task_id, f"record of {', '.join(entry.step for entry in entries)}")
    return bool(answer == 2)


async def touch_step(gateway: Gateway, delivery: Delivery, task_id: str, step: str) -> None:
    """Note that a step is still running. Raises `LeaseLost`."""
    partition = delivery.partition
    if not await gateway.run(_NOTE, [partition.ready, partition.record(task_id)], [*delivery.fence, step]):
        raise LeaseLost(task_id, f"note of {step}")


async def recorded_steps(gateway: Gateway, partition: Partition, task_id: str) -> list[str]:
    """The keys of a task's recorded steps, by name."""
    names = await gateway.command("HKEYS", partition.steps(task_id))
    return sorted(name.removeprefix(b"d:").decode() for name in names if name.startswith(b"d:"))


async def last_step(gateway: Gateway, partition: Partition, task_id: str) -> str | None:
    """The step that was recorded last, as the task's log tells; None where none was lately."""
    for event in await read_last_events(gateway, partition, task_id, 100):
        if event.type == "step_completed" and event.step is not None:
            return event.step
    return None


_FIELDS: Final = ("attempts", "crashes", "returns", "excused", "events", "mail", "cancel", "suspect", "crash", "at")

_LATEST: Final = 8
"""Events of the log that tell how the former run ended."""


async def load_history(gateway: Gateway, delivery: Delivery, task_id: str) -> History:
    """Read what earlier runs left, in one round trip; what is sealed of the checkpoint is still so."""
    partition = delivery.partition
    counts, alive, steps, latest, time = await gateway.pipeline(
        [
            ("HMGET", partition.record(task_id), *_FIELDS),
            ("HGET", partition.record(task_id), "alive"),
            ("HGETALL", partition.steps(task_id)),
            ("XREVRANGE", partition.log(task_id), "+", "-", "COUNT", _LATEST),
            ("TIME",),
        ],
        node_of=partition.ready,
    )
    attempts, crashes, returns, excused, events, mail = (int(value or 0) for value in counts[:6])
    cancel, suspect, crash, enqueued = counts[6:]
    # Every delivery of this message before this one ended without an outcome: an outcome would have closed it.
    history = History(
        Counters(attempts, crashes + delivery.count - 1, returns),
        events=events,
        mail=mail,
        cancel=cancel is not None,
        forgiven_crashes=excused,
        enqueued=None if enqueued is None else int(enqueued),
        crash=orjson.loads(crash) if crash else {},
        latest=opened_events(latest, task_id, gateway.encryptor.of(partition, task_id)),
        alive_at=None if alive is None else int(alive),
        read_at=int(time[0]) * 1000 + int(time[1]) // 1000,
    )
    history.quarantined = suspect is not None or (delivery.count > 1 and history.counted_crashes > 0)
    shelves = {b"d": history.done, b"i": history.intents, b"s": history.saved}
    for name, value in pairs(steps).items():
        kind, _, step = name.partition(b":")
        shelves[kind][step.decode()] = value
    return history

"""Settlement of a delivery: succeed, cancel, reschedule, park, release. Each is one script, fenced by the delivery.

Burying is part of the package `deadletter`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import orjson

from ..envelope import TaskMessage
from ..errors import LeaseLost
from ..keys import RELEASED, Partition, gate_of
from ..partitions.route import registered_retention
from ..records import State
from ..security.encryption import ERROR, RESULT
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from .leases import RELEASED_IDLE_MS, Delivery, check_accepted

_FINISH = queue_script("finish")
_AWAIT_LIMIT = queue_script("await_limit")
_AWAIT_VERSION = queue_script("await_version")
_PARK = queue_script("park")
_RAISE_COUNT = queue_script("raise_count")
_RELEASE = queue_script("release")
_RESCHEDULE = queue_script("reschedule")

_NO_DATA = b"{}"

_NEEDS_OUTBOX, _NEEDS_LOG = 2, 4

NOTICE_STORED = 3
"""Answer of a script that ends a task: the notice for the tasks that wait for it is in the outbox."""

OnWatched = Callable[[Partition, str], None]
"""Called with the partition and the id of an ended task for which others wait."""

OnUnread = Callable[[str, int], None]
"""Called with the id of a task that has succeeded, and the number of messages that it leaves unread."""


class Counters(NamedTuple):
    """Counters of a task.

    Attributes:
        attempts: Runs that ended with a result, an exception or a time-out.
        crashes: Deliveries that ended without an outcome.
        requeues: Times the task was returned by a worker that cannot run it.
    """

    attempts: int = 0
    crashes: int = 0
    requeues: int = 0

    def attempted(self) -> Counters:
        """Return the counters with one more attempt."""
        return Counters(self.attempts + 1, self.crashes, self.requeues)


def succeed(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    result: bytes,
    counters: Counters,
    *,
    ran: float,
    ttl: float,
    written: bool = True,
    handed_to: str | None = None,
    entries: int = 0,
    cleanup: TaskMessage | None = None,
    on_watched: OnWatched | None = None,
    on_unread: OnUnread | None = None,
) -> Coroutine[Any, Any, None]:
    """Store the result and acknowledge the message.

    Args:
        entries: Number of the run's last entry, without which the outcome is not stored; 0 if it needs none.
        ran: Seconds that the run took.
        ttl: Seconds for which the record is kept.
        written: False if this delivery has written nothing into the checkpoint.
        handed_to: Id of the successor, whose result is this task's result.
        cleanup: The clean-up task, encrypted, which is enqueued in the same act; see `cleanup_id`.
        on_watched: Called if the notice for tasks that wait for this one is in the outbox now.
        on_unread: Called if the task leaves messages unread.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries of the run.
    """
    if gateway.encryptor.active:
        result = gateway.encryptor.of(delivery.partition, task_id).encrypt(RESULT, result)
    state = State.SUCCEEDED
    return _finish(
        gateway,
        delivery,
        task_id,
        state,
        result,
        counters,
        ran,
        ttl,
        written,
        handed_to,
        entries,
        cleanup,
        on_watched,
        on_unread,
    )


async def cancelled(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    counters: Counters,
    *,
    ran: float,
    ttl: float,
    written: bool = True,
    cleanup: TaskMessage | None = None,
    on_watched: OnWatched | None = None,
) -> None:
    """Store that the task was cancelled, and acknowledge the message, also if Redis lacks entries. See `succeed`."""
    state, result = State.CANCELLED, b"null"
    settle = partial(_finish, gateway, delivery, task_id, state, result, counters, ran, ttl, written)
    await settle(cleanup=cleanup, on_watched=on_watched)


async def _finish(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    state: State,
    result: bytes,
    counters: Counters,
    ran: float,
    ttl: float,
    written: bool,
    handed_to: str | None = None,
    entries: int = 0,
    cleanup: TaskMessage | None = None,
    on_watched: OnWatched | None = None,
    on_unread: OnUnread | None = None,
) -> None:
    partition = delivery.partition
    keys = [
        partition.ready,
        partition.record(task_id),
        partition.inbox(task_id),
        partition.control(task_id),
        partition.retentions,
        partition.timeline,
    ]
    logged = (partition.steps(task_id), partition.log(task_id))
    if written or delivery.has_history or cleanup is not None:
        keys += logged
    args: list[Argument] = [
        *delivery.fence,
        entries,
        state.value,
        result,
        counters.attempts,
        counters.crashes,
        round(ran * 1000),
        max(1, round(ttl * 1000)),
        registered_retention(ttl),
    ]
    if cleanup is not None:
        keys.append(partition.record(cleanup.id))
        args += (cleanup.id, cleanup.envelope, cleanup.arguments, "cleanup", cleanup.id)
    found = delivery.fields
    if b"again" not in found and b"token" not in found:  # else the record has the time of the enqueue
        args += ("at", delivery.entry.partition(b"-")[0])
    if handed_to is not None:
        args += ("handed_to", handed_to)
    known = b"watched" in delivery.fields
    answer = _NEEDS_OUTBOX if known else await gateway.run(_FINISH, keys, args)
    while answer in (_NEEDS_OUTBOX, _NEEDS_LOG):
        if answer == _NEEDS_OUTBOX:  # or the watchers came after the message of the task, or that was put back
            keys.append(partition.outbox)
            args += ("kept", f"{max(1, round(ttl * 1000))} {registered_retention(ttl)}")
        else:
            keys[6:6] = logged
        answer = await gateway.run(_FINISH, keys, args)
    if isinstance(answer, list):
        answer, unread = answer
        if on_unread is not None:
            on_unread(task_id, unread)
    check_accepted(answer, task_id, "outcome")
    if answer == NOTICE_STORED and on_watched is not None:
        on_watched(partition, task_id)


_LONGEST = 96
"""Characters of a task's id that the id of its clean-up task has as they are."""


def cleanup_id(task_id: str, delivery: Delivery) -> str:
    """Return the id of the clean-up task of a task that this delivery ends: `ID.end.ENTRY`.

    A replay of a dead letter has another entry, and so a clean-up task of its own when it ends.
    """
    if len(task_id) > _LONGEST:
        digest = hashlib.sha256(task_id.encode()).hexdigest()[:16]
        task_id = f"{task_id[: _LONGEST - 17]}.{digest}"
    return f"{task_id}.end.{delivery.entry.decode()}"


async def reschedule(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    counters: Counters,
    *,
    delay: float,
    event: str,
    data: dict[str, object],
    entries: int = 0,
    changes: Sequence[Argument] = (),
) -> None:
    """Put the task into the due set to run again, and acknowledge its message.

    Args:
        delay: Seconds.
        event: Type of the event that is logged.
        data: Evidence of the error.
        entries: See `succeed`.
        changes: Fields of the checkpoint and their values for the next attempt; an empty value deletes the field.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries of the run.
    """
    partition = delivery.partition
    evidence = gateway.encryptor.of(partition, task_id).encrypt(ERROR, orjson.dumps(data))
    keys = [
        *_deferral_keys(partition, task_id),
        partition.log(task_id),
        partition.control(task_id),
        partition.steps(task_id),
    ]
    args: list[Argument] = [
        *delivery.fence,
        entries,
        task_id,
        *counters,
        _milliseconds(delay),
        event,
        evidence,
        *changes,
    ]
    check_accepted(await gateway.run(_RESCHEDULE, keys, args), task_id, "retry")


WakeCondition: TypeAlias = tuple[str, str]
"""Kind and value of a condition that ends the wait of a parked task:

`("message", N)`: a message to its inbox after the one with this number. `("answer", WAIT_ID)`: an answer to this wait.
`("join", GROUP)`: all children of this join have ended; `("join", "GROUP:N")`: more than N of them. `("limit", NAME)`:
a token of the limit may be free; the worker that frees one wakes the task.
`("time", "")`: only its time.
"""

TIME: Final[WakeCondition] = ("time", "")


def message_after(number: int) -> WakeCondition:
    """Return the condition that a message comes after the one with this number."""
    return ("message", str(number))


def wake_word(kind: str, value: str = "") -> str:
    """Return the word that the field `wakes` of a record has for a condition; a space in the value is quoted."""
    return kind if kind in ("message", "time") else f"{kind}:{quote(value, safe='/:#')}"


async def park(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    counters: Counters,
    *,
    delay: float,
    waits: str,
    conditions: Sequence[WakeCondition] = (),
    entries: int = 0,
    keeps: str = "",
    renewed_in: float = 0.0,
) -> None:
    """Put the task into the due set until it is woken, and acknowledge its message.

    Args:
        delay: Seconds after which the task runs in any case.
        waits: What it waits for, such as "message"; shown to people.
        conditions: Conditions that wake it. If any is over already, it is due at once.
        entries: See `succeed`.
        keeps: Names the token of limits that it keeps, see `limits/kept.py`; empty for none.
        renewed_in: Seconds until that is renewed.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries of the run.
    """
    partition = delivery.partition
    keys = [*_deferral_keys(partition, task_id), partition.inbox(task_id), partition.control(task_id)]
    for kind, value in dict.fromkeys(conditions):
        if kind == "join":
            keys += partition.join_keys(task_id, value.partition(":")[0])
    wakes = " ".join(dict.fromkeys(wake_word(*condition) for condition in conditions))
    args: list[Argument] = [*delivery.fence, entries, task_id, *counters, _milliseconds(delay), waits, wakes]
    args += (keeps, _milliseconds(renewed_in))
    args += [part for condition in dict.fromkeys(conditions) if condition != TIME for part in condition]
    check_accepted(await gateway.run(_PARK, keys, args), task_id, "park")


async def await_version(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    needed: int,
    *,
    limit: float,
    task: str | None = None,
    counters: Counters | None = None,
) -> None:
    """Park a task that needs a newer worker, and acknowledge its message.

    Args:
        needed: Data format that the worker must know, or version of the task's code that it must have.
        limit: Seconds after the first such call for the task after which it runs in any case.
        task: Name of the task if it needs a version of its code.
        counters: Counters of the task; None if this worker cannot know them.

    Raises:
        LeaseLost: The lease has passed to another worker.
    """
    partition = delivery.partition
    waits, version = (f"version {needed}", partition.versions)
    if task is not None:
        waits, version = f"{waits} of {task}", partition.task_versions(task)
    keys = [*_deferral_keys(partition, task_id), partition.control(task_id), version]
    args: list[Argument] = [*delivery.fence, task_id, needed, _milliseconds(limit), waits]
    if counters is not None:
        args += ("attempts", counters.attempts, "crashes", counters.crashes, "returns", counters.requeues)
    if not await gateway.run(_AWAIT_VERSION, keys, args):
        raise LeaseLost(task_id, "park")


async def await_limit(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    counters: Counters,
    limits: Sequence[tuple[str, str, float, str]],
    *,
    retry: float,
    entries: int = 0,
    event: str = "",
    data: dict[str, object] | None = None,
    envelope: bytes = b"",
) -> None:
    """Put the task into the waiting list of its limits, and acknowledge its message. Costs no attempt and no crash.

    Args:
        limits: Name, key, cost and flags of each limit, as in the envelope.
        retry: Seconds until it makes sense to look at the task again.
        entries: See `succeed`.
        event: Type of the event that is logged; empty for a delivery that was never started: nothing is logged.
        data: Data of the event.
        envelope: That of the task with its limits, if its message has none.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries of the run.
    """
    partition = delivery.partition
    gate = gate_of(limits)
    keys = [*_deferral_keys(partition, task_id), partition.control(task_id), partition.log(task_id)]
    keys += (partition.limited(gate.key_id), partition.turns(gate.ring), partition.rings)
    args: list[Argument] = [*delivery.fence, entries, task_id, *counters, *gate, _milliseconds(retry), event]
    args += (_NO_DATA if data is None else orjson.dumps(data), envelope)
    check_accepted(await gateway.run(_AWAIT_LIMIT, keys, args), task_id, "wait for limits")


def _deferral_keys(partition: Partition, task_id: str) -> tuple[str, ...]:
    return (partition.ready, partition.record(task_id), partition.due, partition.nudge)


def _milliseconds(delay: float) -> int:
    return max(0, round(delay * 1000))


async def release(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str | None,
    *,
    data: dict[str, object] | None,
    event: str = "handed_off",
    entries: int = 0,
) -> None:
    """Release the message at no cost, so that another worker takes it at once.

    Args:
        task_id: None for a delivery that was never started: its message has the id.
        data: Data of the logged event; None for a delivery that was never started: nothing is logged.
        event: Type of the event.
        entries: See `succeed`.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries of the run.
    """
    partition = delivery.partition
    known = task_id or delivery.task_id or f"entry-{delivery.entry.decode()}"
    keys = [partition.ready, partition.record(known), partition.log(known), partition.nudge]
    logged = ("", _NO_DATA) if data is None else (event, orjson.dumps(data))
    args: list[Argument] = [*delivery.fence, entries, RELEASED, RELEASED_IDLE_MS, *logged]
    check_accepted(await gateway.run(_RELEASE, keys, args), known, "release")


class RaisedCount(NamedTuple):
    """A delivery with a fence of its own. before: whether Redis had raised the count already."""

    delivery: Delivery
    before: bool


async def raise_count(gateway: Gateway, delivery: Delivery) -> RaisedCount:
    """Return the delivery with a fence of its own, for a worker that may have run it before under the present one.

    Writes of the former run may still be on their way to Redis; from now on they are refused. Costs neither an attempt
    nor a crash.

    Raises:
        LeaseLost: The lease has passed to another worker.
    """
    partition = delivery.partition
    known = delivery.task_id or f"entry-{delivery.entry.decode()}"
    answer = await gateway.run(_RAISE_COUNT, [partition.ready, partition.record(known)], delivery.fence)
    if not answer:
        raise LeaseLost(known, "fence")
    return RaisedCount(replace(delivery, count=delivery.count + 1, claimed=True, repeated=False), answer == 2)

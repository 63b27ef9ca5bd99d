"""Joins: a task that waits for others, and the notices that tell it of their ends.

A join belongs to one call of a task, the parent, and lies in the parent's slot: a hash, the set of its open children,
and the list of those that wait for a place in its window. A child lies in a slot of its own. The field `watchers` of
its record names the joins that get a notice of its end. The script that ends a task with watchers puts it into the
outbox of its partition in the same act, and leaves its record without a TTL. `deliver_notices` reads what is in an
outbox, stores each result in the join of its parent, and confirms: then the record gets its TTL.

Each act may be repeated, and each may be the last of a process that dies:

    add_children.lua    parent's slot: children into `open` and `todo`; fenced by the parent's delivery
    enqueue_child.lua   child's slot: message and record, with the watchers; nothing if it is known
    confirm_launch.lua  parent's slot: the place of a child that was launched
    notify_join.lua     parent's slot: the result of a child; the next of the window; wakes the parent
    notice_sent.lua     child's slot: out of the outbox, and the TTL of the record

What a dead process leaves is found from the state of the children, never from a counter: an entry in an outbox, a child
in `open` without a place (its launch is repeated), or one whose record has ended or is gone.

Fields of the hash `join`:

    total, limit, mode   children that were added; how many may be open at once, 0 for any; raise, keep or wait
    life                 `ATTEMPTS REPLAYS` of the parent: a join of another attempt is closed
    ended                children that have ended, which are `d:1` to `d:ended`
    d:N                  `CHILD STATE`, in the order of arrival
    r:CHILD              state and result or error of a child, encrypted for the parent
    c:DIGEST:N           chunk of a large result
    l:CHILD              message of a child that was taken from `todo`, and whose launch is not confirmed
    p:CHILD              `QUEUE PARTITION ID` of a launched child; `watched` after it if the parent did not spawn it
    failed               first child that died, if the mode is `raise`
    closed               the join is being closed: nothing is launched any more
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import orjson

from .delivery.leases import Delivery, check_accepted
from .derived_tasks import MAX_HAND_OFFS
from .envelope import DEFAULT_PAYLOAD_LIMIT, TaskMessage, is_task_id
from .errors import (
    ConfigurationError,
    DecryptionError,
    KeyMissing,
    PerdureError,
    Refused,
    TaskNotFound,
    Unavailable,
)
from .handle import cancel_task
from .inspection.views import find_task
from .junk import report_once
from .keys import Namespace, Partition, is_name
from .open_joins import LATE_MS
from .partitions.route import registered_retention, spread
from .partitions.router import PartitionRouter
from .records import opened_evidence
from .security.encryption import RESULT, RESULT_CHUNKS
from .transport.backoff import retry_while_unavailable
from .transport.gateway import Gateway
from .transport.large_values import LargeValue, cut, read_large, store_with_upload
from .transport.pipelining import Argument, Command
from .transport.scripts import milliseconds, queue_script

_ADD = queue_script("add_children")
_ENQUEUE = queue_script("enqueue_child")
_CONFIRM = queue_script("confirm_launch")
_CHUNK = queue_script("put_result_chunk")
_NOTIFY = queue_script("notify_join")
_WATCH = queue_script("watch")
_SENT = queue_script("notice_sent")
_CLOSE = queue_script("close_join")
_DUE = queue_script("due")

_SCRIPT_BYTES: Final = 512 * 1024
"""Size of the messages that one script adds to a join."""

_SCRIPT_CHILDREN: Final = 500
"""Children that one script adds to a join, and that are looked at or launched together."""

_PAGE_BYTES: Final = 1 << 20
"""Size of a page of results that is aimed at, by the size of the one before."""

_MAX_PAGE: Final = 512
"""Results that are read at once."""

_MAX_WATCHERS: Final = 1000
"""Joins that may wait for one task."""

_SHORTEST: Final = LATE_MS / 1000
"""Seconds for which the record of a child is kept at least after its notice.

A launch that a process had repeated, and that was held up, finds the record then: a kernel gives up unsent bytes after
some 15 minutes.
"""

_ENDED: Final = (b"succeeded", b"dead", b"cancelled")

_ASIDE_MS: Final = 600_000
"""Milliseconds after which a notice is tried again that could not be delivered."""

_LOOK_MS: Final = 60_000
"""Milliseconds between two looks at a join in which nothing happens."""

_DUE_NOTICES: Final = 200
_DUE_JOINS: Final = 500
"""Most notices and joins that one sweep of a partition looks at."""

_LOOKS: Final = 25
"""Joins that are looked at together."""


class OnFailure(StrEnum):
    """Meaning of a dead child for a join."""

    RAISE = "raise"
    """The join is over, and no further child is launched."""
    KEEP = "keep"
    """The error is a result like others."""
    WAIT = "wait"
    """The child stays open, and keeps its place in the window, until it is replayed."""


class JoinPlace(NamedTuple):
    """A join: the partition and id of the parent, and the name of the call, of the form of a task id."""

    partition: Partition
    task_id: str
    group: str

    @property
    def keys(self) -> tuple[str, str, str]:
        """Return the hash, the set of open children, and the list of those that are not launched."""
        return self.partition.join_keys(self.task_id, self.group)


class PlannedChild(NamedTuple):
    """A child that is not stored yet. message: not encrypted; its id must be stable, so that a repeated call is one."""

    queue: str
    message: TaskMessage


class ChildPlace(NamedTuple):
    """The task that a child of a join is now: its successor, if it has one."""

    partition: Partition
    task_id: str
    watched: bool = False
    """Whether the parent waits for a task that it did not spawn: it is not cancelled with the parent."""


class ChildEnd(StrEnum):
    """End of a child."""

    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"
    LOST = "lost"
    """It has no record any more: it was deleted, or has expired as a dead letter."""


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """The end of a child.

    Attributes:
        child: Its id in the join.
        result: JSON; None unless it has succeeded.
        reason, error: Of a dead child: why it was given up, and the evidence of its error.
    """

    child: str
    state: ChildEnd
    result: bytes | None = None
    reason: str = ""
    error: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinState:
    """A join at the time of the read.

    Attributes:
        total: Children that were added.
        ended: Children that have ended.
        open: Children that were launched and have not ended.
        todo: Children that are not launched.
        failed: First child that died, if that ends the join.
    """

    total: int
    ended: int
    open: int
    todo: int
    failed: str | None = None

    @property
    def over(self) -> bool:
        """Whether the parent need not wait any longer."""
        return self.failed is not None or not (self.open or self.todo)


class Watcher(NamedTuple):
    """A join that waits for a task: the place of its parent, the name of the call, and of the child in it."""

    queue: str
    partition: int
    task_id: str
    group: str
    child: str

    def place(self, namespace: str) -> JoinPlace:
        """Return the join."""
        return JoinPlace(Namespace(namespace).partition(self.queue, self.partition), self.task_id, self.group)


def life_of(attempts: int, replays: int) -> str:
    """Return which attempt of the parent a join belongs to; joins of another one are closed by the janitor."""
    return f"{attempts} {replays}"


async def add_children(
    gateway: Gateway,
    delivery: Delivery,
    place: JoinPlace,
    children: Sequence[PlannedChild],
    *,
    on_failure: OnFailure,
    limit: int = 0,
    life: str,
    first: int = 0,
) -> dict[str, Partition]:
    """Add children to a join, which the first call creates, and launch as many as its window has room for.

    Idempotent: children that the join has are skipped; those whose launch is not confirmed are launched again. They are
    sent in chunks by size. A child with large arguments is launched at once, whatever the limit is.

    Args:
        delivery: Delivery of the parent: the fence.
        children: In order.
        limit: How many may be open at once; 0 for any number.
        life: `life_of` the parent.
        first: Number of the first of these children in the join, from 0.

    Returns:
        The partitions of the children that were launched, by their ids.

    Raises:
        LeaseLost: The parent has lost its lease.
        Refused: The join was closed, or Redis has lost children that were added before `first`.
    """
    added, launched = 0, dict[str, Partition]()
    for child in children:
        _check_place(place, child.message.id)
    while added < len(children):
        chunk = _next_chunk(gateway, place, children, added)
        head: list[Argument] = [place.task_id, place.group, first + added, on_failure, limit, life]
        keys = [delivery.partition.ready, place.partition.record(place.task_id), *place.keys, place.partition.joins]
        answer = await _repeat(gateway, _ADD, keys, [*delivery.fence, *head, *chunk])
        if isinstance(answer, int) and answer < 0:
            added = -1 - answer - first
            if added < 0:
                raise Refused(f"could not add children to join {place.group} of task {place.task_id}: Redis lost some")
            continue
        wanted = _launched(answer, place)
        now = [child for child in children[added : added + len(chunk) // 2] if child.message.id in wanted]
        launched |= await launch_children(gateway, place, now)
        added += len(chunk) // 2
    return launched


def _launched(answer: Any, place: JoinPlace) -> set[str]:
    """Return the children to launch, from the answer of the script that adds them."""
    if isinstance(answer, int):
        check_accepted(answer, place.task_id, "spawn")
        return set()
    if answer[0] == 0:
        raise Refused(f"could not add children to join {place.group} of task {place.task_id}: it was closed")
    return {name.decode() for name in answer[1:]}


def _check_place(place: JoinPlace, child: str) -> None:
    for what, name in (("group", place.group), ("child", child)):
        if not is_task_id(name):
            raise ValueError(f"{what} of a join must have the form of a task id, got {name!r}")


def _next_chunk(gateway: Gateway, place: JoinPlace, children: Sequence[PlannedChild], first: int) -> list[Argument]:
    """Return ids and sealed messages of the next children, about half a megabyte."""
    cipher = gateway.encryptor.of(place.partition, place.task_id)
    chunk: list[Argument] = []
    size = 0
    for queue, message in islice(children, first, first + _SCRIPT_CHILDREN):
        sealed = b""
        if len(message.envelope) + len(message.arguments) <= DEFAULT_PAYLOAD_LIMIT:
            head = orjson.dumps({"queue": queue, "number": message.number})
            data = b"\n".join((head, message.envelope, message.arguments))
            sealed = cipher.encrypt(_launch_kind(place, message.id), data)
        size += len(sealed)
        if chunk and size > _SCRIPT_BYTES:
            break
        chunk += (message.id, sealed)
    return chunk


def _launch_kind(place: JoinPlace, child: str) -> str:
    return f"launch:{place.group}:{child}"


def _result_kind(place: JoinPlace, child: str) -> str:
    return f"join:{place.group}:{child}"


async def _repeat(gateway: Gateway, script: Any, keys: Sequence[str], args: Sequence[Argument]) -> Any:
    return await retry_while_unavailable(lambda: gateway.run(script, keys, args))


_ROUTERS: WeakKeyDictionary[Gateway, dict[tuple[str, str], PartitionRouter]] = WeakKeyDictionary()
"""Routers by gateway, and by namespace and queue: each reads the route once a minute."""


def _router(gateway: Gateway, namespace: str, queue: str) -> PartitionRouter:
    routers = _ROUTERS.setdefault(gateway, {})
    found = routers.get((namespace, queue))
    if found is None:
        found = routers[namespace, queue] = PartitionRouter(gateway, Namespace(namespace), queue)
    return found


async def launch_children(gateway: Gateway, place: JoinPlace, children: Sequence[PlannedChild]) -> dict[str, Partition]:
    """Enqueue children of a join, and confirm their launch; return their partitions by id. Idempotent."""
    launched = dict[str, Partition]()
    for start in range(0, len(children), _SCRIPT_CHILDREN):
        some = children[start : start + _SCRIPT_CHILDREN]
        found = await asyncio.gather(*(_launch(gateway, place, child) for child in some))
        args: list[Argument] = []
        for child, partition in zip(some, found, strict=True):
            launched[child.message.id] = partition
            args += (child.message.id, _place_text(partition, child.message.id))
        await gateway.run(_CONFIRM, place.keys[:1], args)
    return launched


async def _launch(gateway: Gateway, place: JoinPlace, child: PlannedChild) -> Partition:
    """Enqueue a child with its watcher; return its partition, that of a former launch if there was one."""
    namespace, plain = place.partition.namespace, child.message
    number = spread(plain.id) if plain.number is None else plain.number
    router = _router(gateway, namespace, child.queue).of(plain.lane)
    cipher = gateway.encryptor.of(Namespace(namespace).partition(child.queue), plain.id)
    message = plain.encrypted(cipher, store=gateway.value_store)
    watcher = Watcher(place.partition.queue, place.partition.index, place.task_id, place.group, plain.id)
    watchers = cipher.encrypt(_WATCHERS, orjson.dumps([[*watcher]]))

    async def store(partition: Partition) -> bool:
        keys = [partition.ready, partition.closed, partition.record(plain.id), partition.timeline]
        args = (message.envelope, message.arguments, plain.id, watchers)
        answer = await store_with_upload(
            gateway, partition, message.large, lambda uploads: gateway.run(_ENQUEUE, [*keys, *uploads], args)
        )
        return bool(answer >= 0)

    async def find(others: Sequence[Partition]) -> Partition | None:
        marks: list[Command] = [("HEXISTS", where.closed, "last") for where in others]
        found = await gateway.pipeline([*(("EXISTS", where.record(plain.id)) for where in others), *marks])
        known, last = found[: len(others)], found[len(others) :]
        router.reopen([where for where, mark in zip(others, last, strict=True) if not mark])
        return next((where for where, exists in zip(others, known, strict=True) if exists), None)

    return await router.place(number, store, find)


def _stored_child(gateway: Gateway, place: JoinPlace, child: str, sealed: bytes) -> PlannedChild:
    """Return a child from its message in the join. Raises `DecryptionError`, `ValueError`."""
    data = gateway.encryptor.of(place.partition, place.task_id).decrypt(_launch_kind(place, child), sealed)
    head, envelope, arguments = data.split(b"\n", 2)
    form = orjson.loads(head)
    return PlannedChild(str(form["queue"]), TaskMessage(child, envelope, arguments, form["number"], own_id=True))


async def _launch_stored(gateway: Gateway, place: JoinPlace, stored: Iterable[tuple[str, bytes]]) -> None:
    """Launch children by their messages in the join. One that cannot be read ends as lost: it was never enqueued."""
    children, broken = [], []
    for child, sealed in stored:
        try:
            children.append(_stored_child(gateway, place, child, sealed))
        except KeyMissing:
            raise
        except (DecryptionError, ValueError, LookupError, TypeError) as error:
            broken.append(ChildOutcome(child, ChildEnd.LOST, reason="unreadable", error=_evidence(error)))
    await launch_children(gateway, place, children)
    for outcome in broken:
        report_once(f"could not launch child {outcome.child} of task {place.task_id}: {outcome.error['message']}")
        await _notify(gateway, place, outcome)


async def watch_task(
    gateway: Gateway, delivery: Delivery, place: JoinPlace, partition: Partition, task_id: str, *, life: str
) -> ChildEnd | None:
    """Open a join on a task that the parent did not spawn. Idempotent.

    Returns:
        How it has ended, if it has: then there is no join. None: the join gets its notice.

    Raises:
        LeaseLost: The parent has lost its lease.
        TaskNotFound: There is no such task.
    """
    _check_place(place, task_id)
    state = await retry_while_unavailable(partial(gateway.command, "HGET", partition.record(task_id), "state"))
    if state is None:
        raise TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")
    if state in _ENDED:
        return ChildEnd(state.decode())
    head: list[Argument] = [place.task_id, place.group, 0, OnFailure.KEEP, 0, life]
    at = f"@{partition.queue} {partition.index} {task_id} watched"
    keys = [delivery.partition.ready, place.partition.record(place.task_id), *place.keys, place.partition.joins]
    answer = await _repeat(gateway, _ADD, keys, [*delivery.fence, *head, task_id, at])
    _launched(answer, place)
    watcher = Watcher(place.partition.queue, place.partition.index, place.task_id, place.group, task_id)
    state = await retry_while_unavailable(partial(_watch, gateway, partition, task_id, watcher))
    if state == b"watched":
        return None
    for act in ("close", "delete"):
        await _act_on(gateway, place, act)
    if state == b"missing":
        raise TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")
    return ChildEnd(state.decode())


_WATCHERS: Final = "watchers"
"""Kind of the watchers of a task."""


async def _watch(gateway: Gateway, partition: Partition, task_id: str, watcher: Watcher) -> bytes:
    """Add a watcher to a task; return `watched`, `missing`, or the state of a task that has ended."""
    record, cipher = partition.record(task_id), gateway.encryptor.of(partition, task_id)
    locks = _WATCHING.setdefault(gateway, WeakValueDictionary())
    async with locks.setdefault(record, asyncio.Lock()):  # else many that wait for one task change it again and again
        answer = b"changed"
        while answer == b"changed":
            stored = await gateway.command("HGET", record, "watchers")
            watchers = [] if stored is None else _watchers(cipher.decrypt(_WATCHERS, stored))
            if watcher not in watchers:
                watchers.append(watcher)
            if len(watchers) > _MAX_WATCHERS:
                raise Refused(f"could not wait for task {task_id}: {_MAX_WATCHERS} tasks wait for it already")
            new = cipher.encrypt(_WATCHERS, orjson.dumps([[*known] for known in watchers]))
            answer = await gateway.run(_WATCH, [record], [stored or b"", new])
    return bytes(answer)


_WATCHING: WeakKeyDictionary[Gateway, WeakValueDictionary[str, asyncio.Lock]] = WeakKeyDictionary()
"""Locks of the calls that add watchers, by gateway and record."""


def _watchers(data: bytes) -> list[Watcher]:
    """Return stored watchers. Raises `ValueError` for anything else."""
    watchers = [Watcher(*parts) for parts in orjson.loads(data)]
    for watcher in watchers:
        texts = (watcher.task_id, watcher.group, watcher.child)
        if not is_name(watcher.queue) or type(watcher.partition) is not int or not all(map(is_task_id, texts)):
            raise ValueError(f"not a watcher: {watcher!r}")
    return watchers


async def list_watchers(gateway: Gateway, partition: Partition, task_id: str) -> list[JoinPlace]:
    """Return the joins that wait for a task. Raises `DecryptionError`."""
    stored = await gateway.command("HGET", partition.record(task_id), "watchers")
    if stored is None:
        return []
    found = _watchers(gateway.encryptor.of(partition, task_id).decrypt(_WATCHERS, stored))
    return [watcher.place(partition.namespace) for watcher in found]


async def read_join(gateway: Gateway, place: JoinPlace) -> JoinState | None:
    """Return the state of a join, in one round trip; None if the join is missing."""
    join, launched, waiting = place.keys
    (total, ended, failed), open_, todo = await gateway.pipeline(
        [("HMGET", join, "total", "ended", "failed"), ("SCARD", launched), ("LLEN", waiting)]
    )
    if total is None:
        return None
    return JoinState(int(total), int(ended or 0), open_, todo, None if failed is None else failed.decode())


async def has_joins(gateway: Gateway, partition: Partition, task_id: str) -> bool:
    """Return whether a task has a join."""
    cursor: Argument = 0
    while True:
        cursor, found = await gateway.command("ZSCAN", partition.joins, cursor, "MATCH", f"{task_id}:*", "COUNT", 1000)
        if found or int(cursor) == 0:
            return bool(found)


async def child_places(gateway: Gateway, place: JoinPlace, children: Sequence[str]) -> dict[str, ChildPlace]:
    """Return where children are, by their ids in the join; those that are not launched are left out."""
    if not children:
        return {}
    found = await gateway.command("HMGET", place.keys[0], *(f"p:{child}" for child in children))
    known = zip(children, found, strict=True)
    return {child: _child_place(place, stored) for child, stored in known if stored is not None}


def _is_of(task_id: str, child: str) -> bool:
    """Return whether a task may be a child of a join now, or a successor of it, by its id: `ID`, `ID.h1`, `ID.h2`.

    The place in a join and the field `handed_to` are plain text: they lead to no other task, whose result would be
    encrypted for the parent.
    """
    return is_task_id(task_id) and (task_id == child or _SUCCESSOR.sub("", task_id) == _SUCCESSOR.sub("", child))


_SUCCESSOR: Final = re.compile(r"\.h[1-9][0-9]*$")


def _place_text(partition: Partition, task_id: str) -> str:
    """Return the place of a child as a join stores it."""
    return f"{partition.queue} {partition.index} {task_id}"


def _child_place(place: JoinPlace, stored: bytes) -> ChildPlace:
    queue, index, task_id, *watched = stored.decode().split(" ")
    return ChildPlace(Namespace(place.partition.namespace).partition(queue, int(index)), task_id, bool(watched))


async def read_outcomes(gateway: Gateway, place: JoinPlace, children: Iterable[str]) -> AsyncIterator[ChildOutcome]:
    """Yield the ends of children in this order, page by page; children that have not ended are left out.

    Raises:
        DecryptionError: A result cannot be decrypted.
        LargeValueLost: A part of a large result is missing.
    """
    names, count = iter(children), _MAX_PAGE // 16
    while page := list(islice(names, count)):
        read = partial(gateway.command, "HMGET", place.keys[0], *(f"r:{child}" for child in page))
        found = await retry_while_unavailable(read)
        for child, stored in zip(page, found, strict=True):
            if stored is not None:
                yield await _read_outcome(gateway, place, child, stored)
        size = sum(len(stored) for stored in found if stored is not None)
        count = max(8, min(2 * count, _PAGE_BYTES * count // size if size else _MAX_PAGE, _MAX_PAGE))


async def _read_outcome(gateway: Gateway, place: JoinPlace, child: str, stored: bytes) -> ChildOutcome:
    cipher, kind = gateway.encryptor.of(place.partition, place.task_id), _result_kind(place, child)
    head, _, result = cipher.decrypt(kind, stored).partition(b"\n")
    if (large := LargeValue.decode(result)) is not None:
        decrypt, what = partial(cipher.decrypt, f"{kind}:chunks"), f"the result of child {child}"
        result = await read_large(gateway, place.keys[0], "c", child, large, decrypt, what)
    form = orjson.loads(head)
    state = ChildEnd(form["state"])
    return ChildOutcome(child, state, result if state is ChildEnd.SUCCEEDED else None, form["reason"], form["error"])


async def ended_children(gateway: Gateway, place: JoinPlace, after: int, most: int = 100) -> list[str]:
    """Return the children that have ended, in the order of arrival, after the first `after` of them."""
    fields = (f"d:{number}" for number in range(after + 1, after + most + 1))
    found = await retry_while_unavailable(partial(gateway.command, "HMGET", place.keys[0], *fields))
    return [stored.split(b" ")[0].decode() for stored in found if stored is not None]


async def close_join(gateway: Gateway, place: JoinPlace, *, retention: float) -> None:
    """Cancel the open children that the parent has spawned, and delete the join. Idempotent.

    Record first what the join has led to: a run that needs the join again cannot open it. A process that dies in
    between leaves a join that launches nothing; the janitor closes it. A child whose launch is not confirmed is
    launched first, so that no launch that is on its way enqueues it later.

    Args:
        retention: Seconds for which the records of cancelled children are kept.
    """
    if not await _act_on(gateway, place, "close"):
        return
    async for children in _open_children(gateway, place):
        unconfirmed = [(child, message) for child, message, _ in children if message]
        with suppress(DecryptionError):
            await _launch_stored(gateway, place, unconfirmed)
        places = await child_places(gateway, place, [child for child, _, _ in children])
        own = [found for found in places.values() if not found.watched]
        await asyncio.gather(*(_cancel(gateway, found, retention) for found in own))
    await _act_on(gateway, place, "delete")


async def _cancel(gateway: Gateway, found: ChildPlace, retention: float) -> None:
    """Cancel a child, and deliver its notice: perhaps no worker serves its queue, and its record has no TTL until then.

    What cannot be delivered stays in the outbox.
    """
    with suppress(TaskNotFound):
        state = await cancel_task(gateway, found.partition, found.task_id, retention=retention)
        if state.terminal:
            with suppress(PerdureError):
                await _deliver(gateway, found.partition, found.task_id)


async def _act_on(gateway: Gateway, place: JoinPlace, act: str) -> bool:
    """Close, delete or clear a join. Return whether there is one.

    If Redis has lost that the join was closed, it is not deleted: it may have lost that the children were cancelled as
    well. The janitor closes it if the parent has ended.
    """
    member = f"{place.task_id}:{place.group}"
    return bool(await gateway.run(_CLOSE, [*place.keys, place.partition.joins], [member, act, LATE_MS]))


async def _open_children(
    gateway: Gateway, place: JoinPlace
) -> AsyncIterator[list[tuple[str, bytes | None, bytes | None]]]:
    """Yield the open children of a join in pages: id, message if the launch is not confirmed, and stored place."""
    join, launched, _ = place.keys
    cursor: Argument = 0
    while True:
        cursor, names = await gateway.command("SSCAN", launched, cursor, "COUNT", _SCRIPT_CHILDREN)
        if names:
            fields = [prefix + name for name in names for prefix in (b"l:", b"p:")]
            found = await gateway.command("HMGET", join, *fields)
            children = [name.decode() for name in names]
            yield list(zip(children, found[::2], found[1::2], strict=True))
        if int(cursor) == 0:
            return


_FIELDS: Final = ("state", "finished", "settled", "replays", "result", "reason", "error", "watchers", "handed_to")


class _Ended(NamedTuple):
    """Fields of a task that are read when it has ended. The first one is the state."""

    state: bytes | None
    finished: bytes | None
    settled: bytes | None
    replays: bytes | None
    result: bytes | None
    reason: bytes | None
    error: bytes | None
    watchers: bytes | None
    handed_to: bytes | None

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class Delivered(NamedTuple):
    """Outcome of a delivery: number of the tasks whose watchers know, and the parents that it has woken."""

    done: int
    woken: Sequence[tuple[Partition, str]]


async def deliver_notices(gateway: Gateway, tasks: Sequence[tuple[Partition, str]]) -> Delivered:
    """Notify the watchers of tasks that have ended. Idempotent.

    What cannot be delivered is reported once, and put aside; it hides no other notice.

    Args:
        tasks: Partition and id, as the settle scripts or an outbox name them.

    Raises:
        Unavailable: Redis does not answer; nothing is lost.
    """
    found = await asyncio.gather(*(_try_deliver(gateway, *task) for task in tasks), return_exceptions=True)
    woken: dict[tuple[Partition, str], None] = {}
    for delivered in found:
        if isinstance(delivered, BaseException):
            raise delivered
        woken.update(dict.fromkeys(delivered or ()))
    return Delivered(sum(delivered is not None for delivered in found), list(woken))


async def _try_deliver(gateway: Gateway, partition: Partition, task_id: str) -> list[tuple[Partition, str]] | None:
    """Return the parents that were woken; None if the notice was put aside."""
    try:
        return await _deliver(gateway, partition, task_id)
    except Unavailable:
        raise
    except Exception as error:  # noqa: BLE001 - a broken notice hides no other
        shown = f"the notice of the end of task {task_id} of queue {partition.queue!r}"
        report_once(f"could not deliver {shown}: {error}; it is tried again every {_ASIDE_MS // 60_000} minutes")
        time = milliseconds(await gateway.command("TIME", node_of=partition.outbox))
        await gateway.command("ZADD", partition.outbox, "XX", time + _ASIDE_MS, task_id)
        return None


async def _deliver(gateway: Gateway, partition: Partition, task_id: str) -> list[tuple[Partition, str]]:
    woken = []
    ended = _Ended(*await gateway.command("HMGET", partition.record(task_id), *_FIELDS))
    if ended.has_ended and ended.watchers is not None:
        cipher = gateway.encryptor.of(partition, task_id)
        try:
            watchers = _watchers(cipher.decrypt(_WATCHERS, ended.watchers))
        except KeyMissing:
            raise
        except (DecryptionError, ValueError, TypeError) as error:  # the janitors of the parents look at their children
            report_once(f"ignored the watchers of task {task_id} of queue {partition.queue!r}: {error}")
            watchers = []
        for watcher in watchers:
            place = watcher.place(partition.namespace)
            if await _pass_on(gateway, place, watcher.child, partition, task_id, ended):
                woken.append((place.partition, place.task_id))
    args: list[Argument] = [task_id, ended.finished or b"", ended.settled or b"", ended.replays or b""]
    args += [str(LATE_MS), str(registered_retention(_SHORTEST))]
    await gateway.run(_SENT, [partition.record(task_id), partition.outbox, partition.retentions], args)
    return woken


async def _pass_on(
    gateway: Gateway, place: JoinPlace, child: str, partition: Partition, task_id: str, ended: _Ended
) -> bool:
    """Deliver the end of a task to a join; if it has a successor, that is watched in its place.

    Return whether that woke the parent.
    """
    namespace = Namespace(partition.namespace)
    watcher = Watcher(place.partition.queue, place.partition.index, place.task_id, place.group, child)
    for _ in range(MAX_HAND_OFFS + 1):
        if ended.state != b"succeeded" or ended.handed_to is None:
            outcome, result = await _outcome(gateway, partition, task_id, child, ended)
            return await _notify(gateway, place, outcome, result, at=_place_text(partition, task_id))
        task_id = ended.handed_to.decode("utf-8", "replace")
        found = await find_task(gateway, namespace, task_id) if _is_of(task_id, child) else None
        if found is None:
            break
        partition = found
        if await _watch(gateway, partition, task_id, watcher) == b"watched":
            await _confirm(gateway, place, child, partition, task_id)
            return False
        ended = _Ended(*await gateway.command("HMGET", partition.record(task_id), *_FIELDS))
        if not ended.has_ended:
            break
    return await _notify(gateway, place, ChildOutcome(child, ChildEnd.LOST, reason="lost"))


async def _confirm(gateway: Gateway, place: JoinPlace, child: str, partition: Partition, task_id: str) -> None:
    """Store that a child is another task now, its successor."""
    known = (await child_places(gateway, place, [child])).get(child)
    watched = " watched" if known is not None and known.watched else ""
    await gateway.run(_CONFIRM, place.keys[:1], [child, f"{_place_text(partition, task_id)}{watched}"])


async def _outcome(
    gateway: Gateway, partition: Partition, task_id: str, child: str, ended: _Ended
) -> tuple[ChildOutcome, bytes]:
    """Return how a task has ended, and its result, decrypted. One that can never be read counts as lost."""
    cipher = gateway.encryptor.of(partition, task_id)
    state = ChildEnd((ended.state or b"").decode())
    if state is ChildEnd.DEAD:
        evidence = {} if ended.error is None else opened_evidence(cipher, ended.error)
        return ChildOutcome(child, state, reason=(ended.reason or b"").decode("utf-8", "replace"), error=evidence), b""
    if state is ChildEnd.CANCELLED or (ended.result is None and cipher.accepts_plain):
        return ChildOutcome(child, state), b"null"
    try:
        result = cipher.decrypt(RESULT, ended.result or b"")
        if (large := LargeValue.decode(result)) is not None:
            decrypt, what = partial(cipher.decrypt, RESULT_CHUNKS), f"the result of task {task_id}"
            result = await read_large(gateway, partition.record(task_id), "result", "", large, decrypt, what)
    except (Unavailable, KeyMissing, ConfigurationError):
        raise  # another process may have the key, or the store
    except PerdureError as error:
        report_once(f"could not read the result of task {task_id} for task that waits for it: {error}")
        return ChildOutcome(child, ChildEnd.LOST, reason="unreadable", error=_evidence(error)), b""
    return ChildOutcome(child, state), result


def _evidence(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error), "traceback": ""}


async def _notify(
    gateway: Gateway, place: JoinPlace, outcome: ChildOutcome, result: bytes = b"null", *, at: str = ""
) -> bool:
    """Deliver the end of a child to its join, and launch the children that it makes room for.

    at: where the child is, for a launch that was not confirmed. Return whether that woke the parent.
    """
    cipher, kind = gateway.encryptor.of(place.partition, place.task_id), _result_kind(place, outcome.child)
    head = orjson.dumps({"state": outcome.state, "reason": outcome.reason, "error": dict(outcome.error)})
    if len(result) > DEFAULT_PAYLOAD_LIMIT:
        stored = await asyncio.to_thread(cipher.encrypt, f"{kind}:chunks", result)
        value = cut(outcome.child, stored, size=len(result), store=gateway.value_store)
        await value.save_object(gateway, f"the result of child {outcome.child} of task {place.task_id}")
        for number, chunk in enumerate(value.chunks):
            args: list[Argument] = [outcome.child, value.reference.field("c", number), chunk]
            if not await gateway.run(_CHUNK, place.keys[:2], args):
                return False
        result = value.reference.encode()
    own = place.partition
    keys = [own.record(place.task_id), *place.keys, own.joins, own.due, own.nudge]
    sealed = cipher.encrypt(kind, head + b"\n" + result)
    answer = await gateway.run(_NOTIFY, keys, [place.task_id, place.group, outcome.child, outcome.state, sealed, at])
    if len(answer) > 1:
        launches = zip(answer[1::2], answer[2::2], strict=True)
        await _launch_stored(gateway, place, [(child.decode(), message) for child, message in launches])
    return bool(answer[0] == 2)


async def sweep_notices(gateway: Gateway, partition: Partition, *, retention: float) -> int:
    """Do what dead processes have left in a partition: notices in its outbox, launches, and joins without a parent.

    Returns how much was done. An error of one join is reported once, and hides no other.

    Args:
        retention: Seconds for which the records of cancelled children are kept.
    """
    (due, *_), (joins, *_) = await asyncio.gather(
        gateway.run(_DUE, [partition.outbox], [_DUE_NOTICES]), gateway.run(_DUE, [partition.joins], [_DUE_JOINS])
    )
    named = [(partition, name) for member in due if is_task_id(name := member.decode("utf-8", "replace"))]
    done = (await deliver_notices(gateway, named)).done
    foreign = [member for member in due if not is_task_id(member.decode("utf-8", "replace"))]
    if foreign:
        await gateway.command("ZREM", partition.outbox, *foreign)
    for start in range(0, len(joins), _LOOKS):
        some = joins[start : start + _LOOKS]
        done += sum(await asyncio.gather(*(_try_look(gateway, partition, member, retention) for member in some)))
    return done


async def _try_look(gateway: Gateway, partition: Partition, member: bytes, retention: float) -> bool:
    """Look at a join, and put it off until its next look. Return whether anything was done."""
    task_id, _, group = member.decode("utf-8", "replace").partition(":")
    if not is_task_id(task_id) or not is_task_id(group):
        await gateway.command("ZREM", partition.joins, member)
        return False
    place, done = JoinPlace(partition, task_id, group), False
    try:
        done = await look_at_join(gateway, place, retention=retention)
    except Unavailable:
        raise
    except Exception as error:  # noqa: BLE001 - a broken join hides no other
        report_once(f"could not look after join {group} of task {task_id} of queue {partition.queue!r}: {error}")
    time = milliseconds(await gateway.command("TIME", node_of=partition.joins))
    await gateway.command("ZADD", partition.joins, "XX", time + _LOOK_MS, member)
    return done


async def look_at_join(gateway: Gateway, place: JoinPlace, *, retention: float) -> bool:
    """Repeat the launches of a join that are not confirmed, and deliver what its children have become.

    A join is closed whose parent has ended or is in another attempt, and one whose closing a process has left
    unfinished. Return whether anything was done.
    """
    (life, mode, closed), (state, attempts, replays) = await gateway.pipeline(
        [
            ("HMGET", place.keys[0], "life", "mode", "closed"),
            ("HMGET", place.partition.record(place.task_id), "state", "attempts", "replays"),
        ]
    )
    if life is None:
        await _act_on(gateway, place, "clear")
        return False
    alive = state is not None and state not in _ENDED
    if closed or not alive or life.decode() != life_of(int(attempts or 0), int(replays or 0)):
        await close_join(gateway, place, retention=retention)
        return True
    done = False
    async for children in _open_children(gateway, place):
        unconfirmed = [(child, message) for child, message, _ in children if message]
        if unconfirmed:
            await _launch_stored(gateway, place, unconfirmed)
            done = True
        known = [(child, _child_place(place, stored)) for child, message, stored in children if stored and not message]
        known = [(child, found) for child, found in known if _is_of(found.task_id, child)]
        reads = [("HMGET", found.partition.record(found.task_id), *_FIELDS) for _, found in known]
        for (child, found), reply in zip(known, await gateway.pipeline_each(reads), strict=True):
            if not isinstance(reply, Refused):
                done = await _look_at_child(gateway, place, child, found, _Ended(*reply), mode == b"wait") or done
    return done


async def _look_at_child(
    gateway: Gateway, place: JoinPlace, child: str, found: ChildPlace, ended: _Ended, waits: bool
) -> bool:
    if ended.state is None:
        await _notify(gateway, place, ChildOutcome(child, ChildEnd.LOST, reason="lost"))
    elif ended.has_ended:
        if ended.state == b"dead" and waits:
            return False
        await _pass_on(gateway, place, child, found.partition, found.task_id, ended)
    elif ended.watchers is None:
        watcher = Watcher(place.partition.queue, place.partition.index, place.task_id, place.group, child)
        await _watch(gateway, found.partition, found.task_id, watcher)
    else:
        return False
    return True

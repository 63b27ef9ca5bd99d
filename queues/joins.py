"""Joins: a task that waits for others, and the notices that tell it of their ends.

A join belongs to one call of a task, the parent, and lies in the parent's slot: a hash, the set of its open children, and
the list of those that wait for a place in its window. A child lies in a slot of its own. Its record has the field
`watchers`: who is to get a notice of its end. The script that ends a task with watchers puts it into the outbox of its
partition in the same act, and leaves its record without a TTL. `deliver_notices` reads what is in an outbox, stores each
result in the join of its parent, and confirms: then the record gets its TTL.

Each act may be repeated, and each may be the last of a process that dies:

    add_children.lua    parent's slot: children into `todo`, the first of them into `open`; fenced by the parent's delivery
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

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from .delivery.leases import Delivery
from .envelope import TaskMessage
from .keys import Namespace, Partition
from .transport.gateway import Gateway


class OnFailure(StrEnum):
    """What the end of a dead child means for a join."""

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
    """How a child has ended."""

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


CHUNK_BYTES: Final = 512 * 1024
"""Size of the messages that one script adds to a join."""


async def add_children(
    gateway: Gateway,
    delivery: Delivery,
    place: JoinPlace,
    children: Iterable[PlannedChild],
    *,
    on_failure: OnFailure,
    limit: int = 0,
    life: str,
    first: int = 0,
) -> dict[str, Partition]:
    """Add children to a join, which the first call creates, and launch as many as its window has room for.

    Idempotent: children that the join has are skipped; those whose launch is not confirmed are launched again. They are
    sent in chunks by size.

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
        PayloadTooLarge: A child in a window has arguments over the payload limit.
    """
    raise NotImplementedError


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
    raise NotImplementedError


def life_of(attempts: int, replays: int) -> str:
    """Return which attempt of the parent a join belongs to; joins of another one are closed by the janitor."""
    return f"{attempts} {replays}"


async def read_join(gateway: Gateway, place: JoinPlace) -> JoinState | None:
    """Return the state of a join, in one round trip. None if there is none (any more)."""
    raise NotImplementedError


async def child_places(gateway: Gateway, place: JoinPlace, children: Sequence[str]) -> dict[str, ChildPlace]:
    """Return where children are, by their ids in the join; those that are not launched are left out."""
    raise NotImplementedError


def read_outcomes(gateway: Gateway, place: JoinPlace, children: Iterable[str]) -> AsyncIterator[ChildOutcome]:
    """Yield the ends of children in this order, page by page; children that have not ended are left out.

    Raises:
        DecryptionError: A result cannot be decrypted.
        LargeValueLost: A part of a large result is missing.
    """
    raise NotImplementedError


async def ended_children(gateway: Gateway, place: JoinPlace, after: int, most: int = 100) -> list[str]:
    """Return the children that have ended, in the order of arrival, after the first `after` of them."""
    raise NotImplementedError


async def close_join(gateway: Gateway, place: JoinPlace, *, retention: float) -> None:
    """Cancel the open children that the parent has spawned, and delete the join. Idempotent.

    A process that dies in between leaves a join that launches nothing; the janitor closes it.

    Args:
        retention: Seconds for which the records of cancelled children are kept.
    """
    raise NotImplementedError


async def list_watchers(gateway: Gateway, partition: Partition, task_id: str) -> list[JoinPlace]:
    """Return the joins that wait for a task. Raises `DecryptionError`."""
    raise NotImplementedError


async def deliver_notices(gateway: Gateway, namespace: Namespace, tasks: Sequence[tuple[Partition, str]]) -> int:
    """Notify the watchers of tasks that have ended; return how many tasks are done. Idempotent.

    What cannot be delivered is reported once, and put aside; it hides no other notice.

    Args:
        tasks: Partition and id, as the settle scripts or an outbox name them.
    """
    raise NotImplementedError


async def sweep_notices(gateway: Gateway, namespace: Namespace, partition: Partition, *, retention: float) -> int:
    """Do what dead processes have left in a partition: notices in its outbox, launches, and joins without a parent."""
    raise NotImplementedError

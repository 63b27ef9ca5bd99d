"""Depth of a queue: its limit for a task, and the producer's wait for room.

The depth is the number of tasks that wait for a worker, in the ready streams and in the waiting lists of limits; for a
task with a delay, the due set counts too: tasks that are scheduled, retried or asleep. Each lane of a queue has a depth
of its own, so that no flood of tasks of a low priority keeps those of a high one out. Each script that stores tasks of
a call with a limit compares the depth of its partition with a number from the producer, in the act that stores them.
The scripts of other calls compare nothing.

A script sees one partition only. If the queue has one, the number is the limit, which no producers can exceed
together. If it has several, the number is the depth of the partition and its share of what is left, by a look at all
partitions that is at most a quarter of a second old. After a script has stored nothing, the producer looks again, so
that one ordering key may have all of the limit. The limit may be exceeded by what other producers store between a look
and a script.

Tasks that are stored already always run: retries, woken and due tasks, released messages and replays are not compared.
Nor are children, groups, successors, clean-up tasks and turns of sessions: what stores them may be what has to run
before there is room.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import anyio

from .defaults import MAX_SECONDS
from .durations import Duration, to_seconds
from .enqueueing import DEPTH
from .errors import QueueFull
from .keys import Partition
from .lanes import NORMAL, Lane, lane_of
from .partitions.router import PartitionRouter
from .runtime import RUNTIME
from .transport.gateway import Gateway

WhenFull = Literal["refuse", "wait"]
"""Behaviour of a call whose queue is full: it raises `QueueFull`, or waits for room first."""

DEFAULT_WAIT: Final = 60.0
"""Seconds without room after which a waiting call raises `QueueFull`."""

_LARGEST: Final = 10**12
"""Largest limit; more messages have room in no Redis."""

_KNOWN: Final = 0.25
"""Seconds for which a producer uses what a look at the partitions has found."""

_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.25
"""Seconds between two looks at a full queue."""


@dataclass(frozen=True, slots=True)
class MaxDepth:
    """Limit of the depth of a queue, for the calls that have it.

    wait: seconds without room that a call waits; 0 if it is refused at once.
    """

    depth: int
    wait: float = 0.0

    def published(self) -> dict[str, Any]:
        """Return the limit as plain data, for the catalog."""
        return {"max_depth": self.depth, "wait_limit": self.wait}

    @classmethod
    def read(cls, published: Mapping[str, Any]) -> MaxDepth:
        """Return the limit of a catalog. Raises `ValueError`, `TypeError` or `LookupError` for anything else."""
        wait = published["wait_limit"]
        return cls(_depth(published["max_depth"]), _seconds(wait) if wait else 0.0)


def make_limit(
    max_depth: int | Literal[False] | None,
    when_full: WhenFull | None,
    wait_limit: Duration | None,
    default: MaxDepth | None = None,
) -> MaxDepth | None:
    """Return the limit that options of a task or a call make; None without one.

    Args:
        max_depth: False for no limit, None for that of `default`.
        default: limit of the task or the queue, whose other fields hold where the call names none.

    Raises:
        ValueError, TypeError: an option is wrong.
    """
    if max_depth is False:
        if when_full is not None or wait_limit is not None:
            raise ValueError("when_full and wait_limit must go with max_depth, got max_depth=False")
        return None
    if max_depth is None and when_full is None and wait_limit is None:
        return default
    if max_depth is not None:
        default = MaxDepth(_depth(max_depth), 0.0 if default is None else default.wait)
    if default is None:
        raise ValueError("when_full and wait_limit must go with max_depth, got no max_depth")
    if when_full not in (None, *get_args(WhenFull)):
        raise ValueError(f"when_full must be 'refuse' or 'wait', got {when_full!r}")
    if wait_limit is not None:
        if (when_full or ("wait" if default.wait else "refuse")) == "refuse":
            raise ValueError("wait_limit must go with when_full='wait'")
        return replace(default, wait=_seconds(wait_limit))
    if when_full == "wait":
        return replace(default, wait=default.wait or DEFAULT_WAIT)
    return replace(default, wait=0.0) if when_full == "refuse" else default


def _depth(given: object) -> int:
    if type(given) is not int:
        raise TypeError(f"max_depth must be a whole number, got {given!r}")
    if not 1 <= given <= _LARGEST:
        raise ValueError(f"max_depth must be 1 to {_LARGEST:.0e} tasks, got {given}")
    return given


def _seconds(given: Any) -> float:
    if isinstance(given, bool):
        raise TypeError(f"wait_limit must be seconds or a timedelta, got {given!r}")
    seconds = to_seconds(given, "wait_limit")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"wait_limit must be more than 0 seconds and at most {MAX_SECONDS:.0e}, got {seconds:g}")
    return seconds


class KnownDepths:
    """The depths of the partitions of a lane at the last look of a producer, for all its calls."""

    def __init__(self) -> None:
        self.at = -math.inf
        self.of: dict[Partition, int] = {}

    @property
    def total(self) -> int:
        return sum(self.of.values())


class RoomFinder:
    """Finds room in one queue for the tasks of one call.

    Args:
        router: of any lane of the queue. known: depths of earlier looks, by lane.
        delayed: whether the tasks have a delay.
    """

    def __init__(
        self,
        gateway: Gateway,
        router: PartitionRouter,
        queue: str,
        rule: MaxDepth,
        known: dict[Lane, KnownDepths],
        *,
        delayed: bool,
    ) -> None:
        self._gateway = gateway
        self._router = router
        self._queue = queue
        self._rule = rule
        self._known = known
        self._delayed = delayed
        self._lane: Lane = NORMAL
        self._found = RUNTIME.monotonic()
        self._waited = False
        self._pause = _FIRST_PAUSE

    async def first(self, partition: Partition) -> int:
        """Return the number for the first script of a partition; 0 if the queue is full: the script finds known ids."""
        known = self._use(partition)
        if self._router.of(self._lane).only is not None:
            return self._rule.depth
        fresh = RUNTIME.monotonic() - known.at < _KNOWN and partition in known.of
        if not fresh or known.total >= self._rule.depth:
            await self._look(partition)
        return self._number(partition) or 0

    async def next(self, partition: Partition) -> int | None:
        """Return the number after a script without room; None if the queue is full, and the wait is over."""
        self._use(partition)
        while True:
            await self._look(partition)
            if (number := self._number(partition)) is not None:
                return number
            if not await self.wait():
                return None

    async def is_there(self) -> bool:
        """Return whether the queue is not full, by a look at the partitions of the last script."""
        await self._look()
        return self._known[self._lane].total < self._rule.depth

    def stored(self, partition: Partition, count: int) -> None:
        """Note that tasks of the call were stored: the time without room starts again."""
        self._found, self._pause = RUNTIME.monotonic(), _FIRST_PAUSE
        known = self._use(partition)
        if partition in known.of:
            known.of[partition] += count

    async def wait(self) -> bool:
        """Wait for a moment; return False if the time without room is over."""
        left = self._found + self._rule.wait - RUNTIME.monotonic()
        if left <= 0:
            return False
        self._waited = True
        await anyio.sleep(min(left, RUNTIME.uniform(0.5, 1.0) * self._pause))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True

    def full(self) -> QueueFull:
        """Return the error of a call for which there is no room."""
        waited = self._rule.wait if self._waited else 0.0
        return QueueFull(self._queue, self._known[self._lane].total, self._rule.depth, waited=waited)

    def _use(self, partition: Partition) -> KnownDepths:
        """Work on the lane of a partition."""
        self._lane = lane_of(partition.index)
        return self._known.setdefault(self._lane, KnownDepths())

    async def _look(self, *partition: Partition) -> None:
        partitions = list(dict.fromkeys((*self._router.of(self._lane).partitions, *partition)))
        depths = await read_depths(self._gateway, partitions, delayed=self._delayed, most=self._rule.depth)
        known = self._known[self._lane]
        known.of, known.at = dict(zip(partitions, depths, strict=True)), RUNTIME.monotonic()

    def _number(self, partition: Partition) -> int | None:
        known = self._known[self._lane]
        left = self._rule.depth - known.total
        return known.of[partition] + max(1, left // self._router.of(self._lane).width) if left > 0 else None


async def read_depths(
    gateway: Gateway, partitions: Sequence[Partition], *, delayed: bool = False, most: int = _LARGEST
) -> list[int]:
    """Return the depth of each partition, as the scripts count it.

    Args:
        delayed: with what is in the due set.
        most: number of tasks from which on no more waiting lists are counted.
    """
    scheduled = "1" if delayed else ""
    reads = (gateway.run(DEPTH, [one.ready, one.due], [scheduled, most]) for one in partitions)
    return [int(depth) for depth in await asyncio.gather(*reads)]

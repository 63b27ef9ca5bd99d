"""The promoter: moves due tasks to the ready stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio

from ....queues.delivery.due_set import promote_due
from ....queues.delivery.fleet_locks import acquire_fleet_locks
from ....queues.delivery.leases import Touch
from ....queues.handle import DEFAULT_RESULT_TTL, Replacement, answer_requests, cancel_task
from ....queues.keys import Namespace, Partition
from ....queues.runtime import RUNTIME
from ....queues.transport.gateway import Gateway
from ...log import logger
from ...loop_errors import LoopErrors

_MAX_SLEEP: Final = 1.0
"""Longest sleep in seconds, because a nudge may be lost."""

_LOCK_TTL: Final = 2.5
"""TTL of the lock on a due set, in seconds: how late a due task can be if the lock holder dies."""

_NEW: Final = 5.0
"""Seconds for which an entry is new: fewer than a token of a limit lives after its admission, see `limit_tokens.py`."""

_KNOWN: Final = 30.0
"""Seconds for which the clock of Redis must have been seen without a step, or a lease if that is longer."""

_STEADY: Final = 1.0
"""Largest step in seconds, by which replies may only have been late."""

_CLOCK_MS: Final = 0.01
"""Seconds by which the time in an id may be later than a time that was read before."""

_TOUCH_INTERVAL: Final = 0.5
"""Shortest interval between two touches of a partition, in seconds; a check follows each retry of a task."""


class Promoter:
    """Sleeps until the next due time, or until it is woken because an earlier one was added.

    One worker watches each due set: the first one, or the one that a nudge reached. The others only check that the lock
    is held. The lock holder also touches the partition, since no other worker may: sweeps need a free slot, and
    heartbeats a running task.
    """

    def __init__(
        self,
        gateway: Gateway,
        partitions: Sequence[Partition],
        worker: str,
        touch: Callable[[Partition], Awaitable[None]],
        retention: Callable[[], float] = lambda: DEFAULT_RESULT_TTL,
        lease: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Args:
        worker: id of this worker.
        touch: touches a partition (see `Consumer.touch`).
        retention: returns the seconds for which the record of a task is kept that a producer has cancelled.
        lease: returns the seconds of a lease, for which tokens of limits are held at least.
        """
        self._gateway = gateway
        self._worker = worker
        self._touch = touch
        self._retention = retention
        self._lease = lease
        self._touched: dict[Partition, float] = {}
        self._held: dict[Partition, float] = {}
        """Until when this worker does not ask for the lock of a due set again; another may promote as well."""
        self._clock_moved = 0.0
        self._next = dict.fromkeys(partitions, 0.0)
        self._errors = LoopErrors("promote due tasks")
        self._taking_over: set[Partition] = set()
        self._woken = anyio.Event()

    def set_partitions(self, partitions: Sequence[Partition]) -> None:
        """Replace the partitions."""
        self._next = {partition: self._next.get(partition, 0.0) for partition in partitions}
        self._held = {partition: until for partition, until in self._held.items() if partition in self._next}
        self._woken.set()

    def wake(self, partition: Partition) -> None:
        """Check a partition now: this worker added a due time."""
        if partition in self._next:
            self._next[partition] = 0.0
            self._woken.set()

    def take_over(self) -> None:
        """Check all partitions now and take over their locks.

        Only this worker received the nudge about an earlier due time.
        """
        self._next = dict.fromkeys(self._next, 0.0)
        self._taking_over = set(self._next)
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken = anyio.Event()
            now = RUNTIME.monotonic()
            await asyncio.gather(*(self._check(one) for one, when in self._next.items() if when <= now))
            until_next = min(self._next.values(), default=now + _MAX_SLEEP) - RUNTIME.monotonic()
            with anyio.move_on_after(until_next):
                await self._woken.wait()

    async def _check(self, partition: Partition) -> None:
        take_over = partition in self._taking_over
        self._taking_over.discard(partition)
        self._next[partition] = math.inf  # waking from here on asks for another check
        try:
            wait = await self._promote(partition, take_over)
        except Exception as error:  # noqa: BLE001 - the other partitions are promoted
            self._errors.note(error, f"queue {partition.queue}, partition {partition.index}")
            wait = _MAX_SLEEP
        if partition in self._next:
            self._next[partition] = min(self._next[partition], RUNTIME.monotonic() + wait)

    async def _promote(self, partition: Partition, take_over: bool) -> float:
        """Promote due tasks if this worker holds the lock. Return the seconds until the next check."""
        now = RUNTIME.monotonic()
        if take_over or now >= self._held.get(partition, 0.0):
            locks = {partition: partition.promote_lock}
            waits = await acquire_fleet_locks(
                self._gateway, locks, self._worker, _LOCK_TTL, renew=True, take_over=take_over
            )
            if another := waits[partition]:
                # If the lock holder dies, all others come; with jitter, most of them find a new holder.
                return another * RUNTIME.uniform(1.0, 1.2)
            self._held[partition] = now + _LOCK_TTL / 2
        _, (_, until_next) = await asyncio.gather(
            self._touch_again(partition),
            promote_due(
                self._gateway,
                partition,
                on_requests=partial(self._cancel, partition),
                admit=self._admit,
                renew_kept=self._renew_kept,
            ),
        )  # in one round trip
        return _MAX_SLEEP if until_next is None else min(until_next, _MAX_SLEEP)

    async def _cancel(self, partition: Partition, requests: Sequence[bytes]) -> None:
        """Cancel tasks for producers, who may not. An error does not keep the due tasks waiting."""
        answer = partial(answer_requests, self._gateway, partition, requests, retention=self._retention())
        await self._errors.attempt(answer, f"requests to cancel of queue {partition.queue}")

    async def _admit(self, partition: Partition, wait: float) -> float | None:
        """Admit tasks that wait for limits. Return the seconds until the next call makes sense, None if none waits.

        Until a task has its turn, the clock of the limits is moved on, so that tokens of lost workers expire.

        Args:
            wait: Seconds until a task has its turn.
        """
        from ....queues.admission import Admission  # of queues with limits only
        from ....queues.limits.store import TOKEN_LIFE, LimitStore
        from ...durable.limit_tokens import log_change

        now, life = RUNTIME.monotonic(), max(TOKEN_LIFE, self._lease())
        if wait <= 0:
            self._clock_moved = now
            namespace = Namespace(partition.namespace)
            admission = Admission(self._gateway, namespace, life=life, on_dropped=self._drop, on_change=log_change)
            return (await admission.admit_due(partition)).wait
        if now - self._clock_moved >= (self._lease() or TOKEN_LIFE) / 3:
            self._clock_moved = now
            await LimitStore(self._gateway, Namespace(partition.namespace), life).touch()
        return wait

    async def _renew_kept(self, partition: Partition) -> float:
        """Renew the tokens that parked tasks keep. Return the seconds until the next call."""
        from ....queues.limits.kept import renew_kept
        from ....queues.limits.store import TOKEN_LIFE

        life = max(TOKEN_LIFE, self._lease())
        wait, released = await renew_kept(self._gateway, partition, life)
        if released.named:
            from ....queues.admission import Admission

            await Admission(self._gateway, Namespace(partition.namespace), life=life).start_waiting(released)
        return wait

    async def _drop(self, partition: Partition, task_id: str, limit: str) -> None:
        """Cancel a task that was not to wait for a limit. An error leaves it waiting; the next look drops it."""
        replacement = Replacement("", unstarted=True, limit=limit)
        drop = partial(
            cancel_task, self._gateway, partition, task_id, retention=self._retention(), replacement=replacement
        )
        await self._errors.attempt(drop, f"a task that limit {limit} has no room for")

    async def _touch_again(self, partition: Partition) -> None:
        now = RUNTIME.monotonic()
        if now - self._touched.get(partition, 0.0) >= _TOUCH_INTERVAL:
            self._touched[partition] = now
            await self._touch(partition)


class ClockMonitor:
    """Compares the clock of Redis with the monotonic clock of this process, at each touch of a partition.

    Redis restarts leases after a long gap without knowing the cause. This process does: a gap that its own clock did
    not see is a step of Redis' clock. One step or outage affects every partition, and is logged once.
    """

    def __init__(self, lease: Callable[[], float]) -> None:
        """lease: returns the seconds after which deliveries are claimed. A step of more than half of it counts."""
        self._lease = lease
        self._last: dict[Partition, Touch] = {}
        self._steady_since = math.inf
        self._quiet_until = 0.0
        self.restarts_end = 0.0
        """Monotonic time at which leases that were restarted last expire, unless they are renewed; 0 before that."""

    def observe(self, partition: Partition, touch: Touch) -> None:
        """Compare a touch with the previous one of the same partition. May be called from any thread."""
        lease, before = self._lease(), self._last.get(partition)
        if touch.restarted:
            self.restarts_end = touch.received + lease
        if before is not None and touch.sent < before.sent:
            return  # a slow reply, which a later one overtook
        step = _step(before, touch)
        self._last[partition] = touch
        if self._steady_since == math.inf or abs(step) > _STEADY:
            self._steady_since = touch.received
        if abs(step) > lease / 2:
            cause = f"the clock of Redis was set {'forward' if step > 0 else 'back'} by {abs(step):.1f} s"
        elif touch.restarted:
            cause = f"no worker reached Redis for {touch.gap:.1f} s" if touch.gap else "no worker reached Redis before"
        else:
            return
        now = RUNTIME.monotonic()
        if now >= self._quiet_until:
            logger.bind(queue=partition.queue, partition=partition.index).warning(
                "{}: all leases were restarted, and the tasks of lost workers are claimed in {:g} s",
                cause,
                lease,
            )
        self._quiet_until = now + lease

    def is_new(self, partition: Partition, entry: bytes) -> bool:
        """Return whether an entry was certainly added within the last `_NEW` seconds.

        The clock of Redis must be known: by a touch of the partition some seconds ago at most, and without a step for
        as long as a token of a limit lives.
        """
        touch, now = self._last.get(partition), RUNTIME.monotonic()
        known = max(_KNOWN, self._lease())
        if touch is None or now - touch.received > _NEW or now - self._steady_since < known:
            return False
        added = int(entry.partition(b"-")[0]) / 1000
        youngest, oldest = touch.time + (now - touch.received) - added, touch.time + (now - touch.sent) - added
        return youngest > -_CLOCK_MS and oldest < _NEW

    def ahead(self, partition: Partition) -> float | None:
        """Return by how many seconds the clock of Redis is ahead of the monotonic clock; None if it is not known.

        A touch of the partition shows the time of Redis, as precise as half of its round trip.
        """
        touch = self._last.get(partition)
        return None if touch is None else touch.time - (touch.sent + touch.received) / 2


def _step(before: Touch | None, touch: Touch) -> float:
    """Return by how many seconds at least the clock of Redis was set; 0 if the replies may only have been late."""
    if before is None:
        return 0.0
    passed = touch.time - before.time
    longest, shortest = touch.received - before.sent, touch.sent - before.received
    return max(0.0, passed - longest) + min(0.0, passed - shortest)

"""The scheduler: fires the schedules of the namespace while there are any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import anyio

from ....queues.delivery.fleet_locks import acquire_fleet_locks
from ....queues.errors import ConfigurationError, QueueError, Refused, Unavailable
from ....queues.producer import Producer
from ....queues.runtime import RUNTIME
from ....queues.schedules.firing import Fired, ScheduleFirer
from ...log import FirstOfEach, logger
from ...loop_errors import LoopErrors

_MAX_SLEEP: Final = 1.0
"""Longest sleep in seconds: so late a new or changed schedule may be noticed if its notification was lost."""

_LOCK_TTL: Final = 2.5
"""TTL of the lock in seconds: how late a firing can be if the lock holder dies."""

_UNFIT: Final = 30.0
"""Seconds for which a worker leaves the lock to others after it could not fire a schedule."""


class Scheduler:
    """Sleeps until the next planned time, and fires what has come.

    One worker of the namespace holds a lock and does this for all. The lock saves work only: two holders fire nothing
    twice, and a holder that dies is followed by another one after the TTL.
    """

    def __init__(self, producer: Producer, worker: str, retention: Callable[[], float]) -> None:
        """Args:
        worker: id of this worker.
        retention: returns the seconds for which the record of a task is kept that a unique one replaces.
        """
        self._producer = producer
        self._worker = worker
        self._retention = retention
        self._errors = LoopErrors("fire schedules")
        self._known = FirstOfEach()
        self._full: set[str] = set()
        """Schedules that wait for room in their queues."""

    async def run(self) -> None:
        """Fire schedules; return when no schedule is left."""
        wait: float | None = 0.0
        async with AsyncExitStack() as stack:
            changed = None
            while wait is not None:
                if changed is None:
                    channel = self._producer.namespace.schedule_channel
                    try:
                        listening = self._producer.notifications.listen(channel)
                        changed = await stack.enter_async_context(listening)
                    except (Unavailable, Refused) as error:
                        self._errors.note(error)
                with anyio.move_on_after(wait):
                    await (anyio.sleep_forever() if changed is None else changed.get())
                wait = await self._round()

    async def _round(self) -> float | None:
        """Fire what has come. Return the seconds until the next round, None if there are no schedules."""
        gateway, namespace = self._producer.gateway, self._producer.namespace
        acquire = partial(acquire_fleet_locks, gateway, {"": namespace.schedule_lock}, self._worker, _LOCK_TTL)
        try:
            waits = await acquire(renew=True)
            if another := waits[""]:
                return another * RUNTIME.uniform(1.0, 1.2)
            retention, catalog = self._retention(), self._producer.catalog
            done = await ScheduleFirer(gateway, namespace, retention=retention, catalog=catalog).fire_due()
        except QueueError as error:
            self._errors.note(error)
            return _MAX_SLEEP
        for fired in done.fired:
            self._log(fired)
        for name in done.full.keys() - self._full:
            full = done.full[name]
            logger.warning(
                "schedule {} waits: queue {!r} has no room (max_depth {:,})", name, full.queue, full.max_depth
            )
        self._full = (self._full | done.full.keys()) - {fired.schedule for fired in done.fired}
        if done.failed:
            self._note(done.failed)
            return _UNFIT  # another worker may have what is missing here, such as a key
        return None if done.wait is None else min(done.wait, _MAX_SLEEP)

    def _log(self, fired: Fired) -> None:
        run = fired.run
        bound = logger.bind(task_id=run.task_id, queue=run.queue)
        if fired.dropped:
            bound.warning("schedule {}: planned times were missed; the last one is fired", fired.schedule)
        if run.how == "unique":
            bound.info("schedule {}: task {} has the unique key, none was enqueued", fired.schedule, run.task_id)
        else:
            bound.info("schedule {} fired: task {}", fired.schedule, run.task_id)

    def _note(self, failed: Mapping[str, Exception]) -> None:
        for name, error in failed.items():
            if not self._known.is_first(name, type(error).__name__, str(error)[:200]):
                continue
            if isinstance(error, (QueueError, ConfigurationError)):
                logger.error("could not fire schedule {}: {}", name, error)
            else:
                logger.opt(exception=error).error("could not fire schedule {}; the worker continues", name)

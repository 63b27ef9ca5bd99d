"""Registration of a worker, and its settle rate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import anyio

from ....queues.catalog import CATALOG_REFRESH, AppEntry, is_listed, publish_entry
from ....queues.errors import QueueError, Refused
from ....queues.keys import Namespace
from ....queues.presence import WorkerInfo, announce, list_workers, withdraw
from ....queues.producer import Producer
from ....queues.runtime import RUNTIME
from ....queues.shared_config import SharedConfig
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.gateway import Gateway
from ...log import logger
from ...loop_errors import LoopErrors
from ...settings import Settings
from ..health.capacity import Capacity
from ..health.report import Health
from ..slots import Slots

if TYPE_CHECKING:
    from ....queues.limits.definition import Limit
    from ....queues.schedules.store import ScheduleDefinition

WINDOW: Final = 30.0
"""Length of the window of the rate, in seconds."""


class SettleRate:
    """Deliveries settled per second and queue, over the last `WINDOW` seconds or since the worker started.

    A plain window, not a decaying average: a queue without settled deliveries in the window has no rate.
    """

    def __init__(self, settled: Mapping[str, int], clock: Callable[[], float] | None = None) -> None:
        """settled: number of settled deliveries by queue; the executor keeps counting in it."""
        self._settled = settled
        self._clock = clock or RUNTIME.monotonic
        self._samples = deque([(self._clock(), dict(settled))])

    def rates(self) -> dict[str, float]:
        """Return the current rates, without queues that have none. Call it every few seconds."""
        now, counts = self._clock(), dict(self._settled)
        self._samples.append((now, counts))
        while self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        if now <= began:
            return {}
        settled = {queue: count - before.get(queue, 0) for queue, count in counts.items()}
        return {queue: count / (now - began) for queue, count in settled.items() if count}


_FRESH: Final = 3
"""Registrations for which the schedules of a worker count as published."""

_KEPT: Final = 3600.0
"""TTL of a registration in seconds. After two intervals the worker is presumed dead; `worker health` still knows it."""


@cache
def _version() -> str:
    """Return the installed version, which is in a file that takes a millisecond to parse."""
    return version("perdure")


def describe(
    worker_id: str, app: str, aliases: Collection[str], queues: tuple[str, ...], concurrency: int, settings: Settings
) -> WorkerInfo:
    """Return the description of this process as a worker."""
    return WorkerInfo(
        id=worker_id,
        app=app,
        host=RUNTIME.host(),
        pid=RUNTIME.pid(),
        version=_version(),
        queues=queues,
        concurrency=concurrency,
        in_flight=0,
        started=0,
        interval=settings.heartbeat,
        lease=settings.lease,
        aliases=tuple(sorted(aliases)),
    )


class Registration:
    """Publishes the worker every interval, and removes it at the end."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        info: WorkerInfo,
        slots: Slots,
        capacity: Capacity,
        settled: Mapping[str, int],
        health: Health,
        on_config: Callable[[SharedConfig], None],
        entry: AppEntry,
        limits: Collection[Limit] = (),
        schedules: Collection[ScheduleDefinition] = (),
        on_schedules: Callable[[], None] = lambda: None,
        on_pauses: Callable[[Mapping[bytes, bytes]], Awaitable[None]] | None = None,
        on_jobs: Callable[[], None] = lambda: None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the registration; `run` publishes it.

        Args:
            settled: number of settled deliveries by queue.
            on_config: called with the stored settings each time.
            entry: the app in the catalog of tasks.
            limits: those of the app, which are published first: tasks of an unknown limit wait.
            schedules: those of the app.
            on_schedules: called each time if the namespace has schedules.
            on_pauses: called with the stored pauses each time.
            on_jobs: called each time if the namespace has jobs.
            on_drain: called each time if an operator drains the worker.
        """
        self._gateway = gateway
        self._namespace = namespace
        self._info = replace(info, catalog=entry.version)
        self._slots = slots
        self._capacity = capacity
        self._health = health
        self._on_config = on_config
        self._entry = entry
        self._limits = list(limits)
        self._other_limits: set[tuple[str, str]] = set()
        self._schedules = list(schedules)
        self._on_schedules = on_schedules
        self._on_pauses = on_pauses
        self._on_jobs = on_jobs
        self._on_drain = on_drain
        self._woken = anyio.Event()
        self._schedule_problems: set[str] = set()
        self._published = -math.inf
        self._refused = False
        self._rates = SettleRate(settled)
        self._errors = LoopErrors("publish the registration")

    async def publish_limits(self, *, starts: bool = False) -> None:
        """Publish the definitions of limits, or renew them; log once which app defines one otherwise.

        starts: whether the worker starts: its definitions replace others.
        """
        if not self._limits:
            return
        from ....queues.limits.store import LimitStore

        store = LimitStore(self._gateway, self._namespace)
        for name, other in await store.publish(self._limits, self._info.app, starts=starts):
            if (name, other) not in self._other_limits:
                self._other_limits.add((name, other))
                logger.warning(
                    "apps {!r} and {!r} define limit {!r} differently: the worker that started last decides; define it "
                    "in one module that both import, or use two names",
                    *sorted((self._info.app, other)),
                    name,
                )

    async def publish_schedules(self, *, starts: bool = False) -> None:
        """Publish the schedules of the app, or renew them; log each problem once.

        starts: whether the worker starts: its definitions replace others.
        """
        if not self._schedules:
            return
        from ....queues.schedules.store import ScheduleStore

        store, app = ScheduleStore(self._gateway, self._namespace), self._info.app
        fresh = _FRESH * self._info.interval
        for problem in await store.publish(
            self._schedules, app, aliases=self._info.aliases, starts=starts, fresh=fresh
        ):
            if problem not in self._schedule_problems:
                self._schedule_problems.add(problem)
                logger.error(problem)

    async def announce(self) -> None:
        announced = await announce(self._gateway, self._namespace, self._current(), _KEPT + self._info.interval)
        self._info = replace(self._info, started=announced.started)
        self._on_config(announced.config)
        if announced.schedules:
            self._on_schedules()
        if self._on_pauses is not None:
            await self._on_pauses(announced.pauses)
        if announced.jobs:
            self._on_jobs()
        if announced.drain:
            self._on_drain()
        self._health.read_succeeded()

    def wake(self) -> None:
        """Register now: what the reply says may have changed."""
        self._woken.set()

    async def warn_of_other_apps(self) -> None:
        """Log once that workers of other apps serve a queue of this one, if they do."""
        own, shared = self._info, dict[str, set[str]]()
        try:
            workers = await list_workers(self._gateway, self._namespace)
        except Refused:  # an older rule may not let workers read the registry
            return
        except ValueError as error:  # what another program wrote there
            self._errors.note(error)
            return
        for worker in workers:
            if worker.presumed_dead or worker.app == own.app or worker.app in own.aliases or own.app in worker.aliases:
                continue
            for queue in {*worker.queues} & {*own.queues}:
                shared.setdefault(queue, set()).add(worker.app)
        if shared:
            listed = "; ".join(
                f"queue {queue!r}: app {', '.join(map(repr, sorted(apps)))}" for queue, apps in sorted(shared.items())
            )
            logger.warning(
                "other apps share queues with app {!r} ({}): each hands back tasks of the other, which delays them by "
                "seconds; give each app queues of its own (by default the queue has the app's name), or another "
                "PERDURE_NAMESPACE",
                own.app,
                listed,
            )

    async def run(self) -> None:
        while True:
            self._woken = anyio.Event()
            try:
                await self.announce()
                await self.publish_limits()
                await self.publish_schedules()
                await self._publish()
            except QueueError as error:
                self._health.read_failed(error)
                self._errors.note(error)
            except Exception as error:  # noqa: BLE001 - the loop ends with the worker only
                self._errors.note(error)
            with anyio.move_on_after(self._info.interval):
                await self._woken.wait()

    async def _publish(self) -> None:
        """Publish the app's tasks now and then, and if another program has removed them or hides them.

        A refusal is logged once: an older rule may not let workers write the catalog.
        """
        fresh = RUNTIME.monotonic() - self._published < CATALOG_REFRESH
        try:
            if fresh and (self._refused or await is_listed(self._gateway, self._namespace, self._entry)):
                return
            self._published, self._refused = RUNTIME.monotonic(), False
            await publish_entry(self._gateway, self._namespace, self._entry, self._info.started)
        except Refused as error:
            self._refused = True
            logger.warning("could not publish the catalog of tasks: {}", error)

    async def withdraw(self) -> None:
        await withdraw(self._gateway, self._namespace, self._info.id)

    def _current(self) -> WorkerInfo:
        return replace(
            self._info,
            in_flight=self._slots.busy,
            draining=self._health.draining,
            capacity=self._capacity.summary(),
            rates=self._rates.rates(),
            progress=self._health.progress(),
            health=self._health.report(for_redis=True).summary(),
        )


class HintListener:
    """Calls `on_hint` after each notification of a channel, and whenever one may have been missed.

    A notification is a hint that anyone who may publish can forge: what it says is not used. The call that follows
    reads what has changed.

    Args:
        what: What the notifications are about, for a warning if they cannot be received.
        else_read: When it is read without them.
    """

    def __init__(
        self, producer: Producer, channel: str, on_hint: Callable[[], None], what: str, else_read: str
    ) -> None:
        self._notifications = producer.notifications
        self._channel = channel
        self._on_hint = on_hint
        self._what = what
        self._else_read = else_read

    async def run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                hints = await retry_while_unavailable(
                    lambda: stack.enter_async_context(self._notifications.listen(self._channel))
                )
                while True:
                    self._on_hint()
                    await hints.get()
        except QueueError as error:
            logger.warning(
                "could not subscribe to {}: {}; they are read at each {}", self._what, error, self._else_read
            )

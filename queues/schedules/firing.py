"""The firing of schedules: any worker enqueues the tasks of planned times that have come.

A firing has three acts, and a worker may die, or be stopped for long, between any two of them:

1. The claim: the schedule notes the planned times that are to be fired, the task, its queue and the index of one
   partition. From now on every worker does the same, whatever becomes of the definition.
2. The tasks are stored in that partition, in the order of their times, each with the script that compares and sets
   the last planned time that was fired there (fire_schedule.lua). A second worker, or bytes that arrive late, store
   nothing, also when the record of the task has expired. A partition that refuses a task as closed takes none of them
   later, so that the claim may move on to the next partition, with the times that are left.
3. The schedule notes the last planned time, the runs and the next look, and drops the claim.

Before the claim, the queue must have room for the tasks, if their task has a `max_depth` in the catalog. Without room,
the schedule notes that, and looks again: the planned times are late until there is room, or missed.

Acts 1 and 3 compare the revision of the schedule. No lock is needed for this: that of the caller only saves work. Times
are those of Redis. If its clock is set back, no time is fired again, since later ones were: the schedule waits until
the clock has passed the last one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from ..catalog import Catalog, read_catalog
from ..enqueueing import BatchEnqueuer, KeyClaim
from ..envelope import TaskMessage
from ..errors import CatalogError, QueueFull, ScheduleError, Unavailable
from ..keys import LEFT_TTL_MS, Namespace, Partition
from ..partitions.router import PartitionRouter
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import milliseconds, queue_script
from .call import ScheduledCall
from .definition import MAX_MISSED, make_plan, task_id_of
from .store import FULL, KEPT_MS, ScheduledRun, ScheduleStore, StoredSchedule, encode_runs, removal

_FIRE: Final = queue_script("fire_schedule")

_FIRED_MS: Final = 30 * 86_400_000
"""Milliseconds for which a partition remembers the last planned time: far longer than bytes can be late."""

_BATCH: Final = 100
"""Schedules that are looked at in one round."""

_LATER_MS: Final = 30_000
"""Milliseconds after which a schedule is looked at again that could not be fired."""

_REST_MS: Final = 600_000
"""Milliseconds after which a schedule is looked at again that fires nothing."""

_FULL_MS: Final = 2_000
"""Milliseconds after which a schedule is looked at again whose queue has no room."""

_CLOSED: Final = -1
_ENDED: Final = -2


class Fired(NamedTuple):
    """A planned time whose task was enqueued. late: seconds after it. dropped: missed ones are left out."""

    schedule: str
    run: ScheduledRun
    late: float
    dropped: bool = False


class Round(NamedTuple):
    """Outcome of one round. wait: seconds until the next look, None if there is no schedule. failed, full: by name."""

    fired: list[Fired]
    wait: float | None
    failed: dict[str, Exception]
    full: dict[str, QueueFull]


class _Place(NamedTuple):
    """The place of the tasks of a claim."""

    partition: Partition
    schedule: str
    epoch: int


_ANY_SIZE: Final = 2**40
"""Size of arguments that are never cut: those of a schedule were checked when it was defined."""


class _Moved(Exception):
    """The partition of a claim is closed."""


class ScheduleFirer:
    """Firing of the schedules of a namespace.

    Args:
        retention: Seconds for which the record of a task is kept that a unique one replaces.
        catalog: Returns what workers have published. Default: it is read.
    """

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        *,
        retention: float,
        catalog: Callable[[], Awaitable[Catalog]] | None = None,
    ) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._store = ScheduleStore(gateway, namespace)
        self._retention = retention
        self._catalog = catalog or partial(read_catalog, gateway, namespace)
        self._full: dict[str, QueueFull] = {}
        self._routers: dict[str, PartitionRouter] = {}

    async def fire_due(self) -> Round:
        """Fire what has come; return that, and when to look again."""
        self._full = {}
        index = self._namespace.schedules
        time, listed = await self._gateway.pipeline(
            [("TIME",), ("ZRANGE", index, 0, _BATCH - 1, "WITHSCORES")], node_of=index
        )
        now = milliseconds(time)
        looks = {name.decode("utf-8", "replace"): float(at) for name, at in zip(listed[::2], listed[1::2], strict=True)}
        due = [name for name, at in looks.items() if at <= now]
        later = [at for at in looks.values() if at > now]
        fired: list[Fired] = []
        failed: dict[str, Exception] = {}
        for name in due:
            try:
                found, look = await self._look(name)
                fired += found
                if look is not None:
                    later.append(look)
            except Unavailable:
                raise
            except Exception as error:  # noqa: BLE001 - the other schedules are fired
                failed[name] = error
                await self._gateway.command("ZADD", index, "XX", now + _LATER_MS, name)
        if len(due) == _BATCH:
            later.append(now)
        wait = max(0.0, (min(later) - now) / 1000) if later else None
        return Round(fired, wait, failed, self._full)

    async def _look(self, name: str) -> tuple[list[Fired], float | None]:
        """Fire one schedule, as far as its time has come; return what was fired, and the time of the next look."""
        read = await self._store.read(name)
        if read.exists and read.firing is not None:
            return await self._complete(read), read.now
        if not read.exists or not read.published or read.paused is not None:
            return [], await self._rest(read)
        return await self._fire_planned(read)

    async def _rest(self, read: StoredSchedule) -> float | None:
        """Put off a schedule that fires nothing now, and delete one that is gone."""
        if not read.exists:
            await self._gateway.command("ZREM", self._namespace.schedules, read.name)
            return None
        if not read.published and read.now - read.number("seen") > KEPT_MS:
            await self._store.write(read, removal(read), look="-", ttl=LEFT_TTL_MS)
            return None
        await self._store.write(read, {"next": ""}, look=read.now + _REST_MS)
        return read.now + _REST_MS

    async def _fire_planned(self, read: StoredSchedule) -> tuple[list[Fired], float]:
        name = read.name
        plan = make_plan(name, read.when, read.rules, read.last, read.now)
        look = read.now + _REST_MS if plan.look is None else plan.look
        change: dict[str, str | int | bytes]
        if not plan.fire:
            change = {"last": plan.last, "next": plan.next or ""}
            await self._store.write(read, change, look=round(look))
            return [], look
        call = read.call
        room = await self._room(name, call)
        if room < len(plan.fire):
            if room == 0:
                look = read.now + _FULL_MS
                await self._store.write(read, {FULL: read.now}, look=look)
                return [], look
            fire, look = plan.fire[:room], read.now + _FULL_MS
            plan = replace(plan, fire=fire, last=fire[-1], next=plan.fire[room])
        claim: dict[str, Any] = {"times": plan.fire, "queue": call.queue, "index": await self._index(name, call)}
        claim |= {"last": plan.last, "next": plan.next, "look": look, "dropped": plan.dropped, "epoch": read.epoch}
        change = {"firing": orjson.dumps(claim), "firing:call": read.stored_call, FULL: ""}
        if not await self._store.write(read, change):
            return [], read.now  # another worker claims it, or it was changed: look again
        return await self._complete(await self._store.read(name)), look

    async def _room(self, name: str, call: ScheduledCall) -> int:
        """Return the number of tasks that the queue has room for."""
        limit = None
        for listed in (await self._catalog()).named(call.task, call.app):
            if listed.queue == call.queue:
                with suppress(CatalogError):  # another program wrote it
                    limit = listed.max_depth()
        if limit is None:
            return MAX_MISSED
        from ..depth import read_depths

        router = self._router(call)
        await router.refresh()
        depth = sum(await read_depths(self._gateway, router.partitions, most=limit.depth))
        if depth >= limit.depth:
            self._full[name] = QueueFull(call.queue, depth, limit.depth)
        return max(0, limit.depth - depth)

    async def _complete(self, read: StoredSchedule) -> list[Fired]:
        """Store the tasks of a claim, and note that."""
        while (claim := read.firing) is not None and read.exists:
            call = self._claimed_call(read)
            times, runs = [int(planned) for planned in claim["times"]], []
            place = _Place(self._namespace.partition(call.queue, int(claim["index"])), read.name, int(claim["epoch"]))
            try:
                for planned in times:
                    runs.append(await self._fire(place, call, planned, read.now))  # noqa: PERF401 - those before a move
            except _Moved:
                await self._router(call).on_closed([place.partition])
                moved = {**claim, "times": times[len(runs) :], "index": await self._index(read.name, call)}
                change: dict[str, str | int | bytes] = {
                    "firing": orjson.dumps(moved),
                    "runs": encode_runs([*reversed(runs), *read.runs]),
                }
                await self._store.write(read, change)
                read = await self._store.read(read.name)
                continue
            change = {"firing": "", "firing:call": "", "last": max(read.last, int(claim["last"]))}
            change |= {"next": claim["next"] or "", "runs": encode_runs([*reversed(runs), *read.runs])}
            if await self._store.write(read, change, look=round(claim["look"])):
                dropped = bool(claim["dropped"])
                return [Fired(read.name, run, (read.now - run.planned) / 1000, dropped) for run in runs]
            read = await self._store.read(read.name)
        return []

    def _claimed_call(self, read: StoredSchedule) -> ScheduledCall:
        claim: Mapping[str, Any] = read.firing or {}
        if not {"times", "queue", "index", "last", "next", "look", "dropped", "epoch"} <= {*claim}:
            raise ScheduleError(f"could not read schedule {read.name!r}: its firing under way has another form")
        return read.open(read.fields.get(b"firing:call", b""))

    def _router(self, call: ScheduledCall) -> PartitionRouter:
        router = self._routers.get(call.queue)
        if router is None:
            router = self._routers[call.queue] = PartitionRouter(self._gateway, self._namespace, call.queue)
        return router.of(call.message("0", "0", 0).lane)

    async def _index(self, name: str, call: ScheduledCall) -> int:
        router = self._router(call)
        await router.refresh()
        return router.partition(call.partition_number(name)).index

    async def _fire(self, place: _Place, call: ScheduledCall, planned: int, now: int) -> ScheduledRun:
        """Store the task of one planned time, if no worker has. Raises `_Moved`."""
        message = call.message(place.schedule, task_id_of(place.schedule, planned), planned)
        queue, rule = place.partition.queue, call.rule
        cipher = self._gateway.encryptor.of(place.partition, message.id)
        sealed = message.encrypted(cipher, _ANY_SIZE, store=None)
        if rule is None:
            if await self.store(place, sealed, planned) == _CLOSED:
                raise _Moved
            return ScheduledRun(planned, message.id, queue, now)
        from ..unique_enqueueing import UniqueEnqueuer

        delay = rule.check_delay(0.0)
        enqueuer = _UniqueFiring(self, place, planned, self._gateway, self._router(call), delay)
        unique = UniqueEnqueuer(
            self._gateway, self._namespace, queue, enqueuer, rule.rule, delay=delay, retention=self._retention
        )
        stored = await unique.one(call.digest, sealed)
        return ScheduledRun(planned, stored.task_id, queue, now, "fired" if stored.task_id == message.id else "unique")

    async def store(
        self,
        place: _Place,
        message: TaskMessage,
        planned: int,
        *,
        delay: float = 0.0,
        until: int | str = "",
        request: bytes = b"",
    ) -> int:
        """Store an encrypted task of a planned time; return the answer of the script."""
        partition, schedule, epoch = place
        keys = [partition.due, partition.nudge, partition.closed, partition.timeline]
        keys += [partition.record(message.id), partition.fired(schedule)]
        args: list[Argument] = [message.id, message.envelope, message.arguments, planned, round(delay * 1000)]
        answer: int = await self._gateway.run(_FIRE, keys, [*args, _FIRED_MS, until, request, epoch])
        return answer


class _UniqueFiring(BatchEnqueuer):
    """Storing of the task of a planned time under the claim of its unique key, in the partition of the firing."""

    def __init__(
        self,
        firer: ScheduleFirer,
        place: _Place,
        planned: int,
        gateway: Gateway,
        router: PartitionRouter,
        delay: float,
    ) -> None:
        super().__init__(gateway, router, delay)
        self._firer = firer
        self._place = place
        self._planned = planned
        self._seconds = delay

    async def numbered(self, message: TaskMessage) -> tuple[TaskMessage, int]:
        """Return the message, and the index of the partition of the firing."""
        return message, self._place.partition.index

    async def claimed(self, message: TaskMessage, claim: KeyClaim, *, replaces: bool = False) -> Partition | None:
        """Store the task under a claim; None if the claim has ended. Raises `_Moved`."""
        partition = self._place.partition
        request = claim.request if claim.beside == partition else b""
        answer = await self._firer.store(
            self._place, message, self._planned, delay=self._seconds, until=claim.until, request=request
        )
        if answer == _CLOSED:
            raise _Moved
        return None if answer == _ENDED else partition


def planned_messages(name: str, call: ScheduledCall, times: Sequence[int]) -> list[TaskMessage]:
    """Return the messages of planned times, for a backfill: with the ids that a firing gives."""
    return [call.message(name, task_id_of(name, planned), planned) for planned in times]


def message_by_hand(name: str, call: ScheduledCall, now: int) -> TaskMessage:
    """Return the message of a run that an operator asks for."""
    return call.message(name, f"{task_id_of(name, now)}-{RUNTIME.token(3)}", now)

"""Schedules as operators add, change and fire them by hand: inputs are checked, and arguments fit the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from ..defaults import nearest
from ..envelope import DEFAULT_PAYLOAD_LIMIT, EnvelopeTemplate, TaskMessage
from ..errors import QueueError, ScheduleNotFound, TaskNotFound
from ..handle import TaskHandle
from ..lanes import Lane
from ..partitions.route import spread
from ..producer import Producer
from ..security.secret_arguments import read_secret_paths, restore_masked, schema_secrets
from .call import ScheduledCall
from .definition import Cron, Every, Rules, check_schedule_name
from .firing import message_by_hand
from .store import ScheduleDefinition, ScheduledRun, ScheduleStore, StoredSchedule


class InvalidSchedule(ValueError):
    """An input of a schedule is not valid.

    Attributes:
        field: Name of the input: `name`, `cron`, `tz`, `every`, `missed`, `jitter`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """New values of a schedule; None leaves one as it is.

    Attributes:
        cron, tz, every: Its times; `every` in seconds.
        arguments: JSON object.
        missed: `skip`, `once` or `all`.
        jitter, expires: Seconds.
        lane: Priority of the tasks, of a new schedule only.
    """

    cron: str | None = None
    tz: str | None = None
    every: float | None = None
    arguments: bytes | None = None
    missed: str | None = None
    jitter: float | None = None
    expires: float | None = None
    lane: Lane | None = None

    def when(self, known: Cron | Every | None = None) -> Cron | Every | None:
        """Return the new times, None for no new ones. known: those before. Raises `InvalidSchedule`."""
        cron, tz = self.cron, self.tz
        if self.every is not None and (cron is not None or tz is not None):
            raise InvalidSchedule("every", "give either a cron expression with its time zone, or an interval")
        if isinstance(known, Cron) and cron is None and tz is not None:
            cron = known.expression
        elif isinstance(known, Cron) and cron is not None and tz is None:
            tz = known.tz
        try:
            if self.every is not None:
                return Every(self.every)
            if cron is not None:
                return Cron(cron, tz or "UTC")
        except (TypeError, ValueError) as error:
            field = "every" if self.every is not None else "tz" if "time zone" in str(error) else "cron"
            raise InvalidSchedule(field, str(error)) from None
        if tz is not None:
            raise InvalidSchedule("tz", "a time zone must go with a cron expression")
        return None

    def rules(self, when: Cron | Every, known: Rules) -> Rules:
        """Return the new rules. known: those before. Raises `InvalidSchedule`."""
        missed = known.missed if self.missed is None else self.missed
        try:
            return Rules.of(when, missed, known.jitter if self.jitter is None else self.jitter)
        except (TypeError, ValueError) as error:
            raise InvalidSchedule("missed" if str(error).startswith("missed") else "jitter", str(error)) from None


class ScheduleChanges:
    """Changes of the schedules of a namespace by an operator.

    Methods raise `ScheduleNotFound` for a schedule that does not exist.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._store = ScheduleStore(producer.gateway, producer.namespace)

    async def read(self, name: str) -> StoredSchedule:
        """Return a schedule."""
        read = await self._store.read(name)
        if not read.exists:
            names = [stored.name for stored in await self._store.read_all()]
            place = f"in namespace {self._producer.namespace.name!r} on {self._producer.address.shown}"
            raise ScheduleNotFound(f"there is no schedule {name!r} {place}{nearest(name, names)}")
        return read

    async def states(self, runs: Sequence[ScheduledRun]) -> list[str | None]:
        """Return the state of the task of each run; None where its record has expired."""
        return list(await asyncio.gather(*map(self._state_of, runs)))

    async def _state_of(self, run: ScheduledRun) -> str | None:
        handle = await self._producer.find(run.task_id, run.queue)
        try:
            return None if handle is None else str((await handle.record()).state)
        except TaskNotFound:
            return None

    async def add(self, name: str, task: str, change: ScheduleChange, *, app: str | None = None) -> StoredSchedule:
        """Add a schedule that no code defines. app: that has the task, if several have one.

        Raises:
            InvalidSchedule: Its name, times or rules are not valid.
            CatalogError: No worker has published the task, or the arguments do not fit it.
            ScheduleError: There is a schedule of this name.
        """
        try:
            check_schedule_name(name)
        except ValueError as error:
            raise InvalidSchedule("name", str(error)) from None
        when = change.when()
        if when is None:
            raise InvalidSchedule("cron", "give a cron expression or an interval")
        rules = change.rules(when, Rules())
        listed = (await self._producer.catalog()).find(task, app=app)
        arguments = change.arguments or b"{}"
        listed.check(arguments)
        message = EnvelopeTemplate(task, app=listed.app, lane=change.lane or listed.lane).message(arguments)
        message = listed.limited(message)
        message.check(DEFAULT_PAYLOAD_LIMIT, 0)
        call = ScheduledCall.of(message, task, listed.queue, listed.unique_task(), change.expires)
        return await self._store.add(ScheduleDefinition(name, when, rules, call))

    async def edit(self, name: str, change: ScheduleChange, *, revision: str | None = None) -> StoredSchedule:
        """Set parts of a schedule in place of its definition.

        Args:
            revision: `StoredSchedule.definition_revision` as the caller has read it; None for whatever it is now.

        Raises:
            InvalidSchedule: Times or rules are not valid.
            CatalogError: No worker has published the task, or the arguments do not fit it.
            ChangedMeanwhile: The revision is another one.
        """
        read = await self.read(name)
        when = change.when(_readable(read))
        rules = None
        if (when, change.missed, change.jitter) != (None, None, None):
            checked = change.rules(when or read.when, read.rules)  # the stored jitter may not fit the new times
            rules = None if change.missed is None and change.jitter is None else checked
        call = None
        if change.arguments is not None:
            call = await self._with_arguments(read, change.arguments, change.expires)
        elif change.expires is not None:
            call = replace(read.call, expires=change.expires)
        return await self._store.edit(name, when=when, rules=rules, call=call, revision=revision)

    async def _with_arguments(self, read: StoredSchedule, arguments: bytes, expires: float | None) -> ScheduledCall:
        """Return the task with other arguments: options of the stored one are kept."""
        known = read.call
        listed = (await self._producer.catalog()).find(known.task, app=known.app)
        envelope = orjson.loads(known.envelope)
        secrets = read_secret_paths(envelope.get("secrets")) + schema_secrets(listed.arguments)
        arguments = restore_masked(arguments, lambda: known.arguments, secrets)
        listed.check(arguments)
        form = {field: value for field, value in envelope.items() if field not in ("limits", "secrets", "unique")}
        number = None if (key := form.get("key")) is None else spread(key)
        message = listed.limited(TaskMessage("0", orjson.dumps(form), arguments, number, False))
        message.check(DEFAULT_PAYLOAD_LIMIT, 0)
        deadline = known.expires if expires is None else expires
        return ScheduledCall.of(message, known.task, listed.queue, listed.unique_task(), deadline)

    async def run_now(self, name: str) -> TaskHandle[Any]:
        """Enqueue the task of a schedule now, also of a paused one; planned times stay as they are."""
        read = await self.read(name)
        message = message_by_hand(name, read.call, read.now)
        handle: TaskHandle[Any] = await self._producer.send_one(message, queue=read.call.queue, unique=read.call.rule)
        run = ScheduledRun(read.now, handle.id, read.call.queue, read.now, "by hand")
        await self._store.note_run(name, run)
        return handle


def _readable(read: StoredSchedule) -> Cron | Every | None:
    """Return the times of a schedule; None if they cannot be read, so that new ones replace them."""
    try:
        return read.when
    except QueueError:
        return None

"""The settler: stores an outcome and acknowledges the message, in one script, repeated until Redis answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import orjson

from ...deadletter.burial import Evidence, bury, unreadable_id
from ...deadletter.policy import Reason
from ...queues.delivery.leases import Delivery
from ...queues.delivery.quarantine_store import quarantine
from ...queues.delivery.settlement import (
    Counters,
    OnWatched,
    await_limit,
    await_version,
    cancelled,
    park,
    release,
    reschedule,
    succeed,
)
from ...queues.envelope import TaskMessage, is_task_id
from ...queues.errors import EntriesLost, UnreadableEnvelope
from ...queues.runtime import RUNTIME
from ...queues.security.redaction import Redaction
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Argument
from ...queues.wording import counted
from ..durable.attempt_end import checkpoint_changes
from ..durable.ended_task import cleanup_message
from ..durable.run import Run
from ..durable.stop_reasons import STOP_RULES, LimitReason, ParkReason, StopReason
from ..errors import InvalidArguments, UnknownTask
from ..log import FirstOfEach, log_wait, logger
from ..on_demand import kept_token
from ..registry import Registry
from .outcome import (
    AwaitVersion,
    Burial,
    Cancelled,
    Limited,
    Outcome,
    Park,
    Paused,
    Quarantined,
    Release,
    Rerun,
    Success,
    ends_attempt,
)
from .shared_settings import SharedSettings

_KEPT_FOR_CLEANUP: Final = 7 * 86_400.0
"""Seconds for which the record of a task is kept at least, if a clean-up task is to read it."""

_LIMITS: Final = b'"limits":['
"""Part of an envelope that has limits; in a text, its quotes would be escaped."""

_OTHER_CODE: Final = (
    "{}; such tasks go back to the queue for workers with other code, up to {} times each, then they become dead "
    "letters; further ones are logged at DEBUG"
)


def _warn_unread(task_id: str, count: int) -> None:
    messages = counted(count, "message")
    logger.bind(id=task_id).warning(
        "task {} has ended and left {} unread: perdure task inbox {}", task_id, messages, task_id
    )


class Settler:
    """Settles deliveries. Raises `LeaseLost` if another worker holds the lease.

    An outcome is stored only with all entries of the checkpoint that it follows from: `EntriesLost` if Redis has lost
    some of them.
    """

    def __init__(
        self, gateway: Gateway, registry: Registry, shared: SharedSettings, on_watched: OnWatched | None = None
    ) -> None:
        """on_watched: called after a task that others wait for has ended."""
        self._on_watched = on_watched
        self._gateway = gateway
        self._registry = registry
        self._shared = shared
        self._returned = FirstOfEach()

    def settle(self, run: Run, outcome: Outcome, on_wait: Callable[[], None]) -> Awaitable[Cancelled | None]:
        """Store the outcome and acknowledge the message. on_wait: called when Redis is unavailable.

        Return `Cancelled` if that was stored in place of a dead letter: a caller had cancelled the task meanwhile.
        """
        return retry_while_unavailable(
            self._act(run, outcome), on_wait=log_wait(f"the outcome of task {run.id}", on_wait)
        )

    async def release_incomplete(self, run: Run, lost: EntriesLost, on_wait: Callable[[], None]) -> None:
        """Release a task of whose checkpoint Redis has lost the end. on_wait: called when Redis is unavailable."""
        event = StopReason.DATA_LOST.value
        data: dict[str, object] = {"last_entry": lost.last}
        await retry_while_unavailable(
            lambda: release(self._gateway, run.delivery, run.id, data=data, event=event),
            on_wait=log_wait(f"the release of task {run.id}", on_wait),
        )

    def _act(self, run: Run, outcome: Outcome) -> Callable[[], Awaitable[Cancelled | None]]:
        gateway, delivery, task_id = self._gateway, run.delivery, run.id
        ran, last = RUNTIME.monotonic() - run.started, run.last_entry
        match outcome:  # partial, not lambda: a cell for each variable costs every task time in the garbage collector
            case Success():
                return partial(self._succeed, run, outcome, ran, last)
            case Cancelled(counters):
                ttl, cleanup = self._at_end(run)
                settle_cancelled = partial(cancelled, gateway, delivery, task_id, counters, on_watched=self._on_watched)
                return partial(settle_cancelled, ran=ran, ttl=ttl, cleanup=cleanup)
            case Release(counters):
                data: dict[str, object] = {
                    "why": STOP_RULES[outcome.stop].why,
                    "steps": run.history.records + run.steps_recorded,
                }
                event = STOP_RULES[outcome.stop].event or "handed_off"
                if isinstance(run.stop_detail, LimitReason):
                    data = {"limit": run.stop_detail.limit}
                return partial(release, gateway, delivery, task_id, data=data, event=event, entries=last)
            case Quarantined():
                return partial(quarantine, gateway, delivery, task_id)
            case Rerun() | Park() | Limited() | AwaitVersion() | Paused():
                return self._reschedule(run, outcome)
            case Burial(reason, counters, error):
                (ttl, cleanup), task = self._at_end(run), run.envelope.task
                settle = partial(self._bury, delivery, task_id, task, reason, counters, error, run.redact, last)
                return partial(settle, ran=ran, ttl=ttl, cleanup=cleanup, changes=checkpoint_changes(run, error))

    def _succeed(self, run: Run, success: Success, ran: float, last: int) -> Awaitable[None]:
        ttl, cleanup = self._at_end(run)
        return succeed(
            self._gateway,
            run.delivery,
            run.id,
            success.result,
            success.counters,
            ran=ran,
            ttl=ttl,
            written=run.has_written,
            handed_to=success.handed_to,
            entries=last,
            cleanup=None if success.handed_to is not None else cleanup,
            on_watched=self._on_watched,
            on_unread=_warn_unread,
        )

    def _reschedule(
        self, run: Run, outcome: Rerun | Park | Limited | AwaitVersion | Paused
    ) -> Callable[[], Awaitable[None]]:
        if isinstance(outcome, Limited):
            return self._wait_for_limit(run, outcome)
        if isinstance(outcome, Paused):
            from ...queues.delivery.paused_tasks import await_resume

            logger.bind(task=run.envelope.task, id=run.id).debug("parked by the pause of {}", outcome.target)
            return partial(await_resume, self._gateway, run.delivery, run.id, outcome.number, outcome.counters)
        gateway, delivery, task_id, counters = self._gateway, run.delivery, run.id, outcome.counters
        last = run.last_entry
        bound = logger.bind(task=run.envelope.task, id=task_id)
        if isinstance(outcome, Park):
            bound.debug("parked: it waits for {}", outcome.parked.waits)
            return partial(self._park, run, outcome.parked, counters, last)
        if isinstance(outcome, AwaitVersion):
            needed, limit, task = outcome.needed, outcome.limit, outcome.task
            known = None if task is None else counters
            first = self._returned.is_first(run.envelope.task, str(needed))
            bound.log("WARNING" if first else "DEBUG", "parked until a newer worker comes: {}", outcome.error)
            return lambda: await_version(gateway, delivery, task_id, needed, limit=limit, task=task, counters=known)
        delay, event = outcome.delay, outcome.event
        evidence = Evidence.of(outcome.error, run.redact)
        found = evidence.fields() | {"attempts": counters.attempts, "delay": delay}
        level, what = "DEBUG" if outcome.expected else "WARNING", event.replace("_", " ")
        if outcome.max_returns is not None:
            found |= {"returns": counters.requeues, "max_returns": outcome.max_returns}
            if isinstance(outcome.error, (UnknownTask, InvalidArguments)):  # a deploy, which concerns a whole backlog
                level = "DEBUG"
                if self._returned.is_first(run.envelope.task, evidence.error):
                    bound.warning(_OTHER_CODE, evidence.message, outcome.max_returns)
        bound.log(level, "{}, scheduled again in {:.1f} s: {}: {}", what, delay, evidence.error, evidence.message)
        changes = checkpoint_changes(run, outcome.error) if ends_attempt(outcome) else ()
        return lambda: reschedule(
            gateway, delivery, task_id, counters, delay=delay, event=event, data=found, entries=last, changes=changes
        )

    def _wait_for_limit(self, run: Run, limited: Limited) -> Callable[[], Awaitable[None]]:
        """Put the task into the waiting list of its limits. One whose handler has run leaves an event."""
        started = limited.stop is StopReason.LIMIT_LOST
        bound = logger.bind(task=run.envelope.task, id=run.id)
        bound.debug("waits for limit {}", limited.limit)
        return partial(
            await_limit,
            self._gateway,
            run.delivery,
            run.id,
            limited.counters,
            run.envelope.limits,
            retry=limited.retry,
            entries=run.last_entry,
            event=limited.stop.value if started else "",
            data={"limit": limited.limit},
            envelope=b"" if _LIMITS in run.delivery.fields.get(b"env", b"") else run.envelope.encode(),
        )

    def _park(self, run: Run, parked: ParkReason, counters: Counters, last: int) -> Awaitable[None]:
        """Park the task. The time since the run was stopped, such as that of an outage, counts for its delay."""
        delay = max(0.0, parked.delay - (RUNTIME.monotonic() - run.ended_at))
        given: dict[str, Any] = {"delay": delay, "waits": parked.waits, "conditions": parked.conditions}
        if run.envelope.limits and (keeps := kept_token(run)):
            given |= {"keeps": keeps, "renewed_in": self._shared.renewal_lease / 3}
        return park(self._gateway, run.delivery, run.id, counters, **given, entries=last)

    def _at_end(self, run: Run) -> tuple[float, TaskMessage | None]:
        """Return the seconds for which the record of a task that ends is kept, and its clean-up task, if it has one.

        A task that this worker does not know has none.
        """
        task = self._registry.of(run.envelope)
        own = None if task is None else task.result_ttl
        ttl = run.envelope.options.result_ttl or own or self._shared.result_ttl
        if task is None or task.on_end is None:
            return ttl, None
        return max(ttl, _KEPT_FOR_CLEANUP), cleanup_message(run, task.on_end)

    async def bury_unreadable(self, delivery: Delivery, error: UnreadableEnvelope) -> str:
        """Bury a message that cannot be decoded, as raw bytes. Returns the id of the dead letter.

        It is the id of the task whose message this is, if the message names one and the task's record confirms it.
        """
        task_id = unreadable_id(delivery)
        named = _named_id(delivery.fields.get(b"env", b""))
        if named is not None and await self.is_message_of(delivery, named):
            task_id = named
        await retry_while_unavailable(
            lambda: self._bury(delivery, task_id, "?", Reason.UNREADABLE, Counters(), error, raw=True),
            on_wait=log_wait(f"the burial of message {delivery.entry.decode()}"),
        )
        return task_id

    async def is_message_of(self, delivery: Delivery, task_id: str) -> bool:
        """Whether the record of a task says that this is its message: anyone could write the id into another one."""
        read = partial(self._gateway.command, "HGET", delivery.partition.record(task_id), "entry")
        # A record's entry changes only when its message is settled, and this one is pending here.
        entry = await retry_while_unavailable(read, on_wait=log_wait(f"message {delivery.entry.decode()}"))
        return bool(entry == delivery.entry)

    async def _bury(
        self,
        delivery: Delivery,
        task_id: str,
        task: str,
        reason: Reason,
        counters: Counters,
        error: BaseException,
        redact: Redaction | None = None,
        last_entry: int = 0,
        *,
        raw: bool = False,
        ran: float = 0.0,
        ttl: float | None = None,
        cleanup: TaskMessage | None = None,
        changes: Sequence[Argument] = (),
    ) -> Cancelled | None:
        """Bury a task, or store that it was cancelled.

        ran, ttl: in seconds, for a cancelled task. changes: see `bury`.
        """
        evidence = Evidence.of(error, redact)
        retention = self._shared.dead_letter_ttl
        if not await bury(
            self._gateway,
            delivery,
            task_id,
            task=task,
            reason=reason,
            evidence=evidence,
            counters=counters,
            retention=retention,
            entries=last_entry,
            raw=raw,
            cleanup=cleanup,
            changes=changes,
            on_watched=self._on_watched,
        ):
            kept = self._shared.result_ttl if ttl is None else ttl
            settle = partial(cancelled, self._gateway, delivery, task_id, counters, on_watched=self._on_watched)
            await settle(ran=ran, ttl=kept, cleanup=cleanup)
            return Cancelled(counters)
        logger.bind(task=task, id=task_id).error("dead letter ({}): {}: {}", reason, evidence.error, evidence.message)
        return None


def _named_id(data: bytes) -> str | None:
    """Return the task id in an envelope of a newer version, for whose result its producer may be waiting."""
    try:
        found = orjson.loads(data)["id"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) and is_task_id(found) else None

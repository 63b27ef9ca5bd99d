"""Webhooks: JSON about resumed, buried and waiting tasks, posted to a URL and signed if there is a secret.

No task waits for a webhook, and none fails because of one: events wait in a bounded queue in memory, each is tried a
few times, and one that the receiver does not accept is dropped with a warning in the log. So an event may be lost with
its worker, which an entry of the event log may not; and one whose reply was lost is posted twice, under one delivery
id.

A webhook leaves the deployment. It contains what is readable in Redis anyway (ids, names, counters, reasons); texts of
the task (error messages, why it waits) only if tasks are not encrypted, and never with secrets.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import anyio

from ...deadletter import Evidence, Reason
from ...queues import Counters, Delivery
from ..durable import CURRENT_RUN, CallNext, Context, Middleware, Run, Settlement
from ..journal import Handoff
from ..journal.run_events import Notified
from ..log import logger
from .outcome import Burial, Outcome, Park
from .settlement import RunSettlement
from .webhook_posting import DEFAULT_LIMITS, WebhookEvent, WebhookLimits, WebhookTarget, post

__all__ = ["WebhookMiddleware", "WebhookQueue", "unreadable_event"]


class WebhookQueue:
    """The events of one worker that wait to be posted."""

    def __init__(self, target: WebhookTarget | None, limits: WebhookLimits = DEFAULT_LIMITS) -> None:
        """target: None drops every event."""
        self._target = target
        self._limits = limits
        self._waiting: deque[WebhookEvent] = deque()
        self._added = anyio.Event()
        self._dropped = 0

    @property
    def wanted(self) -> bool:
        """Whether there is a target."""
        return self._target is not None

    def give(self, event: WebhookEvent) -> None:
        """Queue an event. Never waits and never fails."""
        if self._target is None:
            return
        if len(self._waiting) >= self._limits.queued:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "more than {} webhook events wait for {}: further ones are dropped",
                    self._limits.queued,
                    self._target.shown,
                )
            return
        self._waiting.append(event)
        self._added.set()

    async def run(self) -> None:
        """Post the queued events, one after another, until cancelled; then post what still waits, within the grace."""
        if self._target is None:
            return
        try:
            while True:
                await self._drain(self._target)
                self._added = anyio.Event()
                if not self._waiting:
                    await self._added.wait()
        finally:
            with anyio.move_on_after(self._limits.grace, shield=True):
                await self._drain(self._target)
            if self._waiting:
                logger.warning("{} webhook events were not posted: the worker stopped", len(self._waiting))

    async def _drain(self, target: WebhookTarget) -> None:
        while self._waiting:
            event = self._waiting[0]
            failure = await post(target, event, self._limits)
            self._waiting.popleft()
            self._dropped = 0
            if event.on_posted is not None:
                try:
                    await event.on_posted(failure)
                except Exception:  # noqa: BLE001 - a failing callback must not stop the other events
                    logger.exception("could not log the result of a webhook")


class WebhookMiddleware(Middleware):
    """Queues the webhooks of a worker's runs."""

    def __init__(self, queue: WebhookQueue) -> None:
        self._queue = queue

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        run = CURRENT_RUN.get()
        if run is not None and (event := _resumed_event(run)) is not None:
            self._queue.give(event)
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        if not isinstance(settlement, RunSettlement):
            return
        event = _stopped_event(settlement.run, settlement.outcome, settlement.handoff)
        if event is not None:
            self._queue.give(event)


def _resumed_event(run: Run) -> WebhookEvent | None:
    """Return the event of a run that resumed after an interruption; its posting is logged in the task's event log."""
    resumption = run.resumption
    if resumption is None or not resumption.interrupted:
        return None

    async def log_posting(failed: str | None) -> None:
        if not run.closed:
            await run.log_event(Notified(what="resumed", how="webhook", failed=failed))

    data = _common("resumed", run) | {
        "after": resumption.after,
        "gap": resumption.gap,
        "restored": resumption.restored,
        "summary": resumption.summary(),
    }
    return WebhookEvent(data, log_posting)


def _stopped_event(run: Run, outcome: Outcome, handoff: Handoff | None) -> WebhookEvent | None:
    """Return the event of a task that was buried or waits for a person; None for any other outcome."""
    match outcome:
        case Burial(reason=reason, counters=counters, error=error):
            return WebhookEvent(_common("buried", run) | _buried(run.id, reason, counters, error, run))
        case Park() if handoff is not None and any(one.on for one in handoff.waiting_on):
            (waiting,) = [one for one in handoff.waiting_on if one.on][:1]
            waits = {"what": waiting.what, "on": waiting.on} | ({} if _encrypted(run) else {"why": waiting.why})
            remedy = f"perdure task send {run.id} TEXT --from {waiting.on}"
            return WebhookEvent(
                _common("waiting", run) | waits | {"summary": f"waits for {waiting.on}", "remedy": remedy}
            )
    return None


def unreadable_event(delivery: Delivery, task_id: str, error: BaseException) -> WebhookEvent:
    """Return the event of a buried message that could not be decoded."""
    data = {"event": "buried", "task": None, "id": task_id, "queue": delivery.partition.queue, "at": _now()}
    return WebhookEvent(data | _buried(task_id, Reason.UNREADABLE, Counters(), error, None))


def _common(event: str, run: Run) -> dict[str, Any]:
    queue = run.delivery.partition.queue
    return {"event": event, "task": run.envelope.task, "id": run.id, "queue": queue, "at": _now()}


def _buried(task_id: str, reason: Reason, counters: Counters, error: BaseException, run: Run | None) -> dict[str, Any]:
    evidence = Evidence.of(error, None if run is None else run.redact)
    data = {
        "reason": str(reason),
        "error": evidence.error,
        "attempts": counters.attempts,
        "crashes": counters.crashes,
        "summary": f"buried ({reason}): {evidence.error}",
        "remedy": f"perdure dlq show {task_id}",
    }
    return data if run is None or _encrypted(run) else data | {"message": evidence.message}


def _encrypted(run: Run) -> bool:
    return run.gateway.encryptor.active


def _now() -> int:
    """Return milliseconds since the epoch, by this worker's clock."""
    return round(time.time() * 1000)

"""Events of webhooks: JSON about resumed, buried and waiting tasks; webhook_posting.py posts it.

No task waits for a webhook, and none fails because of one. An event may be lost with its worker, which an entry of the
event log may not; and one whose reply was lost is posted twice, under one delivery id.

A webhook leaves the deployment. It contains what is readable in Redis anyway (ids, names, counters, reasons); texts of
the task (error messages, why it waits) only if tasks are not encrypted, and never with secrets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from ...deadletter.burial import Evidence
from ...deadletter.policy import Reason
from ...queues.delivery.leases import Delivery
from ...queues.delivery.settlement import Counters
from ..context import Context
from ..durable.journal.handoff.document import Handoff
from ..durable.journal.run_events import Notified
from ..durable.run import Run
from ..durable.steps.current import CURRENT_RUN
from ..middleware import CallNext, Middleware, Settlement
from .outcome import Burial, Outcome, Park, RunSettlement
from .webhook_posting import WebhookEvent, WebhookQueue

_BY_OPERATOR: Final = {
    "compaction": "an operator has to make its state smaller",
    "confirmation": "a person who knows its work should confirm that it continues",
    "review": "an operator has to look at what a check found",
    "workspace": "its files cannot be saved",
}
"""Waits that an operator ends, with what the event says of them."""

_KNOWN: Final = 1_000
"""Number of waits that a worker remembers: a task may be parked again and again for one reason."""


class WebhookMiddleware(Middleware):
    """Queues the webhooks of a worker's runs."""

    def __init__(self, queue: WebhookQueue) -> None:
        self._queue = queue
        self._posted: dict[tuple[str, str, str], None] = {}

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
        if event is not None and not self._is_repeated(settlement):
            self._queue.give(event)

    def _is_repeated(self, settlement: RunSettlement) -> bool:
        """Return whether this worker has posted that the task waits for an operator or an answer, for the same reason.

        A task that has asked whether its budget is raised looks again now and then, and is parked again.
        """
        if not isinstance(settlement.outcome, Park):
            return False
        what, handoff = settlement.outcome.parked.waits, settlement.handoff
        asked = None if handoff is None else next((one for one in handoff.waiting_on if one.wait), None)
        if asked is None and what not in _BY_OPERATOR:
            return False
        wait = settlement.run.id, what, _why(handoff, what) if asked is None else f"{asked.wait} {asked.why}"
        repeated = wait in self._posted
        self._posted[wait] = self._posted.pop(wait, None)
        if len(self._posted) > _KNOWN:
            del self._posted[next(iter(self._posted))]
        return repeated


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
        "summary": resumption.summary(private=_encrypted(run)),
        "text": _masked(run, resumption.notice(private=_encrypted(run))),
    }
    return WebhookEvent(data, log_posting)


def _stopped_event(run: Run, outcome: Outcome, handoff: Handoff | None) -> WebhookEvent | None:
    """Return the event of a task that was buried or waits for a person or an operator; None for other outcomes."""
    match outcome:
        case Burial(reason=reason, counters=counters, error=error):
            return WebhookEvent(_common("buried", run) | _buried(run.id, reason, counters, error, run))
        case Park() if handoff is not None and any(one.on for one in handoff.waiting_on):
            (waiting,) = [one for one in handoff.waiting_on if one.on][:1]
            waits = {"what": waiting.what, "on": waiting.on} | ({} if _encrypted(run) else {"why": waiting.why})
            remedy = f"perdure task send {run.id} TEXT --from {waiting.on}"
            if waiting.wait:
                remedy = f"perdure task answer {run.id} {waiting.wait} JSON"
            return WebhookEvent(
                _common("waiting", run) | waits | {"summary": f"waits for {waiting.on}", "remedy": remedy}
            )
        case Park(parked=parked) if parked.waits in _BY_OPERATOR:
            what = parked.waits
            waits = {"what": what} | ({} if _encrypted(run) else {"why": _why(handoff, what)})
            summary = {"summary": f"waits for {what}: {_BY_OPERATOR[what]}"}
            return WebhookEvent(_common("waiting", run) | waits | summary | {"remedy": f"perdure task why {run.id}"})
    return None


def _why(handoff: Handoff | None, what: str) -> str:
    return "" if handoff is None else next((one.why for one in handoff.waiting_on if one.what == what), "")


def run_event(run: Run, event: str, data: Mapping[str, Any]) -> WebhookEvent:
    """Return an event about a run that continues."""
    return WebhookEvent(_common(event, run) | dict(data))


def unreadable_event(delivery: Delivery, task_id: str, error: BaseException) -> WebhookEvent:
    """Return the event of a buried message that could not be decoded."""
    data = {"event": "buried", "task": None, "id": task_id, "queue": delivery.partition.queue, "at": _now()}
    return WebhookEvent(data | _buried(task_id, Reason.UNREADABLE, Counters(), error, None))


def _common(event: str, run: Run) -> dict[str, Any]:
    queue = run.delivery.partition.queue
    data = {"event": event, "task": run.envelope.task, "id": run.id, "queue": queue, "at": _now()}
    session = run.envelope.session
    return data | {"session": session} if session else data


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


def _masked(run: Run, text: str) -> str:
    return text if run.redact is None else run.redact(text)


def _encrypted(run: Run) -> bool:
    return run.gateway.encryptor.active


def _now() -> int:
    """Return milliseconds since the epoch, by this worker's clock."""
    return round(time.time() * 1000)

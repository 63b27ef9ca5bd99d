"""What there is to tell of a task's fate: notices of runs that were resumed or buried, or that wait for somebody.

A notice leaves the deployment. It says what Redis has readable anyway (ids, names, counters, reasons); texts of the
task (messages of errors, why it waits) only where tasks are not sealed, and never with secrets.
"""

from __future__ import annotations

import time
from typing import Any

from ...deadletter import Evidence, Reason
from ...queues import Counters, Delivery
from ..durable import Run
from ..journal import Handoff
from ..journal.events import Notified
from .notices import Notice
from .outcome import Burial, Outcome, Wait

__all__ = ["notice_of_end", "notice_of_start", "notice_of_unreadable"]


def notice_of_start(run: Run) -> Notice | None:
    """That a run goes on after an interruption, and what was restored; None for any other. The log hears of it."""
    resumption = run.resumption
    if resumption is None or not resumption.interrupted:
        return None

    async def told(failed: str | None) -> None:
        if not run.closed:  # else there is nobody left who could write it
            await run.tell(Notified(what="resumed", how="webhook", failed=failed))

    about = _about("resumed", run) | {
        "after": resumption.after,
        "gap": resumption.gap,
        "restored": resumption.restored,
        "summary": resumption.summary(),
    }
    return Notice(about, told)


def notice_of_end(run: Run, outcome: Outcome, handoff: Handoff | None) -> Notice | None:
    """That a task was given up, or waits for somebody; None for any other end."""
    match outcome:
        case Burial(reason=reason, counters=counters, error=error):
            return Notice(_about("buried", run) | _buried(run.id, reason, counters, error, run))
        case Wait() if handoff is not None and any(one.on for one in handoff.waiting_on):
            (waiting,) = [one for one in handoff.waiting_on if one.on][:1]
            told = {"what": waiting.what, "on": waiting.on} | ({} if _sealed(run) else {"why": waiting.why})
            remedy = f"perdure task send {run.id} TEXT --from {waiting.on}"
            return Notice(_about("waiting", run) | told | {"summary": f"it waits for {waiting.on}", "remedy": remedy})
    return None


def notice_of_unreadable(delivery: Delivery, task_id: str, error: BaseException) -> Notice:
    """That a message was given up which is no task."""
    about = {"event": "buried", "task": None, "id": task_id, "queue": delivery.partition.queue, "at": _now()}
    return Notice(about | _buried(task_id, Reason.UNREADABLE, Counters(), error, None))


def _about(event: str, run: Run) -> dict[str, Any]:
    queue = run.delivery.partition.queue
    return {"event": event, "task": run.envelope.task, "id": run.id, "queue": queue, "at": _now()}


def _buried(task_id: str, reason: Reason, counters: Counters, error: BaseException, run: Run | None) -> dict[str, Any]:
    evidence = Evidence.of(error, None if run is None else run.redact)
    told = {
        "reason": str(reason),
        "error": evidence.error,
        "attempts": counters.attempts,
        "crashes": counters.crashes,
        "summary": f"given up ({reason}): {evidence.error}",
        "remedy": f"perdure dlq show {task_id}",
    }
    return told if run is None or _sealed(run) else told | {"message": evidence.message}


def _sealed(run: Run) -> bool:
    return run.gateway.sealer.active


def _now() -> int:
    """Milliseconds since the epoch, by this worker's clock."""
    return round(time.time() * 1000)

"""The stopped run: the handoff document that it leaves, stored before its outcome.

The document is written once, without waiting. Storing the outcome frees a slot, a lease, and memory of a full server,
so nothing may delay it: if Redis is unavailable, full, or refuses the write, the run stops without a document, and the
next run derives the same from the event log. The same holds if the worker dies before the write. If it dies between the
write and the outcome, the document is there and nothing has happened since: the next run gets it, and learns of the
crash. A lost reply changes nothing, for a repeated write stores the same document. A run without the lease is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ...deadletter.burial import Evidence
from ...deadletter.error_text import error_text
from ...deadletter.policy import Reason
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import EntriesLost, LeaseLost, NotEncrypted, QueueError, TamperedData
from ...queues.event_log import LogTail, read_log_tail
from ...queues.runtime import RUNTIME
from ...queues.transport.gateway import Gateway
from ..context import Context
from ..durable.journal.handoff.document import HANDOFF, AwaitedAnswer, Handoff, Why
from ..durable.promises import left_promises, log_left_cancelled, warn_of_left
from ..durable.run import Run, goal_of
from ..durable.stop_reasons import STOP_RULES
from ..log import logger
from ..middleware import CallNext, Middleware, Settlement
from ..on_demand import burial_notes, draft_handoff, session_task
from .outcome import Burial, Cancelled, Outcome, Park, Rerun, RunSettlement


class HandoffMiddleware(Middleware):
    """Stores the handoff document of a stopped run."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        if isinstance(settlement, RunSettlement):
            settlement.handoff = await store_handoff(self._gateway, settlement.run, settlement.outcome)
            if isinstance(settlement.outcome, Cancelled):
                await log_left_cancelled(settlement.run)
        await call_next()


_UNREAD: Final = (Reason.UNDECRYPTABLE, Reason.UNREADABLE, Reason.NEWER_VERSION)


class _Stop(NamedTuple):
    why: Why
    detail: str = ""
    waiting: AwaitedAnswer | None = None


async def store_handoff(gateway: Gateway, run: Run, outcome: Outcome) -> Handoff | None:
    """Store the handoff document of a run that stops with this outcome, if it leaves one.

    Raises `LeaseLost`, `EntriesLost`.
    """
    stop = _stop(run, outcome)
    if stop is None or not _has_history(run):
        return None
    partition = run.delivery.partition
    try:
        tail = await read_log_tail(gateway, partition, run.id)
        handoff = draft_handoff(
            tail,
            task=run.envelope.task,
            session=run.id,
            why=stop.why,
            goal=goal_of(run),
            detail=stop.detail,
            in_flight=run.ended_in,
            attention=_remedy(run, outcome, tail),
            waiting=stop.waiting,
        )
        entries = []
        if isinstance(outcome, Burial) and handoff.promises:
            warn_of_left(run, handoff.promises)
            entries.append(run.next_entry(left_promises(handoff.promises)))
            handoff = handoff.model_copy(update={"events": run.events})
        await run.recorder.put_or_drop(*entries, Entry(Kind.SAVED, HANDOFF, handoff.to_json()))
    except (LeaseLost, EntriesLost):
        raise
    except QueueError as error:
        bound = logger.bind(task=run.envelope.task, id=run.id)
        bound.warning("could not store the handoff document: {}; the next run derives it from the event log", error)
        return None
    return handoff


def _stop(run: Run, outcome: Outcome) -> _Stop | None:
    """Return why the run stops, if it leaves a document; one whose checkpoint cannot be read leaves none."""
    rule = STOP_RULES[outcome.stop]
    unread = isinstance(outcome, Burial) and outcome.reason in _UNREAD
    if not rule.handoff or rule.why is None or unread:
        return None
    match outcome:
        case Rerun(delay=delay, error=error) if rule.why == "waiting":
            message = Evidence.of(error, run.redact).message
            return _Stop(rule.why, waiting=AwaitedAnswer(what=f"{delay:g} s to pass", why=message))
        case Rerun(error=error):
            return _Stop(rule.why, error_text(error))
        case Park(parked=parked):
            return _Stop(rule.why, waiting=AwaitedAnswer(what=f"a {parked.waits}"))
        case Burial(reason=reason, error=error):
            evidence = Evidence.of(error, run.redact)
            return _Stop(rule.why, f"{reason}: {evidence.error}: {evidence.message}")
    return _Stop(rule.why)


def _remedy(run: Run, outcome: Outcome, tail: LogTail) -> Iterable[str]:
    """Return what needs attention if the task becomes a dead letter."""
    if not isinstance(outcome, Burial):
        return ()
    evidence = Evidence.of(outcome.error, run.redact)
    step = run.history.crash.get("step") if outcome.reason is Reason.CRASH_LOOP else None
    return burial_notes(tail, run.id, outcome.reason, evidence.error, evidence.message, step=step)


def _has_history(run: Run) -> bool:
    """Whether any run of the task has recorded anything."""
    history = run.history
    return run.has_written or bool(history.records or history.saved or history.intents or history.events)


class SessionMiddleware(Middleware):
    """Ends the turn of a cancelled task, and marks the session of a dead letter as failed.

    A turn whose message was changed, or is not encrypted as it must be, ends without an answer: the next one runs.

    If the worker dies before, or Redis does not answer, the session sweeper does the same. The task of a forgotten
    session, stored by a sender that had read the session before, is deleted in place of its burial.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        turn = None
        if isinstance(settlement, RunSettlement) and isinstance(settlement.outcome, Burial | Cancelled):
            turn = session_task(self._gateway, settlement.run.delivery.partition, settlement.run.id)
        if turn is None or not isinstance(settlement, RunSettlement):
            await call_next()
            return
        with suppress(QueueError):  # then the outcome is stored first
            await turn.forget_if_removed()
        await call_next()
        run = settlement.run
        try:
            match settlement.outcome:  # that was stored: a caller may have cancelled the task meanwhile
                case Burial(error=NotEncrypted() | TamperedData() as error) if error.of_arguments:
                    await turn.refuse(str(error))  # no replay could run it
                case Burial(reason=reason):
                    await turn.end("failed", str(reason).encode())
                case _:
                    await turn.end("cancelled", b"cancelled")
        except QueueError as error:
            logger.bind(task=run.envelope.task, id=run.id).warning(
                "could not end turn {} of its session: {}; a worker does so within a minute", turn.number, error
            )


class TaskLog(Middleware):
    """Logs runs. It is part of the hooks only where it was asked for, so that other workers do not pay for it."""

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        ctx.log.bind(attempt=ctx.attempt).info("started")
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        if isinstance(settlement, RunSettlement):
            seconds = round(RUNTIME.monotonic() - settlement.run.started, 3)
            bound = ctx.log.bind(attempt=settlement.attempt, stop=settlement.stop, seconds=seconds)
            bound.info("ended: {}", settlement.state)

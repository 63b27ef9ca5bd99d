"""What a run leaves behind when it stops: its handoff, stored before the outcome is.

It goes out on its own and in one try. An outcome is what frees a slot, a lease, and on a full server memory: no
document may keep it waiting. So where Redis is away, full, or answers no, the run stops without one, and the next run
is told the same from the log; as it is where the worker dies before the write. Where it dies between the write and the
outcome, the handoff is there and nothing has happened since: the next run gets it, with the word that there was a
crash. A lost reply changes nothing, for the same document stands there. A run that has lost its lease is refused.

A run that hands on: the task that goes on is stored, with the messages, before this one's outcome is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ...deadletter import Evidence, Reason
from ...queues import (
    Entry,
    Gateway,
    HandOffRefused,
    Kind,
    LeaseLost,
    Namespace,
    Partition,
    QueueError,
    Successor,
    enqueue_successor,
    forward_messages,
    read_log_tail,
    retry_while_unavailable,
    write_entries,
)
from ..durable import Run
from ..errors import TaskTimeout
from ..journal import HANDOFF, Handoff, handoff_of
from ..journal.handoff import AwaitedAnswer, Why
from ..log import log_wait, logger
from .outcome import Burial, Outcome, Park, Release, Rerun, Success

__all__ = ["store_handoff", "transfer"]


class _Stop(NamedTuple):
    why: Why
    detail: str = ""
    waiting: AwaitedAnswer | None = None


async def store_handoff(gateway: Gateway, run: Run, outcome: Outcome) -> Handoff | None:
    """Store the handoff of a run that stops with this outcome, where it has one; returns it. Raises `LeaseLost`."""
    stop = _stop(run, outcome)
    if stop is None or not _has_history(run):
        return None
    partition = run.delivery.partition
    try:
        trail = await read_log_tail(gateway, partition, run.id)
        handoff = handoff_of(
            trail,
            task=run.envelope.task,
            session=run.id,
            why=stop.why,
            detail=stop.detail,
            in_flight=run.ended_in,
            waiting=stop.waiting,
        )
        entry = Entry(Kind.SAVED, HANDOFF, handoff.to_json())
        await write_entries(gateway, run.delivery, run.id, [entry.encrypted(gateway.encryptor.of(partition, run.id))])
    except LeaseLost:
        raise
    except QueueError as error:
        bound = logger.bind(task=run.envelope.task, id=run.id)
        bound.warning("no handoff could be stored: {}; the next run has it from the log", error)
        return None
    return handoff


def _stop(run: Run, outcome: Outcome) -> _Stop | None:
    """Why it stops, if it is to leave something for that."""
    stop: _Stop | None = None
    match outcome:
        case Release():
            stop = _Stop("shutdown")
        case Rerun(error=TaskTimeout() as error):
            stop = _Stop("budget", str(error))
        case Rerun(delay=delay, event="snoozed", error=error):
            stop = _Stop("waiting", "", AwaitedAnswer(what=f"{delay:g} s to pass", why=_told(run, error)))
        case Park(parked=parked):
            stop = _Stop("waiting", "", AwaitedAnswer(what=f"a {parked.waits}"))
        case Burial(reason=reason, error=error) if (
            reason is not Reason.UNDECRYPTABLE
        ):  # else nobody could read what is there
            evidence = Evidence.of(error, run.redact)
            stop = _Stop("burial", f"{reason}: {evidence.error}: {evidence.message}")
    return stop


def _told(run: Run, error: BaseException) -> str:
    return Evidence.of(error, run.redact).message


def _has_history(run: Run) -> bool:
    """Whether there is anything to tell but that it stopped."""
    history = run.history
    return run.has_written or bool(history.done or history.saved or history.intents or history.events)


async def transfer(gateway: Gateway, run: Run, successor: Successor) -> Outcome:
    """Store the task that goes on. Where this worker dies before the outcome is stored, the next one does it again,
    which changes nothing, and goes on from here.
    """
    counters = run.history.counters.attempted()
    namespace = Namespace(run.delivery.partition.namespace)
    try:
        to = await retry_while_unavailable(
            partial(enqueue_successor, gateway, namespace, successor), on_wait=log_wait(f"task {run.id}", run.touch)
        )
    except HandOffRefused as refused:
        return Burial(Reason.NOT_RETRYABLE, counters, refused)
    handed_to = successor.envelope.id
    await _forward(gateway, run, to, handed_to)
    logger.bind(task=run.envelope.task, id=run.id).info(
        "handed on to task {} ({}, queue {})", handed_to, successor.envelope.task, successor.queue
    )
    return Success(b"null", counters, handed_to)


async def _forward(gateway: Gateway, run: Run, to: Partition, handed_to: str) -> None:
    """Have the messages go to the task that goes on: first those to come, then those that were not read."""
    await run.recorder.put(Entry(Kind.TRANSFERRED, handed_to, handed_to.encode()), wait=True)
    forward = partial(forward_messages, gateway, run.delivery.partition, run.id, to, handed_to)
    left = await retry_while_unavailable(forward, on_wait=log_wait(f"task {run.id}", run.touch))
    if left:
        logger.bind(task=run.envelope.task, id=run.id).warning(
            "{} messages could not go along to task {} and stay unread: perdure task inbox {}",
            len(left),
            handed_to,
            run.id,
        )

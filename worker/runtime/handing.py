"""A run that hands on: the task that goes on is stored, with the messages, before this one's outcome is."""

from __future__ import annotations

from functools import partial

from ...deadletter import Reason
from ...queues import (
    Entry,
    Gateway,
    HandOffRefused,
    Kind,
    Namespace,
    Partition,
    Successor,
    forward_messages,
    hand_on,
)
from ..durable import Run, until_available
from ..observe import logger
from .outcome import Burial, Outcome, Success

__all__ = ["go_on_elsewhere"]


async def go_on_elsewhere(gateway: Gateway, run: Run, successor: Successor) -> Outcome:
    """Store the task that goes on. Where this worker dies before the outcome is stored, the next one does it again,
    which changes nothing, and goes on from here.
    """
    counters = run.history.counters.attempted()
    namespace = Namespace(run.delivery.partition.namespace)
    try:
        to = await until_available(partial(hand_on, gateway, namespace, successor), f"task {run.id}", run.stir)
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
    await run.recorder.put(Entry(Kind.MOVED, handed_to, handed_to.encode()), wait=True)
    forward = partial(forward_messages, gateway, run.delivery.partition, run.id, to, handed_to)
    left = await until_available(forward, f"task {run.id}", run.stir)
    if left:
        logger.bind(task=run.envelope.task, id=run.id).warning(
            "{} messages could not go along to task {} and stay unread: perdure task inbox {}",
            len(left),
            handed_to,
            run.id,
        )

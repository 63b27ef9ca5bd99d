"""The successor of a task (`ctx.continue_as`): stored before the task's own outcome is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import orjson

from ....deadletter.policy import Reason
from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.derived_tasks import Successor, enqueue_successor
from ....queues.errors import DecryptionError, HandOffRefused, LargeValueLost, TaskNotFound
from ....queues.inbox import forward_messages
from ....queues.inspection.views import find_task
from ....queues.keys import Namespace, Partition
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.gateway import Gateway
from ....queues.values import NamedValue, forward_values, read_changes
from ...durable.continuation import complete_successor, successor_of
from ...durable.messaging import used_messages
from ...durable.run import Run
from ...durable.stop_reasons import StopReason, counters_after
from ...log import log_wait, logger
from ..outcome import Burial, Outcome, Success
from .execution import Execution


class Continue:
    """Stage: finish a continuation that a previous run decided on and did not complete."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, execution: Execution) -> Outcome | None:
        successor = successor_of(execution.run)
        return None if successor is None else await transfer(self._gateway, execution.run, successor)


async def transfer(gateway: Gateway, run: Run, successor: Successor) -> Outcome:
    """Store the successor and give it the unread messages.

    If this worker dies before the outcome is stored, the next one repeats this, which changes nothing, and continues
    from here. So does this one if the successor is gone: Redis has lost it, or it has ended and its record has expired.
    """
    counters = counters_after(StopReason.CONTINUED, run.history.counters)
    namespace = Namespace(run.delivery.partition.namespace)
    handed_to = successor.envelope.id
    store: Callable[[], Awaitable[Partition | None]]
    continued = run.history.continued
    while True:
        try:
            if continued == successor.source:  # a worker has read it; it may have ended and expired since
                store = partial(find_task, gateway, namespace, handed_to)
            else:
                complete = await complete_successor(run, successor)
                complete = replace(complete, values=await _values(gateway, run))
                store = partial(enqueue_successor, gateway, namespace, complete)
            to = await retry_while_unavailable(store, on_wait=log_wait(f"task {run.id}", run.touch))
            if to is not None:
                await _forward(gateway, run, to, handed_to)
            break
        except HandOffRefused as refused:
            return Burial(Reason.NOT_RETRYABLE, counters, refused)
        except LargeValueLost as lost:
            return Burial(Reason.UNREADABLE, counters, lost)
        except DecryptionError as error:
            return Burial(Reason.UNDECRYPTABLE, counters, error)
        except TaskNotFound:
            read = partial(gateway.command, "HGET", run.delivery.partition.record(run.id), "continued")
            found = await retry_while_unavailable(read, on_wait=log_wait(f"task {run.id}", run.touch))
            continued = None if found is None else found.decode()
    logger.bind(task=run.envelope.task, id=run.id).info(
        "continued as task {} ({}, queue {})", handed_to, successor.envelope.task, successor.queue
    )
    return Success(orjson.dumps(handed_to), counters, handed_to)  # so that it is encrypted too: see TaskHandle.result


async def _values(gateway: Gateway, run: Run) -> list[NamedValue]:
    """Return the values with which the successor begins, in the act that stores it: its first read must find them."""
    read = partial(read_changes, gateway, run.delivery.partition, run.id)
    _, values = await retry_while_unavailable(read, on_wait=log_wait(f"task {run.id}", run.touch))
    return values


async def _forward(gateway: Gateway, run: Run, to: Partition, handed_to: str) -> None:
    """Give the successor the messages that were not read, route later ones to it, and give it those sent meanwhile.

    So are updates of values, which the successor has had from its start.

    Messages are routed only after the others were moved, so that if this worker dies between the two, none overtakes
    those that wait for the next run.
    """
    used = used_messages(run)
    await used.load()
    place = (gateway, run.delivery.partition, run.id, to, handed_to)
    forward = partial(forward_messages, *place, is_used=lambda number: not used.may_take(number))
    on_wait = log_wait(f"task {run.id}", run.touch)
    await retry_while_unavailable(forward, on_wait=on_wait)
    await run.recorder.put(Entry(Kind.TRANSFERRED, handed_to, handed_to.encode()), wait=True)
    left = await retry_while_unavailable(forward, on_wait=on_wait)
    changed = partial(forward_values, gateway, run.delivery.partition, run.id, to, handed_to)
    await retry_while_unavailable(changed, on_wait=on_wait)
    if left:
        logger.bind(task=run.envelope.task, id=run.id).warning(
            "{} messages could not be forwarded to task {} and stay unread: perdure task inbox {}",
            len(left),
            handed_to,
            run.id,
        )

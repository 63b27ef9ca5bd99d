"""Late step functions: a task does not run again before the threads of its last run have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ....deadletter.policy import members_of
from ....queues.errors import EntriesLost, LeaseLost
from ...durable.run import Run
from ...durable.steps.step_thread import StepThread
from ...durable.stop_reasons import StopReason
from ...errors import StepTimeout
from ...log import logger
from ..outcome import Outcome, Park, Rerun
from .execution import Execution


async def await_late_steps(
    execution: Execution, outcome: Outcome, idle_limit: float, leave: Callable[[], None]
) -> None:
    """Hold a task that will run again until no function of its steps runs in a thread, and record their results.

    The lease is kept, so that no other worker runs the step beside the thread. A stop of the run ends the wait, and so
    does the idle limit: then the threads count as lost, and the next attempt calls the functions again.

    Args:
        idle_limit: Seconds, of a task without a limit of its own.
        leave: Frees the slot of the execution.

    Raises:
        LeaseLost, EntriesLost: The results cannot be recorded.
    """
    run = execution.run
    late, calls = run.threads.late, run.threads.late.of(run.id)
    if not (calls and isinstance(outcome, (Rerun, Park))):
        return
    bound = logger.bind(task=run.envelope.task, id=run.id)
    running, over = [call for call in calls if not call.ended], outcome.stop is StopReason.IDLE
    limit = execution.task.idle_timeout or idle_limit
    if running and not over:
        bound.warning("task waits for steps that still run in threads: {}", ", ".join(call.step for call in running))
        if any(call.shares_thread for call in running):  # the thread of the handler occupies a slot already
            leave()
        over = await run.hold(asyncio.gather(*(call.wait() for call in running)), limit)
    for call in calls:
        if call.ended and call.record is not None and not call.failed and _unseen(run, outcome, call):
            late.remove(call)
            await _record(call, call.record)
        elif over and not call.ended:
            late.remove(call)
            bound.error("step {} did not end within the idle limit; it may run again beside its lost thread", call.step)


def _unseen(run: Run, outcome: Rerun | Park, call: StepThread) -> bool:
    """Return whether the handler ended with the step, so that it did nothing that would not follow from a result.

    Files that the function wrote late are not saved, so the result of a task with a workspace does not count.
    """
    if run.workspace is not None or isinstance(outcome, Park):
        return False
    if outcome.stop is StopReason.TIMED_OUT:
        return call.step in run.ended_in
    return any(isinstance(error, StepTimeout) and error.step == call.step for error in members_of(outcome.error))


async def _record(call: StepThread, record: Callable[[Any], Awaitable[None]]) -> None:
    bound = logger.bind(id=call.task, step=call.step)
    try:
        await record(call.result())
    except (LeaseLost, EntriesLost):
        raise
    except Exception:  # noqa: BLE001 - the step runs again in the next attempt
        bound.exception("could not record the result that step {} returned after it was given up", call.step)
    else:
        bound.info("recorded the result that step {} returned after it was given up", call.step)

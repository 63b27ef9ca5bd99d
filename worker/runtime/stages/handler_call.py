"""The handler call: the stage that runs a task's handler and decides the outcome from how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ....deadletter.policy import members_of
from ....queues.errors import EntriesLost, LeaseLost, PayloadTooLarge
from ....queues.inbox import ACTING_TASK, ActingTask
from ....queues.transport.gateway import Gateway
from ...context import Context
from ...durable.continuation import successor_of
from ...durable.emitting import begin_bodies
from ...durable.event_calls import log_orphans
from ...durable.handler_task import GENERATOR_EXIT, is_closing
from ...durable.joining import group_arguments
from ...durable.journal.step_record import UNSAVED, WORKSPACE
from ...durable.promises import log_left
from ...durable.run import Run
from ...durable.steps.codec import store_task_result
from ...durable.steps.current import CURRENT_RUN, FORGOTTEN, StepCall
from ...durable.steps.failures import forget_failures
from ...durable.steps.step_thread import StepThread
from ...durable.stop_reasons import STOP_RULES, LimitReason, ParkReason, StopReason, counters_after
from ...errors import OrphanedSteps, StepTimeout, TaskError, TaskIdle, TaskTimeout, UnserialisableResult
from ...log import logger
from ...middleware import Middleware, build_chain
from ...on_demand import begin_budgets, restore_workspace, watch_tools
from ...settings import Settings
from ...task import Task
from ..outcome import Cancelled, Limited, Outcome, Park, Release, Rerun, Success, after_error
from .execution import GROUP, Execution
from .successor import transfer


class HandlerCall:
    """Stage: run the handler in this asyncio task, so that stopping the run is cancelling the task."""

    def __init__(self, gateway: Gateway, settings: Settings, middleware: Sequence[Middleware]) -> None:
        self._gateway = gateway
        self._settings = settings
        self._around_run = build_chain(middleware, "run", _call_handler, shown=1)
        self._around_step = build_chain(middleware, "step", _call_step, shown=2)

    async def __call__(self, execution: Execution) -> Outcome:
        run, task, ctx = execution.run, execution.task, execution.ctx
        if self._around_step is not None:
            run.around_step = partial(self._around_step, ctx)
        timeout = time_limit_of(run, task)
        limit = None if timeout is None else run.limit(timeout)
        token, run.context, run.retry = CURRENT_RUN.set(run), ctx, task.retry
        at = run.delivery.partition
        acting = ACTING_TASK.set(ActingTask(at.namespace, at.queue, run.id))
        run.watch = watch_tools if task.watches_tools else None
        run.is_agent = task.on_orphan is None
        error: BaseException | None = None
        result: bytes | None = None
        stop: StopReason | None = None
        try:
            with run:
                if run.history.saved or run.history.pages is not None:
                    await _restore(run)
                value = await self._call(run, execution)
                if run.stop_reason is None:  # a handler that was stopped has no result, whatever it returns
                    data, value = task.result.encode("task", task.name, value)
                    result = data if len(data) <= run.payload_limit else await _store_large(run, task, data, value)
                else:
                    logger.bind(task=task.name, id=run.id).warning(
                        "the handler of task {!r} {} returned after its run was stopped ({}): its result is not "
                        "stored; a handler must let RunStopped and CancelledError pass",
                        task.name,
                        run.id,
                        STOP_RULES[run.stop_reason].word,
                    )
        except asyncio.CancelledError as cancelled:
            error = cancelled
        except LeaseLost as lost:
            if lost.task_id == run.id:
                await _charge_rest(run, lost=True)
                raise
            error = lost
        except BaseException as raised:  # noqa: BLE001 - a handler may raise anything
            error = _failure(task.name, raised)
        finally:
            stop = run.stop_reason  # a later stop came after the end of the handler, and changes nothing
            ACTING_TASK.reset(acting)
            CURRENT_RUN.reset(token)
            if limit is not None:
                limit.cancel()
            if run.watching is not None or run.files is not None:
                await _leave(run, keep=result is None and run.stop_reason is not StopReason.CANCELLED)
        if run.stop_reason is not None or isinstance(error, asyncio.CancelledError):
            await run.drain_cancellation()
        return await self._classify(execution, stop, result, error)

    async def stopped(self, execution: Execution, stop: StopReason) -> Outcome:
        """Return the outcome of a run that was stopped before its handler was called."""
        return await self._classify(execution, stop, None, None)

    async def _call(self, run: Run, execution: Execution) -> Any:
        """Call the handler. If it fails, the steps that run beside it end first: the next attempt has their results."""
        if run.emits:
            await begin_bodies(run)
        try:
            if run.envelope.budgets or execution.task.budgets is not None:
                await begin_budgets(run, execution.task, execution.arguments)
            if run.envelope.group:
                data = execution.arguments[GROUP]
                execution.arguments = await group_arguments(run, data, execution.task.arguments)
            if self._around_run is None:
                return await execution.task.handler(execution.ctx, **execution.arguments)
            return await self._around_run(execution.ctx, execution)
        except (LeaseLost, EntriesLost):
            raise
        except Exception:
            if run.stop_reason is None and run.steps_in_flight:
                await run.await_steps()
            raise

    async def _classify(
        self, execution: Execution, stop: StopReason | None, result: bytes | None, error: BaseException | None
    ) -> Outcome:
        """Decide the outcome. stop: why the handler was stopped before its end. Raises `LeaseLost`, `EntriesLost`."""
        run, task = execution.run, execution.task
        if run.spending is not None:
            await _charge_rest(run, lost=run.stop_reason is StopReason.LOST)
        if run.stop_reason is not None:
            _check_lost(run)
        if result is not None or stop is not StopReason.CANCELLED:
            if result is not None and (run.history.records or run.history.saved):
                error = await _log_left(run, task) or error
                result = None if isinstance(error, OrphanedSteps) else result
            if run.failures and (result is not None or stop is None or STOP_RULES[stop].act == "fail"):
                await forget_failures(run)
            if run.has_written:
                await run.flush()  # steps of a cancelled task are not needed, and storing them may wait for Redis
            if run.stop_reason is not None:
                _check_lost(run)
        if result is None and run.stop_reason is StopReason.CANCELLED:
            stop = StopReason.CANCELLED  # a failure does not outlive a cancellation, whichever came first
        if stop is StopReason.CONTINUED and (successor := successor_of(run)) is not None:
            return await transfer(self._gateway, run, successor)
        if result is not None:
            return Success(result, counters_after(StopReason.COMPLETED, run.history.counters))
        if stop is not None:
            return outcome_of_stop(run, task, stop, self._settings, error)
        if error is None or isinstance(error, asyncio.CancelledError):
            cause = error
            error = TaskError(f"task {task.name!r} was cancelled from within its own handler")
            error.__cause__ = cause
        return after_error(error, task.retry, run.history.counters, run.envelope.options.max_attempts)


async def _log_left(run: Run, task: Task[Any, Any]) -> OrphanedSteps | None:
    """Log what a handler with a result leaves: recorded steps, promises. Return the error if it fails for the steps."""
    if run.history.records and task.on_orphan is not None:
        orphaned = await log_orphans(run)
        if orphaned is not None and task.on_orphan == "fail":
            return OrphanedSteps(f"{orphaned}; give them their former names, or replay the task with --fresh")
    if run.history.saved:
        await log_left(run)
    return None


async def _leave(run: Run, *, keep: bool) -> None:
    """End what ran beside the handler. keep: whether a later run may need the files of the workspace."""
    if run.watching is not None:
        await run.watching.aclose()
    if run.files is not None:
        await run.files.close(keep=keep)


async def _charge_rest(run: Run, *, lost: bool) -> None:
    """Charge what the run has spent and not charged yet. lost: the lease is, so nothing waits for Redis."""
    if run.spending is not None:
        await run.spending.leave(lost=lost)


async def _restore(run: Run) -> None:
    """Read what the handler needs at once of a checkpoint, and restore its files."""
    saved = run.history.saved
    await run.history.read_unfinished(WORKSPACE, UNSAVED, FORGOTTEN)
    if WORKSPACE in saved or UNSAVED in saved:
        await restore_workspace(run)


def _check_lost(run: Run) -> None:
    """Raise `LeaseLost` or `EntriesLost` if the run may not store an outcome."""
    if run.stop_reason is StopReason.LOST:
        raise LeaseLost(run.id, "outcome")
    if run.stop_reason is StopReason.DATA_LOST and isinstance(run.stop_detail, EntriesLost):
        raise run.stop_detail


def _failure(name: str, raised: BaseException) -> BaseException:
    """Return the error of a handler. Raises a GeneratorExit with which this coroutine is closed, after its loop."""
    if not isinstance(raised, GeneratorExit):
        return raised
    if is_closing():
        raise raised
    error = TaskError(f"task {name!r} {GENERATOR_EXIT}")
    error.__cause__ = raised
    return error


async def _store_large(run: Run, task: Task[Any, Any], result: bytes, value: Any) -> bytes:
    try:
        return await store_task_result(run, result, value)
    except PayloadTooLarge as error:
        raise UnserialisableResult(f"task {task.name!r}", str(error)) from None


async def _call_handler(ctx: Context, execution: Execution) -> Any:
    return await execution.task.handler(ctx, **execution.arguments)


async def _call_step(_ctx: Context, _call: StepCall, perform: Any) -> Any:
    return await perform()


def outcome_of_stop(
    run: Run, task: Task[Any, Any], stop: StopReason, settings: Settings, raised: BaseException | None = None
) -> Outcome:
    """Return the outcome of a run that was stopped. raised: by its handler afterwards, for the traceback."""
    counters = run.history.counters
    match STOP_RULES[stop].act:
        case "cancel":
            return Cancelled(counters)
        case "release":
            return Release(counters)
        case "park" if isinstance(run.stop_detail, ParkReason):
            return Park(run.stop_detail, counters)
        case "limit" if isinstance(run.stop_detail, LimitReason):
            full = run.stop_detail
            if full.of_task:
                return Limited(full.limit, 0.0, counters, stop)
            return Release(counters, stop)  # the handler waits where it calls for the limit
    error: Exception
    if isinstance(run.stop_detail, Exception):
        error = run.stop_detail
    elif stop is StopReason.IDLE:
        error = TaskIdle(task.name, task.idle_timeout or settings.idle_limit, run.ended_in)
    else:
        error = TaskTimeout(task.name, time_limit_of(run, task) or settings.time_limit)
    if isinstance(raised, Exception) and raised is not error:
        error.__cause__ = raised
    return after_error(error, task.retry, counters, run.envelope.options.max_attempts, stop)


def time_limit_of(run: Run, task: Task[Any, Any]) -> float | None:
    """Return the seconds that the producer or the task allows a run; None where only the worker's limit holds."""
    return run.envelope.options.timeout or task.timeout


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
    if run.files is not None or isinstance(outcome, Park):
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

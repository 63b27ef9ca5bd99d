"""One delivery, from message to outcome: the one path that new, claimed and given-back messages all take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ...deadletter import Reason, after_crash, backoff
from ...queues import (
    DecryptionError,
    Delivery,
    Envelope,
    Gateway,
    History,
    KeyMissing,
    LeaseLost,
    Leases,
    Partition,
    PayloadTooLarge,
    PerdureError,
    UnreadableEnvelope,
    check_size,
    last_step,
    load_history,
    retry_while_unavailable,
)
from ..durable import CURRENT_RUN, Context, Run, StopReason, Threads, successor_of
from ..errors import CrashLoop, InvalidArguments, TaskError, TaskIdle, TaskTimeout, UnknownTask, UnserialisableResult
from ..log import log_wait, logger
from ..memory import LazyMemoryStore
from ..registry import Registry, Task
from ..settings import Settings
from .outcome import Burial, Cancelled, Outcome, Park, Quarantined, Release, Rerun, Success, after_error
from .previous_run import open_arguments, open_history, resume
from .quarantine_gate import QuarantineGate
from .settler import Settler
from .slots import Slots
from .stopped_run import store_handoff, transfer
from .webhooks import WebhookEvent, WebhookQueue, resumed_event, stopped_event, unreadable_event

__all__ = ["Executor", "time_limit_of"]

_OWN: Final = (
    StopReason.CANCELLED,
    StopReason.RELEASED,
    StopReason.PARKED,
    StopReason.INCOHERENT,
    StopReason.CONTINUED,
)
"""Endings that count whatever the handler raised when it was cancelled."""


class Executor:
    """Runs deliveries. Each call of `execute` owns one delivery and settles it, or loses it."""

    def __init__(
        self,
        gateway: Gateway,
        registry: Registry,
        settings: Settings,
        leases: Leases[Run],
        slots: Slots,
        isolation: QuarantineGate,
        *,
        threads: int,
        notices: WebhookQueue | None = None,
    ) -> None:
        """slots: those that the executions are in. threads: how many sync steps may run at once. notices: of what
        somebody wants to hear; None where nobody does.
        """
        self._notices = notices if notices is not None and notices.wanted else None
        self._isolation = isolation
        self._slots = slots
        self._gateway = gateway
        self._registry = registry
        self._settings = settings
        self._leases = leases
        self.threads = Threads(threads)
        self.memory = LazyMemoryStore(settings)
        self._settler = Settler(gateway, settings)
        self._stopping = False
        self.owed: dict[str, Partition] | None = None
        """Tasks that failed here and are to run again, where somebody wants to know (a burst does)."""
        self.settled: Counter[str] = Counter()

    @property
    def runs(self) -> list[Run]:
        """The runs that are going on."""
        return self._leases.holders()

    def stop(self) -> None:
        """Have every run stop at its next step boundary, those that are only about to begin as well."""
        self._stopping = True
        for run in self.runs:
            run.request_stop()

    async def execute(self, delivery: Delivery) -> bool:
        """Run one delivery to its outcome. Never raises for what the task or its message does.

        Returns whether the task is to run again later, so that a due time has come up.
        """
        try:
            envelope = Envelope.decode(delivery.fields.get(b"env", b""))
        except UnreadableEnvelope as error:
            self._isolation.resolved(delivery)
            await self._settle_unreadable(delivery, error)
            return False
        run = Run(
            self._gateway,
            delivery,
            envelope,
            History(),
            payload_limit=self._settings.payload_limit,
            threads=self.threads,
            memory=self.memory,
            settings=self._settings,
        )
        self._hold(run)
        outcome: Outcome | None = None
        try:
            outcome = await self._outcome(run)
            stopped = not isinstance(outcome, Success)
            handoff = await store_handoff(self._gateway, run, outcome) if stopped else None
            self._slots.leave()
            await self._settler.settle(run, outcome, self._slots.stay)
            if stopped:
                self._announce(stopped_event, run, outcome, handoff)
            if isinstance(outcome, Quarantined):
                self._isolation.request()
                return False
            self.settled[delivery.partition.queue] += 1
            if self.owed is not None and isinstance(outcome, Rerun):
                self.owed[run.id] = delivery.partition
        except LeaseLost as error:
            logger.bind(task=envelope.task, id=run.id).warning("{}; another worker goes on", error)
        except Exception:  # noqa: BLE001 - whatever failed here, the worker goes on, and the lease brings the task back
            logger.bind(task=envelope.task, id=run.id).exception("the worker failed; the task is left for recovery")
        finally:
            self._leases.drop(run)
            if delivery.has_history:
                self._isolation.resolved(delivery)
                self._isolation.release(run)
            await run.close()
        return isinstance(outcome, (Rerun, Park))

    def _hold(self, run: Run) -> None:
        if self._stopping:
            run.request_stop()
        if self.owed is not None:
            self.owed.pop(run.id, None)
        former = self._leases.hold(run)
        if former is not None:
            former.cancel(StopReason.LOST)  # its lease passed while Redis was away, to this very worker

    async def _settle_unreadable(self, delivery: Delivery, error: UnreadableEnvelope) -> None:
        try:
            task_id = await self._settler.bury_unreadable(delivery, error)
            self._announce(unreadable_event, delivery, task_id, error)
            self.settled[delivery.partition.queue] += 1
        except LeaseLost as lost:
            logger.warning("{}; another worker goes on", lost)
        except Exception:  # noqa: BLE001 - the worker goes on, and the lease brings the message back
            logger.exception("an unreadable message could not be buried; it is left for recovery")

    def _announce(self, make: Callable[..., WebhookEvent | None], *of: Any) -> None:
        """Have somebody told, where there is anything to tell."""
        if self._notices is not None and (notice := make(*of)) is not None:
            self._notices.give(notice)

    async def _outcome(self, run: Run) -> Outcome:
        """What became of the task in this delivery."""
        if run.delivery.has_history:
            run.history = await retry_while_unavailable(
                partial(load_history, self._gateway, run.delivery, run.id), on_wait=log_wait(f"task {run.id}")
            )
        if run.history.cancel:
            return Cancelled(run.history.counters)
        task = self._registry.get(run.envelope.task)
        if task is None:
            return self._unknown(run)
        run.result_ttl = task.result_ttl
        if (given_up := await self._after_crash(run, task)) is not None:
            return given_up
        arguments = self._open(run, task)
        if not isinstance(arguments, dict):
            return arguments
        if run.delivery.has_history and (instead := await self._resume_or_defer(run)) is not None:
            return instead
        self._isolation.resolved(run.delivery)
        return await self._call(run, task, arguments)

    async def _resume_or_defer(self, run: Run) -> Outcome | None:
        """Find out what a run goes on from. Returns what becomes of one that may not run here and now, or that was cut
        off when it had decided already that another task goes on; None where it runs.
        """
        if (successor := successor_of(run)) is not None:
            return await transfer(self._gateway, run, successor)
        if run.history.quarantined and not self._isolation.admit(run):
            return Quarantined()
        self._isolation.resolved(run.delivery)
        await resume(self._gateway, run)
        self._announce(resumed_event, run)
        return None

    def _unknown(self, run: Run) -> Outcome:
        """Hand it back for workers that may know it, a bounded number of times."""
        return self._returned(run, UnknownTask(run.envelope.task, sorted(self._registry)), Reason.UNKNOWN_TASK)

    def _open(self, run: Run, task: Task[Any, Any]) -> dict[str, Any] | Outcome:
        """The arguments by name, with the checkpoint open; or what becomes of a task where they cannot be had.

        While keys are being changed, another worker may have the one that is missing here.
        """
        try:
            if run.delivery.has_history:
                open_history(run)
            return open_arguments(run, task)
        except KeyMissing as missing:
            return self._returned(run, missing, Reason.UNDECRYPTABLE)
        except DecryptionError as broken:
            return Burial(Reason.UNDECRYPTABLE, run.history.counters, broken)
        except InvalidArguments as invalid:
            return Burial(Reason.INVALID_ARGUMENTS, run.history.counters, invalid)

    def _returned(self, run: Run, error: PerdureError, reason: Reason) -> Outcome:
        counters = run.history.counters._replace(requeues=run.history.counters.requeues + 1)
        policy = self._settings.unknown_task
        if counters.requeues >= policy.max_attempts:
            return Burial(reason, counters, error)
        return Rerun(backoff(policy, counters.requeues), "returned", counters, error, suspect=run.history.quarantined)

    async def _after_crash(self, run: Run, task: Task[Any, Any]) -> Outcome | None:
        """What its crashes come to: it is given up, or has to wait; None where it may run now."""
        counters, blamed = run.history.counters, run.history.counted_crashes
        if after_crash(task.retry, counters._replace(crashes=blamed)) is not None:
            return Burial(Reason.CRASH_LOOP, counters, await self._crash_loop(run, task))
        if blamed > 1 and run.delivery.count > 1:  # it crashed just now, and not for the first time
            error = await self._crash_loop(run, task)
            return Rerun(backoff(task.retry, blamed - 1), "crash_backoff", counters, error, suspect=True)
        return None

    async def _crash_loop(self, run: Run, task: Task[Any, Any]) -> CrashLoop:
        """What is known of its crashes: how the last worker ended, in which step, after which."""
        crash = run.history.crash
        last = await retry_while_unavailable(
            partial(last_step, self._gateway, run.delivery.partition, run.id), on_wait=log_wait(f"task {run.id}")
        )
        known = [str(crash.get("how", ""))]
        known += [f"in step {crash['step']!r}"] if "step" in crash else []
        known += [f"after step {last!r}"] if last is not None else ["before any step was recorded"]
        return CrashLoop(task.name, run.history.counters.crashes, " ".join(filter(None, known)))

    async def _call(self, run: Run, task: Task[Any, Any], arguments: dict[str, Any]) -> Outcome:
        """Run the handler, in this asyncio task, so that ending the run is cancelling it."""
        timeout = time_limit_of(run, task)
        limit = None if timeout is None else run.limit(timeout)
        token = CURRENT_RUN.set(run)
        error: BaseException | None = None
        result: bytes | None = None
        run.started = time.monotonic()
        try:
            with run:
                value = await task.handler(Context(run, durability=task.durability), **arguments)
                result = self._encode(task, value)
        except asyncio.CancelledError as cancelled:
            error = cancelled
        except LeaseLost as lost:
            if lost.task_id == run.id:
                raise
            error = lost
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - a handler may raise anything
            error = raised
        finally:
            CURRENT_RUN.reset(token)
            if limit is not None:
                limit.cancel()
        if run.stop_reason is not None or isinstance(error, asyncio.CancelledError):
            await run.drain_cancellation()
        return await self._classify(run, task, result, error)

    async def _classify(
        self, run: Run, task: Task[Any, Any], result: bytes | None, error: BaseException | None
    ) -> Outcome:
        counters = run.history.counters
        if run.stop_reason is StopReason.LOST:
            raise LeaseLost(run.id, "outcome")
        if result is not None or run.stop_reason is not StopReason.CANCELLED:
            await run.flush()  # of one that is cancelled nobody will want the steps, and they may wait for Redis
        if run.stop_reason is StopReason.CONTINUED and (successor := successor_of(run)) is not None:
            return await transfer(self._gateway, run, successor)
        if result is not None:
            return Success(result, counters.attempted())
        obeyed = error is None or isinstance(error, asyncio.CancelledError)
        if run.stop_reason in _OWN or (obeyed and run.stop_reason is not None):
            return self._after_ending(run, task, run.stop_reason)
        if error is None or obeyed:
            cause = error
            error = TaskError(f"task {task.name!r} was cancelled from within its own handler")
            error.__cause__ = cause
        return after_error(error, task.retry, counters, run.envelope.options.max_attempts)

    def _after_ending(self, run: Run, task: Task[Any, Any], ending: StopReason | None) -> Outcome:
        """What follows a run that was ended from outside, and whose handler had nothing to say to that."""
        counters = run.history.counters
        if ending is StopReason.CANCELLED:
            return Cancelled(counters)
        if ending is StopReason.RELEASED:
            return Release(counters)
        if ending is StopReason.PARKED and run.parked is not None:
            return Park(run.parked, counters)
        if ending is StopReason.INCOHERENT and run.fault is not None:
            return after_error(run.fault, task.retry, counters, run.envelope.options.max_attempts)
        error: TaskError
        if ending is StopReason.IDLE:
            error = TaskIdle(task.name, task.idle_timeout or self._settings.idle_limit, run.ended_in)
        else:
            error = TaskTimeout(task.name, time_limit_of(run, task) or self._settings.time_limit)
        return after_error(error, task.retry, counters, run.envelope.options.max_attempts)

    async def give_up(self, run: Run) -> bool:
        """End the delivery of a run whose handler does not end though it was cancelled; its lease is not kept for it.

        The outcome is that of the run's ending, as if the handler had obeyed. Whatever that does from now on is
        refused, and its slot stays taken: what cannot be stopped must not pile up. Returns what `execute` does.
        """
        task, ending = self._registry.get(run.envelope.task), run.stop_reason
        run.stop_reason = StopReason.LOST
        outcome: Outcome | None = None
        try:
            if task is not None and ending is not StopReason.LOST:
                await run.flush()
                outcome = self._after_ending(run, task, ending)
                handoff = await store_handoff(self._gateway, run, outcome)
                await self._settler.settle(run, outcome, run.touch)
                self._announce(stopped_event, run, outcome, handoff)
                self.settled[run.delivery.partition.queue] += 1
        except LeaseLost as error:
            logger.bind(task=run.envelope.task, id=run.id).warning("{}; another worker goes on", error)
        finally:
            self._leases.drop(run)
            if run.delivery.has_history:
                self._isolation.release(run)
        return isinstance(outcome, (Rerun, Park))

    def _encode(self, task: Task[Any, Any], value: Any) -> bytes:
        data, _ = task.result.encode(f"task {task.name!r}", value)
        try:
            check_size("the result", len(data), self._settings.payload_limit)
        except PayloadTooLarge as error:
            raise UnserialisableResult(f"task {task.name!r}", str(error)) from None
        return data


def time_limit_of(run: Run, task: Task[Any, Any]) -> float | None:
    """Seconds that the producer or the task allows a run; None where only the worker's own limit holds."""
    return run.envelope.options.timeout or task.timeout

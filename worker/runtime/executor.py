"""The executor: takes one delivery from its message to its settled outcome.

New, reclaimed and returned messages take the same path: stages decide the outcome, one after another, until one of them
returns it; then the settle hooks store it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...deadletter.policy import Reason
from ...queues.delivery.checkpoint import History
from ...queues.delivery.heartbeat import renew_lease
from ...queues.delivery.leases import Delivery, Leases
from ...queues.delivery.settlement import OnWatched, raise_count
from ...queues.envelope import Envelope, newer_envelope
from ...queues.errors import EntriesLost, LeaseLost, QueueError, UnreadableEnvelope
from ...queues.keys import Namespace, Partition
from ...queues.runtime import RUNTIME
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.unique import free_marker
from ..context import Context
from ..durable.extras import Extras, Host, IsNew, never_new
from ..durable.handler_task import is_closing
from ..durable.run import Run, RunObserver
from ..durable.steps.failures import forget_failures
from ..durable.steps.threads import Threads
from ..durable.stop_reasons import STOP_RULES, StopReason
from ..log import logger
from ..middleware import Middleware, build_chain
from ..on_demand import observe_limits
from ..registry import Registry
from ..settings import Settings
from .outcome import (
    AwaitVersion,
    Cancelled,
    Limited,
    Outcome,
    Park,
    Quarantined,
    Release,
    Rerun,
    RunSettlement,
    Success,
    ends_attempt,
    settlement_of,
)
from .quarantine_gate import QuarantineGate
from .settler import Settler
from .shared_settings import SharedSettings
from .slots import Slots
from .stages.crash_limit import CrashLimit
from .stages.execution import Execution, Stage, check_deadline, check_limits
from .stages.handler_call import HandlerCall, await_late_steps, outcome_of_stop
from .stages.previous_run import LoadHistory, Resume
from .stages.successor import Continue
from .stages.task_lookup import CheckTaskVersion, CheckVersion, DecodeArguments, DecryptHistory, FindTask
from .stopped_run import HandoffMiddleware, SessionMiddleware, TaskLog
from .webhook_posting import WebhookQueue
from .webhooks import WebhookMiddleware, run_event, unreadable_event

if TYPE_CHECKING:
    from ...queues.pauses import PauseRule
    from .metrics.meter import Meter


class Executor:
    """Runs deliveries. Each call of `execute` owns one delivery, and settles it or loses its lease."""

    def __init__(
        self,
        gateway: Gateway,
        registry: Registry,
        settings: Settings,
        shared: SharedSettings,
        leases: Leases[Run],
        slots: Slots,
        gate: QuarantineGate,
        *,
        threads: int,
        webhooks: WebhookQueue | None = None,
        on_progress: Callable[[], object] | None = None,
        middleware: Sequence[Middleware] = (),
        resources: Callable[[], Any] = lambda: None,
        on_watched: OnWatched | None = None,
        limits: Mapping[str, Any] = {},
        is_new: IsNew = never_new,
        prices: Callable[..., Any] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Build the stages and the hooks.

        Args:
            gateway: connection to Redis.
            registry: tasks of the app.
            settings: of the worker.
            shared: settings that all workers of the namespace share.
            leases: leases of the runs.
            slots: those in which `execute` is called.
            gate: gate for tasks in quarantine.
            threads: how many synchronous steps may run at once.
            webhooks: queue of webhooks, None without webhooks.
            on_progress: called once, when the first attempt ended or the first result was recorded.
            middleware: the user's, the outermost first.
            resources: returns what the app's lifespan yielded.
            on_watched: called after a task that others wait for has ended.
            limits: limits of the app, by their names.
            is_new, prices: see `Host`.
            meter: counts runs and steps; None without metrics.
        """
        self._gateway = gateway
        self._registry = registry
        self._settings = settings
        self._shared = shared
        self._leases = leases
        self._slots = slots
        self._gate = gate
        self._webhooks = webhooks if webhooks is not None and webhooks.wanted else None
        self._resources = resources
        self._meter = meter
        self._given_up: set[Run] = set()
        """Runs whose handlers ignore their cancellation, and which are counted already."""
        self.threads = Threads(threads, slots.leak, slots.held)
        self.extras = Extras()
        free = lambda: slots.free / slots.capacity  # noqa: E731
        notify = None if self._webhooks is None else self._notify
        lease = lambda: shared.renewal_lease  # noqa: E731
        self._host = Host(self.threads, registry, self.extras, lease, limits, free, is_new, prices, notify, meter)
        self._settler = Settler(gateway, registry, shared, on_watched)
        if settings.log_tasks:
            middleware = [TaskLog(), *middleware]
        own: list[Middleware] = [] if self._webhooks is None else [WebhookMiddleware(self._webhooks)]
        own += (HandoffMiddleware(gateway), SessionMiddleware(gateway))
        self._settle_success = build_chain(middleware, "settle", self._store, shown=2, must_call=True)
        self._settle_stop = build_chain([*middleware, *own], "settle", self._store, shown=2, must_call=True)
        self._resume = Resume(gateway)
        check, find, decode = CheckVersion(settings), FindTask(registry, settings), DecodeArguments(settings)
        self._first_stages: tuple[Stage, ...] = (check, find, check_deadline, decode, check_limits)
        self._stages: tuple[Stage, ...] = (
            LoadHistory(gateway),
            check,
            find,
            check_deadline,
            CrashLimit(gateway),
            DecryptHistory(settings),
            CheckTaskVersion(settings),
            decode,  # later: older code may not accept the arguments of newer code
            Continue(gateway),
            gate.check,
            check_limits,
            self._resume,
        )
        self._unheld = (self._first_stages, self._stages)
        self._call_handler = HandlerCall(gateway, settings, [*middleware, *own])
        self._stopping = False
        self._on_progress = on_progress
        self.owed: dict[str, Partition] | None = None
        """Tasks that failed here and run again later; filled for a burst, which waits for them."""
        self.settled: Counter[str] = Counter()
        """Settled deliveries by queue."""

    def hold(self, rules: Sequence[PauseRule]) -> None:
        """Park the tasks that these pauses match from now on. Without any, no stage looks for them."""
        self._first_stages, self._stages = self._unheld
        if rules:
            from .stages.operator_pause import HeldByArguments, HeldByName, with_pauses

            stages = (HeldByName(rules), HeldByArguments(rules))
            self._first_stages = with_pauses(self._first_stages, *stages)
            self._stages = with_pauses(self._stages, *stages)

    def _notify(self, run: Run, event: str, data: Mapping[str, Any]) -> None:
        """Post a webhook about a run."""
        if self._webhooks is not None:
            self._webhooks.give(run_event(run, event, data))

    @property
    def runs(self) -> list[Run]:
        """The runs in progress."""
        return self._leases.holders()

    def progressed(self) -> None:
        """Report, the first time, that this worker has made progress."""
        on_progress, self._on_progress = self._on_progress, None
        if on_progress is not None:
            on_progress()

    def stop(self) -> None:
        """Stop every run at its next step boundary, including runs that have not started."""
        self._stopping = True
        self._resume.lines.report()
        for run in self.runs:
            run.request_stop()

    def describe_current(self, loop: asyncio.AbstractEventLoop) -> str:
        """Return which task the event loop runs, for the log. Called in the watchdog's thread."""
        current = asyncio.current_task(loop)
        run = next((run for run in self.runs if current is not None and run.task is current), None)
        return "" if run is None else f", blocked by the handler of task {run.envelope.task!r} {run.id}"

    async def execute(self, delivery: Delivery) -> bool:
        """Run one delivery to its outcome. Never raises because of a task or its message.

        Returns whether the task runs again later, so that there is a new due time.
        """
        try:
            envelope = Envelope.decode(delivery.fields.get(b"env", b""))
        except UnreadableEnvelope as error:
            newer = await self._newer_or_buried(delivery, error)
            if newer is None:
                return False
            envelope = newer
        if self._leases.had_fence(delivery) or RUNTIME.monotonic() - delivery.requested > self._shared.claim_lease / 2:
            confirmed = await self._confirm_or_drop(delivery, envelope)
            if confirmed is None:
                return False
            delivery = confirmed
        run = Run(
            self._gateway,
            delivery,
            envelope,
            History(),
            host=self._host,
            settings=self._settings,
        )
        self._hold(run)
        if self._on_progress is not None:
            run.observe(_FirstResult(self))
        outcome: Outcome | None = None
        settled: Outcome | None = None
        try:
            if delivery.claimed:
                await self._slots.wait_turn()
            execution = Execution(run, self._resources)
            outcome = await self._decide(execution)
            await self._settle(execution, outcome, self._slots.stay)
            settled = outcome
        except LeaseLost as error:
            logger.bind(task=envelope.task, id=run.id).warning("{}; another worker continues", error)
        except EntriesLost as lost:
            outcome = None
            await self._release_incomplete(run, lost, self._slots.stay)
        except BaseException as error:  # noqa: BLE001 - the worker continues; the lease brings the task back
            _log_failure(error, run)
        finally:
            self._leases.drop(run)
            self.threads.late.leave(run.id)
            if delivery.has_history:
                self._gate.resolved(delivery)
                self._gate.release(run)
            closing = self._close(run, settled)
            if closing is not None:
                await closing
        return isinstance(outcome, (Rerun, Park, Limited, AwaitVersion))

    def _close(self, run: Run, settled: Outcome | None) -> Coroutine[Any, Any, None] | None:
        """Close a run, whose observers get the outcome that is stored; return what is to be awaited, if anything is."""
        if settled is not None and run.observed:
            return self._close_observed(run, settled)
        if settled is None and self._meter is not None:
            self._count_lost(self._meter, run)
        writer = run.close()
        return None if writer is None else writer.close()

    async def _close_observed(self, run: Run, settled: Outcome) -> None:
        await _notify_observers(run, settled)
        writer = run.close()
        if writer is not None:
            await writer.close()

    async def give_up(self, run: Run) -> bool:
        """Settle a run whose handler ignores its cancellation.

        The outcome is that of the stop, as if the handler had obeyed. Whatever the handler still does is refused, and
        its slot stays taken, so that such handlers do not pile up. Returns what `execute` returns.
        """
        task, stop = self._registry.of(run.envelope), run.abandon()
        outcome: Outcome | None = None
        if self._meter is not None:
            self._given_up.add(run)
        try:
            if task is not None and stop is not None and stop is not StopReason.LOST:
                if run.spending is not None:
                    await run.spending.leave(lost=False)
                if run.failures and STOP_RULES[stop].act == "fail":
                    await forget_failures(run)
                await run.flush()
                outcome = outcome_of_stop(run, task, stop, self._settings)
                execution = Execution(run, self._resources)
                execution.task = task
                await self._settle(execution, outcome, run.touch)
                await _notify_observers(run, outcome)
        except LeaseLost as error:
            logger.bind(task=run.envelope.task, id=run.id).warning("{}; another worker continues", error)
        except EntriesLost as lost:
            outcome = None
            await self._release_incomplete(run, lost, run.touch)
        except BaseException as error:  # noqa: BLE001 - a settle hook may raise anything
            _log_failure(error, run)
        finally:
            self._leases.drop(run)
            if run.delivery.has_history:
                self._gate.release(run)
        return isinstance(outcome, (Rerun, Park, Limited, AwaitVersion))

    async def _confirm_or_drop(self, delivery: Delivery, envelope: Envelope) -> Delivery | None:
        """Return a late delivery if this worker still has it, else None. Raises `QueueError`."""
        try:
            return await self._confirm(delivery, envelope.id)
        except QueueError as error:
            self._gate.resolved(delivery)
            if not isinstance(error, LeaseLost):
                raise
        bound = logger.bind(task=envelope.task, id=envelope.id)
        bound.info("dropped a late delivery of task {}: another run has it, or has ended it", envelope.id)
        return None

    async def _confirm(self, delivery: Delivery, task_id: str) -> Delivery:
        """Return a delivery that this worker still has, before its first step. Raises `LeaseLost`."""
        if not self._leases.had_fence(delivery):  # the message arrived late: another worker may have claimed it
            lease = self._shared.claim_lease
            await retry_while_unavailable(lambda: renew_lease(self._gateway, delivery, task_id, lease))
            return delivery
        while self._leases.had_fence(delivery):  # Redis has lost the hand-out, and perhaps the next fence as well
            delivery, before = await retry_while_unavailable(partial(raise_count, self._gateway, delivery))
            if before and self._leases.had_fence(delivery):  # a reply that was given up: a later run has the message
                raise LeaseLost(task_id, "start")
        return delivery

    def _hold(self, run: Run) -> None:
        if run.envelope.limits:
            observe_limits(run)
        if self._stopping:
            run.request_stop()
        if self.owed is not None:
            self.owed.pop(run.id, None)
        former = self._leases.hold(run)
        if former is not None:
            former.cancel(StopReason.LOST)  # its lease expired while Redis was unavailable, and this worker got it

    async def _decide(self, execution: Execution) -> Outcome:
        stages = self._stages if execution.run.delivery.has_history else self._first_stages
        for stage in stages:
            outcome = stage(execution)
            if outcome is not None and isinstance(outcome, Coroutine):
                outcome = await outcome
            if outcome is not None:
                return outcome
        if execution.task.slots > 1 and (outcome := await self._take_slots(execution)) is not None:
            return outcome
        if self._meter is not None:
            self._meter.began(execution.run)
        outcome = await self._call_handler(execution)
        if self.threads.late:
            await await_late_steps(execution, outcome, self._settings.idle_limit, self._slots.leave)
        return outcome

    async def _take_slots(self, execution: Execution) -> Outcome | None:
        """Wait for the slots of a large task. Return the outcome of one that is stopped meanwhile."""
        run = execution.run
        await self._slots.enlarge(execution.task.slots, lambda: run.stopping)
        if run.stop_reason is not None:
            return await self._call_handler.stopped(execution, run.stop_reason)
        return Release(run.history.counters) if run.stopping else None

    def _settle(self, execution: Execution, outcome: Outcome, on_wait: Callable[[], None]) -> Awaitable[object]:
        """Store the outcome, within the settle hooks. Raises `LeaseLost`, `EntriesLost`, and what a hook raises."""
        run = execution.run
        chain = self._settle_success if isinstance(outcome, Success) else self._settle_stop
        if chain is None:
            return self._store_outcome(run, outcome, on_wait)
        return chain(execution.ctx, settlement_of(run, outcome, on_wait))

    async def _store(self, _ctx: Context, settlement: RunSettlement) -> None:
        """The innermost of the settle hooks."""
        stored = await self._store_outcome(settlement.run, settlement.outcome, settlement.on_wait)
        if stored is not settlement.outcome:
            settlement.replace_outcome(stored)

    async def _store_outcome(self, run: Run, outcome: Outcome, on_wait: Callable[[], None]) -> Outcome:
        """Return what was stored: `Cancelled` in place of a dead letter if a caller has cancelled the task."""
        self._slots.leave()
        ended = 0.0 if self._meter is None else RUNTIME.monotonic()
        while True:
            try:
                outcome = await self._settler.settle(run, outcome, on_wait) or outcome
                break
            except EntriesLost as lost:
                on_wait()
                await run.recorder.send_again(lost)
        if self._meter is not None:
            self._meter.ended(run, outcome, ended)
        if isinstance(outcome, Quarantined):
            self._gate.request()
            return outcome
        if self._on_progress is not None and STOP_RULES[outcome.stop].attempt:
            self.progressed()
        self.settled[run.delivery.partition.queue] += 1
        if run.envelope.unique is not None and isinstance(outcome, (Success, Cancelled)):
            await _free_key(run)
        if self.owed is not None and isinstance(outcome, Rerun):
            self.owed[run.id] = run.delivery.partition
        return outcome

    def _count_lost(self, meter: Meter, run: Run) -> None:
        """Count a run whose outcome could not be stored; one that was given up is counted already."""
        if run in self._given_up:
            self._given_up.discard(run)
        else:
            meter.ended(run, None, RUNTIME.monotonic())

    async def _release_incomplete(self, run: Run, lost: EntriesLost, on_wait: Callable[[], None]) -> None:
        """Release a task of whose checkpoint Redis has lost the end: it resumes from what Redis has."""
        bound = logger.bind(task=run.envelope.task, id=run.id)
        bound.warning("{}; the task resumes from there", lost)
        self._slots.leave()
        try:
            await self._settler.release_incomplete(run, lost, on_wait)
        except LeaseLost as error:
            bound.warning("{}; another worker continues", error)
        except Exception:  # noqa: BLE001 - the worker continues; the lease brings the task back
            bound.exception("the worker failed; the task is left for recovery")

    async def _newer_or_buried(self, delivery: Delivery, error: UnreadableEnvelope) -> Envelope | None:
        """Return what is known of a task of a newer version, which waits for a newer worker; bury anything else."""
        self._gate.resolved(delivery)
        newer = newer_envelope(delivery.fields.get(b"env", b""))
        try:
            if newer is not None and await self._settler.is_message_of(delivery, newer.id):
                return newer
            task_id = await self._settler.bury_unreadable(delivery, error)
            if self._webhooks is not None:
                self._webhooks.give(unreadable_event(delivery, task_id, error))
            self.settled[delivery.partition.queue] += 1
            if self._meter is not None:
                self._meter.buried(delivery.partition.queue, Reason.UNREADABLE)
        except LeaseLost as lost:
            logger.warning("{}; another worker continues", lost)
        except Exception:  # noqa: BLE001 - the worker continues; the lease brings the message back
            logger.exception("could not settle an unreadable message; it is left for recovery")
        return None


async def _free_key(run: Run) -> None:
    """Remove the marker of the unique key of a task that has ended. A marker that stays takes memory only."""
    namespace = Namespace(run.delivery.partition.namespace)
    try:
        await free_marker(run.gateway, namespace, run.envelope.unique or "", run.id)
    except QueueError as error:
        logger.bind(task=run.envelope.task, id=run.id).debug("could not remove the marker of its unique key: {}", error)


async def _notify_observers(run: Run, settled: Outcome) -> None:
    """Notify the observers of a run that its outcome is stored. What they leave is done by the janitor."""
    try:
        await run.settled(settled.stop, ended=ends_attempt(settled))
    except Exception as error:  # noqa: BLE001 - the worker continues
        _log_failure(error, run)


def _log_failure(error: BaseException, run: Run) -> None:
    """Log what a hook or the worker raised. Raises what ends this coroutine from outside: a cancellation, its close."""
    if isinstance(error, asyncio.CancelledError) or (isinstance(error, GeneratorExit) and is_closing()):
        raise error
    bound = logger.bind(task=run.envelope.task, id=run.id)
    bound.opt(exception=error).error("the worker failed; the task is left for recovery")


class _FirstResult(RunObserver):
    """Reports the first recorded result of the worker."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def on_recorded(self) -> None:
        self._executor.progressed()

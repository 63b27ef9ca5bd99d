"""The worker: its parts, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import anyio

from ...queues.delivery.consumer import Consumer
from ...queues.delivery.heartbeat import LeaseHeartbeat, ignore_renewal
from ...queues.delivery.leases import Delivery, Leases
from ...queues.delivery.settlement import release
from ...queues.delivery.stream_reader import read_partitions
from ...queues.errors import ConfigurationError, LeaseLost, NotOpen, QueueError, Unavailable
from ...queues.handle import serving
from ...queues.keys import Namespace, Partition
from ...queues.lanes import Lane
from ...queues.partitions.assignment import PartitionAssignment
from ...queues.runtime import RUNTIME
from ...queues.shared_config import SharedConfig, load_config
from ..app import App
from ..durable.joining import parked_result
from ..durable.run import Run
from ..durable.stop_reasons import StopReason
from ..durable.waiting import SharedNotifications
from ..log import logger
from ..loop_errors import keep_running
from ..on_demand import keep_large_values, load_drafts, session_chores
from ..settings import DEFAULT_CONCURRENCY
from .burst import Burst
from .executor import Executor
from .health.capacity import Capacity, memory_reader
from .health.deadlines import RunDeadlines
from .health.loop_watchdog import LoopWatchdog
from .health.redis_contact import RedisContact
from .health.report import Health, Report
from .intake import Intake
from .maintenance.janitor import Janitor, VersionWaker
from .maintenance.notices import NoticeDelivery
from .maintenance.partitions import AssignmentWatcher
from .maintenance.promoter import ClockMonitor, Promoter
from .maintenance.registration import HintListener, Registration, describe
from .quarantine_gate import QuarantineGate
from .reclaim import ReclaimSchedule
from .shared_settings import SharedSettings, WorkerTimings, check_arguments
from .slots import Slots
from .supervisor_link import Link
from .webhook_posting import WebhookQueue, WebhookTarget

if TYPE_CHECKING:
    from .metrics.families import Measurements
    from .metrics.meter import Meter
    from .metrics.readings import WorkerReadings
    from .pausing import WorkerPauses


class Worker:
    """A worker: reads messages of an app's queues and runs their tasks.

    async with Worker(app, concurrency=32) as worker:
        await worker.run()
    """

    timings: ClassVar[WorkerTimings] = WorkerTimings()
    """Intervals and time limits of all workers of this process; tests shorten them."""

    def __init__(
        self,
        app: App,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        queues: Sequence[str] | None = None,
        partitions: Literal["all", "share"] | None = None,
        name: str | None = None,
        link: Link | None = None,
        metrics: bool = False,
    ) -> None:
        """Create a worker; `async with` connects it.

        Args:
            concurrency: Most tasks that run at once.
            queues: Queues to read; by default those of the app's tasks.
            partitions: Read all partitions ("all"), or share them with other workers ("share"); by default the setting.
            name: Start of the worker's id; by default the name of the app.
            link: Link to the supervisor, which starts processes for quarantined tasks; None: they run in this worker,
                one at a time. With the role "isolated", the worker runs quarantined tasks only.
            metrics: Count runs, waits and steps for `measurements`, and for the supervisor.

        Raises:
            ConfigurationError: The app has no tasks and `queues` is empty, a module that it includes cannot be
                imported, or another argument is wrong.
        """
        check_arguments(app, concurrency, queues, name)
        app.load_modules()
        self.app = app
        self.settings = app.settings
        self.queues = tuple(queues or app.tasks.queues)
        if not self.queues:
            raise ConfigurationError(
                f"app {app.name!r} has no tasks, so there is no queue to work on; name the modules that define them: "
                f"App({app.name!r}, include=[...]), or name the queues"
            )
        self.id = f"{name or app.name}-{RUNTIME.host()}-{RUNTIME.pid()}-{RUNTIME.token(3)}"
        self.concurrency = concurrency
        self._partitions = partitions or self.settings.partitions
        self._namespace = Namespace(self.settings.namespace)
        self._gateway = keep_large_values(self.settings.make_gateway(app.encryptor), self.settings)
        self._gateway.repairs = True
        self._shared = SharedSettings(self.settings)
        self._clock = ClockMonitor(lambda: self._shared.claim_lease)
        self._slots = Slots(concurrency, max((task.slots for task in app.tasks.values()), default=1))
        self._link = link
        self._reports = link is None or link.reports
        self._gate = QuarantineGate(link, self.settings.quarantine_window)
        self._leases: Leases[Run] = Leases()
        self._meter = self._make_meter() if metrics else None
        self._webhooks = WebhookQueue(WebhookTarget.of(self.settings))
        shares = self._partitions == "share" and not self._gate.dedicated
        self._assignment = PartitionAssignment(
            self._gateway, self._namespace, self.queues, self.id, share=shares, lanes=app.tasks.lanes
        )
        self._notices = NoticeDelivery(
            self._gateway,
            self._assignment,
            worker=self.id,
            retention=lambda: self._shared.result_ttl,
            on_woken=self._parent_woken,
            interval=self.timings.notice_interval,
        )
        self._executor = Executor(
            self._gateway,
            app.tasks,
            self.settings,
            self._shared,
            self._leases,
            self._slots,
            self._gate,
            threads=max(40, concurrency),
            webhooks=self._webhooks,
            on_progress=None if self._link is None else partial(self._link.send, "progress"),
            middleware=app.middleware,
            resources=lambda: app.resources,
            on_watched=self._notices.give,
            limits=app.limits,
            is_new=self._clock.is_new,
            prices=app.prices,
            meter=self._meter,
        )
        self._watchdog = LoopWatchdog(
            warn_after=self.settings.stall_warning,
            stall_limit=self.settings.stall_limit,
            on_check=self._send_alive,
            describe_current=self._executor.describe_current,
        )
        self._heartbeat = LeaseHeartbeat(
            self.settings.address,
            lambda: self._gateway.socket,
            self.id,
            self._leases,
            self._shared.renewal_lease,
            self._on_renewal,
            lambda: self._watchdog.should_renew() and not self._contact.cut_off,
            self._clock.observe,
            self._idle_key,
            ignore_renewal if self._meter is None else self._meter.margin.note,
        )
        self._contact = RedisContact(
            self._gateway, self._namespace, self._leases, self._heartbeat, lambda: self._shared.renewal_lease
        )
        self._reader = read_partitions(self._gateway, self.id)
        self._consumer = Consumer(
            self._gateway, self._reader, [], self.id, self._shared.claim_lease, self._leases, self._clock.observe
        )
        self._reclaim = ReclaimSchedule([], self._shared.claim_lease, self.timings.sweep_interval)
        self._promoter = Promoter(
            self._gateway,
            [],
            self.id,
            self._consumer.touch,
            lambda: self._shared.result_ttl,
            lambda: self._shared.claim_lease,
        )
        self._assignment_watcher = AssignmentWatcher(
            self._gateway, self._assignment, self._consumer, self._set_partitions, app.tasks.versions
        )
        self._capacity = Capacity(
            self._slots, lag_limit=self.settings.lag_limit, read_memory=memory_reader(self.settings.memory_limit)
        )
        self._deadlines = RunDeadlines(
            self._executor,
            self._slots,
            app.tasks,
            self.settings,
            on_due=self._promoter.wake,
            on_degraded=self._ask_for_replacement,
            on_check=self._observe_lag,
        )
        self._health = Health(
            self.id,
            self.settings,
            self._watchdog,
            self._executor,
            self._slots,
            self._gate,
            self._contact,
            self._heartbeat,
            self._deadlines,
            self._capacity,
            lambda: () if self._pauses is None else self._pauses.sentences(),
        )
        self._readings = None if self._meter is None else self._make_readings(self._meter)
        self._registration = Registration(
            self._gateway,
            self._namespace,
            describe(self.id, app.name, app.aliases, self.queues, concurrency, self.settings),
            self._slots,
            self._capacity,
            self._executor.settled,
            self._health,
            self._apply_config,
            app.tasks.entry(app.name),
            app.limits.values(),
            app.schedules.values(),
            self._wake_scheduler,
            self._apply_pauses,
            self._wake_jobs,
            self.drain,
        )
        self._pauses: WorkerPauses | None = None
        self._schedules, self._jobs = anyio.Event(), anyio.Event()
        self._leave, self._stop, self._stop_now = anyio.Event(), anyio.Event(), anyio.Event()
        self._stack, self._joined = AsyncExitStack(), False

    def _make_meter(self) -> Meter:
        from .metrics.meter import Meter

        return Meter(self.app.tasks, self.queues, self.app.limits, self._clock.ahead)

    def _make_readings(self, meter: Meter) -> WorkerReadings:
        from .metrics.readings import WorkerReadings

        place = (meter, self._namespace.name, self._slots, self._capacity, self._contact)
        return WorkerReadings(*place, self._watchdog, self._heartbeat, self._health)

    @property
    def in_flight(self) -> int:
        """Number of running tasks."""
        return self._slots.busy

    @property
    def settled(self) -> int:
        """Number of deliveries that this worker has settled."""
        return self._executor.settled.total()

    @property
    def stuck_handlers(self) -> int:
        """Number of handlers that ignored their cancellation and still run; their tasks were abandoned."""
        return self._slots.stuck

    def health(self) -> Report:
        """Return the health report. May be called from any thread, also while the event loop is blocked."""
        return self._health.report()

    def measurements(self) -> Measurements:
        """Return what the worker has counted and measures now. May be called as `health`.

        Raises `ConfigurationError` for a worker without `metrics=True`.
        """
        if self._readings is None:
            raise ConfigurationError("the worker counts nothing: create it with Worker(app, metrics=True)")
        return self._readings.read()

    async def __aenter__(self) -> Self:
        """Connect, check the server, load scripts, join consumer groups, register, and start the lease heartbeat."""
        load_drafts()
        self._watchdog.start()
        if self._readings is not None and self._link is not None:
            self._stack.callback(self._readings.send, self._link, last=True)
        self._stack.push_async_callback(asyncio.to_thread, self._watchdog.stop)
        try:
            await self._gateway.open()
            self._stack.push_async_callback(self._gateway.close)
            self._stack.push_async_callback(self._executor.extras.close)
            await self._stack.enter_async_context(self.app)
            await self._join()
        except BaseException:
            await self._stack.aclose()
            raise
        self._joined = True
        return self

    async def _join(self) -> None:
        config = await load_config(self._gateway, self._namespace)
        self._shared.check(config)
        self._apply_config(config)
        self._stack.push_async_callback(self._reader.close)
        await self._gateway.load_scripts()
        await self._assignment_watcher.refresh()
        await self._registration.publish_limits(starts=True)
        await self._registration.publish_schedules(starts=True)
        await self._registration.announce()
        self._warn_of_large_tasks()
        if self._reports:
            await self._registration.warn_of_other_apps()
        self._heartbeat.start()
        self._stack.push_async_callback(asyncio.to_thread, self._heartbeat.stop)

    def _warn_of_large_tasks(self) -> None:
        """Log once which tasks take more slots than this worker has."""
        large = sorted(name for name, task in self.app.tasks.items() if task.slots > self.concurrency)
        if large and self._reports:
            logger.warning(
                "tasks that take more slots than the {} of this worker run alone on it: {}; raise --concurrency, or "
                "lower their slots",
                self.concurrency,
                ", ".join(large),
            )

    def _apply_config(self, config: SharedConfig) -> None:
        """Use the stored settings from now on."""
        if self._shared.apply(config):
            self._heartbeat.set_lease(self._shared.renewal_lease)
            self._consumer.set_lease(self._shared.claim_lease)
            self._reclaim.set_lease(self._shared.claim_lease)

    async def _apply_pauses(self, stored: Mapping[bytes, bytes]) -> None:
        """Follow the pauses of operators. Most namespaces have never had any."""
        if not stored and self._pauses is None:
            return
        if self._pauses is None:
            from .pausing import WorkerPauses

            place = (self._gateway, self._namespace)
            self._pauses = WorkerPauses(*place, self._consumer, self._reclaim, self._executor, self.queues)
        await self._pauses.apply(stored)

    async def _wake_paused(self, partition: Partition) -> None:
        if self._pauses is not None:
            await self._pauses.wake_left(partition)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the consumer groups, deregister and disconnect."""
        self._joined = False
        with anyio.CancelScope(shield=True):
            try:
                if not await self._redis_answers():
                    raise Unavailable(f"Redis at {self.settings.address.shown} does not answer")
                await self._assignment.leave()
                await self._consumer.leave()
                await self._registration.withdraw()
            except QueueError as failed:
                logger.warning("could not deregister: {}; pending messages will be reclaimed after the lease", failed)
            await self._stack.aclose()

    def stop(self) -> None:
        """Stop gracefully: read no more, let running steps end, release the tasks. The second call stops at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()
        self._leave.set()
        self._health.stopping = True

    def drain(self) -> None:
        """Read no more, finish the running tasks however long they take, and stop. `stop` cuts that short."""
        if self._leave.is_set():
            return
        logger.info("draining: no more tasks are taken, and the worker stops when the running ones have ended")
        self._health.draining = True
        self._leave.set()
        self._registration.wake()
        if self._link is not None:
            self._link.send("draining")

    def check_quarantine(self) -> None:
        """Search for quarantined tasks now, and run them alone."""
        self._gate.request()

    async def run(self, *, burst: bool = False) -> None:
        """Run tasks until `stop` is called; with `burst`, until the queues are empty.

        Pending messages of lost workers are claimed before new messages are read. Empty means: nothing is queued,
        nothing runs here, and no task that failed here waits for its next attempt. Raises `NotOpen`.
        """
        if not self._joined:
            raise NotOpen("the worker is not connected: await run() within 'async with Worker(app) as worker:'")
        served = serving(self.queues, self.app.producer.handle_at, parked_result)
        background, reading = anyio.create_task_group(), anyio.create_task_group()
        async with served, background, reading:
            intake = Intake(
                self._consumer,
                self._slots,
                self._reclaim,
                self._gate,
                start=lambda delivery: self._slots.fill(self._execute(delivery)),
                on_due=self._promoter.take_over,
                on_route_changed=self._assignment_watcher.wake,
                on_lane=self._add_lane,
                give_back=self._give_back,
            )
            self._health.watch(intake)
            janitor = Janitor(
                self._gateway,
                self._namespace,
                self._assignment,
                self._consumer,
                dead_letter_ttl=lambda: self._shared.dead_letter_ttl,
                worker=self.id,
                wake_paused=self._wake_paused,
                chores=session_chores(
                    self._gateway,
                    self._namespace,
                    self.app.agents,
                    ttl=self.settings.session_ttl,
                    worker=self.id,
                    lock_ttl=self.timings.clean_lock,
                ),
                interval=self.timings.clean_interval,
                lock_ttl=self.timings.clean_lock,
            )
            duties = (self._assignment_watcher, self._registration, self._contact, self._deadlines, self._webhooks)
            for duty in (*duties, self._notices):
                background.start_soon(keep_running, duty.run)
            self._executor.extras.put(SharedNotifications(self.app.producer.notifications))
            producer, names = self.app.producer, self._namespace
            for hints in (
                HintListener(
                    producer, names.worker_channel(self.id), self._heartbeat.renew_now, "cancellations", "lease renewal"
                ),
                HintListener(producer, names.pause_channel, self._registration.wake, "pauses", "registration"),
            ):
                background.start_soon(keep_running, hints.run)
            if not self._gate.dedicated:
                wake = VersionWaker(self._gateway, self._assignment, self.app.tasks.versions, self._slots, intake.claim)
                for one in (self._promoter, janitor, wake):
                    background.start_soon(keep_running, one.run)
                background.start_soon(keep_running, self._notices.sweep_all)
                background.start_soon(keep_running, self._fire_schedules)
                background.start_soon(keep_running, self._run_jobs)
            try:
                if burst:
                    await Burst(
                        self._gateway,
                        intake,
                        self._consumer,
                        self._assignment_watcher,
                        self._slots,
                        self._executor,
                        self._clock,
                        self._notices,
                        self._leave,
                    ).run()
                else:
                    reading.start_soon(keep_running, intake.run)
                    await self._leave.wait()
                if self._health.draining:
                    await self._finish_tasks(intake)
            except BaseException:  # cancelled from outside: cancel the runs as well, at once
                with anyio.move_on_after(self.timings.release_limit, shield=True):  # _drain abandons the rest
                    await self._slots.cancel()
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await self._drain(intake)
                    await self._slots.cancel()
                    with anyio.move_on_after(self.timings.release_limit):
                        await self._notices.drain()
                reading.cancel_scope.cancel()
                background.cancel_scope.cancel()

    def _set_partitions(self, partitions: Sequence[Partition]) -> None:
        """Pass the partitions that this worker serves to their users."""
        self._reclaim.set_partitions(partitions)
        self._promoter.set_partitions(partitions)

    def _wake_scheduler(self) -> None:
        self._schedules.set()

    async def _fire_schedules(self) -> None:
        """Fire schedules while the namespace has any; until then, wait for a registration that finds some."""
        while True:
            await self._schedules.wait()
            self._schedules = anyio.Event()
            from .maintenance.scheduler import Scheduler

            await Scheduler(self.app.producer, self.id, lambda: self._shared.result_ttl).run()

    def _wake_jobs(self) -> None:
        self._jobs.set()

    async def _run_jobs(self) -> None:
        """Run jobs that no process runs; without open ones, wait for a registration that finds some."""
        while True:
            await self._jobs.wait()
            self._jobs = anyio.Event()
            from .maintenance.job_duty import JobDuty

            await JobDuty(self.app.producer, self.id).run()

    def _add_lane(self, queue: str, lane: Lane) -> None:
        """Add a lane to the route of a queue for a producer that may not, and read it."""
        self._assignment.want(queue, lane)
        self._assignment_watcher.wake()

    def _send_alive(self, lag: float) -> None:
        """Called in the watchdog's thread."""
        if self._link is not None:
            self._link.send("alive", lag=lag, health=self._health.report().summary())
            if self._readings is not None:
                self._readings.send(self._link)

    def _observe_lag(self, lag: float) -> None:
        self._capacity.observe(lag)
        if self._meter is not None:
            self._meter.lag.note(lag)

    def _ask_for_replacement(self, why: str) -> None:
        if self._link is not None:
            self._link.send("replace", why=why)

    async def _execute(self, delivery: Delivery) -> None:
        if await self._executor.execute(delivery):
            self._promoter.wake(delivery.partition)

    def _parent_woken(self, partition: Partition, task_id: str) -> None:
        self._promoter.wake(partition)
        if self._executor.owed is not None and partition.queue in self.queues:  # else another worker runs it
            self._executor.owed[task_id] = partition

    async def _give_back(self, delivery: Delivery) -> None:
        try:
            await release(self._gateway, delivery, None, data=None)
        except LeaseLost:
            logger.debug("message {} was claimed by another worker before it was released", delivery.entry)

    async def _finish_tasks(self, intake: Intake) -> None:
        """Stop reading, and wait until the running tasks have ended, or `stop` is called."""
        await self._stop_reading(intake)
        await self._slots.wait_empty_or(self._stop)
        self._health.stopping = True

    async def _stop_reading(self, intake: Intake) -> None:
        intake.stop()
        with anyio.move_on_after(self.timings.last_reply):
            try:
                await self._consumer.interrupt()
                await self._assignment.leave()
            except QueueError as error:
                logger.debug("could not interrupt the read: {}", error)

    async def _drain(self, intake: Intake) -> None:
        """Stop reading and let running steps end; after the grace, cancel the runs, which release their tasks."""
        started = anyio.current_time()
        self._executor.stop()
        await self._stop_reading(intake)
        if self._slots.taken:
            logger.info(
                "stopping: waiting up to {1:g} s for the current steps of running tasks ({0})",
                self.in_flight,
                self.settings.grace,
            )
            with anyio.move_on_after(self.settings.grace - (anyio.current_time() - started)):
                await self._slots.wait_empty_or(self._stop_now)
            for run in list(self._executor.runs):
                run.cancel(StopReason.RELEASED)
            with anyio.move_on_after(self.timings.release_limit):
                while any(run.task is not None for run in self._executor.runs):  # noqa: ASYNC110 - no event for it
                    await anyio.sleep(self.timings.handler_poll)
                if await self._redis_answers():
                    await self._slots.wait_empty()
            with anyio.move_on_after(self.timings.release_limit):
                await self._deadlines.abandon_all()

    async def _redis_answers(self) -> bool:
        """Return whether Redis answers now. If it does not, the worker does not wait to release its tasks."""
        with anyio.move_on_after(self.timings.last_reply):
            try:
                await self._gateway.command("EXISTS", self._namespace.queues)
            except QueueError:
                return False
            return True
        return False

    def _idle_key(self) -> str | None:
        """Called in the heartbeat's thread."""
        return self._contact.idle_key()

    def _on_renewal(self, trouble: QueueError | None) -> None:
        """Called in the heartbeat's thread."""
        self._health.renewal_failed(trouble)
        if trouble is not None:
            logger.warning("could not renew leases: {}", trouble)
        elif self._executor.runs:  # without runs, nothing was renewed
            logger.info("lease renewal recovered")

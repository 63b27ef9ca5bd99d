"""The run of a handler: one delivery's state, from its start to its outcome, and the ways to stop it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

import anyio

from ...deadletter.policy import Retry, reason_to_bury
from ...queues.delivery.checkpoint import Entry, History, Kind
from ...queues.delivery.leases import NOT_STARTED, Delivery, LimitTokens, RunStatus
from ...queues.envelope import BudgetUse, Envelope, check_size
from ...queues.errors import LeaseLost
from ...queues.records import shown_arguments
from ...queues.runtime import RUNTIME
from ...queues.security.redaction import Redaction
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Argument
from ..errors import RunStopped, TaskIdle, TaskTimeout
from ..settings import Settings
from .checkpoint_writer import CheckpointWriter
from .extras import Extras, Host
from .handler_task import HandlerTask, InFlight
from .journal.event import Event
from .journal.event_redaction import redacted
from .journal.resumption import Resumption
from .journal.step_record import VERSION
from .journal.tool_notes import call_text
from .step_files import StepFiles
from .steps.keys import StepKeys, StrictStepKeys
from .stop_reasons import STOP_RULES, LimitReason, ParkReason, Stop, StopReason, counters_after

if TYPE_CHECKING:
    from ...queues.security.hash_chain import HashChain
    from .budget_left import BudgetLeft
    from .spent import Charge, Spent

Observer = TypeVar("Observer")

StopDetail: TypeAlias = ParkReason | LimitReason | Exception | None

LONG_STEP: Final = 1.0
"""Seconds after which a step that runs stores its intent."""

_NO_STEP: Final = (object(), None)  # with None, a step without a function would seem to have a codec
_SHUTDOWN: Final[tuple[StopReason, StopDetail]] = (StopReason.RELEASED, None)
"""The reason with which `boundary` stops a run."""


class Spending(Protocol):
    """Charges and looks of a run that has budgets; see spending.py. uses: the budgets."""

    uses: tuple[BudgetUse, ...]

    async def before_step(self) -> None:
        """Look at the budgets before a step that is not recorded. Does not return if one ends the run."""

    def step_began(self) -> None:
        """Count a step."""

    async def step_ended(self) -> None:
        """Charge a step that is about to be recorded."""

    async def spend(self, spent: Spent, *, in_step: bool) -> BudgetLeft:
        """Charge what a call has cost."""
        ...

    async def left_now(self) -> BudgetLeft:
        """Return what is left of the budgets now."""
        ...

    async def leave(self, *, lost: bool) -> None:
        """Charge what is not charged yet, when the handler has ended. lost: the lease is."""


class Run(HandlerTask):
    """One run of a task. It belongs to one event loop; only `on_lost` and `on_cancel` may be called from other threads.

    The handler runs in the asyncio task that enters the run (`with run:`). Stopping the run cancels that task. Leaving
    the block undoes these cancellations, so that the same task can store the outcome. A call of the handler itself that
    ends the run, such as a wait, raises `RunStopped` in place of that.

    Attributes:
        events: number of the last event that this run put into the log.
        keys: names of the run's steps.
        time_limit: seconds for the handler.
        started, active: when the run began, and when a step last began or ended or was saved (monotonic clock).
        stop_reason, stop_detail: why the run stopped; what it waits for (`ParkReason`, `LimitReason`), or the error
            that stopped it.
        ended_at, ended_in: when the run was stopped, and the steps in flight at that time.
        version: version of the task's code with which the task's first run began.
        around_step: the middleware chain of steps, None where no middleware overrides `step`.
        is_agent: whether the task is an agent.
        codec, checked_name: the last step's function with its codec, and its name: a loop calls the same for all steps.
        constants: the `Constants` in arguments of its steps, None before `constants_of`.
        context: the `Context` of the handler and its middleware while the handler runs, else None.
        retry: the policy of the task, None until its handler is called.
        emits: whether this run or an earlier one has emitted into a stream.
        failures: failures of steps from which nothing has followed yet, by key (`steps/failures.py`); None without any.
        files: the files that are saved with its steps, None if nothing has used the workspace.
        tokens: its tokens of limits, None if it has used none.
        spending: what it charges to the budgets of its task, None without one.
        host: what the runs of a worker share.
        watch: starts the checks of the run's coherence at its first tool call; None if that does not start any.
        watching: these checks while they run; closing it ends them.
    """

    __slots__ = (
        "_extras",
        "_leaving",
        "_leaving_itself",
        "_marks",
        "_new_version",
        "_observers",
        "_recorder",
        "active",
        "around_step",
        "checked_name",
        "closed",
        "codec",
        "constants",
        "context",
        "delivery",
        "emits",
        "ended_at",
        "ended_in",
        "envelope",
        "events",
        "failures",
        "files",
        "gateway",
        "history",
        "host",
        "id",
        "is_agent",
        "keys",
        "payload_limit",
        "redact",
        "resumption",
        "retry",
        "settings",
        "spending",
        "started",
        "steps_recorded",
        "stop_detail",
        "stop_reason",
        "threads",
        "time_limit",
        "tokens",
        "version",
        "watch",
        "watching",
    )

    def __init__(
        self,
        gateway: Gateway,
        delivery: Delivery,
        envelope: Envelope,
        history: History,
        *,
        host: Host,
        settings: Settings,
    ) -> None:
        super().__init__()
        self.gateway = gateway
        self.delivery = delivery
        self.envelope = envelope
        self.id = envelope.id
        self.history = history
        self.emits = bool(history.streams)
        self.host = host
        self.threads = host.threads
        self.settings = settings
        self.payload_limit = settings.payload_limit
        self.time_limit = settings.time_limit
        self.redact: Redaction | None = None
        self.stop_reason: StopReason | None = None
        self.stop_detail: StopDetail = None
        self.closed = self._new_version = False
        self.started = self.active = RUNTIME.monotonic()
        self.ended_at = 0.0
        self.ended_in: tuple[str, ...] = ()
        self.steps_recorded = 0
        self.resumption: Resumption | None = None
        self.events = 0
        self.keys: StepKeys = StepKeys()
        self.version = 1
        self.around_step: Callable[..., Awaitable[Any]] | None = None
        self.codec: tuple[object, Any] = _NO_STEP
        self.constants: Any = None
        self.checked_name: str | None = None
        self.is_agent = False
        self.context: object | None = None
        self.files: StepFiles | None = None
        self.watch: Callable[[Run], Awaitable[None]] | None = None
        self.watching: AsyncExitStack | None = None
        self._extras: Extras | None = None
        self.retry: Retry | None = None
        self.tokens: LimitTokens | None = None
        self.spending: Spending | None = None
        self.failures: dict[str, Any] | None = None
        self._observers: tuple[RunObserver, ...] = ()
        self._recorder: CheckpointWriter | None = None
        self._leaving: tuple[StopReason, StopDetail] = _SHUTDOWN
        self._marks: tuple[Entry, ...] = ()
        self._leaving_itself = False
        """Whether the handler's own task makes the call that ends the run."""

    @property
    def runs_here(self) -> bool:
        """Whether the caller runs in the event loop of the run."""
        return asyncio.get_running_loop() is self._loop

    @property
    def extras(self) -> Extras:
        """Objects of this run that the core does not know."""
        if self._extras is None:
            self._extras = Extras()
        return self._extras

    # what the run starts from

    def load(self, history: History) -> None:
        """Set the history that earlier runs recorded."""
        self.history, self.emits = history, bool(history.streams)

    def set_version(self, version: int, *, new: bool) -> None:
        """Set the version of the task's code. new: nothing is recorded yet; the first record is stored with it."""
        self.version, self._new_version = version, new

    def mark(self, key: str) -> None:
        """Store a mark with the first record of this run, unless an earlier run has. For a run that has not started."""
        if key not in self.history.saved:
            self.leave(key, b"1")

    def leave(self, key: str, value: bytes) -> None:
        """Store a value with the first record of this run, in place of one that an earlier run has left."""
        entry = Entry(Kind.SAVED, key, value)
        if self._recorder is None:
            self._marks = (*self._marks, entry)
        else:
            self._recorder.put_first(entry)

    def store_left(self) -> None:
        """Store what `leave` has left, soon and before the outcome, although the run has recorded nothing."""
        if self._recorder is None or self._recorder.holds_first:
            self.recorder.put_soon()

    def keep_order(self) -> None:
        """Refuse new steps that come before recorded ones of their scope. Called before the handler starts."""
        self.keys = StrictStepKeys()

    def resume_from(self, resumption: Resumption) -> None:
        """Set the summary of the previous run, which `ctx.resumption` returns."""
        self.resumption = resumption

    def keep_secret(self, redaction: Redaction) -> None:
        """Keep these secrets out of events, logs and documents."""
        self.redact = redaction

    # observers

    def observe(self, observer: RunObserver) -> None:
        """Notify an observer from now on."""
        self._observers = (*self._observers, observer)

    def unobserve(self, observer: RunObserver) -> None:
        """Stop notifying an observer. One that is not registered changes nothing."""
        self._observers = tuple([one for one in self._observers if one is not observer])

    def observer(self, kind: type[Observer]) -> Observer | None:
        """Return the first observer of a type. May be called from any thread."""
        return next((one for one in self._observers if isinstance(one, kind)), None)

    @property
    def observed(self) -> bool:
        """Whether it has observers."""
        return bool(self._observers)

    async def settled(self, stop: StopReason, *, ended: bool) -> None:
        """Notify the observers that the outcome is stored. stop: its reason. ended: whether the attempt has ended."""
        for observer in self._observers:
            await observer.on_settled(self, stop, ended=ended)

    async def save(self) -> None:
        """Let the observers store unsaved data. Raises `PayloadTooLarge`, `LeaseLost`."""
        for observer in self._observers:
            await observer.on_checkpoint()

    async def plan_boundary(self) -> None:
        """Stop an agent between two steps of its plan, if the worker or an observer has requested it."""
        if self.stopping:
            await self.boundary()
        for observer in self._observers:
            await observer.on_boundary()

    # the checkpoint

    @property
    def recorder(self) -> CheckpointWriter:
        """The writer of the checkpoint, created at its first use: many runs have no steps."""
        if self._recorder is None:
            self._recorder = CheckpointWriter(
                self.gateway,
                self.delivery,
                self.envelope.id,
                last=self.history.entries,
                chain=self.hash_chain(),
                excuse=self.history.excuse(),
                on_lost=lambda: self.cancel(StopReason.LOST),
                on_gap=lambda lost: self.cancel(StopReason.DATA_LOST, lost),
                on_cancel=lambda: self.cancel(StopReason.CANCELLED),
                on_wait=self.touch,
            )
            if self._new_version:
                self._recorder.put_first(Entry(Kind.SAVED, VERSION, b"%d" % self.version))
            for mark in self._marks:
                self._recorder.put_first(mark)
        return self._recorder

    def hash_chain(self) -> HashChain | None:
        """Return the hash chain of the task's events; None without a key, or if the history cannot be decrypted."""
        history = self.history
        if history.chain is None and not history.entries and self.gateway.encryptor.active:
            from ...queues.security.hash_chain import ChainLinks, HashChain

            cipher = self.gateway.encryptor.of(self.delivery.partition, self.id)
            history.chain = HashChain(cipher, ChainLinks(), ())
        return history.chain

    def heads_without(self, steps: Collection[str]) -> list[Argument]:
        """Return the heads of the hash chain when the records of these steps are gone, as changes of the checkpoint."""
        chain = self.history.chain
        if self._recorder is not None:
            return self._recorder.heads_without(steps)
        if chain is None:
            return []
        entries = self.history.entries
        return [f"head:{entries}", chain.seal(chain.without(steps), entries)]

    @property
    def has_written(self) -> bool:
        """Whether this run put anything into the checkpoint."""
        return self._recorder is not None

    @property
    def last_entry(self) -> int:
        """Number of the last entry that this run, or an earlier one, stored: an outcome is stored with it only."""
        return self.history.entries if self._recorder is None else self._recorder.last

    def next_entry(self, event: Event) -> Entry:
        """Return an event's log entry. It must be put at once, because it has the next number.

        Raises `PayloadTooLarge`, and what an observer raises; then the event does not exist.
        """
        if self.redact is not None and not event.masked:
            event = redacted(event, self.redact)
        data = event.to_json()
        check_size(f"event {event.type!r} of task {self.id}", len(data), self.payload_limit)
        number = max(self.events, self.history.events) + 1
        if self._observers:
            seen = event.as_read(data)
            for observer in self._observers:
                observer.on_event(seen, number)
        self.events = number
        return Entry(Kind.EVENT, event.type, str(number).encode(), data)

    def withdraw(self, entry: Entry) -> None:
        """Free the number of the last event, which is certainly not stored."""
        self.events = int(entry.value) - 1

    async def log_event(self, event: Event, *, wait: bool = False) -> None:
        """Put an event into the log: with the next write of the checkpoint, or at once. Raises as `flush`."""
        await self.recorder.put(self.next_entry(event), wait=wait)

    async def flush(self) -> None:
        """Store what was put into the checkpoint. Raises `LeaseLost`, `EntriesLost`."""
        if self._recorder is not None:
            await self._recorder.flush()

    def close(self) -> CheckpointWriter | None:
        """Refuse further writes into the checkpoint. Return the writer, which the caller closes, if there is one."""
        for observer in self._observers:
            observer.on_close()
        self.closed = self.stopped = True
        recorder, self._recorder = self._recorder, None  # they refer to each other: no cycle outlives the run
        self._observers, self.around_step, self.codec, self.context = (), None, _NO_STEP, None
        self.failures = self.spending = None
        if self.tokens is not None:
            self.tokens.close()
        return recorder

    # stopping it

    def __enter__(self) -> None:
        """Make the current asyncio task the handler's: from here on the run can be cancelled."""
        self.started, self._task = RUNTIME.monotonic(), asyncio.current_task()
        if self.stop_reason is not None:  # before it began
            self._cancel()

    def __exit__(self, *raised: object) -> None:
        self.closed = self.stopped = True
        self.context = None  # it refers to the run
        self._cancel_steps()
        if self._retry_cancel is not None:
            self._retry_cancel.cancel()
        task, self._task = self._task, None
        for _ in range(self._cancels + self._left_counted if task is not None else 0):
            task.uncancel()  # type: ignore[union-attr]

    def cancel(self, why: StopReason, detail: StopDetail = None) -> None:
        """Cancel the handler, and refuse what it calls from now on, whether it obeys or not.

        The first reason counts, unless the lease or entries are lost: no outcome is stored.
        """
        self._note_stop(why, detail)
        if self._retry_cancel is None:
            self._cancel()
        if self._holding is not None:
            self._holding.cancel()

    def _note_stop(self, why: StopReason, detail: StopDetail) -> None:
        first, self.stopping, self.stopped = self.stop_reason is None, True, True
        if first:
            self.ended_at = RUNTIME.monotonic()
            self.ended_in = tuple(self.steps_in_flight)
        gap = why is StopReason.DATA_LOST and self.stop_reason not in (StopReason.LOST, StopReason.CANCELLED)
        if first or gap or why is StopReason.LOST:
            self.stop_reason, self.stop_detail = why, detail

    @property
    def stop(self) -> Stop | None:
        """The stop of this run, None while it continues."""
        why = self.stop_reason
        if why is None or (word := STOP_RULES[why].word) is None:
            return None
        ends = word in ("cancel", "incoherent", "budget") or (word == "timeout" and self._is_last(why))
        return Stop(word, ends_task=ends)

    def _is_last(self, why: StopReason) -> bool:
        """Return whether no attempt follows one that exceeded its time."""
        if self.retry is None:
            return False
        name = self.envelope.task
        error = TaskIdle(name, 0.0, ()) if why is StopReason.IDLE else TaskTimeout(name, 0.0)  # its class decides
        counters = counters_after(why, self.history.counters)
        return reason_to_bury(self.retry, counters, error, self.envelope.options.max_attempts) is not None

    def abandon(self) -> StopReason | None:
        """Refuse all further writes of a handler that ignores its cancellation. Return why the run was stopped."""
        why, self.stop_reason, self.stopped = self.stop_reason, StopReason.LOST, True
        return why

    def limit(self, seconds: float) -> asyncio.TimerHandle:
        """Time the run out after so many seconds; cancelling the handle removes the limit."""
        self.time_limit = seconds
        return self._loop.call_later(seconds, self.cancel, StopReason.TIMED_OUT)

    @property
    def time_left(self) -> float:
        """Seconds until the time limit of the handler."""
        return self.started + self.time_limit - RUNTIME.monotonic()

    def on_lost(self) -> None:
        """Called in the heartbeat's thread: another worker holds the lease."""
        self._loop.call_soon_threadsafe(self.cancel, StopReason.LOST)

    def on_cancel(self) -> None:
        """Called in the heartbeat's thread: a caller cancelled the task."""
        self._loop.call_soon_threadsafe(self.cancel, StopReason.CANCELLED)

    def status(self) -> RunStatus:
        """Return since when the handler has been running, and in which step. Called in the heartbeat's thread."""
        if self._task is None and not self.closed:
            return NOT_STARTED  # what Redis has is the last sign of the previous run
        now = RUNTIME.monotonic()
        for key, step in tuple(self.steps_in_flight.items()):
            return RunStatus(now - self.started, key, now - step.began)
        return RunStatus(now - self.started)

    @property
    def may_park(self) -> bool:
        """Whether open waits may park the run now: no call is in progress, and it does not stop for another reason."""
        if self.stopped or self._failed or self._leaving_itself or self.steps_in_flight or self.calls:
            return False
        return not self.stopping or self._leaving is _SHUTDOWN

    # its steps

    def touch(self) -> None:
        """Restart the idle time of the run."""
        self.active = RUNTIME.monotonic()

    def excuse(self, seconds: float) -> None:
        """Exclude so many seconds, in which the event loop was blocked, from the idle time."""
        self.active += seconds

    def request_stop(self) -> None:
        """Request the run to stop at its next step boundary."""
        self.stopping = True

    def step_began(self, key: str, digest: str = "", step: InFlight | None = None) -> None:
        """Note that a step runs. digest: see `_note_step`."""
        if step is None:
            step = InFlight()
        elif self.spending is not None:
            self.spending.step_began()
        self.steps_in_flight[key] = step
        step.began = self.active = RUNTIME.monotonic()
        self._note_step(key, digest)
        for observer in self._observers:
            observer.on_step(key)

    def note_long_steps(self, now: float) -> None:
        """Store the intents of the steps that have been running for `LONG_STEP` seconds. now: monotonic clock.

        The handoff of a run that is cut off names them. A step that has ended meanwhile writes none, so that none is
        stored after its record.
        """
        entries: tuple[Entry, ...] = ()
        for step in self.steps_in_flight.values():
            if now - step.began >= LONG_STEP:
                entries += step.intent()
        if entries:
            self.recorder.put_soon(*entries)

    def step_recorded(self, *, stored: bool = True) -> None:
        """Count a recorded step. stored: Redis has confirmed it."""
        self.steps_recorded += 1
        if stored and self._observers:
            self.progressed()

    def charged(self, charge: Charge) -> None:
        """Notify the observers of the cost of a call."""
        for observer in self._observers:
            observer.on_charge(charge)

    def replayed(self, number: int) -> None:
        """Notify the observers that a call has met an event of an earlier run."""
        for observer in self._observers:
            observer.on_replayed(number)

    def progressed(self) -> None:
        """Notify the observers that something was stored which no earlier run had stored."""
        for observer in self._observers:
            observer.on_recorded()

    def step_ended(self, key: str, attempt: int = 0) -> None:
        """Note that a step has ended. attempt: number of its last try; 0 for what has no function."""
        step = self.steps_in_flight.pop(key, None)
        self._step_tasks.pop(key, None)
        self.active = RUNTIME.monotonic()
        if self.host.meter is not None and step is not None and attempt:
            self.host.meter.step_ended(self, key, self.active - step.began, attempt)
        if not self.steps_in_flight and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    async def refuse(self) -> NoReturn:
        """Refuse a call of a run that was stopped. Raises `CancelledError`, `RunStopped`, `LeaseLost`."""
        if self.stop_reason is StopReason.LOST:
            raise LeaseLost(self.id, "call")
        await super().refuse()

    async def boundary(self) -> NoReturn:
        """Stop the run between two steps, unless it was stopped before. Called when `stopping`; does not return."""
        await self.check_stopped()
        await self._exit_at_boundary(*self._leaving)

    async def park(self, reason: ParkReason, *, grace: float | None = None) -> NoReturn:
        """Stop the run, when the steps in flight are recorded, until what it waits for happens. Does not return.

        Args:
            reason: what the task waits for.
            grace: seconds to wait for the steps in flight, else as long as they take.
        """
        await self._exit_within(grace, StopReason.PARKED, reason)

    async def fail(self, error: Exception, *, grace: float | None = None) -> NoReturn:
        """Stop the run as incoherent, when the steps in flight are recorded. Does not return. grace: as for `park`."""
        await self._exit_within(grace, StopReason.INCOHERENT, error)

    async def exhaust(self, error: Exception) -> NoReturn:
        """Stop the run, when the steps in flight are recorded: a budget is used up. Does not return."""
        await self._exit_at_boundary(StopReason.EXHAUSTED, error)

    async def continue_elsewhere(self) -> NoReturn:
        """Stop the run, when the steps in flight are recorded: a successor continues the work. Does not return."""
        await self._exit_at_boundary(StopReason.CONTINUED, None)

    async def _exit_within(self, grace: float | None, why: StopReason, detail: StopDetail) -> NoReturn:
        with anyio.move_on_after(math.inf if grace is None else grace):
            await self._exit_at_boundary(why, detail)
        await self._exit(why, detail)

    async def _exit_at_boundary(self, why: StopReason, detail: StopDetail) -> NoReturn:
        """Stop the run when the steps in flight are recorded; no other step begins."""
        self.stopping, self._leaving = True, (why, detail)
        itself = self.is_own_task() and why is not StopReason.RELEASED
        self._leaving_itself |= itself
        try:
            await self._steps_ended()
        except BaseException:  # such as a time-out of the handler around the call
            self._leaving_itself &= not itself
            raise
        await self._exit(why, detail)

    async def _exit(self, why: StopReason, detail: StopDetail) -> NoReturn:
        """Stop the run: by `RunStopped` in the handler's own task, else by cancelling that."""
        own = self.is_own_task()
        if own and why is not StopReason.RELEASED and not self.stopped:
            self._note_stop(why, detail)
            self.limit_cleanup()
            raise RunStopped(f"this run stops ({STOP_RULES[why].word}): the handler may clean up, without its context")
        if not self._failed and not self._leaving_itself:
            self.cancel(why, detail)
        if own and not self._failed:
            await anyio.sleep_forever()  # the cancellation ends it
        raise asyncio.CancelledError("the task was stopped")

    def __repr__(self) -> str:
        return f"<Run {self.envelope.task} {self.id} steps={list(self.steps_in_flight)}>"


class RunObserver:
    """Base class of objects registered with `Run.observe`. Every method does nothing until it is overridden.

    Observers are notified in the order in which they were registered, in the event loop of the run.
    """

    __slots__ = ()

    def on_step(self, key: str) -> None:
        """A step begins."""

    def on_event(self, event: Event, number: int) -> None:
        """An event got its number and is not stored yet: without secrets, its data as JSON.

        An exception withdraws the event; observers that were registered later are not notified.
        """

    def on_replayed(self, number: int) -> None:
        """A call of the handler has met the event with this number, which an earlier run had logged."""

    def on_recorded(self) -> None:
        """A result or progress was stored that no earlier run had stored."""

    async def on_settled(self, run: Run, stop: StopReason, *, ended: bool) -> None:
        """The outcome of the run is stored. stop: its reason. ended: whether the attempt has ended with it."""

    def on_charge(self, charge: Charge) -> None:
        """A step or the handler has said what a call has cost."""

    def on_close(self) -> None:
        """The run is over, whether an outcome of it is stored or not. Must not raise."""

    async def on_checkpoint(self) -> None:
        """The handler asked to store what is not stored yet."""

    async def on_boundary(self) -> None:
        """An agent is between two steps of its plan. May stop the run."""


class RunChecks(RunObserver):
    """Base class of an observer that checks the work of a run."""

    __slots__ = ()

    @property
    def failed(self) -> Sequence[str]:
        """Names of the checks that have failed, each once."""
        return ()


def goal_of(run: Run) -> str:
    """Return the task's name with its arguments in short, without secrets: `audit(root="src")`."""
    task, delivery = run.envelope.task, run.delivery
    cipher = run.gateway.encryptor.of(delivery.partition, run.id)
    shown = shown_arguments(cipher, task, delivery.fields.get(b"args"), run.envelope.secrets)
    goal = call_text(task, shown or b"{}")
    return goal if run.redact is None else run.redact(goal)

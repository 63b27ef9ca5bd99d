"""One run of a handler, from delivery to outcome: what it has, and how it can be ended.

Why a run was ended from outside, or ended itself before its handler was done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import anyio

from ...queues import Delivery, Entry, Envelope, Gateway, History, Kind, Redaction, check_size
from ..journal import Event, Resumption, redacted
from ..memory import LazyMemoryStore
from ..settings import Settings
from .checkpoint_writer import CheckpointWriter
from .step_keys import StepKeys
from .threads import Threads

__all__ = ["ParkReason", "Run", "StopReason"]


class StopReason(Enum):
    """Why a run was ended from outside."""

    LOST = "lost"
    """Its lease has passed to another worker."""
    CANCELLED = "cancelled"
    """Somebody asked for its cancellation."""
    RELEASED = "handed_off"
    """The worker is stopping."""
    TIMED_OUT = "timed_out"
    """It took longer than it may."""
    IDLE = "idle"
    """It did nothing for longer than it may."""
    INCOHERENT = "incoherent"
    """Its agent no longer knows what it is doing; the run's `fault` says so."""
    CONTINUED = "handed_on"
    """Another task goes on with it."""
    PARKED = "parked"
    """It waits for something, and gives its slot away meanwhile."""


@dataclass(frozen=True, slots=True)
class ParkReason:
    """What a run waits for. delay: seconds until it goes on without. waits: what, such as "message".

    seen: the number of the last message to its inbox that it knows of: a later one is what it waits for.
    """

    delay: float
    waits: str
    seen: int


_INSIST: Final = 0.5
"""Seconds after which a handler that goes on in spite of its cancellation is cancelled again."""

_SHUTDOWN: Final[tuple[StopReason, ParkReason | None]] = (StopReason.RELEASED, None)
"""How a run ends that is stopped."""


class Run:
    """One run. Belongs to the event loop it runs in; only `on_lost` and `on_cancel` may be called from elsewhere.

    events: the number of the last event that it put into the log. on_event: hears of each, before it is stored.
    keys: those that it has given to its steps. parked: what it waits for, where that has ended it. fault: what is wrong
    with it, where that has. taken: numbers of the messages in its inbox that it has read. session: of the agent that
    runs, if one does (worker/agent/live_state.py). on_checkpoint: has it save what is not saved yet.

    started, active: when it began and when a step began or ended or something was saved last (monotonic clock), which
    is for others to judge. ended_at, ended_in: when it was ended from outside, and in which steps it was then.

    The handler runs in the asyncio task that entered the run (`with run:`). Ending a run cancels that task, and
    what was cancelled on the run's account is taken back when the block is left, so that the same task can go on to
    store the outcome.
    """

    __slots__ = (
        "_again",
        "_cancels",
        "_leaving",
        "_loop",
        "_quiet",
        "_recorder",
        "_task",
        "active",
        "closed",
        "delivery",
        "ended_at",
        "ended_in",
        "envelope",
        "events",
        "fault",
        "gateway",
        "history",
        "keys",
        "memory",
        "on_checkpoint",
        "on_event",
        "on_recorded",
        "on_step",
        "parked",
        "payload_limit",
        "record",
        "redact",
        "result_ttl",
        "resumption",
        "session",
        "settings",
        "started",
        "steps_in_flight",
        "steps_recorded",
        "stop_reason",
        "stopping",
        "taken",
        "threads",
    )

    def __init__(
        self,
        gateway: Gateway,
        delivery: Delivery,
        envelope: Envelope,
        history: History,
        *,
        payload_limit: int,
        threads: Threads,
        memory: LazyMemoryStore | None = None,
        settings: Settings,
    ) -> None:
        self.gateway = gateway
        self.delivery = delivery
        self.envelope = envelope
        self.history = history
        self.payload_limit = payload_limit
        self.threads = threads
        self.memory = memory
        self.settings = settings
        self.record = delivery.partition.record(envelope.id)
        self.redact: Redaction | None = None
        self.stop_reason: StopReason | None = None
        self.stopping = False
        self.closed = False
        self.started = self.active = time.monotonic()
        self.ended_at = 0.0
        self.ended_in: tuple[str, ...] = ()
        self.steps_in_flight: dict[str, float] = {}
        self.steps_recorded = 0
        self.on_step: Callable[[str], None] | None = None
        self.on_recorded: Callable[[], None] | None = None
        self.on_event: Callable[[Event, int], None] | None = None
        self.on_checkpoint: Callable[[], Awaitable[None]] | None = None
        self.session: object | None = None
        self.result_ttl: float | None = None
        self.resumption: Resumption | None = None
        self.events = 0
        self.parked: ParkReason | None = None
        self.fault: Exception | None = None
        self.taken: set[int] | None = None
        self.keys = StepKeys()
        self._quiet: anyio.Event | None = None
        self._recorder: CheckpointWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._cancels = 0
        self._leaving: tuple[StopReason, ParkReason | None] = _SHUTDOWN

    @property
    def id(self) -> str:
        return self.envelope.id

    # the checkpoint

    @property
    def recorder(self) -> CheckpointWriter:
        """The writer of the checkpoint: made when it is first needed, for many runs have no steps."""
        if self._recorder is None:
            self._recorder = CheckpointWriter(
                self.gateway,
                self.delivery,
                self.envelope.id,
                on_lost=lambda: self.cancel(StopReason.LOST),
                on_cancel=lambda: self.cancel(StopReason.CANCELLED),
                on_wait=self.touch,
            )
        return self._recorder

    @property
    def has_written(self) -> bool:
        """Whether anything was put into the checkpoint in this run."""
        return self._recorder is not None

    def next_entry(self, event: Event) -> Entry:
        """An event's entry for the log. It must be put at once, for it has the next number.

        `on_event` hears of it as readers of the log will: without secrets, and of data that is JSON. Raises
        `PayloadTooLarge`, and what `on_event` raises; then there is no such event.
        """
        if self.redact is not None:
            event = redacted(event, self.redact)
        data = event.to_json()
        check_size(f"event {event.type!r} of task {self.id}", len(data), self.payload_limit)
        number = max(self.events, self.history.events) + 1
        if self.on_event is not None:
            self.on_event(event.as_read(data), number)
        self.events = number
        return Entry(Kind.EVENT, event.type, str(number).encode(), data)

    async def log_event(self, event: Event, *, wait: bool = False) -> None:
        """Put an event into the log: with the next write of the checkpoint, or at once. Raises `LeaseLost`."""
        await self.recorder.put(self.next_entry(event), wait=wait)

    async def flush(self) -> None:
        """Store what was put into the checkpoint. Raises `LeaseLost`."""
        if self._recorder is not None:
            await self._recorder.flush()

    async def close(self) -> None:
        """Nothing is written into the checkpoint from now on."""
        self.closed = True
        recorder, self._recorder = self._recorder, None  # they know each other: no cycle outlives the run
        if recorder is not None:
            await recorder.close()

    # ending it

    def __enter__(self) -> None:
        """From here on the run can be cancelled: this asyncio task is its handler's."""
        self._task = asyncio.current_task()
        if self.stop_reason is not None:  # before it began
            self._cancel()

    def __exit__(self, *raised: object) -> None:
        self.closed = True
        if self._again is not None:
            self._again.cancel()
        task, self._task = self._task, None
        for _ in range(self._cancels if task is not None else 0):
            task.uncancel()  # type: ignore[union-attr]

    async def drain_cancellation(self) -> None:
        """Let a cancellation of the handler that came too late for it pass, so that it hits nothing else.

        Raises `CancelledError` where it is the worker itself that is being cancelled.
        """
        task = asyncio.current_task()
        if self._cancels:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if task is not None and task.cancelling():
                    raise
        if task is not None and task.cancelling():
            raise asyncio.CancelledError

    def cancel(self, why: StopReason) -> None:
        """Cancel the handler. The first reason counts, but a lost lease beats every other."""
        if self.stop_reason is None:
            self.ended_at = time.monotonic()
            self.ended_in = tuple(self.steps_in_flight)
        if self.stop_reason is None or why is StopReason.LOST:
            self.stop_reason = why
        if self._again is None:
            self._cancel()

    def limit(self, seconds: float) -> asyncio.TimerHandle:
        """End the run as timed out after so many seconds; the handle takes that back."""
        return self._loop.call_later(seconds, self.cancel, StopReason.TIMED_OUT)

    def on_lost(self) -> None:
        """From the beat's thread: the lease has passed to another worker."""
        self._loop.call_soon_threadsafe(self.cancel, StopReason.LOST)

    def on_cancel(self) -> None:
        """From the beat's thread: somebody asked for the cancellation."""
        self._loop.call_soon_threadsafe(self.cancel, StopReason.CANCELLED)

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancels += 1
            self._task.cancel()
            self._again = self._loop.call_later(_INSIST, self._cancel)

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The asyncio task that its handler is in; None before it began and after it has ended."""
        return self._task

    # its steps

    def touch(self) -> None:
        """Something happened: the run is not idle."""
        self.active = time.monotonic()

    def request_stop(self) -> None:
        """Have the run stop at its next step boundary."""
        self.stopping = True

    def step_began(self, key: str) -> None:
        self.steps_in_flight[key] = self.active = time.monotonic()
        if self.on_step is not None:
            self.on_step(key)

    def step_ended(self, key: str) -> None:
        self.steps_in_flight.pop(key, None)
        self.active = time.monotonic()
        if not self.steps_in_flight and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    async def boundary(self) -> None:
        """Where a run may be stopped: between steps. Does not return when it is. Called when `stopping`."""
        await self.exit_at_boundary(*self._leaving)

    async def exit_at_boundary(self, why: StopReason, parked: ParkReason | None = None) -> None:
        """End the run from within, when the steps that are under way are recorded; no other begins. Does not return."""
        self.stopping, self._leaving = True, (why, parked)
        while self.steps_in_flight:
            self._quiet = self._quiet or anyio.Event()
            await self._quiet.wait()
        if self.stop_reason is None:
            self.parked = parked
        self.cancel(why)
        await anyio.sleep_forever()

    def __repr__(self) -> str:
        return f"<Run {self.envelope.task} {self.id} steps={list(self.steps_in_flight)}>"

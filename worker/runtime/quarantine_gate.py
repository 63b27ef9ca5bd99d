"""The quarantine gate: decides whether this worker may run a task that is suspected of killing workers.

Under a supervisor, an ordinary worker runs no suspect: the supervisor starts a quarantine worker, which runs one and
nothing else. When the suspect has survived the probation time, it no longer takes up a place: it continues as an
ordinary task, and another quarantine worker may start.

A worker without a supervisor runs one suspect at a time, and takes no other task meanwhile, until the suspect makes
progress, ends, or survives the probation time.
"""

from __future__ import annotations

import asyncio

from ...deadletter.policy import must_quarantine
from ...queues.delivery.leases import Delivery
from ...queues.delivery.quarantine_store import clear_quarantined
from ...queues.errors import LeaseLost, QueueError
from ..durable.run import Run, RunObserver
from ..log import logger
from .outcome import Outcome, Quarantined
from .stages.execution import Execution
from .supervisor_link import Link


class QuarantineGate:
    """The gate of one worker."""

    def __init__(self, link: Link | None, window: float) -> None:
        """link: to the supervisor, None without one. window: probation time in seconds."""
        self._link = link
        self._window = window
        self._pending: set[tuple[str, bytes]] = set()
        self._suspect: Run | None = None
        self._more = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._clearing: set[asyncio.Task[None]] = set()
        self.wanted = self.accepts

    @property
    def dedicated(self) -> bool:
        """Whether this worker runs suspects only."""
        return self._link is not None and self._link.role == "isolated"

    @property
    def accepts(self) -> bool:
        """Whether this worker runs suspects at all."""
        return self._link is None or self.dedicated

    @property
    def has_room(self) -> bool:
        """Whether the worker may take more tasks: no suspect runs here or is about to."""
        return self._suspect is None and not self._pending

    def request(self) -> None:
        """Search for suspects soon, or ask the supervisor to start a worker that does."""
        if self.accepts:
            self.wanted = True
            self._notify()
        elif self._link is not None:
            self._link.send("suspects")

    def pending(self, delivery: Delivery) -> None:
        """Count a taken delivery that may be a suspect, if this worker has to run it. A call of `resolved` follows."""
        if self.accepts:
            self._pending.add(delivery.key)

    def resolved(self, delivery: Delivery) -> None:
        """Note that it is known whether the delivery is a suspect. May be called for any delivery, and repeatedly."""
        if delivery.key in self._pending:
            self._pending.discard(delivery.key)
            self._notify()

    def admit(self, run: Run) -> bool:
        """Return whether a suspect may run here now. If so, `release` follows when it has ended."""
        if not self.accepts or self._suspect is not None:
            return False
        self._suspect = run
        self._timer = asyncio.get_running_loop().call_later(self._window, self._end_probation, run)
        link = self._link
        if link is not None:
            link.send("begins", id=run.id, task=run.envelope.task)
            if self._more:
                link.send("suspects")  # after `begins`: the supervisor must not count this worker as free for them
            run.observe(_StepReports(link, run))
        else:
            run.observe(_Progress(self, run))
        logger.bind(task=run.envelope.task, id=run.id).info("running in quarantine: its workers died")
        return True

    async def check(self, execution: Execution) -> Outcome | None:
        """Stage: refuse a suspect that may not run here now."""
        run, history = execution.run, execution.run.history
        suspected = history.quarantined or must_quarantine(history.crashes_in_a_row, history.crashes_in_window)
        if suspected and not self.admit(run):
            return Quarantined(history.counters)
        self.resolved(run.delivery)
        return None

    def release(self, run: Run) -> None:
        """End the admission of a run. A run that was not admitted changes nothing."""
        if self._suspect is run:
            if self._link is not None:
                self._link.send("ends", id=run.id)
            self._leave()

    def idle(self) -> None:
        """Report to the supervisor that there is no suspect."""
        if self.dedicated and self._link is not None:
            self._link.send("idle")

    def found(self, *, more: bool) -> None:
        """Note whether more suspects were waiting when this worker took one; the supervisor learns it with the run."""
        self._more = more

    async def wait_change(self) -> None:
        """Return when the worker may take more tasks, or should look for suspects."""
        self._changed.clear()
        await self._changed.wait()

    def clear(self, run: Run) -> None:
        """Clear a suspect that made progress, so that its worker takes other tasks again."""
        if self._suspect is run:
            self._end_probation(run)

    def _end_probation(self, run: Run) -> None:
        task = asyncio.get_running_loop().create_task(self._clear_stored(run))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        if self._link is not None:
            self._link.send("survived", id=run.id)
        else:
            self._leave()

    async def _clear_stored(self, run: Run) -> None:
        try:
            await clear_quarantined(run.gateway, run.delivery, run.id)
        except LeaseLost:
            pass  # the run has ended, or its next write is refused
        except QueueError as error:
            logger.debug("could not clear task {} from quarantine: {}", run.id, error)

    def _leave(self) -> None:
        """Take other tasks again."""
        self._suspect = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wanted = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()


class _StepReports(RunObserver):
    """Reports the steps of a suspect to the supervisor, which names the step if the process dies."""

    def __init__(self, link: Link, run: Run) -> None:
        self._link = link
        self._id = run.id

    def on_step(self, key: str) -> None:
        self._link.send("step", id=self._id, step=key)


class _Progress(RunObserver):
    """Clears a suspect at its first recorded result."""

    def __init__(self, gate: QuarantineGate, run: Run) -> None:
        self._gate = gate
        self._run = run

    def on_recorded(self) -> None:
        self._run.unobserve(self)
        self._gate.clear(self._run)

"""Who may run suspects: tasks whose worker died, and one of which may be what killed it.

Under a supervisor an ordinary worker runs none, and its supervisor has a child of its own for each. Without one a
worker runs one at a time and takes nothing new meanwhile. That ends when the suspect is cleared, when it ends, or when
its probation is over: by then a task that kills at once would have done so, and the others have waited long enough.
"""

from __future__ import annotations

import asyncio

from ...queues import Delivery, LeaseLost, QueueError, clear_quarantined
from ..durable import Run
from ..log import logger
from .supervisor_link import SupervisorLink

__all__ = ["QuarantineGate"]


class QuarantineGate:
    """What one worker does about suspects."""

    def __init__(self, link: SupervisorLink | None, window: float) -> None:
        """link: to the supervisor, None where there is none. window: seconds."""
        self._link = link
        self._window = window
        self._undecided: set[tuple[str, bytes]] = set()
        self._alone: Run | None = None
        self._over: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._clearing: set[asyncio.Task[None]] = set()
        self.wanted = self.accepts

    @property
    def dedicated(self) -> bool:
        """Whether this worker is there for suspects alone."""
        return self._link is not None and self._link.role == "isolated"

    @property
    def accepts(self) -> bool:
        """Whether suspects are run here at all."""
        return self._link is None or self.dedicated

    @property
    def has_room(self) -> bool:
        """Whether more may be taken: no suspect is on probation here, or about to be."""
        return self._alone is None and not self._undecided

    def request(self) -> None:
        """There may be suspects: look for them at the next opportunity, or have the supervisor do so."""
        if self.accepts:
            self.wanted = True
            self._tell()
        elif self._link is not None:
            self._link.say("suspects")

    def pending(self, delivery: Delivery) -> None:
        """A delivery was taken that may be a suspect: `decided` follows."""
        self._undecided.add(delivery.key)

    def resolved(self, delivery: Delivery) -> None:
        """It is known by now whether the delivery is one. May be said of any, and more than once."""
        if delivery.key in self._undecided:
            self._undecided.discard(delivery.key)
            self._tell()

    def admit(self, run: Run) -> bool:
        """Whether a suspect may run here now. If so `release` follows when it has ended."""
        if not self.accepts or self._alone is not None:
            return False
        self._alone = run
        loop = asyncio.get_running_loop()
        run.on_recorded = lambda: self._clear(run)
        if self.dedicated and self._link is not None:
            link = self._link
            link.say("begins", id=run.id, task=run.envelope.task)
            run.on_step = lambda key: link.say("step", id=run.id, step=key)
        else:
            self._over = loop.call_later(self._window, self._end_window, run)
        logger.bind(task=run.envelope.task, id=run.id).info("a worker died with it: it runs alone until it is cleared")
        return True

    def release(self, run: Run) -> None:
        """A run has ended. One that was not admitted changes nothing."""
        if self._alone is run and self.dedicated and self._link is not None:
            self._link.say("ends", id=run.id)
        self._end_window(run)

    def idle(self) -> None:
        """There was none to be found."""
        if self.dedicated and self._link is not None:
            self._link.say("idle")

    def leave(self) -> None:
        """There are more of them than this worker can run."""
        if self._link is not None:
            self._link.say("suspects")

    async def wait_change(self) -> None:
        """Return when more may be taken, or suspects are to be looked for."""
        self._changed.clear()
        await self._changed.wait()

    def _clear(self, run: Run) -> None:
        """The run has recorded a step that no run before had recorded."""
        run.on_recorded = None
        task = asyncio.get_running_loop().create_task(self._clear_stored(run))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        if not self.dedicated:
            self._end_window(run)

    async def _clear_stored(self, run: Run) -> None:
        try:
            await clear_quarantined(run.gateway, run.delivery, run.id, run.history.counters.crashes)
        except LeaseLost:
            pass  # it has ended, or the run will hear of it in its next write
        except QueueError as error:
            logger.debug("cannot clear task {} of suspicion: {}", run.id, error)

    def _end_window(self, run: Run) -> None:
        if self._alone is not run:
            return
        self._alone = None
        if self._over is not None:
            self._over.cancel()
            self._over = None
        self.wanted = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()

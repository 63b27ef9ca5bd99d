"""Capacity of a running task: the time and the context window that are left, and the load of its queue and worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...queues.depth import read_depths
from ...queues.inspection.views import queue_partitions
from ...queues.keys import Namespace
from ...queues.wording import counted, duration
from .run import Run

if TYPE_CHECKING:
    from .budget_left import BudgetLeft

_LITTLE: Final = 0.25
"""Share of the time limit, and of the context window, below which the rest is worth a sentence."""


@dataclass(frozen=True, slots=True)
class TaskCapacity:
    """The capacity of a running task at one moment; a later look finds other numbers.

    Attributes:
        time_left: seconds until the time limit ends this run.
        time_limit: seconds of that limit.
        context_left: tokens of the model's context window that the last prompt left, before messages are left out or
            summarized; None for a task without a `ContextBuilder`, and before the first prompt.
        context_window: tokens of the window; None likewise.
        queued: tasks that wait in the task's queue for a worker.
        free: share of the slots that the task's worker may fill now, from 0 to 1.
        budget: what is left of the task's budgets; None for a task without any.
    """

    time_left: float
    time_limit: float
    context_left: int | None
    context_window: int | None
    queued: int
    free: float
    budget: BudgetLeft | None = None

    def sentences(self) -> list[str]:
        """Return what a model should know: time, window and budgets if little is left, and whether others wait."""
        found = []
        if self.time_left < self.time_limit * _LITTLE:
            found.append(f"Time left: {duration(max(0.0, self.time_left), whole=True)}.")
        if self.context_left is not None and self.context_left < (self.context_window or 0) * _LITTLE:
            found.append(f"Context window left: {self.context_left:,} of {self.context_window:,} tokens.")
        if self.budget is not None:
            found += self.budget.sentences()
        if self.queued and not self.free:
            found.append(f"Waiting in the queue, with no free worker slot: {counted(self.queued, 'task')}.")
        return found


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens of the last prompt of a run. left: those until messages are left out or summarized."""

    left: int
    window: int


async def read_capacity(run: Run) -> TaskCapacity:
    """Return the capacity of a run. Reads the depth of the queue: one round trip for its route, one for its partitions.

    Raises `QueueError`.
    """
    at, use = run.delivery.partition, run.extras.get(ContextUse)
    partitions = await queue_partitions(run.gateway, Namespace(at.namespace), at.queue)
    queued = sum(await read_depths(run.gateway, partitions)) if partitions else 0
    return TaskCapacity(
        time_left=run.time_left,
        time_limit=run.time_limit,
        context_left=None if use is None else use.left,
        context_window=None if use is None else use.window,
        queued=queued,
        free=1.0 if run.host.free is None else run.host.free(),
        budget=None if run.spending is None else await run.spending.left_now(),
    )

"""The execution of one delivery, as the executor's stages see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from ....deadletter.policy import Reason, backoff
from ....queues.errors import InvalidLimitUse, PerdureError
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.scripts import milliseconds
from ...context import Context
from ...durable.run import Run
from ...durable.stop_reasons import StopReason
from ...errors import TaskExpired
from ...log import log_wait
from ...on_demand import confirm_limits
from ...task import Task
from ..outcome import Burial, Limited, Outcome, Rerun

GROUP: Final = "#group"
"""Name of the argument that holds a group, in place of the arguments of its callback."""


class Execution:
    """One delivery in the stages.

    Attributes:
        task: Set by `FindTask`. Stages after it may rely on it; before, reading it raises AttributeError.
        arguments: Set by `DecodeArguments`.
    """

    __slots__ = ("_ctx", "arguments", "resources", "run", "task")

    task: Task[Any, Any]

    def __init__(self, run: Run, resources: Callable[[], Any]) -> None:
        self.run = run
        self.resources = resources
        self.arguments: dict[str, Any] = {}
        self._ctx: Context | None = None

    @property
    def ctx(self) -> Context:
        """The context of the handler and of middleware, created at its first use."""
        if self._ctx is None:
            durability = self.task.durability if hasattr(self, "task") else "sync"
            self._ctx = Context(self.run, durability=durability, resources=self.resources)
        return self._ctx


Stage = Callable[[Execution], Outcome | Coroutine[Any, Any, Outcome | None] | None]
"""Returns the outcome of the delivery, or None to continue with the next stage; a coroutine if it has to wait."""


def check_limits(execution: Execution) -> Coroutine[Any, Any, Outcome | None] | None:
    """Stage: start a limited task only with the tokens of its limits; without room it waits in their list."""
    limited = execution.run.envelope.limits or execution.task.limits is not None
    return _confirm_limits(execution) if limited else None


def check_deadline(execution: Execution) -> Coroutine[Any, Any, Outcome | None] | None:
    """Stage: bury a task that has not started by its deadline, by the clock of Redis."""
    if execution.run.envelope.options.expires is None:
        return None
    return _check_deadline(execution, execution.run.envelope.options.expires)


async def _check_deadline(execution: Execution, expires: float) -> Outcome | None:
    """A replayed task has no deadline: an operator wants it to run."""
    run = execution.run
    history = run.history
    counters = history.counters
    if counters.attempts or counters.crashes or history.replays or history.entries or history.quarantined:
        return None
    read = partial(run.gateway.command, "TIME", node_of=run.delivery.partition.ready)
    now = milliseconds(await retry_while_unavailable(read, on_wait=log_wait(f"task {run.id}"))) / 1000
    if now < expires:
        return None
    return Burial(Reason.EXPIRED, counters, TaskExpired(run.envelope.task, now - expires))


async def _confirm_limits(execution: Execution) -> Outcome | None:
    run = execution.run
    try:
        full = await confirm_limits(run, execution.task, execution.arguments)
    except InvalidLimitUse as invalid:
        return Burial(Reason.INVALID_ARGUMENTS, run.history.counters, invalid)
    return None if full is None else Limited(full.limit, full.retry, run.history.counters)


def hand_back(execution: Execution, policy: Any, error: PerdureError, reason: Reason) -> Outcome:
    """Return a task to the queue for workers that can run it, a bounded number of times; then bury it."""
    history = execution.run.history
    counters = history.counters._replace(requeues=history.counters.requeues + 1)
    if counters.requeues >= policy.max_attempts:
        return Burial(reason, counters, error)
    delay = backoff(policy, counters.requeues)
    return Rerun(delay, StopReason.RETURNED, counters, error, policy.max_attempts - 1)

"""The execution of one delivery, as the executor's stages see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from ....deadletter.policy import Reason, backoff
from ....queues.errors import InvalidLimitUse, PerdureError
from ...context import Context
from ...durable.run import Run
from ...durable.stop_reasons import StopReason
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

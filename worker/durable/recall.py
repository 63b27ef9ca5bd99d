"""Recall of a step of an agent's plan, whether it is in the state or in the archive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from ...queues import retry_while_unavailable
from ..journal import AgentState, StepStatus, read_archived_step, retired_keys
from ..log import log_wait
from .run import Run

__all__ = ["HasState", "RecalledStep", "recall_step"]


@runtime_checkable
class HasState(Protocol):
    """Observer that has the state of an agent."""

    @property
    def state(self) -> AgentState: ...


@dataclass(frozen=True, slots=True)
class RecalledStep:
    """Step of an agent's plan as it is, or as it was when it left the state.

    Attributes:
        result: JSON data; None if the step has no result.
        error: Error of its last failed try, if that was the last one.
        archived: Whether it has left the state.
        retired: Whether its record was dropped: its title, result and error are not known any more.
    """

    key: str
    title: str
    status: StepStatus
    result: Any
    error: str | None
    archived: bool
    retired: bool = False


async def recall_step(run: Run, key: str) -> RecalledStep | None:
    """Return a step of the agent's plan; None if the agent never had a step with this key, or the task has no agent.

    Raises `DecryptionError`.
    """
    agent = run.observer(HasState)  # type: ignore[type-abstract]  # a protocol is asked for
    if agent is None:
        return None
    for step in agent.state.plan:
        if step.key == key:
            return RecalledStep(key, step.title, step.status, agent.state.results.get(key), step.error, False)
    await run.flush()
    found = await retry_while_unavailable(
        partial(read_archived_step, run.gateway, run.delivery.partition, run.id, key),
        on_wait=log_wait(f"step {key!r} of task {run.id}", run.touch),
    )
    if found is None and agent.state.archive.retired:
        statuses = await retry_while_unavailable(
            partial(retired_keys, run.gateway, run.delivery.partition, run.id, [key]),
            on_wait=log_wait(f"step {key!r} of task {run.id}", run.touch),
        )
        return RecalledStep(key, "", StepStatus(statuses[key]), None, None, True, True) if statuses else None
    if found is None:
        return None
    former = found["step"]
    return RecalledStep(key, former["title"], StepStatus(former["status"]), found.get("result"), former["error"], True)

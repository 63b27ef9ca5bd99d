"""Continuation of an agent from before events that Redis has lost."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.transport.backoff import retry_while_unavailable
from ..durable.steps.keys import forget_steps
from ..journal.agent_events import Rewound
from ..journal.archive import ARCHIVED, archived_since
from ..journal.state import StepStatus
from ..log import log_wait, logger
from .live_state import LiveState

PLAN: Final = "#plan"
REPLAN: Final = "#replan"
FINISH: Final = "#finish"
"""Checkpoint keys and step scopes of the methods that are not steps of the plan."""

_OPEN: Final = (StepStatus.PENDING, StepStatus.RUNNING)


async def rewind(live: LiveState[Any], first: int, last: int, *, replans: bool, retires: bool) -> None:
    """Continue from before events that are missing: drop what may follow from them, and store a snapshot.

    The records of steps that were archived since then go as well: a plan would leave these steps out as done. If the
    events end after a step, another plan may have followed it, which is lost: an agent that `replans` is asked again.
    A log that is shortened may start in the lost future, so an agent that `retires` events writes the whole state.
    """
    run, history = live.run, live.run.history
    logger.bind(task=run.envelope.task, id=run.id).warning(
        "event {} is missing from the log, Redis has lost data: resumed from before it, without events {} to {}",
        first,
        first,
        last,
    )
    recorded = [*history.done, *history.intents, *history.saved]
    within = tuple(f"{scope}/" for scope in (PLAN, REPLAN, FINISH))
    gone = {key for key in recorded if key == REPLAN or key.startswith(within) or not key.startswith("#")}
    plan = live.state.plan
    if not plan:
        gone.add(PLAN)
    due = replans and live.state.current is None and any(step.status not in _OPEN for step in plan)
    archived = await retry_while_unavailable(
        partial(archived_since, run.gateway, run.delivery.partition, run.id, first),
        on_wait=log_wait(f"the archive of task {run.id}", run.touch),
    )
    event = live.checkpoint(Rewound(first=first, last=last))
    if retires:
        event += live.log_base(retired=0)
    dropped = [Entry(Kind.CHUNK, f"{ARCHIVED}{key}", b"") for key in archived]
    dropped += forget_steps(sorted(gone), history)
    if due:
        history.saved[REPLAN] = b"1"
        dropped.append(Entry(Kind.SAVED, REPLAN, b"1"))
    await run.recorder.put(*event, *dropped, *live.snapshot(force=True), wait=True)

"""Confirmation by a person that an agent may continue after an involuntary stop (`on_resume="ask"`).

The checkpoint has the question until a message or a correction arrives that is newer than the question, or its time has
passed; then it has the number of steps that were closed. A later stop asks again only if more steps are closed by then.
A correction to a dead letter confirms its replay: its sender knew of the stop, and decided to continue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import orjson

from ...queues.defaults import LONGEST
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.inbox import CORRECTION, last_message
from ...queues.transport.backoff import retry_while_unavailable
from ..durable.context import Context
from ..durable.messaging import unread_messages
from ..durable.stop_reasons import ParkReason
from ..journal.resumption import After
from ..journal.run_events import Waited, WaitStarted
from ..journal.state import AgentState, StepStatus
from ..log import log_wait
from .agent import Agent
from .live_state import LiveState
from .resume_notice import AFTER, notify_of_resume

OnResume: TypeAlias = Literal["ask"] | None

_ASKED: Final = "#asked"
"""Key of the question: `until`, `after` and `reason` while it is open, and `closed`."""

_WAITS: Final = "confirmation"
"""Kind of the wait of a task that has asked."""

_INVOLUNTARY: Final = ("crash", "failure", "replay")
"""Reasons of a stop after which an agent asks."""


async def confirm_resume(
    agent: Agent[Any],
    ctx: Context,
    live: LiveState[Any],
    on_resume: OnResume,
    mark_changed: Callable[[], list[Entry]],
) -> None:
    """Notify the user of a resume, and park the task until a person confirms it, if the agent asks for that.

    mark_changed: see `notify_of_resume`.

    A run that is killed between the question and its park leaves the open question, and the next one parks for it. A
    message that arrives meanwhile is newer than what the park has seen, so that the task is due at once.
    """
    await notify_of_resume(agent, ctx, live, mark_changed, parks=on_resume is not None)
    run = live.run
    data = run.history.saved.get(_ASKED)
    if data is None and on_resume is None:
        return
    asked: dict[str, Any] = {"closed": -1} if data is None else orjson.loads(data)
    is_open = "until" in asked
    reason = None if on_resume is None else _reason(live, asked["closed"])
    if reason is None and not is_open:
        return
    last, now = await retry_while_unavailable(
        partial(last_message, run.gateway, run.delivery.partition, run.id),
        on_wait=log_wait(f"the inbox of task {run.id}", run.touch),
    )
    if is_open and (on_resume is None or last > asked["after"] or now >= asked["until"]):
        confirmed = run.history.saved[_ASKED] = orjson.dumps({"closed": asked["closed"]})
        run.recorder.mail = max(run.recorder.mail, last)
        live.asked_after = asked.get("reason")
        await run.recorder.put(run.next_entry(Waited()), Entry(Kind.SAVED, _ASKED, confirmed), wait=False)
        return
    if reason == "replay" and not is_open and await _corrected_since_burial(live):
        confirmed = run.history.saved[_ASKED] = orjson.dumps({"closed": _closed(live)})
        run.recorder.mail = max(run.recorder.mail, last)
        await run.recorder.put(Entry(Kind.SAVED, _ASKED, confirmed), wait=False)
        return
    if reason is not None and not is_open:
        why = f"it resumes after {AFTER[reason]}"
        seconds = min(agent.resume_timeout, LONGEST)
        asked = {"until": now + round(seconds * 1000), "after": last, "closed": _closed(live), "reason": reason}
        question = run.history.saved[_ASKED] = orjson.dumps(asked)
        waiting = run.next_entry(WaitStarted(what=_WAITS, why=why))
        await run.recorder.put(waiting, Entry(Kind.SAVED, _ASKED, question), wait=True)
    await run.park(ParkReason((asked["until"] - now) / 1000, _WAITS, last))


def _reason(live: LiveState[Any], closed: int) -> After | None:
    """Return the reason to ask: an involuntary stop of the previous run, if more than so many steps are closed."""
    resumption = live.run.resumption
    if resumption is None or resumption.after not in _INVOLUNTARY or not resumption.restored:
        return None
    return resumption.after if _closed(live) > closed else None


async def _corrected_since_burial(live: LiveState[Any]) -> bool:
    """Return whether the inbox has a correction, or a confirmation, that is newer than the dead letter."""
    run = live.run
    since = None if run.resumption is None else run.resumption.at

    async def read() -> bool:
        corrected = [message.at async for message in unread_messages(run) if message.kind == CORRECTION]
        return since is not None and any(at >= since for at in corrected)

    return await retry_while_unavailable(read, on_wait=log_wait(f"the inbox of task {run.id}", run.touch))


def _closed(live: LiveState[Any]) -> int:
    state: AgentState = live.state
    return state.archive.steps + sum(step.status not in (StepStatus.PENDING, StepStatus.RUNNING) for step in state.plan)

"""Notice of a resume for the user: what was restored, what is lost or in doubt, what comes next. Facts of the state."""

from __future__ import annotations

from typing import Any, Final

from ...queues import PayloadTooLarge
from ...queues.durations import iso_time, shown_time
from ..durable import Context, forget_steps, next_entries
from ..journal import AgentState, Event, Message, Resumption, StepStatus
from ..journal.agent_events import MessageAdded, ResumeNotice
from ..journal.quoting import quoted_line, quoted_name
from ..log import logger
from .agent import Agent
from .live_state import LiveState

__all__ = ["AFTER", "notice_of", "notify_of_resume"]

_SCOPE: Final = "#resume"
"""Scope of the steps that `on_resume` calls."""

_LONGEST: Final = 4_000
"""Most characters of what an agent says on a resume, and of its goal in the notice."""

_MOST_CALLS: Final = 5
"""Calls in flight that a notice names."""

AFTER: Final = {
    "crash": "a crash",
    "hand_off": "a shutdown of its worker",
    "replay": "a replay",
    "fork": "a fork of another task",
    "failure": "a failure",
    "wait": "a wait",
}


async def notify_of_resume(agent: Agent[Any], ctx: Context, live: LiveState[Any]) -> None:
    """Log the notice of a resume for the user, and what the agent says of it, in one write.

    A run that is killed before logs none: the next one calls `on_resume` again, with its recorded steps.
    """
    run, resumption = live.run, live.run.resumption
    if resumption is None or not resumption.interrupted or not resumption.restored:
        return
    notice = notice_of(resumption, live.state, live.gap)
    with run.keys.inside(_SCOPE):
        said = await agent.on_resume(ctx, resumption)
    if said is not None and not isinstance(said, str):
        raise TypeError(f"on_resume must return a text or None, got {said!r}")
    gone = forget_steps(run.keys.under(f"{_SCOPE}/", run.history), run.history)
    turns: list[Event] = []
    if said:
        text = said[:_LONGEST]
        notice = notice.model_copy(update={"text": text})
        turns = [MessageAdded(message=Message(role="assistant", content=text))]
    try:
        entries = next_entries(run, notice, *turns)
    except PayloadTooLarge as error:  # the agent must not fail at each resume because of it
        logger.bind(task=run.envelope.task, id=run.id).warning("could not log the notice of the resume: {}", error)
        entries = []
    if entries or gone:
        await run.recorder.put(*entries, *gone, wait=bool(turns))


def notice_of(resumption: Resumption, state: AgentState, gap: tuple[int, int] | None) -> ResumeNotice:
    """Return the notice of a run that resumes with this state. gap: numbers of the events that the log has lost."""
    closed = sum(step.status is StepStatus.DONE for step in state.plan) + state.archive.steps
    steps = len(state.plan) + state.archive.steps
    running = next((step for step in state.plan if step.status is StepStatus.RUNNING), None)
    following = running or next((step for step in state.plan if step.status is StepStatus.PENDING), None)
    doubt = []
    if running is not None and running.risky:
        doubt = [f"step {quoted_name(running.key)} was started and has no result: its effect may have happened"]
    calls = () if resumption.handoff is None else resumption.handoff.dependencies.in_flight[:_MOST_CALLS]
    doubt += [f"the call {quoted_line(one.call)} was in flight" for one in calls]
    lost = "" if gap is None else f"events {gap[0]} to {gap[1]} of its log"
    upcoming = "finish" if following is None else f"step {quoted_name(following.key)} {quoted_line(following.title)}"
    if running is not None:
        upcoming += ", which was cut off"
    if following is None and not steps:
        upcoming = "plan"
    at = "" if resumption.at is None else f" at {shown_time(resumption.at)}"
    parts = [
        f"Resumed after {AFTER[resumption.after]}{at}.",
        f"Goal: {quoted_line(state.goal)}.",
        f"Restored: {closed} of {steps} steps are done, {len(state.messages)} messages.",
        f"Lost: {lost}." if lost else "",
        f"In doubt: {'; '.join(doubt)}." if doubt else "",
        f"Next: {upcoming}.",
    ]
    return ResumeNotice(
        goal=state.goal[:_LONGEST],
        after=resumption.after,
        stopped=iso_time(resumption.at) or "",
        done=closed,
        steps=steps,
        messages=len(state.messages),
        lost=lost,
        in_doubt=tuple(doubt),
        upcoming=upcoming,
        text=" ".join(part for part in parts if part),
    )

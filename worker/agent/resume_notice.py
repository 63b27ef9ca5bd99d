"""Notice of a resume for the user: what was restored, what is lost or in doubt, what comes next. Facts of the state.

The notice is an event, and the handle of a session's turn has it. If the agent acknowledges it, the answer of the turn
starts with it, and the brief of a prompt has it until the first step after the resume is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.durations import iso_time, shown_time
from ...queues.errors import PayloadTooLarge
from ..durable.context import Context
from ..durable.messaging import next_entries
from ..durable.steps.codec import Codec
from ..durable.steps.keys import forget_steps
from ..errors import UnserialisableResult
from ..journal.agent_events import MessageAdded, ResumeNotice
from ..journal.chat import Message
from ..journal.event import Event
from ..journal.quoting import quoted_line, quoted_name
from ..journal.resumption import Resumption
from ..journal.state import AgentState, StepStatus
from ..log import logger
from .agent import Agent
from .live_state import LiveState

_SCOPE: Final = "#resume"
"""Scope of the steps that `on_resume` calls."""

NOTE: Final = "#notice"
"""Checkpoint key of the last note for the user."""

_GOAL: Final = 120
"""Most characters of the goal in that note."""

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


async def notify_of_resume(
    agent: Agent[Any],
    ctx: Context,
    live: LiveState[Any],
    mark_changed: Callable[[], list[Entry]],
    *,
    parks: bool = False,
) -> None:
    """Log the notice of a resume for the user, and what the agent says of it, in one write.

    The note for the user is stored if a later run may need it: in a turn of a session, or if the agent `parks`.
    What the agent says is a message, so recorded steps may be called with other arguments: `mark_changed` lets them
    run again.

    A run that is killed before logs none: the next one calls `on_resume` again, with its recorded steps.
    """
    run, resumption = live.run, live.run.resumption
    if agent.acknowledge_resume:
        live.notice = run.history.saved.get(NOTE, b"").decode()
    if resumption is None or not resumption.interrupted or not resumption.restored:
        return
    notice = notice_of(resumption, live.state, live.gap)
    with run.keys.inside(_SCOPE):
        said = await agent.on_resume(ctx, resumption)
    await run.check_stopped()
    if said is not None and not isinstance(said, str):
        raise TypeError(f"on_resume must return a text or None, got {said!r}")
    gone = forget_steps(run.keys.under(f"{_SCOPE}/", run.history), run.history)
    turns: list[Event] = []
    note = _note_of(notice, resumption.at)
    if said:
        text = note = said[:_LONGEST]
        notice = notice.model_copy(update={"text": text})
        turns = [MessageAdded(message=Message(role="assistant", content=text))]
    try:
        entries = next_entries(run, notice, *turns)
    except PayloadTooLarge as error:  # the agent must not fail at each resume because of it
        logger.bind(task=run.envelope.task, id=run.id).warning("could not log the notice of the resume: {}", error)
        entries = []
    if turns:
        gone += mark_changed()
    if agent.acknowledge_resume:
        live.notice = note
    if (agent.acknowledge_resume and parks) or live.carried is not None:
        run.history.saved[NOTE] = note.encode("utf-8", "replace")
        gone.append(Entry(Kind.SAVED, NOTE, run.history.saved[NOTE]))
    if entries or gone:
        await run.recorder.put(*entries, *gone, wait=bool(turns))


def acknowledged(agent: Agent[Any], live: LiveState[Any], codec: Codec, result: Any) -> Any:
    """Return the answer of a session's turn after the note of its last interruption; any other result unchanged.

    An answer that is no text, or whose declared type does not take the note, is unchanged. If the agent has added the
    answer to the conversation, it has the note there, too.
    """
    note = live.run.history.saved.get(NOTE, b"").decode()
    if live.carried is None or not note or not agent.acknowledge_resume or type(result) is not str:
        return result
    answer = f"{note}\n\n{result}"
    try:
        if codec.encode("method", "finish", answer)[1] != answer:
            return result
    except UnserialisableResult:
        return result
    messages = live.state.messages
    if messages and messages[-1].role == "assistant" and messages[-1].content == result:
        messages[-1] = messages[-1].model_copy(update={"content": answer})
    return answer


def _note_of(notice: ResumeNotice, stopped: int | None) -> str:
    """Return the notice as a note in an answer, which is read after the work is done."""
    at = "" if stopped is None else f" at {shown_time(stopped)}"
    parts = [
        f"This work was interrupted, and resumed after {AFTER[notice.after]}{at}.",
        f"Goal: {quoted_line(notice.goal, _GOAL)}.",
        f"Restored: {_restored(notice.done, notice.steps, notice.messages)}.",
        f"Lost: {notice.lost}." if notice.lost else "",
        f"In doubt: {'; '.join(notice.in_doubt)}." if notice.in_doubt else "",
        f"It continued with {notice.upcoming}.",
    ]
    return f"({' '.join(part for part in parts if part)})"


def notice_of(resumption: Resumption, state: AgentState, gap: tuple[int, int] | None) -> ResumeNotice:
    """Return the notice of a run that resumes with this state. gap: numbers of the events that the log has lost."""
    closed = sum(step.status is StepStatus.DONE for step in state.plan) + state.archive.steps
    steps = len(state.plan) + state.archive.steps
    running = next((step for step in state.plan if step.status is StepStatus.RUNNING), None)
    following = running or next((step for step in state.plan if step.status is StepStatus.PENDING), None)
    left = () if resumption.handoff is None else resumption.handoff.dependencies.in_doubt[:_MOST_CALLS]
    doubt = [f"step {one.call} was started and has no result: its effect may have happened" for one in left]
    decide = [f"idempotency key {quoted_name(one.idempotency_key)}, {quoted_line(one.command)}" for one in left]
    if running is not None and running.risky and all(one.key != running.key for one in left):
        doubt.append(f"step {quoted_name(running.key)} was started and has no result: its effect may have happened")
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
        f"Restored: {_restored(closed, steps, len(state.messages))}.",
        f"Lost: {lost}." if lost else "",
        f"In doubt: {'; '.join(doubt)}." if doubt else "",
        f"To decide if it becomes a dead letter: {'; '.join(decide)}." if decide else "",
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


def _restored(done: int, steps: int, messages: int) -> str:
    return f"{done} of {steps} steps are done, {messages} message{'' if messages == 1 else 's'}"

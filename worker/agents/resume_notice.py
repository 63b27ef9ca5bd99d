"""Notice of a resume for the user: what was restored, what is lost or in doubt, what comes next. Facts of the state.

The notice is an event, and the handle of a session's turn has it. If the agent acknowledges it, the answer of the turn
starts with it, and the brief of a prompt has it until the first step after the resume is recorded.

Confirmation by a person that an agent may continue after an involuntary stop (`on_resume="ask"`).

The checkpoint has the question until a message or a correction arrives that is newer than the question, or its time has
passed; then it has the number of steps that were closed. A later stop asks again only if more steps are closed by then.
A correction to a dead letter confirms its replay: its sender knew of the stop, and decided to continue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import orjson

from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import message_after
from ...queues.errors import PayloadTooLarge
from ...queues.inbox import CORRECTION, last_message
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.wording import counted, iso_time
from ..context import Context
from ..durable.journal.chat import Message
from ..durable.journal.event import Event
from ..durable.journal.quoting import quoted_line, quoted_name
from ..durable.journal.resumption import PHRASES, After, Resumption
from ..durable.journal.run_events import Waited, WaitStarted
from ..durable.messaging import next_entries, unread_messages
from ..durable.steps.codec import Codec
from ..durable.steps.keys import forget_steps
from ..durable.stop_reasons import ParkReason
from ..errors import UnserialisableResult
from ..log import log_wait, logger
from .agent import Agent
from .journal.agent_events import MessageAdded, ResumeNotice
from .journal.state import AgentState, StepStatus
from .live_state import LiveState

_SCOPE: Final = "#resume"
"""Scope of the steps that `on_resume` calls."""

NOTE: Final = "#notice"
"""Checkpoint key of the last note for the user."""

_GOAL: Final = 120
"""Most characters of the goal in that note."""

_MAX_LENGTH: Final = 4_000
"""Most characters of what an agent says on a resume, and of its goal in the notice."""

_MAX_CALLS: Final = 5
"""Calls in flight that a notice names."""


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
    note = _note_of(notice, resumption)
    if said:
        text = note = said[:_MAX_LENGTH]
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


def _note_of(notice: ResumeNotice, resumption: Resumption) -> str:
    """Return the notice as a note in an answer, which is read after the work is done."""
    happened = "continued" if resumption.continues else "interrupted, and resumed"
    parts = [
        f"This work was {happened} after {resumption.dated_reason}.",
        f"Goal: {quoted_line(notice.goal, _GOAL)}.",
        f"Restored: {_restored(notice.done, notice.steps, notice.messages)}." if not resumption.continues else "",
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
    left = () if resumption.handoff is None else resumption.handoff.dependencies.in_doubt[:_MAX_CALLS]
    doubt = [f"step {one.call} was started and has no result: its effect may have happened" for one in left]
    decide = [f"idempotency key {quoted_name(one.idempotency_key)}, {quoted_line(one.command)}" for one in left]
    if running is not None and running.risky and all(one.key != running.key for one in left):
        doubt.append(f"step {quoted_name(running.key)} was started and has no result: its effect may have happened")
    calls = () if resumption.handoff is None else resumption.handoff.dependencies.in_flight[:_MAX_CALLS]
    doubt += [f"the call {quoted_line(one.call)} was in flight" for one in calls]
    lost = "" if gap is None else f"events {gap[0]} to {gap[1]} of its log"
    upcoming = "finish" if following is None else f"step {quoted_name(following.key)} {quoted_line(following.title)}"
    if running is not None:
        upcoming += ", which was cut off"
    if following is None and not steps:
        upcoming = "plan"
    parts = [
        f"Resumed after {resumption.dated_reason}.",
        f"Goal: {quoted_line(state.goal)}.",
        f"Restored: {_restored(closed, steps, len(state.messages))}." if not resumption.continues else "",
        f"Lost: {lost}." if lost else "",
        f"In doubt: {'; '.join(doubt)}." if doubt else "",
        f"To decide if it becomes a dead letter: {'; '.join(decide)}." if decide else "",
        f"Next: {upcoming}.",
    ]
    return ResumeNotice(
        goal=state.goal[:_MAX_LENGTH],
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
    return f"{done} of {steps} steps are done, {counted(messages, 'message')}"


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
        why = f"it resumes after {PHRASES[reason]}"
        seconds = min(agent.resume_timeout, MAX_SECONDS)
        asked = {"until": now + round(seconds * 1000), "after": last, "closed": _closed(live), "reason": reason}
        question = run.history.saved[_ASKED] = orjson.dumps(asked)
        waiting = run.next_entry(WaitStarted(what=_WAITS, why=why))
        await run.recorder.put(waiting, Entry(Kind.SAVED, _ASKED, question), wait=True)
    await run.park(ParkReason((asked["until"] - now) / 1000, _WAITS, (message_after(last),)))


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

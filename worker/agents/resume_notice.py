"""Note of a resume for the user: the text of the event `resumed`, or what the agent says in its own words.

The handle of a session's turn has it. If the agent acknowledges it, the answer of the turn starts with it, and the
brief of a prompt has it until the first step after the resume is recorded.

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
from ..context import Context
from ..durable.emitting import begin_unit, end_unit
from ..durable.journal.chat import Message
from ..durable.journal.resumption import PHRASES, After
from ..durable.journal.run_events import Waited, WaitStarted
from ..durable.messaging import next_entries, unread_messages
from ..durable.steps.codec import Codec
from ..durable.steps.keys import forget_steps
from ..durable.stop_reasons import ParkReason
from ..errors import UnserialisableResult
from ..log import log_wait, logger
from .agent import Agent
from .journal.agent_events import MessageAdded
from .journal.draft import CONFIRMATION
from .journal.state import AgentState, StepStatus
from .live_state import LiveState

_SCOPE: Final = "#resume"
"""Scope of the steps that `on_resume` calls."""

NOTE: Final = "#notice"
"""Checkpoint key of the last note for the user."""

_MAX_LENGTH: Final = 4_000
"""Most characters of what an agent says on a resume."""


async def notify_of_resume(
    agent: Agent[Any],
    ctx: Context,
    live: LiveState[Any],
    mark_changed: Callable[[], list[Entry]],
    *,
    parks: bool = False,
) -> None:
    """Note the text for the user about a resume, and store what the agent says of it.

    The event `resumed`, which the run starts with, has the text for the user. Its note is stored if a later run may
    need it: in a turn of a session, or if the agent `parks`. What the agent says is a message, so recorded steps may be
    called with other arguments: `mark_changed` lets them run again.

    A run that is killed before stores neither: the next one calls `on_resume` again, with its recorded steps.
    """
    run, resumption = live.run, live.run.resumption
    if resumption is None or not resumption.interrupted or not resumption.restored:
        return
    resumption = resumption.model_copy(update={"lost": live.gap})
    run.resume_from(resumption)
    if run.emits:
        await begin_unit(run, _SCOPE, within=True)
    with run.keys.inside(_SCOPE):
        said = await agent.on_resume(ctx, resumption)
    await run.check_stopped()
    if said is not None and not isinstance(said, str):
        raise TypeError(f"on_resume must return a text or None, got {said!r}")
    gone = end_unit(run, _SCOPE, within=True)[1] if run.emits else []
    gone += forget_steps(run.keys.under(f"{_SCOPE}/", run.history), run.history)
    note, entries = f"({resumption.notice()})", list[Entry]()
    if said:
        note = said[:_MAX_LENGTH]
        try:
            entries = next_entries(run, MessageAdded(message=Message(role="assistant", content=note)))
        except PayloadTooLarge as error:  # the agent must not fail at each resume because of it
            logger.bind(task=run.envelope.task, id=run.id).warning("could not store what on_resume returned: {}", error)
        else:
            gone += mark_changed()
    if agent.acknowledge_resume:
        run.resume_from(resumption.model_copy(update={"noted": note}))
    if (agent.acknowledge_resume and parks) or live.carried is not None:
        run.history.saved[NOTE] = note.encode("utf-8", "replace")
        gone.append(Entry(Kind.SAVED, NOTE, run.history.saved[NOTE]))
    if entries or gone:
        await run.recorder.put(*entries, *gone, wait=bool(entries))


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


OnResume: TypeAlias = Literal["ask"] | None

_ASKED: Final = "#asked"
"""Key of the question: `until`, `after` and `reason` while it is open, and `closed`."""

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
        _follow_wait(agent, live, asked.get("reason"))
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
        waiting = run.next_entry(WaitStarted(what=CONFIRMATION, why=why))
        await run.recorder.put(waiting, Entry(Kind.SAVED, _ASKED, question), wait=True)
    await run.park(ParkReason((asked["until"] - now) / 1000, CONFIRMATION, (message_after(last),)))


def _follow_wait(agent: Agent[Any], live: LiveState[Any], asked_after: After | None) -> None:
    """Let prompts say that the run follows a wait for a confirmation, and which note the user has."""
    run = live.run
    if run.resumption is not None:
        noted = run.history.saved.get(NOTE, b"").decode() if agent.acknowledge_resume else ""
        run.resume_from(run.resumption.model_copy(update={"asked_after": asked_after, "noted": noted}))


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

"""Sessions: conversations with agents that outlive the tasks of their turns.

The id of a session may be any text, so it is an input of the query or the body and no part of the path.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from ....queues.errors import PerdureError, SessionNotFound
from ....queues.keys import tenant_of
from ....queues.sessions.record import (
    SessionAddress,
    SessionMessage,
    SessionRecord,
    TurnId,
    list_sessions,
    read_history,
    read_session,
)
from ....queues.sessions.removal import forget_session
from ...agents.journal.history import CannotCorrect, corrected
from ...session import TurnHandle, correct_session, send_by_catalog, session_content, stored_state
from ..operation import MAX_LIMIT, Call, Download, Inputs, QueueText, ResultModel, operation
from ..problems import Problem, ProblemError
from ..users import Role

AgentText = Annotated[str, Field(min_length=1, max_length=256, description="Name of the agent.")]
SessionText = Annotated[
    str, Field(min_length=1, max_length=256, description="Id of the session, such as the name of a user.")
]


class SessionView(ResultModel):
    """A session. Times are milliseconds of Redis' clock since the epoch; 0 if its record cannot be read."""

    agent: str
    id: str
    app: str | None = Field(description="App whose workers run the turns; null for any.")
    queue: str
    status: Literal["idle", "running", "failed"]
    turns: int = Field(description="Turns that have ended.")
    sent: int = Field(description="Messages that were sent, which is the number of the last turn.")
    waiting: int = Field(description="Messages that wait for their turn.")
    first_at: int
    last_at: int
    state_bytes: int = Field(description="Size of the stored state.")
    task_id: str | None = Field(description="Task of the turn that runs or has failed.")
    failed: str | None = Field(description="Reason of the dead letter, or why the record cannot be read.")
    tenant: str | None = Field(description="Tenant that it belongs to; null for none.")


class SessionPage(ResultModel):
    """Sessions, the one with the latest activity first."""

    items: list[SessionView]
    next: str | None = Field(description="Cursor of the next page.")


class SessionCorrectionView(ResultModel):
    """A correction of the state that waits for the next turn. changes: new values by path."""

    id: str
    by: str
    changes: dict[str, Any]


class SessionDetail(ResultModel):
    """A session with the state that its last turn left."""

    session: SessionView
    state: dict[str, Any] | None = Field(description="Null before the first turn has ended.")
    corrections: list[SessionCorrectionView] = Field(description="Corrections that wait for the next turn.")
    problem: str | None = Field(description="Why state or corrections cannot be read.")


class MessageView(ResultModel):
    """A message of a session, or an answer of its agent. Its content is text, and no HTML."""

    turn: int
    role: Literal["user", "assistant", "system"]
    content: str
    sender: str
    at: int = Field(description="Milliseconds of Redis' clock since the epoch.")
    status: str = Field(description="answered, running, waiting, cancelled, or the reason of the dead letter.")
    task_id: str = Field(description="Task of the turn, which exists from its begin until a day after its end.")


class MessagePage(ResultModel):
    """Messages of a session in their order."""

    items: list[MessageView]
    next: int | None = Field(description="Value of `after` for the next page; null at the end.")


class ListSessions(Inputs):
    """Page of the sessions."""

    agent: str = Field("", max_length=256, description="Only sessions of this agent.")
    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Sessions of one page.")
    cursor: str = Field("", max_length=100, description="Cursor of an earlier page.")


class OneSession(Inputs):
    """A session of an agent."""

    agent: AgentText
    session: SessionText


class ReadMessages(OneSession):
    """Page of the messages of a session."""

    after: int = Field(0, ge=0, le=2**53, description="Number of the turn after which to start.")
    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Messages after which the page ends with their turn.")


class SendMessage(OneSession):
    """A message to a session."""

    text: str = Field(description="The message.")
    message_id: str | None = Field(
        None, min_length=1, max_length=200, description="Id of the message: one that is sent again is stored once."
    )
    inputs: dict[str, Any] | None = Field(
        None, description="Inputs of the agent. Default: those of the message before."
    )
    queue: QueueText | None = Field(
        None, description="Queue of the agent. Default: that of the session, or the one in the catalog."
    )
    app: str | None = Field(None, max_length=64, description="App of the agent. Default: that of the session, or any.")
    skip_failed: bool = Field(False, description="Pass over a turn that is a dead letter.")


class SentView(ResultModel):
    """The turn of a message."""

    turn: int
    task_id: str = Field(description="Task of the turn, which exists when the turns before it have ended.")
    queue: str


class WaitForTurn(OneSession):
    """A turn whose answer is awaited."""

    number: int = Field(ge=1, le=10**15, description="Number of the turn.")
    timeout: float = Field(0, ge=0, le=60, description="Seconds to wait for its end.")


class TurnView(ResultModel):
    """A turn of a session. answer: JSON data; null while it has not ended."""

    number: int
    task_id: str
    ended: bool
    answer: Any


class CorrectSession(OneSession):
    """A correction of the state of a session."""

    changes: dict[str, Any] = Field(
        min_length=1, description="New values by path, such as `context.city`, or by JSON pointer."
    )


class CorrectedView(ResultModel):
    """A stored correction. task_id: task of the turn that reads it. state: state of that task."""

    task_id: str
    state: str


class ForgottenView(ResultModel):
    """A session that was deleted, with the turns that had ended."""

    agent: str
    id: str
    turns: int


@operation("GET", "/sessions", roles=[Role.VIEWER])
async def list_all_sessions(call: Call, given: ListSessions) -> SessionPage:
    """List sessions, the one with the latest activity first."""
    try:
        found, following = await list_sessions(
            call.producer.gateway, call.producer.namespace, limit=given.limit, before=given.cursor, agent=given.agent
        )
    except ValueError as error:
        raise Problem(422, "invalid-input", str(error)) from None
    return SessionPage(items=[_view(record) for record in found], next=following or None)


@operation("GET", "/sessions/{agent}", roles=[Role.VIEWER])
async def show_session(call: Call, given: OneSession) -> SessionDetail:
    """Return a session with the state that its last turn left."""
    record = await _find(call, given)
    content = session_content(record)
    corrections = [SessionCorrectionView(**correction) for correction in content["corrections"]]
    return SessionDetail(
        session=_view(record), state=content["state"], corrections=corrections, problem=content.get("problem")
    )


@operation("GET", "/sessions/{agent}/messages", roles=[Role.VIEWER])
async def session_messages(call: Call, given: ReadMessages) -> MessagePage:
    """Return the messages and answers of a session in their order.

    Those of a turn are on one page. Messages that wait for their turn come last.
    """
    record = await _find(call, given)
    items: list[MessageView] = []
    async for message in read_history(call.producer.gateway, record.address, after=given.after):
        if len(items) >= given.limit and message.turn != items[-1].turn:
            return MessagePage(items=items, next=items[-1].turn)
        items.append(_message(record, message))
    return MessagePage(items=items, next=None)


@operation("POST", "/sessions/{agent}/messages", roles=[Role.OPERATOR], changes=True, status=201)
async def send_session_message(call: Call, given: SendMessage) -> SentView:
    """Send a message to a session.

    The first message makes the session. Messages are answered in their order, one at a time. The sender is the user.
    """
    _address(call, given)  # raises for a session of another tenant
    try:
        sent = await send_by_catalog(
            call.producer,
            given.agent,
            given.session,
            given.text,
            await call.producer.catalog(),
            queue=given.queue,
            app=given.app,
            sender=call.user.name,
            message_id=given.message_id,
            inputs=given.inputs,
            skip_failed=given.skip_failed,
        )
    except PerdureError:
        raise
    except ValueError as error:
        raise _invalid("session", error) from None
    return SentView(turn=sent.turn.number, task_id=str(sent.turn), queue=sent.queue)


@operation("GET", "/sessions/{agent}/turns/{number}", roles=[Role.VIEWER])
async def session_turn(call: Call, given: WaitForTurn) -> TurnView:
    """Return the answer of a turn, and wait for it at most `timeout` seconds.

    A turn that failed or was cancelled is a problem whose source is the task.
    """
    record = await _find(call, given)
    if given.number > record.sent:
        raise Problem(
            404, "turn-not-found", f"session {record.name} has {record.sent} turns; number must be one of them"
        )
    turn = TurnId(record.address.digest, str(record.born), given.number)
    answer, ended = None, True
    try:
        answer = await TurnHandle(call.producer, record.address, turn).result(given.timeout)
    except TimeoutError:
        ended = False
    return TurnView(number=given.number, task_id=str(turn), ended=ended, answer=answer)


@operation("POST", "/sessions/{agent}/corrections", roles=[Role.OPERATOR], changes=True)
async def correct_session_state(call: Call, given: CorrectSession) -> CorrectedView:
    """Correct the state of a session.

    While no turn runs, the session stores the correction for the next one. A turn applies all values, or none, before
    its next step.
    """

    async def read() -> SessionRecord:
        return await _find(call, given)

    def check(record: SessionRecord) -> None:
        if (stored := stored_state(record)) is not None:
            corrected(stored, given.changes)

    try:
        sent = await correct_session(call.producer, read, given.changes, check, by=call.user.name)
    except CannotCorrect as error:
        raise _invalid("changes", error) from None
    except PerdureError:
        raise
    except ValueError as error:
        raise _invalid("changes", error) from None
    return CorrectedView(task_id=sent.task_id, state=str(sent.state))


@operation("POST", "/sessions/{agent}/forget", roles=[Role.ADMIN], changes=True)
async def forget_one_session(call: Call, given: OneSession) -> ForgottenView:
    """Delete a session with its state, its history and the tasks of its turns.

    A running turn is stopped, and dead letters are deleted. Memories, and files in the artifact store, are kept.
    """
    gateway = call.producer.gateway
    try:
        record = await _find(call, given)
    except Problem:
        await forget_session(gateway, _address(call, given))  # what an earlier call has left
        raise
    if not await forget_session(gateway, record.address, born=str(record.born)):
        raise Problem(404, "session-not-found", f"session {record.name} was deleted meanwhile")
    return ForgottenView(agent=record.agent, id=record.id, turns=record.ended)


@operation("GET", "/sessions/{agent}/export", roles=[Role.VIEWER])
async def export_session(call: Call, given: OneSession) -> Download:
    """Return a session as JSON lines: first record and state, then its messages in order."""
    record = await _find(call, given)

    async def lines() -> AsyncGenerator[bytes]:
        yield orjson.dumps(record.summary() | session_content(record)) + b"\n"
        async for message in read_history(call.producer.gateway, record.address):
            yield orjson.dumps(message.summary()) + b"\n"

    return Download(f"{record.agent}-{record.id}.jsonl", lines(), "application/x-ndjson")


async def _find(call: Call, given: OneSession) -> SessionRecord:
    found = await read_session(call.producer.gateway, _address(call, given))
    if found is None:
        raise SessionNotFound(f"{given.session!r} of agent {given.agent!r}")
    return found


def _address(call: Call, given: OneSession) -> SessionAddress:
    tenant = call.producer.namespace.tenant
    if tenant is not None and tenant_of(given.session) not in (None, tenant):
        raise SessionNotFound(f"{given.session!r} of agent {given.agent!r}")
    try:
        return SessionAddress.of(call.producer.namespace, given.agent, given.session)
    except ValueError as error:
        raise _invalid("session", error) from None


def _invalid(where: str, error: Exception) -> Problem:
    return Problem(422, "invalid-input", str(error), fields=[ProblemError(where=where, message=str(error))])


def _view(record: SessionRecord) -> SessionView:
    running = record.turn > record.ended
    return SessionView(
        agent=record.agent,
        id=record.id,
        app=record.app,
        queue=record.queue,
        status=record.status,
        turns=record.ended,
        sent=record.sent,
        waiting=record.sent - record.turn,
        first_at=record.born,
        last_at=record.at,
        state_bytes=record.state_bytes,
        task_id=record.task_id(record.turn) if running else None,
        failed=record.shown_failed,
        tenant=record.tenant,
    )


def _message(record: SessionRecord, message: SessionMessage) -> MessageView:
    return MessageView(
        turn=message.turn,
        role=message.role,
        content=message.content,
        sender=message.sender,
        at=message.at,
        status=message.status,
        task_id=record.task_id(message.turn),
    )

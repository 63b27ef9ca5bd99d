"""Sessions of agents as conversations: messages, answers, the running turn, corrections; and acts on a session."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final
from urllib.parse import quote

from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from ...web.operations.sessions import (
    ListSessions,
    MessageView,
    OneSession,
    ReadMessages,
    SessionDetail,
    correct_session_state,
    export_session,
    forget_one_session,
    list_all_sessions,
    send_session_message,
    session_messages,
    show_session,
)
from ...web.problems import Problem
from ..actions import Action, FormField, action
from ..page import Html, PageRequest, page

_TURNS: Final = 25
"""Turns of one page of a conversation."""


@page("/sessions", title="Sessions", nav="Sessions")
async def sessions(request: PageRequest) -> Html:
    """List sessions, the one with the latest activity first."""
    found = await list_all_sessions(request.call, request.inputs(ListSessions))
    return request.render("sessions.html", found=found)


@page("/sessions/{agent}", title="Session", nav="Sessions")
async def session(request: PageRequest) -> Html:
    """Show a session as a conversation: its last turns, or those after one."""
    given = _session(request)
    found = await show_session(request.call, given)
    sent = found.session.sent
    after = _after(request)
    first = max(0, sent - _TURNS) if after is None else min(after, sent)
    read = await session_messages(
        request.call, ReadMessages(agent=given.agent, session=given.session, after=first, limit=2 * _TURNS)
    )
    turns: dict[int, list[MessageView]] = {}
    for message in read.items:
        if message.turn <= first + _TURNS:
            turns.setdefault(message.turn, []).append(message)
    last = first + _TURNS
    return request.render(
        "session.html",
        found=found,
        turns=turns,
        earlier=max(0, first - _TURNS) if first else None,
        later=last if last < sent else None,
        first=first,
    )


@page("/sessions/{agent}/export", title="Export a session", nav="Sessions", live=False)
async def export(request: PageRequest) -> Response:
    """Send a session as a file of JSON lines."""
    found = await export_session(request.call, _session(request))

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(found.chunks) as chunks:
            async for chunk in chunks:
                yield chunk

    named = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.name, safe='')}"}
    return StreamingResponse(lines(), headers=named, media_type=found.media_type)


@action("/sessions/{agent}/send", send_session_message, title="Send a message to a session", nav="Sessions")
async def send_to_session(request: PageRequest) -> Action:
    """Send a message to a session, in the name of the user."""
    given = _session(request)
    found = await show_session(request.call, given)
    text = f"The message is sent to session {given.session} of agent {given.agent} in the name of {request.user.name}."
    fields = [FormField("text", "Message", "area", required=True)]
    if found.session.status == "failed":
        text += f" Turn {found.session.turns + 1} is a dead letter: the session waits until it is replayed."
        fields.append(FormField("skip_failed", "Pass over the turn that is a dead letter", "checkbox", value=False))
    elif found.session.status == "running":
        text += " A turn is running; the agent answers the message after it."
    fields.append(FormField("message_id", "Id", "hidden", value=f"page-{secrets.token_urlsafe(9)}"))
    return Action(
        text,
        button="Send",
        inputs=given.model_dump(),
        fields=fields,
        then=_path(request, given),
        done="The message is sent.",
    )


@action("/sessions/{agent}/correct", correct_session_state, title="Correct the state of a session", nav="Sessions")
async def correct_session_page(request: PageRequest) -> Action:
    """Correct the state of a session."""
    given = _session(request)
    found = await show_session(request.call, given)
    when = "before its next step" if found.session.status == "running" else "when the next turn begins"
    return Action(
        f"The agent {given.agent} reads the new values of session {given.session} {when}: all of them, or none.",
        button="Correct",
        inputs=given.model_dump(),
        fields=[
            FormField(
                "changes",
                "New values",
                "json",
                required=True,
                help='JSON object of new values by path, such as {"context.city": "Paris"}; a name with a dot needs a '
                "JSON pointer: /context/a.b",
            )
        ],
        then=_path(request, given),
        done="The correction is stored.",
        template="correct_session.html",
        values={"state": found.state},
    )


@action("/sessions/{agent}/forget", forget_one_session, title="Forget a session", nav="Sessions")
async def forget_session_page(request: PageRequest) -> Action:
    """Delete a session."""
    given = _session(request)
    found = await show_session(request.call, given)
    return Action(
        f"Session {given.session} of agent {given.agent} is deleted: its state, {_messages(found)} and the tasks of "
        "its turns. A turn that runs is stopped. It cannot be restored; export it first to keep it. Memories, and "
        "files in the artifact store, are kept.",
        button="Forget",
        inputs=given.model_dump(),
        then=request.url("sessions"),
        done=f"Session {given.session} of agent {given.agent} is deleted.",
        back=_path(request, given),
        destructive=True,
    )


def _messages(found: SessionDetail) -> str:
    sent = found.session.sent
    return "its message" if sent == 1 else f"its {sent} messages"


def _session(request: PageRequest) -> OneSession:
    """Return the session that path and query name. Raises `Problem` if they name none."""
    try:
        return OneSession(agent=request.path["agent"], session=request.query.get("session", [""])[-1])
    except ValidationError:
        raise Problem(
            404, "session-not-found", "the address must name a session, such as ?session=user-42; open it from the list"
        ) from None


def _path(request: PageRequest, given: OneSession) -> str:
    return request.url("session", agent=given.agent, query={"session": given.session})


def _after(request: PageRequest) -> int | None:
    """Return the number of the turn after which the page starts; None for the last turns."""
    text = request.query.get("after", [""])[-1]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

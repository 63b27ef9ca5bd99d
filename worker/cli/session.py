"""`perdure session`: list, show, correct, export and forget the sessions of agents, and send messages to them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

import orjson
import typer

from ...queues.errors import UnreadableRecord
from ...queues.producer import Producer
from ...queues.records import State
from ...queues.sessions.record import (
    SessionAddress,
    SessionRecord,
    TurnId,
    list_sessions,
    read_history,
    read_session,
)
from ...queues.sessions.removal import forget_session
from ..agents.journal.history import CannotCorrect, corrected
from ..session import TurnHandle, correct_session, send_by_catalog, session_content, stored_state
from .support.connection import connected_as_tenant, warn_unserved, where
from .support.errors import Failed, Misuse, misuse_of
from .support.options import (
    Assured,
    By,
    OutputFile,
    confirm_deletion,
    in_duration,
    login,
    open_output,
    read_app,
    read_object,
)
from .support.output import Column, StderrText, Styled, Time, note, print_json_lines, print_text
from .support.runner import Listing, Output
from .task.correct import Fields, read_fields

app = typer.Typer(no_args_is_help=True, add_completion=False)

AgentName = Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="Id of the session, such as the name of a user.")]


@app.callback()
def session() -> None:
    """List sessions of agents, talk in them, correct, export and forget them.

    A session is a conversation with an agent that outlives the tasks of its
    turns.
    """


@app.command("list")
@connected_as_tenant
async def list_(
    producer: Producer,
    *,
    agent: Annotated[str, typer.Option(metavar="NAME", help="Only sessions of this agent.")] = "",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N sessions.")] = 100,
    cursor: Annotated[
        str, typer.Option(metavar="CURSOR", help="Continue the list after the page that ended with this cursor.")
    ] = "",
) -> Listing:
    """List sessions, the one with the latest activity first.

    If there are more, the last line on stderr has the cursor of the next
    page.

    Example: perdure session list --agent assistant
    """
    with misuse_of("--cursor"):
        found, following = await list_sessions(
            producer.gateway, producer.namespace, limit=limit, before=cursor, agent=agent
        )
    hint = (await producer.catalog()).hint(agent) if agent and not found else ""
    return Listing(
        _COLUMNS,
        found,
        empty=f"no sessions{f' of agent {agent!r}' if agent else ''} {where(producer)}{hint}",
        notes=[
            f"there may be more sessions: continue with --cursor {following}" if following else None,
            _NOT_ENCRYPTED if found and producer.gateway.encryptor.required else None,
        ],
    )


_NOT_ENCRYPTED: Final = (
    "encryption is required, and of these columns only agent and id are checked: the others are plain fields, which "
    "any client of Redis may have written"
)


_STYLES: Final = {"idle": "green", "running": "yellow", "failed": "red"}

_COLUMNS: Final[Sequence[Column[SessionRecord]]] = (
    Column("agent", lambda session: session.agent, least=8),
    Column("id", lambda session: session.id, least=12),
    Column("status", lambda session: Styled(session.status, _STYLES[session.status])),
    Column("turns", lambda session: session.ended, right=True),
    Column("waiting", lambda session: session.sent - session.turn, right=True),
    Column("state", lambda session: f"{session.state_bytes:,} B", right=True),
    Column("last", lambda session: Time(session.at or None)),
    Column("app", lambda session: session.app or "", wide=True),
    Column("queue", lambda session: session.queue, wide=True),
    Column("first", lambda session: Time(session.born or None), wide=True),
    Column("detail", lambda session: session.shown_failed or "", least=6),
)


async def _find(producer: Producer, agent: str, session_id: str) -> SessionRecord:
    found = await read_session(producer.gateway, _address(producer, agent, session_id))
    if found is None:
        hint = (await producer.catalog()).hint(agent) or "; 'perdure session list' lists the sessions"
        raise Failed(f"no session {session_id!r} of agent {agent!r} {where(producer)}{hint}")
    return found


def _address(producer: Producer, agent: str, session_id: str) -> SessionAddress:
    try:
        return SessionAddress.of(producer.namespace, agent, session_id)
    except ValueError as error:
        raise Misuse(str(error)) from None


@app.command()
@connected_as_tenant
async def show(producer: Producer, agent: AgentName, session_id: SessionId) -> Output:
    """Show a session: status, turns, and the state that its last turn left.

    Example: perdure session show assistant user-42
    """
    record = await _find(producer, agent, session_id)
    content = session_content(record)
    if problem := content.get("problem"):
        note(problem)
    state = content["state"]
    return Output(
        record.summary() | content,
        {name.replace("_", " "): str(value) for name, value in record.summary().items()},
        None if state is None else orjson.dumps(state, option=orjson.OPT_INDENT_2).decode(),
        *(_waiting(correction) for correction in content["corrections"]),
    )


def _waiting(correction: Mapping[str, Any]) -> StderrText:
    by = f" by {correction['by']}" if correction["by"] else ""
    return StderrText(f"the next turn applies a correction{by}: {orjson.dumps(correction['changes']).decode()}")


@app.command()
@connected_as_tenant
async def send(
    producer: Producer,
    agent: AgentName,
    session_id: SessionId,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Message to send; - for stdin.")],
    *,
    sender: Annotated[str, typer.Option("--from", metavar="NAME", help="Name of the sender.")] = "",
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the message. A second message with this id is ignored."),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Inputs of the agent. Default: those of the message before.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="Queue of the agent. Default: that of the session, or the one in the catalog."
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(metavar="NAME", parser=read_app, help="App of the agent. Default: that of the session, or any."),
    ] = None,
    skip_failed: Annotated[bool, typer.Option("--skip-failed", help="Pass over a turn that is a dead letter.")] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Print the id of the turn's task, and do not wait for the answer.")
    ] = False,
    timeout: Annotated[float | None, in_duration("Time to wait for the answer. Default: no limit.")] = None,
) -> Output:
    """Send a message to a session, and print the answer of the agent.

    The first message creates the session. Messages are answered in order,
    one at a time.

    Example: perdure session send assistant user-42 "Where is my parcel?"
    """
    address = _address(producer, agent, session_id)
    turn, served, owner = await send_by_catalog(
        producer,
        agent,
        session_id,
        sys.stdin.read().rstrip("\n") if text == "-" else text,
        await producer.catalog(),
        queue=queue,
        app=app,
        sender=sender,
        message_id=message_id,
        inputs=_inputs(inputs),
        skip_failed=skip_failed,
    )
    await warn_unserved(producer, {served: set()}, app=owner)
    sent = {"turn": turn.number, "task": str(turn)}
    if no_wait:
        return Output(sent, str(turn))
    try:
        answer = await TurnHandle(producer, address, TurnId(turn.digest, turn.born, turn.number)).result(timeout)
    except TimeoutError as error:
        raise Failed(str(error)) from None
    return Output(sent | {"answer": answer}, answer if isinstance(answer, str) else orjson.dumps(answer).decode())


def _inputs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    with misuse_of("--inputs"):
        return read_object(text)


@app.command()
@connected_as_tenant
async def correct(
    producer: Producer,
    agent: AgentName,
    session_id: SessionId,
    *,
    field: Fields = None,
    by: By = None,
) -> Output:
    """Correct the state of a session, and print the id of the turn's task.

    While no turn runs, the session stores the correction for the next one. The
    turn applies all values, or none, before its next step; the event
    'corrected' or 'correction_refused' of its task says which. PATH has dots
    between names and indexes; for a name with a dot write a JSON pointer:
    /context/a.b

    Example: perdure session correct assistant user-42 --field context.city=Paris
    """
    if not (changes := read_fields(field)):
        raise Misuse("give at least one --field PATH=VALUE")

    def check(record: SessionRecord) -> None:
        if (stored := stored_state(record)) is not None:
            with misuse_of("--field", CannotCorrect):
                corrected(stored, changes)

    read = partial(_find, producer, agent, session_id)
    sent = await correct_session(producer, read, changes, check, by=login() if by is None else by)
    when = {
        State.WAITING: "the next turn reads it when it begins",
        State.DEAD: f"the turn is a dead letter; to resume it: perdure dlq replay {sent.task_id}",
    }.get(sent.state, "the turn reads it before its next step")
    return Output(
        {"task": sent.task_id, "state": sent.state, "changes": changes},
        sent.task_id,
        notes=[f"stored the correction of session {session_id!r} of agent {agent!r}; {when}"],
    )


@app.command()
@connected_as_tenant
async def export(producer: Producer, agent: AgentName, session_id: SessionId, *, output: OutputFile = None) -> None:
    """Print a session as JSON lines: first record and state, then its messages in order.

    Example: perdure session export assistant user-42 -o user-42.jsonl
    """
    record = await _find(producer, agent, session_id)
    content = session_content(record)
    with open_output(output) as file:
        print_json_lines([record.summary() | content], file)
        async for message in read_history(producer.gateway, record.address):
            print_json_lines([message.summary()], file)
    if problem := content.get("problem"):
        raise Failed(f"{problem}; it was not exported, the messages were")


@app.command()
@connected_as_tenant
async def forget(
    producer: Producer,
    agent: AgentName,
    session_id: SessionId,
    *,
    yes: Assured = False,
) -> None:
    """Delete a session with its state, its history and the tasks of its turns.

    A running turn is stopped, and dead letters are deleted, too. 'perdure
    session export' saves the session first.

    Example: perdure session forget assistant user-42
    """
    address = _address(producer, agent, session_id)
    try:
        record = await _find(producer, agent, session_id)
    except Failed:
        await forget_session(producer.gateway, address)  # what an earlier call has left
        raise
    except UnreadableRecord as error:
        note(str(error))
        if not yes:
            confirm_deletion(f"session {session_id!r} of agent {agent!r}", "forget deletes the session permanently")
        await forget_session(producer.gateway, address)
        print_text(session_id)
        return
    if not yes:
        what = f"session {record.name} with {record.ended} turns"
        confirm_deletion(what, "forget deletes the session permanently")
    if not await forget_session(producer.gateway, record.address, born=str(record.born)):
        raise Failed(f"session {record.name} was deleted meanwhile")
    note(
        "memories, and what tasks have put into the artifact store, are kept: 'perdure memory forget --all --subject "
        "SUBJECT' deletes the memories about a subject, 'perdure artifacts gc' the files that nothing links"
    )
    print_text(record.id)

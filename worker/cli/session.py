"""`perdure session`: list, show, correct, export and forget the sessions of agents, and send messages to them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import orjson
import typer

from ...queues.errors import DecryptionError, KeyMissing
from ...queues.producer import Producer
from ...queues.records import State
from ...queues.sessions.record import (
    SessionAddress,
    SessionMessage,
    SessionRecord,
    TurnId,
    list_sessions,
    read_history,
    read_session,
)
from ...queues.sessions.removal import forget_session
from ...queues.sessions.turns import send_to_session
from ..errors import BadSnapshot
from ..journal.history import CannotCorrect, corrected
from ..session import TurnHandle, correct_session, stored_state
from .support.connection import connected, redis_now, warn_unserved
from .support.errors import Failed, Misuse
from .support.options import OutputFile, open_output, read_app
from .support.output import (
    AsJson,
    Column,
    Wide,
    ago,
    confirm,
    note,
    print_data,
    print_fields,
    print_json,
    print_json_lines,
    print_list,
    print_text,
    state_text,
)
from .task.correct import Fields, read_fields
from .task.inbox import login

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
@connected
async def list_(
    producer: Producer,
    *,
    agent: Annotated[str, typer.Option(metavar="NAME", help="Only sessions of this agent.")] = "",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N sessions.")] = 100,
    cursor: Annotated[
        str, typer.Option(metavar="CURSOR", help="Continue the list after the page that ended with this cursor.")
    ] = "",
    wide: Wide = False,
    json: AsJson = False,
) -> None:
    """List sessions, the one with the latest activity first.

    If there are more, the last line on stderr has the cursor of the next
    page.

    Example: perdure session list --agent assistant
    """
    try:
        found, following = await list_sessions(
            producer.gateway, producer.namespace, limit=limit, before=cursor, agent=agent
        )
    except ValueError as refused:
        raise Misuse(f"--cursor: {refused}") from None
    if json:
        print_json([one.summary() for one in found])
    elif found:
        print_list(_columns(await redis_now(producer)), found, wide=wide)
    else:
        whose = f" of agent {agent!r}" if agent else ""
        hint = (await producer.catalog()).hint(agent) if agent else ""
        note(f"no sessions{whose} in namespace {producer.namespace.name!r} on {producer.address.shown}{hint}")
    if following:
        note(f"there may be more sessions: continue with --cursor {following}")


def _columns(now: int) -> Sequence[Column[SessionRecord]]:
    since = ago(now, whole=True)
    states = {"idle": "succeeded", "running": "running", "failed": "dead"}
    return (
        Column("agent", lambda one: one.agent, least=8),
        Column("id", lambda one: one.id, least=12),
        Column("status", lambda one: _styled(one.status, states[one.status])),
        Column("turns", lambda one: str(one.ended), right=True),
        Column("waiting", lambda one: str(one.sent - one.turn), right=True),
        Column("state", lambda one: f"{one.state_bytes:,} B", right=True),
        Column("last", lambda one: since(one.at or None)),
        Column("app", lambda one: one.app or "", wide=True),
        Column("queue", lambda one: one.queue, wide=True),
        Column("first", lambda one: since(one.born or None), wide=True),
        Column("detail", lambda one: one.failed or "", least=6),
    )


def _styled(text: str, like: str) -> Any:
    shown = state_text(like)
    shown.plain = text
    return shown


async def _find(producer: Producer, agent: str, session_id: str) -> SessionRecord:
    found = await read_session(producer.gateway, _address(producer, agent, session_id))
    if found is None:
        hint = (await producer.catalog()).hint(agent) or "; 'perdure session list' lists the sessions"
        raise Failed(
            f"no session {session_id!r} of agent {agent!r} in namespace {producer.namespace.name!r} on "
            f"{producer.address.shown}{hint}"
        )
    return found


def _address(producer: Producer, agent: str, session_id: str) -> SessionAddress:
    try:
        return SessionAddress.of(producer.namespace, agent, session_id)
    except ValueError as error:
        raise Misuse(str(error)) from None


@app.command()
@connected
async def show(producer: Producer, agent: AgentName, session_id: SessionId, *, json: AsJson = False) -> None:
    """Show a session: status, turns, and the state that its last turn left.

    Example: perdure session show assistant user-42
    """
    record = await _find(producer, agent, session_id)
    content = _content(record)
    if problem := content.get("problem"):
        note(problem)
    if json:
        print_json(record.summary() | content)
        return
    print_fields({name.replace("_", " "): str(value) for name, value in record.summary().items()})
    if content["state"] is not None:
        print_text(orjson.dumps(content["state"], option=orjson.OPT_INDENT_2).decode())
    for one in content["corrections"]:
        by = f" by {one['by']}" if one["by"] else ""
        note(f"the next turn applies a correction{by}: {orjson.dumps(one['changes']).decode()}")


def _content(record: SessionRecord) -> dict[str, Any]:
    """Return the state that the last turn left, and the corrections that wait for the next one.

    If one of them cannot be read, it is missing, and `problem` says why.
    """
    content: dict[str, Any] = {"state": None, "corrections": []}
    try:
        content["state"] = stored_state(record)
        content["corrections"] = [asdict(one) for one in record.waiting_corrections()]
    except KeyMissing as error:  # a worker may have the key
        content["problem"] = str(error)
    except (BadSnapshot, DecryptionError) as error:
        why = error.problem if isinstance(error, BadSnapshot) else error
        forget = shlex.join(["perdure", "session", "forget", record.agent, record.id])
        content["problem"] = (
            f"could not read the state of session {record.name}: {why}; a worker that cannot read it fails the turn; "
            f"'{forget}' deletes the session"
        )
    return content


@app.command()
@connected
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
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds to wait for the answer. Default: no limit.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Send a message to a session, and print the answer of the agent.

    The first message creates the session. Messages are answered in order,
    one at a time.

    Example: perdure session send assistant user-42 "Where is my parcel?"
    """
    address = _address(producer, agent, session_id)
    given = _inputs(inputs)
    found = await read_session(producer.gateway, address)
    if queue is None and found is None:
        queue = (await producer.catalog()).find(agent, app=app).queue
    queue = queue or (found.queue if found is not None else "")
    if given is not None or found is None:
        owner = app or (None if found is None else found.app)
        for listed in (await producer.catalog()).named(agent, owner):
            listed.check(orjson.dumps((given or {}) | {"goal": ""}))
    turn = await send_to_session(
        producer.gateway,
        producer.namespace,
        agent,
        session_id,
        sys.stdin.read().rstrip("\n") if text == "-" else text,
        queue=queue,
        app=app,
        sender=sender,
        message_id=message_id,
        inputs=None if given is None else (orjson.dumps(given), ()),
        skip_failed=skip_failed,
        limit=producer.payload_limit,
    )
    await warn_unserved(producer, {queue: set()}, app=app or (None if found is None else found.app))
    if no_wait:
        if json:
            print_json({"turn": turn.number, "task": str(turn)})
        else:
            print_data(str(turn))
        return
    try:
        answer = await TurnHandle(producer, address, TurnId(turn.digest, turn.born, turn.number)).result(timeout)
    except TimeoutError as error:
        raise Failed(str(error)) from None
    if json:
        print_json({"turn": turn.number, "task": str(turn), "answer": answer})
    else:
        print_text(answer if isinstance(answer, str) else orjson.dumps(answer).decode())


def _inputs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Misuse(f"--inputs: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Misuse(f'--inputs must be a JSON object, such as {{"language": "no"}}, got {text}')
    return found


@app.command()
@connected
async def correct(
    producer: Producer,
    agent: AgentName,
    session_id: SessionId,
    *,
    field: Fields = None,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Your name. Default: your login.")] = None,
    json: AsJson = False,
) -> None:
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
            try:
                corrected(stored, changes)
            except CannotCorrect as error:
                raise Misuse(f"--field {error}") from None

    read = partial(_find, producer, agent, session_id)
    sent = await correct_session(producer, read, changes, check, by=login() if by is None else by)
    if json:
        print_json({"task": sent.task_id, "state": sent.state, "changes": changes})
    else:
        print_data(sent.task_id)
    when = {
        State.WAITING: "the next turn reads it when it begins",
        State.DEAD: f"the turn is a dead letter; to resume it: perdure dlq replay {sent.task_id}",
    }.get(sent.state, "the turn reads it before its next step")
    note(f"stored the correction of session {session_id!r} of agent {agent!r}; {when}")


@app.command()
@connected
async def export(producer: Producer, agent: AgentName, session_id: SessionId, *, output: OutputFile = None) -> None:
    """Print a session as JSON lines: first record and state, then its messages in order.

    Example: perdure session export assistant user-42 -o user-42.jsonl
    """
    record = await _find(producer, agent, session_id)
    content = _content(record)
    with open_output(output) as file:
        print_json_lines([record.summary() | content], file)
        page: list[SessionMessage] = []
        async for message in read_history(producer.gateway, record.address):
            page.append(message)
            if len(page) == _PAGE:
                print_json_lines([message.summary() for message in page], file)
                page.clear()
        if page:
            print_json_lines([message.summary() for message in page], file)
    if problem := content.get("problem"):
        raise Failed(f"{problem}; it was not exported, the messages were")


_PAGE = 500
"""Messages that are printed at once."""


@app.command()
@connected
async def forget(
    producer: Producer,
    agent: AgentName,
    session_id: SessionId,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a session with its state, its history and the tasks of its turns.

    A running turn is stopped, and dead letters are deleted, too. 'perdure
    session export' saves the session first.

    Example: perdure session forget assistant user-42
    """
    try:
        record = await _find(producer, agent, session_id)
    except Failed:
        await forget_session(producer.gateway, _address(producer, agent, session_id))  # what an earlier call has left
        raise
    if not yes:
        if not sys.stdin.isatty():
            raise Misuse("forget deletes the session permanently: add --yes, because stdin is no terminal")
        if not confirm(f"Permanently delete session {record.name} with {record.ended} turns?"):
            raise Failed("nothing was deleted")
    if not await forget_session(producer.gateway, record.address, born=str(record.born)):
        raise Failed(f"session {record.name} was deleted meanwhile")
    note(
        "memories, and what tasks have put into the artifact store, are kept: 'perdure memory forget --all --subject "
        "SUBJECT' deletes the memories about a subject, 'perdure artifacts gc' the files that nothing links"
    )
    print_data(record.id)

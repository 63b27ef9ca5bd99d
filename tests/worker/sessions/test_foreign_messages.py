"""Messages of sessions that another program wrote: their turn ends without an answer, and the session continues."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Settings, TaskFailed
from perdure.queues.errors import NoKey, SessionFull, UnreadableRecord
from perdure.queues.security.encryption import Encryptor
from perdure.queues.security.keyring import generate_key
from perdure.queues.sessions import turns
from perdure.queues.sessions.record import SessionAddress, TurnId, list_sessions, message_field
from perdure.queues.sessions.turns import check_session
from perdure.worker.session import Session

from tests.support.workers import bounded, redis_command, running_worker, work_off

pytestmark = pytest.mark.integration

KEY = generate_key()
GOOD: dict[str, Any] = {"sender": "ada", "content": "hello"}
DATA = {
    "not JSON": b"\xff{",
    "empty": b"",
    "a list": b"[]",
    "no content": b'{"sender": ""}',
    "a number": orjson.dumps(GOOD | {"content": 7}),
    "headers of another shape": orjson.dumps(GOOD | {"headers": {"a": 1}}),
    "unknown fields": orjson.dumps(GOOD | {"approved": True}),
    "a cut cipher": b"\xc1\x01" + b"x" * 60,
}


class Echo(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="listen", title="listen")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return "heard"

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return f"echo {state.goal}"


def make_app(settings: Settings) -> App:
    app = App("talk", settings=settings)
    app.agent(Echo, name="echo")

    @app.task
    async def where(ctx: Context) -> str:
        return "answer of another task"

    return app


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with make_app(settings) as app:
        yield app


@pytest.fixture
async def sealed(settings: Settings) -> AsyncIterator[App]:
    encryption = {"encryption_keys": KEY, "encryption_required": True}
    async with make_app(Settings(**settings.model_dump(exclude_unset=True) | encryption)) as app:
        yield app


def session_of(app: App) -> tuple[Session[Any], SessionAddress]:
    return app.session(Echo, "u1"), SessionAddress.of(app.producer.namespace, "echo", "u1")


async def claim_foreign(app: App, address: SessionAddress, stored: bytes) -> TurnId:
    """Store bytes as the message of the next turn, and claim it, as a raw client does."""
    born, sent = await redis_command(app, "HMGET", address.session, "born", "sent")
    number = int(sent) + 1
    fields = (f"m:{number}", stored, "sent", number, "turn", number, "claimed", 1)
    await redis_command(app, "HSET", address.session, *fields)
    await redis_command(app, "ZADD", address.partition.due, 1, address.digest)
    return TurnId(address.digest, born.decode(), number)


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in DATA.items()])
async def test_a_turn_whose_message_cannot_be_read_ends_and_the_next_one_runs(app: App, data: bytes) -> None:
    session, address = session_of(app)
    async with running_worker(app):
        assert await bounded((await session.send("one")).result()) == "echo one"
        await claim_foreign(app, address, b"1 " + data)
        await check_session(app.producer.gateway, address)
        assert await bounded((await session.send("three")).result()) == "echo three"
    (second,) = [message async for message in session.history() if message.turn == 2]
    assert second.status.startswith("refused: could not de")
    assert second.content.startswith("(could not de")
    record = await session.record()
    assert (record.status, record.ended) == ("idle", 3)


async def test_a_turn_of_a_sender_without_the_key_names_that_reason(app: App, sealed: App) -> None:
    first, _ = session_of(sealed)
    turn = await session_of(app)[0].send("plain")
    async with running_worker(sealed):
        with pytest.raises(TaskFailed, match=r"refused: .*PERDURE_ENCRYPTION_REQUIRED is set"):
            await bounded(turn.result())
        assert await bounded((await first.send("sealed")).result()) == "echo sealed"
        with pytest.raises(NoKey, match=r"message to session 'u1' of agent 'echo'.* PERDURE_ENCRYPTION_KEYS"):
            await session_of(app)[0].send("plain again")


async def test_a_message_that_changes_after_its_task_was_stored_ends_its_turn(app: App) -> None:
    session, address = session_of(app)
    first = await session.send("one")
    second = await session.send("two")
    await redis_command(app, "HSET", address.session, "m:1", "1 {")
    async with running_worker(app):
        assert await bounded(second.result()) == "echo two"
        with pytest.raises(TaskFailed, match="refused: could not decode the message"):
            await bounded(first.result())


async def test_many_turns_that_cannot_be_read_end_in_one_look(app: App) -> None:
    session, address = session_of(app)
    await session.send("one")
    await work_off(app)
    await claim_foreign(app, address, b"1 {")
    for number in range(3, 400):
        await redis_command(app, "HSET", address.session, f"m:{number}", "1 {", "sent", number)
    await check_session(app.producer.gateway, address)
    record = await session.record()
    assert (record.status, record.ended) == ("idle", 399)


async def test_a_message_with_a_key_that_no_process_has_waits_and_then_ends(
    sealed: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, address = session_of(sealed)
    await session.send("one")
    await work_off(sealed)
    record, gateway = await session.record(), sealed.producer.gateway
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(gateway, "encryptor", Encryptor([bytes(32)]))
        cipher = address.cipher(gateway, str(record.born))
    turn = await claim_foreign(sealed, address, b"1 " + cipher.encrypt(message_field(2), orjson.dumps(GOOD)))
    seconds, _ = await redis_command(sealed, "TIME")
    await redis_command(sealed, "HSET", address.session, "claimed", int(seconds) * 1000)
    await check_session(sealed.producer.gateway, address)
    assert (await session.record()).status == "running", "another process may have the key"
    monkeypatch.setattr(turns, "_KEY_PATIENCE", 0.0)
    await redis_command(sealed, "ZADD", address.partition.due, 1, address.digest)
    await check_session(sealed.producer.gateway, address)
    assert (await session.record()).ended == turn.number


async def test_history_stops_after_the_messages_that_a_session_holds(app: App) -> None:
    session, address = session_of(app)
    await session.send("one")
    await work_off(app)
    await redis_command(app, "HSET", address.session, "sent", 999_999_999_999)
    assert [message.content async for message in session.history()] == ["one", "echo one"]


async def test_a_session_holds_so_many_bytes(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WAITING_BYTES", 300_000)
    session, _ = session_of(app)
    for _ in range(2):
        await session.send("x" * 100_000)
    with pytest.raises(SessionFull, match=r"2 waiting messages with 200,\d+ bytes, and takes at most .* 300,000 bytes"):
        await session.send("x" * 100_000)
    await work_off(app)
    turn = await session.send("x" * 100_000)
    await work_off(app)
    assert len(await turn.result()) == 100_005


async def test_the_ids_of_turns_are_reserved(app: App) -> None:
    turn = f"turn-{'0' * 32}-1.1"
    for task_id in ("turn-1", turn, f"{turn}.h1", f"{turn}2"):
        with pytest.raises(ValueError, match="task id must not start with 'turn-'"):
            await app.producer.enqueue("where", task_id=task_id, queue="talk")
        with pytest.raises(ValueError, match="must not start with 'turn-'"):
            await app.tasks["where"].options(task_id=task_id).enqueue()
    for suffix in ("-mail", ".mail", "_1"):
        await app.tasks["where"].options(task_id=turn + suffix).enqueue()


async def test_a_turn_does_not_answer_with_the_result_of_another_task(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = session_of(app)
    first = await session.send("one")
    await work_off(app)
    with monkeypatch.context() as unguarded:
        unguarded.setattr("perdure.queues.envelope.TURN_PREFIX", "~")
        await app.producer.enqueue("where", task_id=first.task_id.removesuffix("1") + "2", queue="talk")
    await work_off(app)
    second = await session.send("two")
    with pytest.raises(TaskFailed, match="its task id belongs to another task, 'where'"):
        await bounded(second.result())
    async with running_worker(app):
        assert await bounded((await session.send("three")).result()) == "echo three"


async def test_a_session_that_was_read_as_running_sees_another_task_in_its_place(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task was stored by another program after the turn was claimed, and has succeeded."""
    session, address = session_of(app)
    await session.send("one")
    await work_off(app)
    turn = await claim_foreign(app, address, b"1 " + orjson.dumps(GOOD))
    monkeypatch.setattr("perdure.queues.envelope.TURN_PREFIX", "~")
    await app.producer.enqueue("where", task_id=str(turn), queue="talk")
    await work_off(app)
    await check_session(app.producer.gateway, address)
    (message,) = [message async for message in session.history() if message.turn == 2]
    assert message.status == "refused: its task id belongs to another task, 'where'"


async def test_a_session_whose_fields_name_another_agent_runs_no_other_task(app: App) -> None:
    session, address = session_of(app)
    await session.send("one")
    await work_off(app)
    await claim_foreign(app, address, b"1 " + orjson.dumps(GOOD))
    await redis_command(app, "HSET", address.session, "agent", "where")
    await check_session(app.producer.gateway, address)
    with pytest.raises(UnreadableRecord, match="agent and id are not those of its key"):
        await session.record()
    found, _ = await list_sessions(app.producer.gateway, app.producer.namespace, limit=10)
    assert [(record.agent, "not those of its key" in (record.failed or "")) for record in found] == [("where", True)]
    await session.send("three")
    await work_off(app)
    (message,) = [message async for message in session.history() if message.turn == 2]
    assert message.status.startswith("refused: agent and id of the session")

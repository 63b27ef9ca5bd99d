"""Sessions whose data is encrypted, and a writer without the key: what it puts back or changes does not count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, Ephemeral, PlanStep, SessionFailed, Settings, TaskFailed
from perdure.queues import DecryptionError
from perdure.queues.sessions.record import SessionAddress
from perdure.queues.sessions.turns import check_session
from perdure.worker.session import Session, TurnHandle, send_by_catalog
from pydantic import Field

from tests.support.runs import address_of
from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, redis_command, work_off

pytestmark = pytest.mark.integration


class Notes(AgentState):
    """Everything that was said, the city that it is about, and the desk that has heard the last message."""

    city: str = "Rome"
    desk: Annotated[str, Ephemeral] = ""
    said: list[str] = Field(default_factory=list)


class Clerk(Agent[Notes]):
    """Keeps what is said, and answers with all of it."""

    ran: ClassVar[list[str]] = []

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        return [PlanStep(key="note", title="note it")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> str:
        self.ran.append(state.goal)
        state.said.append(state.goal)
        return "noted"

    async def finish(self, ctx: Context, state: Notes) -> str:
        return f"{state.desk}{state.city}: {', '.join(state.said)}"


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    Clerk.ran.clear()
    async with App("clerks", settings=with_keys(settings, FIRST, required=True)) as app:
        app.agent(Clerk)

        @app.task
        async def where(ctx: Context, goal: str = "") -> str:
            return "answer of another task"

        yield app


@pytest.fixture
def session(app: App) -> Session[Any]:
    return app.session(Clerk, "ada")


@pytest.fixture
async def address(app: App, session: Session[Any]) -> SessionAddress:
    return address_of(app, "clerk", session)


Fields = dict[bytes, bytes]


async def stored(app: App, address: SessionAddress) -> Fields:
    flat = await redis_command(app, "HGETALL", address.session)
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def history(app: App, address: SessionAddress, turn: int) -> Fields:
    ((_, flat),) = await redis_command(app, "XRANGE", address.history, f"{turn}-0", f"{turn}-0")
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def put(app: App, address: SessionAddress, fields: dict[Any, Any]) -> None:
    await redis_command(app, "HSET", address.session, *[part for pair in fields.items() for part in pair])


async def claim(app: App, address: SessionAddress, turn: int) -> None:
    """Claim a turn, as a writer who wants it to run, and let a worker look at the session."""
    await put(app, address, {"sent": turn, "turn": turn, "claimed": 1})
    await redis_command(app, "ZADD", address.partition.due, 1, address.digest)
    await check_session(app.producer.gateway, address)
    await work_off(app)


async def say(app: App, session: Session[Any], text: str) -> TurnHandle:
    turn = await session.send(text)
    await work_off(app)
    return turn


async def problem_of(turn: TurnHandle) -> str:
    with pytest.raises((TaskFailed, SessionFailed, DecryptionError)) as found:
        await bounded(turn.result())
    return str(found.value)


async def test_an_old_message_does_not_become_a_new_turn(
    app: App, session: Session[Any], address: SessionAddress
) -> None:
    await say(app, session, "yes, delete it")
    old = (await history(app, address, 1))[b"message"]
    await put(app, address, {"m:2": old})
    await claim(app, address, 2)
    assert Clerk.ran == ["yes, delete it"]
    (second,) = [message async for message in session.history() if message.turn == 2]
    assert second.status.startswith("(not encrypted) refused: could not decrypt the message of turn 2")
    assert await bounded((await say(app, session, "go on")).result()) == "Rome: yes, delete it, go on"


async def test_a_number_is_not_used_again_after_the_session_was_set_back(
    app: App, session: Session[Any], address: SessionAddress
) -> None:
    """The state of two turns is there, and the second message is put back as that of the turn after the first."""
    for text in ("one", "two"):
        await say(app, session, text)
    old = (await history(app, address, 2))[b"message"]
    second = f"turn-{address.digest}-{(await stored(app, address))[b'born'].decode()}.2"
    handle = await app.producer.find(second)
    assert handle is not None
    await redis_command(app, "DEL", handle.partition.record(second))
    await redis_command(app, "XTRIM", address.history, "MAXLEN", 0)
    await put(app, address, {"m:2": old, "ended": 1})
    await claim(app, address, 2)
    assert Clerk.ran == ["one", "two"]


async def test_the_fields_of_a_session_do_not_say_where_a_turn_runs(
    app: App, session: Session[Any], address: SessionAddress
) -> None:
    turns = [await session.send("one"), await session.send("two")]
    await put(app, address, {"queue": "evil"})
    await work_off(app)
    assert await bounded(turns[1].result()) == "Rome: one, two"
    await put(app, address, {"queue": "evil"})
    await send_by_catalog(app.producer, "clerk", "ada", "three", await app.producer.catalog())
    await work_off(app)
    assert Clerk.ran == ["one", "two", "three"]


@pytest.mark.parametrize("names", [("state",), ("state", "basis"), ("state", "basis", "ended")])
async def test_what_a_forgotten_session_left_is_not_read_in_its_next_life(
    app: App, session: Session[Any], address: SessionAddress, names: tuple[str, ...]
) -> None:
    await say(app, session, "my old secret")
    old = await stored(app, address)
    assert await session.forget()
    await say(app, session, "hello")
    await put(app, address, {name: old[name.encode()] for name in names if name.encode() in old})
    turn = await say(app, session, "and now?")
    try:
        assert "old secret" not in await bounded(turn.result())
    except (TaskFailed, SessionFailed) as error:
        assert "decrypt" in str(error)


@pytest.mark.parametrize("names", [("state",), ("state", "basis"), ("basis",)])
async def test_an_older_state_of_the_same_session_stops_it(
    app: App, session: Session[Any], address: SessionAddress, names: tuple[str, ...]
) -> None:
    await say(app, session, "one")
    old = await stored(app, address)
    await say(app, session, "two")
    await put(app, address, {name: old.get(name.encode(), b"") for name in names})
    turn = await say(app, session, "three")
    assert "undecryptable" in (problem := await problem_of(turn)) or "could not decrypt" in problem
    assert Clerk.ran == ["one", "two"]


async def test_older_inputs_do_not_count_for_a_later_message(
    app: App, session: Session[Any], address: SessionAddress
) -> None:
    await app.session(Clerk, "ada", desk="A").send("one")
    old = await stored(app, address)
    await work_off(app)
    turn = await app.session(Clerk, "ada", desk="B").send("two")
    waiting = await stored(app, address)
    older: dict[bytes, bytes] = {name: old[name] for name in (b"inputs", b"secrets") if name in old}
    if b"i:1" in old:
        assert b"i:2" in waiting
        older = {**older, b"i:2": old[b"i:1"]}
    other = await app.session(Clerk, "ada", desk="B").send("three")
    await put(app, address, older | ({b"i:3": old[b"i:1"]} if b"i:1" in old else {}))
    await work_off(app)
    assert await bounded(turn.result()) == "BRome: one, two", "its task was stored before"
    assert "decrypt the inputs of turn 3" in await problem_of(other)


async def test_a_correction_is_not_applied_again(app: App, session: Session[Any], address: SessionAddress) -> None:
    await say(app, session, "one")
    await session.correct({"city": "Oslo"})
    old = await stored(app, address)
    assert await bounded((await say(app, session, "two")).result()) == "Oslo: one, two"
    await session.correct({"city": "Paris"})
    await say(app, session, "three")
    await put(app, address, {"corrections": old[b"corrections"]})
    assert (await session.state()).city == "Paris"
    assert await bounded((await say(app, session, "four")).result()) == "Paris: one, two, three, four"


async def test_an_answer_of_a_forgotten_session_is_not_shown_as_one_of_its_next_life(
    app: App, session: Session[Any], address: SessionAddress
) -> None:
    await say(app, session, "my old secret")
    old = await history(app, address, 1)
    assert await session.forget()
    turn = await say(app, session, "hello")
    await redis_command(app, "DEL", address.history)
    await redis_command(app, "XADD", address.history, "1-0", *[part for pair in old.items() for part in pair])
    assert "secret" not in repr([message.content async for message in session.history()])
    with pytest.raises(DecryptionError, match="could not decrypt the answer of turn 1 of session"):
        await bounded(turn.result())


@pytest.mark.parametrize("how", ["handed to another task", "no result", "a result of another task"])
async def test_another_task_does_not_answer_for_a_turn(
    app: App, session: Session[Any], address: SessionAddress, how: str
) -> None:
    honest = await app.tasks["where"].options(task_id="honest").enqueue()
    await work_off(app)
    assert await honest.result() == "answer of another task"
    result = await redis_command(app, "HGET", honest.partition.record("honest"), "result")
    turn = await session.send("one")
    handle = await app.producer.find(turn.task_id)
    assert handle is not None
    forged = {"handed to another task": ("handed_to", "honest"), "no result": ("x", ""), "a result of another task": ()}
    fields = ("state", "succeeded", *(forged[how] or ("result", result)))
    await redis_command(app, "HSET", handle.partition.record(turn.task_id), *fields)
    await redis_command(app, "ZADD", address.partition.due, 1, address.digest)
    await check_session(app.producer.gateway, address)
    assert "could not decrypt" in await problem_of(turn)
    assert [message.role async for message in session.history()] == ["user"]
    assert await session.forget()

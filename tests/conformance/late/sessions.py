"""Late duplicates of calls for a session: the bytes of a repeated call arrive after the next turns."""

from __future__ import annotations

from dataclasses import replace

from perdure.queues import Gateway
from perdure.queues.sessions.record import SessionAddress, SessionCorrection, SessionRecord, TurnId, read_session
from perdure.queues.sessions.removal import forget_session
from perdure.queues.sessions.turns import (
    SessionTurnEnd,
    begin_turn,
    check_session,
    end_turn,
    send_to_session,
    store_correction,
)

from tests.conformance.late import Moments, Scene, Table

SESSIONS = Table()


def address_of(scene: Scene) -> SessionAddress:
    return SessionAddress.of(scene.namespace, "bot", "ada")


async def record_of(scene: Scene) -> SessionRecord:
    record = await read_session(scene.gateway, address_of(scene))
    assert record is not None
    return record


async def send(scene: Scene, text: str, through: Gateway | None = None) -> TurnId:
    return await send_to_session(through or scene.gateway, scene.namespace, "bot", "ada", text, queue="default")


async def converse(scene: Scene, *texts: str, through: Gateway | None = None) -> Moments:
    """Send messages and run their turns; yield after each call. through: calls the scripts of the session."""
    through = through or scene.gateway
    for text in texts:
        turn = await send(scene, text, through)
        yield
        delivery = await scene.read()
        await begin_turn(through, address_of(scene), turn, str(turn))
        yield
        number = str(turn.number).encode()
        end = SessionTurnEnd("answered", number, b'{"said":%s}' % number)
        assert await end_turn(through, address_of(scene), turn, end)
        yield
        await scene.settle("succeed", delivery, str(turn))
        yield


async def answered(scene: Scene, text: str) -> None:
    async for _ in converse(scene, text):
        pass


@SESSIONS.each("session_send", "session_begin", "session_end")
async def call_of_a_turn(scene: Scene, variant: str) -> Moments:
    scene.hold(variant)
    async for _ in converse(scene, "one", through=scene.late):
        if scene.proxy.late:
            yield
    async for _ in converse(scene, "two", "three"):
        yield


@SESSIONS.case
async def correction(scene: Scene) -> Moments:
    """The next turn has read it, and stored a state."""
    await answered(scene, "one")
    scene.hold("session_correct")
    changed = SessionCorrection("c1", "carl", {"said": 0})
    assert await store_correction(scene.late, await record_of(scene), changed) == "stored"
    yield
    async for _ in converse(scene, "two", "three"):
        yield


@SESSIONS.each("session_forget", "forget_task")
async def removal(scene: Scene, variant: str) -> Moments:
    """The next session of the name is spared; the ids of its turns contain the time of its first message."""
    await answered(scene, "one")
    scene.hold(variant)
    assert await forget_session(scene.late, address_of(scene))
    yield
    async for _ in converse(scene, "one again"):
        yield
    assert (await record_of(scene)).ended == 1


@SESSIONS.case
async def look(scene: Scene) -> Moments:
    """If a commitment is due just then, the late look claims its turn, and the next look stores the task of it."""
    address = address_of(scene)
    due = SessionTurnEnd("answered", b"1", b"{}", wake=(1, "a note"))
    turn = await send(scene, "one")
    for number in (1, 2):
        turn = replace(turn, number=number)
        delivery = await scene.read()
        await begin_turn(scene.gateway, address, turn, str(turn))
        if number == 2:
            yield
        assert await end_turn(scene.gateway, address, turn, due)
        await scene.settle("succeed", delivery, str(turn))
        if number == 1:
            scene.hold("session_look")
            await check_session(scene.late, address)
            yield
    third = str(replace(turn, number=3))
    await scene.proxy.deliver()
    assert await scene.producer.find(third) is None
    await scene.gateway.command("ZADD", address.partition.due, 1, address.digest)
    await check_session(scene.gateway, address)
    yield
    assert await scene.producer.find(third) is not None
    record = await record_of(scene)
    assert (record.sent, record.turn, record.ended) == (3, 3, 2)

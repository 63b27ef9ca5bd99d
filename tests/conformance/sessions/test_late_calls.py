"""Late duplicates of calls for a session: the bytes of a repeated call arrive after the session has gone on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from perdure.queues import Gateway, Namespace, Partition, Producer
from perdure.queues.sessions.record import SessionAddress, SessionCorrection, TurnId, read_session
from perdure.queues.sessions.removal import forget_session
from perdure.queues.sessions.turns import (
    SessionTurnEnd,
    begin_turn,
    check_session,
    end_turn,
    send_to_session,
    store_correction,
)
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import SETTLING
from tests.support.lossy_proxy import LossyProxy, deliver_unchanged


async def send(gateway: Gateway, namespace: Namespace, text: str) -> TurnId:
    return await send_to_session(gateway, namespace, "bot", "ada", text, queue="default")


class Conversation:
    """A session whose turns are played one after the other; the late bytes change nothing at any time."""

    def __init__(self, gateway: Gateway, namespace: Namespace, partition: Partition, proxy: LossyProxy) -> None:
        self._gateway, self._namespace, self._partition, self._proxy = gateway, namespace, partition, proxy
        self._address = SessionAddress.of(namespace, "bot", "ada")

    async def unchanged(self) -> None:
        if not self._proxy.late:
            return
        await deliver_unchanged(self._gateway, self._namespace, self._proxy)

    async def play(self, turn: TurnId, through: Gateway) -> None:
        """Run a turn. through: calls the scripts of the session."""
        await self.unchanged()
        delivery = await read_one(await worker(self._gateway, self._partition))
        await begin_turn(through, self._address, turn, str(turn))
        await self.unchanged()
        number = str(turn.number).encode()
        assert await end_turn(through, self._address, turn, SessionTurnEnd("answered", number, b'{"said":%s}' % number))
        await self.unchanged()
        await SETTLING["succeed"](self._gateway, delivery, str(turn))
        await self.unchanged()


@pytest.mark.parametrize("held", ["session_send", "session_begin", "session_end"])
async def test_a_call_of_a_turn_that_arrives_late_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, line: tuple[Gateway, LossyProxy], held: str
) -> None:
    late, proxy = line
    session = Conversation(gateway, namespace, partition, proxy)
    proxy.hold(queue_script(held).sha.encode())
    await session.play(await send(late, namespace, "one"), late)
    assert proxy.late
    for text in ("two", "three"):
        await session.play(await send(gateway, namespace, text), gateway)


async def test_a_correction_that_arrives_late_is_not_applied_again(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    address: SessionAddress,
    line: tuple[Gateway, LossyProxy],
) -> None:
    """The next turn has read it, and stored a state."""
    late, proxy = line
    session = Conversation(gateway, namespace, partition, proxy)
    await session.play(await send(gateway, namespace, "one"), gateway)
    record = await read_session(gateway, address)
    assert record is not None
    proxy.hold(queue_script("session_correct").sha.encode())
    assert await store_correction(late, record, SessionCorrection("c1", "carl", {"said": 0})) == "stored"
    await session.unchanged()
    for text in ("two", "three"):
        await session.play(await send(gateway, namespace, text), gateway)


async def test_a_removal_that_arrives_late_spares_the_next_session_of_the_name(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    address: SessionAddress,
    line: tuple[Gateway, LossyProxy],
) -> None:
    late, proxy = line
    session = Conversation(gateway, namespace, partition, proxy)
    await session.play(await send(gateway, namespace, "one"), gateway)
    proxy.hold(queue_script("session_forget").sha.encode())
    assert await forget_session(late, address)
    await session.unchanged()
    await session.play(await send(gateway, namespace, "one again"), gateway)
    record = await read_session(gateway, address)
    assert record is not None
    assert record.ended == 1


async def test_a_look_that_arrives_late_gives_no_turn_of_its_own(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    address: SessionAddress,
    line: tuple[Gateway, LossyProxy],
) -> None:
    """If a commitment is due just then, the late look claims its turn, and the next look stores the task of it."""
    late, proxy = line
    session = Conversation(gateway, namespace, partition, proxy)
    first = await send(gateway, namespace, "one")
    due = SessionTurnEnd("answered", b"1", b"{}", wake=(1, "a note"))

    async def run(turn: TurnId, end: SessionTurnEnd) -> None:
        delivery = await read_one(await worker(gateway, partition))
        await begin_turn(gateway, address, turn, str(turn))
        await session.unchanged()
        assert await end_turn(gateway, address, turn, end)
        await SETTLING["succeed"](gateway, delivery, str(turn))

    await run(first, due)
    proxy.hold(queue_script("session_look").sha.encode())
    await check_session(late, address)
    await session.unchanged()
    await run(replace(first, number=2), due)
    third = str(replace(first, number=3))
    await proxy.deliver()
    assert await producer.find(third) is None
    await gateway.command("ZADD", address.partition.due, 1, address.digest)
    await check_session(gateway, address)
    await session.unchanged()
    handle = await producer.find(third)
    assert handle is not None
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.sent, record.turn, record.ended) == (3, 3, 2)


async def test_a_task_that_is_forgotten_late_is_none_of_the_next_session(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    address: SessionAddress,
    line: tuple[Gateway, LossyProxy],
) -> None:
    """The ids of its turns contain the time of its first message."""
    late, proxy = line
    session = Conversation(gateway, namespace, partition, proxy)
    await session.play(await send(gateway, namespace, "one"), gateway)
    proxy.hold(queue_script("forget_task").sha.encode())
    assert await forget_session(late, address)
    await session.unchanged()
    await session.play(await send(gateway, namespace, "one again"), gateway)


async def test_a_removal_whose_reply_was_lost_says_that_the_session_was_there(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    address: SessionAddress,
    line: tuple[Gateway, LossyProxy],
) -> None:
    late, proxy = line
    await Conversation(gateway, namespace, partition, proxy).play(await send(gateway, namespace, "one"), gateway)
    proxy.lose(queue_script("session_forget").sha.encode())
    assert await forget_session(late, address)
    assert proxy.lost == 1
    assert not await forget_session(late, address)

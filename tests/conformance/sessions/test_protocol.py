"""Sessions: each script of the protocol, repeated, late, and by two callers at once."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from perdure.queues import Encryptor, Gateway, Namespace, Partition, Producer, set_partitions
from perdure.queues.errors import DecryptionError, SessionError, SessionFailed, SessionFull, TurnEarly, TurnRefused
from perdure.queues.sessions import turns as turns_module
from perdure.queues.sessions.record import (
    Basis,
    SessionAddress,
    SessionCorrection,
    SessionInputs,
    TurnId,
    list_sessions,
    read_history,
    read_session,
    read_turn,
)
from perdure.queues.sessions.removal import forget_session
from perdure.queues.sessions.turns import (
    SessionTurnEnd,
    begin_turn,
    check_session,
    end_turn,
    enqueue_turn,
    send_to_session,
    store_correction,
)

from tests.support.consumers import read_one, worker

ANSWERED = SessionTurnEnd("answered", b'"yes"', b"{}")


@pytest.fixture
def address(namespace: Namespace) -> SessionAddress:
    return SessionAddress.of(namespace, "bot", "ada")


async def send(gateway: Gateway, namespace: Namespace, text: str, **options: Any) -> TurnId:
    return await send_to_session(gateway, namespace, "bot", "ada", text, queue="default", **options)


async def depth(gateway: Gateway, partition: Partition) -> int:
    return int(await gateway.command("XLEN", partition.ready))


async def drain(gateway: Gateway, producer: Producer, partition: Partition, turns: list[TurnId]) -> None:
    """Cancel the tasks of the turns, so that no live task is left."""
    for turn in turns:
        if (handle := await producer.find(str(turn))) is not None:
            await handle.cancel()


async def test_a_session_belongs_to_the_app_of_its_messages(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first = await send(gateway, namespace, "m0")  # by a sender that names no app
    turns = [await send(gateway, namespace, "m1", app="own"), await send(gateway, namespace, "m2")]
    with pytest.raises(SessionError, match="belongs to app 'own', not to 'other'; nothing was stored"):
        await send(gateway, namespace, "m3", app="other")
    turns.append(await send(gateway, namespace, "m3", app="renamed", aliases=["older", "own"]))
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.app, record.sent) == ("own", 4)
    consumer = await worker(gateway, partition)
    for turn in [first, *turns]:
        delivery = await read_one(consumer)
        assert orjson.loads(delivery.fields[b"env"]).get("app") == (None if turn is first else "own")
        await begin_turn(gateway, address, turn, str(turn))
        assert await end_turn(gateway, address, turn, ANSWERED)
        await gateway.command("XDEL", partition.ready, delivery.entry)
    await drain(gateway, producer, partition, [first, *turns])


async def test_turns_are_claimed_one_at_a_time_in_the_order_of_the_messages(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    turns = list(await asyncio.gather(*(send(gateway, namespace, f"m{n}") for n in range(5))))
    assert sorted(turn.number for turn in turns) == [1, 2, 3, 4, 5]
    turns.sort(key=lambda turn: turn.number)
    consumer = await worker(gateway, partition)
    for turn in turns:
        assert await depth(gateway, partition) == 1
        delivery = await read_one(consumer)
        assert orjson.loads(delivery.fields[b"env"])["id"] == str(turn)
        start = await begin_turn(gateway, address, turn, str(turn))
        assert orjson.loads(delivery.fields[b"args"]) == {"goal": start.text}
        assert await end_turn(gateway, address, turn, ANSWERED)
        await gateway.command("XDEL", partition.ready, delivery.entry)
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.status, record.turn, record.ended, record.sent) == ("idle", 5, 5, 5)
    for key in [partition.record(str(turn)) for turn in turns]:
        await gateway.command("DEL", key)


async def test_every_step_may_be_repeated(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first = await send(gateway, namespace, "one", message_id="a")
    second = await send(gateway, namespace, "two", message_id="b")
    for _ in range(2):
        assert await send(gateway, namespace, "one", message_id="a") == first
        assert await send(gateway, namespace, "two", message_id="b") == second
        await enqueue_turn(gateway, address, first)
        assert await depth(gateway, partition) == 1
        assert (await begin_turn(gateway, address, first, "x")).text == "one"
    for _ in range(2):
        assert await end_turn(gateway, address, first, ANSWERED)
        assert await depth(gateway, partition) == 2
        assert await read_turn(gateway, address, first) == (b'"yes"', "")
    assert [(one.turn, one.role, one.status) async for one in read_history(gateway, address)] == [
        (1, "user", "answered"),
        (1, "assistant", "answered"),
        (2, "user", "running"),
    ]
    await drain(gateway, producer, partition, [first, second])


async def test_a_late_run_of_a_turn_changes_nothing(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first, second = await send(gateway, namespace, "one"), await send(gateway, namespace, "two")
    assert await end_turn(gateway, address, first, ANSWERED)
    before = await read_session(gateway, address)
    for outcome in ("answered", "failed", "cancelled"):
        assert await end_turn(gateway, address, first, SessionTurnEnd(outcome, b'"late"', b'{"late":1}'))
    assert await read_session(gateway, address) == before
    with pytest.raises(TurnRefused, match="turn 1 of its session has ended"):
        await begin_turn(gateway, address, first, "x")
    await enqueue_turn(gateway, address, first)
    await drain(gateway, producer, partition, [first, second])


async def test_a_turn_that_was_not_claimed_cannot_begin_or_end(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first = await send(gateway, namespace, "one")
    early = TurnId(first.digest, first.born, 2)
    with pytest.raises(TurnEarly, match="is not claimed"):
        await begin_turn(gateway, address, early, "x")
    with pytest.raises(TurnEarly):
        await end_turn(gateway, address, early, ANSWERED)
    await enqueue_turn(gateway, address, early)
    assert await depth(gateway, partition) == 1
    await drain(gateway, producer, partition, [first])


async def test_a_failed_turn_keeps_its_message_until_it_is_replayed_or_passed_over(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first, second = await send(gateway, namespace, "one"), await send(gateway, namespace, "two")
    failed = SessionTurnEnd("failed", b"not_retryable")
    for _ in range(2):
        assert await end_turn(gateway, address, first, failed)
    with pytest.raises(SessionFailed, match="stopped at turn 1") as stopped:
        await send(gateway, namespace, "three")
    assert (stopped.value.turn, stopped.value.task_id) == (1, str(first))
    await enqueue_turn(gateway, address, first)  # as a sender that was late; the record of the dead letter may be gone
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.status, record.failed, record.sent) == ("failed", "not_retryable", 2)
    assert (await begin_turn(gateway, address, first, "x")).text == "one"  # the replay
    record = await read_session(gateway, address)
    assert record is not None
    assert record.status == "running"
    assert await end_turn(gateway, address, first, failed)
    third = await send(gateway, namespace, "three", skip_failed=True)
    with pytest.raises(TurnRefused):
        await begin_turn(gateway, address, first, "x")
    assert (await begin_turn(gateway, address, second, "x")).text == "two"
    assert await read_turn(gateway, address, first) == (None, "not_retryable")
    await drain(gateway, producer, partition, [first, second, third])


async def test_a_session_takes_a_bounded_number_of_messages(
    gateway: Gateway,
    namespace: Namespace,
    producer: Producer,
    partition: Partition,
    address: SessionAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "MAX_WAITING", 3)
    monkeypatch.setattr(turns_module, "MAX_IDS", 2)
    turns = [await send(gateway, namespace, str(number), message_id=str(number)) for number in range(3)]
    with pytest.raises(SessionFull, match="3 waiting messages"):
        await send(gateway, namespace, "4")
    assert await end_turn(gateway, address, turns[0], ANSWERED)
    turns.append(await send(gateway, namespace, "4", message_id="4"))
    ids = await gateway.command("HGETALL", address.session)
    assert sum(name.startswith((b"id:", b"n:")) for name in ids[::2]) == 4
    await drain(gateway, producer, partition, turns)


async def test_a_failed_turn_of_a_full_session_is_passed_over(
    gateway: Gateway,
    namespace: Namespace,
    producer: Producer,
    partition: Partition,
    address: SessionAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "MAX_WAITING", 3)
    turns = [await send(gateway, namespace, f"m{n}") for n in range(3)]
    assert await end_turn(gateway, address, turns[0], SessionTurnEnd("failed", b"error"))
    turns.append(await send(gateway, namespace, "m3", skip_failed=True))
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.status, record.ended, record.turn, record.sent) == ("running", 1, 2, 4)
    with pytest.raises(SessionFull):
        await send(gateway, namespace, "m4")
    await drain(gateway, producer, partition, turns)


async def test_a_session_of_the_same_name_is_another_one_after_it_was_forgotten(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first = await send(gateway, namespace, "one")
    assert await forget_session(gateway, address)
    assert not await forget_session(gateway, address)
    for key in address.keys:
        assert await gateway.command("EXISTS", key) == 0
    again = await send(gateway, namespace, "one")
    assert int(again.born) > int(first.born), "also within the same millisecond"
    assert not await end_turn(gateway, address, first, ANSWERED)
    with pytest.raises(TurnRefused, match="was forgotten"):
        await begin_turn(gateway, address, first, "x")
    assert not await forget_session(gateway, address, born=first.born)
    assert not await forget_session(gateway, address, idle_ms="0")  # its turn has not ended
    assert await end_turn(gateway, address, again, ANSWERED)
    assert not await forget_session(gateway, address, idle_ms="3600000")
    assert await forget_session(gateway, address, idle_ms="0")
    await drain(gateway, producer, partition, [first, again])


async def test_a_commitment_claims_a_turn_once_when_it_is_due(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first = await send(gateway, namespace, "one")
    due = SessionTurnEnd("answered", b"1", b"{}", wake=(1, "a note"))
    assert await end_turn(gateway, address, first, due)
    await asyncio.gather(*(check_session(gateway, address) for _ in range(3)))
    second = TurnId(first.digest, first.born, 2)
    start = await begin_turn(gateway, address, second, "x")
    assert (start.text, start.note) == ("a note", True)
    assert await depth(gateway, partition) == 2
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.sent, record.turn) == (2, 2)
    await drain(gateway, producer, partition, [first, second])


async def test_a_failed_turn_is_looked_at_again_once_it_is_replayed(
    gateway: Gateway, namespace: Namespace, address: SessionAddress
) -> None:
    """Its worker may die, so another one must find the claimed turn."""
    turn = await send(gateway, namespace, "one")

    async def due() -> bool:
        return await gateway.command("ZSCORE", address.keys[2], address.digest) is not None

    assert await due()
    await end_turn(gateway, address, turn, SessionTurnEnd("failed", b"timeout"))
    assert not await due()
    await begin_turn(gateway, address, turn, str(turn))
    assert await due()


async def test_the_message_of_an_ended_turn_and_a_former_commitment_leave_the_session(
    gateway: Gateway, namespace: Namespace, address: SessionAddress
) -> None:
    first = await send(gateway, namespace, "one")
    await end_turn(gateway, address, first, SessionTurnEnd("answered", b"1", b"{}", wake=(1, "a note")))
    assert await gateway.command("HEXISTS", address.session, "wake") == 1
    second = await send(gateway, namespace, "two")
    await end_turn(gateway, address, second, ANSWERED)
    names = await gateway.command("HKEYS", address.session)
    assert [name for name in names if name == b"wake" or name.startswith(b"m:")] == []


async def test_the_task_of_a_turn_is_found_after_the_partitions_have_changed(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    first, second = await send(gateway, namespace, "one"), await send(gateway, namespace, "two")
    await set_partitions(gateway, namespace, "default", 2)
    await enqueue_turn(gateway, address, first)
    assert await end_turn(gateway, address, first, ANSWERED)
    found = await producer.find(str(second))
    assert found is not None
    assert found.partition.index > 0
    assert await depth(gateway, partition) == 1
    await drain(gateway, producer, partition, [first, second])


async def test_sessions_are_listed_by_their_last_activity_page_by_page(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition
) -> None:
    turns = []
    for number in range(7):
        agent = "bot" if number % 2 else "other"
        turns.append(await send_to_session(gateway, namespace, agent, f"s{number}", "x", queue="default"))
        address = SessionAddress.of(namespace, agent, f"s{number}")
        await gateway.command("ZADD", address.partition.timeline, 1000 + number, address.digest)
    found, cursor = [], ""
    while True:
        page, cursor = await list_sessions(gateway, namespace, limit=3, before=cursor)
        found += [one.id for one in page]
        if not cursor:
            break
    assert found == [f"s{number}" for number in reversed(range(7))]
    page, _ = await list_sessions(gateway, namespace, limit=10, agent="bot")
    assert [one.id for one in page] == ["s5", "s3", "s1"]
    await drain(gateway, producer, partition, turns)


async def test_the_data_of_a_session_is_encrypted(
    gateway: Gateway,
    namespace: Namespace,
    producer: Producer,
    partition: Partition,
    address: SessionAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes(range(32))], required=True))
    inputs = (b'{"goal":"","city":"hidden1"}', ())
    turn = await send_to_session(gateway, namespace, "bot", "ada", "hidden2", queue="default", inputs=inputs)
    end = SessionTurnEnd("answered", b'"hidden3"', b'{"x":"hidden4"}', wake=(1, "hidden5"))
    assert await end_turn(gateway, address, turn, end)
    stored = [
        await gateway.command("HGETALL", address.session),
        await gateway.command("XRANGE", address.history, "-", "+"),
        await gateway.command("XRANGE", partition.ready, "-", "+"),
    ]
    assert b"hidden" not in repr(stored).encode()
    record = await read_session(gateway, address)
    assert record is not None
    assert record.opened_state() == b'{"x":"hidden4"}'
    assert [one.content async for one in read_history(gateway, address)] == ["hidden2", "hidden3"]
    await check_session(gateway, address)
    assert float(await gateway.command("ZSCORE", address.keys[2], address.digest)) > 1, "the turn is looked at later"
    second = TurnId(turn.digest, turn.born, 2)
    assert (await begin_turn(gateway, address, second, "x")).text == "hidden5"
    await drain(gateway, producer, partition, [turn, second])


@pytest.mark.parametrize(("wrong", "kind"), [(42, TypeError), ("", ValueError), ("a\nb", ValueError)])
def test_a_session_id_is_a_printable_text(namespace: Namespace, wrong: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"session id must be .*, got "):
        SessionAddress.of(namespace, "bot", wrong)


async def test_a_correction_is_stored_while_no_turn_runs_and_read_by_each_run_until_a_state_is_stored(
    gateway: Gateway, namespace: Namespace, producer: Producer, address: SessionAddress
) -> None:
    first, second = (SessionCorrection(name, "eve", {"city": name}) for name in ("a", "b"))

    async def store(correction: SessionCorrection) -> str:
        record = await read_session(gateway, address)
        assert record is not None
        return await store_correction(gateway, record, correction)

    async def started(turn: TurnId) -> list[SessionCorrection]:
        return list((await begin_turn(gateway, address, turn, str(turn))).corrections)

    turns = [await send(gateway, namespace, "one")]
    assert await store(first) == "turn"
    await end_turn(gateway, address, turns[0], ANSWERED)
    early = await read_session(gateway, address)
    assert early is not None
    assert [await store(first), await store(first), await store(second)] == ["stored"] * 3
    assert await store_correction(gateway, early, second) == "changed"
    turns.append(await send(gateway, namespace, "two"))
    assert await store(SessionCorrection("c", "", {"city": "c"})) == "turn"
    assert [await started(turns[1]), await started(turns[1])] == [[first, second]] * 2
    await end_turn(gateway, address, turns[1], SessionTurnEnd("cancelled", b"cancelled"))
    turns.append(await send(gateway, namespace, "three"))
    await end_turn(gateway, address, turns[2], SessionTurnEnd("failed", b"timeout"))
    third = SessionCorrection("d", "", {"city": "d"})
    assert await store(third) == "stored"
    assert await started(turns[2]) == [first, second, third]
    await end_turn(gateway, address, turns[2], ANSWERED)
    turns.append(await send(gateway, namespace, "four"))
    assert await started(turns[3]) == []
    await forget_session(gateway, address)
    assert await store_correction(gateway, early, first) == "missing"


async def test_a_correction_that_the_end_of_a_failed_turn_has_not_read_is_kept(
    gateway: Gateway, namespace: Namespace, address: SessionAddress
) -> None:
    """A run stalls, another one ends the turn as failed, the state is corrected, and the first run stores its state."""
    turn = await send(gateway, namespace, "one")
    await begin_turn(gateway, address, turn, str(turn))
    await end_turn(gateway, address, turn, SessionTurnEnd("failed", b"timeout"))
    record = await read_session(gateway, address)
    assert record is not None
    correction = SessionCorrection("a", "eve", {"city": "Oslo"})
    assert await store_correction(gateway, record, correction) == "stored"
    await end_turn(gateway, address, turn, ANSWERED)
    following = await send(gateway, namespace, "two")
    start = await begin_turn(gateway, address, following, str(following))
    assert (start.state, list(start.corrections)) == (b"{}", [correction])
    await end_turn(gateway, address, following, ANSWERED)
    last = await send(gateway, namespace, "three")
    assert list((await begin_turn(gateway, address, last, str(last))).corrections) == []


@pytest.fixture
def sealed(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes(range(32))], required=True))


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("name", ["state", "workspace", "basis"])
async def test_what_an_earlier_turn_left_is_not_the_start_of_a_later_one(
    gateway: Gateway, namespace: Namespace, producer: Producer, address: SessionAddress, name: str
) -> None:
    turns, older = [], b""
    for number in range(2):
        turns.append(await send(gateway, namespace, f"m{number}"))
        end = SessionTurnEnd("answered", b"1", b"{}", workspace=b"{}")
        assert await end_turn(gateway, address, turns[-1], end)
        older = older or await gateway.command("HGET", address.session, name)
    turns.append(await send(gateway, namespace, "m2"))
    stored = await gateway.command("HGET", address.session, name)
    await gateway.command("HSET", address.session, name, older)
    with pytest.raises(DecryptionError, match=f"the {name} of turn 2 of session"):
        await begin_turn(gateway, address, turns[2], str(turns[2]))
    await gateway.command("HSET", address.session, name, stored)
    assert (await begin_turn(gateway, address, turns[2], str(turns[2]))).workspace == b"{}"
    await drain(gateway, producer, Partition(namespace.name, "default", 0), turns)


@pytest.mark.usefixtures("sealed")
async def test_a_note_about_a_commitment_is_that_of_one_turn(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    turns = [await send(gateway, namespace, "one", app="own")]
    assert await end_turn(gateway, address, turns[0], SessionTurnEnd("answered", b"1", b"{}", wake=(1, "a note")))
    note = await gateway.command("HGET", address.session, "wake")
    await check_session(gateway, address)
    turns.append(TurnId(turns[0].digest, turns[0].born, 2))
    assert (await begin_turn(gateway, address, turns[1], "x")).text == "a note"
    envelope = orjson.loads(await gateway.command("HGET", partition.record(str(turns[1])), "env"))
    assert envelope["app"] == "own", "the note has the app of the turn before"
    assert await end_turn(gateway, address, turns[1], ANSWERED)
    await gateway.command("HSET", address.session, "wake", note)
    await gateway.command("ZADD", address.partition.due, 1, address.digest)
    await check_session(gateway, address)
    found = await read_turn(gateway, address, TurnId(turns[0].digest, turns[0].born, 3))
    assert found is not None
    assert found[1].startswith(f"refused: could not decrypt the message of turn 3 of session {address.digest}")
    await drain(gateway, producer, partition, turns)


@pytest.mark.usefixtures("sealed")
async def test_a_message_is_encrypted_again_if_its_place_was_taken_meanwhile(
    gateway: Gateway,
    namespace: Namespace,
    producer: Producer,
    partition: Partition,
    address: SessionAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the read and the script another sender begins the session; then it is forgotten and starts again."""
    command, others = Gateway.command, list[TurnId]()

    async def interrupted(self: Gateway, *parts: Any, **options: Any) -> Any:
        found = await command(self, *parts, **options)
        if parts[:2] == ("HMGET", address.session) and "sent" in parts and len(others) < 3:
            others.append(TurnId(address.digest, "", 0))
            if len(others) == 2:  # the read of the other sender, which is not interrupted
                return found
            if len(others) == 3:
                assert await forget_session(gateway, address)
            others[-1] = await send(gateway, namespace, "other")
        return found

    monkeypatch.setattr(Gateway, "command", interrupted)
    first = await send(gateway, namespace, "mine", app="own")
    assert first.number == 2
    monkeypatch.setattr(Gateway, "command", command)
    assert [message.content async for message in read_history(gateway, address)] == ["other", "mine"]
    await drain(gateway, producer, partition, [first, *others])


@pytest.mark.usefixtures("sealed")
async def test_a_message_of_a_forgotten_session_does_not_begin_it_again(
    gateway: Gateway, namespace: Namespace, address: SessionAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a send arrive once more: after the session was forgotten, and after it starts again."""
    run, sends = Gateway.run, list[tuple[Any, ...]]()

    async def kept(self: Gateway, *call: Any) -> Any:
        if call[0].name == "session_send":
            sends.append(call)
        return await run(self, *call)

    monkeypatch.setattr(Gateway, "run", kept)
    first = await send(gateway, namespace, "one")
    assert len(sends) == 1, "a send is one script after one read"
    assert await forget_session(gateway, address)
    assert (await gateway.run(*sends[0]))[0] == b"changed"
    assert await read_session(gateway, address) is None
    again = await send(gateway, namespace, "two")
    assert int(again.born) > int(first.born)
    assert (await gateway.run(*sends[0]))[0] == b"changed"
    assert [message.content async for message in read_history(gateway, address)] == ["two"]
    await forget_session(gateway, address)


@pytest.mark.usefixtures("sealed")
async def test_a_failed_turn_that_is_passed_over_leaves_the_state_before_it(
    gateway: Gateway, namespace: Namespace, producer: Producer, partition: Partition, address: SessionAddress
) -> None:
    turns = [await send(gateway, namespace, "one", inputs=(b'{"city":"Rome"}', ()))]
    assert await end_turn(gateway, address, turns[0], SessionTurnEnd("answered", b"1", b'{"n":1}'))
    turns.append(await send(gateway, namespace, "two", inputs=(b'{"city":"Oslo"}', ())))
    assert await end_turn(gateway, address, turns[1], SessionTurnEnd("failed", b"timeout"))
    basis = await gateway.command("HGET", address.session, "basis")
    await gateway.command("HSET", address.session, "basis", basis[:-1] + bytes([basis[-1] ^ 1]))
    with pytest.raises(DecryptionError, match="the basis of turn 1 of session"):
        await send(gateway, namespace, "three", skip_failed=True)
    await gateway.command("HSET", address.session, "basis", basis)
    turns.append(await send(gateway, namespace, "three", skip_failed=True))
    assert (await begin_turn(gateway, address, turns[2], "x")).state == b'{"n":1}'
    record = await read_session(gateway, address)
    assert record is not None
    assert (record.opened_basis() or Basis()).inputs == SessionInputs({"city": "Oslo"}, ())
    await drain(gateway, producer, partition, turns)


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("meanwhile", ["passed over", "forgotten"])
async def test_a_failed_turn_that_another_sender_has_passed_over_is_passed_over_once(
    gateway: Gateway,
    namespace: Namespace,
    producer: Producer,
    address: SessionAddress,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
) -> None:
    turns = [await send(gateway, namespace, "one")]
    assert await end_turn(gateway, address, turns[0], SessionTurnEnd("failed", b"timeout"))
    command = Gateway.command

    async def interrupted(self: Gateway, *parts: Any, **options: Any) -> Any:
        if parts[:2] == ("HMGET", address.session) and "corrections" in parts:
            monkeypatch.setattr(Gateway, "command", command)
            if meanwhile == "forgotten":
                assert await forget_session(gateway, address)
            turns.append(await send(gateway, namespace, "other", skip_failed=True))
        return await command(self, *parts, **options)

    monkeypatch.setattr(Gateway, "command", interrupted)
    last = await send(gateway, namespace, "mine", skip_failed=True)
    assert last.number == turns[-1].number + 1
    assert await end_turn(gateway, address, turns[-1], ANSWERED)
    assert (await begin_turn(gateway, address, last, "x")).text == "mine"
    await drain(gateway, producer, Partition(namespace.name, "default", 0), [*turns, last])

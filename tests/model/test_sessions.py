"""Sessions under deaths: any caller may die before or after each of its commands, in any order of calls.

The model keeps what a fenced checkpoint keeps, the recorded result of each turn, and checks the rest against Redis:
each message gets one turn, in order, with the state of the turn before it, and each correction that was stored is read
by one turn that stores a state. The data are encrypted, so that each read checks what the turn before has left.
"""

from __future__ import annotations

import asyncio
from typing import Any

import fakeredis
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perdure.queues import Encryptor, Namespace
from perdure.queues.errors import SessionError, TurnRefused
from perdure.queues.sessions.record import SessionAddress, SessionCorrection, TurnId, read_history, read_session
from perdure.queues.sessions.removal import finish_forgetting, forget_session, forget_task
from perdure.queues.sessions.turns import (
    SessionTurnEnd,
    begin_turn,
    check_session,
    end_turn,
    send_to_session,
    store_correction,
)

from tests.model.mortal import Died, Mortal


class Play:
    """One session, its senders and its workers."""

    def __init__(self, gateway: Mortal) -> None:
        self.gateway = gateway
        self.namespace = Namespace("model")
        self.address = SessionAddress.of(self.namespace, "bot", "ada")
        self.partition = self.namespace.partition("q")
        self.recorded: dict[str, list[str]] = {}
        self.sent: list[str] = []
        self.corrected: list[str] = []
        self.tried = 0
        self.read: dict[str, list[str]] = {}

    async def send(self, text: str) -> None:
        """Send a message, again under the same id until the sender lives."""
        self.sent.append(text)
        options: dict[str, Any] = {"queue": "q", "app": "own", "message_id": text, "inputs": (b"{}", ())}
        await send_to_session(self.gateway, self.namespace, "bot", "ada", text, **options)

    async def intrude(self, _: int) -> None:
        """Send a message from an app that the session does not belong to; the message is stored nowhere."""
        if await self.gateway.command("HEXISTS", self.address.session, "born"):
            with pytest.raises(SessionError):
                await send_to_session(self.gateway, self.namespace, "bot", "ada", "other", queue="q", app="other")

    async def queued(self) -> list[TurnId]:
        found = []
        for _, flat in await self.gateway.command("XRANGE", self.partition.ready, "-", "+"):
            assert orjson.loads(flat[1])["app"] == "own"
            digest, born, number = orjson.loads(flat[1])["id"].removeprefix("turn-").replace(".", "-").split("-")
            found.append(TurnId(digest, born, int(number)))
        return found

    async def run(self, which: int) -> None:
        """Run the task of a turn as a worker does; if it died before, from the recorded result on."""
        if not (tasks := await self.queued()):
            return
        turn = tasks[which % len(tasks)]
        if str(turn) not in self.recorded:
            try:
                start = await begin_turn(self.gateway, self.address, turn, str(turn))
            except TurnRefused:
                if await end_turn(self.gateway, self.address, turn, SessionTurnEnd("failed", b"refused")):
                    await self.settle(turn)
                else:
                    await forget_task(self.gateway, self.partition, str(turn))
                return
            state = [] if start.state is None else orjson.loads(start.state)
            self.recorded[str(turn)] = [*state, start.text]
            self.read[str(turn)] = [one.id for one in start.corrections]
        state = self.recorded[str(turn)]
        end = SessionTurnEnd("answered", orjson.dumps(len(state)), orjson.dumps(state))
        await end_turn(self.gateway, self.address, turn, end)
        await self.settle(turn)

    async def correct(self, _: int) -> None:
        """Correct the state as a person does who gives up if a turn runs, or if another person was faster."""
        if (record := await read_session(self.gateway, self.address)) is not None:
            self.tried += 1
            name = str(self.tried)
            if await store_correction(self.gateway, record, SessionCorrection(name, "", {})) == "stored":
                self.corrected.append(name)

    async def waiting_corrections(self) -> list[str]:
        record = await read_session(self.gateway, self.address)
        return [] if record is None else [one.id for one in record.waiting_corrections()]

    async def settle(self, turn: TurnId) -> None:
        for entry, flat in await self.gateway.command("XRANGE", self.partition.ready, "-", "+"):
            if orjson.loads(flat[1])["id"] == str(turn):
                await self.gateway.command("HSET", self.partition.record(str(turn)), "state", "succeeded")
                await self.gateway.command("XDEL", self.partition.ready, entry)

    async def expire(self, _: int) -> None:
        """Let the records of settled tasks expire."""
        live = {str(turn) for turn in await self.queued()}
        for task_id in set(self.recorded) - live:
            await self.gateway.command("DEL", self.partition.record(task_id))

    async def look(self, _: int) -> None:
        await self.gateway.command("ZADD", self.address.partition.due, "XX", 1, self.address.digest)
        await check_session(self.gateway, self.address)

    async def forget(self, _: int) -> None:
        await asyncio.sleep(0.002)  # two sessions of one name have another first time
        try:
            await forget_session(self.gateway, self.address)
        finally:
            left, self.gateway.left = self.gateway.left, None
            if await read_session(self.gateway, self.address) is None:
                self.sent.clear()
                self.corrected.clear()
            self.gateway.left = left

    async def clean(self, _: int) -> None:
        """Delete tasks of forgotten sessions, as a worker does; those of the session stay."""
        await finish_forgetting(self.gateway, self.namespace)

    async def forgotten_tasks(self) -> list[str]:
        """Return the tasks of sessions that were forgotten."""
        born = (await self.gateway.command("HGET", self.address.session, "born") or b"-").decode()
        found = await self.gateway.command("KEYS", f"*:turn-{self.address.digest}-*")
        return [key.decode() for key in found if f"-{born}." not in key.decode()]

    async def late(self, which: int) -> None:
        """Let bytes of an earlier run arrive once more: a begin and an end of a turn."""
        if self.recorded:
            task_id = sorted(self.recorded)[which % len(self.recorded)]
            digest, born, number = task_id.removeprefix("turn-").replace(".", "-").split("-")
            turn = TurnId(digest, born, int(number))
            state = self.recorded[task_id]
            end = SessionTurnEnd("answered", orjson.dumps(len(state)), orjson.dumps(state))
            await end_turn(self.gateway, self.address, turn, end)


ACTS = st.sampled_from(["send", "run"] * 3 + ["look", "expire", "late", "forget", "clean", "correct", "intrude"])
STEPS = st.lists(st.tuples(ACTS, st.integers(0, 5), st.none() | st.integers(0, 9), st.booleans()), max_size=25)


@settings(max_examples=40)
@given(STEPS)
@example([(act, 0, None, False) for act in ("send", "run", "correct", "send", "run", "correct")])
def test_each_message_has_one_turn_in_order_wherever_callers_die(
    steps: list[tuple[str, int, int | None, bool]],
) -> None:
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, int, int | None, bool]]) -> None:
    gateway = Mortal.over(fakeredis.FakeAsyncRedis(version=(7,), protocol=2))
    assert isinstance(gateway, Mortal)
    gateway.encryptor = Encryptor([bytes(range(32))], required=True)
    game = Play(gateway)
    for act, which, dies_at, executed in steps:
        gateway.left, gateway.executed = dies_at, executed
        try:
            await (game.send(f"m{len(game.sent)}") if act == "send" else getattr(game, act)(which))
        except Died:
            gateway.left = None
            if act == "send":
                text = game.sent.pop()
                if which % 2:  # the caller sends it again; otherwise it is stored or not, and it may never know
                    await game.send(text)
                elif await gateway.command("HEXISTS", game.address.session, "born"):
                    record = await read_session(gateway, game.address)
                    assert record is not None
                    game.sent += [text] * (record.sent - len(game.sent))
        gateway.left = None
        await check(game)
    for _ in range(2 * len(game.sent) + 2):
        await game.look(0)
        await game.run(0)
    await game.clean(0)
    assert await game.forgotten_tasks() == []
    record = await read_session(gateway, game.address)
    if game.sent:
        assert record is not None
        assert (record.status, record.ended) == ("idle", len(game.sent))
        assert orjson.loads(record.opened_state() or b"[]") == game.sent
        found = [(one.turn, one.role, one.content) async for one in read_history(gateway, game.address)]
        expected = [
            (number, role, content)
            for number, text in enumerate(game.sent, 1)
            for role, content in (("user", text), ("assistant", str(number)))
        ]
        assert found == expected
    read = [name for names in game.read.values() for name in names] + await game.waiting_corrections()
    assert len(read) == len(set(read))
    assert set(game.corrected) <= set(read)
    await gateway.close()


async def check(game: Play) -> None:
    """Check what holds at every moment: at most one turn is open, and the state is that of the last one that ended."""
    record = await read_session(game.gateway, game.address)
    if record is not None:
        assert record.ended <= record.turn <= min(record.ended + 1, record.sent)
        assert orjson.loads(record.opened_state() or b"[]") == game.sent[: record.ended]
        unsettled = [str(turn) for turn in await game.queued()]
        assert len(set(unsettled)) == len(unsettled)

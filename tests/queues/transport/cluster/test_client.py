"""A cluster's wire against nodes that answer by a script: redirections, refusals that pass, nodes that leave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from perdure import Unavailable
from perdure.queues import Address
from perdure.queues.transport.address import Node
from perdure.queues.transport.cluster import ClusterConnection, Topology
from perdure.queues.transport.cluster import client as wire
from perdure.queues.transport.pipelining import Command
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as ConnectionLost

A, B = Node("a", 1), Node("b", 2)
LOW, HIGH = "{b}:x", "{a}:x"
"""Keys of slots 3300 and 15495: of the first and of the second node."""
SLOT = 3300


class ScriptedWire:
    """A node's wire: answers with what it is told, else with its own name; or not at all while it is silent."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.answers: deque[Any] = deque()
        self.heard: list[Command] = []
        self.unanswered: list[asyncio.Future[Any]] = []
        self.silent = False
        self.closed = asyncio.Event()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        self.heard.append(command)
        future = asyncio.get_running_loop().create_future()
        if self.silent:
            self.unanswered.append(future)
            return future
        answer = "OK" if command == ("ASKING",) else self.answers.popleft() if self.answers else self.node.host
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    def flush(self) -> None: ...

    def reconnect(self) -> None: ...

    async def close(self) -> None:
        self.closed.set()
        for future in self.unanswered:
            if not future.done():
                future.set_exception(ConnectionLost("closed"))


class Scene:
    """Two nodes that share the slots, and a wire to them. `says` is what the cluster says next of itself."""

    def __init__(self) -> None:
        self.says: list[Any] = [[0, 8191, [b"a", 1]], [8192, 16383, [b"b", 2]]]
        self.dialled: list[ScriptedWire] = []
        self.looks = 0
        address = Address.parse("redis+cluster://a:1,b:2", data_dir=Path)
        self.wire = ClusterConnection(address, self.dial, learn=self.learn)

    def dial(self, node: Node) -> ScriptedWire:
        self.dialled.append(ScriptedWire(node))
        return self.dialled[-1]

    def learn(self, _address: Address, nodes: Iterable[Node], *, timeout: float, check: bool = False) -> Topology:
        self.looks += 1
        if not self.says:
            raise Unavailable("nobody answers")
        return Topology.read(self.says, next(iter(nodes)))

    def node(self, host: str) -> ScriptedWire:
        return next(wire for wire in self.dialled if wire.node.host == host)

    async def meet(self) -> tuple[ScriptedWire, ScriptedWire]:
        """Both nodes, each having answered once."""
        await asyncio.gather(self.wire.submit(("GET", LOW)), self.wire.submit(("GET", HIGH)))
        a, b = self.node("a"), self.node("b")
        a.heard.clear()
        b.heard.clear()
        return a, b


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.wire.open()
    yield scene
    await scene.wire.close()


async def test_each_command_goes_to_the_node_of_its_key(scene: Scene) -> None:
    assert scene.dialled == []
    assert await asyncio.gather(*(scene.wire.submit(("GET", key)) for key in (LOW, HIGH, LOW))) == ["a", "b", "a"]
    assert await scene.wire.submit(("TIME",), node_of=HIGH) == "b"
    assert len(scene.dialled) == 2


async def test_a_slot_that_moved_is_followed_and_remembered(scene: Scene) -> None:
    a, b = await scene.meet()
    scene.says = []
    a.answers.append(MovedError(f"{SLOT} b:2"))
    assert await scene.wire.submit(("INCR", LOW)) == "b"
    assert await scene.wire.submit(("INCR", LOW)) == "b"
    assert (len(a.heard), len(b.heard)) == (1, 2)


async def test_asking_stands_right_before_the_command_and_is_not_remembered(scene: Scene) -> None:
    a, b = await scene.meet()
    a.answers.append(AskError(f"{SLOT} b:2"))
    sent = [scene.wire.submit(("INCR", LOW)), *(scene.wire.submit(("GET", HIGH)) for _ in range(3))]
    assert await asyncio.gather(*sent) == ["b"] * 4
    at = b.heard.index(("ASKING",))
    assert b.heard[at + 1] == ("INCR", LOW)
    assert await scene.wire.submit(("INCR", LOW)) == "a"


@pytest.mark.parametrize(
    "refusal",
    [
        TryAgainError("Multiple keys request during rehashing of slot"),
        ClusterDownError("The cluster is down"),
        BusyLoadingError("Redis is loading the dataset in memory"),
        ReadOnlyError("You can't write against a read only replica."),
        ResponseError("Error running script: @user_script:1: -READONLY You can't write against a read only replica."),
    ],
)
async def test_a_refusal_that_passes_is_sat_out(scene: Scene, refusal: RedisError) -> None:
    a, _ = await scene.meet()
    a.answers.extend([refusal, refusal])
    assert await scene.wire.submit(("INCR", LOW)) == "a"
    assert len(a.heard) == 3


async def test_who_has_taken_over_is_found_after_a_refusal(scene: Scene) -> None:
    a, b = await scene.meet()
    scene.says = [[0, 16383, [b"b", 2]]]
    a.answers.append(ClusterDownError("The cluster is down"))
    assert await scene.wire.submit(("INCR", LOW)) == "b"
    assert b.heard == [("INCR", LOW)]


async def test_two_nodes_that_send_to_each_other_do_not_do_so_for_ever(scene: Scene) -> None:
    a, b = await scene.meet()
    a.answers.extend(MovedError(f"{SLOT} b:2") for _ in range(50))
    b.answers.extend(MovedError(f"{SLOT} a:1") for _ in range(50))
    with pytest.raises(ClusterDownError, match=rf"slot {SLOT} was not found in 12 tries"):
        await scene.wire.submit(("INCR", LOW))
    assert len(a.heard) + len(b.heard) == 13


async def test_an_error_of_the_command_itself_is_the_callers(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.answers.append(ResponseError("WRONGTYPE"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await scene.wire.submit(("INCR", LOW))
    assert len(a.heard) == 1


async def test_a_lost_connection_is_the_callers_and_makes_the_wire_look(scene: Scene) -> None:
    """Nobody can tell whether the command was carried out, so it is not sent again here."""
    a, _ = await scene.meet()
    looks = scene.looks
    scene.says = [[0, 16383, [b"b", 2]]]
    a.answers.append(ConnectionLost("gone"))
    with pytest.raises(ConnectionLost, match="gone"):
        await scene.wire.submit(("INCR", LOW))
    await asyncio.wait_for(a.closed.wait(), 10)
    assert scene.looks > looks
    assert await scene.wire.submit(("INCR", LOW)) == "b"


async def test_a_node_that_has_left_may_still_answer_what_is_under_way(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.silent = True
    under_way = scene.wire.submit(("INCR", LOW))
    scene.says = [[0, 16383, [b"b", 2]]]
    await scene.wire.look()
    assert await scene.wire.submit(("INCR", LOW)) == "b"
    assert not a.closed.is_set()
    a.unanswered[0].set_result("late")
    assert await under_way == "late"
    await asyncio.wait_for(a.closed.wait(), 10)


async def test_what_a_silent_node_does_not_answer_is_given_up_once_another_serves(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is gone, and nobody closes the connection."""
    monkeypatch.setattr(wire, "_SILENCE", 0.01)
    monkeypatch.setattr(wire, "_FAREWELL", 0.01)
    await scene.wire.open()
    a, _ = await scene.meet()
    a.silent = True
    sent = scene.wire.submit(("INCR", LOW))
    scene.says = [[0, 16383, [b"b", 2]]]
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(sent, 10)
    assert a.closed.is_set()
    assert await scene.wire.submit(("INCR", LOW)) == "b"


async def test_a_caller_who_gives_up_takes_the_command_back(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.silent = True
    sent = scene.wire.submit(("INCR", LOW))
    sent.cancel()
    await asyncio.wait([sent])
    assert a.unanswered[0].cancelled()


async def test_a_slot_that_nobody_serves_is_waited_for(scene: Scene) -> None:
    scene.says = [[8192, 16383, [b"b", 2]]]
    await scene.wire.look()
    sent = scene.wire.submit(("GET", LOW))
    await asyncio.sleep(0)
    scene.says = [[0, 16383, [b"b", 2]]]
    assert await sent == "b"


async def test_closing_fails_whoever_still_waits(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.answers.append(TryAgainError("under way"))
    waits = scene.wire.submit(("GET", LOW))
    await asyncio.sleep(0)
    await scene.wire.close()
    for future in (waits, scene.wire.submit(("GET", LOW)), scene.wire.submit_to(A, ("PING",))):
        with pytest.raises(ConnectionLost, match="closed"):
            await future

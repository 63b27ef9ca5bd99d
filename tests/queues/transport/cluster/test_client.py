"""The cluster client against scripted nodes: redirections, transient refusals, nodes that leave."""

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
from perdure.queues.transport.cluster.client import ClusterConnection, ClusterTimings
from perdure.queues.transport.cluster.topology import Topology
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
TIMINGS = ClusterTimings()


class ScriptedConnection:
    """A scripted connection to a node: returns the prepared answers, then its own name; nothing while it is silent."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.answers: deque[Any] = deque()
        self.commands: list[Command] = []
        self.unanswered: list[asyncio.Future[Any]] = []
        self.silent = False
        self.closed = asyncio.Event()

    def submit(self, command: Command) -> asyncio.Future[Any]:
        self.commands.append(command)
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
    """Two nodes that share the slots, and a client. `says` is the next reply to CLUSTER SLOTS."""

    def __init__(self, timings: ClusterTimings = TIMINGS) -> None:
        self.says: list[Any] = [[0, 8191, [b"a", 1]], [8192, 16383, [b"b", 2]]]
        self.dialled: list[ScriptedConnection] = []
        self.discoveries = 0
        address = Address.parse("redis+cluster://a:1,b:2", data_dir=Path)
        self.client = ClusterConnection(address, self.dial, discover=self.discover, timings=timings)

    def dial(self, node: Node) -> ScriptedConnection:
        self.dialled.append(ScriptedConnection(node))
        return self.dialled[-1]

    def discover(self, _address: Address, nodes: Iterable[Node], *, timeout: float, check: bool = False) -> Topology:
        self.discoveries += 1
        if not self.says:
            raise Unavailable("no node answers")
        return Topology.read(self.says, next(iter(nodes)))

    def node(self, host: str) -> ScriptedConnection:
        return next(found for found in self.dialled if found.node.host == host)

    async def meet(self) -> tuple[ScriptedConnection, ScriptedConnection]:
        """Return both nodes after each has answered once."""
        await asyncio.gather(self.client.submit(("GET", LOW)), self.client.submit(("GET", HIGH)))
        a, b = self.node("a"), self.node("b")
        a.commands.clear()
        b.commands.clear()
        return a, b


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.client.open()
    yield scene
    await scene.client.close()


async def test_each_command_goes_to_the_node_of_its_key(scene: Scene) -> None:
    assert scene.dialled == []
    assert await asyncio.gather(*(scene.client.submit(("GET", key)) for key in (LOW, HIGH, LOW))) == ["a", "b", "a"]
    assert await scene.client.submit(("TIME",), node_of=HIGH) == "b"
    assert len(scene.dialled) == 2


async def test_a_moved_slot_is_followed_and_remembered(scene: Scene) -> None:
    a, b = await scene.meet()
    scene.says = []
    a.answers.append(MovedError(f"{SLOT} b:2"))
    assert await scene.client.submit(("INCR", LOW)) == "b"
    assert await scene.client.submit(("INCR", LOW)) == "b"
    assert (len(a.commands), len(b.commands)) == (1, 2)


async def test_asking_precedes_the_command_and_does_not_change_the_topology(scene: Scene) -> None:
    a, b = await scene.meet()
    a.answers.append(AskError(f"{SLOT} b:2"))
    sent = [scene.client.submit(("INCR", LOW)), *(scene.client.submit(("GET", HIGH)) for _ in range(3))]
    assert await asyncio.gather(*sent) == ["b"] * 4
    at = b.commands.index(("ASKING",))
    assert b.commands[at + 1] == ("INCR", LOW)
    assert await scene.client.submit(("INCR", LOW)) == "a"


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
async def test_a_command_is_repeated_after_a_transient_refusal(scene: Scene, refusal: RedisError) -> None:
    a, _ = await scene.meet()
    a.answers.extend([refusal, refusal])
    assert await scene.client.submit(("INCR", LOW)) == "a"
    assert len(a.commands) == 3


async def test_the_new_primary_is_found_after_a_refusal(scene: Scene) -> None:
    a, b = await scene.meet()
    scene.says = [[0, 16383, [b"b", 2]]]
    a.answers.append(ClusterDownError("The cluster is down"))
    assert await scene.client.submit(("INCR", LOW)) == "b"
    assert b.commands == [("INCR", LOW)]


async def test_redirections_between_two_nodes_end_with_an_error(scene: Scene) -> None:
    a, b = await scene.meet()
    a.answers.extend(MovedError(f"{SLOT} b:2") for _ in range(50))
    b.answers.extend(MovedError(f"{SLOT} a:1") for _ in range(50))
    with pytest.raises(ClusterDownError, match=rf"slot {SLOT} was not found in 12 attempts"):
        await scene.client.submit(("INCR", LOW))
    assert len(a.commands) + len(b.commands) == 13


async def test_an_error_of_the_command_is_raised_to_its_caller(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.answers.append(ResponseError("WRONGTYPE"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await scene.client.submit(("INCR", LOW))
    assert len(a.commands) == 1


async def test_a_lost_connection_fails_the_command_and_starts_a_discovery(scene: Scene) -> None:
    """The command may have been executed, so it is not sent again here."""
    a, _ = await scene.meet()
    discoveries = scene.discoveries
    scene.says = [[0, 16383, [b"b", 2]]]
    a.answers.append(ConnectionLost("gone"))
    with pytest.raises(ConnectionLost, match="gone"):
        await scene.client.submit(("INCR", LOW))
    await asyncio.wait_for(a.closed.wait(), 10)
    assert scene.discoveries > discoveries
    assert await scene.client.submit(("INCR", LOW)) == "b"


async def test_a_node_that_has_left_may_answer_outstanding_commands(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.silent = True
    outstanding = scene.client.submit(("INCR", LOW))
    scene.says = [[0, 16383, [b"b", 2]]]
    await scene.client.refresh()
    assert await scene.client.submit(("INCR", LOW)) == "b"
    assert not a.closed.is_set()
    a.unanswered[0].set_result("late")
    assert await outstanding == "late"
    await asyncio.wait_for(a.closed.wait(), 10)


async def test_commands_of_a_silent_node_fail_once_it_is_replaced() -> None:
    """Its host is gone, and the connection stays open."""
    scene = Scene(ClusterTimings(silence=0.01, drain=0.01))
    await scene.client.open()
    a, _ = await scene.meet()
    a.silent = True
    sent = scene.client.submit(("INCR", LOW))
    scene.says = [[0, 16383, [b"b", 2]]]
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(sent, 10)
    assert a.closed.is_set()
    assert await scene.client.submit(("INCR", LOW)) == "b"
    await scene.client.close()


async def test_a_cancelled_caller_withdraws_its_command(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.silent = True
    sent = scene.client.submit(("INCR", LOW))
    sent.cancel()
    await asyncio.wait([sent])
    assert a.unanswered[0].cancelled()


async def test_a_command_waits_for_a_slot_without_node(scene: Scene) -> None:
    scene.says = [[8192, 16383, [b"b", 2]]]
    await scene.client.refresh()
    sent = scene.client.submit(("GET", LOW))
    await asyncio.sleep(0)
    scene.says = [[0, 16383, [b"b", 2]]]
    assert await sent == "b"


async def test_close_fails_commands_that_wait(scene: Scene) -> None:
    a, _ = await scene.meet()
    a.answers.append(TryAgainError("under way"))
    waits = scene.client.submit(("GET", LOW))
    await asyncio.sleep(0)
    await scene.client.close()
    for future in (waits, scene.client.submit(("GET", LOW)), scene.client.submit_to(A, ("PING",))):
        with pytest.raises(ConnectionLost, match="closed"):
            await future

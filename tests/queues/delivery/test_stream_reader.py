"""Reads of several partitions of a cluster: an unavailable node does not delay the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Partition, Unavailable
from perdure.queues.delivery.stream_reader import PerNodeReader, Stream
from perdure.queues.transport.blocking import BlockingConnection
from perdure.queues.transport.pipelining import Argument

BOUND = 30.0


class Node:
    """A reader that fails while its node is unavailable, and otherwise returns its entries or blocks."""

    def __init__(self, partition: Partition) -> None:
        self.away = False
        self.asked = 0
        self.waits = 0
        self.entries: list[tuple[bytes, list[bytes] | None]] = []
        self._stream = partition.ready.encode()
        self._interrupted = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self, *command: str | int) -> list[Stream] | None:
        self.asked += 1
        await self.answers.wait()
        if self.away:
            raise Unavailable("the node is away")
        if not self.entries and "BLOCK" in command:
            self.waits = int(command[command.index("BLOCK") + 1])
            self._interrupted.clear()
            await self._interrupted.wait()
        entries, self.entries = self.entries, []
        return [(self._stream, entries)] if entries else None

    async def interrupt(self) -> None:
        self._interrupted.set()

    async def close(self) -> None: ...


class Cluster(Gateway):
    """A gateway whose readers are nodes of the test."""

    def __init__(self, nodes: dict[str | None, Any]) -> None:
        self._nodes = nodes

    def blocking_connection(self, key: str | None = None) -> BlockingConnection:
        reader: BlockingConnection = self._nodes[key]
        return reader

    async def command_now(self, *command: Argument) -> Any:
        (node,) = (self._nodes[part] for part in command if part in self._nodes)
        return await node.read(*command)


PARTITIONS = [Namespace("ns").partition("default", index) for index in range(2)]
ENTRY: tuple[bytes, list[bytes] | None] = (b"1-1", [b"env", b"x"])


@pytest.fixture
def nodes() -> list[Node]:
    return [Node(partition) for partition in PARTITIONS]


@pytest.fixture
def reading(nodes: list[Node]) -> PerNodeReader:
    return PerNodeReader(
        Cluster({partition.ready: node for partition, node in zip(PARTITIONS, nodes, strict=True)}), "a"
    )


async def read(reading: PerNodeReader, block: float | None = BOUND) -> list[Stream]:
    return await asyncio.wait_for(reading.read(PARTITIONS, 1, block), BOUND)


async def test_messages_of_available_nodes_are_read(reading: PerNodeReader, nodes: list[Node]) -> None:
    nodes[0].away = True
    nodes[1].entries = [ENTRY]
    assert await read(reading) == [(PARTITIONS[1].ready.encode(), [ENTRY])]
    assert [reading.is_away(partition) for partition in PARTITIONS] == [True, False]


async def test_an_unavailable_node_is_not_read_each_time(reading: PerNodeReader, nodes: list[Node]) -> None:
    nodes[0].away = True
    for _ in range(50):
        await read(reading, None)
    assert nodes[1].asked == 50
    assert nodes[0].asked < 10


async def test_a_returned_node_is_reported_once(reading: PerNodeReader, nodes: list[Node]) -> None:
    nodes[0].away = True
    await read(reading, None)
    assert reading.returned() == []
    nodes[0].away = False
    nodes[0].entries = [ENTRY]
    found: list[Stream] = []
    while not found:
        await asyncio.sleep(0.01)
        found = await read(reading, None)
    assert found == [(PARTITIONS[0].ready.encode(), [ENTRY])]
    assert reading.returned() == [PARTITIONS[0]]
    assert reading.returned() == []


async def test_a_blocking_read_ends_when_an_unavailable_node_is_due(reading: PerNodeReader, nodes: list[Node]) -> None:
    """Otherwise the reader would notice a returned node only after a message of another node."""
    nodes[0].away = True
    await read(reading, None)
    waiting = asyncio.create_task(read(reading, 60.0))
    while not nodes[1].waits:  # noqa: ASYNC110 - the node of the test has no event
        await asyncio.sleep(0.001)
    assert 0 < nodes[1].waits <= 1000
    await nodes[1].interrupt()
    assert await waiting == []


async def test_a_read_without_available_nodes_fails(reading: PerNodeReader, nodes: list[Node]) -> None:
    for node in nodes:
        node.away = True
    for _ in range(3):
        with pytest.raises(Unavailable, match="away"):
            await read(reading)


async def test_a_node_marked_unavailable_is_not_read(reading: PerNodeReader, nodes: list[Node]) -> None:
    assert reading.mark_unavailable(PARTITIONS[0], Unavailable("gone"))
    await read(reading, None)
    assert [node.asked for node in nodes] == [0, 1]


async def test_a_read_of_unavailable_nodes_only_returns_nothing(reading: PerNodeReader, nodes: list[Node]) -> None:
    reading.keep(PARTITIONS)
    nodes[0].away = True
    assert await reading.read(PARTITIONS[:1], 1, None) == []
    assert await reading.read(PARTITIONS[:1], 1, BOUND) == []
    assert reading.rests(PARTITIONS[0])
    assert not reading.rests(PARTITIONS[1])


async def test_a_late_reply_delays_no_other_node_and_is_not_lost(reading: PerNodeReader, nodes: list[Node]) -> None:
    """While the client looks for a slot, the server may still run the command and return messages."""
    nodes[0].answers.clear()
    nodes[0].entries = [ENTRY]
    nodes[1].entries = [ENTRY]
    assert await read(reading, None) == [(PARTITIONS[1].ready.encode(), [ENTRY])]
    assert reading.is_away(PARTITIONS[0])
    nodes[0].answers.set()
    found: list[Stream] = []
    while not found:
        await asyncio.sleep(0.01)
        found = await read(reading, None)
    assert found == [(PARTITIONS[0].ready.encode(), [ENTRY])]
    assert nodes[0].asked == 1  # no second read was sent
    assert reading.returned() == [PARTITIONS[0]]
    await reading.close()

"""Reading several partitions of a cluster: one whose node is away holds up no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure.queues import BlockingConnection, Gateway, Namespace, Partition, Unavailable
from perdure.queues.delivery.stream_reader import PerNodeReader, Stream
from perdure.queues.transport.gateway import Argument

BOUND = 10.0


class Node:
    """A reader that fails while its node is away, else brings what there is or waits until it is interrupted."""

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
    """A gateway whose readers are such nodes."""

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


async def test_what_the_others_have_is_read(reading: PerNodeReader, nodes: list[Node]) -> None:
    nodes[0].away = True
    nodes[1].entries = [ENTRY]
    assert await read(reading) == [(PARTITIONS[1].ready.encode(), [ENTRY])]
    assert [reading.is_away(partition) for partition in PARTITIONS] == [True, False]


async def test_one_that_is_away_is_not_asked_at_every_turn(reading: PerNodeReader, nodes: list[Node]) -> None:
    nodes[0].away = True
    for _ in range(50):
        await read(reading, None)
    assert nodes[1].asked == 50
    assert nodes[0].asked < 10


async def test_one_that_has_returned_is_told_once(reading: PerNodeReader, nodes: list[Node]) -> None:
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


async def test_a_read_waits_no_longer_than_one_is_left_out(reading: PerNodeReader, nodes: list[Node]) -> None:
    """Else nobody would notice a node's return before a message comes to another."""
    nodes[0].away = True
    await read(reading, None)
    waiting = asyncio.create_task(read(reading, 60.0))
    while not nodes[1].waits:  # noqa: ASYNC110 - the node of the test has no more to tell
        await asyncio.sleep(0.001)
    assert 0 < nodes[1].waits <= 1000
    await nodes[1].interrupt()
    assert await waiting == []


async def test_where_all_are_away_the_read_says_so(reading: PerNodeReader, nodes: list[Node]) -> None:
    for node in nodes:
        node.away = True
    for _ in range(3):
        with pytest.raises(Unavailable, match="away"):
            await read(reading)


async def test_one_that_could_not_be_reached_otherwise_is_left_out_too(
    reading: PerNodeReader, nodes: list[Node]
) -> None:
    assert reading.mark_unavailable(PARTITIONS[0], Unavailable("gone"))
    await read(reading, None)
    assert [node.asked for node in nodes] == [0, 1]


async def test_where_only_those_asked_are_away_it_is_others_turn(reading: PerNodeReader, nodes: list[Node]) -> None:
    reading.keep(PARTITIONS)
    nodes[0].away = True
    assert await reading.read(PARTITIONS[:1], 1, None) == []
    assert await reading.read(PARTITIONS[:1], 1, BOUND) == []
    assert reading.rests(PARTITIONS[0])
    assert not reading.rests(PARTITIONS[1])


async def test_an_answer_that_comes_late_holds_up_nobody_and_is_not_lost(
    reading: PerNodeReader, nodes: list[Node]
) -> None:
    """A slot is being sought: the command may yet be carried out, and bring messages."""
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
    assert nodes[0].asked == 1  # it was not asked again in the meantime
    assert reading.returned() == [PARTITIONS[0]]
    await reading.close()

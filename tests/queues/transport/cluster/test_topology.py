"""The topology of a cluster: replies to CLUSTER SLOTS, and redirections."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import Unavailable
from perdure.queues import Address
from perdure.queues.transport.address import Node
from perdure.queues.transport.cluster.topology import Topology, discover_topology
from redis.exceptions import AskError, MovedError

ASKED = Node("asked", 7000)
A, B, REPLICA = Node("10.0.0.1", 7001), Node("10.0.0.2", 7002), Node("10.0.0.3", 7003)
REPLY = [
    [0, 99, [b"10.0.0.1", 7001, b"id-a"], [b"10.0.0.3", 7003, b"id-c"]],
    [200, 16383, [b"10.0.0.2", 7002, b"id-b", [b"hostname", b"b"]]],
]


def test_each_slot_has_its_primary() -> None:
    topology = Topology.read(REPLY, ASKED)
    assert [topology.serving(slot) for slot in (0, 99, 100, 199, 200, 16383)] == [A, A, None, None, B, B]
    assert topology.primaries == {A, B}
    assert topology.nodes == {A, B, REPLICA}


def test_a_command_without_key_goes_to_a_node_with_slots() -> None:
    assert Topology.read(REPLY, ASKED).serving(None) == A
    assert Topology.unknown().serving(None) is None


@pytest.mark.parametrize("nameless", [b"", None])
def test_a_node_without_a_name_has_the_host_of_the_asked_node(nameless: bytes | None) -> None:
    """The name is empty before Redis 7, and null since."""
    assert Topology.read([[0, 16383, [nameless, 7001, b"id"]]], ASKED).serving(5) == Node("asked", 7001)


def test_a_node_with_an_unknown_name_is_unreachable() -> None:
    assert Topology.read([[0, 16383, [b"?", 7001, b"id"]]], ASKED).primaries == set()


@pytest.mark.parametrize(
    ("where", "node"),
    [("10.0.0.9:7009", Node("10.0.0.9", 7009)), (":7009", Node("asked", 7009)), ("::1:7009", Node("::1", 7009))],
)
def test_a_redirection_moves_the_slot(where: str, node: Node) -> None:
    topology = Topology.read(REPLY, ASKED)
    assert topology.moved(MovedError(f"50 {where}"), ASKED) == node
    assert (topology.serving(49), topology.serving(50), topology.serving(51)) == (A, node, A)
    assert node in topology.primaries


def test_an_address_of_version_6_is_written_in_brackets() -> None:
    assert (str(Node("::1", 1)), str(Node("host", 2))) == ("[::1]:1", "host:2")


def test_unreachable_nodes_are_named_one_by_one() -> None:
    address = Address.parse("redis+cluster://127.0.0.1:1,127.0.0.1:2", data_dir=Path)
    with pytest.raises(Unavailable, match=r"cannot reach any node of .*; 127\.0\.0\.1:2: "):
        discover_topology(address, address.nodes, timeout=1.0)


def test_ask_does_not_move_the_slot() -> None:
    """The errors are related in the client library, and must not be confused."""
    assert issubclass(MovedError, AskError)
